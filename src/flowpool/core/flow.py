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
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flowpool.core.constants import (
    ERROR,
    FIRST_STEP,
    GAMMA,
    LONGEST_EXPLICIT,
    MOST_EXPLICIT,
    NEAR,
    PROGRESS,
    ROUGH,
    SHORTEST,
    SLOW,
    TIGHT,
    TIGHTEST,
    TINY,
    TINY_PROGRESS,
)
from flowpool.core.divergence import Energy, Evaluation, Scales
from flowpool.core.hessian import Hessian, hessian
from flowpool.core.records import Record, choose, places, put, take
from flowpool.core.systems import Effort, Solved, System

_ROUNDING = 1e-15  # gradient, in units of R, that is rounding error; no step can be judged by it any more


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


class Pace(NamedTuple):
    """How often the host looks at the device.

    Between two looks every cloud of the batch is computed and a mask says which of them move, so that the pace changes
    results by rounding only.

    Attributes:
        block: steps between two looks at who has finished.
        rounds: iterations for each inner problem of a step, made without a look; a step for which they were not
            enough is refused and made again after the block. ``None``: as many as it takes, with a look after each.
    """

    block: int
    rounds: int | None


WATCHFUL = Pace(1, None)
RARE = Pace(16, 8)


def pace_of(device: torch.device) -> Pace:
    """On the CPU a look costs nothing and saves work; elsewhere it makes the host wait for everything in the queue."""
    return WATCHFUL if device.type == "cpu" else RARE


class _Race(NamedTuple):
    """Clouds on the explicit part of their way."""

    here: Evaluation
    velocity: Tensor  # (B, M, D), where the last step began
    step: Tensor  # (B,), length of the step last taken
    steps: Tensor  # (B,)
    asked: Tensor  # (B,), steps that stability has cut short
    going: Tensor  # (B,) bool
    stuck: Tensor  # (B,) bool, the rounds were not enough for the next step


class _Descent(NamedTuple):
    """Clouds on the implicit part of their way."""

    here: Evaluation
    step: Tensor  # (B,), length of the next step
    steps: Tensor  # (B,)
    residual: Tensor  # (B,)
    singular: Tensor  # (B,) bool
    jumped: Tensor  # (B,) bool, the last step was a Newton step: the next one is, too, if it can be
    tried: Tensor  # (B,) bool, a Newton step from here was refused
    guess: Tensor  # (B, M, D), of the next Newton step: what the last one has left
    going: Tensor  # (B,) bool
    stuck: Tensor  # (B,) bool


Way = TypeVar("Way", _Race, _Descent)


def follow(
    energy: Energy,
    start: Tensor,
    tolerance: float,
    max_steps: int,
    step_size: float | None = None,
    keep_pairs: bool = True,
    pace: Pace | None = None,
) -> Flowed:
    """The stationary points that the flow from ``start`` leads to.

    Args:
        energy: B clouds.
        start: X^(0), ``(B, M, D)``.
        tolerance: on the Newton step, in units of R.
        max_steps: of all kinds together.
        step_size: fixed length of the explicit steps; ``None`` chooses them by their error.
        keep_pairs: never compute one cloud alone, since a batch of one rounds differently from a batch of more.
        pace: how often the host looks at the device; ``None``: as suits the device.
    """
    pace = pace_of(start.device) if pace is None else pace
    zero = torch.zeros_like(energy.epsilon)
    none, all_of_them = zero.bool(), ~zero.bool()
    here = energy.evaluate(start)

    first = _Race(here, torch.zeros_like(start), zero + FIRST_STEP, zero.long(), zero.long(), all_of_them, none)
    raced = _go(energy, first, partial(_race_step, max_steps, step_size), pace, keep_pairs)
    here = energy.evaluate(raced.here.points, raced.here, _newton_tolerance(energy, raced.here, tolerance))
    nowhere = torch.zeros_like(start)
    second = _Descent(here, raced.step, raced.steps, zero + math.inf, none, none, none, nowhere, all_of_them, none)
    ended = _go(energy, second, partial(_descent_step, tolerance, max_steps), pace, keep_pairs)
    here, residual = ended.here, _distance(energy, ended, keep_pairs)
    return Flowed(here.points, here.xy.potential, here.self_potential, residual, ended.steps, ended.singular)


