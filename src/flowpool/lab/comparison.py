"""The table of an evaluation: scores per pool, and what each pool has over the others on the same folds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flowpool.lab.metrics import METRICS, Metric
from flowpool.lab.results import Failure, Result, ResultError
from flowpool.lab.statistics import Difference, Summary, paired_difference, summarise

# Table 1 of the paper: MUTAG, SGC with K=2, d=8, M=5; over 10 folds.
PAPER_TABLE = {"sort": Summary(0.7330, 0.0788, 10), "flow": Summary(0.8248, 0.0739, 10)}


@dataclass(frozen=True)
class Row:
    """One pool.

    Attributes:
        pool: its name.
        results: its folds, by repeat and fold.
        score: over these.
        difference: this pool minus the reference pool over their common folds; None for the reference pool itself, or
            with fewer than two common folds.
        published: what was published for it, where something was; without a count if its deviation is not comparable.
        num_failed: folds that raised, and are in none of the numbers.
    """

    pool: str
    results: list[Result]
    score: Summary
    difference: Difference | None
    published: Summary | None = None
    num_failed: int = 0

    @property
    def seconds_per_epoch(self) -> float | None:
        """Median over folds; None where nothing is trained."""
        return _median([result.seconds_per_epoch for result in self.results])

    @property
    def seconds_per_thousand(self) -> float:
        """Of predicting 1,000 graphs, median over runs."""
        return _median([run.seconds_per_thousand for result in self.results for run in result.runs]) or 0.0

    @property
    def width(self) -> int:
        """Numbers per graph, median over folds, which may have chosen different settings."""
        return int(_median([float(result.runs[0].width) for result in self.results]) or 0)

    @property
    def num_parameters(self) -> int:
        return self.results[0].runs[0].num_parameters

    def as_data(self) -> dict[str, Any]:
        """Plain data, in the units of the metric; accuracies as shares."""
        return {
            "pool": self.pool,
            "score": asdict(self.score),
            "difference": None if self.difference is None else asdict(self.difference),
            "published": None if self.published is None else asdict(self.published),
            "seconds_per_epoch": self.seconds_per_epoch,
            "seconds_per_thousand_graphs": self.seconds_per_thousand,
            "numbers_per_graph": self.width,
            "parameters": self.num_parameters,
            "failed": self.num_failed,
        }


def compare(
    results: Iterable[Result],
    pools: Sequence[str],
    reference: str,
    *,
    metric: Metric = METRICS["accuracy"],
    published: dict[str, Summary] | None = None,
    failures: Iterable[Failure] = (),
) -> list[Row]:
    """One row per pool that has results, the best first.

    Args:
        results: of any pools and folds.
        pools: which to show.
        reference: the pool that the others are compared with.
        metric: that says which is better.
        published: by pool.
        failures: folds that raised.
    """
    failed = Counter(failure.pool for failure in failures)
    results = list(results)
    by_pool = {pool: sorted((r for r in results if r.pool == pool), key=lambda r: r.task) for pool in pools}
    check_same_folds([result for found in by_pool.values() for result in found])
    rows = [
        Row(
            pool,
            found,
            summarise([score for score, _ in _by_test_graphs(found).values()]),
            None if pool == reference else difference_of(found, by_pool.get(reference, [])),
            (published or {}).get(pool),
            failed[pool],
        )
        for pool, found in by_pool.items()
        if found
    ]
    return sorted(rows, key=lambda row: row.score.mean if metric.lower_is_better else -row.score.mean)


def reference_pool(pools: Sequence[str]) -> str:
    """The pool that the others are compared with, in whatever order they come: ours if one takes part, else the plainest."""
    known = ("flow-vectorizer", "flow", "flow-readout", "sum", "mean")
    return next((name for name in known if name in pools), min(pools))


def spread(summary: Summary, metric: Metric) -> str:
    """``82.48 ± 7.39``; a published mean without a comparable deviation stands alone."""
    mean = metric.number(summary.mean)
    return f"{mean} ± {metric.number(summary.deviation)}" if summary.count else mean


def gap(difference: Difference, metric: Metric) -> str:
    """``+1.40 (2.51)``: the difference and its corrected standard error."""
    return f"{metric.number(difference.mean, sign=True)} ({metric.number(difference.error)})"


def count(row: Row) -> str:
    """``10``, or ``9, 1 failed``."""
    return f"{row.score.count}, {row.num_failed} failed" if row.num_failed else str(row.score.count)


def table(rows: Sequence[Row], reference: str, metric: Metric) -> tuple[list[str], list[list[str]]]:
    """Heads and cells, for the terminal and the page; columns without any entry are left out."""
    heads = [
        "pool",
        metric.title,
        "published",
        f"minus {reference}",
        "p",
        "folds",
        "ms/epoch",
        "s/1,000",
        "width",
        "weights",
    ]
    cells = []
    for row in rows:
        found, epoch = row.difference, row.seconds_per_epoch
        cells.append(
            [
                row.pool,
                spread(row.score, metric),
                spread(row.published, metric) if row.published else "",
                gap(found, metric) if found else "",
                f"{found.p_value:.2f}" if found else "",
                count(row),
                f"{1000 * epoch:.1f}" if epoch else "",
                "" if epoch else f"{row.seconds_per_thousand:.2g}",
                f"{row.width:,}" if row.width else "",
                f"{row.num_parameters:,}" if row.num_parameters else "",
            ]
        )
    used = [place for place in range(len(heads)) if any(line[place] for line in cells)]
    return [heads[place] for place in used], [[line[place] for place in used] for line in cells]


def difference_of(found: Sequence[Result], others: Sequence[Result]) -> Difference | None:
    """The first minus the second over their common folds; None with fewer than two of these."""
    mine = _by_test_graphs(found, others)
    other = _by_test_graphs(others, found)
    if len(mine) < 2:
        return None
    ratio = float(np.mean([ratio for _, ratio in mine.values()]))
    return paired_difference([score for score, _ in mine.values()], [other[key][0] for key in mine], ratio)


def check_same_folds(results: Sequence[Result]) -> None:
    """Raises ResultError unless all pools were tested on the same graphs."""
    tests: dict[tuple[int, int], list[int]] = {}
    for result in results:
        known = tests.setdefault((result.repeat, result.fold), result.test_graphs)
        if known != result.test_graphs:
            raise ResultError(
                f"{result.pool} was tested on other graphs in repeat {result.repeat}, fold {result.fold} than another "
                "pool: the splits have changed in between. Start again in a new folder."
            )


def _by_test_graphs(
    results: Sequence[Result], others: Sequence[Result] | None = None
) -> dict[tuple[int, ...], tuple[float, float]]:
    """Score and share of the test by test graphs: several trainings on one published split are one observation.

    Of the folds that the others have too, if there are others.
    """
    common = None if others is None else {(other.repeat, other.fold) for other in others}
    found: dict[tuple[int, ...], list[Result]] = {}
    for result in results:
        if common is None or (result.repeat, result.fold) in common:
            found.setdefault(tuple(result.test_graphs), []).append(result)
    return {key: (float(np.mean([r.score for r in same])), same[0].test_ratio) for key, same in found.items()}


def _median(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.median(found)) if found else None
