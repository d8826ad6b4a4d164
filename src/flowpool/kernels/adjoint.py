"""Gradients of ``<V, X*>`` in the nodes, their masses and epsilon, graph after graph.

One linear system ``H W = V`` and the response of the plans to W (section 8.2 of the paper), as
:func:`flowpool.core.implicit.vector_jacobian` has it:

    grad y_j = 2 b_j sum_i (A_ij w_i + dA_ij x_i),   grad b_j = -dg_j,
    grad epsilon = (sum_ij dP_ij C_ij - sum_ik dQ_ik D_ik / 2) / epsilon

Outside the hull of the nodes the Hessian is ``2 Q`` for each direction, which needs no large system.
"""

from __future__ import annotations

import numpy as np

from flowpool.core.constants import FLAT_LEADING, MANY, MOST_LEADING, SINGULAR
from flowpool.kernels.cloud import basis_of, cloud_memory, dimension_at_end, graph_memory, make_room, remove
from flowpool.kernels.divergence import evaluate
from flowpool.kernels.flow import move_to
from flowpool.kernels.frame import end_along, framed_epsilon, leave_frame, place_start
from flowpool.kernels.hessian import form_hessian
from flowpool.kernels.machine.jit import entry, kernel
from flowpool.kernels.machine.lanes import WIDTH, fma, load, multiply, splat, store
from flowpool.kernels.machine.linear import padded, row_products
from flowpool.kernels.machine.rows import draw, stay_apart
from flowpool.kernels.memory import open_cloud, open_graph
from flowpool.kernels.records import CLOUD, DISTINCT, HEAVY, KIND, RADIUS, SINGLE, UNIT
from flowpool.kernels.response import hessian_product, keep_plans, respond, self_plan_response
from flowpool.kernels.systems import solve_adjoint, solve_outside


@kernel
def evaluate_at_end(graph, kept, which, epsilon):  # type: ignore[no-untyped-def]
    """Plans and Hessian at X*, which become ``here``, from the potentials that solve them."""
    stay_apart()
    there, features = graph.there, kept.ends.shape[2] - 2
    for i in range(graph.count):
        for e in range(padded(graph.dimension)):
            there.points[i, e] = kept.ends[which, i, e] if e < graph.dimension else 0.0
        there.potential[0, i] = kept.ends[which, i, features]
        there.self_potential[0, i] = kept.ends[which, i, features + 1]
    # The potentials are solutions already; this fills the plans.
    evaluate(graph, there, epsilon, epsilon, 1e-12)
    move_to(there, graph.here, graph)
    keep_plans(graph)
    form_hessian(graph, epsilon)


@kernel
def take_cotangent(given, kept, which, cotangent, cloud, graph):  # type: ignore[no-untyped-def]
    """Fills ``graph.right`` with the cotangent along the basis, ``cloud.outside`` with the rest, in the frame."""
    stay_apart()
    features, scale, basis = given.nodes.shape[1], kept.frame[which, 1], basis_of(kept, which, given)
    width = padded(features)
    for i in range(graph.count):
        for d in range(width):
            cloud.outside[i, d] = cotangent[which, i, d] * scale[d] if d < features else 0.0
        for e in range(padded(graph.dimension)):
            graph.right[i, e] = remove(cloud.outside, i, basis, e, width) if e < graph.dimension else 0.0


@kernel
def respond_to_solution(graph, epsilon):  # type: ignore[no-untyped-def]
    """Gradient in epsilon; fills dA in ``graph.tangent.change`` and dg in ``graph.tangent.dual``, given W in ``solution``."""
    stay_apart()
    tangent, here, count, hull = graph.tangent, graph.here, graph.count, graph.hull
    respond(graph, graph.solution, epsilon, False)
    self_plan_response(graph, graph.solution, epsilon)
    # Rows and columns of dP and dQ sum to zero, so only the inner products in the costs count.
    for j in range(0, graph.length, WIDTH):
        mass = load(graph.masses, 0, j)
        for i in range(count):
            store(graph.scores, i, j, multiply(mass, load(tangent.change, i, j)))
    row_products(graph.scores, count, graph.nodes, 1, hull, graph.length, graph.velocity, False)
    slope = 0.0
    for i in range(count):
        for e in range(hull):
            slope -= 2.0 * here.points[i, e] * graph.velocity[i, e]
        for k in range(count):
            for e in range(graph.dimension):
                slope += graph.self_change[i, k] * here.points[i, e] * here.points[k, e]
    return slope / epsilon


@kernel
def fill_left(given, kept, which, cotangent, epsilon, cloud, graph):  # type: ignore[no-untyped-def]
    """Fills ``cloud.spare`` with what flat directions leave of the cotangent, ``V - H W``.

    ``cloud.outside`` is W outside the hull, where H is 2 Q.
    """
    stay_apart()
    scale, basis = kept.frame[which, 1], basis_of(kept, which, given)
    hessian_product(graph, graph.solution, epsilon, 0.0, graph.image)
    for i in range(graph.count):
        for d in range(given.nodes.shape[1]):
            value = cotangent[which, i, d] * scale[d]
            for e in range(graph.dimension):
                value -= graph.image[i, e] * basis[e, d]
            for k in range(graph.count):
                value -= 2.0 * graph.kept_self_plan[i, k] * cloud.outside[k, d]
            cloud.spare[i, d] = value


