"""X* of a batch of graphs, graph after graph."""

from __future__ import annotations

import numpy as np

from flowpool.core.constants import MOST_LEADING
from flowpool.core.law import DONE, HESSIAN, advance, begin
from flowpool.kernels.cloud import START_TOLERANCE, make_room, merge_nodes, unfold
from flowpool.kernels.divergence import evaluate, start_cold
from flowpool.kernels.flow import conclude, depart, has_equal_masses, move_to, needs_evaluation
from flowpool.kernels.hessian import form_hessian
from flowpool.kernels.machine.jit import entry, kernel
from flowpool.kernels.machine.rows import draw, stay_apart
from flowpool.kernels.memory import open_graph, open_span
from flowpool.kernels.response import keep_plans


@kernel
def follow(graph, state, epsilon, tolerance, max_steps, counter):  # type: ignore[no-untyped-def]
    """Moves the points from ``there`` to the end of their flow, ``here``, unless the counter says stop."""
    stay_apart()
    equal = has_equal_masses(graph)
    stage = start_cold(graph, graph.there, epsilon)
    request = begin(state, 0.0)
    while request != DONE and counter[0] >= 0:
        if needs_evaluation(request):
            depart(request, state, graph)
            state.error = evaluate(graph, graph.there, epsilon, stage, state.inner)
            stage = epsilon
        if request == HESSIAN:
            keep_plans(graph)
            form_hessian(graph, epsilon)
        else:
            conclude(request, state, graph, epsilon)
        request = advance(state, graph.count, equal, tolerance, max_steps)
        if state.arrived:
            move_to(graph.there, graph.here, graph)
    return request == DONE


@entry
def solve_graphs(  # type: ignore[no-untyped-def]
    nodes, bits, masses, ptr, most, start, point_masses, epsilons, resolution, tolerance, max_steps, order, counter, states,
    points, potentials, self_potentials, residual, steps, status, singular,
):  # fmt: skip
    """Solves the graphs ``order[k]`` for each k that is drawn from the counter; every output has one row per graph of the batch.

    Args:
        most: largest number of nodes of these graphs.
        states: scratch, one entry of :data:`flowpool.core.law.STATE`.
    """
    count, features, state = start.shape[1], start.shape[2], states[0]
    room, first, second = make_room(most), np.empty(0), np.empty(0)
    while True:
        turn = draw(counter)
        if turn < 0 or turn >= len(order):
            break
        which = order[turn]
        epsilon = epsilons[which]
        atoms = merge_nodes(bits, masses, ptr[which], ptr[which + 1], False, room)
        first, second = unfold(
            nodes, room, atoms, start, which, point_masses, epsilon, resolution, START_TOLERANCE, MOST_LEADING, first,
            second,
        )  # fmt: skip
        span, graph = open_span(first, room.span_places), open_graph(second, room.places)
        if not follow(graph, state, epsilon, tolerance, max_steps, counter):
            break
        for i in range(count):
            potentials[which, i] = graph.here.potential[0, i]
            self_potentials[which, i] = graph.here.self_potential[0, i]
            for d in range(features):
                value = 0.0
                for e in range(graph.dimension):
                    value += graph.here.points[i, e] * span.basis[e, d]
                points[which, i, d] = value
        residual[which] = state.residual
        steps[which] = state.steps
        status[which] = state.status
        singular[which] = state.singular
