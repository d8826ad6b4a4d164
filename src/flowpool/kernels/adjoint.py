"""Gradients of ``<V, X*>`` in the nodes, their masses and epsilon, graph after graph.

One linear system ``H W = V`` and the response of the plans to W (section 8.2 of the paper), as
:func:`flowpool.core.implicit.vector_jacobian` has it:

    grad y_j = 2 b_j sum_i (A_ij w_i + dA_ij x_i),   grad b_j = -dg_j,
    grad epsilon = (sum_ij dP_ij C_ij - sum_ik dQ_ik D_ik / 2) / epsilon

Outside the hull of the nodes the Hessian is ``2 Q`` for each direction, which needs no large system.
"""

from __future__ import annotations

import math

from flowpool.kernels.cloud import END_TOLERANCE, make_cloud, merge_nodes, rotate_points
from flowpool.kernels.divergence import evaluate
from flowpool.kernels.hessian import leading_hessian, shifted_factor
from flowpool.kernels.machine.jit import entry, kernel
from flowpool.kernels.machine.lanes import WIDTH, fma, load, multiply, splat, store, total
from flowpool.kernels.machine.linear import factorise, padded, row_products, substitute_rows
from flowpool.kernels.machine.rows import draw, rows_of, stay_apart
from flowpool.kernels.machine.vectors import combine, copy, inner_product
from flowpool.kernels.response import hessian_product, keep_plans, respond, scale_direction, self_plan_response
from flowpool.kernels.scratch import open_track, open_work, place_track, place_work
from flowpool.kernels.systems import conjugate_gradients, is_exact, precondition, solve_model

NEGLIGIBLE = 1e-3  # relative size up to which the ridge is a first-order correction
PRECISION, ROUGH = 1e-11, 1e-2  # of conjugate gradients: of the solution, of the correction by the ridge


@kernel
def outside_system(count, work):  # type: ignore[no-untyped-def]
    """Whether 2 Q, the Hessian outside the hull, is definite; it is factorised in ``work.small``."""
    stay_apart()
    for i in range(count):
        for k in range(0, padded(count), WIDTH):
            store(work.small, i, k, multiply(splat(2.0), load(work.self_plan, i, k)))
    return factorise(work.small, count, work.inverse)


