"""How the plans follow a move of the points, and the product of the Hessian with a direction.

With ``p_ij = 2 w_i.(x_i - y_j)``, the change of the cost along W, the potentials change by df and dg and the plan by
``dP_ij = P_ij (df_i + dg_j - p_ij) / epsilon``; its rows and columns sum to zero. In the same way
``dQ_ik = Q_ik (dh_i + dh_k - q_ik) / epsilon`` with ``q_ik = 2 (x_i - x_k).(w_i - w_k)``, and
``H W = 2 (Q W + dQ X - dP Y)``.
"""

from __future__ import annotations

from flowpool.compiled.jit import kernel, shared
from flowpool.compiled.lanes import WIDTH, add, fma, load, multiply, splat, store, subtract, total
from flowpool.compiled.linear import factorise, padded, row_products, substitute
from flowpool.compiled.rows import stay_apart
from flowpool.compiled.transport import schur_matrix


@kernel
def keep_plans(count, length, work):  # type: ignore[no-untyped-def]
    """Copies the plans of the last evaluation; products use the copy, while the next evaluation overwrites the plans."""
    stay_apart()
    for i in range(count):
        for j in range(0, length, WIDTH):
            store(work.kept_conditional, i, j, load(work.conditional, i, j))
            store(work.kept_plan, i, j, load(work.plan, i, j))
        for k in range(0, padded(count), WIDTH):
            store(work.kept_self_plan, i, k, load(work.self_plan, i, k))


@kernel
def factorise_responses(count, point_masses, work):  # type: ignore[no-untyped-def]
    """Whether the two systems that give the change of the potentials could be factorised, from ``P A^T`` and Q."""
    stay_apart()
    for i in range(count):
        for k in range(0, padded(count), WIDTH):
            store(work.self_response, i, k, load(work.self_plan, i, k))
        work.self_response[i, i] += point_masses[0, i]
    schur_matrix(count, work.overlap, work.rows, work.response)
    return factorise(work.self_response, count, work.self_response_inverse) and factorise(
        work.response, count, work.response_inverse
    )


@shared
def price(inner, i, j, right, conditional, change, column):  # type: ignore[no-untyped-def]
    """Stores the change of the cost of point i and adds its share to the mean."""
    value = fma(splat(-2.0), inner, splat(right[0, i]))
    store(change, i, j, value)
    return fma(load(conditional, i, j), value, column)


