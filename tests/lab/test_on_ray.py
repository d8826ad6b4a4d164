"""Tasks on a Ray cluster: what comes of them is what comes of them on one machine, whoever dies on the way."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from clusters import two_cores
from lab.samples import timeless

from flowpool.lab.configuration import Configuration
from flowpool.lab.evaluate import evaluate, make_tasks, run_fold
from flowpool.lab.options import Schedule
from flowpool.lab.results import Failure, Result, Store, Task
from flowpool.lab.workers import LocalWorkers

pytest.importorskip("ray", reason="Ray is not installed")
from flowpool.lab import on_ray
from flowpool.lab.on_ray import RayWorkers

SHORT = Configuration(schedule=Schedule(max_epochs=2))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with two_cores():
        yield


def test_the_same_results_as_on_one_machine_though_a_worker_is_killed(tmp_path: Path) -> None:
    tasks = make_tasks(SHORT, ["sum", "sort"], 1)[:8]
    here, there = (Store(tmp_path / name, SHORT.identity()) for name in ("here", "there"))
    list(evaluate(SHORT, tasks, here, LocalWorkers(1)))
    workers, killed, shown = RayWorkers(None, 2), 0, ""
    for _ in evaluate(SHORT, tasks, there, workers):
        shown = shown or workers.doing()
        if not killed:
            for process in psutil.Process().children(recursive=True):  # of this cluster, not of another one
                if "ray::Worker" in " ".join(process.cmdline()) and not killed:
                    process.kill()
                    killed += 1
    assert killed
    assert " 0/" in shown  # pool, repeat and fold
    assert [timeless(result) for result in there.load_all(tasks)] == [timeless(here.load(task)) for task in tasks]
    assert list(evaluate(SHORT, tasks, there, workers)) == []  # nothing is left to do


@pytest.mark.slow
def test_a_task_that_kills_every_worker_fails_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "_TRIES", 2)  # each worker takes seconds to start
    short = SHORT

    def deadly(task: Task) -> Result | Failure:  # within, so that it travels as it is: workers cannot import tests
        if task.fold == 1:
            os._exit(1)  # as if the system had killed it for want of memory
        return run_fold(short, task)

    tasks = [Task("sum", 0, fold) for fold in range(4)]
    ends = {end.task.fold: end for end in RayWorkers(None, 2).run(deadly, tasks)}
    assert sorted(ends) == [0, 1, 2, 3]
    failed = ends[1]
    assert isinstance(failed, Failure) and failed.reason.startswith("WorkerDied: its worker died 2 times")
    assert all(isinstance(ends[fold], Result) for fold in (0, 2, 3))


def test_no_workers_no_work() -> None:
    with pytest.raises(ValueError, match="0 workers; at least 1 is needed"):
        RayWorkers(None, 0)
