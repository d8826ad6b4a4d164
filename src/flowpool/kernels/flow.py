"""The flow from X^(0) to X*: which step comes next.

The decisions are those of :func:`flowpool.core.flow.follow`: explicit steps (Adams-Bashforth 2) while the points race in,
linearly implicit ones (Rosenbrock 2) along the slow part, Newton steps once the nearest minimum is the limit.

:func:`advance` does no transport. It says what it needs next (a gradient, a Hessian, the solution of a linear system) and goes on
where it stopped when it is called again. So there is one place that evaluates, for one small graph as for a
graph whose nodes are spread over threads.
"""

from __future__ import annotations

import math

import numpy as np

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
from flowpool.kernels.divergence import predict
from flowpool.kernels.machine.jit import kernel, shared
from flowpool.kernels.machine.lanes import WIDTH, load, multiply, splat, store
from flowpool.kernels.machine.linear import padded
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.machine.vectors import combine, copy, inner_product, norm

# What is needed next.
EVALUATE = 0  # the gradient at ``there.points``, inner problems solved to ``clock.inner``
CURVE = 1  # the Hessian at the points last evaluated
SOLVE = 2  # ``solution`` of ``(H + clock.shift diag(2 a)) solution = right``, and ``clock.definite``
FINISHED = 3

# Purposes of a linear system; a factor is kept for each.
SLIDING, JUMPING = 0, 1

# Where to go on.
_START, _RACE, _TIGHTEN, _CURVED, _SLIDE, _FIRST, _MIDDLE, _SECOND, _LANDED = range(9)
_JUMP, _NEWTON, _DAMPED, _FILTERED, _TRY, _TRIED, _REST, _STAY, _DISTANCE = range(9, 18)

# Outcomes, as in flowpool.status.
OK, MAX_STEPS, NONFINITE = 0, 3, 5

_ROUNDING = 1e-15  # length of the gradient that is rounding error; no step can be judged by it any more
_NULL = 1e-9  # eigenvalue, relative to the Hessian's scale 2 a_i, below which it is noise of the inner solves

CLOCK = np.dtype(
    [
        ("phase", np.int64),
        ("steps", np.int64),
        ("asked", np.int64),  # explicit steps that stability has cut short
        ("step", np.float64),  # length of the step last taken
        ("inner", np.float64),  # marginal error asked for
        ("error", np.float64),  # marginal error reached
        ("shift", np.float64),
        ("purpose", np.int64),
        ("precision", np.float64),  # relative residual that an iterative solution may leave
        ("longest", np.float64),  # length from which an iterative solution is of no use
        ("guessed", np.bool_),  # ``solution`` is a guess already
        ("size", np.float64),  # of the gradient here
        ("sliding", np.float64),  # shifts of the factors at hand, and whether they were definite
        ("jumping", np.float64),
        ("can_slide", np.bool_),
        ("can_jump", np.bool_),
        ("definite", np.bool_),
        ("flattest", np.float64),  # smallest curvature met in solving, relative to the Hessian's scale
        ("jumped", np.bool_),  # the last step was a Newton step
        ("tried", np.bool_),  # a Newton step was tried from here
        ("arrived", np.bool_),
        ("singular", np.bool_),
        ("length", np.float64),  # of the Newton step
        ("residual", np.float64),
        ("status", np.int64),
    ],
    align=True,
)


@kernel
def scale_points(one, factor, point_masses, result, count, dimension):  # type: ignore[no-untyped-def]
    """``result_i = factor a_i one_i``."""
    stay_apart()
    for i in range(count):
        for c in range(0, padded(dimension), WIDTH):
            store(result, i, c, multiply(splat(factor * point_masses[0, i]), load(one, i, c)))


@kernel
def move_to(source, target, count, dimension):  # type: ignore[no-untyped-def]
    """Copies everything that is known about some points."""
    stay_apart()
    numbers = count * padded(dimension)
    copy(source.points, target.points, numbers)
    copy(source.gradient, target.gradient, numbers)
    copy(source.pulled, target.pulled, numbers)
    copy(source.potential, target.potential, padded(count))
    copy(source.self_potential, target.self_potential, padded(count))
    copy(source.rows, target.rows, padded(count))


