"""The decode benchmark: arms that compute what they claim, operators, verdicts, and a whole small run."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch

from tapernorm.bench import benchmark as bench
from tapernorm.bench.benchmark import Case, verdict
from tapernorm.bench.decode import Arms, Decoding, build_arms, load_base, operators, place, streamed_bytes
from tapernorm.bench.timing import Ratio
from tapernorm.config.options import ModelConfig
from tapernorm.config.programs import ARMS, BenchmarkConfig
from tapernorm.config.schema import ConfigError
from tapernorm.model.generate import generate

TINY = BenchmarkConfig(
    model=ModelConfig(n_layer=2, n_ctx=64, d_model=32, head_dim=16, init_std=0.3, vocab_size=300),
    prompt_tokens=8,
    new_tokens=4,
    repeats=2,
    placements=2,
    device="cpu",
    peer=False,
    modes=("eager",),
)


@pytest.fixture(scope="module")
def arms() -> Arms:
    return build_arms(load_base(TINY), ARMS)


def test_arms_that_should_compute_the_same_do(arms: Arms) -> None:
    tokens = torch.randint(0, 300, (2, 12))
    logits = {name: model(tokens) for name, model in arms.items()}
    for same in (
        ("baseline", "baseline_again", "baseline_gain_folded"),
        ("internal_taper", "internal_taper_folded"),
        ("all_taper_folded", "no_norms"),  # with c = gamma_t = 1
    ):
        for name in same[1:]:
            torch.testing.assert_close(logits[name], logits[same[0]], rtol=1e-4, atol=1e-4)
    assert (logits["baseline"] - logits["no_norms"]).abs().max() > 1e-2
    assert (logits["baseline"] - logits["internal_taper"]).abs().max() > 1e-2


def test_a_folded_model_runs_the_operators_of_a_model_without_norms(arms: Arms) -> None:
    found = {name: operators(model) for name, model in arms.items()}
    assert found["all_taper_folded"] == found["no_norms"]
    one_norm = len(found["internal_taper_folded"]) - len(found["no_norms"])
    assert one_norm > 0
    assert len(found["baseline_gain_folded"]) - len(found["no_norms"]) == (2 * 2 + 1) * one_norm
    assert found["baseline"] == found["baseline_again"]


def test_decoding_continues_the_prompt_as_generate_does(arms: Arms) -> None:
    prompts = torch.randint(0, 300, (3, 8))
    for name, model in arms.items():
        expected = generate(model, prompts, 1 + bench.WARM_STEPS + 4, temperature=0)
        decoding = Decoding(model, "eager", prompts, 4)
        with torch.inference_mode():
            decoding.token.copy_(torch.tensor([row[:1] for row in expected]))
            assert decoding.decode() > 0
        assert decoding.token.flatten().tolist() == [row[-1] for row in expected], name
        assert decoding.prefill() > 0


def test_streamed_bytes_by_hand(arms: Arms) -> None:
    blocks = 2 * (3 * 32 * 32 + 32 * 32 + 3 * 32 * 88)
    cached = 2 * 2 * 5 * 10 * 32
    assert streamed_bytes(arms["baseline"], 5, 10) == 4 * (blocks + 300 * 32 + 5 * 32 + cached + 5 * 32)
    assert streamed_bytes(arms["no_norms"], 5, 10) == 4 * (blocks + 300 * 32 + cached + 5 * 32)
    half = place(arms["no_norms"], torch.bfloat16, torch.device("cpu"))
    assert streamed_bytes(half, 5, 10) == 2 * (blocks + 300 * 32 + cached + 5 * 32)
    assert half.cos.dtype == torch.float32 and arms["no_norms"].embed.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("speedup", "control", "samples", "expected"),
    [
        ((1.05, 1.02, 1.08), (1.0, 0.99, 1.01), 10, "faster"),
        ((1.05, 1.02, 1.08), (1.0, 0.97, 1.03), 10, "no measurable gain"),  # two equal arms differed as much
        ((1.01, 0.99, 1.03), (1.0, 1.0, 1.0), 10, "no measurable gain"),
        ((0.9, 0.88, 0.92), (1.0, 0.98, 1.02), 10, "slower"),
        ((0.9, 0.88, 0.92), (1.0, 0.98, 1.02), 9, "too few samples"),
    ],
)
def test_P34_a_difference_within_that_of_two_equal_arms_is_none(
    speedup: tuple[float, ...], control: tuple[float, ...], samples: int, expected: str
) -> None:
    assert verdict(Ratio(*speedup), Ratio(*control), samples) == expected


def test_the_control_is_the_pair_of_equal_arms_whatever_the_reference_is() -> None:
    """A control of the reference and the second baseline would find baseline's double time nothing to speak of."""
    times = {"no_norms": 1.0, "baseline": 2.0, "baseline_again": 2.02, "all_taper_folded": 0.9}
    rows = bench._compare({name: [value] * 10 for name, value in times.items()}, "no_norms", 2)
    found = {row["arm"]: row["verdict"] for row in rows}
    assert found == {
        "no_norms": "reference",
        "baseline": "slower",
        "baseline_again": "slower",
        "all_taper_folded": "faster",
    }


