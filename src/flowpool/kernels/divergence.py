"""The gradient of the divergence in the points: both inner problems, then two barycentric sums (section 7.1 of the paper).

``G_i = 2 (P 1 - Q 1)_i x_i + 2 (Q X - P Y)_i``, the first part of which vanishes with the marginal errors. It is kept, because
:meth:`flowpool.core.divergence.Energy.evaluate` has it while the inner problems are solved loosely.
"""

from __future__ import annotations

import math

from flowpool.core.constants import FURTHER, LOOSE
from flowpool.kernels.machine.jit import kernel
from flowpool.kernels.machine.lanes import WIDTH, add, fma, load, multiply, splat, store, subtract, total
from flowpool.kernels.machine.linear import add_combinations, padded, row_products
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.machine.vectors import combine, copy, fill, inner_product
from flowpool.kernels.self_sinkhorn import solve_self_transport
from flowpool.kernels.sinkhorn import solve_transport


@kernel
def carry_potentials(graph):  # type: ignore[no-untyped-def]
    """Potentials for ``there.points`` from those of ``here``: ``f_i += sum_j P_ij (C_ij' - C_ij) / a_i``.

    A point that moves by 4 R in one step would otherwise leave its potential 30 epsilon behind. What the last move has shown
    beyond that, of both potentials, is added in proportion to how far this one goes along it.
    """
    stay_apart()
    here, there, count, numbers = graph.here, graph.there, graph.count, graph.count * padded(graph.dimension)
    square = inner_product(graph.moved, graph.moved, numbers)
    along = inner_product(there.points, graph.moved, numbers) - inner_product(here.points, graph.moved, numbers)
    share = min(max(along / square, -FURTHER), FURTHER) if 0.0 < square < math.inf else 0.0
    combine(there.points, -1.0, here.points, graph.moved, numbers)
    copy(here.potential, there.potential, padded(count))
    for i in range(count):
        squares = splat(0.0)
        inner = splat(0.0)
        for c in range(0, padded(graph.dimension), WIDTH):
            new, old = load(there.points, i, c), load(here.points, i, c)
            move = subtract(new, old)
            squares = fma(move, add(new, old), squares)
            inner = fma(move, load(here.pulled, i, c), inner)
        change = here.rows[0, i] * total(squares) - 2.0 * total(inner)
        there.potential[0, i] += change / graph.point_masses[0, i]
    copy(there.potential, graph.carried, padded(count))
    combine(there.potential, share, graph.drift, there.potential, padded(count))
    combine(here.self_potential, share, graph.self_drift, there.self_potential, padded(count))


@kernel
def note_drift(graph, solved):  # type: ignore[no-untyped-def]
    """Notes what the potentials of ``there`` did beyond what :func:`carry_potentials` had expected to first order."""
    stay_apart()
    here, there, short = graph.here, graph.there, padded(graph.count)
    combine(there.potential, -1.0, graph.carried, graph.drift, short)
    combine(there.self_potential, -1.0, here.self_potential, graph.self_drift, short)
    if not solved:
        fill(graph.drift, 0.0, short)
        fill(graph.self_drift, 0.0, short)


@kernel
def start_cold(graph, place, epsilon):  # type: ignore[no-untyped-def]
    """Potentials of a place where nothing is known of them, and the epsilon that their transport starts from."""
    stay_apart()
    farthest = 0.0
    for i in range(graph.count):
        square = 0.0
        for e in range(graph.dimension):
            square += place.points[i, e] * place.points[i, e]
        place.potential[0, i] = square
        place.self_potential[0, i] = 0.5 * epsilon * math.log(graph.point_masses[0, i])
        farthest = max(farthest, square)
    reach = 0.0
    for j in range(graph.length):
        square = 0.0
        for e in range(1, 1 + graph.hull):
            square += graph.nodes[e, j] * graph.nodes[e, j]
        reach = max(reach, square)
    # The cost is at most (|x| + |y|)^2; a quarter of it starts the cold solution of the first transport.
    return max(epsilon, (math.sqrt(farthest) + math.sqrt(reach)) ** 2 / 4.0)


@kernel
def fill_gradient(graph, place):  # type: ignore[no-untyped-def]
    """Fills the gradient from Q X, P Y and the row sums of both plans."""
    stay_apart()
    count, width = graph.count, padded(graph.dimension)
    for i in range(count):
        balance = splat(place.rows[0, i] - graph.self_rows[0, i])
        for c in range(0, width, WIDTH):
            pulled = load(place.pulled, i, c)
            store(place.gradient, i, c, subtract(multiply(balance, load(place.points, i, c)), pulled))
    add_combinations(graph.self_plan, count, count, place.points, width, place.gradient)
    for p in range(0, count * width, WIDTH):
        store(place.gradient, 0, p, multiply(splat(2.0), load(place.gradient, 0, p)))


@kernel
def evaluate(graph, place, epsilon, stage, tolerance):  # type: ignore[no-untyped-def]
    """Larger of the two marginal errors; potentials, ``P Y``, ``P 1`` and the gradient of ``place`` are brought up to date.

    Args:
        stage: epsilon to start from; more than ``epsilon`` where nothing is known of the potentials.
    """
    stay_apart()
    count, hull = graph.count, graph.hull
    error = solve_transport(graph, place.points, place.potential, epsilon, stage, tolerance)
    if LOOSE < error < math.inf:  # the potential was carried too far off for Newton's method; once more, from nothing
        stage = start_cold(graph, place, epsilon)
        error = solve_transport(graph, place.points, place.potential, epsilon, stage, tolerance)
    row_products(graph.plan, count, graph.nodes, 1, hull, graph.length, place.pulled, False)
    for i in range(count):
        place.rows[0, i] = graph.rows[0, i]
        for e in range(hull, padded(graph.dimension)):
            place.pulled[i, e] = 0.0
    if not error < math.inf:
        fill(place.gradient, math.nan, count * padded(graph.dimension))
        return error
    own = solve_self_transport(graph, place.points, place.self_potential, epsilon, tolerance)
    fill_gradient(graph, place)
    return max(error, own)
