"""Statistics against numbers worked out by hand, and against scipy where it knows the case."""

import math

import numpy as np
import pytest
from scipy import stats

from flowpool.lab.statistics import paired_difference, summarise


def test_summary_by_hand() -> None:
    found = summarise([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert (found.mean, found.deviation, found.count) == (5.0, 2.0, 8)


def test_corrected_difference_by_hand() -> None:
    # Differences 1, 2, 3, 4: mean 2.5, variance 5/3. With r = 1/4: variance of the mean 5/3 (1/4 + 1/4) = 5/6.
    found = paired_difference([2.0, 4.0, 6.0, 8.0], [1.0, 2.0, 3.0, 4.0], test_ratio=0.25)
    assert found.mean == 2.5
    assert found.naive_error == pytest.approx(math.sqrt(5 / 12))
    assert found.error == pytest.approx(math.sqrt(5 / 6))
    # Student's t with 3 degrees of freedom: 97.5 % at 3.182446 in every table.
    assert found.high - found.mean == pytest.approx(3.182446 * math.sqrt(5 / 6), rel=1e-6)
    assert found.low + found.high == pytest.approx(5.0)
    # Its distribution function has a closed form for 3 degrees of freedom.
    t = 2.5 / math.sqrt(5 / 6)
    below = 0.5 + (t / math.sqrt(3) / (1 + t * t / 3) + math.atan(t / math.sqrt(3))) / math.pi
    assert found.p_value == pytest.approx(2 * (1 - below))


def test_ten_folds_correct_the_error_by_the_known_factor() -> None:
    # With r = 1/9 and n = 10 the factor is sqrt(1 + 10 / 9); with n = 50, sqrt(1 + 50 / 9).
    random = np.random.default_rng(0)
    for count in (10, 50):
        found = paired_difference(random.normal(size=count).tolist(), [0.0] * count, 1 / 9)
        assert found.error / found.naive_error == pytest.approx(math.sqrt(1 + count / 9))


def test_without_correction_it_is_the_paired_t_test_of_scipy() -> None:
    random = np.random.default_rng(1)
    first, second = random.normal(0.8, 0.1, 20), random.normal(0.75, 0.1, 20)
    found = paired_difference(first.tolist(), second.tolist(), test_ratio=1e-12)
    theirs = stats.ttest_rel(first, second)
    interval = theirs.confidence_interval(0.95)
    assert found.p_value == pytest.approx(theirs.pvalue, rel=1e-6)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-6)
    assert found.naive_error == pytest.approx(stats.sem(first - second))


def test_equal_methods_have_no_difference_and_constant_ones_a_certain_one() -> None:
    same = paired_difference([0.5, 0.7], [0.5, 0.7], 0.1)
    assert (same.mean, same.error, same.p_value) == (0.0, 0.0, 1.0)
    assert paired_difference([2.0, 3.0], [1.0, 2.0], 0.1).p_value == 0.0


@pytest.mark.parametrize(
    ("first", "second", "ratio"),
    [([1.0], [1.0], 0.1), ([1.0, 2.0], [1.0], 0.1), ([1.0, 2.0], [1.0, 2.0], 0.0)],
)
def test_what_cannot_be_compared_is_refused(first: list[float], second: list[float], ratio: float) -> None:
    with pytest.raises(ValueError, match="needs the same two or more|above 0"):
        paired_difference(first, second, ratio)


def test_no_folds_no_summary() -> None:
    with pytest.raises(ValueError, match="no folds"):
        summarise([])
