"""The gradient of the divergence in the points: both inner problems, then two barycentric sums.

``G_i = 2 (P 1 - Q 1)_i x_i + 2 (Q X - P Y)_i``, the first part of which vanishes with the marginal errors. It is kept, because
:meth:`flowpool.core.divergence.Energy.evaluate` has it while the inner problems are solved loosely.
"""

from __future__ import annotations

import math

from flowpool.kernels.machine.jit import kernel
from flowpool.kernels.machine.lanes import WIDTH, add, fma, load, multiply, splat, store, subtract, total
from flowpool.kernels.machine.linear import add_combinations, padded, row_products
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.self_sinkhorn import solve_self_transport
from flowpool.kernels.sinkhorn import solve_transport


@kernel
def predict(count, dimension, point_masses, old_points, old_pulled, old_rows, points, potential):  # type: ignore[no-untyped-def]
    """Carries f along with the points to first order: ``f_i += sum_j P_ij (C_ij(new) - C_ij(old)) / a_i``."""
    stay_apart()
    for i in range(count):
        squares = splat(0.0)
        inner = splat(0.0)
        for c in range(0, padded(dimension), WIDTH):
            new, old = load(points, i, c), load(old_points, i, c)
            move = subtract(new, old)
            squares = fma(move, add(new, old), squares)
            inner = fma(move, load(old_pulled, i, c), inner)
        potential[0, i] += (old_rows[0, i] * total(squares) - 2.0 * total(inner)) / point_masses[0, i]


@kernel
def self_pull(count, dimension, points, plan, plan_rows, pulled, rows, gradient):  # type: ignore[no-untyped-def]
    """Fills the gradient from Q X, P Y and the row sums of both plans."""
    stay_apart()
    width = padded(dimension)
    for i in range(count):
        balance = splat(rows[0, i] - plan_rows[0, i])
        for c in range(0, width, WIDTH):
            store(gradient, i, c, subtract(multiply(balance, load(points, i, c)), load(pulled, i, c)))
    add_combinations(plan, count, points, width, gradient)
    for p in range(0, count * width, WIDTH):
        store(gradient, 0, p, multiply(splat(2.0), load(gradient, 0, p)))


@kernel
def evaluate(  # type: ignore[no-untyped-def]
    nodes, masses, length, hull, dimension, points, count, point_masses, epsilon, stage, tolerance, place, work
):
    """Larger of the two marginal errors; potentials, ``P Y``, ``P 1`` and the gradient of ``place`` are brought up to date."""
    stay_apart()
    error = solve_transport(
        nodes,
        masses,
        length,
        hull,
        dimension,
        points,
        count,
        point_masses,
        epsilon,
        place.potential,
        stage,
        tolerance,
        work,
    )
    row_products(work.plan, count, nodes, 1, hull, length, place.pulled, False)
    for i in range(count):
        place.rows[0, i] = work.rows[0, i]
        for e in range(hull, padded(dimension)):
            place.pulled[i, e] = 0.0
    if not error < math.inf:
        for p in range(0, count * padded(dimension), WIDTH):
            store(place.gradient, 0, p, splat(math.nan))
        return error
    other = solve_self_transport(points, dimension, count, point_masses, epsilon, place.self_potential, tolerance, work)
    self_pull(count, dimension, points, work.self_plan, work.self_rows, place.pulled, place.rows, place.gradient)
    return max(error, other)