def _go(energy: Energy, way: Way, step: Callable[[Energy, Way, int | None], Way], pace: Pace, keep_pairs: bool) -> Way:
    """The way after as many steps as each cloud needs."""
    index, local, part = None, energy, way
    while True:
        left = int(part.going.sum())  # the look: everything queued so far has to be finished
        if index is None or left < len(part.going):
            way = part if index is None else put(way, index, part)
            if left == 0:
                return way
            index = places(way.going, keep_pairs)
            local, part = energy.select(index), take(way, index)
        for _ in range(pace.block):
            part = step(local, part, pace.rounds)
        if pace.rounds is not None:
            again = places(part.stuck, keep_pairs)
            if len(again):
                part = put(part, again, step(local.select(again), take(part, again), None))


def _any(mask: Tensor, rounds: int | None) -> bool:
    """Whether the mask may hold for any cloud: the host looks only if it may."""
    return rounds is not None or bool(mask.any())


def _either(first: Tensor, one: Record, other: Record, rounds: int | None) -> Record:
    """:func:`choose`, with nothing copied if the host may look and finds that it is the same for all clouds."""
    if rounds is None:
        count = int(first.sum())
        if count in (0, len(first)):
            return one if count else other
    return choose(first, one, other)


def _race_step(max_steps: int, step_size: float | None, energy: Energy, way: _Race, rounds: int | None) -> _Race:
    """One explicit step, while they need not be longer than stability allows."""
    here, unit = way.here, energy.scales
    now = -here.gradient / unit.stiffness.unsqueeze(-1)
    asked = way.asked
    if step_size is None:
        started = way.steps > 0
        wish = (2 * way.step * ERROR * _extent(here.points, unit) / _norm(now - way.velocity)).sqrt()
        wish = torch.where(started, torch.minimum(wish, 2 * way.step), FIRST_STEP)
        asked = asked + (wish > LONGEST_EXPLICIT)
        length = wish.clamp(SHORTEST, LONGEST_EXPLICIT)
        bend = torch.where(started, length.square() / (2 * way.step), 0.0)
        move = length[:, None, None] * now + bend[:, None, None] * (now - way.velocity)
        fast = (asked < 2) & (way.steps < MOST_EXPLICIT)
    else:
        length = torch.full_like(way.step, step_size)
        move = step_size * now
        # What remains is slower than a thousandth of R per unit of time: the limit is near.
        fast = _norm(now) > 1e-3 * unit.radius
    going = way.going & fast & (way.steps < max_steps)
    inner = (0.01 * _norm(here.gradient) / unit.radius).clamp(1e-9, 1e-3)
    there = energy.evaluate(torch.where(going[:, None, None], here.points + move, here.points), here, inner, rounds)
    taken = going & (there.settled | (rounds is None))  # then nothing better can be had
    stuck = going & ~taken
    return _Race(
        _either(taken, there, here, rounds),
        torch.where(taken[:, None, None], now, way.velocity),
        torch.where(taken, length, way.step),
        way.steps + taken,
        torch.where(stuck, way.asked, asked),
        going & (stuck | _norm(there.gradient).isfinite()),
        stuck,
    )


def _descent_step(tolerance: float, max_steps: int, energy: Energy, way: _Descent, rounds: int | None) -> _Descent:
    """One Newton step where it is accepted, one implicit step elsewhere.

    A cloud whose last step was Newton's tries another one at once; if that is refused, it slides in the next round.
    """
    here, wide = way.here, way.step[:, None, None]
    curvature = hessian(energy, here)
    system = curvature.shifted(energy.scales.stiffness / (GAMMA * way.step[:, None]), roughly=True)
    sliding = way.going & ~way.jumped
    pull = torch.where(sliding[:, None, None], -here.gradient, 0.0)
    first = system.solve(pull / (GAMMA * wide), Effort(ROUGH, rounds))  # k1 of Rosenbrock 2

    jump = _jump(energy, curvature, way, _worth_a_jump(energy, way, first, tolerance), tolerance, max_steps, rounds)
    wanted = sliding & ~jump.taken & ~jump.capped
    slide = _slide(energy, system, way, first, wanted, tolerance, rounds)
    taken, there = jump.taken | slide.taken, _either(jump.taken, jump.there, slide.there, rounds)
    lost = taken & ~_norm(there.gradient).isfinite()
    done = jump.taken & ((jump.residual <= tolerance) | (way.steps >= max_steps))
    # Where no step of any length is of use and the gradient is just noise of the inner problems, this is the end.
    resting = wanted & ~slide.taken & (slide.step < SLOW) & (_norm(here.gradient) <= TIGHTEST * energy.scales.radius)
    settled = first.settled & jump.settled & slide.settled | (rounds is None)  # then nothing better can be had
    following = _Descent(
        _either(taken, there, here, rounds),
        slide.step,
        way.steps + (jump.taken | wanted),
        torch.where(lost, math.nan, jump.residual),
        jump.singular,
        jump.taken,
        ~taken & (way.tried | jump.tried),
        jump.left,
        ~(done | jump.capped | lost | resting),
        way.stuck,
    )
    return _either(way.going & settled, following, way, rounds)._replace(stuck=way.going & ~settled)


