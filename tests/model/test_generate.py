"""Generation: the cache changes nothing, rows do not touch each other, draws are what they should be, text is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tapernorm.cli import continuation
from tapernorm.cli.continuation import Transcript, continue_text
from tapernorm.config.options import Config, TokenizerConfig
from tapernorm.config.programs import GenerateConfig
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError
from tapernorm.data.tokenizer import build_tokenizer
from tapernorm.method.gate import Phase
from tapernorm.model.decoder import Decoder, build_model
from tapernorm.model.fold import fold
from tapernorm.model.generate import NotFinite, candidates, choose, generate, window_start
from tapernorm.training import checkpoint as checkpoints
from tests.conftest import NORMS, TINY, merge

ROOT = Path(__file__).parents[2]
VOCAB = 97
LENGTHS = (1, 5, 17)
GATES = {Phase.NORMALIZED: 1.0, Phase.TAPERING: 0.4, Phase.TAPERED: 0.0}
MODES = [("baseline", Phase.NORMALIZED)] + [
    (norm, phase) for norm in ("internal_taper", "all_taper") for phase in Phase
]


def model_of(norm: str, family: str = "rms", phase: Phase = Phase.TAPERED, n_ctx: int = 32) -> Decoder:
    """A float64 model with random gains, biases and scalars, and logits of order one."""
    torch.manual_seed(3)
    tree = merge(TINY, {"norm": NORMS[norm], "model": {"norm_family": family, "n_ctx": n_ctx}})
    model = build_model(resolve(build(tree), VOCAB)).double()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
        else:
            parameter.data *= 10
    for taper in model.gated_norms().values():
        taper.c.fill_(0.8)
    model.set_gate(GATES[phase], phase)
    return model


def ids_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def padded(texts: list[list[int]]) -> Tensor:
    longest = max(map(len, texts))
    return torch.tensor([text + [0] * (longest - len(text)) for text in texts])


# ----------------------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("family", ["rms", "layer"])
@pytest.mark.parametrize(("norm", "phase"), MODES)
@torch.no_grad()
def test_cached_decode_is_the_full_forward_at_every_position(norm: str, phase: Phase, family: str, fixed: bool) -> None:
    unfolded = model_of(norm, family, phase)
    texts = ids_of(*(length + 10 for length in LENGTHS))
    for model in [unfolded, fold(unfolded)] if norm == "baseline" or phase is Phase.TAPERED else [unfolded]:
        full = [model(torch.tensor([text]))[0] for text in texts]
        cache = model.new_cache(len(texts), 27, fixed=fixed)
        prompts = [text[:length] for text, length in zip(texts, LENGTHS, strict=True)]
        logits = model.readout(model.trunk(padded(prompts), cache=cache))
        cache.truncate(LENGTHS)
        worst = max((logits[row, :n] - full[row][:n]).abs().max().item() for row, n in enumerate(LENGTHS))
        for step in range(10):
            new = torch.tensor([[text[n + step]] for text, n in zip(texts, LENGTHS, strict=True)])
            logits = model.readout(model.trunk(new, cache=cache))[:, 0]
            for row, n in enumerate(LENGTHS):
                worst = max(worst, (logits[row] - full[row][n + step]).abs().max().item())
        assert full[0].abs().max() > 0.5
        assert worst < 1e-10
        with pytest.raises(ValueError, match="no room for 28 tokens"):
            model.trunk(new, cache=cache)


@torch.no_grad()
def test_a_text_may_come_in_pieces_of_any_size() -> None:
    model = model_of("all_taper")
    tokens = torch.tensor(ids_of(30, 30))
    for pieces in ([30], [1] * 30, [7, 1, 12, 10]):
        cache = model.new_cache(2)
        logits = torch.cat([model.readout(model.trunk(part, cache=cache)) for part in tokens.split(pieces, 1)], dim=1)
        assert (logits - model(tokens)).abs().max() < 1e-10
    # Rows of unequal lengths, continued by several tokens at once.
    cache = model.new_cache(2)
    model.trunk(tokens[:, :12], cache=cache)
    cache.truncate([12, 4])
    h = model.trunk(torch.stack([tokens[0, 12:20], tokens[1, 4:12]]), cache=cache)
    expected = model.trunk(tokens)
    assert (h - torch.stack([expected[0, 12:20], expected[1, 4:12]])).abs().max() < 1e-10


@pytest.mark.parametrize("fixed", [False, True])
def test_decoding_where_gradients_are_on_keeps_none_in_the_cache(fixed: bool) -> None:
    model = model_of("baseline")
    cache = model.new_cache(1, fixed=fixed)
    tokens = torch.tensor(ids_of(9))
    h = torch.cat([model.trunk(part, cache=cache) for part in tokens.split([5, 1, 3], 1)], dim=1)
    assert (h - model.trunk(tokens)).abs().max() < 1e-10
    assert h.requires_grad and not cache.store.requires_grad


@torch.no_grad()
def test_a_prompt_is_read_by_the_very_forward_of_training() -> None:
    model = model_of("internal_taper").float()
    tokens = torch.tensor(ids_of(20, 20))
    assert torch.equal(model.trunk(tokens, cache=model.new_cache(2)), model.trunk(tokens))


@torch.no_grad()
def test_the_cache_is_no_state_of_the_model_and_follows_its_precision() -> None:
    model = model_of("baseline").float()
    before = list(model.state_dict())
    assert model.new_cache(1, 4).store.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = model.new_cache(1, 4)
        h = model.trunk(torch.tensor([[1, 2]]), cache=cache)
        h = torch.cat([h, model.trunk(torch.tensor([[3]]), cache=cache)], dim=1)
        assert cache.store.dtype == torch.bfloat16
        torch.testing.assert_close(h, model.trunk(torch.tensor([[1, 2, 3]])), rtol=0.05, atol=0.02)
    assert list(model.state_dict()) == before
    with pytest.raises(ValueError, match="33 slots: the model has 32 positions"):
        model.new_cache(1, 33)


def test_padding_brings_nothing_foreign_into_a_row() -> None:
    model = model_of("all_taper")
    texts = [[5, 6, 7], [8]]
    model.head = torch.nn.Linear(32, VOCAB, bias=False).double()
    model.head.weight.data[0] = 0.0  # so that id 0 is not chosen
    expected = generate(model, texts, 5, temperature=0)
    model.embed.weight.data[0] = torch.nan  # the usual padding, were it read
    assert generate(model, texts, 5, temperature=0) == expected


# ----------------------------------------------------------------------------------------------- rows, limit, ends


@pytest.mark.parametrize("norm", ["baseline", "all_taper"])
def test_P35_the_cache_changes_no_token_up_to_and_past_the_limit(norm: str) -> None:
    model = model_of(norm, n_ctx=12)
    texts = ids_of(*range(1, 28))
    on = generate(model, texts, 20, temperature=0)
    assert on == generate(model, texts, 20, temperature=0, cache=False)
    assert all(len(row) == 20 for row in on)
    assert len({tuple(row[-6:]) for row in on}) > 5  # the model does not just repeat one thing
    for text, row in zip(texts, on, strict=True):
        ids = list(text)
        for token in row:  # the policy, spelled out
            window = ids[window_start(len(ids), 12) :]
            assert token == model(torch.tensor([window]))[0, -1].argmax().item()
            ids.append(token)


def test_the_window_is_whole_up_to_the_limit_and_then_moves_by_halves() -> None:
    assert [window_start(n, 8) for n in range(1, 18)] == [0] * 8 + [4] * 4 + [8] * 4 + [12]
    assert [n - window_start(n, 5) for n in range(1, 12)] == [1, 2, 3, 4, 5, 4, 5, 4, 5, 4, 5]
    assert [window_start(n, 1) for n in range(1, 4)] == [0, 1, 2]
    model = model_of("all_taper", n_ctx=1)
    assert len(generate(model, ids_of(1, 3), 4)[1]) == 4


def test_a_continued_continuation_is_the_longer_one() -> None:
    model = model_of("internal_taper", n_ctx=12)
    (text,) = ids_of(3)
    long = generate(model, [text], 40, temperature=0)[0]
    for cut in (1, 8, 9, 10, 25):
        assert generate(model, [text + long[:cut]], 40 - cut, temperature=0)[0] == long[cut:]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_P36_a_row_ends_at_its_own_end_of_text_and_disturbs_no_other(temperature: float, cache: bool) -> None:
    model = model_of("all_taper", n_ctx=16)
    texts = ids_of(1, 5, 17, 5)
    keys: dict[str, Any] = {"temperature": temperature, "seed": 4, "cache": cache}
    free = generate(model, texts, 24, **keys)
    eot = free[1][3]  # so row 1 ends after at most three tokens
    heard: list[tuple[int, int | None]] = []
    rows = generate(model, texts, 24, eot=eot, on_token=lambda row, token: heard.append((row, token)), **keys)
    assert rows == [row[: row.index(eot)] if eot in row else row for row in free]
    assert len(rows[1]) <= 3 and max(map(len, rows)) == 24
    assert generate(model, texts, 24, eot=eot, ignore_eot=True, **keys) == free
    for row, ids in enumerate(rows):
        assert [token for place, token in heard if place == row] == [*ids, None]
    # Alone, a row gives what it gave in company; only a row's number enters its draws.
    assert generate(model, texts[:1], 24, eot=eot, **keys)[0] == rows[0]
    others = [texts[0], texts[3], texts[2]]
    assert generate(model, others, 24, eot=eot, **keys)[2] == rows[2]


@pytest.mark.parametrize("n_row", [1, 3])
def test_P36_generation_stops_when_the_last_row_has_ended(n_row: int) -> None:
    model = model_of("all_taper")
    texts = ids_of(5) * n_row
    free = generate(model, texts, 12, temperature=0)
    rows = generate(model, texts, 12, temperature=0, eot=free[0][3])
    assert rows == [row[: row.index(free[0][3])] for row in free]


def test_seeds() -> None:
    model = model_of("baseline")
    texts = ids_of(4) * 3
    rows = generate(model, texts, 12, seed=1)
    before = torch.get_rng_state()
    assert rows == generate(model, texts, 12, seed=1) == generate(model, torch.tensor(texts), 12, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert rows != generate(model, texts, 12, seed=2)
    assert len(set(map(tuple, rows))) == 3  # the same prompt, but draws of its own in each row
    assert [row[:5] for row in rows] == generate(model, texts, 5, seed=1)
    assert generate(model, texts, 12, seed=1, top_k=1) == generate(model, texts, 12, temperature=0)


def test_the_models_mode_is_restored_and_faults_are_one_line() -> None:
    model = model_of("baseline").train()

    def interrupt(row: int, token: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, [[1]], 3, on_token=interrupt)
    assert model.training
    assert generate(model, [], 3) == [] and generate(model, [[1], [2, 3]], 0) == [[], []]
    cases: list[tuple[list[list[int]], dict[str, Any], str]] = [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, VOCAB]], {}, "outside the vocabulary of 97"),
        ([[-1]], {}, "outside the vocabulary"),
        ([[1]], {"max_tokens": -1}, "max_tokens=-1"),
        ([[1]], {"temperature": -0.1}, "temperature=-0.1"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan"),
        ([[1]], {"top_k": 0}, "top_k=0"),
        ([[1]], {"top_p": 0.0}, "top_p=0.0"),
        ([[1]], {"top_p": 1.1}, "top_p=1.1"),
    ]
    for prompts, keys, message in cases:
        with pytest.raises(ConfigError, match=message) as fault:
            generate(model, prompts, **{"max_tokens": 3, **keys})
        assert "\n" not in str(fault.value)
    model.embed.weight.data[5] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(NotFinite):
            generate(model, [[5]], 3, temperature=temperature)


# ---------------------------------------------------------------------------------------------------------------- draws

P = torch.tensor([0.1, 0.4, 0.2, 0.3])


def drawn(temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, n: int = 1000) -> list[float]:
    """Share of each id of the distribution P over draws that are spread evenly."""
    draws = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    counts = Counter(choose(P.log().expand(n, 4), draws, temperature, top_k, top_p).tolist())
    return [counts[token] / n for token in range(4)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 9, "top_p": 1.0}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"temperature": 1e-30}, [0, 1, 0, 0]),
        ({"temperature": 1e-300}, [0, 1, 0, 0]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 3}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.91}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 3, "top_p": 0.75}, [0, 4 / 7, 0, 3 / 7]),  # of what top_k left, the two hold 7/9
        ({"temperature": 0.5, "top_p": 0.6}, [0, 16 / 25, 0, 9 / 25]),  # of the tempered distribution
    ],
)
def test_top_k_and_top_p_of_a_known_distribution(keys: dict[str, Any], expected: list[float]) -> None:
    assert drawn(**keys) == pytest.approx(expected, abs=2e-3)


def test_the_ends_of_the_draws_and_impossible_ids() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    for keys in ({}, {"top_k": 4}, {"top_p": 0.99}, {"top_k": 5, "top_p": 0.5}):
        assert choose(logits, torch.zeros(1, dtype=torch.float64), 1.0, **keys)[0] in (1, 3)
        assert choose(logits, last, 1.0, **keys)[0] in (1, 3)
    p, ids = candidates(logits, 1.0, top_k=2)
    assert ids is not None and ids.tolist() == [[3, 1]]
    assert (p / p.sum()).flatten().tolist() == pytest.approx([0.7310586, 0.2689414], abs=1e-6)


# ----------------------------------------------------------------------------------------------------------------- text


def test_incomplete_characters_are_held_back() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(kind="bytes"), None)
    pieces: list[str] = []
    transcript = Transcript(tokenizer, [">"], pieces.append)
    for token in "aé€😀".encode():
        transcript.hear(0, token)
    assert pieces == [">", "a", "é", "€", "😀"]
    transcript.hear(0, 0xE2)  # two of the three bytes of a character that does not come
    transcript.hear(0, 0x82)
    assert pieces[-1] == "😀"
    transcript.hear(0, None)
    assert pieces[-1] == "\ufffd\n"


def test_rows_are_written_one_after_the_other_and_whole() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(kind="bytes"), None)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 257, (50,), generator=generator).tolist() for _ in range(4)]  # broken UTF-8, end of text
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        pieces: list[str] = []
        transcript = Transcript(tokenizer, [f"{row}:" for row in range(4)], pieces.append)
        for place in range(50):
            for row in order:
                transcript.hear(row, rows[row][place])
        for row in order:
            transcript.hear(row, None)
        assert "".join(pieces) == "".join(f"{row}:{tokenizer.decode(ids)}\n" for row, ids in enumerate(rows))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model's run."""
    directory = tmp_path_factory.mktemp("run")
    tokenizer = build_tokenizer(TokenizerConfig(kind="bytes"), None)
    config = resolve(
        build(merge(TINY, {"norm": NORMS["all_taper"], "tokenizer": {"kind": "bytes"}})), tokenizer.n_vocab
    )
    state = build_model(config).state_dict()
    checkpoints.write(
        checkpoints.path_at(directory, 1),
        1,
        model=state,
        training={},
        config=config,
        tokenizer=tokenizer,
        meta={"gate": 1.0, "tokens": 0, "data": "none"},
    )
    return directory


