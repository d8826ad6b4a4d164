"""Answers are computed in threads, none for longer than a person waits, and the page can ask what is being waited for.

What takes long only once (a library is loaded, kernels are compiled, a dataset is read) does not count: it is said while
it lasts, and the time limit of a question begins behind it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

LIMIT = 10.0  # seconds of a computation
THREADS = 4  # one computes, others may hold a computation that was given up and has yet to come to its end

COMPILING = "Compiling kernels; this takes about half a minute, once."

_now: dict[object, str] = {}


class GivenUp(Exception):
    """A computation that was given up."""


class Computing:
    """Calls functions, each in a thread of its own."""

    def __init__(self) -> None:
        self._threads, self._closed = ThreadPoolExecutor(THREADS), False

    def __call__(self, function: Callable[..., Any], *given: Any) -> Any:
        if self._closed:
            raise GivenUp("The server is stopping.")
        future = self._threads.submit(function, *given)
        end = time.monotonic() + LIMIT
        while True:
            try:
                return future.result(LIMIT / 20)
            except CancelledError:
                raise GivenUp("The server is stopping.") from None
            except TimeoutError:
                if future.done():  # its own error
                    raise
                if waited_for():
                    end = time.monotonic() + LIMIT
                elif time.monotonic() > end:
                    future.cancel()
                    raise GivenUp(
                        f"This took longer than {LIMIT:g} seconds and was given up. Fewer nodes or points, or a larger "
                        "epsilon, are quicker."
                    ) from None

    def close(self) -> None:
        """Waits for what is under way: a thread inside compiled code must not outlive the interpreter."""
        self._closed = True
        self._threads.shutdown(cancel_futures=True)


@contextmanager
def once(sentence: str) -> Iterator[None]:
    """Says what is done for the first time and will not be done again."""
    key = object()
    _now[key] = sentence
    try:
        yield
    finally:
        del _now[key]


def waited_for() -> str:
    """What is under way that happens once; empty if nothing is."""
    machine = sys.modules.get("flowpool.kernels.machine.jit")  # it is loaded, perhaps just now, with the first pooling
    compiling = getattr(machine, "is_compiling", bool)()
    return " ".join([*_now.values(), *([COMPILING] if compiling else [])])
