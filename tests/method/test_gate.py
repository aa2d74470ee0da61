"""The gate schedule: end points, monotony, phases."""

import math

import pytest

from tapernorm.method.gate import GateSchedule, Phase

SHAPES = ("cosine", "linear", "sqrt", "step", "sequential", "constant")


@pytest.mark.parametrize("shape", SHAPES)
def test_one_until_warmup_and_monotone(shape: str) -> None:
    gate = GateSchedule(shape, 10, 50, (11, 20, 20, 50))
    values = [gate.value(k) for k in range(1, 100)]
    assert values[:10] == [1.0] * 10
    assert values == sorted(values, reverse=True)
    if shape == "constant":
        assert set(values) == {1.0}
        assert gate.first_tapered_step is None
    else:
        assert values[49:] == [0.0] * 50
        first = gate.first_tapered_step
        assert first is not None and gate.value(first) == 0.0 and gate.value(first - 1) > 0.0


def test_formulas() -> None:
    t = 0.25
    step = 10 + int(t * 40)
    assert GateSchedule("cosine", 10, 50).value(step) == pytest.approx(0.5 * (1 + math.cos(math.pi * t)))
    assert GateSchedule("linear", 10, 50).value(step) == pytest.approx(1 - t)
    assert GateSchedule("sqrt", 10, 50).value(step) == pytest.approx(1 - math.sqrt(t))
    assert GateSchedule("step", 10, 50).value(11) == 0.0


def test_phases_follow_the_gate() -> None:
    gate = GateSchedule("cosine", 3, 6)
    assert [gate.phase(k) for k in range(1, 8)] == [Phase.NORMALIZED] * 3 + [Phase.TAPERING] * 2 + [Phase.TAPERED] * 2
    # Step k_warmup + 1 of a long taper has a gate that rounds towards 1, and is a taper step all the same.
    assert GateSchedule("cosine", 3, 10**9).phase(4) is Phase.TAPERING
    assert GateSchedule("step", 3, 6).phase(4) is Phase.TAPERED
    assert GateSchedule("constant", 3, 6).phase(100) is Phase.NORMALIZED
