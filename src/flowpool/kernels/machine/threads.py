"""Work spread over a small pool of threads.

Each thread takes the next piece, a graph, from a common counter until none is left. No piece knows of another, so the answer
has the same bits for any number of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

STOP = -(2**62)  # a counter that stays negative, however many draw from it

MOST = 256  # threads; they are made when they are first needed

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _helpers() -> ThreadPoolExecutor:
    """The pool of this process. It is made once and never ended, so that nobody can hold one that takes no work."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MOST, thread_name_prefix="flowpool")
        return _pool


def run(work: Callable[[NDArray[np.int64]], None], pieces: int, threads: int, patient: bool = False) -> None:
    """Calls ``work(counter)`` in up to ``threads`` threads, the calling one among them.

    Args:
        work: handles piece k of the work for each k < ``pieces`` that it draws from the counter, and stops early when
            the counter is negative.
        patient: the calling thread waits instead of working, so that it can be interrupted; for work that takes long.
    """
    counter = np.zeros(1, np.int64)
    if patient:
        futures = [_helpers().submit(work, counter) for _ in range(min(threads, pieces, MOST))]
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
    futures = [_helpers().submit(work, counter) for _ in range(min(threads, pieces, MOST) - 1)]
    try:
        work(counter)
    finally:
        for future in futures:
            future.result()


def _forget() -> None:
    """A forked child inherits the pool but not its threads, and the lock may be held by a thread that does not exist there."""
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
