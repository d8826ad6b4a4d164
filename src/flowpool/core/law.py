r"""The law of the flow: which step comes next, when it is accepted, when the flow ends.

Algorithm 1 of the paper (section 6) repeats ``X <- update_step(X, grad S)``. Here the update is chosen by what is known of the flow
:math:`\dot x_i = -\nabla_{x_i} S_\varepsilon / (2 a_i)` at the moment. The divergence has many local minima and the flow
decides which one is meant, so it is followed accurately while that matters, and left only at the end:

1. explicit steps (exponential Adams-Bashforth 2) while the points come in fast from X^(0),
2. linearly implicit steps (Rosenbrock 2) along the slow part, where explicit ones would be limited by stability,
3. Newton steps once the flow is so slow that the nearest minimum is its limit.

It ends on the length of the Newton step: with a flat Hessian a small gradient alone does not place X*. Newton steps are
filtered (:data:`~flowpool.core.constants.FLAT`), so that directions in which the divergence hardly changes neither keep
the flow from ending nor move the points. Where a step that is longer than the tolerance leads along nearly flat directions
and would lower the divergence by next to nothing, the flow ends, too (:func:`_is_plateau`), and the graph is called singular.

The law knows numbers only. An engine has the vectors: :func:`advance` tells it what to do next, the engine does it and
writes what it measured into the state. Both engines obey this one text; for the kernels it is compiled.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flowpool.core.constants import (
    AGAIN,
    CRAWLING,
    ERROR,
    ERROR_EXPLICIT,
    FIRST_INNER,
    FIRST_STEP,
    FLAT,
    GAMMA,
    LEAST_STEP,
    LONGEST_EXPLICIT,
    LOOSEST,
    LOOSEST_EXPLICIT,
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
# Before anything else X' becomes X if ``state.arrived`` is set.
START = 0  # evaluate at X' = X^(0); make it X [size, error, extent, swerve = 0, speed]
EXPLICIT = 1  # X' = X + stride v + bend (n - n_before) with v = -G / 2a, n = v + X; evaluate; make it X [the same]
TIGHTEN = 2  # evaluate at X again, to ``inner`` [size, error]
HESSIAN = 3  # the Hessian at X
IMPLICIT = 4  # k1 = -shift (H + shift)^-1 G [definite, length = |k1|, along = <k1, G>]
NEWTON = 5  # w = filtered H^-1 G to ``precision``, from a guess if ``guessed`` [definite, flattest, length = |w|, gain]
TRY = 6  # X' = X - w; evaluate [reached, error]
MEASURE_LEFT = 7  # w = filtered H^-1 G(X'), roughly; a guess of the next Newton step [length, gain]
STAGE = 8  # X' = X + step k1; evaluate; k12 = k1 + k2 from (H + shift) [length = |k12|]
FINISH = 9  # k = k1 + k12 / 2; X' = X + step k; evaluate [ahead = <G(X'), k>, behind = <G, k>, reached, error]
DISTANCE = 10  # w = (H + shift)^-1 G, roughly [definite, length = |w|]
LOOK = 11  # the smallest curvature that shows in the factors of the Newton step [flattest, if it is less]
DONE = 12

# Where the law goes on.
_EXPLICIT, _TIGHTEN, _HESSIAN, _IMPLICIT, _NEWTON, _TRY, _LEFT, _STAGE, _FINISH, _DISTANCE, _LOOK = range(11)

# Outcomes, as in flowpool.status.
OK, MAX_STEPS, NONFINITE = 0, 3, 5

STATE = np.dtype(
    [
        ("phase", np.int64),
        ("steps", np.int64),
        ("asked", np.int64),  # explicit steps that stability has cut short
        ("fixed", np.float64),  # length of explicit steps, if it is given; else zero
        ("step", np.float64),  # length of the step last taken, in time
        ("stride", np.float64),  # factors of an explicit step
        ("bend", np.float64),
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


def begin(state: Any, step_size: float) -> int:
    """What to do first.

    Args:
        state: one entry of :data:`STATE`, or anything with its fields; none of them needs to be set.
        step_size: fixed length of the explicit steps; zero: chosen by their error.
    """
    state.steps = 0
    state.asked = 0
    state.fixed = step_size
    state.step = FIRST_STEP
    state.inner = FIRST_INNER
    state.arrived = False
    state.jumped = False
    state.again = math.inf
    state.cut = False
    state.singular = False
    state.residual = math.inf
    state.phase = _EXPLICIT
    return START


def advance(state: Any, num_points: int, equal: bool, tolerance: float, max_steps: int) -> int:
    """What to do next, given what was measured.

    Args:
        num_points: number of points, M.
        equal: all points have the same mass.
        tolerance: on the Newton step.
        max_steps: of all kinds together.
    """
    phase = state.phase
    near = NEAR * math.sqrt(num_points)
    state.arrived = False
    if phase == _EXPLICIT:
        return _after_explicit(state, max_steps)
    if phase == _TIGHTEN:
        return _hessian(state)
    if phase == _HESSIAN:
        if state.jumped or _is_last(state, max_steps):
            return _newton_step(state, near, tolerance, max_steps)
        return _implicit_step(state)
    if phase == _IMPLICIT:
        return _after_first_stage(state, equal, num_points, near, tolerance, max_steps)
    if phase == _NEWTON:
        return _after_newton(state, num_points, near, tolerance, max_steps)
    if phase == _TRY:
        return _after_try(state, max_steps)
    if phase == _LEFT:
        return _after_left(state, num_points, tolerance, max_steps)
    if phase == _STAGE:
        return _after_stage(state, near, tolerance, max_steps)
    if phase == _FINISH:
        return _after_finish(state, near, tolerance, max_steps)
    if phase == _LOOK:
        return _after_look(state, num_points, tolerance, max_steps)
    return _after_distance(state, tolerance)


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _is_last(state: Any, max_steps: int) -> bool:
    """No further step is allowed, or none could be judged."""
    return state.steps >= max_steps or state.size <= NOISE  # type: ignore[no-any-return]


def _finish(state: Any, status: int, residual: float) -> int:
    state.status = status
    state.residual = residual
    state.singular = state.singular and status == OK
    return DONE


def _after_explicit(state: Any, max_steps: int) -> int:
    """After X^(0) or an explicit step: another one, while they need not be longer than stability allows."""
    if not state.size < math.inf:
        return _finish(state, NONFINITE, math.nan)
    if state.steps < max_steps and _explicit_step(state):
        state.steps += 1
        state.inner = _within(0.01 * state.size, 1e-9, LOOSEST_EXPLICIT)
        return EXPLICIT
    return _tighten(state)


def _explicit_step(state: Any) -> bool:
    """Whether an explicit step is worth taking; its length and its factors are then set.

    The flow is ``x' = n(x) - x``, where n is the barycentric map as long as the points are far apart. The part ``-x`` is
    integrated exactly, and n is taken to go on as it did in the step before.
    """
    if state.fixed > 0.0:
        state.step = state.stride = state.fixed
        state.bend = 0.0
        return state.speed > CRAWLING  # type: ignore[no-any-return]
    length = FIRST_STEP
    state.bend = 0.0
    if state.steps > 0:
        # The second-order term of the step is its error.
        before, state.step = state.step, 2.0 * state.step
        if state.swerve > 0.0:
            state.step = min(state.step, math.sqrt(2.0 * before * ERROR_EXPLICIT * state.extent / state.swerve))
        if state.step > LONGEST_EXPLICIT:
            state.asked += 1
        length = _within(state.step, SHORTEST, LONGEST_EXPLICIT)
        state.bend = (length + math.expm1(-length)) / before
    if state.asked >= 2 or state.steps >= MOST_EXPLICIT:
        return False  # and the first implicit step has the length that was wished for
    state.step = length
    state.stride = -math.expm1(-length)
    return True


def _tighten(state: Any) -> int:
    """At new points: the transports as exact as the Hessian needs them, then the Hessian."""
    state.inner = _newton_inner(state.size)
    if state.error <= state.inner:
        return _hessian(state)
    state.phase = _TIGHTEN
    return TIGHTEN


def _newton_inner(size: float) -> float:
    """Marginal error that a Newton step can afford where the gradient has some size: quadratic in it."""
    return _within(0.01 * size * size, TIGHTEST, LOOSEST)


def _hessian(state: Any) -> int:
    state.tried = False
    state.phase = _HESSIAN
    return HESSIAN


def _implicit_step(state: Any) -> int:
    state.shift = 1.0 / (GAMMA * state.step)
    state.precision = ROUGH
    state.phase = _IMPLICIT
    return IMPLICIT


def _shorten(state: Any, factor: float, near: float, tolerance: float, max_steps: int) -> int:
    """Refuses an implicit step: the next one from here is shorter."""
    state.step = max(factor * state.step, LEAST_STEP)
    state.cut = True
    if state.steps >= max_steps:
        return _newton_step(state, near, tolerance, max_steps)
    return _implicit_step(state)


def _after_first_stage(state: Any, equal: bool, num_points: int, near: float, tolerance: float, max_steps: int) -> int:
    """After the first stage of an implicit step, which tells for free whether a Newton step is worth a try."""
    if not state.definite:
        state.steps += 1
        return _shorten(state, 0.3, near, tolerance, max_steps)
    shortest = _newton_at_least(state, equal, num_points)
    hopeful = state.step >= SLOW and shortest < near and state.size <= state.again
    if not state.tried and (shortest <= tolerance or hopeful):
        return _newton_step(state, near, tolerance, max_steps)
    return _stay(state, max_steps)


def _newton_at_least(state: Any, equal: bool, num_points: int) -> float:
    """A lower bound of the length of the Newton step.

    ``w = (H + s)^-1 G`` is known from k1. Without the shift s it would be longer; for equal masses, where s is a number,
    ``|H^-1 G| >= <H^-1 G, w> / |w| = |w| + s <w, H^-1 w> / |w|`` and Cauchy-Schwarz give
    ``|w| <w, G> / (<w, G> - s |w|^2)``.
    """
    length = GAMMA * state.step * state.length
    along = -state.along
    rest = along - 2.0 / num_points * state.length * state.length
    if equal and rest > 0.0:
        return 0.999 * length * along / rest  # type: ignore[no-any-return]
    return length  # type: ignore[no-any-return]


def _newton_step(state: Any, near: float, tolerance: float, max_steps: int) -> int:
    state.tried = True
    state.precision = TIGHT if state.jumped else ROUGH
    state.guessed = state.jumped
    state.longest = math.inf if _is_last(state, max_steps) else max(near, tolerance)
    state.phase = _NEWTON
    return NEWTON


def _is_idle(state: Any, num_points: int, tolerance: float) -> bool:
    """The Newton step, though longer than the tolerance, leads along a valley for nothing."""
    shallow = num_points * state.gain <= SHALLOW * state.length * state.length
    return shallow and state.length > tolerance and 0.0 <= state.gain <= tolerance * tolerance  # type: ignore[no-any-return]


def _is_plateau(state: Any, num_points: int, tolerance: float) -> bool:
    """The same, and the minimiser is not isolated."""
    return state.flattest <= SINGULAR and _is_idle(state, num_points, tolerance)


def _after_newton(state: Any, num_points: int, near: float, tolerance: float, max_steps: int) -> int:
    """After the Newton step was found: it is tried if it is short enough to stay in the basin, or if it is the last."""
    # A step that leads uphill leads to a saddle, however slightly the divergence curves down there.
    if not state.definite or (state.gain < 0.0 and state.length > tolerance):
        return _stay(state, max_steps)
    if _is_plateau(state, num_points, tolerance):
        state.singular = True
        return _finish(state, OK, state.length)
    state.close = state.length <= tolerance
    last = _is_last(state, max_steps)
    if state.close or (not last and state.step >= SLOW and state.length < near):
        state.inner = _newton_inner(0.1 * state.size)  # what the next one will want
        state.phase = _TRY
        return TRY
    if last:
        return _finish(state, MAX_STEPS, state.length)
    return _stay(state, max_steps)


def _after_try(state: Any, max_steps: int) -> int:
    """After a Newton step: accepted if the gradient falls as it should; one that is shorter than the tolerance always is."""
    harmless = state.length < TINY or state.gain < SLIGHT
    progress = TINY_PROGRESS if harmless else PROGRESS
    if state.reached < progress * state.size or (state.close and state.reached < math.inf):
        state.phase = _LEFT
        return MEASURE_LEFT
    return _stay(state, max_steps)


def _after_left(state: Any, num_points: int, tolerance: float, max_steps: int) -> int:
    """After what a Newton step has left was measured with the Hessian at hand, which a short step hardly changes."""
    state.arrived = True
    state.size = state.reached
    state.steps += 1
    state.jumped = True
    if state.length <= tolerance or _is_idle(state, num_points, tolerance):
        state.phase = _LOOK
        return LOOK
    return _go_on(state, max_steps)


def _after_look(state: Any, num_points: int, tolerance: float, max_steps: int) -> int:
    """Where the flow may end: it does, unless it idles near a minimiser that is isolated after all."""
    state.singular = state.flattest <= SINGULAR
    if state.length <= tolerance or _is_plateau(state, num_points, tolerance):
        return _finish(state, OK, state.length)
    return _go_on(state, max_steps)


def _go_on(state: Any, max_steps: int) -> int:
    """To the next Newton step, unless the last one was one too many."""
    if state.steps > max_steps:
        return _finish(state, MAX_STEPS, state.length)
    return _tighten(state)


def _stay(state: Any, max_steps: int) -> int:
    """No Newton step from here: an implicit step, or the end if no step is left."""
    if _is_last(state, max_steps):
        state.shift = FLAT
        state.phase = _DISTANCE
        return DISTANCE
    if state.tried:
        state.again = AGAIN * state.size
    if state.jumped:
        state.jumped = False
        return _implicit_step(state)
    state.steps += 1
    state.inner = _within(0.01 * state.size * state.size, 1e-9, LOOSEST)
    state.phase = _STAGE
    return STAGE


def _after_stage(state: Any, near: float, tolerance: float, max_steps: int) -> int:
    """After both stages of Rosenbrock 2, whose difference is the error of the step, here in units of what is allowed."""
    error = 0.5 * state.step * state.length / (ERROR * state.extent)
    if not error < math.inf:
        return _shorten(state, 0.3, near, tolerance, max_steps)
    if error > 1.0 and state.step <= 1.0:
        return _shorten(state, _step_factor(error), near, tolerance, max_steps)
    state.length = error
    state.inner = _newton_inner(state.size)
    state.phase = _FINISH
    return FINISH


def _step_factor(error: float) -> float:
    return _within(0.8 / math.sqrt(error), 0.1, 5.0) if error > 0.0 else 5.0


def _after_finish(state: Any, near: float, tolerance: float, max_steps: int) -> int:
    """After an implicit step: accepted unless its error is too large, or it ends uphill, which a flow never does."""
    climbed = state.step > 1.0 and state.ahead > UPHILL * abs(state.behind)
    factor = 0.3 if climbed else _step_factor(state.length)
    if climbed or state.length > 1.0:
        return _shorten(state, factor, near, tolerance, max_steps)
    # What was refused once would be refused again: a step that replaces another is followed by one of its own length.
    state.step = _within(state.step * (min(factor, 1.0) if state.cut else factor), LEAST_STEP, MOST_STEP)
    state.cut = False
    state.again *= 2.0
    state.arrived = True
    state.size = state.reached
    if not state.size < math.inf:
        return _finish(state, NONFINITE, math.nan)
    return _tighten(state)


def _after_distance(state: Any, tolerance: float) -> int:
    """Cut off: the Newton step left, with the Hessian shifted until it is definite.

    A large shift makes it short, but nothing has shown that the flow is nearer to its end than the tolerance.
    """
    if state.definite or state.shift > 1e2:
        return _finish(state, MAX_STEPS, max(state.length, tolerance) if state.definite else math.inf)
    state.shift *= 10.0
    return DISTANCE


LAW = (
    begin, advance, _within, _is_last, _finish, _after_explicit, _explicit_step, _tighten, _newton_inner, _hessian,
    _implicit_step, _shorten, _after_first_stage, _newton_at_least, _newton_step, _is_idle, _is_plateau, _after_newton,
 _after_try, _after_left, _after_look, _go_on, _stay, _after_stage, _step_factor, _after_finish,
    _after_distance,
)  # fmt: skip
