"""The fair comparison: every pool in the same model, on the same folds, from the same seeds, in the same order.

Two protocols, one path through the code. The paper's (section 9): one setting, one training per fold, early stopping
on the validation loss. That of Errica et al. ("A Fair Comparison of Graph Neural Networks for Graph Classification",
2020): per fold the setting of a grid that is best in validation accuracy, then three fresh trainings of it, whose mean
counts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch

from flowpool.lab import identity
from flowpool.lab.backbones import check_backbone, prepare
from flowpool.lab.datasets import (
    Fold,
    GraphDataset,
    load_dataset,
    load_splits,
    make_shapes,
    origin_of_splits,
    repeat_splits,
    require_equal_masses,
)
from flowpool.lab.leakproof import Exam, Practice, divide
from flowpool.lab.model import Classifier, Shape, build_model, derived_seed
from flowpool.lab.names import Propagation, TrainedProtocol
from flowpool.lab.pools import POOLS, FlowSettings, pool_class
from flowpool.lab.results import Candidate, Failure, Kind, Result, ResultFolder, Run, Store, Task
from flowpool.lab.training import Schedule, StopOn, Trained, train

SHAPES = "SHAPES"  # the one dataset that is made, not read


class Sourced(Protocol):
    """A configuration of any protocol, as far as it says where graphs and folds are."""

    @property
    def dataset(self) -> str: ...
    @property
    def data(self) -> str | None: ...


@dataclass(frozen=True)
class Grid:
    """The settings among which validation accuracy chooses; a grid of one leaves nothing to choose."""

    channels: tuple[int, ...]
    learning_rates: tuple[float, ...]
    stop_on: tuple[StopOn, ...]
    layers: tuple[int, ...] = (2,)

    def candidates(self) -> list[Candidate]:
        values = itertools.product(self.channels, self.learning_rates, self.stop_on, self.layers)
        return [Candidate(*chosen) for chosen in values]


@dataclass(frozen=True)
class Preset:
    """Model, training and grids that go together; what the command line gives comes on top."""

    shape: Shape
    schedule: Schedule
    grids: dict[TrainedProtocol, Grid]


PRESETS = {
    "plain": Preset(
        Shape(),
        Schedule(),
        {
            "paper": Grid((8,), (0.01,), ("loss",)),
            "errica": Grid((32, 64), (0.01, 0.001), ("loss", "accuracy")),
        },
    ),
    # Of the field's strength. With a plain sum it has more than the GIN of Errica et al. on PROTEINS and IMDB-BINARY, on
    # ENZYMES only with the grid, and less on NCI1 without it: docs/results.md.
    "strong": Preset(
        Shape("gin", size="append", norm="both", jumping=True, hidden=64, dropout=0.5, standardise=True, num_points=8),
        Schedule(max_epochs=80, patience=80, weight_decay=1e-2, cosine=True, settling=0.25),
        {
            "paper": Grid((32,), (2e-3,), ("accuracy",), (3,)),
            "errica": Grid((32, 64), (2e-3,), ("accuracy",), (2, 3, 5)),
        },
    ),
}
FINAL_RUNS = {"paper": 1, "errica": 3}


@dataclass(frozen=True)
class Configuration:
    """Everything that decides the numbers of an evaluation, apart from the pools and the number of repeats.

    Attributes:
        dataset: name of the dataset.
        data: folder to look into, as in `load_dataset`; not part of the identity, the content of the dataset is.
        protocol: see the module.
        grid: the settings to choose from.
        propagation: of the backbone sgc, else None.
        shape: the model; its ``channels`` and ``layers`` are those of the grid.
        schedule: the training; its learning rate and criterion are those of the grid.
        seed: of all weights and orders.
        flow: settings of the pools that run the flow.
    """

    dataset: str = "MUTAG"
    data: str | None = None
    protocol: TrainedProtocol = "paper"
    grid: Grid = PRESETS["plain"].grids["paper"]
    propagation: Propagation | None = "normalised"
    shape: Shape = Shape()
    schedule: Schedule = Schedule()
    seed: int = 0
    flow: FlowSettings = FlowSettings()

    def __post_init__(self) -> None:
        if self.protocol not in FINAL_RUNS:
            raise ValueError(f"Unknown protocol {self.protocol!r}; pass {', '.join(FINAL_RUNS)}.")
        check_backbone(self.shape.backbone, self.propagation)
        candidates = self.grid.candidates()
        if not candidates or (self.protocol == "paper" and len(candidates) > 1):
            raise ValueError(
                f"The grid has {len(candidates)} settings; the paper's protocol trains exactly one. "
                "Pass one value for each, or choose the protocol errica."
            )
        for candidate in candidates:
            self.shape_of(candidate)
            self.schedule_of(candidate)

    @property
    def is_as_in_paper(self) -> bool:
        """Whether everything that the paper states about its table (section 9) is as it states it.

        It does not state how graphs are batched and how the flow is set.
        """
        stated = replace(self, data=None, seed=0, flow=FlowSettings(), shape=replace(self.shape, padding="none"))
        return stated == Configuration()

    def shape_of(self, candidate: Candidate) -> Shape:
        return replace(self.shape, channels=candidate.channels, layers=candidate.layers)

    def schedule_of(self, candidate: Candidate) -> Schedule:
        stop_on: StopOn = "loss" if candidate.stop_on == "loss" else "accuracy"
        return replace(self.schedule, learning_rate=candidate.learning_rate, stop_on=stop_on)

    def identity(self) -> dict[str, Any]:
        """Plain data that is equal exactly for evaluations whose folds may be put side by side."""
        shape, schedule = asdict(self.shape), asdict(self.schedule)
        del shape["channels"], shape["layers"], schedule["learning_rate"], schedule["stop_on"]  # in the grid
        return {
            "dataset": self.dataset,
            "graphs": identity.of_graphs(load_graphs(self.dataset, self.data)),
            "splits": identity.of_folds(folds_of(self.dataset, self.data, 0)),
            "protocol": self.protocol,
            "propagation": self.propagation,
            "seed": self.seed,
            "flow": asdict(self.flow),
            "code": identity.of_sources(),
            "packages": identity.of_packages(),
            **asdict(self.grid),
            **shape,
            **schedule,
        }


def evaluate(
    configuration: Configuration, tasks: Sequence[Task], store: Store, *, jobs: int = 1
) -> Iterator[Result | Failure]:
    """Computes the tasks whose results are not in the store, and hands over each as it is done and saved.

    A fold that raises is a `Failure`, kept with its reason; the others go on. It is tried again the next time.

    Args:
        configuration: what to train.
        tasks: see `make_tasks`.
        store: the result folder of this configuration.
        jobs: processes; each trains one fold at a time on its share of the cores.
    """
    return compute(partial(run_fold, configuration), tasks, store, jobs=jobs)


def compute(
    work: Callable[[Task], Kind], tasks: Sequence[Task], store: ResultFolder[Kind], *, jobs: int
) -> Iterator[Kind | Failure]:
    """Does the work of the tasks whose results are not in the store, and hands over each result once it is saved.

    Args:
        work: computes one fold; it can be pickled.
        tasks: the folds.
        store: where results are kept.
        jobs: processes.
    """
    if jobs < 1:
        raise ValueError(f"{jobs} jobs; at least 1 is needed.")
    todo = [task for task in tasks if store.load(task) is None]
    jobs = min(jobs, len(todo))
    if jobs <= 1:
        for task in todo:
            yield _run_and_save(work, task, store)
        return
    others = set(multiprocessing.active_children())
    # A fresh interpreter each, not a fork: copies of a process with threads may hang.
    executor = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(max(1, torch.get_num_threads() // jobs),),
    )
    try:
        with _uninterrupted():
            futures = [executor.submit(_run_and_save, work, task, store) for task in todo]
        for future in as_completed(futures):
            yield future.result()
    except BaseException:
        # Nobody waits for half a fold: workers hold nothing that is not written.
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def chosen_pools(text: str) -> tuple[str, ...]:
    """The pools of a list that is separated by commas, or all of them."""
    return tuple(POOLS) if text == "all" else tuple(name.strip() for name in text.split(","))


def folder_name(identity: dict[str, Any]) -> str:
    """A name for the folder of results that is different for every configuration."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"{identity['dataset']}-{identity['backbone']}-{digest[:10]}"


