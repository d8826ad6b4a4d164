"""The grid is the one that was fixed, and its verdicts follow the rule that was fixed."""

import math
from pathlib import Path

import pytest
from lab.samples import fold_result

from flowpool.lab import evaluate as lab_evaluate
from flowpool.lab.paper.grid import REPEATS, cells, is_compatible, run_cell, table
from flowpool.lab.results import Result, Task


def test_the_grid_has_twelve_cells_and_the_absolute_ones() -> None:
    grid = cells()
    assert len({cell.name for cell in grid}) == len(grid) == 24
    assert [cell.pools for cell in grid[:12]] == [("flow", "sort", "sum", "mean")] * 12
    settings = {
        (c.configuration.shape.padding, c.configuration.shape.propagation, c.configuration.shape.norm)
        for c in grid[:12]
    }
    assert len(settings) == 12
    absolute = [cell.configuration for cell in grid[12:]]
    assert {c.flow.epsilon for c in absolute} == {0.01, 0.1, 1.0}
    assert all(not c.flow.relative and c.flow.steps == 100 and c.is_as_in_paper for c in absolute)
    assert len({str(cell.configuration.identity()) for cell in grid}) == 24
    assert REPEATS == (3, 4, 5, 6, 7)
    assert len(grid[0].tasks(REPEATS)) == 4 * 50


def test_a_cell_is_compatible_within_two_combined_errors_of_both_numbers() -> None:
    """With folds that do not scatter, the errors are the paper's alone: s sqrt(1/10 + 1/9)."""
    factor = math.sqrt(1 / 10 + 1 / 9)
    flow_error, gap_error = 0.0739 * factor, math.hypot(0.0739, 0.0788) * factor
    at = 0.8248
    assert is_compatible([at] * 5, [at - 0.0918] * 5, 0.0)
    for sign in (1, -1):
        for share, expected in ((1.99, True), (2.01, False)):
            moved = at + sign * share * flow_error
            assert is_compatible([moved] * 5, [moved - 0.0918] * 5, 0.0) is expected
            gap = 0.0918 + sign * share * gap_error
            assert is_compatible([at] * 5, [at - gap] * 5, 0.0) is expected
    assert is_compatible([at] * 5, [at - 0.0918 - 2.01 * gap_error] * 5, 0.05)  # our own error counts too


def test_the_table_has_every_cell_that_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(_: object, task: Task) -> Result:
        accuracy = {"flow": 0.8248, "sort": 0.7330, "sum": 0.8, "mean": 0.7}[task.pool] + 0.01 * (task.fold % 2)
        return fold_result(task.pool, task.fold, accuracy, repeat=task.repeat)

    monkeypatch.setattr(lab_evaluate, "run_fold", at_once)
    grid = [cells()[number] for number in (0, 8, 12, 18)]  # the last varies the flow of the second
    for cell in grid[1:]:
        assert len(list(run_cell(cell, [3], tmp_path, 1))) == 10 * len(cell.pools)
    lines = table(grid, [3], tmp_path).splitlines()
    assert len(lines) == 2 + 3
    error = f"{0.5 * math.sqrt(10 / 9) * math.sqrt(1 / 10 + 1 / 9):.2f}"
    flow, sort = f"82.98 ± 0.50 ({error})", f"73.80 ± 0.50 ({error})"
    assert lines[2].startswith(
        f"| mass: size leaks | normalised | none | default | {flow} | {sort} | 80.50 ± 0.50 ({error}) |"
    )
    assert lines[2].endswith("| +9.18 (0.00) | 10 | yes |")
    alone, beside = "absolute 0.01, a reference per fold", "| +9.18 (0.00) | 10 | yes |"
    assert lines[3] == f"| none | normalised | none | {alone} | {flow} |  |  |  |  | 10 |  |"  # whose sort was not run
    assert lines[4] == f"| mass: size leaks | normalised | none | {alone} | {flow} | {sort} |  |  {beside}"
    assert list(run_cell(grid[1], [3], tmp_path, 1)) == []  # it goes on where it was