def test_a_compiled_step_is_one_graph_that_no_step_compiles_again(arms: Arms, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = partial(
        torch.compile, backend="eager", fullgraph=True
    )  # the tracing alone: generated code takes minutes
    monkeypatch.setattr(torch, "compile", compiler)
    prompts = torch.randint(0, 300, (3, 8))
    for name in ("baseline", "internal_taper", "all_taper_folded"):
        torch.compiler.reset()
        tokens = []
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            for mode in ("eager", "compile"):
                decoding = Decoding(arms[name], mode, prompts, 4)
                decoding.decode()
                decoding.decode()
                tokens.append(decoding.token.tolist())
        assert tokens[0] == tokens[1], name


def test_a_whole_run(tmp_path: Path, said: list[str]) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "decode.json"
    report = bench.benchmark(dataclasses.replace(TINY, peer=True, out=str(out)))
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    assert [Case(case["mode"], case["dtype"], case["batch_size"]) for case in report["cases"]] == [
        Case("eager", dtype, size) for dtype in ("float32", "bfloat16") for size in (1, 8)
    ]
    for case in report["cases"]:
        assert [(row["phase"], row["arm"]) for row in case["rows"]] == [
            (p, a) for p in ("decode", "prefill") for a in ARMS
        ]
        assert all(row["samples"] == 4 and row["ms"] > 0 for row in case["rows"])
    assert len(report["peer"]) == 4 and all(peer["speedup"]["value"] > 0 for peer in report["peer"])
    text = out.with_suffix(".md").read_text()
    assert text.count("| all_taper_folded |") == 8 and "transformers" in text
    assert any(line.startswith("case 4 of 4: eager, bfloat16, batch 8, ETA") for line in said)


def test_P34_compilation_is_measured_too_once_unless_it_is_asked_for() -> None:
    cases = bench._cases(dataclasses.replace(TINY, modes=None), torch.device("cpu"))
    assert [str(case) for case in cases if case.mode == "compile"] == ["compile, float32, batch 1"]
    assert len(cases) == 5 and cases[-1].mode == "compile"
    assert len(bench._cases(dataclasses.replace(TINY, modes=("compile",)), torch.device("cpu"))) == 4


def test_P34_two_runs_tell_their_spread_and_agree_within_it() -> None:
    """Timings of tiny work on a machine with other work: what must hold is that the intervals say so."""
    config = dataclasses.replace(TINY, dtypes=("float32",), batch_sizes=(1,), repeats=6)
    first, second = (
        {(row["phase"], row["arm"]): row for row in bench.benchmark(config)["cases"][0]["rows"]} for _ in range(2)
    )
    for key, row in first.items():
        assert row["samples"] == len(row["all_ms"]) == 12
        assert row["ms_quartiles"][0] <= row["ms"] <= row["ms_quartiles"][1]
        assert row["speedup"]["low"] <= row["speedup"]["value"] <= row["speedup"]["high"]
        assert row["speedup"]["low"] <= second[key]["speedup"]["high"]
        assert second[key]["speedup"]["low"] <= row["speedup"]["high"]
    assert first["decode", "baseline_again"]["verdict"] == "no measurable gain", "two equal arms"


def test_time_that_is_up_and_cases_that_fail_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(TINY, out=str(tmp_path / "a.json"), minutes=1e-9)
    assert bench.benchmark(config)["left_out"][-1] == "eager, bfloat16, batch 8: minutes=1e-09 were over"

    def broken(*_: object) -> None:
        raise RuntimeError("\nno compiler\nat all")

    monkeypatch.setattr(bench, "measure", broken)
    report = bench.benchmark(dataclasses.replace(TINY, out=str(tmp_path / "b.json"), dtypes=("float32",)))
    assert report["left_out"] == [f"eager, float32, batch {n}: RuntimeError: no compiler" for n in (1, 8)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modes": ("cuda_graph",)}, "needs a CUDA device"),
        ({"prompt_tokens": 60}, "exceeds the context of 64 tokens"),
        ({"out": "/nowhere/at/all.json"}, "name a file in a directory that is there"),
        ({"arms": ("baseline", "all_taper_folded")}, "lacks no_norms"),
    ],
)
def test_faults_in_one_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.benchmark(dataclasses.replace(TINY, **change))  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_decode_the_same(arms: Arms) -> None:
    device = torch.device("cuda")
    prompts = torch.randint(0, 300, (2, 8), device=device)
    model = place(arms["baseline"], torch.float32, device)
    tokens = []
    with torch.inference_mode():
        for mode in ("eager", "cuda_graph"):
            decoding = Decoding(model, mode, prompts, 4)
            decoding.token.copy_(prompts[:, -1:])
            decoding.decode()
            tokens.append(decoding.token.tolist())
    assert tokens[0] == tokens[1]
