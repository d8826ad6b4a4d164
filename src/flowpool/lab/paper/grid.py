"""The paper's table under everything that the paper leaves open: a grid that was fixed before it was run.

Padding (none, without mass, with mass) times propagation (normalised, raw) times BatchNorm (none, on the nodes), with
flow, sort, sum and mean in each; and for the model as stated, ragged and padded with mass, absolute values of epsilon
from a standard normal reference, drawn for each fold or once for all. Every cell is published.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowpool.lab.comparison import PAPER_TABLE, compare, percent, points
from flowpool.lab.evaluate import Configuration, evaluate, folds_of
from flowpool.lab.model import Shape
from flowpool.lab.names import Norm, Padding, Propagation
from flowpool.lab.pools import FlowSettings
from flowpool.lab.results import Failure, Result, Store, Task
from flowpool.lab.statistics import Summary, corrected_error, summarise

REPEATS = (3, 4, 5, 6, 7)  # 0 to 2 were spent on the search for the hypothesis
PADDINGS: tuple[Padding, ...] = ("none", "empty", "mass")
PROPAGATIONS: tuple[Propagation, ...] = ("normalised", "raw")
NORMS: tuple[Norm, ...] = ("none", "nodes")
EPSILONS = (0.01, 0.1, 1.0)
STEPS = 100
_POOLS = ("flow", "sort", "sum", "mean")
_PAPER_RATIO = 1 / 9  # test graphs over the others in ten folds
_WITHIN = 2  # combined errors


@dataclass(frozen=True)
class Cell:
    """One setting, and the pools that are run in it."""

    name: str
    configuration: Configuration
    pools: tuple[str, ...]

    def tasks(self, repeats: Sequence[int]) -> list[Task]:
        folds = range(len(folds_of(self.configuration.dataset, self.configuration.data, 0)))
        return [Task(pool, repeat, fold) for repeat, fold in itertools.product(repeats, folds) for pool in self.pools]


def cells(data: str | None = None) -> list[Cell]:
    """The whole grid, in the order of the page."""
    found = []
    for padding, propagation, norm in itertools.product(PADDINGS, PROPAGATIONS, NORMS):
        configuration = Configuration(data=data, propagation=propagation, shape=Shape(padding=padding, norm=norm))
        found.append(Cell(f"{padding}-{propagation}-{norm}", configuration, _POOLS))
    for padded, epsilon, seed in itertools.product((False, True), EPSILONS, (None, 0)):
        flow = FlowSettings(epsilon=epsilon, relative=False, steps=STEPS, reference_seed=seed)
        shape = Shape(padding="mass" if padded else "none")
        name = f"{shape.padding}-absolute-{epsilon:g}-{'each' if seed is None else 'shared'}"
        found.append(Cell(name, Configuration(data=data, shape=shape, flow=flow), ("flow",)))
    return found


def run_cell(cell: Cell, repeats: Sequence[int], folder: Path, jobs: int) -> Iterator[Result | Failure]:
    """Computes what is missing of a cell."""
    store = Store(folder / cell.name, cell.configuration.identity())
    yield from evaluate(cell.configuration, cell.tasks(repeats), store, jobs=jobs)


def table(found: Sequence[Cell], repeats: Sequence[int], folder: Path) -> str:
    """The cells that have results, as a table in Markdown."""
    lines = [
        "| padding | propagation | BatchNorm | flow settings | flow | sort | sum | mean | flow - sort | folds | compatible |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in found:
        store = Store(folder / cell.name, cell.configuration.identity())
        results = store.load_all(cell.tasks(repeats))
        if results:
            failures = store.load_failures(cell.tasks(repeats))
            lines.append(_line(cell, results + _sorted_beside(cell, results, folder), failures))
    return "\n".join(lines)


def _sorted_beside(cell: Cell, results: Sequence[Result], folder: Path) -> list[Result]:
    """Sort on the folds of a cell that varies the flow alone: those of the cell that it is a variation of."""
    configuration = replace(cell.configuration, flow=FlowSettings())
    (same,) = (other for other in cells(configuration.data) if other.configuration == configuration)
    if "sort" in cell.pools or not (folder / same.name).exists():
        return []
    wanted = [Task("sort", result.repeat, result.fold) for result in results]
    return Store(folder / same.name, configuration.identity()).load_all(wanted)


def is_compatible(flow: Sequence[float], sort: Sequence[float], difference_error: float) -> bool:
    """Whether flow and flow minus sort are both within two combined errors of what the paper has.

    Args:
        flow, sort: accuracies per fold, in the same order.
        difference_error: corrected error of the mean of flow - sort.
    """
    ours, theirs = sum(flow) / len(flow), PAPER_TABLE["flow"]
    away = abs(ours - theirs.mean)
    own = corrected_error(flow, _PAPER_RATIO)
    gap = theirs.mean - PAPER_TABLE["sort"].mean
    gap_away = abs(ours - sum(sort) / len(sort) - gap)
    # The paper gives no differences per fold; its two means are taken as independent.
    gap_error = math.hypot(*(_paper_error(PAPER_TABLE[pool]) for pool in ("flow", "sort")))
    return away <= _WITHIN * math.hypot(own, _paper_error(theirs)) and gap_away <= _WITHIN * math.hypot(
        difference_error, gap_error
    )


def _paper_error(summary: Summary) -> float:
    return summary.deviation * math.sqrt(1 / summary.count + _PAPER_RATIO)


def _accuracy(results: Sequence[Result]) -> str:
    """``82.48 ± 7.39 (3.57)``: mean, deviation and corrected error over folds, in per cent."""
    accuracies = [result.accuracy for result in results]
    error = f" ({100 * corrected_error(accuracies, _PAPER_RATIO):.2f})" if len(accuracies) > 1 else ""
    return percent(summarise(accuracies)) + error


def _line(cell: Cell, results: list[Result], failures: list[Failure]) -> str:
    rows = {row.pool: row for row in compare(results, _POOLS, "sort", failures=failures)}
    shape, settings = cell.configuration.shape, cell.configuration.flow
    flow, sort = rows.get("flow"), rows.get("sort")
    difference = flow.difference if flow else None
    verdict = ""
    if flow and sort and difference:
        sorted_by_fold = {(result.repeat, result.fold): result.accuracy for result in sort.results}
        pairs = [
            (result.accuracy, sorted_by_fold[key])
            for result in flow.results
            if (key := (result.repeat, result.fold)) in sorted_by_fold
        ]
        one, other = zip(*pairs, strict=True)
        verdict = "yes" if is_compatible(one, other, difference.error) else "no"
    references = "a reference per fold" if settings.reference_seed is None else "one reference"
    written = "default" if settings.relative else f"absolute {settings.epsilon:g}, {references}"
    columns = [
        "mass: size leaks" if shape.padding == "mass" else shape.padding,
        str(cell.configuration.propagation),
        shape.norm,
        written,
        *(_accuracy(rows[pool].results) if pool in rows else "" for pool in _POOLS),
        points(difference) if difference else "",
        str(len(flow.results) if flow else 0) + (f", {len(failures)} failed" if failures else ""),
        verdict,
    ]
    return f"| {' | '.join(columns)} |"
