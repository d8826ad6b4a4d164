r"""The law of the flow: which step comes next, when it is accepted, when the flow ends.

Algorithm 1 of the paper (section 6) repeats ``X <- update_step(X, grad S)``. Here the update is chosen by what is known of the flow
:math:`\dot x_i = -\nabla_{x_i} S_\varepsilon / (2 a_i)` at the moment. The divergence has many local minima and the flow
decides which one is meant, so it is followed accurately while that matters, and left only at the end:

1. *race*: explicit steps (exponential Adams-Bashforth 2) while the points race in from X^(0),
2. *slide*: linearly implicit steps (Rosenbrock 2) along the slow part, where explicit ones would be limited by stability,
3. *jump*: Newton steps once the flow is so slow that the nearest minimum is its limit.

It ends on the length of the Newton step: with a flat Hessian a small gradient alone does not place X*. Newton steps are
filtered (:data:`~flowpool.core.constants.FLAT`), so that directions in which the divergence hardly changes neither keep
the flow from ending nor move the points. Where a step that is longer than the tolerance leads along nearly flat directions
and would lower the divergence by next to nothing, the flow ends, too (:func:`_is_settled`), and the graph is called singular.

The law knows numbers only. An engine has the vectors: :func:`advance` tells it what to do next, the engine does it and
writes what it measured on the clock. Both engines obey this one text; for the kernels it is compiled.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flowpool.core.constants import (
    AGAIN,
    CRAWLING,
    ERROR,
    ERROR_RACE,
    FIRST_INNER,
    FIRST_STEP,
    FLAT,
    GAMMA,
    LEAST_STEP,
    LONGEST_EXPLICIT,
    LOOSEST,
    LOOSEST_RACE,
    MERGING,
    MOST_EXPLICIT,
    MOST_STEP,
    NEAR,
    NOISE,
    PROGRESS,
    ROUGH,
    SHALLOW,
    SHORTEST,
    SINGULAR,
    SLIGHT,
    SLOW,
    TIGHT,
    TIGHTEST,
    TINY,
    TINY_PROGRESS,
    UPHILL,
)

# What an engine is asked to do. X is ``here``, X' is ``there``, G is the gradient, and what is measured stands in brackets.
# Before anything else X' becomes X if ``clock.arrived`` is set.
START = 0  # evaluate at X' = X^(0); make it X [size, error, extent, swerve = 0, speed]
RACE = 1  # X' = X + stride v + bend (n - n_before) with v = -G / 2a, n = v + X; evaluate; make it X [the same]
TIGHTEN = 2  # evaluate at X again, to ``inner`` [size, error]
CURVE = 3  # the Hessian at X
SLIDE = 4  # k1 = -shift (H + shift)^-1 G [definite, length = |k1|, along = <k1, G>]
NEWTON = 5  # w = filtered H^-1 G to ``precision``, from a guess if ``guessed`` [definite, flattest, length = |w|, gain]
TRY = 6  # X' = X - stretch w; evaluate [reached, error]
REST = 7  # w = filtered H^-1 G(X'), roughly; a guess of the next Newton step [length, gain]
STAGE = 8  # X' = X + step k1; evaluate; k12 = k1 + k2 from (H + shift) [length = |k12|]
LAND = 9  # k = k1 + k12 / 2; X' = X + step k; evaluate [ahead = <G(X'), k>, behind = <G, k>, reached, error]
DISTANCE = 10  # w = (H + shift)^-1 G, roughly [definite, length = |w|]
LOOK = 11  # the smallest curvature that shows in the factors of the Newton step [flattest, if it is less]
FINISHED = 12

# Where the law goes on.
_RACED, _TIGHTENED, _CURVED, _SLID, _MEASURED, _TRIED, _RESTED, _STAGED, _LANDED, _CUT, _LOOKED = range(11)

# Outcomes, as in flowpool.status.
OK, MAX_STEPS, NONFINITE = 0, 3, 5

CLOCK = np.dtype(
    [
        ("phase", np.int64),
        ("steps", np.int64),
        ("asked", np.int64),  # explicit steps that stability has cut short
        ("fixed", np.float64),  # length of explicit steps, if it is given; else zero
        ("step", np.float64),  # length of the step last taken, in time
        ("stride", np.float64),  # factors of an explicit step
        ("bend", np.float64),
        ("stretch", np.float64),  # factor of the Newton step
        ("last", np.float64),  # length of the Newton step before
        ("shift", np.float64),  # of the Hessian, in units of 2 a
        ("inner", np.float64),  # marginal error asked for
        ("precision", np.float64),  # relative residual that an iterative solution may leave
        ("longest", np.float64),  # length from which an iterative solution is of no use
        ("guessed", np.bool_),  # the last Newton step left a guess of this one
        ("arrived", np.bool_),  # X' becomes X
        ("jumped", np.bool_),  # the last step was a Newton step: the next one is, too, if it can be
        ("tried", np.bool_),  # a Newton step from here was refused
        ("again", np.float64),  # |G| up to which another one is worth a try
        ("cut", np.bool_),  # the implicit step is a shorter one in place of one that was refused
        ("close", np.bool_),  # the Newton step is shorter than the tolerance
        ("singular", np.bool_),
        # What an engine measures.
        ("size", np.float64),  # |G| at X
        ("reached", np.float64),  # |G| at X'
        ("error", np.float64),  # marginal error reached
        ("extent", np.float64),  # |X| about the mean of the nodes, never less than a tenth of R per point
        ("swerve", np.float64),  # |n - n_before|
        ("speed", np.float64),  # |v|
        ("length", np.float64),
        ("along", np.float64),
        ("ahead", np.float64),
        ("behind", np.float64),
        ("definite", np.bool_),
        ("flattest", np.float64),  # smallest curvature met in solving
        ("gain", np.float64),  # <w, G> / 2: by how much a Newton step lowers the divergence, to second order
        # How it ended.
        ("residual", np.float64),
        ("status", np.int64),
    ],
    align=True,
)


def begin(clock: Any, step_size: float) -> int:
    """What to do first.

    Args:
        clock: one entry of :data:`CLOCK`, or anything with its fields; nothing on it needs to be set.
        step_size: fixed length of the explicit steps; zero: chosen by their error.
    """
    clock.steps = 0
    clock.asked = 0
    clock.fixed = step_size
    clock.step = FIRST_STEP
    clock.stretch = 1.0
    clock.inner = FIRST_INNER
    clock.arrived = False
    clock.jumped = False
    clock.again = math.inf
    clock.cut = False
    clock.singular = False
    clock.residual = math.inf
    clock.phase = _RACED
    return START


def advance(clock: Any, num_points: int, equal: bool, tolerance: float, max_steps: int) -> int:
    """What to do next, given what was measured.

    Args:
        num_points: number of points, M.
        equal: all points have the same mass.
        tolerance: on the Newton step.
        max_steps: of all kinds together.
    """
    phase = clock.phase
    near = NEAR * math.sqrt(num_points)
    clock.arrived = False
    if phase == _RACED:
        return _raced(clock, max_steps)
    if phase == _TIGHTENED:
        return _curve(clock)
    if phase == _CURVED:
        if clock.jumped or _is_last(clock, max_steps):
            return _newton(clock, near, tolerance, max_steps)
        return _slide(clock)
    if phase == _SLID:
        return _slid(clock, equal, num_points, near, tolerance, max_steps)
    if phase == _MEASURED:
        return _measured(clock, num_points, near, tolerance, max_steps)
    if phase == _TRIED:
        return _tried(clock, max_steps)
    if phase == _RESTED:
        return _rested(clock, num_points, tolerance, max_steps)
    if phase == _STAGED:
        return _staged(clock, near, tolerance, max_steps)
    if phase == _LANDED:
        return _landed(clock, near, tolerance, max_steps)
    if phase == _LOOKED:
        return _looked(clock, num_points, tolerance, max_steps)
    return _cut(clock, tolerance)


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _is_last(clock: Any, max_steps: int) -> bool:
    """No further step is allowed, or none could be judged."""
    return clock.steps >= max_steps or clock.size <= NOISE  # type: ignore[no-any-return]


def _finish(clock: Any, status: int, residual: float) -> int:
    clock.status = status
    clock.residual = residual
    clock.singular = clock.singular and status == OK
    return FINISHED


def _raced(clock: Any, max_steps: int) -> int:
    """After X^(0) or an explicit step: another one, while they need not be longer than stability allows."""
    if not clock.size < math.inf:
        return _finish(clock, NONFINITE, math.nan)
    if clock.steps < max_steps and _can_race(clock):
        clock.steps += 1
        clock.inner = _within(0.01 * clock.size, 1e-9, LOOSEST_RACE)
        return RACE
    return _tighten(clock)


def _can_race(clock: Any) -> bool:
    """Whether an explicit step is worth taking; its length and its factors are then set.

    The flow is ``x' = n(x) - x``, where n is the barycentric map as long as the points are far apart. The part ``-x`` is
    integrated exactly, and n is taken to go on as it did in the step before.
    """
    if clock.fixed > 0.0:
        clock.step = clock.stride = clock.fixed
        clock.bend = 0.0
        return clock.speed > CRAWLING  # type: ignore[no-any-return]
    length = FIRST_STEP
    clock.bend = 0.0
    if clock.steps > 0:
        # The second-order term of the step is its error.
        before, clock.step = clock.step, 2.0 * clock.step
        if clock.swerve > 0.0:
            clock.step = min(clock.step, math.sqrt(2.0 * before * ERROR_RACE * clock.extent / clock.swerve))
        if clock.step > LONGEST_EXPLICIT:
            clock.asked += 1
        length = _within(clock.step, SHORTEST, LONGEST_EXPLICIT)
        clock.bend = (length + math.expm1(-length)) / before
    if clock.asked >= 2 or clock.steps >= MOST_EXPLICIT:
        return False  # and the first implicit step has the length that was wished for
    clock.step = length
    clock.stride = -math.expm1(-length)
    return True


def _tighten(clock: Any) -> int:
    """At new points: the transports as exact as the Hessian needs them, then the Hessian."""
    clock.inner = _newton_inner(clock.size)
    if clock.error <= clock.inner:
        return _curve(clock)
    clock.phase = _TIGHTENED
    return TIGHTEN


def _newton_inner(size: float) -> float:
    """Marginal error that a Newton step can afford where the gradient has some size: quadratic in it."""
    return _within(0.01 * size * size, TIGHTEST, LOOSEST)


def _curve(clock: Any) -> int:
    clock.tried = False
    clock.phase = _CURVED
    return CURVE


def _slide(clock: Any) -> int:
    clock.shift = 1.0 / (GAMMA * clock.step)
    clock.precision = ROUGH
    clock.phase = _SLID
    return SLIDE


def _shorten(clock: Any, factor: float, near: float, tolerance: float, max_steps: int) -> int:
    """Refuses an implicit step: the next one from here is shorter."""
    clock.step = max(factor * clock.step, LEAST_STEP)
    clock.cut = True
    if clock.steps >= max_steps:
        return _newton(clock, near, tolerance, max_steps)
    return _slide(clock)


def _slid(clock: Any, equal: bool, num_points: int, near: float, tolerance: float, max_steps: int) -> int:
    """After the first stage of an implicit step, which tells for free whether a Newton step is worth a try."""
    if not clock.definite:
        clock.steps += 1
        return _shorten(clock, 0.3, near, tolerance, max_steps)
    shortest = _newton_at_least(clock, equal, num_points)
    hopeful = clock.step >= SLOW and shortest < near and clock.size <= clock.again
    if not clock.tried and (shortest <= tolerance or hopeful):
        return _newton(clock, near, tolerance, max_steps)
    return _stay(clock, max_steps)


def _newton_at_least(clock: Any, equal: bool, num_points: int) -> float:
    """A lower bound of the length of the Newton step.

    ``w = (H + s)^-1 G`` is known from k1. Without the shift s it would be longer; for equal masses, where s is a number,
    ``|H^-1 G| >= <H^-1 G, w> / |w| = |w| + s <w, H^-1 w> / |w|`` and Cauchy-Schwarz give
    ``|w| <w, G> / (<w, G> - s |w|^2)``.
    """
    length = GAMMA * clock.step * clock.length
    along = -clock.along
    rest = along - 2.0 / num_points * clock.length * clock.length
    if equal and rest > 0.0:
        return 0.999 * length * along / rest  # type: ignore[no-any-return]
    return length  # type: ignore[no-any-return]


def _newton(clock: Any, near: float, tolerance: float, max_steps: int) -> int:
    clock.tried = True
    clock.precision = TIGHT if clock.jumped else ROUGH
    clock.guessed = clock.jumped
    clock.longest = math.inf if _is_last(clock, max_steps) else max(near, tolerance)
    clock.phase = _MEASURED
    return NEWTON


def _is_idle(clock: Any, num_points: int, tolerance: float) -> bool:
    """The Newton step, though longer than the tolerance, leads along a valley for nothing."""
    shallow = num_points * clock.gain <= SHALLOW * clock.length * clock.length
    return shallow and clock.length > tolerance and 0.0 <= clock.gain <= tolerance * tolerance  # type: ignore[no-any-return]


def _is_settled(clock: Any, num_points: int, tolerance: float) -> bool:
    """The same, and the minimiser is not isolated."""
    return clock.flattest <= SINGULAR and _is_idle(clock, num_points, tolerance)


def _measured(clock: Any, num_points: int, near: float, tolerance: float, max_steps: int) -> int:
    """After the Newton step was found: it is tried if it is short enough to stay in the basin, or if it is the last."""
    # A step that leads uphill leads to a saddle, however slightly the divergence curves down there.
    if not clock.definite or (clock.gain < 0.0 and clock.length > tolerance):
        return _stay(clock, max_steps)
    if _is_settled(clock, num_points, tolerance):
        clock.singular = True
        return _finish(clock, OK, clock.length)
    clock.close = clock.length <= tolerance
    last = _is_last(clock, max_steps)
    if clock.close or (not last and clock.step >= SLOW and clock.length < near):
        _stretch(clock, near)
        clock.inner = _newton_inner(0.1 * clock.size)  # what the next one will want
        clock.phase = _TRIED
        return TRY
    if last:
        return _finish(clock, MAX_STEPS, clock.length)
    return _stay(clock, max_steps)


def _stretch(clock: Any, near: float) -> None:
    """Where points merge a Newton step leaves two thirds of the way, one of twice the length one third."""
    expected = 1.0 - clock.stretch / 3.0
    merging = clock.jumped and abs(clock.length - expected * clock.last) < MERGING * clock.last
    clock.stretch = 2.0 if merging and not clock.close and 2.0 * clock.length < near else 1.0
    clock.last = clock.length


def _tried(clock: Any, max_steps: int) -> int:
    """After a Newton step: accepted if the gradient falls as it should; one that is shorter than the tolerance always is."""
    harmless = clock.length < TINY or clock.gain < SLIGHT
    progress = TINY_PROGRESS if harmless else PROGRESS
    if clock.reached < progress * clock.size or (clock.close and clock.reached < math.inf):
        clock.phase = _RESTED
        return REST
    if clock.stretch > 1.0:
        clock.stretch = 1.0
        return TRY
    return _stay(clock, max_steps)


def _rested(clock: Any, num_points: int, tolerance: float, max_steps: int) -> int:
    """After what a Newton step has left was measured with the Hessian at hand, which a short step hardly changes."""
    clock.arrived = True
    clock.size = clock.reached
    clock.steps += 1
    clock.jumped = True
    if clock.length <= tolerance or _is_idle(clock, num_points, tolerance):
        clock.phase = _LOOKED
        return LOOK
    return _go_on(clock, max_steps)


def _looked(clock: Any, num_points: int, tolerance: float, max_steps: int) -> int:
    """Where the flow may end: it does, unless it idles near a minimiser that is isolated after all."""
    clock.singular = clock.flattest <= SINGULAR
    if clock.length <= tolerance or _is_settled(clock, num_points, tolerance):
        return _finish(clock, OK, clock.length)
    return _go_on(clock, max_steps)


def _go_on(clock: Any, max_steps: int) -> int:
    """To the next Newton step, unless the last one was one too many."""
    if clock.steps > max_steps:
        return _finish(clock, MAX_STEPS, clock.length)
    return _tighten(clock)


def _stay(clock: Any, max_steps: int) -> int:
    """No Newton step from here: an implicit step, or the end if no step is left."""
    if _is_last(clock, max_steps):
        clock.shift = FLAT
        clock.phase = _CUT
        return DISTANCE
    if clock.tried:
        clock.again = AGAIN * clock.size
    if clock.jumped:
        clock.jumped = False
        return _slide(clock)
    clock.steps += 1
    clock.inner = _within(0.01 * clock.size * clock.size, 1e-9, LOOSEST)
    clock.phase = _STAGED
    return STAGE


def _staged(clock: Any, near: float, tolerance: float, max_steps: int) -> int:
    """After both stages of Rosenbrock 2, whose difference is the error of the step, here in units of what is allowed."""
    error = 0.5 * clock.step * clock.length / (ERROR * clock.extent)
    if not error < math.inf:
        return _shorten(clock, 0.3, near, tolerance, max_steps)
    if error > 1.0 and clock.step <= 1.0:
        return _shorten(clock, _step_factor(error), near, tolerance, max_steps)
    clock.length = error
    clock.inner = _newton_inner(clock.size)
    clock.phase = _LANDED
    return LAND


def _step_factor(error: float) -> float:
    return _within(0.8 / math.sqrt(error), 0.1, 5.0) if error > 0.0 else 5.0


def _landed(clock: Any, near: float, tolerance: float, max_steps: int) -> int:
    """After an implicit step: accepted unless its error is too large, or it ends uphill, which a flow never does."""
    climbed = clock.step > 1.0 and clock.ahead > UPHILL * abs(clock.behind)
    factor = 0.3 if climbed else _step_factor(clock.length)
    if climbed or clock.length > 1.0:
        return _shorten(clock, factor, near, tolerance, max_steps)
    # What was refused once would be refused again: a step that replaces another is followed by one of its own length.
    clock.step = _within(clock.step * (min(factor, 1.0) if clock.cut else factor), LEAST_STEP, MOST_STEP)
    clock.cut = False
    clock.again *= 2.0
    clock.arrived = True
    clock.size = clock.reached
    if not clock.size < math.inf:
        return _finish(clock, NONFINITE, math.nan)
    return _tighten(clock)


def _cut(clock: Any, tolerance: float) -> int:
    """Cut off: the Newton step left, with the Hessian shifted until it is definite.

    A large shift makes it short, but nothing has shown that the flow is nearer to its end than the tolerance.
    """
    if clock.definite or clock.shift > 1e2:
        return _finish(clock, MAX_STEPS, max(clock.length, tolerance) if clock.definite else math.inf)
    clock.shift *= 10.0
    return DISTANCE


LAW = (
    begin, advance, _within, _is_last, _finish, _raced, _can_race, _tighten, _newton_inner, _curve, _slide, _shorten, _slid,
    _newton_at_least, _newton, _is_idle, _is_settled, _measured, _stretch, _tried, _rested, _looked, _go_on, _stay,
    _staged, _step_factor, _landed, _cut,
)  # fmt: skip
