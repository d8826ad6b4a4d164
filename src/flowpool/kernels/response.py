"""How the plans follow a move of the points, and the product of the Hessian with a direction.

With ``p_ij = 2 w_i.(x_i - y_j)``, the change of the cost along W, the potentials change by df and dg and the plan by
``dP_ij = P_ij (df_i + dg_j - p_ij) / epsilon``; its rows and columns sum to zero. In the same way
``dQ_ik = Q_ik (dh_i + dh_k - q_ik) / epsilon`` with ``q_ik = 2 (x_i - x_k).(w_i - w_k)``, and
``H W = 2 (Q W + dQ X - dP Y)``. In the kernels p, df and dg are in units of epsilon.
"""

from __future__ import annotations

from flowpool.kernels.machine.jit import kernel, shared
from flowpool.kernels.machine.lanes import (
    WIDTH,
    add,
    fma,
    load,
    multiply,
    splat,
    store,
    subtract,
    total,
)
from flowpool.kernels.machine.linear import add_combinations, factorise, padded, row_products, substitute, transpose
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.machine.vectors import fill
from flowpool.kernels.sinkhorn import affine, schur_matrix


@kernel
def keep_plans(graph):  # type: ignore[no-untyped-def]
    """Copies the points and plans of the last evaluation; products use the copy, while the next one overwrites the plans."""
    stay_apart()
    tangent, count = graph.tangent, graph.count
    for i in range(count):
        for j in range(0, graph.length, WIDTH):
            store(tangent.conditional, i, j, load(graph.conditional, i, j))
        for k in range(0, padded(count), WIDTH):
            store(graph.kept_self_plan, i, k, load(graph.self_plan, i, k))
    transpose(graph.here.points, count, graph.dimension, graph.kept_columns)


@kernel
def factorise_responses(graph):  # type: ignore[no-untyped-def]
    """Whether the two systems that give the change of the potentials could be factorised, from ``P A^T`` and Q."""
    stay_apart()
    count = graph.count
    for i in range(count):
        for k in range(0, padded(count), WIDTH):
            store(graph.self_response, i, k, load(graph.kept_self_plan, i, k))
        graph.self_response[i, i] += graph.point_masses[0, i]
    schur_matrix(count, graph.overlap, graph.here.rows, graph.response)
    return factorise(graph.self_response, count, graph.self_response_inverse) and factorise(
        graph.response, count, graph.response_inverse
    )


@kernel
def scale_direction(points, direction, count, dimension, epsilon, scaled):  # type: ignore[no-untyped-def]
    """Fills ``scaled``, ``(M, Q + 1)``: ``-2 w_i / epsilon`` and, last, ``2 x_i.w_i / epsilon``."""
    stay_apart()
    for i in range(count):
        inner = splat(0.0)
        for c in range(0, padded(dimension), WIDTH):
            inner = fma(load(points, i, c), load(direction, i, c), inner)
        for e in range(dimension):
            scaled[i, e] = -2.0 / epsilon * direction[i, e]
        scaled[i, dimension] = 2.0 / epsilon * total(inner)


@kernel
def cost_changes(graph, tangent):  # type: ignore[no-untyped-def]
    """Fills ``tangent.change`` with p, ``(M, N)``, ``tangent.dual`` with its means ``sum_i A_ij p_ij``, ``graph.small_right``.

    The last is what the change of f answers to, ``sum_j P_ij (p_ij - sum_l A_lj p_lj)``. ``tangent.scaled`` is that of
    :func:`scale_direction`.
    """
    stay_apart()
    count, conditional, change, sums = graph.count, tangent.conditional, tangent.change, tangent.sums
    for i in range(count):
        store(sums, i, 0, splat(0.0))
    for j in range(0, graph.length, WIDTH):
        affine(graph.nodes, graph.hull, graph.dimension, count, tangent.scaled, change, j)
        column, mass = splat(0.0), load(graph.masses, 0, j)
        for i in range(count):
            column = fma(load(conditional, i, j), load(change, i, j), column)
        store(tangent.dual, 0, j, column)
        for i in range(count):
            apart = multiply(mass, subtract(load(change, i, j), column))
            store(sums, i, 0, fma(load(conditional, i, j), apart, load(sums, i, 0)))
    for i in range(count):
        graph.small_right[0, i] = total(load(sums, i, 0))


