"""The same work on a Ray cluster: Ray Data deals out numbers of parts, and actors read, pool and keep them.

Rows travel from the file to the actor that pools them, and from there to the output, never through the driver. All
machines therefore see input and output under the same path. A part that is half done when its actor dies leaves nothing
behind and is done again.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pyarrow as pa
import torch

from flowpool.bulk.job import Job
from flowpool.bulk.sources import Part, runs
from flowpool.bulk.store import Store

try:
    import ray
    import ray.data
    from ray.exceptions import RayActorError, RayError
except ImportError as missing:
    raise ImportError("--on ray needs Ray: pip install 'flowpool[ray]'.") from missing

_TOGETHER = 8  # parts that an actor takes at a time; rows before them in a large row group are read in vain
_RETRIES = 3  # of parts whose worker died; Ray itself would go on for ever with one that kills every worker


class PoolParts:
    """An actor: it compiles the kernels once, and computes in one thread, as Ray plans with one core for it."""

    def __init__(self, job: Job, store: Store) -> None:
        torch.set_num_threads(1)
        self.job, self.store = job, store
        self.parts = {part.number: part for part in job.source.parts}
        with suppress(OSError, ValueError):  # what cannot be read is told by the call that needs it
            _, rows = next(job.source.read(job.source.parts[:1]))
            job.pool(pa.Table.from_batches([rows.slice(0, 1)]))

    def __call__(self, numbers: pa.Table) -> pa.Table:
        """Pools the parts of these numbers. Says how many rows they have, and what went wrong, if anything did."""
        done, failure = 0, None
        try:
            parts = self.store.missing([self.parts[number] for number in numbers["part"].to_pylist()])
            for count in self.job.run(parts, self.store):
                done += count
        except (OSError, ValueError) as error:
            failure = str(error)  # as an exception it would come back with pages of Ray's own
        return pa.table({"rows": pa.array([done], pa.int64()), "failure": pa.array([failure], pa.string())})


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Ray, on the cluster at an address or on this machine alone; ended at the end unless it was there before."""
    ours = not ray.is_initialized()
    if ours:
        # Left to itself, Ray would also join any cluster that somebody else has started on this machine.
        place = address or os.environ.get("RAY_ADDRESS") or "local"
        _check_reachable(place)
        # Ray's own account of its work would run through our progress bar.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        options = {"include_dashboard": False} if place == "local" else {}
        try:
            ray.init(place, log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:  # noqa: BLE001 - that is what Ray raises when it does not start in time
            reason = str(error).strip().split(". ")[0].rstrip(".")
            failure = (
                "Ray did not start on this machine" if place == "local" else f"No Ray cluster was reached at {place}"
            )
            raise ConnectionError(f"{failure}: {reason}.") from None
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    place = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = place.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"No Ray cluster was reached at {address}: {error}.") from None


def run(job: Job, parts: Sequence[Part], store: Store) -> Iterator[int]:
    """:meth:`flowpool.bulk.job.Job.run` by one actor per core of the cluster."""
    workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
    together = max(1, min(_TOGETHER, len(parts) // (4 * workers)))
    tasks = [pa.table({"part": [part.number for part in run]}) for run in runs(parts, together)]
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray 2.60 means to drop its only way to limit retries
        done = ray.data.from_arrow(tasks).map_batches(
            PoolParts,
            fn_constructor_args=(job, store),
            batch_format="pyarrow",
            batch_size=None,
            num_cpus=1,
            ray_remote_args_fn=lambda: {"max_task_retries": _RETRIES},
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(workers, len(tasks))),
        )
    try:
        for results in done.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            for result in results.to_pylist():
                if result["failure"] is not None:
                    raise OSError(f"A worker failed: {result['failure']}")
                yield result["rows"]
    except RayActorError:
        raise OSError(f"A worker died {_RETRIES + 1} times over the same parts, perhaps for want of memory.") from None
    except RayError as error:
        raise OSError(f"The Ray cluster failed: {str(error).strip().splitlines()[0]}") from None
