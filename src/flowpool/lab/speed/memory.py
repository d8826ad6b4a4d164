"""Peak memory of some work beyond what was there before it, in a process of its own (Linux)."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak_megabytes(build: Callable[..., Callable[[], None]], *arguments: Any) -> float:
    """How far the resident memory rises while ``build(*arguments)()`` runs, in MB.

    ``build`` prepares everything that should not count, including a first small call, and returns the work.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        result: float = pool.apply(_measure, (build, arguments))
    return result


def _measure(build: Callable[..., Callable[[], None]], arguments: tuple[Any, ...]) -> float:
    work = build(*arguments)
    # The peak that getrusage gives is inherited from the parent process; this one can be set back.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def _resident(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6
