"""X* of a batch of graphs, graph after graph."""

from __future__ import annotations

import numpy as np

from flowpool.core.constants import FLAT_LEADING, MANY, MOST_LEADING
from flowpool.core.law import DONE, HESSIAN, advance, begin
from flowpool.kernels.cloud import (
    basis_of,
    cloud_memory,
    graph_memory,
    make_room,
    merge_nodes,
    reduce_start,
    reduce_to_hull,
)
from flowpool.kernels.divergence import evaluate, start_cold
from flowpool.kernels.flow import conclude, depart, has_equal_masses, move_to, needs_evaluation
from flowpool.kernels.frame import arrange, find_frame, framed_epsilon, hand_out, place_start
from flowpool.kernels.hessian import form_hessian
from flowpool.kernels.machine.jit import entry, kernel
from flowpool.kernels.machine.linear import padded
from flowpool.kernels.machine.rows import draw, stay_apart
from flowpool.kernels.memory import open_cloud, open_graph
from flowpool.kernels.records import CLOUD, DIMENSION, HEAVY, KIND
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


@kernel
def keep_end(graph, kept, which):  # type: ignore[no-untyped-def]
    """Notes where the flow has ended."""
    features = kept.ends.shape[2] - 2
    for i in range(graph.count):
        for e in range(features):
            kept.ends[which, i, e] = graph.here.points[i, e] if e < graph.dimension else 0.0
        kept.ends[which, i, features] = graph.here.potential[0, i]
        kept.ends[which, i, features + 1] = graph.here.self_potential[0, i]


@entry
def solve_graphs(given, tolerance, max_steps, most, turns, counter, states, kept, found):  # type: ignore[no-untyped-def]
    """Pools the graphs ``turns[k]`` for each k that is drawn from the counter.

    Args:
        given: :class:`~flowpool.kernels.records.Given`.
        tolerance: on the Newton step.
        max_steps: of all kinds together.
        most: largest number of nodes of these graphs.
        states: scratch, one entry of :data:`flowpool.core.law.STATE`.
        kept, found: :class:`~flowpool.kernels.records.Kept` and :class:`~flowpool.kernels.records.Found`, which are filled.
    """
    state, count, features = states[0], len(given.point_masses), given.nodes.shape[1]
    room, first, second = make_room(most, features), np.empty(0), np.empty(0)
    while True:
        turn = draw(counter)
        if turn < 0 or turn >= len(turns):
            break
        which = turns[turn]
        arrange(given, kept, which, room)
        find_frame(given, kept, which)
        state.singular = False
        if kept.facts[which, KIND] == CLOUD:
            epsilon = framed_epsilon(given, kept, which)
            merge_nodes(given, kept, which, room)
            first = cloud_memory(given, kept, which, room, first)
            cloud = open_cloud(first, room.cloud_places)
            place_start(given, kept, which, cloud.outside)
            reduce_to_hull(given, kept, which, room, cloud)
            reduce_start(given, kept, which, cloud)
            taken, dimension = int(kept.facts[which, HEAVY]), int(kept.facts[which, DIMENSION])
            block = MOST_LEADING if taken < MANY else FLAT_LEADING  # with very many nodes it costs less than iterations
            second = graph_memory(given, kept, which, room, epsilon, taken, dimension, block, second)
            graph = open_graph(second, room.graph_places)
            for i in range(count):
                for e in range(padded(dimension)):
                    graph.there.points[i, e] = cloud.points[i, e] if e < dimension else 0.0
            if not follow(graph, state, epsilon, tolerance, max_steps, counter):
                break
            keep_end(graph, kept, which)
            found.residual[which], found.steps[which], found.status[which] = state.residual, state.steps, state.status
        hand_out(kept, which, basis_of(kept, which, given), state.singular, found)
