"""How the plans follow a move of the points, and the product of the Hessian with a direction.

With ``p_ij = 2 w_i.(x_i - y_j)``, the change of the cost along W, the potentials change by df and dg and the plan by
``dP_ij = P_ij (df_i + dg_j - p_ij) / epsilon``; its rows and columns sum to zero. In the same way
``dQ_ik = Q_ik (dh_i + dh_k - q_ik) / epsilon`` with ``q_ik = 2 (x_i - x_k).(w_i - w_k)``, and
``H W = 2 (Q W + dQ X - dP Y)``. In the kernels p, df and dg are in units of epsilon.

What is as long as the nodes is done in either precision. Conjugate gradients that are stopped after a digit or two need no
more than float32, which has twice as many numbers in a register.
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
    spread,
    store,
    subtract,
    total,
    width_of,
)
from flowpool.kernels.machine.linear import add_combinations, factorise, padded, row_products, substitute
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.scratch import to_single
from flowpool.kernels.sinkhorn import affine, schur_matrix


@kernel
def keep_plans(cloud, count, work):  # type: ignore[no-untyped-def]
    """Copies the plans of the last evaluation; products use the copy, while the next evaluation overwrites the plans."""
    stay_apart()
    double, single = work.double, work.single
    for i in range(count):
        for j in range(0, cloud.length, WIDTH):
            store(double.conditional, i, j, load(work.conditional, i, j))
            store(double.plan, i, j, load(work.plan, i, j))
        for k in range(0, padded(count), WIDTH):
            store(work.kept_self_plan, i, k, load(work.self_plan, i, k))
        to_single(work.conditional, i, cloud.length, single.conditional)
        to_single(work.plan, i, cloud.length, single.plan)


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
def cost_changes(nodes, length, hull, dimension, count, scaled, conditional, plan, change, dual, right):  # type: ignore[no-untyped-def]
    """Fills ``change`` with p, ``(M, N)``, ``dual`` with its means ``sum_i A_ij p_ij``, and ``right`` with those of the rest.

    ``right_i = sum_j P_ij (p_ij - sum_l A_lj p_lj)`` is what the change of f answers to. ``scaled`` is that of
    :func:`scale_direction`.
    """
    stay_apart()
    for j in range(0, length, width_of(nodes)):
        affine(nodes, hull, dimension, count, scaled, change, j)
        column = spread(nodes, 0.0)
        for i in range(count):
            column = fma(load(conditional, i, j), load(change, i, j), column)
        store(dual, 0, j, column)
    for i in range(count):
        inner = spread(nodes, 0.0)
        for j in range(0, length, width_of(nodes)):
            inner = fma(load(plan, i, j), subtract(load(change, i, j), load(dual, 0, j)), inner)
        right[0, i] = total(inner)


@kernel
def plan_changes(length, count, step, conditional, weights, change, dual):  # type: ignore[no-untyped-def]
    """Replaces the means of p by dg, ``(1, N)``, and p by ``weights (df + dg - p)``, ``(M, N)``, given df in ``step``.

    That is dP if the weights are P, and ``dA = dP / b`` if they are A.
    """
    stay_apart()
    for j in range(0, length, width_of(change)):
        value = load(dual, 0, j)
        for i in range(count):
            value = fma(spread(change, -step[0, i]), load(conditional, i, j), value)
        store(dual, 0, j, value)
        for i in range(count):
            moved = subtract(add(spread(change, step[0, i]), value), load(change, i, j))
            store(change, i, j, multiply(load(weights, i, j), moved))


@shared
def respond(nodes, length, hull, dimension, count, tangent, weights, work):  # type: ignore[no-untyped-def]
    """Fills ``tangent.change`` with dP or dA, as :func:`plan_changes` has it, and ``tangent.dual`` with dg."""
    cost_changes(
        nodes, length, hull, dimension, count, tangent.scaled, tangent.conditional, tangent.plan, tangent.change,
        tangent.dual, work.right,
    )  # fmt: skip
    substitute(work.response, count, work.response_inverse, work.right, work.step, 0)
    plan_changes(length, count, work.step, tangent.conditional, weights, tangent.change, tangent.dual)


@kernel
def self_plan_response(dimension, points, count, direction, epsilon, work):  # type: ignore[no-untyped-def]
    """Fills ``self_change`` with dQ, ``(M, M)``."""
    stay_apart()
    change, inner = work.self_change, work.inner
    row_products(points, count, direction, 0, count, padded(dimension), inner, False)
    for i in range(count):
        row = 0.0
        for k in range(count):
            change[i, k] = 2.0 * ((inner[i, i] - inner[i, k]) + (inner[k, k] - inner[k, i]))
            row += work.kept_self_plan[i, k] * change[i, k]
        work.right[0, i] = row
    substitute(work.self_response, count, work.self_response_inverse, work.right, work.step, 0)
    for i in range(count):
        for k in range(count):
            change[i, k] = work.kept_self_plan[i, k] * (work.step[0, i] + work.step[0, k] - change[i, k]) / epsilon


@kernel
def hessian_product(cloud, dimension, points, count, direction, epsilon, shift, fine, work, result):  # type: ignore[no-untyped-def]
    """Fills ``result`` with ``(H + shift diag(2 a)) W``, ``(M, Q)``.

    Args:
        points: X, ``(M, Q)``.
        direction: W, ``(M, Q)``.
        fine: in float64 throughout; otherwise all that is as long as the nodes is done in float32.
    """
    stay_apart()
    hull = cloud.hull
    if fine:
        tangent = work.double
        scale_direction(points, direction, count, dimension, epsilon, tangent.scaled)
        respond(cloud.coordinates, cloud.length, hull, dimension, count, tangent, tangent.plan, work)
        row_products(tangent.change, count, cloud.coordinates, 1, hull, cloud.length, result, False)
    else:
        rough = work.single
        scale_direction(points, direction, count, dimension, epsilon, rough.scaled)
        respond(cloud.singles, cloud.single_length, hull, dimension, count, rough, rough.plan, work)
        row_products(rough.change, count, cloud.singles, 1, hull, cloud.single_length, result, False)
    self_plan_response(dimension, points, count, direction, epsilon, work)
    width = padded(dimension)
    for i in range(count):
        for e in range(hull, width):
            result[i, e] = 0.0
        push = splat(shift * cloud.point_masses[0, i])
        for c in range(0, width, WIDTH):
            store(result, i, c, subtract(multiply(push, load(direction, i, c)), load(result, i, c)))
    add_combinations(work.kept_self_plan, count, direction, width, result)
    add_combinations(work.self_change, count, points, width, result)
    for p in range(0, count * width, WIDTH):
        store(result, 0, p, multiply(splat(2.0), load(result, 0, p)))
