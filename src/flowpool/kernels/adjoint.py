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
from flowpool.kernels.cloud import END_TOLERANCE, make_room, merge_nodes, remove, unfold
from flowpool.kernels.divergence import evaluate
from flowpool.kernels.flow import move_to
from flowpool.kernels.hessian import form_hessian
from flowpool.kernels.machine.jit import entry, kernel
from flowpool.kernels.machine.lanes import WIDTH, fma, load, multiply, splat, store
from flowpool.kernels.machine.linear import padded, row_products
from flowpool.kernels.machine.rows import draw, stay_apart
from flowpool.kernels.memory import open_graph, open_span
from flowpool.kernels.response import hessian_product, keep_plans, respond, self_plan_response
from flowpool.kernels.systems import solve_adjoint, solve_outside


@kernel
def settle(graph, potentials, self_potentials, which, epsilon):  # type: ignore[no-untyped-def]
    """Plans and Hessian at ``there.points``, which become ``here``, from the potentials that solve them."""
    stay_apart()
    there = graph.there
    for i in range(graph.count):
        there.potential[0, i] = potentials[which, i]
        there.self_potential[0, i] = self_potentials[which, i]
    # The potentials are solutions already; this fills the plans, and removes what rounding in the rotation adds.
    evaluate(graph, there, epsilon, epsilon, 1e-12)
    move_to(there, graph.here, graph)
    keep_plans(graph)
    form_hessian(graph, epsilon)


@kernel
def split_cotangent(cotangent, which, features, graph, span):  # type: ignore[no-untyped-def]
    """Fills ``graph.right`` with the cotangent along the basis, and ``span.outside`` with the rest."""
    stay_apart()
    width = padded(features)
    for i in range(graph.count):
        for d in range(width):
            span.outside[i, d] = cotangent[which, i, d] if d < features else 0.0
        for e in range(padded(graph.dimension)):
            graph.right[i, e] = remove(span.outside, i, span.basis, e, width) if e < graph.dimension else 0.0


@kernel
def respond_to_solution(graph, epsilon):  # type: ignore[no-untyped-def]
    """Gradient in epsilon; fills dA in ``graph.tangent.change`` and dg in ``graph.tangent.dual``, given W in ``solution``."""
    stay_apart()
    tangent, here, count, hull = graph.tangent, graph.here, graph.count, graph.hull
    respond(graph, graph.solution, epsilon, tangent.conditional)
    self_plan_response(graph, graph.solution, epsilon)
    # Rows and columns of dP and dQ sum to zero, so only the inner products in the costs count.
    for j in range(0, graph.length, WIDTH):
        mass = load(graph.masses, 0, j)
        for i in range(count):
            store(graph.gibbs, i, j, multiply(mass, load(tangent.change, i, j)))
    row_products(graph.gibbs, count, graph.nodes, 1, hull, graph.length, graph.velocity, False)
    slope = 0.0
    for i in range(count):
        for e in range(hull):
            slope -= 2.0 * here.points[i, e] * graph.velocity[i, e]
        for k in range(count):
            for e in range(graph.dimension):
                slope += graph.self_change[i, k] * here.points[i, e] * here.points[k, e]
    return slope / epsilon