@shared
def extent(points, count, numbers):  # type: ignore[no-untyped-def]
    """Size of X, never less than a tenth of R per point."""
    return math.sqrt(max(inner_product(points, points, numbers), 0.01 * count))


@kernel
def set_out(track, count, dimension, point_masses):  # type: ignore[no-untyped-def]
    """Warm potentials for ``there.points``, carried along from ``here``."""
    stay_apart()
    here, there = track.here, track.there
    copy(here.potential, there.potential, padded(count))
    copy(here.self_potential, there.self_potential, padded(count))
    predict(count, dimension, point_masses, here.points, here.pulled, here.rows, there.points, there.potential)


@kernel
def explicit_step(clock, track, count, dimension, point_masses):  # type: ignore[no-untyped-def]
    """Whether an explicit step is still within stability; ``there.points`` and the length of the step are then set."""
    stay_apart()
    here, there, now = track.here, track.there, track.solution
    numbers = count * padded(dimension)
    for i in range(count):
        for c in range(0, padded(dimension), WIDTH):
            store(now, i, c, multiply(splat(-0.5 / point_masses[0, i]), load(here.gradient, i, c)))
    length, bend = FIRST_STEP, 0.0
    if clock.steps > 0:
        combine(now, -1.0, track.velocity, track.right, numbers)
        wish = math.sqrt(2.0 * clock.step * ERROR * extent(here.points, count, numbers) / norm(track.right, numbers))
        wish = min(wish, 2.0 * clock.step)
        if wish > LONGEST_EXPLICIT:
            clock.asked += 1
        length = min(max(wish, SHORTEST), LONGEST_EXPLICIT)
        bend = length * length / (2.0 * clock.step)
    if clock.asked >= 2 or clock.steps >= MOST_EXPLICIT:
        return False
    combine(here.points, length, now, there.points, numbers)
    if bend > 0.0:
        combine(there.points, bend, track.right, there.points, numbers)
    copy(now, track.velocity, numbers)
    clock.step = length
    return True


@shared
def within(value, least, most):  # type: ignore[no-untyped-def]
    """The value moved into an interval."""
    return min(max(value, least), most)


@kernel
def arrive(clock, track, count, dimension):  # type: ignore[no-untyped-def]
    """Makes ``there`` the new ``here``."""
    stay_apart()
    move_to(track.there, track.here, count, dimension)
    clock.size = norm(track.here.gradient, count * padded(dimension))


@kernel
def newton_at_least(step, gradient, first, point_masses, count, dimension):  # type: ignore[no-untyped-def]
    """A lower bound of the length of the Newton step, which tells for free when it will not be tried.

    ``w = (H + s)^-1 G`` is at hand. Without the shift s it would be longer; for equal masses, where s is a number,
    ``|H^-1 G| >= <H^-1 G, w> / |w| = |w| + s <w, H^-1 w> / |w|`` and Cauchy-Schwarz give ``|w| <w, G> / (<w, G> - s |w|^2)``.
    """
    stay_apart()
    numbers = count * padded(dimension)
    square = inner_product(first, first, numbers)
    length = GAMMA * step * math.sqrt(square)
    for i in range(1, count):
        if point_masses[0, i] != point_masses[0, 0]:
            return length
    along = -inner_product(first, gradient, numbers)
    rest = along - 2.0 * point_masses[0, 0] * square
    return 0.999 * length * along / rest if rest > 0.0 else length


@shared
def ask(clock, purpose, shift, precision, phase):  # type: ignore[no-untyped-def]
    """Asks for the solution of a linear system."""
    clock.longest = math.inf
    clock.guessed = False
    clock.purpose = purpose
    clock.shift = shift
    clock.precision = precision
    clock.phase = phase
    return SOLVE


@shared
def shorten(clock, factor):  # type: ignore[no-untyped-def]
    """Refuses an implicit step: the next one from here is shorter."""
    clock.step = max(factor * clock.step, 1e-6)
    clock.phase = _SLIDE


