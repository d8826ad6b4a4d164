"""Work spread over a small pool of threads.

Each thread takes the next piece from a common counter until none is left. A piece is a graph, or a chunk of the nodes of a
very large one. No piece knows of another, so the answer has the same bits for any number of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

STOP = -(2**62)  # a counter that stays negative, however many draw from it

_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def _pool(threads: int) -> ThreadPoolExecutor:
    """The pool of this process. A forked child inherits the object but not its threads, so it makes its own."""
    process = os.getpid()
    with _lock:
        pool = _pools.get(process)
        if pool is None or pool._max_workers < threads:
            # An outgrown pool finishes what it was given and then ends its threads.
            if pool is not None:
                pool.shutdown(wait=False)
            _pools.clear()
            pool = _pools[process] = ThreadPoolExecutor(threads, thread_name_prefix="flowpool")
        return pool


def run(work: Callable[[NDArray[np.int64]], None], pieces: int, threads: int, patient: bool = False) -> None:
    """Calls ``work(counter)`` in up to ``threads`` threads, the calling one among them.

    Args:
        work: handles piece k of the work for each k < ``pieces`` that it draws from the counter, and stops early when
            the counter is negative.
        patient: the calling thread waits instead of working, so that it can be interrupted; for work that takes long.
    """
    counter = np.zeros(1, np.int64)
    if patient:
        count = min(threads, pieces)
        futures = [_pool(count).submit(work, counter) for _ in range(count)]
        try:
            while wait(futures, timeout=0.1).not_done:
                pass
        except BaseException:
            counter[0] = STOP
            wait(futures)
            raise
        for future in futures:
            future.result()
        return
    helpers = min(threads, pieces) - 1
    futures = []
    if helpers > 0:
        pool = _pool(helpers)
        futures = [pool.submit(work, counter) for _ in range(helpers)]
    try:
        work(counter)
    finally:
        for future in futures:
            future.result()


def _forget() -> None:
    """In a forked child the lock may be held by a thread that does not exist there."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