@kernel
def write_gradients(  # type: ignore[no-untyped-def]
    graph, span, nodes, masses, points, which, first, last, atom_of, epsilon, grad_nodes, grad_masses
):
    """Writes the gradients in the nodes ``first .. last`` and in their masses; ``span.outside`` is W outside the hull."""
    stay_apart()
    count, features, tangent = graph.count, nodes.shape[1], graph.tangent
    width, way, ends = padded(features), span.outside, span.parked
    for node in range(first, last):
        # A node without mass may lie outside the hull, where the cost changes by -2 w_i.y_j, too.
        atom = atom_of[node - first]
        value = -epsilon * tangent.dual[0, atom]
        for i in range(count):
            for d in range(features):
                value += 2.0 * tangent.conditional[i, atom] * way[i, d] * nodes[node, d]
        grad_masses[node] = value
    # W and X with all features.
    for i in range(count):
        for d in range(0, width, WIDTH):
            whole = load(way, i, d)
            for e in range(graph.dimension):
                whole = fma(splat(graph.solution[i, e]), load(span.basis, e, d), whole)
            store(way, i, d, multiply(splat(2.0), whole))
        for d in range(width):
            ends[i, d] = 2.0 * points[which, i, d] if d < features else 0.0
    for node in range(first, last):
        atom = atom_of[node - first]
        for d in range(0, width, WIDTH):
            pull = splat(0.0)
            for i in range(count):
                pull = fma(splat(tangent.conditional[i, atom]), load(way, i, d), pull)
                pull = fma(splat(tangent.change[i, atom]), load(ends, i, d), pull)
            store(span.row, 0, d, multiply(splat(masses[node]), pull))
        for d in range(features):
            grad_nodes[node, d] = span.row[0, d]


@kernel
def keep_left(graph, span, cotangent, which, features, epsilon, left):  # type: ignore[no-untyped-def]
    """Writes ``V - H W``; ``span.outside`` is W outside the hull, where H is 2 Q."""
    stay_apart()
    hessian_product(graph, graph.solution, epsilon, 0.0, graph.image)
    for i in range(graph.count):
        for d in range(features):
            value = cotangent[which, i, d]
            for e in range(graph.dimension):
                value -= graph.image[i, e] * span.basis[e, d]
            for k in range(graph.count):
                value -= 2.0 * graph.kept_self_plan[i, k] * span.outside[k, d]
            left[which, i, d] = value


@entry
def adjoint_graphs(  # type: ignore[no-untyped-def]
    nodes, bits, masses, ptr, most, points, potentials, self_potentials, point_masses, epsilons, resolution, ridge,
    cotangent, order, counter,
    left, grad_nodes, grad_masses, grad_epsilon, residual, damped,
):  # fmt: skip
    """Gradients of the graphs ``order[k]`` for each k that is drawn from the counter.

    Args:
        most: largest number of nodes of these graphs.
        points, potentials, self_potentials: as :func:`flowpool.kernels.solve.solve_graphs` left them.
        left: gets ``V - H W``, what flat directions have left of the cotangent, ``(B, M, D)``; or empty.
    """
    features = points.shape[2]
    room, first, second = make_room(most), np.empty(0), np.empty(0)
    while True:
        turn = draw(counter)
        if turn < 0 or turn >= len(order):
            break
        which = order[turn]
        begin, end, epsilon = ptr[which], ptr[which + 1], epsilons[which]
        atoms = merge_nodes(bits, masses, begin, end, True, room)
        # With about as many points as distinct nodes there are flat directions, which iterations are slow to find; with very
        # many nodes the Hessian costs less than the iterations.
        block = MOST_LEADING if 2 * points.shape[1] < atoms < MANY else FLAT_LEADING
        first, second = unfold(
            nodes, room, atoms, points, which, point_masses, epsilon, resolution, END_TOLERANCE, block, first, second
        )
        span, graph = open_span(first, room.span_places), open_graph(second, room.places)
        settle(graph, potentials, self_potentials, which, epsilon)
        split_cotangent(cotangent, which, features, graph, span)
        error, flattest = solve_adjoint(graph, epsilon, ridge, graph.lead < features)
        residual[which] = error
        damped[which] = not flattest > SINGULAR
        if graph.dimension < features:
            solve_outside(graph, ridge, span.outside, span.parked, padded(features))
        if len(left) > 0:
            keep_left(graph, span, cotangent, which, features, epsilon, left)
        grad_epsilon[which] = respond_to_solution(graph, epsilon)
        write_gradients(
            graph, span, nodes, masses, points, which, begin, end, room.atom_of, epsilon, grad_nodes, grad_masses
        )