def make_tasks(
    configuration: Configuration, pools: Sequence[str], repeats: int, num_folds: int | None = None
) -> list[Task]:
    """All folds of all pools, or the first so many; fold by fold, so that a table of what is done so far is fair."""
    check_names(pools, POOLS, repeats)
    require_equal_masses(load_graphs(configuration.dataset, configuration.data))
    changed = configuration.flow.changed()
    if changed and not any(pool_class(pool).has_flow_settings for pool in pools):
        raise ValueError(f"None of these pools runs the flow, so that {next(iter(changed))} would have no effect.")
    return tasks_of(configuration, pools, repeats, num_folds)


def tasks_of(configuration: Sourced, pools: Sequence[str], repeats: int, num_folds: int | None) -> list[Task]:
    """The tasks of a configuration of any protocol; ``num_folds`` None: all."""
    total = len(folds_of(configuration.dataset, configuration.data, 0))
    if num_folds is not None and not 1 <= num_folds <= total:
        raise ValueError(f"{num_folds} folds; {configuration.dataset} has {total}, pass a number from 1 to that.")
    places = itertools.product(range(repeats), range(num_folds or total))
    return [Task(pool, *where) for where in places for pool in pools]


def check_names(pools: Sequence[str], known: Collection[str], repeats: int) -> None:
    """Raises ValueError unless the pools are known and different, and there is something to repeat."""
    unknown = [pool for pool in pools if pool not in known]
    if unknown or not pools:
        found = f"Unknown pool {unknown[0]!r}" if unknown else "No pool was named"
        raise ValueError(f"{found}; there are {', '.join(known)}.")
    if len(set(pools)) < len(pools):
        raise ValueError(f"A pool is named twice in {', '.join(pools)}.")
    if repeats < 1:
        raise ValueError(f"{repeats} repeats; at least 1 is needed.")