@kernel
def pull_start(given, kept, which, cloud, room):  # type: ignore[no-untyped-def]
    """Gradient in R by way of the start; adds what flat directions have left to ``room.moment``.

    Along them the points are where they began, ``R reference / scale`` in the frame; or, if that is absolute, they stay
    whatever happens to the frame, and depend on its scale as the nodes do. ``cloud.spare`` is what they have left of the
    cotangent, ``cloud.points`` is X*.
    """
    stay_apart()
    where = cloud.points
    if given.relative:
        where = cloud.outside
        place_start(given, kept, which, where)
    along = 0.0
    for d in range(given.nodes.shape[1]):
        for i in range(len(given.point_masses)):
            room.moment[d] += cloud.spare[i, d] * where[i, d]
        along += room.moment[d]
    return along / kept.facts[which, RADIUS] ** 2 if given.relative else 0.0


@kernel
def pull_nodes(given, kept, which, epsilon, cloud, graph):  # type: ignore[no-untyped-def]
    """Fills ``cloud.left`` with the gradients in the distinct nodes, for a mass of one, ``cloud.row`` with those in their masses.

    ``cloud.outside`` is W outside the hull, and becomes twice the whole of it.
    """
    stay_apart()
    count, features, tangent, way = graph.count, given.nodes.shape[1], graph.tangent, cloud.outside
    heavy, basis = int(kept.facts[which, HEAVY]), basis_of(kept, which, given)
    mean, scale = kept.frame[which, 0], kept.frame[which, 1]
    for j in range(graph.length):
        cloud.row[0, j] = -epsilon * tangent.dual[0, j]
    # A node without mass may lie outside the hull, where the cost changes by -2 w_i.y_j, too.
    for place in range(given.ptr[which], given.ptr[which + 1]):
        j = kept.distinct[place]
        if j >= heavy:
            value = -epsilon * tangent.dual[0, j]
            for d in range(features):
                along = 0.0
                for i in range(count):
                    along += tangent.conditional[i, j] * way[i, d]
                value += 2.0 * along * ((given.nodes[kept.order[place], d] - mean[d]) / scale[d])
            cloud.row[0, j] = value
    for i in range(count):
        for d in range(0, padded(features), WIDTH):
            whole = load(way, i, d)
            for e in range(graph.dimension):
                whole = fma(splat(graph.solution[i, e]), load(basis, e, d), whole)
            store(way, i, d, multiply(splat(2.0), whole))
    for j in range(0, graph.length, WIDTH):
        for d in range(features):
            pull = splat(0.0)
            for i in range(count):
                pull = fma(splat(way[i, d]), load(tangent.conditional, i, j), pull)
                pull = fma(splat(2.0 * cloud.points[i, d]), load(tangent.change, i, j), pull)
            store(cloud.left, d, j, pull)


@entry
def adjoint_graphs(given, kept, cotangent, ridge, most, turns, counter, gradients):  # type: ignore[no-untyped-def]
    """Gradients of the graphs ``turns[k]`` for each k that is drawn from the counter.

    Args:
        given, kept: as :func:`flowpool.kernels.solve.solve_graphs` had and left them.
        cotangent: V, ``(B, M, D)``.
        ridge: lambda of the Tikhonov term, in units of ``(2 / M)^2``.
        most: largest number of nodes of these graphs.
        gradients: :class:`~flowpool.kernels.records.Gradients`, which is filled; zeros where there is nothing to fill in.
    """
    count, features = given.reference.shape
    room, first, second = make_room(most, features), np.empty(0), np.empty(0)
    weighted = False
    for d in range(features):
        weighted = weighted or given.weights[d] != given.weights[0]
    while True:
        turn = draw(counter)
        if turn < 0 or turn >= len(turns):
            break
        which = turns[turn]
        kind = kept.facts[which, KIND]
        if kind != CLOUD and kind != SINGLE:
            continue
        first = cloud_memory(given, kept, which, room, first)
        cloud = open_cloud(first, room.cloud_places)
        to_radius = 0.0
        for d in range(features):
            room.moment[d] = 0.0
            for i in range(count):
                cloud.points[i, d] = (
                    end_along(kept, which, basis_of(kept, which, given), i, d) if kind == CLOUD else 0.0
                )
        if kind == CLOUD:
            epsilon, heavy = framed_epsilon(given, kept, which), int(kept.facts[which, HEAVY])
            # With about as many points as distinct nodes there are flat directions, which iterations are slow to find; with
            # very many nodes the Hessian costs less than the iterations.
            block = MOST_LEADING if 2 * count < heavy < MANY else FLAT_LEADING
            taken, dimension = int(kept.facts[which, DISTINCT]), dimension_at_end(kept, which)
            second = graph_memory(given, kept, which, room, epsilon, taken, dimension, block, second)
            graph = open_graph(second, room.graph_places)
            evaluate_at_end(graph, kept, which, epsilon)
            take_cotangent(given, kept, which, cotangent, cloud, graph)
            error, flattest = solve_adjoint(graph, epsilon, ridge, graph.lead < features)
            gradients.residual[which], gradients.damped[which] = error, not flattest > SINGULAR
            if graph.dimension < features:
                solve_outside(graph, ridge, cloud.outside, cloud.spare, padded(features))
            follows = weighted or not given.relative  # the start depends on the graph
            if follows:
                fill_left(given, kept, which, cotangent, epsilon, cloud, graph)
            slope = respond_to_solution(graph, epsilon)
            unit = 1.0 if given.relative else kept.facts[which, UNIT]
            gradients.epsilon[which] = slope / (unit * unit)
            pull_nodes(given, kept, which, epsilon, cloud, graph)
            if follows:
                to_radius = pull_start(given, kept, which, cloud, room)
        leave_frame(given, kept, which, cloud.points, cloud.left, cloud.row, cotangent, room, to_radius, gradients)
