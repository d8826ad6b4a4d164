"""The table: means, pairs and the paper's numbers in the right places."""

import math
from dataclasses import replace

import pytest
from lab.samples import FLOW, SORT

from flowpool.lab.comparison import compare, percent, points, reference_pool
from flowpool.lab.results import ResultError


def test_rows_hold_means_and_paired_differences() -> None:
    flow, sort = compare(SORT[::-1] + FLOW, ["flow", "sort"], "flow")
    assert (flow.pool, sort.pool) == ("flow", "sort")
    assert flow.accuracy.mean == pytest.approx(0.5)
    assert flow.difference is None
    assert sort.difference is not None
    assert sort.difference.mean == pytest.approx(-0.25)
    assert sort.difference.error == pytest.approx(0.1 * math.sqrt(5 / 6))
    assert sort.seconds_per_epoch == 3.5
    assert points(sort.difference) == "-25.00 (9.13)"
    assert percent(flow.accuracy) == "50.00 ± 22.36"


def test_pairs_are_made_of_common_folds_only() -> None:
    _, sort = compare(FLOW[1:] + SORT[:3], ["flow", "sort"], "flow")
    assert sort.difference is not None
    assert sort.difference.count == 2
    assert sort.difference.mean == pytest.approx(-0.25)
    assert sort.accuracy.count == 3
    _, sort = compare(FLOW[2:] + SORT[:3], ["flow", "sort"], "flow")
    assert sort.difference is None


def test_pools_without_results_have_no_row() -> None:
    assert [row.pool for row in compare(FLOW, ["sum", "flow"], "flow")] == ["flow"]


def test_the_papers_numbers_stand_beside_ours_only_where_they_belong() -> None:
    flow, sort = compare(FLOW + SORT, ["flow", "sort"], "flow", as_in_paper=True)
    assert flow.paper is not None
    assert sort.paper is not None
    assert (percent(flow.paper), percent(sort.paper)) == ("82.48 ± 7.39", "73.30 ± 7.88")
    assert all(row.paper is None for row in compare(FLOW + SORT, ["flow", "sort"], "flow"))


def test_folds_with_other_test_graphs_are_not_paired() -> None:
    moved = replace(SORT[1], test_graphs=[77])
    with pytest.raises(ResultError, match="sort was tested on other graphs in repeat 0, fold 1"):
        compare([*FLOW, moved], ["flow", "sort"], "flow")


def test_flow_is_what_the_others_are_compared_with() -> None:
    assert reference_pool(["sum", "flow"]) == "flow"
    assert reference_pool(["sum", "mean"]) == "sum"