@kernel
def cost_changes(nodes, length, hull, dimension, points, count, direction, conditional, plan, change, dual, right):  # type: ignore[no-untyped-def]
    """Fills ``change`` with p, ``(M, N)``, ``dual`` with its means ``sum_i A_ij p_ij``, and ``right`` with those of the rest.

    ``right_i = sum_j P_ij (p_ij - sum_l A_lj p_lj)`` is what the change of f answers to.
    """
    stay_apart()
    for i in range(count):
        inner = splat(0.0)
        for c in range(0, padded(dimension), WIDTH):
            inner = fma(load(points, i, c), load(direction, i, c), inner)
        right[0, i] = 2.0 * total(inner)
    for j in range(0, length, WIDTH):
        column = splat(0.0)
        for i in range(0, count // 4 * 4, 4):
            first = splat(0.0)
            second = splat(0.0)
            third = splat(0.0)
            fourth = splat(0.0)
            for e in range(hull):
                value = load(nodes, e + 1, j)
                first = fma(splat(direction[i, e]), value, first)
                second = fma(splat(direction[i + 1, e]), value, second)
                third = fma(splat(direction[i + 2, e]), value, third)
                fourth = fma(splat(direction[i + 3, e]), value, fourth)
            column = price(first, i, j, right, conditional, change, column)
            column = price(second, i + 1, j, right, conditional, change, column)
            column = price(third, i + 2, j, right, conditional, change, column)
            column = price(fourth, i + 3, j, right, conditional, change, column)
        for i in range(count // 4 * 4, count):
            first = splat(0.0)
            for e in range(hull):
                first = fma(splat(direction[i, e]), load(nodes, e + 1, j), first)
            column = price(first, i, j, right, conditional, change, column)
        store(dual, 0, j, column)
    for i in range(count):
        inner = splat(0.0)
        for j in range(0, length, WIDTH):
            inner = fma(load(plan, i, j), subtract(load(change, i, j), load(dual, 0, j)), inner)
        right[0, i] = total(inner)


@kernel
def plan_changes(length, count, epsilon, step, conditional, change, dual):  # type: ignore[no-untyped-def]
    """Replaces p by ``dA = dP / b``, ``(M, N)``, and its means by dg, ``(1, N)``, given df in ``step``."""
    stay_apart()
    scale = splat(1.0 / epsilon)
    for j in range(0, length, WIDTH):
        value = load(dual, 0, j)
        for i in range(count):
            value = fma(splat(-step[0, i]), load(conditional, i, j), value)
        store(dual, 0, j, value)
        for i in range(count):
            moved = subtract(add(splat(step[0, i]), value), load(change, i, j))
            store(change, i, j, multiply(scale, multiply(load(conditional, i, j), moved)))


@shared
def plan_response(nodes, length, hull, dimension, points, count, direction, epsilon, work):  # type: ignore[no-untyped-def]
    """Fills ``work.change`` with dA, ``(M, N)``, and ``work.dual`` with dg, ``(1, N)``.

    Args:
        nodes: ``(1 + R, N)``, coordinates from row 1 on.
        points: X, ``(M, Q)``.
        direction: W, ``(M, Q)``.
    """
    cost_changes(
        nodes, length, hull, dimension, points, count, direction, work.kept_conditional, work.kept_plan, work.change,
        work.dual, work.right,
    )  # fmt: skip
    substitute(work.response, count, work.response_inverse, work.right, work.step, 0)
    plan_changes(length, count, epsilon, work.step, work.kept_conditional, work.change, work.dual)


@kernel
def self_plan_response(dimension, points, count, direction, epsilon, work):  # type: ignore[no-untyped-def]
    """Fills ``self_change`` with dQ, ``(M, M)``."""
    stay_apart()
    change = work.self_change
    for i in range(count):
        row = 0.0
        for k in range(count):
            inner = splat(0.0)
            for c in range(0, padded(dimension), WIDTH):
                apart = subtract(load(points, i, c), load(points, k, c))
                inner = fma(apart, subtract(load(direction, i, c), load(direction, k, c)), inner)
            change[i, k] = 2.0 * total(inner)
            row += work.kept_self_plan[i, k] * change[i, k]
        work.right[0, i] = row
    substitute(work.self_response, count, work.self_response_inverse, work.right, work.step, 0)
    for i in range(count):
        for k in range(count):
            change[i, k] = work.kept_self_plan[i, k] * (work.step[0, i] + work.step[0, k] - change[i, k]) / epsilon


@kernel
def hessian_product(  # type: ignore[no-untyped-def]
    nodes, weighted, length, hull, dimension, points, count, direction, epsilon, work, result
):
    """Fills ``result`` with H W, ``(M, Q)``; ``weighted`` are the coordinates of the nodes times their masses, ``(R, N)``."""
    stay_apart()
    plan_response(nodes, length, hull, dimension, points, count, direction, epsilon, work)
    self_plan_response(dimension, points, count, direction, epsilon, work)
    row_products(work.change, count, weighted, 0, hull, length, result)
    for i in range(count):
        for e in range(hull, padded(dimension)):
            result[i, e] = 0.0
        for c in range(0, padded(dimension), WIDTH):
            value = multiply(splat(-1.0), load(result, i, c))
            for k in range(count):
                value = fma(splat(work.kept_self_plan[i, k]), load(direction, k, c), value)
                value = fma(splat(work.self_change[i, k]), load(points, k, c), value)
            store(result, i, c, multiply(splat(2.0), value))