def _worth_a_jump(energy: Energy, way: _Descent, first: Solved, tolerance: float) -> Tensor:
    """Where a Newton step from here may be short enough, ``(B,)`` bool: a lower bound of its length is at hand.

    ``w = (H + s)^-1 G`` is known from k1. Without the shift s it would be longer; for equal masses, where s is a number,
    ``|H^-1 G| >= <H^-1 G, w> / |w| = |w| + s <w, H^-1 w> / |w|`` and Cauchy-Schwarz give
    ``|w| <w, G> / (<w, G> - s |w|^2)``.
    """
    stiffness = energy.scales.stiffness
    length = GAMMA * way.step * _norm(first.solution) / energy.scales.radius
    along = -(first.solution * way.here.gradient).sum((-1, -2))
    rest = along - stiffness[:, 0] * first.solution.square().sum((-1, -2))
    known = (stiffness == stiffness[:, :1]).all(-1) & (rest > 0)
    shortest = torch.where(known, 0.999 * length * along / rest, length)
    near = (way.step >= SLOW) & (shortest < NEAR * math.sqrt(stiffness.shape[1]))
    return ~way.tried & first.definite & ((shortest <= tolerance) | near)


class _Jump(NamedTuple):
    """Newton steps."""

    there: Evaluation
    tried: Tensor  # (B,) bool
    taken: Tensor  # (B,) bool
    capped: Tensor  # (B,) bool, the flow ends here because no further step is allowed
    left: Tensor  # (B, M, D), the Newton step left, roughly; zero where none was taken
    residual: Tensor  # (B,), its length in units of R
    singular: Tensor  # (B,) bool
    settled: Tensor  # (B,) bool


def _jump(
    energy: Energy,
    curvature: Hessian,
    way: _Descent,
    promising: Tensor,
    tolerance: float,
    max_steps: int,
    rounds: int | None,
) -> _Jump:
    """Newton steps: where they lead, which were accepted, and the Newton step left there.

    A step from near the end is accepted if the gradient falls as it should; one that is shorter than the tolerance
    always is. What is left is measured with the Hessian at hand, which such a short step hardly changes.

    Args:
        promising: where a first Newton step should be tried, ``(B,)`` bool.
    """
    here, radius, near = way.here, energy.scales.radius, NEAR * math.sqrt(way.here.points.shape[1])
    noise = torch.where(way.singular, TIGHTEST, _ROUNDING) * radius
    last = (way.steps >= max_steps) | (_norm(here.gradient) <= noise)
    hopeful = way.going & (last | way.jumped | promising)
    none, nowhere = torch.zeros_like(hopeful), torch.zeros_like(way.guess)
    nothing = torch.full_like(energy.epsilon, math.inf)
    if not _any(hopeful, rounds):
        return _Jump(here, none, none, none, nowhere, nothing, none, ~none)
    effort = Effort(
        torch.where(way.jumped, TIGHT, ROUGH),
        rounds,
        torch.where(last, math.inf, max(near, tolerance) * radius),
        way.guess,
    )
    newton = curvature.newton(torch.where(hopeful[:, None, None], here.gradient, 0.0), effort)
    length = torch.where(hopeful & newton.definite, _norm(newton.solution) / radius, nothing)
    singular = newton.definite & curvature.is_singular(newton)
    arrived = length <= tolerance
    capped = last & ~arrived
    wanted = arrived | ~last & (way.step >= SLOW) & (length < near)
    if not _any(wanted, rounds):
        return _Jump(here, hopeful, none, capped, nowhere, length, singular, newton.settled)
    target = torch.where(wanted[:, None, None], here.points - newton.solution, here.points)
    there = energy.evaluate(target, here, _newton_tolerance(energy, here, tolerance), rounds)
    progress = torch.where(length < TINY, TINY_PROGRESS, PROGRESS)
    taken = arrived | wanted & (_norm(there.gradient) < progress * _norm(here.gradient))
    rest = curvature.newton(torch.where(taken[:, None, None], there.gradient, 0.0), Effort(ROUGH, rounds))
    residual = torch.where(taken, _norm(rest.solution) / radius, length)
    settled = newton.settled & (~wanted | there.settled & rest.settled)
    left = torch.where(
        taken[:, None, None], rest.solution, 0.0
    )  # a model that does not exist would leave NaN elsewhere
    return _Jump(there, hopeful, taken, capped, left, residual, singular, settled)


