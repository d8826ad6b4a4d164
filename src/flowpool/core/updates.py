r"""Examples of ``update_step`` in Algorithm 1 of the paper (section 6): how X moves, given the gradient of the divergence.

Any function ``(points, gradient, step, state) -> (points, state)`` will do: X and its gradient are ``(B, M, D)``, the step is
:math:`\tau`, and the state is ``None`` at first and then whatever was returned before. It must treat the B clouds alike, and
be differentiable where steps are unrolled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

UpdateStep = Callable[[Tensor, Tensor, float, Any], tuple[Tensor, Any]]


def gradient_descent(points: Tensor, gradient: Tensor, step: float, _: Any) -> tuple[Tensor, Any]:
    """``X - tau G``, as in section 8.1 of the paper."""
    return points - step * gradient, None


def momentum(points: Tensor, gradient: Tensor, step: float, state: Any) -> tuple[Tensor, Any]:
    """Heavy ball: ``V <- 0.9 V + G``, ``X <- X - tau V``."""
    velocity = gradient if state is None else 0.9 * state + gradient
    return points - step * velocity, velocity


def adam(points: Tensor, gradient: Tensor, step: float, state: Any) -> tuple[Tensor, Any]:
    """Adam with its usual decays 0.9 and 0.999."""
    count, mean, square = (1, 0.1 * gradient, 0.001 * gradient.square())
    if state is not None:
        count, mean, square = state[0] + 1, mean + 0.9 * state[1], square + 0.999 * state[2]
    # Inside the root the small number keeps its derivative finite.
    scale = (square / (1 - 0.999**count) + 1e-16).sqrt()
    return points - step * mean / (1 - 0.9**count) / scale, (count, mean, square)


UPDATES: dict[str, UpdateStep] = {"gradient": gradient_descent, "momentum": momentum, "adam": adam}


def checked(returned: Any, points: Tensor) -> tuple[Tensor, Any]:
    """What an ``update_step`` has returned for these points, if it is of the right form."""
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], Tensor):
        found = type(returned).__name__
        raise TypeError(f"update_step returned a {found}; return the points and a state, which may be None.")
    if returned[0].shape != points.shape:
        shapes = f"{tuple(returned[0].shape)} for points of shape {tuple(points.shape)}"
        raise ValueError(f"update_step returned shape {shapes}; return all points, moved.")
    return returned


def resolve(update_step: str | UpdateStep) -> UpdateStep:
    """The function behind a name."""
    if isinstance(update_step, str):
        if update_step not in UPDATES:
            raise ValueError(
                f"Unknown update_step {update_step!r}; pass {', '.join(map(repr, UPDATES))} or a function."
            )
        return UPDATES[update_step]
    if not callable(update_step):
        raise TypeError(f"update_step is a {type(update_step).__name__}; pass a name or a function.")
    return update_step
