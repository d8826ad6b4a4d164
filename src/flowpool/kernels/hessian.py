"""The Hessian of the divergence in the points, as a dense matrix: all of it, or that of the leading coordinates.

The formula is that of :func:`flowpool.core.hessian.squared_euclidean_hessian`. The sums over nodes in it are moments of the nodes
under the weights ``P_ij A_lj``: their mass, their mean and their second moments, which are symmetric both in the
pair (i, l) and in the pair of coordinates.
"""

from __future__ import annotations

import math

from flowpool.kernels.machine.jit import kernel
from flowpool.kernels.machine.lanes import WIDTH, add, fma, load, multiply, splat, store, subtract
from flowpool.kernels.machine.linear import add_outer, factorise, padded, reduce_rows, row_products, substitute
from flowpool.kernels.machine.rows import from_column, stay_apart
from flowpool.kernels.memory import BLOCK
from flowpool.kernels.response import factorise_responses


@kernel
def pair_weights(count, length, conditional, masses, weights):  # type: ignore[no-untyped-def]
    """``b_j A_ij A_lj`` for i <= l, one row for each pair."""
    stay_apart()
    row = 0
    for i in range(count):
        for k in range(i, count):
            for j in range(0, length, WIDTH):
                plan = multiply(load(masses, 0, j), load(conditional, i, j))
                store(weights, row, j, multiply(plan, load(conditional, k, j)))
            row += 1


@kernel
def assemble(graph, epsilon):  # type: ignore[no-untyped-def]
    """Fills the upper triangle of ``graph.hessian``, ``(M K, M K)``, with the point's index changing slowest.

    ``graph`` holds the moments, ``(M (M + 1) / 2, 1 + K + K (K + 1) / 2)``, and the kept plan of the points with themselves.

    Returns:
        Whether the two small systems that make the plans follow the points could be factorised.
    """
    stay_apart()
    count, dimension = graph.count, graph.lead
    end = padded(dimension)
    points, pulled = graph.lead_points, graph.lead_pulled  # (M, K), zero beyond K up to the padding
    pair = 0
    for i in range(count):
        for k in range(i, count):
            graph.overlap[i, k] = graph.moments[pair, 0]
            pair += 1
        for e in range(end):
            points[i, e] = graph.here.points[i, e] if e < dimension else 0.0
            pulled[i, e] = graph.here.pulled[i, e] if e < dimension else 0.0
    size = count * dimension
    width = padded(size)
    strength = 4.0 / epsilon
    hessian, follow, own_block = graph.hessian, graph.follow, graph.own_block
    moments, mean, second, unit = graph.moments, graph.mean, graph.second, graph.unit
    lever, apart = graph.lever, graph.apart
    for row in range(size):
        for c in range(0, end, WIDTH):
            store(own_block, row, c, splat(0.0))
    for m in range(2 * count):
        for j in range(0, width + end, WIDTH):
            store(follow, m, j, splat(0.0))

    for e in range(dimension):
        for c in range(0, end, WIDTH):
            store(unit, e, c, splat(0.0))
        unit[e, e] = 2.0
        for c in range(dimension, end):
            second[e, c] = 0.0
    for e in range(dimension, end):
        mean[0, e] = 0.0

    pair = 0
    for i in range(count):
        for k in range(i, count):
            mass, coupling = moments[pair, 0], graph.kept_self_plan[i, k]
            for e in range(dimension):
                mean[0, e] = moments[pair, 1 + e]
            column = 1 + dimension
            for e in range(dimension):
                for c in range(e + 1):
                    second[e, c] = second[c, e] = moments[pair, column]
                    column += 1
            for c in range(0, end, WIDTH):
                reach = load(points, k, c)
                middle = load(mean, 0, c)
                gap = subtract(load(points, i, c), reach)
                pull = subtract(multiply(splat(mass), reach), middle)
                store(lever, 0, c, pull)
                store(apart, 0, c, gap)
                # How the potentials h and f follow a move of point i: rows ``k`` and ``count + k``; and the other way.
                # Lanes past the last coordinate hold zeros, so that adding them to the next block changes nothing.
                row, mirror = i * dimension + c, k * dimension + c
                drift = multiply(splat(coupling), gap)
                store(follow, k, row, add(load(follow, k, row), drift))
                store(follow, i, row, add(load(follow, i, row), drift))
                own_pull = subtract(middle, multiply(splat(mass), load(points, i, c)))
                store(follow, count + k, row, add(load(follow, count + k, row), own_pull))
                if k > i:
                    store(follow, i, mirror, subtract(load(follow, i, mirror), drift))
                    store(follow, k, mirror, subtract(load(follow, k, mirror), drift))
                    store(follow, count + i, mirror, subtract(load(follow, count + i, mirror), pull))
            for e in range(dimension):
                row, mirror = i * dimension + e, k * dimension + e
                by_point = splat(strength * points[i, e])
                by_mean = splat(-strength * mean[0, e])
                by_drift = splat(-strength * coupling * apart[0, e])
                for c in range(0, end, WIDTH):
                    turned = multiply(by_drift, load(apart, 0, c))
                    value = fma(by_point, load(lever, 0, c), turned)
                    value = fma(by_mean, load(points, k, c), value)
                    value = fma(splat(coupling), load(unit, e, c), value)
                    moment = multiply(splat(strength), load(second, e, c))
                    value = add(value, moment)
                    turned = add(turned, moment)
                    # A store that reaches past the block writes zeros where the next block is still to come.
                    store(hessian, row, k * dimension + c, value)
                    # The block of a point with itself loses what its pairs gain, summed over the partners.
                    store(own_block, row, c, subtract(load(own_block, row, c), turned))
                    if k > i:
                        store(own_block, mirror, c, subtract(load(own_block, mirror, c), turned))
            pair += 1

    for i in range(count):
        for e in range(dimension):
            row = i * dimension + e
            drift = graph.here.rows[0, i] * points[i, e] - pulled[i, e]
            follow[count + i, row] += drift
            by_drift = splat(-strength * drift)
            by_point = splat(strength * points[i, e])
            for c in range(0, end, WIDTH):
                own = fma(by_drift, load(points, i, c), load(own_block, row, c))
                own = fma(by_point, load(pulled, i, c), own)
                place = i * dimension + c
                store(hessian, row, place, add(own, load(hessian, row, place)))

    if not factorise_responses(graph):
        return False
    reduce_rows(graph.self_response, count, graph.self_response_inverse, follow, 0, width)
    reduce_rows(graph.response, count, graph.response_inverse, follow, count, width)
    for m in range(count):
        turn = splat(-strength / graph.self_response_inverse[0, m])
        push = splat(strength / graph.response_inverse[0, m])
        for j in range(0, width, WIDTH):
            store(graph.weighted_follow, m, j, multiply(turn, load(follow, m, j)))
            store(graph.weighted_follow, count + m, j, multiply(push, load(follow, count + m, j)))
    add_outer(follow, 2 * count, graph.weighted_follow, size, hessian)
    return True