def run_fold(configuration: Configuration, task: Task) -> Result:
    """Trains and tests one pool on one fold; the same arguments give the same result, apart from times."""
    dataset = _prepared(configuration)
    fold = folds_of(configuration.dataset, configuration.data, task.repeat)[task.fold]
    practice, exam = divide(dataset, fold)
    seed = derived_seed(configuration.seed, task.repeat, task.fold)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        candidates = _tried(configuration, task.pool, practice, seed)
        chosen = max(candidates, key=lambda candidate: candidate.validation_accuracy or 0.0)
        runs = [
            _final_run(configuration, chosen, task.pool, practice, exam, derived_seed(seed, "final", number))
            for number in range(FINAL_RUNS[configuration.protocol])
        ]
    return Result(
        *task,
        test_graphs=fold.test.tolist(),
        labels=dataset.labels[fold.test].tolist(),
        test_ratio=len(fold.test) / (len(fold.train) + len(fold.validation)),
        candidates=candidates,
        chosen=chosen,
        runs=runs,
        warnings=list(dict.fromkeys(str(warning.message) for warning in caught)),
    )


def _tried(configuration: Configuration, pool: str, practice: Practice, seed: int) -> list[Candidate]:
    """The candidates of the grid with their validation accuracies; nothing is trained if there is one only."""
    candidates = configuration.grid.candidates()
    if len(candidates) == 1:
        return candidates
    return [
        replace(
            candidate,
            validation_accuracy=_trained(configuration, candidate, pool, practice, seed)[1].validation_accuracy,
        )
        for candidate in candidates
    ]


def _trained(
    configuration: Configuration, candidate: Candidate, pool: str, practice: Practice, seed: int
) -> tuple[Classifier, Trained]:
    shape, graphs = configuration.shape_of(candidate), practice.graphs
    # All graphs, not only those that training may see: a program with fixed shapes would know it too.
    largest = int(_prepared(configuration).node_ptr.diff().max())
    model = build_model(
        pool, shape, graphs.num_features, graphs.num_classes, seed, flow=configuration.flow, largest=largest
    )
    return model, train(model, practice, configuration.schedule_of(candidate), seed)


def _final_run(
    configuration: Configuration, chosen: Candidate, pool: str, practice: Practice, exam: Exam, seed: int
) -> Run:
    model, trained = _trained(configuration, chosen, pool, practice, seed)
    graded = exam.grade(model, configuration.schedule.batch_size)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Run(graded.accuracy, graded.predictions, trained.curve, trained.best_epoch, trained.seconds, num_parameters)


def _run_and_save(work: Callable[[Task], Kind], task: Task, store: ResultFolder[Kind]) -> Kind | Failure:
    try:
        result = work(task)
    except Exception as error:
        failure = Failure(*task, reason=_reason(error), trace=traceback.format_exc())
        store.save_failure(failure)
        return failure
    store.save(result)
    return result


def _reason(error: Exception) -> str:
    """The exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C is ignored here, and for good by the processes that are started here: the parent alone speaks."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals, and may not set any
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start_worker(num_threads: int) -> None:
    """Sets up a worker process: its share of the cores, and an end when its parent ends."""
    torch.set_num_threads(num_threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its parent is gone: a killed parent cannot tell its workers, who would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@lru_cache(maxsize=4)
def load_graphs(name: str, data: str | None) -> GraphDataset:
    """The dataset of that name, loaded once per process."""
    return make_shapes() if name == SHAPES else load_dataset(name, data)


@lru_cache(maxsize=64)
def folds_of(name: str, data: str | None, repeat: int) -> tuple[Fold, ...]:
    """The folds of a repeat: the published or packaged ones first, then seeded ones."""
    labels = load_graphs(name, data).labels
    return load_splits(name, labels, data=data) if repeat == 0 else repeat_splits(labels, repeat)


def origin_of_folds(configuration: Sourced, tasks: Sequence[Task]) -> str:
    """Which folds these tasks are about, for the reader of a result."""
    origin = origin_of_splits(configuration.dataset, data=configuration.data)
    folds, repeats = {task.fold for task in tasks}, max(task.repeat for task in tasks)
    total = len(folds_of(configuration.dataset, configuration.data, 0))
    count = f"{total}" if len(folds) == total else f"the first {len(folds)} of {total}"
    again = "; repeat 1 drawn with seed 1" if repeats == 1 else f"; repeats 1 to {repeats} drawn with these seeds"
    return f"{count} folds, {origin}{again if repeats else ''}"


def _prepared(configuration: Configuration) -> GraphDataset:
    return _prepare_once(
        configuration.dataset, configuration.data, configuration.shape.backbone, configuration.propagation
    )


@lru_cache(maxsize=4)
def _prepare_once(name: str, data: str | None, backbone: Any, propagation: Any) -> GraphDataset:
    return prepare(load_graphs(name, data), backbone, propagation)
