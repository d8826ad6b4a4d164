"""Results with known accuracies, for tests of what is made of results."""

from flowpool.lab.results import Candidate, Result, Run
from flowpool.lab.training import Curve


def fold_result(pool: str, fold: int, accuracy: float, seconds: float = 1.0, repeat: int = 0) -> Result:
    """One fold with a single epoch and a single test graph."""
    chosen = Candidate({"channels": 8})
    run = Run(accuracy, [fold], seconds, 0.1, 8, 10, Curve([1.0], [1.0], [1.0]), 0)
    return Result(pool, repeat, fold, [fold], [0], 0.25, [chosen], chosen, [run], seconds, [])


# Differences 0.1, 0.2, 0.3, 0.4: mean 0.25, variance 1/60; times of an epoch 1 and 2, 3, 4, 5 seconds.
FLOW = [fold_result("flow", fold, value) for fold, value in enumerate([0.2, 0.4, 0.6, 0.8])]
SORT = [fold_result("sort", fold, value, 2.0 + fold) for fold, value in enumerate([0.1, 0.2, 0.3, 0.4])]
