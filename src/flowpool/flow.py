r"""The Wasserstein gradient flow from X^(0) to X* (sections 5 and 6 of the paper).

In the metric of the masses the flow is :math:`\dot x_i = -\nabla_{x_i} S_\varepsilon / (2 a_i)`; for the squared
Euclidean cost this is the difference of two barycentric maps, and a step of length one jumps to it. The divergence has
many local minima, and the flow decides which one is meant. So :func:`follow` integrates the flow accurately while it
matters, and jumps only at the end:

1. explicit steps (Adams-Bashforth 2) while the points race in from X^(0),
2. linearly implicit steps (Rosenbrock 2) along the slow part, where explicit ones would be limited by stability,
3. Newton steps once the flow is so slow that the nearest minimum is its limit.

It stops on the length of the Newton step: with a flat Hessian a small gradient alone does not place X*.
:func:`descend` is Algorithm 1 of the paper as it stands, with a fixed step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flowpool.divergence import Energy, Evaluation, Scales
from flowpool.hessian import Hessian, hessian
from flowpool.schedule import (
    ERROR,
    FIRST_STEP,
    GAMMA,
    LONGEST_EXPLICIT,
    MOST_EXPLICIT,
    NEAR,
    PROGRESS,
    SHORTEST,
    SLOW,
    TIGHTEST,
    TINY,
    TINY_PROGRESS,
)

T = TypeVar("T")


class Flowed(NamedTuple):
    """End of the flow for a batch of clouds.

    Attributes:
        points: X*, ``(B, M, D)``.
        potential: f of the transport to the nodes, ``(B, M)``; a warm start for whoever needs the plan again.
        self_potential: h of the transport of X* to itself, ``(B, M)``; zeros when the energy is not debiased.
        residual: length of the Newton step left at X*, in units of R, ``(B,)``.
        steps: ``(B,)`` int64.
        singular: the Hessian at X* is singular: the minimiser is not isolated, ``(B,)`` bool.
    """

    points: Tensor
    potential: Tensor
    self_potential: Tensor
    residual: Tensor
    steps: Tensor
    singular: Tensor


def take(value: T, index: Tensor) -> T:
    """Entries of a (nested) record of batched tensors."""
    if value is None:
        return value
    if isinstance(value, Tensor):
        return value[index]  # type: ignore[return-value]
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{k: take(getattr(value, k), index) for k in value.__dataclass_fields__})
    return type(value)(*(take(v, index) for v in value))  # type: ignore[attr-defined]


def put(target: T, index: Tensor, value: T) -> T:
    """The record ``target`` with some entries replaced."""
    if target is None:
        return target
    if isinstance(target, Tensor):
        return target.index_copy(0, index, value)  # type: ignore[return-value, arg-type]
    if hasattr(target, "__dataclass_fields__"):
        names = target.__dataclass_fields__
        return type(target)(**{k: put(getattr(target, k), index, getattr(value, k)) for k in names})
    return type(target)(*(put(t, index, v) for t, v in zip(target, value, strict=True)))  # type: ignore[call-overload]


class _Track(NamedTuple):
    """Where the clouds of a batch are on their way."""

    here: Evaluation
    step: Tensor  # (B,), length of the step last taken
    steps: Tensor  # (B,)


def follow(
    energy: Energy,
    start: Tensor,
    tolerance: float,
    max_steps: int,
    step_size: float | None = None,
    keep_pairs: bool = True,
) -> Flowed:
    """The stationary points that the flow from ``start`` leads to.

    Args:
        energy: B clouds.
        start: X^(0), ``(B, M, D)``.
        tolerance: on the Newton step, in units of R.
        max_steps: of all kinds together.
        step_size: fixed length of the explicit steps; ``None`` chooses them by their error.
        keep_pairs: never compute one cloud alone, since a batch of one rounds differently from a batch of more.
    """
    first = energy.evaluate(start)
    track = _Track(first, torch.full_like(energy.epsilon, FIRST_STEP), torch.zeros_like(energy.epsilon).long())
    track = _run_in(energy, track, max_steps, step_size, keep_pairs)
    return _settle(energy, track, tolerance, max_steps, keep_pairs)


def _active(unfinished: Tensor, keep_pairs: bool) -> Tensor:
    """Indices of the unfinished clouds; a lone one stands twice if it must not be computed alone."""
    index = unfinished.nonzero().squeeze(-1)
    return index.repeat(2) if keep_pairs and index.numel() == 1 else index


def _run_in(energy: Energy, track: _Track, max_steps: int, step_size: float | None, keep_pairs: bool) -> _Track:
    """Phase 1: explicit steps until they would have to be longer than stability allows."""
    velocity = torch.zeros_like(track.here.points)
    asked = torch.zeros_like(track.steps)
    racing = torch.ones_like(track.steps, dtype=torch.bool)
    while bool((racing := racing & (track.steps < max_steps)).any()):
        index = _active(racing, keep_pairs)
        local = energy.select(index)
        unit = local.scales
        here, step, steps = take(track, index)
        before = velocity[index]
        now = -here.gradient / unit.stiffness.unsqueeze(-1)
        started = steps > 0
        if step_size is None:
            size_of_x = _extent(here.points, unit)
            change = _norm(now - before)
            wish = (2 * step * ERROR * size_of_x / change).sqrt()
            wish = torch.where(started, torch.minimum(wish, 2 * step), FIRST_STEP)
            asked[index] += (wish > LONGEST_EXPLICIT).long()
            length = wish.clamp(SHORTEST, LONGEST_EXPLICIT)
            bend = torch.where(started, length.square() / (2 * step), 0.0)
            move = length[:, None, None] * now + bend[:, None, None] * (now - before)
            racing[index] = (asked[index] < 2) & (steps < MOST_EXPLICIT)
        else:
            length = torch.full_like(step, step_size)
            move = step_size * now
            # What remains is slower than a thousandth of R per unit of time: the limit is near.
            racing[index] = _norm(now) > 1e-3 * unit.radius
        going = racing[index]
        target = torch.where(going[:, None, None], here.points + move, here.points)
        inner = (0.01 * _norm(here.gradient) / unit.radius).clamp(1e-9, 1e-3)
        there = local.evaluate(target, here, inner)
        length = torch.where(going, length, step)
        track = put(track, index, _Track(there, length, steps + going))
        velocity = velocity.index_copy(0, index, now)
        racing[index] = going & _norm(there.gradient).isfinite()
    return track


def _settle(energy: Energy, track: _Track, tolerance: float, max_steps: int, keep_pairs: bool) -> Flowed:
    """Phases 2 and 3: implicit steps along the flow, Newton steps at its end."""
    finished = torch.zeros_like(track.steps, dtype=torch.bool)
    residual = torch.full_like(energy.epsilon, math.inf)
    singular = torch.zeros_like(finished)
    while bool((~finished).any()):
        index = _active(~finished, keep_pairs)
        local = energy.select(index)
        here, step, steps = take(track, index)
        here = local.evaluate(here.points, here, _inner_tolerance(local, here, tolerance))
        curvature = hessian(local, here)
        newton, definite, flat = curvature.newton(here.gradient)
        length = torch.where(definite, _norm(newton) / local.scales.radius, math.inf)

        arrived = length <= tolerance
        capped = ~arrived & (steps >= max_steps)
        near = (step >= SLOW) & (length < NEAR * math.sqrt(here.points.shape[1]))
        there, jumped, rest = _jump(local, curvature, here, newton, arrived, near & ~capped, tolerance)
        slide = ~jumped & ~capped
        if bool(slide.any()):
            slid, step = _rosenbrock(local, curvature, here, step, slide)
            there = _merge(slide, slid, there)

        lost = ~_norm(there.gradient).isfinite()
        done = jumped & ((rest <= tolerance) | (steps >= max_steps))
        left = torch.where(jumped, rest, torch.where(definite, length, _distance(local, curvature, here, capped)))
        track = put(track, index, _Track(there, step, steps + ~capped))
        residual[index] = torch.where(lost, math.nan, left)
        singular[index] = flat
        finished[index] = done | capped | lost
    here = track.here
    self_potential = torch.zeros_like(here.xy.potential) if here.xx is None else here.xx.potential
    return Flowed(here.points, here.xy.potential, self_potential, residual, track.steps, singular)


def _jump(
    energy: Energy,
    curvature: Hessian,
    here: Evaluation,
    newton: Tensor,
    arrived: Tensor,
    near: Tensor,
    tolerance: float,
) -> tuple[Evaluation, Tensor, Tensor]:
    """Newton steps: where they lead, which were accepted, and the Newton step left there.

    A step from near the end is accepted if the gradient falls as it should; one that is shorter than the tolerance
    always is. What is left is measured with the Hessian at hand, which such a short step hardly changes.
    """
    wanted = arrived | near
    nothing = torch.full_like(energy.epsilon, math.inf)
    if not bool(wanted.any()):
        return here, wanted, nothing
    target = torch.where(wanted[:, None, None], here.points - newton, here.points)
    there = energy.evaluate(target, here, _inner_tolerance(energy, here, tolerance))
    progress = torch.where(_norm(newton) < TINY * energy.scales.radius, TINY_PROGRESS, PROGRESS)
    accepted = arrived | near & (_norm(there.gradient) < progress * _norm(here.gradient))
    rest = _norm(curvature.newton(there.gradient)[0]) / energy.scales.radius
    return _merge(accepted, there, here), accepted, torch.where(accepted, rest, nothing)


def _rosenbrock(
    energy: Energy, curvature: Hessian, here: Evaluation, step: Tensor, slide: Tensor
) -> tuple[Evaluation, Tensor]:
    """One accepted or refused step of ROS2, and the length that the next one should have.

    ``(H + shift) k1 = -G / (gamma step)``, ``(H + shift) k2 = -G(x + step k1) / (gamma step) - 2 shift k1``,
    ``x += step (3 k1 + k2) / 2``; the method keeps its order with an approximate Hessian.
    """
    unit, wide = energy.scales, step[:, None, None]
    shift = unit.stiffness.unsqueeze(-1) / (GAMMA * wide)  # (B, M, 1)
    inner = (0.01 * (_norm(here.gradient) / unit.radius).square()).clamp(1e-9, 1e-6)
    first, definite = curvature.solve(-here.gradient / (GAMMA * wide), shift.squeeze(-1))
    usable = definite & slide
    middle_points = torch.where(usable[:, None, None], here.points + wide * first, here.points)
    middle = energy.evaluate(middle_points, here, inner)
    second, _ = curvature.solve(-middle.gradient / (GAMMA * wide) - 2 * shift * first, shift.squeeze(-1))
    move = wide * (1.5 * first + 0.5 * second)
    error = _norm(wide * (first + second) / 2) / (ERROR * _extent(here.points, unit))
    usable = usable & error.isfinite()
    there = energy.evaluate(torch.where(usable[:, None, None], here.points + move, here.points), here, inner)
    # A flow never climbs: a long step that ends uphill has jumped over the minimum.
    uphill = (there.gradient * move).sum((-1, -2)) > 0.2 * (here.gradient * move).sum((-1, -2)).abs()
    climbed = (step > 1) & uphill
    kept = usable & (error <= 1) & ~climbed
    factor = torch.where(usable & ~climbed, (0.8 / error.sqrt()).clamp(0.1, 5.0), 0.3)
    step = torch.where(slide, (step * factor).clamp(1e-6, 1e9), step)
    return _merge(kept, there, here), step


def _distance(energy: Energy, curvature: Hessian, here: Evaluation, wanted: Tensor) -> Tensor:
    """Length of the Newton step where the Hessian is indefinite: shifted until it is positive definite."""
    length = torch.full_like(energy.epsilon, math.inf)
    shift = 1e-9
    while shift <= 1e3 and bool((wanted & ~length.isfinite()).any()):
        step, definite = curvature.solve(here.gradient, shift * curvature.unit)
        length = torch.where(~length.isfinite() & definite, _norm(step) / energy.scales.radius, length)
        shift *= 10
    return length


def _inner_tolerance(energy: Energy, here: Evaluation, tolerance: float) -> Tensor:
    """Marginal error that a Newton step can afford: quadratic in the gradient, and far below what is asked for."""
    least = max(min(1e-11, 1e-6 * tolerance), TIGHTEST)
    return (0.01 * (_norm(here.gradient) / energy.scales.radius).square()).clamp(least, 1e-6)


def _norm(value: Tensor) -> Tensor:
    return value.square().sum((-1, -2)).sqrt()


def _extent(points: Tensor, unit: Scales) -> Tensor:
    """Size of X about the mean of the nodes, never less than a tenth of R per point, ``(B,)``."""
    least = 0.01 * points.shape[1] * unit.radius.square()
    return (points - unit.centre).square().sum((-1, -2)).clamp_min(least).sqrt()


def _merge(first: Tensor, one: Any, other: Any) -> Any:
    """Entries of one record where ``first`` holds, of the other elsewhere."""
    index = first.nonzero().squeeze(-1)
    if index.numel() == first.numel():
        return one
    return put(other, index, take(one, index))


def descend(
    energy: Energy,
    start: Tensor,
    step_size: float,
    max_steps: int,
    tolerance: float,
    update: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 with a fixed step, recorded by autograd: X^(L) and the number of steps of each cloud.

    Args:
        energy: its tensors may require gradients; those flow through every step (section 8.1).
        start: X^(0), ``(B, M, D)``.
        step_size: tau.
        max_steps: L.
        tolerance: a cloud whose velocity is below this, in units of R, has arrived and is left alone.
        update: update_step of the paper, ``(points, velocity, step) -> points``; gradient descent unless given.
    """
    update = update or (lambda points, velocity, step: points + step * velocity)
    slowness = energy.scales.stiffness.unsqueeze(-1)  # (B, M, 1)
    points, here = start, None
    steps = torch.zeros_like(energy.epsilon, dtype=torch.long)
    length = torch.full_like(slowness, step_size)
    for _ in range(max_steps):
        here = energy.evaluate(points.detach(), here, TIGHTEST)
        going = _norm(here.gradient / slowness) > tolerance * energy.scales.radius
        if not bool(going.any()):
            break
        velocity = -energy.gradient(points, here) / slowness
        points = torch.where(going[:, None, None], update(points, velocity, length), points)
        steps += going
    return points, steps
