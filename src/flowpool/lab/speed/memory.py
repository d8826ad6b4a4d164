"""Peak memory of one forward and backward pass beyond what the input takes, in a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable
from typing import Any


def peak_megabytes(build: Callable[..., Any], *arguments: Any) -> float:
    """Growth of the resident peak while ``build(*arguments)()`` runs, in MB.

    ``build`` prepares everything that should not count, including a first small call, and returns the work.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        result: float = pool.apply(_measure, (build, arguments))
    return result


def _measure(build: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    work = build(*arguments)
    before = _peak()
    work()
    return (_peak() - before) / 1e6


def _peak() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
