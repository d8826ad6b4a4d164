"""Results with known scores, for tests of what is made of results."""

from dataclasses import asdict
from typing import Any

from flowpool.lab.results import Candidate, Result, Run
from flowpool.lab.training import Curve


def fold_result(pool: str, fold: int, score: float, seconds: float = 1.0, repeat: int = 0) -> Result:
    """One fold with a single epoch and a single test graph."""
    chosen = Candidate({"channels": 8, "learning_rate": 0.01})
    run = Run(
        score,
        predictions=[fold],
        seconds=seconds,
        seconds_per_thousand=2.0,
        width=40,
        num_parameters=10,
        curve=Curve([1.0], [1.0], [1.0]),
        best_epoch=0,
    )
    return Result(pool, repeat, fold, [fold], [0], 0.25, [chosen], chosen, [run], seconds, [])


# Differences 0.1, 0.2, 0.3, 0.4: mean 0.25, variance 1/60; times of an epoch 1 and 2, 3, 4, 5 seconds.
FLOW = [fold_result("flow", fold, value) for fold, value in enumerate([0.2, 0.4, 0.6, 0.8])]
SORT = [fold_result("sort", fold, value, 2.0 + fold) for fold, value in enumerate([0.1, 0.2, 0.3, 0.4])]


def timeless(result: Result | None) -> dict[str, Any]:
    """Everything but the clock."""
    assert result is not None
    entry = asdict(result)
    del entry["seconds"]
    for run in entry["runs"]:
        del run["seconds"], run["seconds_per_thousand"]
    return entry
