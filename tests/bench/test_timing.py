"""Ratios of medians with intervals; arms that take turns."""

import random

import numpy as np
import pytest
import torch

from tapernorm.bench.timing import copy_bandwidth, interleave, ratio, seconds


def test_the_ratio_of_medians_and_an_interval_that_holds_the_truth_95_times_of_100() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        shared = rng.lognormal(0, 0.3, 60)  # what slows down a whole round
        a, b = 1.2 * shared * rng.lognormal(0, 0.02, 60), shared * rng.lognormal(0, 0.02, 60)
        found = ratio(a, b)
        assert found.value == pytest.approx(np.median(a) / np.median(b))
        assert found.low <= found.high
        hits += found.low <= 1.2 <= found.high
    assert hits >= 0.9 * 200


def test_groups_that_differ_widen_the_interval() -> None:
    rng = np.random.default_rng(2)
    a = np.concatenate([place * rng.lognormal(0, 0.01, 30) for place in rng.lognormal(0, 0.05, 8)])
    b = rng.lognormal(0, 0.01, 240)
    plain, grouped = ratio(a, b), ratio(a, b, groups=8)
    assert plain.value == grouped.value
    assert grouped.high - grouped.low > 2 * (plain.high - plain.low)


@pytest.mark.parametrize("groups", [3, 12])
def test_the_interval_holds_the_truth_95_times_of_100_also_with_few_groups(groups: int) -> None:
    rng = np.random.default_rng(groups)

    def arm() -> np.ndarray:
        return (rng.lognormal(0, 0.01, (groups, 1)) * rng.lognormal(0, 0.01, (groups, 8))).ravel()

    found = [ratio(arm(), arm(), groups) for _ in range(100)]
    assert sum(each.low <= 1 <= each.high for each in found) >= 90


def test_equal_samples_differ_by_nothing() -> None:
    values = [1.0, 3.0, 2.0]
    assert ratio(values, values) == ratio([1.0], [1.0])
    assert (ratio(values, values).low, ratio(values, values).high) == (1.0, 1.0)


def test_every_arm_has_its_turn_in_every_round_in_changing_order() -> None:
    turns: list[str] = []
    done: list[int] = []

    def arm(name: str) -> float:
        turns.append(name)
        return float(len(turns))

    arms = {name: (lambda name=name: arm(name)) for name in "abc"}
    samples = interleave(arms, 20, random.Random(0), lambda: done.append(1))
    rounds = ["".join(turns[i : i + 3]) for i in range(0, 60, 3)]
    assert {"".join(sorted(order)) for order in rounds} == {"abc"} and len(set(rounds)) > 3
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abc", 20) and len(done) == 60


def test_clock_and_bandwidth_of_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert 0 <= seconds(lambda: None, cpu) < 1
    assert 1e7 < copy_bandwidth(cpu, 2**20) < 1e13
