"""The law of the flow as the kernels have it: compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

import flowpool.kernels.solve  # noqa: F401 - makes kernels of the law's functions, before anyone replaces them
from flowpool.core.law import CLOCK, advance
from flowpool.kernels.machine.jit import entry


@entry
def _advance(clocks, num_points, equal, tolerance, max_steps):  # type: ignore[no-untyped-def]
    return advance(clocks[0], num_points, equal, tolerance, max_steps)


def advance_compiled(
    clock: dict[str, Any], num_points: int, equal: bool, tolerance: float, max_steps: int
) -> tuple[int, dict[str, Any]]:
    """What the law says to a clock, and the clock afterwards."""
    clocks = np.zeros(1, CLOCK)
    for name, value in clock.items():
        clocks[name] = value
    request = _advance(clocks, num_points, equal, tolerance, max_steps)
    return request, {name: clocks[name][0].item() for name in CLOCK.names}
