"""What folds of accuracies say: mean, spread, and differences between methods with an honest error.

Folds share training graphs, so their results are not independent and the usual standard error is too small. Nadeau and
Bengio ("Inference for the generalization error", 2003) correct the variance of a mean over n folds from s^2 / n to
s^2 (1 / n + r), where r is the number of test graphs over the number of training graphs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Mean and population standard deviation (as in Errica et al.) over ``count`` folds."""

    mean: float
    deviation: float
    count: int


@dataclass(frozen=True)
class Difference:
    """One method minus another, over the same folds.

    Attributes:
        mean: of the differences.
        naive_error: standard error as if folds were independent.
        error: the corrected one.
        low, high: 95 % interval from Student's t with the corrected error.
        p_value: two-sided, of no difference; 1 where all differences are zero.
        count: folds.
    """

    mean: float
    naive_error: float
    error: float
    low: float
    high: float
    p_value: float
    count: int


def summarise(values: Sequence[float]) -> Summary:
    """Mean and deviation of at least one value."""
    if len(values) == 0:
        raise ValueError("There are no folds to summarise.")
    return Summary(float(np.mean(values)), float(np.std(values)), len(values))


def corrected_error(values: Sequence[float], test_ratio: float) -> float:
    """Standard error of the mean of at least two folds that share training graphs (Nadeau and Bengio)."""
    return float(np.std(values, ddof=1)) * math.sqrt(1 / len(values) + test_ratio)


def paired_difference(first: Sequence[float], second: Sequence[float], test_ratio: float) -> Difference:
    """``first`` minus ``second``, fold by fold.

    Args:
        first, second: one value per fold, in the same order, at least two.
        test_ratio: r, test graphs over graphs that the method was trained or tuned on; 1/9 for ten folds.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"{len(first)} and {len(second)} folds; a paired difference needs the same two or more.")
    if not test_ratio > 0:
        raise ValueError(f"test_ratio is {test_ratio}; it is the number of test over training graphs, above 0.")
    from scipy import stats  # slow to import, and needed at the end of a run only

    differences = np.asarray(first, float) - np.asarray(second, float)
    count, mean = len(differences), float(differences.mean())
    naive = float(differences.std(ddof=1)) / math.sqrt(count)
    error = corrected_error(differences.tolist(), test_ratio)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    ratio = abs(mean) / error if error > 0 else (math.inf if mean != 0 else 0.0)
    p_value = float(2 * stats.t.sf(ratio, count - 1))
    return Difference(mean, naive, error, mean - reach, mean + reach, p_value, count)
