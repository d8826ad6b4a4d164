"""The fair comparison: every pool in the same model, on the same folds, from the same seeds, in the same order.

A task is a pool, a repeat and a fold. Settings are chosen inside the training part by a `Learner`, of which there are two
kinds: networks that are trained, and kernel machines that are fitted to embeddings which nobody trains. Whatever comes of
it is graded by test graphs that the learner has never seen, in one way for both.
"""

from __future__ import annotations

import itertools
import math
import time
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flowpool.lab.configuration import Configuration
from flowpool.lab.datasets import Fold, GraphDataset, require_equal_masses
from flowpool.lab.frozen.selection import KernelLearner
from flowpool.lab.leakproof import Exam, Practice, divide
from flowpool.lab.metrics import Metric
from flowpool.lab.model import derived_seed
from flowpool.lab.networks import NetworkLearner
from flowpool.lab.pools import POOLS, pool_class
from flowpool.lab.presets import FINAL_RUNS
from flowpool.lab.results import Candidate, Failure, Result, Run, Store, Task
from flowpool.lab.workers import Workers


class Learned(Protocol):
    """What has learned from the graphs of a practice."""

    @property
    def about(self) -> dict[str, Any]:
        """What a `Run` says of it, apart from score, predictions and time of prediction."""

    def predict(self, graphs: GraphDataset) -> NDArray[Any]:
        """For `Metric.score`; the labels of the graphs are not looked at."""


class Learner(Protocol):
    """A method with what it can choose from."""

    def candidates(self, practice: Practice, seed: int) -> list[Candidate]:
        """All settings, with scores inside the practice if there are several."""

    def learn(self, practice: Practice, setting: dict[str, Any], seed: int) -> Learned:
        """A final training or fit."""


def methods_of(configuration: Configuration) -> Collection[str]:
    """Names of what can be compared in a protocol."""
    if configuration.protocol != "frozen":
        return POOLS
    from flowpool.lab.frozen.methods import METHODS  # POT and what it needs are slow to import

    return METHODS


def make_tasks(
    configuration: Configuration, pools: Sequence[str], repeats: int, num_folds: int | None = None
) -> list[Task]:
    """All folds of all pools, or the first so many; fold by fold, so that a table of what is done so far is fair."""
    known = methods_of(configuration)
    unknown = [pool for pool in pools if pool not in known]
    if unknown or not pools:
        found = f"Unknown pool {unknown[0]!r}" if unknown else "No pool was named"
        raise ValueError(f"{found}; there are {', '.join(known)}.")
    if len(set(pools)) < len(pools):
        raise ValueError(f"A pool is named twice in {', '.join(pools)}.")
    if repeats < 1:
        raise ValueError(f"{repeats} repeats; at least 1 is needed.")
    configuration.measure  # noqa: B018 - raises if it does not fit the data
    if configuration.protocol != "frozen":
        require_equal_masses(configuration.graphs)
        changed = configuration.flow.changed()
        if changed and not any(pool_class(pool).has_flow_settings for pool in pools):
            raise ValueError(f"None of these pools runs the flow, so that {next(iter(changed))} would have no effect.")
    total = len(configuration.folds(0))
    if num_folds is not None and not 1 <= num_folds <= total:
        raise ValueError(f"{num_folds} folds; {configuration.source.name} has {total}, pass a number from 1 to that.")
    places = itertools.product(range(repeats), range(num_folds or total))
    return [Task(pool, *where) for where in places for pool in pools]


def evaluate(
    configuration: Configuration, tasks: Sequence[Task], store: Store, workers: Workers
) -> Iterator[Result | Failure]:
    """Computes the tasks whose results are not in the store, and hands over each once it is saved.

    A fold that raises is a `Failure`, kept with its reason; the others go on. It is tried again the next time.

    Args:
        configuration: what to evaluate.
        tasks: see `make_tasks`.
        store: the result folder of this configuration.
        workers: who computes, see `flowpool.lab.workers`.
    """
    todo = [task for task in tasks if store.load(task) is None]
    for end in workers.run(partial(attempt, configuration), todo):
        if isinstance(end, Failure):
            store.save_failure(end)
        else:
            store.save(end)
        yield end


