"""What the pictures show: values where they belong, looks that differ."""

import math

import numpy as np
import pytest
from lab.samples import FLOW, SORT

from flowpool.lab import plots
from flowpool.lab.comparison import PAPER_TABLE, Row, compare
from flowpool.lab.metrics import METRICS
from flowpool.lab.pools import POOLS


def rows() -> list[Row]:
    return compare(FLOW + SORT, ["flow", "sort"], "flow", published=PAPER_TABLE)


def test_every_pool_looks_different() -> None:
    looks = plots.styles(list(POOLS))
    assert len(set(looks.values())) == len(POOLS)


def test_a_typical_curve_ends_where_half_of_the_folds_have_ended() -> None:
    assert plots.typical_curve([[1, 2], [3, 4, 5], [5, 9, 7, 8]]) == [3, 4, 6]


def test_accuracies_means_and_the_papers_means_are_drawn() -> None:
    axes = plots.score_plot(rows(), METRICS["accuracy"]).axes[0]
    marks = {
        (line.get_marker(), round(float(np.mean(line.get_xdata())), 4)) for line in axes.lines if len(line.get_xdata())
    }
    assert {("D", 50.0), ("D", 25.0), ("*", 82.48), ("*", 73.3)} <= marks
    assert [label.get_text() for label in axes.get_yticklabels()] == ["flow", "sort"]
    dots = [sorted(line.get_xdata()) for line in axes.lines if line.get_marker() == "."]
    np.testing.assert_allclose(dots, [[20, 40, 60, 80], [10, 20, 30, 40]])


def test_differences_are_drawn_with_their_intervals() -> None:
    figure = plots.difference_plot(rows(), "flow", METRICS["accuracy"])
    assert figure is not None
    zero, own, interval, dot = figure.axes[0].lines
    reach = 3.182446 * 10 * math.sqrt(5 / 6)
    assert list(interval.get_xdata()) == pytest.approx([-25 - reach, -25 + reach], rel=1e-6)
    assert list(dot.get_xdata()) == pytest.approx([-25])
    assert dot.get_markerfacecolor() == "none"  # the interval holds zero
    assert list(zero.get_xdata()) == [0, 0]
    assert (own.get_marker(), list(own.get_xdata()), list(own.get_ydata())) == ("D", [0], [0])
    assert "better to the right" in figure.axes[0].get_xlabel()
    assert plots.difference_plot(rows()[:1], "flow", METRICS["accuracy"]) is None


def test_errors_are_better_to_the_left() -> None:
    found = compare(FLOW + SORT, ["flow", "sort"], "flow", metric=METRICS["rmse"])
    figure = plots.difference_plot(found, "flow", METRICS["rmse"])
    assert figure is not None
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["sort", "flow"]
    assert "better to the left" in axes.get_xlabel()
    assert list(axes.lines[2].get_xdata()) == pytest.approx([-0.25])


def test_times_are_in_milliseconds() -> None:
    axes = plots.time_plot(rows(), METRICS["accuracy"]).axes[0]
    assert [float(line.get_xdata()[0]) for line in axes.lines] == [1000.0, 3500.0]


def test_learning_curves_begin_at_epoch_one() -> None:
    train, validation = plots.learning_plot(rows()).axes
    for axes in (train, validation):
        assert [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] == [([1], [1.0])] * 2
