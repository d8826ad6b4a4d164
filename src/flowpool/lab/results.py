"""The record of one fold, and the folder that keeps a record of every fold as it comes.

    FOLDER/configuration.json            what is evaluated; another configuration is refused
    FOLDER/POOL/repeat-0-fold-3.json     one fold of one pool
    FOLDER/POOL/failed-repeat-0-fold-4.json     one that raised, with its reason

Every file is written at once and complete, so a killed evaluation leaves whole folds and nothing else that counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flowpool.bulk.files import TEMPORARY, write_atomically
from flowpool.lab.training import Curve

CONFIGURATION = "configuration.json"


class ResultError(ValueError):
    """A result folder or file is not what it should be."""


class Task(NamedTuple):
    """One fold to be computed."""

    pool: str
    repeat: int
    fold: int


@dataclass(frozen=True)
class Candidate:
    """A setting that may be chosen, and how it did on the graphs that are for choosing."""

    setting: dict[str, Any]
    score: float | None = None  # None where there was nothing to choose


@dataclass(frozen=True)
class Run:
    """One training, or one fit of a kernel machine, and its final read-out.

    Attributes:
        score: on the test graphs.
        predictions: in the order of `Result.test_graphs`: class numbers, scores of the classes, or numbers.
        seconds: wall time of the training.
        seconds_per_thousand: of predicting, for 1,000 graphs.
        width: numbers per graph that the method hands over; zero where graphs are compared directly.
        num_parameters: trained numbers of the model.
        curve: values per epoch; None where there are no epochs.
        best_epoch: whose weights were kept, counted from 0.
    """

    score: float
    predictions: list[Any]
    seconds: float
    seconds_per_thousand: float
    width: int
    num_parameters: int = 0
    curve: Curve | None = None
    best_epoch: int | None = None


@dataclass(frozen=True)
class Result:
    """One fold of one pool.

    Attributes:
        pool, repeat, fold: which one.
        test_graphs: numbers of the graphs that were predicted.
        labels: the truth.
        test_ratio: test graphs over all others.
        candidates: what was tried.
        chosen: the setting of the runs.
        runs: final trainings.
        seconds: wall time of the whole fold.
        warnings: what the pool complained about, each once.
    """

    pool: str
    repeat: int
    fold: int
    test_graphs: list[int]
    labels: list[Any]
    test_ratio: float
    candidates: list[Candidate]
    chosen: Candidate
    runs: list[Run]
    seconds: float
    warnings: list[str]

    @property
    def task(self) -> Task:
        return Task(self.pool, self.repeat, self.fold)

    @property
    def score(self) -> float:
        """Mean over the runs."""
        return sum(run.score for run in self.runs) / len(self.runs)

    @property
    def seconds_per_epoch(self) -> float | None:
        """Of the runs that have epochs."""
        curves = [run.curve for run in self.runs if run.curve is not None]
        return sum(run.seconds for run in self.runs) / sum(len(c.train_loss) for c in curves) if curves else None


@dataclass(frozen=True)
class Failure:
    """One fold of one pool that raised an exception.

    Attributes:
        pool, repeat, fold: which one.
        reason: the exception in one line.
        trace: where it came from.
    """

    pool: str
    repeat: int
    fold: int
    reason: str
    trace: str

    @property
    def task(self) -> Task:
        return Task(self.pool, self.repeat, self.fold)


class Store:
    """A result folder that belongs to one configuration.

    Args:
        folder: made if it is not there.
        configuration: plain data, compared with what the folder was made for.
    """

    def __init__(self, folder: Path, configuration: dict[str, Any]) -> None:
        self.folder = folder
        given = json.loads(json.dumps(configuration))  # as it will be read back: lists for tuples
        if folder.exists() and not folder.is_dir():
            raise ResultError(f"{folder} is a file; name a folder for the results.")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / CONFIGURATION
        if not file.exists():
            strangers = sorted(p.name for p in folder.iterdir() if not p.name.startswith(TEMPORARY))
            if strangers:
                raise ResultError(
                    f"{folder} is no result folder: it has {strangers[0]} but no configuration.json. "
                    "Name a new or empty folder."
                )
            write_atomically(file, _to_json(given))
        found = _read_json(file)
        if found != given:
            raise ResultError(f"{folder} holds results of another configuration: {_differences(found, given)}.")
        self.configuration = given

    def path(self, task: Task) -> Path:
        return self.folder / task.pool / f"repeat-{task.repeat}-fold-{task.fold}.json"

    @staticmethod
    def open(folder: Path) -> Store:
        """The folder of an earlier evaluation."""
        file = folder / CONFIGURATION
        if not file.is_file():
            raise ResultError(f"{folder} is no result folder: it has no {CONFIGURATION}.")
        return Store(folder, _read_json(file))

    def tasks(self) -> list[Task]:
        """All that have a result or a failure here, fold by fold."""
        found = []
        for file in self.folder.glob("*/*repeat-*-fold-*.json"):
            _, _, tail = file.stem.partition("repeat-")
            repeat, _, fold = tail.partition("-fold-")
            if repeat.isdecimal() and fold.isdecimal() and not file.name.startswith(TEMPORARY):
                found.append(Task(file.parent.name, int(repeat), int(fold)))
        return sorted(set(found), key=lambda task: (task.repeat, task.fold, task.pool))

    def save(self, result: Result) -> None:
        """Keeps a result, for good once this returns."""
        path = self.path(result.task)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, _to_json(asdict(result)))
        self._failure_path(result.task).unlink(missing_ok=True)

    def save_failure(self, failure: Failure) -> None:
        """Keeps why a fold failed, until it succeeds."""
        path = self._failure_path(failure.task)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, _to_json(asdict(failure)))

    def load_failures(self, tasks: Iterable[Task]) -> list[Failure]:
        """Those tasks that failed when they were last tried."""
        paths = [path for task in tasks if (path := self._failure_path(task)).exists()]
        try:
            return [Failure(**_read_json(path)) for path in paths]
        except TypeError as error:
            raise ResultError(f"A file failed-... in {self.folder} is no record of this program ({error}).") from None

    def _failure_path(self, task: Task) -> Path:
        path = self.path(task)
        return path.with_name(f"failed-{path.name}")

    def load(self, task: Task) -> Result | None:
        """The result of a task, or None if it was not computed yet."""
        path = self.path(task)
        try:
            result = _result(_read_json(path))
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise ResultError(f"{path} is no result of this program ({error!r}). Delete it and start again.") from None
        if result.task != task:
            raise ResultError(f"{path} is the result of {result.task}. Delete it and start again.")
        return result

    def load_all(self, tasks: Iterable[Task]) -> list[Result]:
        """Those results that are there."""
        return [result for task in tasks if (result := self.load(task)) is not None]


def _result(entry: dict[str, Any]) -> Result:
    entry = dict(entry)
    entry["chosen"] = Candidate(**entry["chosen"])
    entry["candidates"] = [Candidate(**candidate) for candidate in entry["candidates"]]
    entry["runs"] = [_run(run) for run in entry["runs"]]
    result = Result(**entry)
    num_graphs = len(result.test_graphs)
    if any(len(run.predictions) != num_graphs for run in result.runs) or len(result.labels) != num_graphs:
        raise TypeError("predictions, labels and test graphs differ in number")
    if not math.isfinite(result.score + (result.seconds_per_epoch or 0.0)):
        raise TypeError("its numbers are not finite")
    return result


def _run(entry: dict[str, Any]) -> Run:
    # A loss that overflowed is null in the file: NaN is no JSON.
    if entry["curve"] is None:
        return Run(**entry)
    columns = {
        name: [math.nan if value is None else float(value) for value in column]
        for name, column in entry["curve"].items()
    }
    return Run(**(entry | {"curve": Curve(**columns)}))


def _to_json(value: Any) -> bytes:
    return (json.dumps(_without_nan(value), indent=None, allow_nan=False) + "\n").encode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return value


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (ValueError, RecursionError) as error:
        raise ResultError(
            f"{path} is damaged ({error}). Delete it and start again: only what it held is computed anew."
        ) from None


def _differences(found: Any, given: dict[str, Any]) -> str:
    if not isinstance(found, dict):
        return "configuration.json is no configuration; name another folder"
    keys = [key for key in sorted(found.keys() | given.keys()) if found.get(key) != given.get(key)]
    listed = ", ".join(f"{key} is {found.get(key)!r} there and {given.get(key)!r} here" for key in keys)
    return f"{listed}. Name another folder, or give the options it was made with"