@entry
def adjoint_graphs(  # type: ignore[no-untyped-def]
    nodes, bits, masses, ptr, points, potentials, self_potentials, given_masses, epsilons, resolution, ridge, cotangent, order,
    counter,
    memory, table, members, merged, atom_of, places,
    grad_nodes, grad_masses, grad_epsilon, residual, ok,
):  # fmt: skip
    """Gradients of the graphs ``order[k]`` for each k that is drawn from the counter.

    Where ``ok`` is left false they are zero and something better is needed.
    """
    stay_apart()
    count, features = points.shape[1], points.shape[2]
    buffer = rows_of(memory)
    penalty = ridge * (2.0 / count) ** 2
    while True:
        turn = draw(counter)
        if turn >= len(order):
            break
        graph = order[turn]
        first, last, epsilon = ptr[graph], ptr[graph + 1], epsilons[graph]
        atoms = merge_nodes(bits, masses, first, last, True, table, members, merged, atom_of)
        cloud, used = make_cloud(
            nodes, features, members, merged, atoms, given_masses, epsilon, resolution, buffer, places
        )
        length, hull, lead = cloud.length, cloud.hull, cloud.lead
        coordinates, node_masses, point_masses = cloud.coordinates, cloud.masses, cloud.point_masses
        basis, parked, outside, row = cloud.basis, cloud.parked, cloud.outside, cloud.row
        dimension = rotate_points(points, graph, count, features, hull, END_TOLERANCE, basis, parked, outside)
        used = place_track(places, used, count, dimension)
        track = open_track(buffer, places)
        place_work(places, used, count, length, dimension, cloud.widest)
        work = open_work(buffer, places)
        here, solution = track.here, track.solution
        numbers = count * padded(dimension)
        for i in range(count):
            here.potential[0, i] = potentials[graph, i]
            here.self_potential[0, i] = self_potentials[graph, i]
            for e in range(padded(dimension)):
                here.points[i, e] = parked[i, e] if e < dimension else 0.0
        # The potentials are solutions already; this fills the plans, and removes what rounding in the rotation adds.
        evaluate(
            coordinates, node_masses, length, hull, dimension, here.points, count, point_masses, epsilon,
            epsilon, 1e-12, here, work,
        )  # fmt: skip
        keep_plans(cloud, count, work)
        exact = is_exact(here.points, count, hull, dimension, lead, epsilon)
        usable = leading_hessian(
            coordinates, length, hull, lead, here.points, count, here.pulled, point_masses, epsilon, work
        )
        usable = usable and shifted_factor(count, lead, point_masses, 0.0, work.hessian, work.factor, work.pivots)

        # The cotangent along the basis, and what is left of it outside.
        for i in range(count):
            for d in range(features):
                outside[i, d] = cotangent[graph, i, d]
            for d in range(features, padded(features)):
                outside[i, d] = 0.0
            for e in range(dimension):
                inner = splat(0.0)
                for d in range(0, padded(features), WIDTH):
                    inner = fma(load(basis, e, d), load(outside, i, d), inner)
                value = total(inner)
                track.right[i, e] = value
                for d in range(0, padded(features), WIDTH):
                    store(outside, i, d, fma(splat(-value), load(basis, e, d), load(outside, i, d)))
            for e in range(dimension, padded(dimension)):
                track.right[i, e] = 0.0
        if dimension < features:
            usable = usable and outside_system(count, work)
        if lead < dimension:
            usable = usable and precondition(count, point_masses, 0.0, work)
        if not usable:
            continue
        sought = inner_product(track.right, track.right, numbers)
        copy(track.right, track.velocity, numbers)
        # (H H + lambda) W = H V is (H + lambda H^-1) W = V; its first-order form needs solutions with H only:
        # W, then H^-1 W and H^-2 W from the right-hand side before.
        for attempt in range(3):
            if exact:
                solve_model(count, dimension, lead, work.factor, work.pivots, track.right, track.newton, work)
            else:
                usable = usable and conjugate_gradients(
                    cloud, dimension, lead, here.points, count, epsilon, 0.0, PRECISION if attempt == 0 else ROUGH,
                    math.inf, False, attempt == 0, work.factor, work.pivots, track.right, track.newton, track, work,
                ) > 0.0  # fmt: skip
            if attempt == 0:
                copy(track.newton, solution, numbers)
            copy(track.newton, track.right, numbers)
        if not usable:
            continue
        hessian_product(cloud, dimension, here.points, count, solution, epsilon, 0.0, True, work, track.right)
        combine(track.right, -1.0, track.velocity, track.right, numbers)
        missed = inner_product(track.right, track.right, numbers)
        found = inner_product(solution, solution, numbers)
        corrected = inner_product(track.newton, track.newton, numbers)
        combine(solution, -penalty, track.newton, solution, numbers)
        if dimension < features:
            outside_system(count, work)
            sought += inner_product(outside, outside, count * padded(features))
            substitute_rows(work.small, count, work.inverse, outside, padded(features))
            found += inner_product(outside, outside, count * padded(features))
            for i in range(count):
                for d in range(0, padded(features), WIDTH):
                    store(parked, i, d, load(outside, i, d))
            for _ in range(2):
                substitute_rows(work.small, count, work.inverse, parked, padded(features))
            corrected += inner_product(parked, parked, count * padded(features))
            for i in range(count):
                for d in range(0, padded(features), WIDTH):
                    store(outside, i, d, fma(splat(-penalty), load(parked, i, d), load(outside, i, d)))
        if not penalty * math.sqrt(corrected) <= NEGLIGIBLE * math.sqrt(found):
            continue
        residual[graph] = math.sqrt(missed / sought) if sought > 0.0 else 0.0
        ok[graph] = True

        tangent = work.double
        scale_direction(here.points, solution, count, dimension, epsilon, tangent.scaled)
        respond(coordinates, length, hull, dimension, count, tangent, tangent.conditional, work)
        self_plan_response(dimension, here.points, count, solution, epsilon, work)
        # Rows and columns of dP and dQ sum to zero, so only the inner products in the costs count.
        for j in range(0, length, WIDTH):
            mass = load(node_masses, 0, j)
            for i in range(count):
                store(work.gibbs, i, j, multiply(mass, load(tangent.change, i, j)))
        row_products(work.gibbs, count, coordinates, 1, hull, length, track.velocity, False)
        slope = 0.0
        for i in range(count):
            for e in range(hull):
                slope -= 2.0 * here.points[i, e] * track.velocity[i, e]
            for k in range(count):
                for e in range(dimension):
                    slope += work.self_change[i, k] * here.points[i, e] * here.points[k, e]
        grad_epsilon[graph] = slope / epsilon

        # W and X with all features: ``outside`` and ``parked``.
        for i in range(count):
            for d in range(0, padded(features), WIDTH):
                value = load(outside, i, d)
                for e in range(dimension):
                    value = fma(splat(solution[i, e]), load(basis, e, d), value)
                store(outside, i, d, multiply(splat(2.0), value))
            for d in range(padded(features)):
                parked[i, d] = 2.0 * points[graph, i, d] if d < features else 0.0
        for node in range(first, last):
            atom = atom_of[node - first]
            grad_masses[node] = -epsilon * tangent.dual[0, atom]
            for d in range(0, padded(features), WIDTH):
                value = splat(0.0)
                for i in range(count):
                    value = fma(splat(work.conditional[i, atom]), load(outside, i, d), value)
                    value = fma(splat(tangent.change[i, atom]), load(parked, i, d), value)
                store(row, 0, d, multiply(splat(masses[node]), value))
            for d in range(features):
                grad_nodes[node, d] = row[0, d]
