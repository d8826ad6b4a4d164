"""Linear systems with the Hessian: by its factor, or by conjugate gradients where only a part of it is formed.

The model of the Hessian is a dense block for the leading coordinates and ``2 Q`` for each of the others. It is exact for
coordinates outside the hull of the nodes once the points lie in it, and close for coordinates along which the nodes vary
by little against epsilon. Where it is exact its factor gives the solution; elsewhere it is the preconditioner.
"""

from __future__ import annotations

import math

from flowpool.kernels.flow import JUMPING, SLIDING
from flowpool.kernels.hessian import prepare_factor, solve_factored
from flowpool.kernels.machine.jit import kernel
from flowpool.kernels.machine.lanes import WIDTH, load, multiply, splat, store
from flowpool.kernels.machine.linear import factorise, padded, smallest_pivot, substitute_rows
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.machine.vectors import combine, copy, fill, inner_product
from flowpool.kernels.response import hessian_product

MAX_ITERATIONS = 500
_RIDGE = 1e-9  # keeps the model definite where two points have met
_BLURRED = 1e-5  # curvature, relative to the Hessian's scale 2 a_i, that products in float32 cannot tell from zero
_OUTSIDE = 5e-4  # distance of the points from the hull, in units of epsilon, that makes the model inexact


@kernel
def is_exact(points, count, hull, dimension, lead, epsilon):  # type: ignore[no-untyped-def]
    """Whether the model is the Hessian."""
    stay_apart()
    if lead < hull:
        return False
    for i in range(count):
        square = 0.0
        for e in range(hull, dimension):
            square += points[i, e] * points[i, e]
        if square > (_OUTSIDE * epsilon) ** 2:
            return False
    return True


@kernel
def precondition(count, point_masses, shift, work):  # type: ignore[no-untyped-def]
    """Whether the model of the other coordinates could be factorised, in ``work.small``."""
    stay_apart()
    for i in range(count):
        for k in range(0, padded(count), WIDTH):
            store(work.small, i, k, multiply(splat(2.0), load(work.kept_self_plan, i, k)))
        work.small[i, i] += (shift + _RIDGE) * 2.0 * point_masses[0, i]
    return factorise(work.small, count, work.inverse)


@kernel
def solve_model(count, dimension, lead, factor, pivots, right, solution, work):  # type: ignore[no-untyped-def]
    """Fills ``solution``, ``(M, Q)``, for the model of the Hessian."""
    stay_apart()
    copy(right, solution, count * padded(dimension))
    if lead < dimension:
        substitute_rows(work.small, count, work.inverse, solution, padded(dimension))
    solve_factored(count, lead, factor, pivots, right, solution, work)


@kernel
def answer(  # type: ignore[no-untyped-def]
    clock, track, cloud, dimension, lead, exact, count, epsilon, work
):
    """Solves the system that the flow asks for."""
    stay_apart()
    point_masses = cloud.point_masses
    factor, pivots = prepare_factor(clock, count, lead, point_masses, work)
    if lead < dimension and clock.definite:
        clock.definite = precondition(count, point_masses, clock.shift, work)
        if clock.purpose == JUMPING:
            clock.flattest = min(clock.flattest, smallest_pivot(work.inverse, count) * count / 2.0)
    if not clock.definite:
        return
    # For the stages of an implicit step it is enough that the model is the Hessian in the hull.
    if exact or (clock.purpose == SLIDING and lead == cloud.hull):
        solve_model(count, dimension, lead, factor, pivots, track.right, track.solution, work)
        return
    curvature = conjugate_gradients(
        cloud, dimension, lead, track.here.points, count, epsilon, clock.shift, clock.precision, clock.longest,
        clock.guessed, False, factor, pivots, track.right, track.solution, track, work,
    )  # fmt: skip
    if abs(curvature) < _BLURRED:
        curvature = conjugate_gradients(
            cloud, dimension, lead, track.here.points, count, epsilon, clock.shift, clock.precision, clock.longest,
            False, True, factor, pivots, track.right, track.solution, track, work,
        )  # fmt: skip
    clock.definite = curvature > 0.0
    clock.flattest = min(clock.flattest, curvature)


@kernel
def conjugate_gradients(  # type: ignore[no-untyped-def]
    cloud, dimension, lead, points, count, epsilon, shift, precision, longest, guessed, fine, factor, pivots, right,
    solution, track, work,
):  # fmt: skip
    """Smallest curvature met, relative to ``diag(2 a)``; fills ``solution`` of ``(H + shift diag(2 a)) w = right``.

    It is not positive, and the solution of no use, if the matrix is not positive definite.

    Args:
        precision: relative size of the rest, in the metric of the model, at which to stop.
        longest: length of the solution at which to stop.
        guessed: whether the solution is a guess already.
        fine: products in float64.
        factor, pivots: of the model in the leading coordinates; that of the others is in ``work.small``.
        track: scratch.
    """
    stay_apart()
    rest, search, image, ready = track.rest, track.search, track.image, track.ready
    numbers = count * padded(dimension)
    copy(right, rest, numbers)
    solve_model(count, dimension, lead, factor, pivots, rest, ready, work)
    strength = inner_product(rest, ready, numbers)
    goal = precision * precision * strength
    if guessed:
        hessian_product(cloud, dimension, points, count, solution, epsilon, shift, fine, work, image)
        combine(rest, -1.0, image, rest, numbers)
        solve_model(count, dimension, lead, factor, pivots, rest, ready, work)
        strength = inner_product(rest, ready, numbers)
    else:
        fill(solution, 0.0, numbers)
    copy(ready, search, numbers)
    flattest = math.inf
    for _ in range(MAX_ITERATIONS):
        if not strength > goal:
            break
        hessian_product(cloud, dimension, points, count, search, epsilon, shift, fine, work, image)
        curvature = inner_product(search, image, numbers)
        weight = 0.0
        for i in range(count):
            for e in range(dimension):
                weight += 2.0 * cloud.point_masses[0, i] * search[i, e] * search[i, e]
        if not curvature > 0.0:
            return curvature / weight if curvature <= 0.0 else -math.inf
        flattest = min(flattest, curvature / weight)
        step = strength / curvature
        combine(solution, step, search, solution, numbers)
        if inner_product(solution, solution, numbers) > longest * longest:
            break
        combine(rest, -step, image, rest, numbers)
        solve_model(count, dimension, lead, factor, pivots, rest, ready, work)
        following = inner_product(rest, ready, numbers)
        combine(ready, following / strength, search, search, numbers)
        strength = following
    return flattest if strength < math.inf else -math.inf
