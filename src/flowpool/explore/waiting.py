"""Answers are computed in threads, none for longer than a person waits, and the page can ask what is being waited for.

What takes long only once (a library is loaded, kernels are compiled, a dataset is read) does not count: it is said while
it lasts, and the time limit of a question begins behind it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

LIMIT = 10.0  # seconds of a computation
THREADS = 4  # one computes, others may hold a computation that was given up and has yet to come to its end
_LASTING = 15.0  # seconds for which a line of the log is news; a compilation says something every five

_now: dict[object, str] = {}
_logged = ("", 0.0)


class GivenUp(Exception):
    """A computation that was given up."""


class Computing:
    """Calls functions, each in a thread of its own."""

    def __init__(self) -> None:
        self._threads, self._closed = ThreadPoolExecutor(THREADS), False
        self._handler = _Listening(logging.WARNING)
        logging.getLogger("flowpool").addHandler(self._handler)

    def __call__(self, function: Callable[..., Any], *given: Any) -> Any:
        if self._closed:
            raise GivenUp("The server is stopping.")
        future = self._threads.submit(function, *given)
        while True:
            try:
                return future.result(LIMIT)
            except CancelledError:
                raise GivenUp("The server is stopping.") from None
            except TimeoutError:
                if future.done():  # its own error
                    raise
                if not waited_for():
                    future.cancel()
                    raise GivenUp(
                        f"This took longer than {LIMIT:g} seconds and was given up. Fewer nodes or points, or a larger "
                        "epsilon, are quicker."
                    ) from None

    def close(self) -> None:
        """Waits for what is under way: a thread inside compiled code must not outlive the interpreter."""
        self._closed = True
        logging.getLogger("flowpool").removeHandler(self._handler)
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
    sentence, at = _logged
    return " ".join([*_now.values(), *([sentence] if time.monotonic() < at + _LASTING else [])])


class _Listening(logging.Handler):
    """Remembers what the library last said: it says when it compiles."""

    def emit(self, record: logging.LogRecord) -> None:
        global _logged
        _logged = (record.getMessage(), time.monotonic())
