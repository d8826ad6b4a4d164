"""The tasks of an evaluation on a Ray cluster: one actor per core computes, and this process keeps what they found.

All machines see the data under the same path. A task whose actor died is dealt out again, a few times; a driver that was
killed goes on where it stopped, as on one machine.
"""

from __future__ import annotations

import socket
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flowpool.bulk.on_ray import cluster  # says so where Ray is missing
from flowpool.lab.results import Failure, Result, Task
from flowpool.lab.workers import Work

import ray  # isort: skip
from ray.exceptions import RayActorError, RayError  # isort: skip

_TRIES = 4  # of a task whose worker died


class Worker:
    """An actor; it computes in one thread, as Ray plans with one core for it."""

    def __init__(self, work: Work) -> None:
        torch.set_num_threads(1)
        self.work = work

    def host(self) -> str:
        return socket.gethostname()

    def do(self, task: Task) -> Result | Failure:
        return self.work(Task(*task))


@dataclass
class RayWorkers:
    """Actors on the cluster at an address, or on one that is started on this machine for the occasion.

    Attributes:
        address: see `flowpool.bulk.on_ray.cluster`.
        number: of actors, at most one per core; None: one per core.
    """

    address: str | None = None
    number: int | None = None
    _running: dict[Any, tuple[Any, Task]] = field(default_factory=dict)
    _hosts: dict[Any, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.number is not None and self.number < 1:
            raise ValueError(f"{self.number} workers; at least 1 is needed.")

    def doing(self) -> str:
        """What is running where."""
        running = [
            f"{task.pool} {task.repeat}/{task.fold} on {self._hosts.get(a, '?')}" for a, task in self._running.values()
        ]
        return ", ".join(running)

    def run(self, work: Work, tasks: Sequence[Task]) -> Iterator[Result | Failure]:
        if not tasks:
            return
        with cluster(self.address):
            try:
                yield from self._run(work, list(tasks))
            except RayError as error:
                raise OSError(f"The Ray cluster failed: {str(error).strip().splitlines()[0]}") from None
            finally:
                self._running.clear()

    def _run(self, work: Work, tasks: list[Task]) -> Iterator[Result | Failure]:
        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        kind, given = ray.remote(Worker).options(num_cpus=1), ray.put(work)
        waiting, deaths = list(reversed(tasks)), Counter[Task]()

        def begin() -> None:
            actor, task = kind.remote(given), waiting.pop()
            self._running[actor.do.remote(tuple(task))] = actor, task
            hosts[actor.host.remote()] = actor

        hosts: dict[Any, Any] = {}
        for _ in range(min(self.number or cores, cores, len(tasks))):
            begin()
        while self._running:
            done, _ = ray.wait([*self._running, *hosts], num_returns=1)
            for ready in done:
                if ready in hosts:
                    self._note_host(ready, hosts.pop(ready))
                    continue
                actor, task = self._running.pop(ready)
                try:
                    end = ray.get(ready)
                except RayActorError:
                    deaths[task] += 1
                    if deaths[task] < _TRIES:
                        waiting.append(task)
                    else:
                        reason = f"WorkerDied: its worker died {_TRIES} times, perhaps for want of memory."
                        yield Failure(*task, reason=reason, trace=traceback.format_exc())
                    if waiting:
                        begin()
                    continue
                if waiting:  # before the result is written, so that nobody waits for that
                    following = waiting.pop()
                    self._running[actor.do.remote(tuple(following))] = actor, following
                yield end

    def _note_host(self, ready: Any, actor: Any) -> None:
        try:
            self._hosts[actor] = ray.get(ready)
        except RayActorError:  # its task will say so
            return
