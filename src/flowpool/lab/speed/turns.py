"""How times are taken here: whatever is compared takes turns, since machines change their pace, and a first call does not count."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

Key = TypeVar("Key")
Clock = Callable[[], float]
Times = tuple[float, ...]  # seconds, one number for each pass


def in_turns(
    work: Mapping[Key, Callable[[], Times]], least: int, seconds: float = 0.0, *, warm: bool = True
) -> dict[Key, list[Times]]:
    """What each work says it took, for as many turns as fit into the seconds, and at least so many.

    Args:
        work: calls that time themselves, see `passes` and `whole`.
        least: turns that count.
        seconds: after which no turn begins.
        warm: whether a turn before these does not count: it loads, compiles and allocates.
    """
    if warm:
        in_turns(work, 1, warm=False)
    found: dict[Key, list[Times]] = {name: [] for name in work}
    began, turns = time.perf_counter(), 0
    while turns < least or time.perf_counter() - began < seconds:
        for name, call in work.items():
            found[name].append(call())
        turns += 1
    return found


def passes(
    forward: Callable[[], Tensor], upstream: Tensor | None = None, *, clock: Clock | None = None, wait: Any = None
) -> Callable[[], Times]:
    """Times of a forward pass and of a backward pass from its sum, or from a given cotangent.

    Args:
        forward: the pass.
        upstream: the cotangent.
        clock: that tells seconds; default: the time that passes.
        wait: for a device to be done with what it was asked for.
    """
    now, done = clock or time.perf_counter, wait or (lambda: None)

    def work() -> Times:
        done()
        began = now()
        output = forward()
        done()
        middle = now()
        if upstream is None:
            output.sum().backward()
        else:
            output.backward(upstream)
        done()
        return middle - began, now() - middle

    return work


def whole(call: Callable[[], Any], clock: Clock) -> Callable[[], Times]:
    """The time of a call."""

    def work() -> Times:
        began = clock()
        call()
        return (clock() - began,)

    return work


def shortest(taken: list[Times]) -> Times:
    """Of each pass."""
    return tuple(min(times) for times in zip(*taken, strict=True))


def processor() -> str:
    """What this machine calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    return f"{named[0] if named else platform.machine()}, {'with' if 'avx512f' in flags else 'without'} AVX-512"
