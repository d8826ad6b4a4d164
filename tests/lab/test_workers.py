"""Who computes makes no difference; and whoever is killed goes on where it was."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lab.samples import timeless

from flowpool.lab.configuration import Configuration
from flowpool.lab.evaluate import evaluate, make_tasks
from flowpool.lab.options import Schedule
from flowpool.lab.results import Store, Task
from flowpool.lab.workers import LocalWorkers, threads

SHORT = Configuration(schedule=Schedule(max_epochs=2))


def store_of(folder: Path) -> Store:
    return Store(folder, SHORT.identity())


def test_processes_reach_the_same_results(tmp_path: Path) -> None:
    tasks = make_tasks(SHORT, ["sum", "sort"], 1)[:6]
    list(evaluate(SHORT, tasks, store_of(tmp_path / "one"), LocalWorkers(1)))
    results = list(evaluate(SHORT, tasks, store_of(tmp_path / "two"), LocalWorkers(2)))
    assert sorted(result.task for result in results) == sorted(tasks)
    for task in tasks:
        assert timeless(store_of(tmp_path / "one").load(task)) == timeless(store_of(tmp_path / "two").load(task))


def _evaluate_in_child(folder: str, tasks: list[Task]) -> None:
    torch.set_num_threads(1)
    for _ in evaluate(SHORT, tasks, store_of(Path(folder)), LocalWorkers(1)):
        pass


def test_killed_at_random_moments_it_goes_on_and_reaches_the_same_results(tmp_path: Path) -> None:
    tasks = make_tasks(SHORT, ["sum", "mean"], 1)
    whole = evaluate(SHORT, tasks, store_of(tmp_path / "whole"), LocalWorkers(1))
    expected = [timeless(result) for result in whole]  # type: ignore[arg-type]
    folder = tmp_path / "killed"
    # Children of a server that has imported everything start at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flowpool.lab.evaluate"])
    moments = np.random.default_rng(0)
    kills, done = 0, 0
    while done < len(tasks):
        child = context.Process(target=_evaluate_in_child, args=(str(folder), tasks))
        child.start()
        enough = min(len(tasks), done + int(moments.integers(1, 7)))
        while child.is_alive() and len(list(folder.glob("*/repeat-*.json"))) < enough:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.02))
        if child.is_alive() and child.pid is not None:
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        kills += child.exitcode == -signal.SIGKILL
        kept = len(store_of(folder).load_all(tasks))
        assert kept >= enough
        done = kept
    assert kills >= 3
    assert [timeless(store_of(folder).load(task)) for task in tasks] == expected


def test_no_jobs_no_work() -> None:
    with pytest.raises(ValueError, match="0 jobs"):
        LocalWorkers(0)


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), threads(1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before
