"""Transport of the points onto themselves: Newton's method on h, as :func:`flowpool.sinkhorn.solve_self` does it.

``Q_ik = u_i K_ik u_k`` with ``K_ik = exp((h_i + h_k - |x_i - x_k|^2) / epsilon)`` formed once per call.
"""

from __future__ import annotations

import math

from flowpool.compiled.jit import kernel
from flowpool.compiled.lanes import WIDTH, exponential, fma, load, multiply, splat, store, subtract, total
from flowpool.compiled.linear import factorise, padded, row_total, substitute
from flowpool.compiled.rows import stay_apart
from flowpool.compiled.transport import FARTHEST, MAX_ITERATIONS, ROUNDING, marginal_error
from flowpool.compiled.vectors import combine, copy, fill

MAX_STALLED = 20


@kernel
def self_plan(count, kernel_rows, scaling, plan, rows):  # type: ignore[no-untyped-def]
    """Fills Q and its row sums; columns beyond M are zero because their scaling is."""
    end = padded(count)
    for i in range(count):
        factor = splat(scaling[0, i])
        for k in range(0, end, WIDTH):
            store(plan, i, k, multiply(multiply(factor, load(scaling, 0, k)), load(kernel_rows, i, k)))
        rows[0, i] = row_total(plan, i, end)


@kernel
def solve_self_transport(points, dimension, count, point_masses, epsilon, potential, tolerance, work):  # type: ignore[no-untyped-def]
    """Marginal error reached; ``potential`` h, Q and its row sums are brought up to date."""
    stay_apart()
    end = padded(count)
    for i in range(count):
        for k in range(end):
            work.self_gibbs[i, k] = -700.0
        for k in range(i + 1):
            square = splat(0.0)
            for c in range(0, padded(dimension), WIDTH):
                apart = subtract(load(points, i, c), load(points, k, c))
                square = fma(apart, apart, square)
            work.self_gibbs[i, k] = (potential[0, i] + potential[0, k] - total(square)) / epsilon
    for i in range(count):
        for k in range(i + 1, count):
            work.self_gibbs[i, k] = work.self_gibbs[k, i]
    for i in range(count):
        for k in range(0, end, WIDTH):
            store(work.self_gibbs, i, k, exponential(load(work.self_gibbs, i, k)))
    fill(work.scaling, 1.0, end)
    fill(work.shift, 0.0, end)
    for i in range(count, end):
        work.scaling[0, i] = 0.0
        work.step[0, i] = 0.0

    target = max(tolerance, ROUNDING)
    self_plan(count, work.self_gibbs, work.scaling, work.self_plan, work.self_rows)
    error = marginal_error(point_masses, work.self_rows, count)
    stalled = 0
    for _ in range(MAX_ITERATIONS):
        if error <= target or stalled > MAX_STALLED or not error < math.inf:
            break
        for i in range(count):
            for k in range(0, end, WIDTH):
                store(work.small, i, k, load(work.self_plan, i, k))
            work.small[i, i] += work.self_rows[0, i]
        combine(point_masses, -1.0, work.self_rows, work.right, end)
        copy(work.scaling, work.old_scaling, end)
        copy(work.self_rows, work.old_rows, end)
        previous = error
        better = factorise(work.small, count, work.inverse)
        if better:
            substitute(work.small, count, work.inverse, work.right, work.step, 0)
            for i in range(count):
                work.step[0, i] = min(work.step[0, i], FARTHEST)
            for i in range(0, end, WIDTH):
                store(work.scaling, 0, i, multiply(load(work.scaling, 0, i), exponential(load(work.step, 0, i))))
            self_plan(count, work.self_gibbs, work.scaling, work.self_plan, work.self_rows)
            error = marginal_error(point_masses, work.self_rows, count)
            better = error < 0.9 * previous
        if not better:
            for i in range(count):
                work.step[0, i] = 0.5 * math.log(point_masses[0, i] / max(work.old_rows[0, i], 1e-300))
                work.scaling[0, i] = work.old_scaling[0, i] * math.exp(work.step[0, i])
            self_plan(count, work.self_gibbs, work.scaling, work.self_plan, work.self_rows)
            error = marginal_error(point_masses, work.self_rows, count)
        combine(work.shift, 1.0, work.step, work.shift, end)
        stalled = 0 if error < 0.9 * previous else stalled + 1
    combine(potential, epsilon, work.shift, potential, end)
    return error
