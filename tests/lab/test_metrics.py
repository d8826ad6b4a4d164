"""Metrics against scikit-learn, and what they refuse."""

from typing import get_args

import numpy as np
import pytest
from sklearn import metrics as oracle

from flowpool.lab.datasets import load_dataset
from flowpool.lab.metrics import METRICS, kind_of, metric_for
from flowpool.lab.names import Metric

RANDOM = np.random.default_rng(0)
TRUTH, FOUND = RANDOM.normal(size=(2, 50, 3)) * [1, 10, 0.1]
CLASSES, SCORES = RANDOM.integers(0, 3, 60), RANDOM.normal(size=(60, 3))


def test_names_are_those_of_the_command() -> None:
    assert set(METRICS) == set(get_args(Metric))


def test_errors_of_several_targets_are_averaged_over_the_targets() -> None:
    assert METRICS["rmse"].score(FOUND, TRUTH) == pytest.approx(oracle.root_mean_squared_error(TRUTH, FOUND))
    assert METRICS["mae"].score(FOUND, TRUTH) == pytest.approx(oracle.mean_absolute_error(TRUTH, FOUND))
    assert METRICS["r2"].score(FOUND, TRUTH) == pytest.approx(oracle.r2_score(TRUTH, FOUND))


def test_classes() -> None:
    found = SCORES.argmax(1)
    assert METRICS["accuracy"].score(found, CLASSES) == oracle.accuracy_score(CLASSES, found)
    two, ranking = (CLASSES > 0).astype(int), SCORES[:, :2]
    expected = oracle.roc_auc_score(two, ranking[:, 1] - ranking[:, 0])
    assert METRICS["auc"].score(ranking, two) == pytest.approx(expected)
    shares = np.exp(SCORES) / np.exp(SCORES).sum(1, keepdims=True)
    expected = oracle.roc_auc_score(CLASSES, shares, multi_class="ovr")
    assert METRICS["auc"].score(SCORES + 1e4, CLASSES) == pytest.approx(expected)


def test_a_part_in_which_a_number_means_nothing_is_told() -> None:
    with pytest.raises(ValueError, match="needs every class in each part; one part has 1 of 2"):
        METRICS["auc"].score(SCORES[:5, :2], np.ones(5, int))
    with pytest.raises(ValueError, match="one part has a target that is the same everywhere"):
        METRICS["r2"].score(FOUND, np.ones_like(TRUTH))


def test_lower_is_better_where_it_is_an_error() -> None:
    assert {name for name, metric in METRICS.items() if metric.lower_is_better} == {"rmse", "mae"}
    assert METRICS["rmse"].better(1, 2) and METRICS["r2"].better(2, 1)
    assert not METRICS["auc"].better(float("nan"), 0.5)


def test_numbers_as_they_are_written() -> None:
    assert METRICS["accuracy"].number(0.8248) == "82.48"
    assert METRICS["rmse"].number(-0.0123, sign=True) == "-0.012"
    assert (METRICS["accuracy"].title, METRICS["auc"].title) == ("accuracy %", "auc")


def test_the_metric_fits_what_is_predicted() -> None:
    mutag = load_dataset("MUTAG")
    assert metric_for(mutag, None).name == "accuracy"
    assert metric_for(mutag, "auc").ranks
    with pytest.raises(
        ValueError, match="targets of MUTAG are classes, of which rmse is no measure; pass accuracy, auc"
    ):
        metric_for(mutag, "rmse")
    assert (kind_of(None), kind_of("auc"), kind_of("mae")) == (None, "classes", "numbers")
