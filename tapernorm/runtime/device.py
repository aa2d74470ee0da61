"""Where and in which precision a run computes."""

from __future__ import annotations

import ctypes
import platform
from contextlib import AbstractContextManager, nullcontext

import torch

from tapernorm.config.schema import ConfigError


def pick_device(name: str, key: str = "trainer.device") -> torch.device:
    """'auto' is CUDA, then MPS, then the CPU. Raises ConfigError, naming `key`, for a device that is not there."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        seen = torch.cuda.device_count()
        raise ConfigError(f"{key}={name}: torch sees {seen} CUDA devices; use {key}=auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"{key}=mps: torch sees no MPS device; use {key}=auto or cpu")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """'auto' is bfloat16 on a GPU that computes in it, float32 elsewhere."""
    if name == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Autocast to bfloat16, or nothing for float32: the weights stay in float32 either way."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks instead of returning them to the kernel.

    Logits are tens of MB that come and go every step; fetching fresh pages for them each time costs a sixth to a third
    of a small model's step on a CPU. Numbers are not affected.
    """
    if platform.system() != "Linux":
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**30)
    except (OSError, AttributeError):  # another C library: nothing to tune
        return
