"""The table: means, pairs and the paper's numbers in the right places."""

import math
from dataclasses import replace

import pytest
from lab.samples import FLOW, SORT

from flowpool.lab.comparison import PAPER_TABLE, compare, gap, reference_pool, spread, table
from flowpool.lab.metrics import METRICS
from flowpool.lab.results import ResultError


def test_rows_hold_means_and_paired_differences() -> None:
    flow, sort = compare(SORT[::-1] + FLOW, ["flow", "sort"], "flow")
    assert (flow.pool, sort.pool) == ("flow", "sort")
    assert flow.score.mean == pytest.approx(0.5)
    assert flow.difference is None
    assert sort.difference is not None
    assert sort.difference.mean == pytest.approx(-0.25)
    assert sort.difference.error == pytest.approx(0.1 * math.sqrt(5 / 6))
    assert sort.seconds_per_epoch == 3.5
    assert gap(sort.difference, METRICS["accuracy"]) == "-25.00 (9.13)"
    assert spread(flow.score, METRICS["accuracy"]) == "50.00 ± 22.36"


def test_pairs_are_made_of_common_folds_only() -> None:
    _, sort = compare(FLOW[1:] + SORT[:3], ["flow", "sort"], "flow")
    assert sort.difference is not None
    assert sort.difference.count == 2
    assert sort.difference.mean == pytest.approx(-0.25)
    assert sort.score.count == 3
    _, sort = compare(FLOW[2:] + SORT[:3], ["flow", "sort"], "flow")
    assert sort.difference is None


def test_pools_without_results_have_no_row() -> None:
    assert [row.pool for row in compare(FLOW, ["sum", "flow"], "flow")] == ["flow"]


def test_published_numbers_stand_beside_ours_only_where_they_are_given() -> None:
    flow, sort = compare(FLOW + SORT, ["flow", "sort"], "flow", published=PAPER_TABLE)
    assert flow.published is not None
    assert sort.published is not None
    found = [spread(row.published, METRICS["accuracy"]) for row in (flow, sort) if row.published]
    assert found == ["82.48 ± 7.39", "73.30 ± 7.88"]
    assert all(row.published is None for row in compare(FLOW + SORT, ["flow", "sort"], "flow"))


def test_the_best_comes_first_whichever_way_the_metric_points() -> None:
    assert [row.pool for row in compare(SORT + FLOW, ["sort", "flow"], "flow")] == ["flow", "sort"]
    rows = compare(SORT + FLOW, ["sort", "flow"], "flow", metric=METRICS["rmse"])
    assert [row.pool for row in rows] == ["sort", "flow"]


def test_several_trainings_on_one_split_are_one_observation() -> None:
    """Two seeds on each of the same splits: their mean is what a fold has, and pairs are as many as splits."""
    again = [replace(result, repeat=1, runs=[replace(result.runs[0], score=result.score + 0.1)]) for result in FLOW]
    twice = [replace(result, repeat=1) for result in SORT]
    flow, sort = compare([*FLOW, *again, *SORT, *twice], ["flow", "sort"], "flow")
    assert (flow.score.count, sort.score.count) == (4, 4)
    assert flow.score.mean == pytest.approx(0.55)
    assert sort.difference is not None
    assert (sort.difference.count, sort.difference.mean) == (4, pytest.approx(-0.3))


def test_cells_say_what_a_reader_asks() -> None:
    heads, cells = table(compare(FLOW + SORT, ["flow", "sort"], "flow"), "flow", METRICS["accuracy"])
    assert heads == ["pool", "accuracy %", "minus flow", "p", "folds", "ms/epoch", "width", "weights"]
    assert cells[1] == ["sort", "25.00 ± 11.18", "-25.00 (9.13)", "0.07", "4", "3500.0", "40", "10"]


def test_folds_with_other_test_graphs_are_not_paired() -> None:
    moved = replace(SORT[1], test_graphs=[77])
    with pytest.raises(ResultError, match="sort was tested on other graphs in repeat 0, fold 1"):
        compare([*FLOW, moved], ["flow", "sort"], "flow")


def test_flow_is_what_the_others_are_compared_with() -> None:
    assert reference_pool(["sum", "flow"]) == "flow"
    assert reference_pool(["sum", "mean"]) == reference_pool(["mean", "sum"]) == "sum"
    assert reference_pool(["sort", "gmt"]) == reference_pool(["gmt", "sort"]) == "gmt"
