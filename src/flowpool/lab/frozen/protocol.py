"""One fold after the other: what is evaluated, the record of a fold, and the folder that keeps the records."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from flowpool.lab import evaluate as lab
from flowpool.lab import identity
from flowpool.lab.frozen.methods import METHODS
from flowpool.lab.frozen.selection import Grid, Setting, learn
from flowpool.lab.leakproof import subset
from flowpool.lab.model import derived_seed
from flowpool.lab.results import Failure, ResultFolder, Task


@dataclass(frozen=True)
class Frozen:
    """Everything that decides the numbers, apart from the methods and the number of repeats.

    Attributes:
        dataset: name of the dataset.
        data: folder to look into, as in `load_dataset`.
        num_points: M, for methods that have points.
        grid: what the inner folds choose from.
        seed: of k-means, of random directions and of the inner folds.
    """

    dataset: str = "MUTAG"
    data: str | None = None
    num_points: int = 8
    grid: Grid = field(default_factory=Grid)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_points < 1:
            raise ValueError(f"{self.num_points} points; at least 1 is needed.")

    def identity(self) -> dict[str, Any]:
        """Plain data that is equal exactly for evaluations whose folds may be put side by side."""
        return {
            "dataset": self.dataset,
            "graphs": identity.of_graphs(lab.load_graphs(self.dataset, self.data)),
            "splits": identity.of_folds(lab.folds_of(self.dataset, self.data, 0)),
            "protocol": "frozen",
            "num_points": self.num_points,
            "seed": self.seed,
            "code": identity.of_sources(),
            "packages": identity.of_packages(),
            **asdict(self.grid),
        }


@dataclass(frozen=True)
class FrozenResult:
    """One fold of one method.

    Attributes:
        pool, repeat, fold: which one.
        test_graphs: numbers of the graphs that were predicted.
        labels: their classes.
        predictions: class numbers, in the order of ``test_graphs``.
        test_ratio: test graphs over all others.
        chosen: the setting that was best on the training graphs.
        width: numbers per graph; zero for methods that compare graphs directly.
        seconds: for choosing and fitting.
        seconds_per_thousand: for predicting, per 1,000 test graphs.
        warnings: what was complained about, each once.
    """

    pool: str
    repeat: int
    fold: int
    test_graphs: list[int]
    labels: list[int]
    predictions: list[int]
    test_ratio: float
    chosen: Setting
    width: int
    seconds: float
    seconds_per_thousand: float
    warnings: list[str]

    @property
    def task(self) -> Task:
        return Task(self.pool, self.repeat, self.fold)

    @property
    def accuracy(self) -> float:
        return float(np.mean(np.array(self.predictions) == np.array(self.labels)))


class FrozenStore(ResultFolder[FrozenResult]):
    """A folder of results of the frozen protocol."""

    def read(self, entry: dict[str, Any]) -> FrozenResult:
        result = FrozenResult(**(entry | {"chosen": Setting(**entry["chosen"])}))
        if not len(result.predictions) == len(result.labels) == len(result.test_graphs) > 0:
            raise TypeError("predictions, labels and test graphs differ in number")
        return result


def chosen_methods(text: str) -> tuple[str, ...]:
    """The methods of a list that is separated by commas, or all of them."""
    return tuple(METHODS) if text == "all" else tuple(name.strip() for name in text.split(","))


def make_tasks(configuration: Frozen, methods: Sequence[str], repeats: int, num_folds: int | None = None) -> list[Task]:
    """All folds of all methods, or the first so many; fold by fold, so that a table of what is done so far is fair."""
    lab.check_names(methods, METHODS, repeats)
    return lab.tasks_of(configuration, methods, repeats, num_folds)


def evaluate(
    configuration: Frozen, tasks: Sequence[Task], store: FrozenStore, *, jobs: int = 1
) -> Iterator[FrozenResult | Failure]:
    """Computes the tasks whose results are not in the store, and hands over each as it is done and saved."""
    return lab.compute(partial(run_fold, configuration), tasks, store, jobs=jobs)


def run_fold(configuration: Frozen, task: Task) -> FrozenResult:
    """Chooses, fits and tests one method on one fold; the same arguments give the same result, apart from times.

    The test graphs are copied away before anything is fitted, and asked for predictions once, in the end. Graphs that
    the trained protocols validate on are training graphs here.
    """
    dataset = lab.load_graphs(configuration.dataset, configuration.data)
    fold = lab.folds_of(configuration.dataset, configuration.data, task.repeat)[task.fold]
    practice = subset(dataset, np.sort(np.concatenate([fold.train, fold.validation])))
    exam = subset(dataset, fold.test)
    seed = derived_seed(configuration.seed, task.repeat, task.fold)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin = time.perf_counter()
        learned = learn(practice, task.pool, configuration.num_points, seed, configuration.grid)
        middle = time.perf_counter()
        predictions = learned.predict(exam)
        end = time.perf_counter()
    return FrozenResult(
        *task,
        test_graphs=fold.test.tolist(),
        labels=exam.labels.tolist(),
        predictions=predictions,
        test_ratio=len(exam) / len(practice),
        chosen=learned.setting,
        width=learned.width,
        seconds=middle - begin,
        seconds_per_thousand=1000 * (end - middle) / len(exam),
        warnings=list(dict.fromkeys(str(warning.message) for warning in caught)),
    )