def attempt(configuration: Configuration, task: Task) -> Result | Failure:
    """The result of a fold, or why there is none."""
    try:
        return run_fold(configuration, task)
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return Failure(*task, reason=reason, trace=traceback.format_exc())


def run_fold(configuration: Configuration, task: Task) -> Result:
    """Chooses, learns and tests one pool on one fold; the same arguments give the same result, apart from times."""
    began, metric = time.perf_counter(), configuration.measure
    fold = configuration.folds(task.repeat)[task.fold]
    learner: Learner
    if configuration.protocol == "frozen":  # graphs that networks validate on are training graphs here
        together = np.sort(np.concatenate([fold.train, fold.validation]))
        fold = Fold(together, together[:0], fold.test)
        learner = KernelLearner(configuration, task.pool)
    else:
        learner = NetworkLearner(configuration, task.pool)
    practice, exam = divide(configuration.prepared, fold)
    seed = derived_seed(configuration.seed, task.repeat, task.fold)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        candidates = learner.candidates(practice, seed)
        chosen = best_of(candidates, metric)
        runs = []
        for number in range(FINAL_RUNS[configuration.protocol]):
            learned = learner.learn(practice, chosen.setting, derived_seed(seed, "final", number))
            runs.append(graded(learned, exam, metric))
    return Result(
        *task,
        test_graphs=fold.test.tolist(),
        labels=exam.labels,
        test_ratio=len(fold.test) / (len(fold.train) + len(fold.validation)),
        candidates=candidates,
        chosen=chosen,
        runs=runs,
        seconds=time.perf_counter() - began,
        warnings=list(dict.fromkeys(str(warning.message) for warning in caught)),
    )


def best_of(candidates: Sequence[Candidate], metric: Metric) -> Candidate:
    """The first of the best."""
    if not candidates:
        raise ValueError("The grid is empty; give at least one value for each of its entries.")
    best = candidates[0]
    for candidate in candidates[1:]:
        if candidate.score is not None and (
            best.score is None or not math.isfinite(best.score) or metric.better(candidate.score, best.score)
        ):
            best = candidate
    return best


def graded(learned: Learned, exam: Exam, metric: Metric) -> Run:
    """The final read-out."""
    began = time.perf_counter()
    predictions = exam.taken_by(learned.predict)
    seconds = time.perf_counter() - began
    if not np.isfinite(predictions).all():
        raise ArithmeticError(
            "Some predictions are not finite; the training has diverged. Try a smaller learning rate."
        )
    score = metric.score(predictions, np.array(exam.labels))
    return Run(score, predictions.tolist(), seconds_per_thousand=1000 * seconds / len(exam), **learned.about)


def chosen_pools(text: str, known: Collection[str]) -> tuple[str, ...]:
    """The pools of a list that is separated by commas, or all of them."""
    return tuple(known) if text == "all" else tuple(name.strip() for name in text.split(","))


def origin_of_folds(identity: dict[str, Any], tasks: Sequence[Task]) -> str:
    """Which folds these tasks are about, for the reader of a result."""
    folds, repeats = {task.fold for task in tasks}, max(task.repeat for task in tasks)
    total = identity["num_folds"]
    count = f"{total}" if len(folds) == total else f"the first {len(folds)} of {total}"
    again = "; repeat 1 drawn with seed 1" if repeats == 1 else f"; repeats 1 to {repeats} drawn with these seeds"
    if identity.get("fixed_folds"):
        again = f"; {repeats + 1} trainings with other seeds on each"
    return f"{count} folds, {identity['origin']}{again if repeats else ''}"
