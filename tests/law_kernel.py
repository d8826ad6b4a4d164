"""The law of the flow as the kernels have it: compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

import flowpool.kernels.solve  # noqa: F401 - makes kernels of the law's functions, before anyone replaces them
from flowpool.core.law import STATE, advance
from flowpool.kernels.machine.jit import entry


@entry
def _advance(states, num_points, equal, tolerance, max_steps):  # type: ignore[no-untyped-def]
    return advance(states[0], num_points, equal, tolerance, max_steps)


def advance_compiled(
    state: dict[str, Any], num_points: int, equal: bool, tolerance: float, max_steps: int
) -> tuple[int, dict[str, Any]]:
    """What the law says to a state, and the state afterwards."""
    states = np.zeros(1, STATE)
    for name, value in state.items():
        states[name] = value
    request = _advance(states, num_points, equal, tolerance, max_steps)
    return request, {name: states[name][0].item() for name in STATE.names}
