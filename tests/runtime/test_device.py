"""Device and precision: automatic, stated, and clear when asked for what is not there (P28)."""

import pytest
import torch

from tapernorm.config.schema import ConfigError
from tapernorm.runtime.device import autocast, keep_freed_memory, pick_device, pick_dtype


def test_P28_auto_works_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    assert pick_dtype("auto", torch.device("cpu")) is torch.float32


def test_P28_cuda_without_a_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"trainer.device=cuda: torch sees 0 CUDA devices"):
        pick_device("cuda")


def test_bfloat16_is_autocast_over_float32_weights() -> None:
    layer = torch.nn.Linear(4, 4)
    with autocast(torch.device("cpu"), torch.bfloat16):
        assert layer(torch.randn(2, 4)).dtype is torch.bfloat16
    assert layer.weight.dtype is torch.float32
    keep_freed_memory()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_is_chosen() -> None:
    assert pick_device("auto").type == "cuda"