class _Slide(NamedTuple):
    """Steps of Rosenbrock 2."""

    there: Evaluation
    taken: Tensor  # (B,) bool
    step: Tensor  # (B,), length of the next step
    settled: Tensor  # (B,) bool


def _slide(
    energy: Energy, system: System, way: _Descent, first: Solved, wanted: Tensor, tolerance: float, rounds: int | None
) -> _Slide:
    """One accepted or refused step of ROS2, and the length that the next one should have.

    ``(H + shift) k1 = -G / (gamma step)``, ``(H + shift) k2 = -G(x + step k1) / (gamma step) - 2 shift k1``,
    ``x += step (3 k1 + k2) / 2``; the method keeps its order with an approximate Hessian.
    """
    here, step, unit = way.here, way.step, energy.scales
    usable = first.definite & wanted
    if not _any(usable, rounds):
        return _Slide(here, usable, torch.where(wanted, (0.3 * step).clamp_min(1e-6), step), ~usable)
    wide, stiffness = step[:, None, None], unit.stiffness.unsqueeze(-1)
    inner = (0.01 * (_norm(here.gradient) / unit.radius).square()).clamp(1e-9, 1e-6)
    halfway = torch.where(usable[:, None, None], here.points + wide * first.solution, here.points)
    middle = energy.evaluate(halfway, here, inner, rounds)
    # k1 + k2 is small, and is found instead of k2.
    right = (here.gradient + middle.gradient + 2 * stiffness * first.solution) / (-GAMMA * wide)
    both = system.solve(torch.where(usable[:, None, None], right, 0.0), Effort(ROUGH, rounds))
    move = wide * (first.solution + both.solution / 2)
    error = _norm(wide * both.solution / 2) / (ERROR * _extent(here.points, unit))
    usable = usable & error.isfinite()
    target = torch.where(usable[:, None, None], here.points + move, here.points)
    there = energy.evaluate(target, middle, _newton_tolerance(energy, here, tolerance), rounds)
    # A flow never climbs: a long step that ends uphill has jumped over the minimum.
    uphill = (there.gradient * move).sum((-1, -2)) > 0.2 * (here.gradient * move).sum((-1, -2)).abs()
    climbed = (step > 1) & uphill
    factor = torch.where(usable & ~climbed, (0.8 / error.sqrt()).clamp(0.1, 5.0), 0.3)
    settled = ~wanted | middle.settled & both.settled & there.settled
    step = torch.where(wanted, (step * factor).clamp(1e-6, 1e9), step)
    return _Slide(there, usable & (error <= 1) & ~climbed, step, settled)


def _distance(energy: Energy, way: _Descent, keep_pairs: bool) -> Tensor:
    """Length of the Newton step that is left, also where the flow was cut off at an indefinite Hessian.

    There the Hessian is shifted until it is positive definite.
    """
    index = places(way.residual.isinf(), keep_pairs)
    if not len(index):
        return way.residual
    local, part = energy.select(index), take(way, index)
    here, length, shift = part.here, part.residual, 1e-9
    curvature = hessian(local, here)
    while shift <= 1e3 and bool(length.isinf().any()):
        found = curvature.shifted(shift * curvature.unit).solve(here.gradient, Effort(ROUGH))
        length = torch.where(length.isinf() & found.definite, _norm(found.solution) / local.scales.radius, length)
        shift *= 10
    return way.residual.index_copy(0, index, length)


def _newton_tolerance(energy: Energy, here: Evaluation, tolerance: float) -> Tensor:
    """Marginal error that a Newton step can afford: quadratic in the gradient, and far below what is asked for."""
    least = max(min(1e-11, 1e-6 * tolerance), TIGHTEST)
    return (0.01 * (_norm(here.gradient) / energy.scales.radius).square()).clamp(least, 1e-6)


def _norm(value: Tensor) -> Tensor:
    return value.square().sum((-1, -2)).sqrt()


def _extent(points: Tensor, unit: Scales) -> Tensor:
    """Size of X about the mean of the nodes, never less than a tenth of R per point, ``(B,)``."""
    least = 0.01 * points.shape[1] * unit.radius.square()
    return (points - unit.centre).square().sum((-1, -2)).clamp_min(least).sqrt()


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