def test_continuations_are_the_same_streamed_or_not(run_dir: Path, said: list[str]) -> None:
    keys: dict[str, Any] = {"checkpoint": str(run_dir), "prompt": "Once", "samples": 3, "max_tokens": 40}
    pieces: list[str] = []
    texts = continue_text(GenerateConfig(**keys, temperature=1.2, device="cpu"), pieces.append)
    whole: list[str] = []
    assert texts == continue_text(GenerateConfig(**keys, temperature=1.2, device="cpu", stream=False), whole.append)
    assert (
        "".join(pieces)
        == "".join(whole)
        == "".join(f"--- {number} of 3\nOnce{text}\n" for number, text in enumerate(texts, 1))
    )
    assert "reads only the newest" in said[0] and "tokens in" in said[1]


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_the_command(run_dir: Path, tmp_path: Path) -> None:
    done = command(f"checkpoint={run_dir}", "prompt='Once, é'", "max_tokens=8", "device=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().startswith("Once, é") and done.stdout.endswith(b"\n")
    assert b" tokens in " in done.stderr
    assert not list(tmp_path.iterdir())
    done = command("--help", cwd=tmp_path)
    assert done.returncode == 0 and b"top_p=null" in done.stdout and b"checkpoint=???" in done.stdout


def test_faults_of_the_command_are_one_line_and_torch_is_not_waited_for(tmp_path: Path) -> None:
    code = (
        "import runpy, sys, json\n"
        "status = {}\n"
        "for arguments in json.loads(sys.argv[2]):\n"
        "    sys.argv = [sys.argv[0], sys.argv[1], sys.argv[2]]\n"
        "    script, keep = sys.argv[1], list(sys.argv)\n"
        "    sys.argv = [script, *arguments]\n"
        "    try: runpy.run_path(script, run_name='__main__')\n"
        "    except SystemExit as stop: print(stop.code)\n"
        "    sys.argv = keep\n"
        "print('torch' in sys.modules)\n"
    )
    faults = [
        ["--help"],
        [],
        ["checkpoint=x", "top_p=2"],
        ["checkpoint=x", "temprature=1"],
        ["top_k=0", "checkpoint=x"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "scripts" / "generate.py"), json.dumps(faults)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines()[-5:] == ["2", "2", "2", "2", "False"], done
    lines = done.stderr.splitlines()
    assert len(lines) == 4 and all(line.startswith("error: ") for line in lines)
    for line, word in zip(lines, ("checkpoint is missing", "top_p=2", "'temperature'", "top_k=0"), strict=True):
        assert word in line


def test_a_model_without_numbers_is_told_in_one_line(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from tapernorm.cli import main

    def fail(config: GenerateConfig) -> None:
        raise NotFinite("no numbers")

    monkeypatch.setattr(continuation, "continue_text", fail)
    settings = SimpleNamespace(runtime=SimpleNamespace(cwd=str(run_dir)))
    monkeypatch.setattr(HydraConfig, "get", staticmethod(lambda: settings))
    with pytest.raises(SystemExit, match="1"):
        main.generate(OmegaConf.create({"checkpoint": "x"}))
    assert capsys.readouterr().err.startswith("error: checkpoint ")


def test_callers_start_with_the_end_of_text(tiny: Callable[..., Config], run_dir: Path) -> None:
    model, _, tokenizer = checkpoints.load_model(checkpoints.find(run_dir))
    rows = generate(model, torch.full((2, 1), tokenizer.eot), 20, eot=tokenizer.eot)
    assert len(rows) == 2 and all(0 <= token < tokenizer.eot for row in rows for token in row)
