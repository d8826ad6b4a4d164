"""The table of an evaluation: accuracies per pool, and what each pool has over the others on the same folds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from flowpool.lab.results import Failure, Result, ResultError, Scored
from flowpool.lab.statistics import Difference, Summary, paired_difference, summarise

# Table 1 of the paper: MUTAG, SGC with K=2, d=8, M=5; in per cent, over 10 folds.
PAPER_TABLE = {"sort": Summary(0.7330, 0.0788, 10), "flow": Summary(0.8248, 0.0739, 10)}


class Drawn(Protocol):
    """What pictures show of a row, whatever protocol it is of."""

    @property
    def pool(self) -> str: ...
    @property
    def results(self) -> Sequence[Scored]: ...
    @property
    def difference(self) -> Difference | None: ...
    @property
    def paper(self) -> Summary | None: ...


@dataclass(frozen=True)
class Row:
    """One pool.

    Attributes:
        pool: its name.
        results: its folds, by repeat and fold.
        accuracy: over these.
        difference: this pool minus the reference pool over their common folds; None for the reference pool itself, or
            with fewer than two common folds.
        seconds_per_epoch: median over folds.
        paper: what the paper says, where it says something.
        num_failed: folds that raised, and are in none of the numbers.
    """

    pool: str
    results: list[Result]
    accuracy: Summary
    difference: Difference | None
    seconds_per_epoch: float
    paper: Summary | None
    num_failed: int = 0

    def as_data(self) -> dict[str, Any]:
        """Plain data, accuracies as shares."""
        return {
            "pool": self.pool,
            "accuracy": asdict(self.accuracy),
            "difference": None if self.difference is None else asdict(self.difference),
            "seconds_per_epoch": self.seconds_per_epoch,
            "paper": None if self.paper is None else asdict(self.paper),
            "failed": self.num_failed,
        }


def compare(
    results: Iterable[Result],
    pools: Sequence[str],
    reference: str,
    *,
    as_in_paper: bool = False,
    failures: Iterable[Failure] = (),
) -> list[Row]:
    """One row per pool that has results, in the order of ``pools``.

    Args:
        results: of any pools and folds.
        pools: which to show.
        reference: the pool that the others are compared with.
        as_in_paper: whether what the paper states about its table is as it states it.
        failures: folds that raised.
    """
    failed = Counter(failure.pool for failure in failures)
    results = list(results)
    by_pool = {pool: sorted((r for r in results if r.pool == pool), key=lambda r: r.task) for pool in pools}
    check_same_folds([result for found in by_pool.values() for result in found])
    return [
        Row(
            pool,
            found,
            summarise([result.accuracy for result in found]),
            None if pool == reference else difference_of(found, by_pool.get(reference, [])),
            float(np.median([result.seconds_per_epoch for result in found])),
            PAPER_TABLE.get(pool) if as_in_paper else None,
            failed[pool],
        )
        for pool, found in by_pool.items()
        if found
    ]


def reference_pool(pools: Sequence[str]) -> str:
    """The pool that the others are compared with: flow if it takes part, else the first one."""
    return "flow" if "flow" in pools else pools[0]


def percent(summary: Summary) -> str:
    """``82.48 ± 7.39``."""
    return f"{100 * summary.mean:.2f} ± {100 * summary.deviation:.2f}"


def points(difference: Difference) -> str:
    """``+1.40 (2.51)``: the difference in points and its corrected standard error."""
    return f"{100 * difference.mean:+.2f} ({100 * difference.error:.2f})"


def count(row: Row) -> str:
    """``10``, or ``9, 1 failed``."""
    return f"{row.accuracy.count}, {row.num_failed} failed" if row.num_failed else str(row.accuracy.count)


def difference_of(found: Sequence[Scored], others: Sequence[Scored]) -> Difference | None:
    """The first minus the second over their common folds; None with fewer than two of these."""
    other = {(result.repeat, result.fold): result for result in others}
    pairs = [(result, other[key]) for result in found if (key := (result.repeat, result.fold)) in other]
    if len(pairs) < 2:
        return None
    ratio = float(np.mean([result.test_ratio for result, _ in pairs]))
    return paired_difference([one.accuracy for one, _ in pairs], [two.accuracy for _, two in pairs], ratio)


def check_same_folds(results: Sequence[Scored]) -> None:
    """Raises ResultError unless all pools were tested on the same graphs."""
    tests: dict[tuple[int, int], list[int]] = {}
    for result in results:
        known = tests.setdefault((result.repeat, result.fold), result.test_graphs)
        if known != result.test_graphs:
            raise ResultError(
                f"{result.pool} was tested on other graphs in repeat {result.repeat}, fold {result.fold} than another "
                "pool: the splits have changed in between. Start again in a new folder."
            )
