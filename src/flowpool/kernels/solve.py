"""X* of a batch of graphs, graph after graph."""

from __future__ import annotations

import math

from flowpool.kernels.cloud import START_TOLERANCE, fill_moment_columns, make_cloud, merge_nodes, rotate_points
from flowpool.kernels.divergence import evaluate
from flowpool.kernels.flow import CURVE, EVALUATE, JUMPING, SOLVE, advance
from flowpool.kernels.hessian import leading_hessian
from flowpool.kernels.machine.jit import entry, kernel
from flowpool.kernels.machine.linear import padded
from flowpool.kernels.machine.rows import draw, rows_of, stay_apart
from flowpool.kernels.response import keep_plans
from flowpool.kernels.scratch import open_track, open_work, place_track, place_work
from flowpool.kernels.systems import answer, is_exact


@kernel
def largest_square(rows, first, count, length):  # type: ignore[no-untyped-def]
    """Largest squared length among the columns ``rows[first : first + count, :length]``."""
    stay_apart()
    largest = 0.0
    for j in range(length):
        square = 0.0
        for e in range(first, first + count):
            square += rows[e, j] * rows[e, j]
        largest = max(largest, square)
    return largest


@entry
def solve_graphs(  # type: ignore[no-untyped-def]
    nodes, bits, masses, ptr, start, given_masses, epsilons, resolution, tolerance, max_steps, order, counter, clocks,
    memory, table, members, merged, atom_of, places,
    points, potentials, self_potentials, residual, steps, status, singular,
):  # fmt: skip
    """Solves the graphs ``order[k]`` for each k that is drawn from the counter; every output has one row per graph of the batch."""
    stay_apart()
    count, features = start.shape[1], start.shape[2]
    clock = clocks[0]
    buffer = rows_of(memory)
    while True:
        turn = draw(counter)
        if turn < 0 or turn >= len(order):
            break
        graph = order[turn]
        epsilon = epsilons[graph]
        atoms = merge_nodes(bits, masses, ptr[graph], ptr[graph + 1], False, table, members, merged, atom_of)
        cloud, used = make_cloud(
            nodes, features, members, merged, atoms, given_masses, epsilon, resolution, buffer, places
        )
        length, hull, lead = cloud.length, cloud.hull, cloud.lead
        coordinates, node_masses, point_masses = cloud.coordinates, cloud.masses, cloud.point_masses
        # The coordinates of the start are found before the size of everything else is known.
        dimension = rotate_points(
            start, graph, count, features, hull, START_TOLERANCE, cloud.basis, cloud.parked, cloud.outside
        )
        exact = False
        used = place_track(places, used, count, dimension)
        track = open_track(buffer, places)
        place_work(places, used, count, length, dimension, cloud.widest)
        work = open_work(buffer, places)
        here, there = track.here, track.there
        for i in range(count):
            for e in range(padded(dimension)):
                there.points[i, e] = cloud.parked[i, e] if e < dimension else 0.0
        farthest = 0.0
        for i in range(count):
            square = 0.0
            for e in range(dimension):
                square += there.points[i, e] * there.points[i, e]
            there.potential[0, i] = square
            farthest = max(farthest, square)
            there.self_potential[0, i] = 0.5 * epsilon * math.log(point_masses[0, i])
            for e in range(padded(dimension)):
                here.gradient[i, e] = 0.0
        # The cost is at most (|x| + |y|)^2; a quarter of it starts the cold solution of the first transport.
        farthest = math.sqrt(farthest) + math.sqrt(largest_square(coordinates, 1, hull, atoms))
        stage = max(epsilon, farthest * farthest / 4.0)

        clock.phase = 0
        clock.steps = 0
        clock.asked = 0
        clock.step = 0.1
        clock.singular = False
        clock.jumped = False
        while counter[0] >= 0:
            request = advance(clock, track, count, dimension, point_masses, tolerance, max_steps)
            if request == EVALUATE:
                clock.error = evaluate(
                    coordinates, node_masses, length, hull, dimension, there.points, count, point_masses, epsilon,
                    stage, clock.inner, there, work,
                )  # fmt: skip
                stage = epsilon
            elif request == CURVE:
                clock.sliding = clock.jumping = math.nan
                keep_plans(cloud, count, work)
                exact = is_exact(here.points, count, hull, dimension, lead, epsilon)
                if not leading_hessian(
                    coordinates, length, hull, lead, here.points, count, here.pulled, point_masses, epsilon, work
                ):
                    work.hessian[0, 0] = math.nan
            elif request == SOLVE:
                answer(clock, track, cloud, dimension, lead, exact, count, epsilon, work)
                if clock.purpose == JUMPING and clock.shift > 0.0 and clock.definite and lead < hull == cloud.widest:
                    # It was not definite without the shift, so it is singular: only its whole factor serves then.
                    lead = hull
                    fill_moment_columns(coordinates, length, hull, lead)
                    for i in range(count):  # the last evaluation may be that of a refused step
                        work.rows[0, i] = here.rows[0, i]
                        for k in range(count):
                            work.self_plan[i, k] = work.kept_self_plan[i, k]
                    exact = is_exact(here.points, count, hull, dimension, lead, epsilon)
                    clock.sliding = clock.jumping = math.nan
                    if not leading_hessian(
                        coordinates, length, hull, lead, here.points, count, here.pulled, point_masses, epsilon, work
                    ):
                        work.hessian[0, 0] = math.nan
                    answer(clock, track, cloud, dimension, lead, exact, count, epsilon, work)
            else:
                break

        for i in range(count):
            potentials[graph, i] = here.potential[0, i]
            self_potentials[graph, i] = here.self_potential[0, i]
            for d in range(features):
                points[graph, i, d] = 0.0
            for e in range(dimension):
                for d in range(features):
                    points[graph, i, d] += here.points[i, e] * cloud.basis[e, d]
        residual[graph] = clock.residual
        steps[graph] = clock.steps
        status[graph] = clock.status
        singular[graph] = clock.singular
