"""Transport of the points onto themselves: Newton's method on h, as :func:`flowpool.core.sinkhorn.solve_self` does it.

``Q_ik = u_i K_ik u_k`` with ``K_ik = exp((h_i + h_k - |x_i - x_k|^2) / epsilon)`` formed once per call.
"""

from __future__ import annotations

import math

from flowpool.core.constants import MAX_ITERATIONS, ROUNDING
from flowpool.kernels.machine.jit import kernel
from flowpool.kernels.machine.lanes import WIDTH, add, exponential, fma, load, multiply, splat, store, subtract
from flowpool.kernels.machine.linear import factorise, padded, row_total, substitute, transpose
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.machine.vectors import combine, copy, fill
from flowpool.kernels.sinkhorn import marginal_error

MAX_STALLED = 20
FARTHEST = 200.0  # largest change of the logarithm of a scaling


@kernel
def self_plan(count, kernel_rows, scaling, plan, rows):  # type: ignore[no-untyped-def]
    """Fills Q and its row sums; columns beyond M are zero as in the kernel."""
    end = padded(count)
    for i in range(count):
        factor = splat(scaling[0, i])
        for k in range(0, end, WIDTH):
            store(plan, i, k, multiply(multiply(factor, load(scaling, 0, k)), load(kernel_rows, i, k)))
        rows[0, i] = row_total(plan, i, end)


@kernel
def solve_self_transport(graph, points, potential, epsilon, tolerance):  # type: ignore[no-untyped-def]
    """Marginal error reached; ``potential`` h, Q and its row sums are brought up to date."""
    stay_apart()
    count, dimension, point_masses = graph.count, graph.dimension, graph.point_masses
    end = padded(count)
    columns, kernel_rows = graph.columns, graph.self_gibbs
    transpose(points, count, dimension, columns)
    for i in range(count):
        for k in range(0, end, WIDTH):
            square = splat(0.0)
            for e in range(dimension):
                apart = subtract(splat(points[i, e]), load(columns, e, k))
                square = fma(apart, apart, square)
            height = subtract(add(splat(potential[0, i]), load(potential, 0, k)), square)
            store(kernel_rows, i, k, exponential(multiply(splat(1.0 / epsilon), height)))
        for k in range(count, end):
            kernel_rows[i, k] = 0.0
    fill(graph.scaling, 1.0, end)
    fill(graph.shift, 0.0, end)
    for i in range(count, end):
        graph.step[0, i] = 0.0

    target = max(tolerance, ROUNDING)
    self_plan(count, graph.self_gibbs, graph.scaling, graph.self_plan, graph.self_rows)
    error = marginal_error(point_masses, graph.self_rows, count)
    stalled = 0
    for _ in range(MAX_ITERATIONS):
        if error <= target or stalled > MAX_STALLED or not error < math.inf:
            break
        for i in range(count):
            for k in range(0, end, WIDTH):
                store(graph.small, i, k, load(graph.self_plan, i, k))
            graph.small[i, i] += graph.self_rows[0, i]
        combine(point_masses, -1.0, graph.self_rows, graph.small_right, end)
        copy(graph.scaling, graph.old_scaling, end)
        copy(graph.self_rows, graph.old_rows, end)
        previous = error
        better = factorise(graph.small, count, graph.inverse)
        if better:
            substitute(graph.small, count, graph.inverse, graph.small_right, graph.step, 0)
            for i in range(count):
                graph.step[0, i] = min(graph.step[0, i], FARTHEST)
            for i in range(0, end, WIDTH):
                store(graph.scaling, 0, i, multiply(load(graph.scaling, 0, i), exponential(load(graph.step, 0, i))))
            self_plan(count, graph.self_gibbs, graph.scaling, graph.self_plan, graph.self_rows)
            error = marginal_error(point_masses, graph.self_rows, count)
            better = error < 0.9 * previous
        if not better:
            for i in range(count):
                graph.step[0, i] = 0.5 * math.log(point_masses[0, i] / max(graph.old_rows[0, i], 1e-300))
                graph.scaling[0, i] = graph.old_scaling[0, i] * math.exp(graph.step[0, i])
            self_plan(count, graph.self_gibbs, graph.scaling, graph.self_plan, graph.self_rows)
            error = marginal_error(point_masses, graph.self_rows, count)
        combine(graph.shift, 1.0, graph.step, graph.shift, end)
        stalled = 0 if error < 0.9 * previous else stalled + 1
    combine(potential, epsilon, graph.shift, potential, end)
    return error