@kernel
def advance(clock, track, count, dimension, point_masses, tolerance, max_steps):  # type: ignore[no-untyped-def]
    """What is needed next: ``EVALUATE``, ``CURVE``, ``SOLVE``, or nothing because the flow has ``FINISHED``."""
    stay_apart()
    here, there = track.here, track.there
    first, newton, right, solution = track.first, track.newton, track.right, track.solution
    numbers = count * padded(dimension)
    near = NEAR * math.sqrt(count)
    while True:
        size = clock.size
        phase = clock.phase
        if phase == _START:
            clock.inner = 1e-12
            clock.phase = _RACE
            return EVALUATE

        if phase == _RACE:
            arrive(clock, track, count, dimension)
            if not clock.size < math.inf:
                clock.status = NONFINITE
                clock.residual = math.nan
                return FINISHED
            if clock.steps >= max_steps or not explicit_step(clock, track, count, dimension, point_masses):
                clock.phase = _TIGHTEN
            else:
                clock.steps += 1
                set_out(track, count, dimension, point_masses)
                clock.inner = within(0.01 * clock.size, 1e-9, 1e-3)
                return EVALUATE

        elif phase == _TIGHTEN:
            clock.inner = within(0.01 * size * size, TIGHTEST, 1e-6)
            clock.phase = _CURVED
            if not clock.error <= clock.inner:
                move_to(here, there, count, dimension)
                return EVALUATE

        elif phase == _CURVED:
            arrive(clock, track, count, dimension)
            clock.tried = False
            clock.phase = _SLIDE
            if clock.jumped or clock.steps >= max_steps or not clock.size > _ROUNDING:
                clock.phase = _JUMP
            return CURVE

        elif phase == _SLIDE:
            if clock.steps >= max_steps:
                clock.phase = _JUMP
            else:
                shift = 1.0 / (GAMMA * clock.step)
                combine(here.gradient, -1.0 - shift, here.gradient, right, numbers)
                return ask(clock, SLIDING, shift, ROUGH, _FIRST)

        elif phase == _FIRST:
            if not clock.definite:
                clock.steps += 1
                shorten(clock, 0.3)
            else:
                copy(solution, first, numbers)
                shortest = newton_at_least(clock.step, here.gradient, first, point_masses, count, dimension)
                clock.phase = _STAY
                if not clock.tried and (shortest <= tolerance or (clock.step >= SLOW and shortest < near)):
                    clock.phase = _JUMP

        elif phase == _JUMP:
            clock.tried = True
            copy(here.gradient, right, numbers)
            request = ask(clock, JUMPING, 0.0, TIGHT if clock.jumped else ROUGH, _NEWTON)
            clock.guessed = clock.jumped  # by what the last Newton step has left
            if clock.steps < max_steps and size > _ROUNDING:
                clock.longest = max(near, tolerance)
            return request

        elif phase == _NEWTON:
            copy(solution, newton, numbers)
            clock.length = norm(newton, numbers)
            clock.singular = not (clock.definite and clock.flattest > 10.0 * _NULL)
            clock.phase = _TRY
            if not clock.definite and clock.flattest < -_NULL:
                clock.singular = False
                clock.length = math.inf
            elif clock.singular:
                copy(here.gradient, right, numbers)
                return ask(clock, JUMPING, _NULL, TIGHT, _DAMPED)

        elif phase == _DAMPED:
            # The minimiser is not isolated: H has eigenvalues that are zero up to rounding. The filter
            # (H + shift)^-1 H (H + shift)^-1 leaves them out, and is the inverse for all others.
            clock.singular = clock.definite
            copy(solution, newton, numbers)
            clock.length = math.inf
            clock.phase = _TRY
            if clock.definite:
                scale_points(newton, 2.0 * _NULL, point_masses, right, count, dimension)
                return ask(clock, JUMPING, _NULL, TIGHT, _FILTERED)

        elif phase == _FILTERED:
            combine(newton, -1.0, solution, newton, numbers)
            clock.length = norm(newton, numbers)
            clock.phase = _TRY

        elif phase == _TRY:
            clock.arrived = clock.length <= tolerance
            capped = clock.steps >= max_steps or size <= _ROUNDING
            clock.phase = _STAY
            if clock.arrived or (not capped and clock.step >= SLOW and clock.length < near):
                combine(here.points, -1.0, newton, there.points, numbers)
                set_out(track, count, dimension, point_masses)
                clock.inner = within(0.01 * size * size, TIGHTEST, 1e-6)
                clock.phase = _TRIED
                return EVALUATE
            if capped and clock.length < math.inf:
                clock.status = MAX_STEPS
                clock.residual = clock.length
                return FINISHED

        elif phase == _TRIED:
            # The step is judged by the gradient where it leads, and the residual there with the Hessian at hand.
            reached = norm(there.gradient, numbers)
            clock.phase = _STAY
            progress = TINY_PROGRESS if clock.length < TINY else PROGRESS
            if reached < progress * size or (clock.arrived and reached < math.inf):
                copy(there.gradient, right, numbers)
                return ask(clock, JUMPING, clock.shift, ROUGH, _REST)

        elif phase == _REST:
            arrive(clock, track, count, dimension)
            capped = clock.steps >= max_steps
            clock.steps += 1
            clock.residual = norm(solution, numbers)
            clock.jumped = True
            clock.phase = _TIGHTEN
            if clock.residual <= tolerance:
                clock.status = OK
                return FINISHED
            if capped:
                clock.status = MAX_STEPS
                return FINISHED

        elif phase == _STAY:
            if clock.steps >= max_steps or size <= _ROUNDING:
                copy(here.gradient, right, numbers)
                return ask(clock, JUMPING, _NULL, ROUGH, _DISTANCE)
            if clock.jumped:
                clock.jumped = False
                clock.phase = _SLIDE
                continue
            clock.steps += 1
            combine(here.points, clock.step, first, there.points, numbers)
            set_out(track, count, dimension, point_masses)
            clock.inner = within(0.01 * size * size, 1e-9, 1e-6)
            clock.phase = _MIDDLE
            return EVALUATE

        elif phase == _MIDDLE:
            # k1 + k2 is small, and is found instead of k2: its system has (G(x) + G(x + step k1)) on the right.
            shift = 1.0 / (GAMMA * clock.step)
            scale_points(first, -4.0 * shift, point_masses, right, count, dimension)
            combine(right, -shift, here.gradient, right, numbers)
            combine(right, -shift, there.gradient, right, numbers)
            return ask(clock, SLIDING, shift, ROUGH, _SECOND)

        elif phase == _SECOND:
            clock.length = 0.5 * clock.step * norm(solution, numbers) / (ERROR * extent(here.points, count, numbers))
            if not clock.length < math.inf:
                shorten(clock, 0.3)
            elif clock.length > 1.0 and clock.step <= 1.0:
                shorten(clock, within(0.8 / math.sqrt(clock.length), 0.1, 5.0))
            else:
                # step (3 k1 + k2) / 2
                combine(first, 0.5, solution, first, numbers)
                combine(here.points, clock.step, first, there.points, numbers)
                set_out(track, count, dimension, point_masses)
                clock.phase = _LANDED
                return EVALUATE

        elif phase == _LANDED:
            # A flow never climbs: a long step that ends uphill has jumped over the minimum.
            ahead = inner_product(there.gradient, first, numbers)
            behind = abs(inner_product(here.gradient, first, numbers))
            climbed = clock.step > 1.0 and ahead > 0.2 * behind
            factor = 0.3 if climbed else within(0.8 / math.sqrt(clock.length), 0.1, 5.0)
            if clock.length <= 1.0 and not climbed:
                clock.step = within(clock.step * factor, 1e-6, 1e9)
                arrive(clock, track, count, dimension)
                clock.phase = _TIGHTEN
                if not clock.size < math.inf:
                    clock.status = NONFINITE
                    clock.residual = math.nan
                    return FINISHED
            else:
                shorten(clock, factor)

        else:  # _DISTANCE: the flow was cut off; the Newton step with the Hessian shifted until it is definite
            clock.status = MAX_STEPS
            clock.residual = norm(solution, numbers) if clock.definite else math.inf
            if clock.definite or clock.shift > 1e2:
                return FINISHED
            copy(here.gradient, right, numbers)
            return ask(clock, JUMPING, 10.0 * clock.shift, ROUGH, _DISTANCE)
