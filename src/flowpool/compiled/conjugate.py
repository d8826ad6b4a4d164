"""Linear systems with the Hessian by conjugate gradients, for Hessians that are too large to form.

The preconditioner is ``2 Q + shift diag(2 a)`` for each coordinate: exact outside the hull of the nodes, and close to the
Hessian inside it when epsilon is small.
"""

from __future__ import annotations

import math

from flowpool.compiled.flow import combine, copy, inner_product
from flowpool.compiled.jit import kernel, shared
from flowpool.compiled.lanes import WIDTH, fma, load, multiply, splat, store
from flowpool.compiled.linear import factorise, padded, substitute_rows
from flowpool.compiled.product import hessian_product
from flowpool.compiled.rows import stay_apart

MAX_ITERATIONS = 500
_RIDGE = 1e-9  # keeps the preconditioner definite where two points have met


@shared
def precondition(count, point_masses, shift, work):  # type: ignore[no-untyped-def]
    """Whether the preconditioner could be factorised, in ``work.small``."""
    for i in range(count):
        for k in range(0, padded(count), WIDTH):
            store(work.small, i, k, multiply(splat(2.0), load(work.kept_self_plan, i, k)))
        work.small[i, i] += (shift + _RIDGE) * 2.0 * point_masses[0, i]
    return factorise(work.small, count, work.inverse)


@kernel
def conjugate_gradients(  # type: ignore[no-untyped-def]
    nodes, weighted, length, hull, dimension, points, count, point_masses, epsilon, shift, precision,
    right, solution, search, image, ready, work,
):  # fmt: skip
    """Smallest curvature met, relative to ``diag(2 a)``; fills ``solution`` of ``(H + shift diag(2 a)) w = right``.

    It is not positive, and the solution of no use, if the matrix is not positive definite.

    Args:
        right: overwritten by what is left of it.
        precision: relative size of the rest, in the metric of the preconditioner, at which to stop.
        search, image, ready: scratch, ``(M, Q)``.
    """
    stay_apart()
    numbers = count * padded(dimension)
    for p in range(0, numbers, WIDTH):
        store(solution, 0, p, splat(0.0))
    if not precondition(count, point_masses, shift, work):
        return -1.0
    copy(right, ready, numbers)
    substitute_rows(work.small, count, work.inverse, ready, padded(dimension))
    strength = inner_product(right, ready, numbers)
    goal = precision * precision * strength
    copy(ready, search, numbers)
    flattest = math.inf
    for _ in range(MAX_ITERATIONS):
        if not strength > goal:
            break
        hessian_product(nodes, weighted, length, hull, dimension, points, count, search, epsilon, work, image)
        for i in range(count):
            factor = splat(2.0 * shift * point_masses[0, i])
            for c in range(0, padded(dimension), WIDTH):
                store(image, i, c, fma(factor, load(search, i, c), load(image, i, c)))
        curvature = inner_product(search, image, numbers)
        if not curvature > 0.0:
            return -1.0
        weight = 0.0
        for i in range(count):
            for e in range(dimension):
                weight += 2.0 * point_masses[0, i] * search[i, e] * search[i, e]
        flattest = min(flattest, curvature / weight)
        step = strength / curvature
        combine(solution, step, search, solution, numbers)
        combine(right, -step, image, right, numbers)
        copy(right, ready, numbers)
        substitute_rows(work.small, count, work.inverse, ready, padded(dimension))
        following = inner_product(right, ready, numbers)
        combine(ready, following / strength, search, search, numbers)
        strength = following
    return flattest if strength < math.inf else -1.0
