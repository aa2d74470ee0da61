"""Statistics over seeds, against scipy and by hand."""

import math

import pytest
from scipy import stats

from tapernorm.analysis.intervals import estimate, holm, outliers, paired_percent

LOSSES = [3.182, 3.159, 3.237, 3.201]
OTHERS = [3.188, 3.155, 3.283, 3.190]


def p_value(differences: list[float]) -> float | None:
    found = estimate(differences)
    assert found is not None
    return found.p


def test_interval_is_students() -> None:
    found = estimate(LOSSES)
    low, high = stats.t.interval(0.95, 3, loc=stats.tmean(LOSSES), scale=stats.sem(LOSSES))
    assert found is not None
    assert (found.n, found.mean, found.low, found.high) == pytest.approx((4, 3.19475, low, high))
    three = estimate([1.0, 2.0, 3.0])  # t_{2, 0.975} = 4.3027, s = 1
    assert three is not None and three.high == pytest.approx(2 + 4.3027 / math.sqrt(3), abs=1e-4)
    assert three.excludes_zero is False  # 2 ± 2.48


def test_one_value_has_no_interval_and_none_has_nothing() -> None:
    found = estimate([3.1])
    assert found is not None and (found.mean, found.low, found.high, found.excludes_zero) == (3.1, None, None, False)
    assert estimate([]) is None


def test_equal_values_have_an_interval_of_no_width() -> None:
    found = estimate([0.5, 0.5, 0.5])
    assert found is not None and (found.low, found.high, found.excludes_zero) == (0.5, 0.5, True)
    zero = estimate([0.0, 0.0])
    assert zero is not None and not zero.excludes_zero


def test_pairs_are_those_that_both_have() -> None:
    gaps = paired_percent({0: 3.3, 1: 2.0, 5: 9.0}, {1: 2.5, 0: 3.0, 2: 1.0})
    assert gaps == pytest.approx({0: 10.0, 1: -20.0})
    assert paired_percent({0: 1.0}, {}) == {}


def test_p_value_is_the_paired_t_tests() -> None:
    differences = [a - b for a, b in zip(LOSSES, OTHERS, strict=True)]
    assert p_value(differences) == pytest.approx(stats.ttest_rel(LOSSES, OTHERS).pvalue)
    assert p_value([0.1]) is None
    assert p_value([0.1, 0.1]) is None


def test_the_interval_excludes_zero_exactly_if_p_is_small() -> None:
    for shift in (-0.05, -0.01, 0.0, 0.02, 0.3):
        values = [shift + x for x in (-0.03, 0.01, 0.04, 0.02)]
        found, p = estimate(values), p_value(values)
        assert found is not None and p is not None
        assert found.excludes_zero == (p < 0.05)


def test_holm_by_hand() -> None:
    # sorted: 0.01 * 3, 0.02 * 2, 0.5 * 1; an adjusted value is never below that of a smaller p
    assert holm([0.5, None, 0.01, 0.02]) == [0.5, None, pytest.approx(0.03), pytest.approx(0.04)]
    assert holm([0.02, 0.019]) == [pytest.approx(0.038), pytest.approx(0.038)]
    assert holm([]) == []


def test_outliers_are_told_from_five_values_on() -> None:
    assert outliers([1.0, 1.1, 9.0]) is None
    assert outliers([1.0, 1.1, 0.9, 1.05, 9.0]) == [False, False, False, False, True]
    # median 3, MAD 1: the modified z of 8.2 is 0.6745 * 5.2 = 3.507, that of 8.1 is 3.44
    assert outliers([2.0, 3.0, 4.0, 2.0, 8.2, 3.0, 4.0]) == [False] * 4 + [True, False, False]
    assert outliers([2.0, 3.0, 4.0, 2.0, 8.1, 3.0, 4.0]) == [False] * 7


def test_outliers_without_a_median_deviation() -> None:
    assert outliers([1.0] * 6) == [False] * 6
    assert outliers([1.0] * 9 + [2.0]) == [False] * 9 + [True]