@kernel
def form_hessian(graph, epsilon):  # type: ignore[no-untyped-def]
    """Fills the upper triangle of ``graph.hessian`` at ``here`` for the leading coordinates; NaN where that is not possible.

    The plans are the kept ones. The moments are summed over blocks of nodes.
    """
    stay_apart()
    count, length, lead = graph.count, graph.length, graph.lead
    num_pairs, products = count * (count + 1) // 2, lead * (lead + 1) // 2
    for start in range(0, length, BLOCK):
        width = min(BLOCK, length - start)
        block = from_column(graph.nodes, start)
        pair_weights(
            count,
            width,
            from_column(graph.tangent.conditional, start),
            from_column(graph.masses, start),
            graph.pairs,
        )
        row = 0
        for e in range(lead):
            for c in range(e + 1):
                for j in range(0, width, WIDTH):
                    store(graph.products, row, j, multiply(load(block, 1 + e, j), load(block, 1 + c, j)))
                row += 1
        moments = graph.moments if start == 0 else graph.block_moments
        row_products(graph.pairs, num_pairs, block, 0, 1 + lead, width, moments, False)
        row_products(graph.pairs, num_pairs, graph.products, 0, products, width, from_column(moments, 1 + lead), False)
        if start > 0:
            for pair in range(num_pairs):
                for c in range(0, padded(1 + lead + products), WIDTH):
                    store(graph.moments, pair, c, add(load(graph.moments, pair, c), load(moments, pair, c)))
    if not assemble(graph, epsilon):
        graph.hessian[0, 0] = math.nan


@kernel
def shifted_factor(graph, shift, factor, pivots):  # type: ignore[no-untyped-def]
    """Whether ``H + shift diag(2 a)`` is positive definite in the leading coordinates; ``factor`` is then its factor."""
    stay_apart()
    size = graph.count * graph.lead
    for row in range(size):
        for j in range(row // WIDTH * WIDTH, padded(size), WIDTH):
            store(factor, row, j, load(graph.hessian, row, j))
        factor[row, row] += shift * 2.0 * graph.point_masses[0, row // graph.lead]
    return factorise(factor, size, pivots)


@kernel
def solve_factored(graph, factor, pivots, right, solution):  # type: ignore[no-untyped-def]
    """Fills the leading columns of ``solution`` from those of ``right``."""
    stay_apart()
    count, lead = graph.count, graph.lead
    for i in range(count):
        for e in range(lead):
            graph.flat_right[0, i * lead + e] = right[i, e]
    substitute(factor, count * lead, pivots, graph.flat_right, graph.flat_solution, 0)
    for i in range(count):
        for e in range(lead):
            solution[i, e] = graph.flat_solution[0, i * lead + e]