@kernel
def plan_changes(graph, tangent, weighted):  # type: ignore[no-untyped-def]
    """Replaces the means of p by dg, ``(1, N)``, and p by ``dA = A (df + dg - p)``, ``(M, N)``, given df in ``graph.step``.

    Args:
        weighted: by ``dP = b dA`` instead.
    """
    stay_apart()
    count, conditional, change, dual, step = graph.count, tangent.conditional, tangent.change, tangent.dual, graph.step
    for j in range(0, graph.length, WIDTH):
        value = load(dual, 0, j)
        for i in range(count):
            value = fma(splat(-step[0, i]), load(conditional, i, j), value)
        store(dual, 0, j, value)
        mass = load(graph.masses, 0, j) if weighted else splat(1.0)
        for i in range(count):
            moved = subtract(add(splat(step[0, i]), value), load(change, i, j))
            store(change, i, j, multiply(multiply(mass, load(conditional, i, j)), moved))


@shared
def respond(graph, direction, epsilon, weighted):  # type: ignore[no-untyped-def]
    """Fills ``graph.tangent.change`` with dP if weighted, else with dA, and its ``dual`` with dg."""
    tangent = graph.tangent
    scale_direction(graph.here.points, direction, graph.count, graph.dimension, epsilon, tangent.scaled)
    cost_changes(graph, tangent)
    substitute(graph.response, graph.count, graph.response_inverse, graph.small_right, graph.step, 0)
    plan_changes(graph, tangent, weighted)


@kernel
def self_plan_response(graph, direction, epsilon):  # type: ignore[no-untyped-def]
    """Fills ``graph.self_change`` with dQ, ``(M, M)``, for a move of the points at ``here``."""
    stay_apart()
    count, dimension, end = graph.count, graph.dimension, padded(graph.count)
    change, plan, own, points = graph.self_change, graph.kept_self_plan, graph.own, graph.here.points
    to_points, to_directions = graph.kept_columns, graph.direction_columns
    transpose(direction, count, dimension, to_directions)
    for k in range(0, end, WIDTH):
        inner = splat(0.0)
        for e in range(dimension):
            inner = fma(load(to_points, e, k), load(to_directions, e, k), inner)
        store(own, 0, k, inner)
    fill(change, 0.0, count * end)
    add_combinations(points, count, dimension, to_directions, end, change)
    add_combinations(direction, count, dimension, to_points, end, change)
    for i in range(count):
        row = splat(0.0)
        for k in range(0, end, WIDTH):
            apart = subtract(add(splat(own[0, i]), load(own, 0, k)), load(change, i, k))
            apart = multiply(splat(2.0), apart)
            store(change, i, k, apart)
            row = fma(load(plan, i, k), apart, row)
        graph.small_right[0, i] = total(row)
    substitute(graph.self_response, count, graph.self_response_inverse, graph.small_right, graph.step, 0)
    for i in range(count):
        for k in range(0, end, WIDTH):
            moved = subtract(add(splat(graph.step[0, i]), load(graph.step, 0, k)), load(change, i, k))
            store(change, i, k, multiply(multiply(splat(1.0 / epsilon), load(plan, i, k)), moved))


@kernel
def hessian_product(graph, direction, epsilon, shift, result):  # type: ignore[no-untyped-def]
    """Fills ``result`` with ``(H + shift diag(2 a)) W``, ``(M, Q)``, for the Hessian at ``here``.

    Args:
        direction: W, ``(M, Q)``.
    """
    stay_apart()
    count, hull, dimension, points = graph.count, graph.hull, graph.dimension, graph.here.points
    respond(graph, direction, epsilon, True)
    row_products(graph.tangent.change, count, graph.nodes, 1, hull, graph.length, result, False)
    self_plan_response(graph, direction, epsilon)
    width = padded(dimension)
    for i in range(count):
        for e in range(hull, width):
            result[i, e] = 0.0
        push = splat(shift * graph.point_masses[0, i])
        for c in range(0, width, WIDTH):
            store(result, i, c, subtract(multiply(push, load(direction, i, c)), load(result, i, c)))
    add_combinations(graph.kept_self_plan, count, count, direction, width, result)
    add_combinations(graph.self_change, count, count, points, width, result)
    for p in range(0, count * width, WIDTH):
        store(result, 0, p, multiply(splat(2.0), load(result, 0, p)))
