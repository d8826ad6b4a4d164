"""Who computes tasks on this machine: this process, or several; one task per core, in one thread each.

One thread, because sums over several threads are ordered otherwise: so the results are the same to the last bit for any
number of processes, and on a cluster (`flowpool.lab.on_ray`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from flowpool.lab.results import Failure, Result, Task

Work = Callable[[Task], Result | Failure]  # it can be pickled


class Workers(Protocol):
    """Something that does work."""

    def run(self, work: Work, tasks: Sequence[Task]) -> Iterator[Result | Failure]:
        """What comes of the tasks, as they end."""

    def doing(self) -> str:
        """What is running where, for a progress bar."""


@dataclass
class LocalWorkers:
    """Processes of this machine; one is this process itself."""

    jobs: int = 1

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError(f"{self.jobs} jobs; at least 1 is needed.")

    def doing(self) -> str:
        return ""

    def run(self, work: Work, tasks: Sequence[Task]) -> Iterator[Result | Failure]:
        jobs = min(self.jobs, len(tasks))
        if jobs > 1:
            yield from _by_processes(work, tasks, jobs)
            return
        for task in tasks:
            with threads(1):
                end = work(task)
            yield end


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads for torch, and as many as before in the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _by_processes(work: Work, tasks: Sequence[Task], jobs: int) -> Iterator[Result | Failure]:
    others = set(multiprocessing.active_children())
    # A fresh interpreter each, not a fork: copies of a process with threads may hang.
    executor = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
    try:
        with _uninterrupted():
            futures = [executor.submit(work, task) for task in tasks]
        for future in as_completed(futures):
            yield future.result()
    except BaseException:
        # Nobody waits for half a fold: workers hold nothing that counts.
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


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


def _start_worker() -> None:
    """Sets up a worker process: one thread, and an end when its parent ends."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its parent is gone: a killed parent cannot tell its workers, who would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
