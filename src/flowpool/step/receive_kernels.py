"""What each point receives, graph after graph, and the way back: the kernels of :mod:`flowpool.step.receive`.

Inside, a graph lies feature by feature ``(D, N)`` and point by point ``(M, N)``, so that neighbouring nodes share a lane. The
lanes are filled up with nodes without mass.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from flowpool.core.constants import BALANCED, NEXT_TO_NOTHING, SPREADLESS, UNBALANCED
from flowpool.kernels.machine.jit import entry, kernel, shared
from flowpool.kernels.machine.lanes import WIDTH, add, fma, load, multiply, splat, store, subtract, total
from flowpool.kernels.machine.linear import add_combinations, padded, row_products, row_total
from flowpool.kernels.machine.memory import aligned
from flowpool.kernels.machine.rows import draw, part, rows_of, stay_apart
from flowpool.kernels.machine.threads import run
from flowpool.kernels.transport import (
    FACTORS,
    POTENTIAL,
    RECEIVED,
    STEP,
    divide_nodes,
    first_heat,
    form_hessian,
    share_out,
    solve_hessian,
    work_rows,
)
from flowpool.status import Status

Array = NDArray[np.float64]
SHARE = 2**14  # numbers of a plan from which another thread pays
LONG = 2**20  # numbers from which a call may take longer than a person waits to interrupt it
OK, EMPTY, BAD, LEFT, OVERFLOW = (
    int(status) for status in (Status.OK, Status.EMPTY, Status.NONFINITE_INPUT, Status.MAX_STEPS, Status.NONFINITE)
)
# Rows of numbers for each feature: how it is normed (taken off, factor, put back), the squared weight in the cost,
# and the inverse deviation.
MIDDLE, SLOPE, BIAS, WEIGHT, INVERSE = range(5)
# Switches.
FREE, RELATIVE, MOVED, ROOTS = 1, 2, 4, 8


@entry
def survey(nodes, graph, masses, limit, ptr, order, statuses, statistics):  # type: ignore[no-untyped-def]
    """Puts nodes that belong together one after the other, and looks for what cannot be used.

    Fills ``order``, ``(N,)``, and the statuses. The statistics ``(3, D)``, if asked for, get the number, the mean and the variance
    of the nodes that have a mass, in graphs that can be used.
    """
    count, dim = nodes.shape
    place = ptr.copy()
    for row in range(count):
        order[place[graph[row]]] = row
        place[graph[row]] += 1
    for g in range(len(ptr) - 1):
        statuses[g] = EMPTY if ptr[g] == ptr[g + 1] else OK
    for row in range(count):
        for d in range(dim):
            if not abs(nodes[row, d]) <= limit:
                if math.isfinite(nodes[row, d]) and statuses[graph[row]] != BAD:
                    statuses[graph[row]] = OVERFLOW
                else:
                    statuses[graph[row]] = BAD
    if len(statistics) == 0:
        return
    kept = 0
    for d in range(dim):
        statistics[1, d] = statistics[2, d] = 0.0
    for row in range(count):
        if statuses[graph[row]] == OK and (len(masses) == 0 or masses[row] > 0):
            kept += 1
            for d in range(dim):
                statistics[1, d] += nodes[row, d]
    for d in range(dim):
        statistics[0, d] = kept
        statistics[1, d] /= max(kept, 1)
    for row in range(count):
        if statuses[graph[row]] == OK and (len(masses) == 0 or masses[row] > 0):
            for d in range(dim):
                away = nodes[row, d] - statistics[1, d]
                statistics[2, d] += away * away
    for d in range(dim):
        statistics[2, d] /= max(kept, 1)


@kernel
def take_nodes(nodes, order, masses, start, size, table, own, own_masses):  # type: ignore[no-untyped-def]
    """The normed nodes of a graph ``(D, N)`` and their normalised masses ``(1, N)``; gives back the sum of the masses."""
    stay_apart()
    dim = nodes.shape[1]
    for j in range(size):
        row = order[start + j]
        for d in range(dim):
            own[d, j] = (nodes[row, d] - table[MIDDLE, d]) * table[SLOPE, d] + table[BIAS, d]
    whole = 0.0
    for j in range(size):
        own_masses[0, j] = masses[order[start + j]] if len(masses) else 1.0
        whole += own_masses[0, j]
    for j in range(size):
        own_masses[0, j] /= whole
    for j in range(size, padded(size)):
        own_masses[0, j] = 0.0
        for d in range(dim):
            own[d, j] = 0.0
    return whole


@kernel
def centre(own, masses, dim, size, mean, squares):  # type: ignore[no-untyped-def]
    """Takes the mean off, and fills it and the mean square of what is left, each ``(1, D)``."""
    stay_apart()
    length = padded(size)
    row_products(masses, 1, own, 0, dim, length, mean, False)
    # Two features at a time: one sum waits for what the other computes.
    for d in range(0, dim, 2):
        e = min(d + 1, dim - 1)
        offset0, offset1 = splat(mean[0, d]), splat(mean[0, e])
        value0 = splat(0.0)
        value1 = splat(0.0)
        for j in range(0, length, WIDTH):
            mass = load(masses, 0, j)
            away0 = subtract(load(own, d, j), offset0)
            away1 = subtract(load(own, e, j), offset1)
            store(own, d, j, away0)
            store(own, e, j, away1)
            value0 = fma(multiply(mass, away0), away0, value0)
            value1 = fma(multiply(mass, away1), away1, value1)
        squares[0, d], squares[0, e] = total(value0), total(value1)
    for d in range(dim):
        if squares[0, d] <= SPREADLESS * mean[0, d] * mean[0, d]:
            squares[0, d] = 0.0
        for j in range(size, length):
            own[d, j] = 0.0


@kernel
def units(squares, table, dim, epsilon, switches, unit):  # type: ignore[no-untyped-def]
    """Fills R, the mean cost to the mean V, what scores are multiplied by (twice slope, square), and whether R counts."""
    stay_apart()
    square = cost = 0.0
    for d in range(dim):
        square += squares[0, d]
        cost += table[WEIGHT, d] * squares[0, d]
    unit[0, 4] = 1.0 if switches & RELATIVE and square > 0.0 else 0.0
    if unit[0, 4] == 0.0:  # or one point or none, where every unit is as good
        square = cost = 1.0
    unit[0, 0], unit[0, 1] = math.sqrt(square), cost
    unit[0, 2] = 2.0 * unit[0, 0] / (epsilon * cost)
    unit[0, 3] = square / (epsilon * cost)


@kernel
def slope_points(reference, table, mean, unit, switches, count, dim, slopes, constants):  # type: ignore[no-untyped-def]
    """How -C / epsilon depends on a node, ``(M, D)``, and what else it is, ``(1, M)``; up to what is equal for all points."""
    stay_apart()
    for i in range(count):
        constants[0, i] = 0.0
    for d in range(dim):
        middle = 0.0
        for i in range(count):
            middle += reference[i, d]
        middle /= count
        apart = (0.0 if switches & RELATIVE else mean[0, d]) - middle
        for i in range(count):
            away = reference[i, d] - middle
            slopes[i, d] = unit[0, 2] * table[WEIGHT, d] * away
            constants[0, i] += unit[0, 3] * table[WEIGHT, d] * away * (2.0 * apart - away)


@kernel
def score_nodes(shares, switches, own, count, dim, length, slopes, constants, scores):  # type: ignore[no-untyped-def]
    """Fills the scores ``(M, N)``: -C / epsilon up to a number per node, which no softmax sees; and log a with free masses."""
    stay_apart()
    for i in range(count):
        value = splat(constants[0, i] + math.log(shares[0, i]) if switches & FREE else 0.0)
        for j in range(0, length, WIDTH):
            store(scores, i, j, value)
    add_combinations(slopes, count, dim, own, length, scores)


@kernel
def take_moments(own, plan, reference, mean, unit, switches, count, dim, length, work, found):  # type: ignore[no-untyped-def]
    """Fills means from the graph's mean on, ``(M, D)``, variances, ``(M, D)``, and what was received, ``(1, M)``."""
    stay_apart()
    spread, received = part(found, count * dim, dim), part(found, 2 * count * dim, count)
    row_products(plan, count, own, 0, dim, length, found, False)
    for i in range(count):
        received[0, i] = work[RECEIVED, i]
        # Next to nothing lies at every point from the start, so that there is a mean where nothing comes.
        inverse = 1.0 / (received[0, i] + NEXT_TO_NOTHING)
        for d in range(dim):
            away = unit[0, 0] * reference[i, d] - (0.0 if switches & RELATIVE else mean[0, d])
            found[i, d] = (found[i, d] + NEXT_TO_NOTHING * away) * inverse
        for d in range(0, dim, 4):
            d1, d2, d3 = min(d + 1, dim - 1), min(d + 2, dim - 1), min(d + 3, dim - 1)
            middle0, middle1 = splat(found[i, d]), splat(found[i, d1])
            middle2, middle3 = splat(found[i, d2]), splat(found[i, d3])
            value0 = splat(0.0)
            value1 = splat(0.0)
            value2 = splat(0.0)
            value3 = splat(0.0)
            for j in range(0, length, WIDTH):
                came = load(plan, i, j)
                away0 = subtract(load(own, d, j), middle0)
                away1 = subtract(load(own, d1, j), middle1)
                away2 = subtract(load(own, d2, j), middle2)
                away3 = subtract(load(own, d3, j), middle3)
                value0 = fma(multiply(came, away0), away0, value0)
                value1 = fma(multiply(came, away1), away1, value1)
                value2 = fma(multiply(came, away2), away2, value2)
                value3 = fma(multiply(came, away3), away3, value3)
            spread[i, d], spread[i, d1] = total(value0) * inverse, total(value1) * inverse
            spread[i, d2], spread[i, d3] = total(value2) * inverse, total(value3) * inverse
        for d in range(dim):
            size = abs(found[i, d]) + abs(mean[0, d])
            if spread[i, d] <= SPREADLESS * size * size:
                spread[i, d] = 0.0


@kernel
def tell(found, reference, mean, whole, switches, count, dim, rows):  # type: ignore[no-untyped-def]
    """Whether all is finite of the row of a graph: means, variances, sum of the nodes, their number."""
    stay_apart()
    spread, moved = part(found, count * dim, dim), 1.0 if switches & MOVED else 0.0
    for i in range(count):
        for d in range(dim):
            rows[0, i * dim + d] = found[i, d] + mean[0, d] - moved * reference[i, d]
            rows[0, (count + i) * dim + d] = spread[i, d]
    for d in range(dim):
        rows[0, 2 * count * dim + d] = whole * mean[0, d]
    rows[0, (2 * count + 1) * dim] = whole
    end = (2 * count + 1) * dim + 1
    check = splat(0.0)
    for k in range(0, end // WIDTH * WIDTH, WIDTH):
        check = fma(splat(0.0), load(rows, 0, k), check)
    rest = 0.0
    for k in range(end // WIDTH * WIDTH, end):
        rest += 0.0 * rows[0, k]
    return total(check) + rest == 0.0


@shared
def room(count, dim, length):  # type: ignore[no-untyped-def]
    """Numbers that the workspace of a graph takes."""
    side, wide = padded(count), padded(dim)
    return work_rows(count) * side + (6 + 4 * count) * wide + WIDTH + (2 * dim + 2 * count + 2) * length


@shared
def first_of(ptr, graph, count):  # type: ignore[no-untyped-def]
    """Where the kept plan of a graph begins: lanes that are filled up take at most one more for each graph."""
    return (ptr[graph] // WIDTH + graph) * WIDTH * count


@entry
def receive_graphs(counter, memory, nodes, order, masses, ptr, reference, shares, epsilon, table, switches, outputs):  # type: ignore[no-untyped-def]
    """Fills the outputs of each graph that is drawn from the counter: rows, found, portions, statuses, errors."""
    stay_apart()
    rows, found, portions, statuses, errors = outputs
    points, features, given_shares = rows_of(reference), rows_of(table), rows_of(shares.reshape(1, -1))
    told, kept, plans, buffer = rows_of(rows), rows_of(found), rows_of(portions.reshape(1, -1)), rows_of(memory)
    count, dim = reference.shape
    side, wide = padded(count), padded(dim)
    work = part(buffer, 0, side)
    used = work_rows(count) * side
    mean, squares, unit = (
        part(buffer, used, wide),
        part(buffer, used + wide, wide),
        part(buffer, used + 2 * wide, WIDTH),
    )
    slopes = part(buffer, used + 2 * wide + WIDTH, wide)
    used += (2 + count) * wide + WIDTH
    while True:
        graph = draw(counter)
        if graph < 0 or graph >= len(ptr) - 1:
            break
        start, size = ptr[graph], ptr[graph + 1] - ptr[graph]
        row, own_found = part(told, graph * rows.shape[1], rows.shape[1]), part(kept, graph * found.shape[1], dim)
        errors[graph] = 0.0
        if statuses[graph] != OK and statuses[graph] != EMPTY:
            for k in range(rows.shape[1]):
                row[0, k] = math.nan
            for k in range(found.shape[1]):
                own_found[0, k] = math.nan
            errors[graph] = math.nan
            continue
        # Laid out afresh for each graph, which keeps a small one in the cache.
        length = padded(size)
        own, own_masses = part(buffer, used, length), part(buffer, used + dim * length, length)
        scores = part(buffer, used + (dim + 1) * length, length)
        plan = part(buffer, used + (dim + 1 + count) * length, length)
        own_portions = part(plans, first_of(ptr, graph, count), length)
        whole = take_nodes(nodes, order, masses, start, size, features, own, own_masses)
        centre(own, own_masses, dim, size, mean, squares)
        units(squares, features, dim, epsilon[graph], switches, unit)
        slope_points(points, features, mean, unit, switches, count, dim, slopes, part(work, FACTORS * side, side))
        score_nodes(given_shares, switches, own, count, dim, length, slopes, part(work, FACTORS * side, side), scores)
        for i in range(count):
            work[POTENTIAL, i] = 0.0
        if switches & FREE or size == 0:
            divide_nodes(scores, 1.0, own_masses, count, length, own_portions, plan, work)
        else:
            heat = first_heat(scores, count, size)
            errors[graph] = share_out(
                scores, own_masses, given_shares, count, length, heat, BALANCED, own_portions, plan, work
            )
            if errors[graph] > UNBALANCED:
                statuses[graph] = LEFT
        take_moments(own, plan, points, mean, unit, switches, count, dim, length, work, own_found)
        if not tell(own_found, points, mean, whole, switches, count, dim, row):
            statuses[graph] = OVERFLOW
            for k in range(rows.shape[1]):
                row[0, k] = math.nan
            for k in range(found.shape[1]):
                own_found[0, k] = math.nan


@kernel
def open_gradient(found, upstream, upstream_masses, switches, count, dim, direct, bent, work):  # type: ignore[no-untyped-def]
    """Fills what a node's coming to a point is worth: ``(u - mean) (direct + (u - mean) bent / 2)``, plus row FACTORS."""
    stay_apart()
    spread, received = part(found, count * dim, dim), part(found, 2 * count * dim, count)
    for i in range(count):
        inverse = 1.0 / (received[0, i] + NEXT_TO_NOTHING)
        constant = 0.0
        for d in range(dim):
            value, variance = upstream[0, (count + i) * dim + d], spread[i, d]
            if switches & ROOTS:  # of what is zero, at the tip of a cone, the slope is that of the axis
                value = 0.5 * value / variance if variance > 0.0 else 0.0
                variance *= variance
            direct[i, d] = upstream[0, i * dim + d] * inverse
            bent[i, d] = 2.0 * value * inverse
            constant -= value * variance
        work[FACTORS, i] = constant * inverse + upstream_masses[0, i]
        work[RECEIVED, i] = received[0, i]


@kernel
def pull_plan(own, found, direct, bent, count, dim, length, work, pulls):  # type: ignore[no-untyped-def]
    """Fills the derivative in the plan, ``(M, N)``."""
    stay_apart()
    for i in range(count):
        for j in range(0, length, WIDTH):
            value = splat(work[FACTORS, i])
            for d in range(dim):
                away = subtract(load(own, d, j), splat(found[i, d]))
                value = fma(away, fma(splat(0.5 * bent[i, d]), away, splat(direct[i, d])), value)
            store(pulls, i, j, value)


@kernel
def through_softmax(portions, plan, count, length, pulls, to_masses, sign):  # type: ignore[no-untyped-def]
    """``pulls = plan (pulls - sum_k portions_k pulls_k)``; that sum, with a sign, is added to the gradient in the masses."""
    stay_apart()
    for j in range(0, length, WIDTH):
        mean = splat(0.0)
        for i in range(count):
            mean = fma(load(portions, i, j), load(pulls, i, j), mean)
        store(to_masses, 0, j, fma(splat(sign), mean, load(to_masses, 0, j)))
        for i in range(count):
            store(pulls, i, j, multiply(load(plan, i, j), subtract(load(pulls, i, j), mean)))


@kernel
def through_shares(portions, plan, count, length, pulls, to_masses, work):  # type: ignore[no-untyped-def]
    """Takes off what the potentials answer to keep the shares; the derivative of their maximum is that of one Newton step."""
    stay_apart()
    for i in range(count):
        work[STEP, i] = row_total(pulls, i, length)
    form_hessian(portions, plan, count, length, work)
    solve_hessian(count, work)
    for j in range(0, length, WIDTH):
        mean = splat(0.0)
        for i in range(count):
            mean = fma(load(portions, i, j), splat(work[STEP, i]), mean)
        store(to_masses, 0, j, subtract(load(to_masses, 0, j), mean))
        for i in range(count):
            answer = subtract(mean, splat(work[STEP, i]))
            store(pulls, i, j, fma(load(plan, i, j), answer, load(pulls, i, j)))


@kernel
def to_reference(reference, table, mean, unit, switches, count, dim, slopes, pulled, upstream, epsilon, work, result):  # type: ignore[no-untyped-def]
    """Fills the gradients in the reference, the shares, the weights and epsilon; gives back those in log R and log V.

    Of work, RECEIVED has what each point got, STEP with free masses the sum of the derivatives in its scores, else the gradient in
    its share. ``pulled`` has the products of those derivatives and the nodes, ``(M, D)``.
    """
    stay_apart()
    weights = part(result, count * dim + count, dim)
    by_slope = by_square = by_place = 0.0
    for d in range(dim):
        weights[0, d] = 0.0
    for i in range(count):
        place = NEXT_TO_NOTHING / (work[RECEIVED, i] + NEXT_TO_NOTHING)
        push = work[STEP, i] if switches & FREE else 0.0
        for d in range(dim):
            given = upstream[0, i * dim + d]
            away = reference[i, d] - (0.0 if switches & RELATIVE else mean[0, d])
            value = unit[0, 2] * pulled[i, d] - 2.0 * unit[0, 3] * push * away
            own = table[WEIGHT, d] * value + place * unit[0, 0] * given
            result[0, i * dim + d] = own - given if switches & MOVED else own
            weights[0, d] += slopes[i, d] * pulled[i, d] - unit[0, 3] * push * table[WEIGHT, d] * away * away
            by_slope += slopes[i, d] * pulled[i, d]
            by_square -= unit[0, 3] * push * table[WEIGHT, d] * away * away
            by_place += place * unit[0, 0] * given * reference[i, d]
        result[0, count * dim + i] = work[STEP, i]
    for d in range(dim):
        weights[0, d] /= table[WEIGHT, d]
    result[0, count * dim + count + 3 * dim] = -(by_slope + by_square) / epsilon
    return by_slope + 2.0 * by_square + by_place, -(by_slope + by_square)


@kernel
def push_nodes(own, found, direct, bent, slopes, plan, pulls, count, dim, length, back):  # type: ignore[no-untyped-def]
    """Fills the gradient in the nodes as seen from the mean of their graph, ``(D, N)``."""
    stay_apart()
    for d in range(dim):
        for j in range(0, length, WIDTH):
            place, value = load(own, d, j), splat(0.0)
            for i in range(count):
                away = subtract(place, splat(found[i, d]))
                value = fma(load(plan, i, j), fma(splat(bent[i, d]), away, splat(direct[i, d])), value)
                value = fma(splat(slopes[i, d]), load(pulls, i, j), value)
            store(back, d, j, value)


@kernel
def leave_mean(own, masses, dim, length, bends, shift, sums, whole, back, to_masses):  # type: ignore[no-untyped-def]
    """From the gradient as seen from the mean to that of the nodes and of the normalised masses.

    Args:
        bends: gradient in the mean squares of the features, ``(1, D)``.
        shift: gradient in the mean, ``(1, D)``.
        sums: gradient in the sum of the nodes, ``(1, D)``.
    """
    stay_apart()
    for d in range(dim):
        for j in range(0, length, WIDTH):
            mass, place = load(masses, 0, j), load(own, d, j)
            pull = multiply(splat(bends[0, d]), place)
            store(to_masses, 0, j, fma(pull, place, load(to_masses, 0, j)))
            store(back, d, j, fma(add(pull, pull), mass, load(back, d, j)))
        rest = shift[0, d] - row_total(back, d, length)
        for j in range(0, length, WIDTH):
            mass = load(masses, 0, j)
            store(to_masses, 0, j, fma(splat(rest), load(own, d, j), load(to_masses, 0, j)))
            store(back, d, j, fma(splat(rest + whole * sums[0, d]), mass, load(back, d, j)))


@kernel
def give_nodes(nodes, order, start, size, table, back, to_nodes, by_slope, by_bias):  # type: ignore[no-untyped-def]
    """Hands the gradient of a graph to its nodes, and adds it up for what norms them."""
    stay_apart()
    dim = nodes.shape[1]
    for d in range(dim):
        by_slope[0, d], by_bias[0, d] = 0.0, row_total(back, d, padded(size))
    for j in range(size):
        row = order[start + j]
        for d in range(dim):
            value = back[d, j]
            to_nodes[row, d] = value * table[SLOPE, d]
            by_slope[0, d] += value * (nodes[row, d] - table[MIDDLE, d])


@kernel
def give_masses(own, mean, dim, order, start, size, masses, whole, sums, own_to_masses, to_masses):  # type: ignore[no-untyped-def]
    """Hands the gradient in the normalised masses, and that in the sum of the nodes and their number, to the masses."""
    stay_apart()
    common = 0.0
    for j in range(size):
        common += masses[0, j] * own_to_masses[0, j]
    for j in range(size):
        value = (own_to_masses[0, j] - common) / whole + sums[0, dim]
        for d in range(dim):
            value += sums[0, d] * (own[d, j] + mean[0, d])
        to_masses[order[start + j]] = value


@kernel
def to_scale(table, unit, switches, by_radius, by_cost, count, dim, upstream, reference, mean, work, bends, shift):  # type: ignore[no-untyped-def]
    """Fills the gradients in the mean squares of the features and in the mean of the graph, each ``(1, D)``."""
    stay_apart()
    square = unit[0, 0] * unit[0, 0]
    for d in range(dim):
        bends[0, d] = shift[0, d] = 0.0
        if unit[0, 4] > 0.0:
            bends[0, d] = 0.5 * by_radius / square + by_cost * table[WEIGHT, d] / unit[0, 1]
        for i in range(count):
            value = upstream[0, i * dim + d]
            if not switches & RELATIVE:
                value *= 1.0 - NEXT_TO_NOTHING / (work[RECEIVED, i] + NEXT_TO_NOTHING)
                if switches & FREE:
                    away = reference[i, d] - mean[0, d]
                    value += 2.0 * unit[0, 3] * table[WEIGHT, d] * work[STEP, i] * away
            shift[0, d] += value


@entry
def send_back(  # type: ignore[no-untyped-def]
    counter, memory, nodes, order, masses, ptr, reference, shares, epsilon, table, switches, kept, upstream, gradients
):
    """Fills the gradients of each graph that is drawn: nodes, masses if there is room for them, and what is shared.

    Args:
        kept: ``found`` and ``portions`` of :func:`receive_graphs`.
        upstream: of the rows and of what was received.
        gradients: ``(N, D)``, ``(N,)`` and, for each graph, reference, shares, weights, factors and terms of the norm, epsilon.
    """
    stay_apart()
    found, portions = kept
    given, given_masses = rows_of(upstream[0]), rows_of(upstream[1])
    to_nodes, to_masses, shared_gradients = gradients
    results = rows_of(shared_gradients)
    points, features, given_shares = rows_of(reference), rows_of(table), rows_of(shares.reshape(1, -1))
    all_found, plans, buffer = rows_of(found), rows_of(portions.reshape(1, -1)), rows_of(memory)
    count, dim = reference.shape
    side, wide, width = padded(count), padded(dim), shared_gradients.shape[1]
    work = part(buffer, 0, side)
    used = work_rows(count) * side
    mean, squares, unit = (
        part(buffer, used, wide),
        part(buffer, used + wide, wide),
        part(buffer, used + 2 * wide, WIDTH),
    )
    used += 2 * wide + WIDTH
    slopes, direct = part(buffer, used, wide), part(buffer, used + count * wide, wide)
    bent, pulled = part(buffer, used + 2 * count * wide, wide), part(buffer, used + 3 * count * wide, wide)
    used += 4 * count * wide
    bends, shift = part(buffer, used, wide), part(buffer, used + wide, wide)
    used += 2 * wide
    while True:
        graph = draw(counter)
        if graph < 0 or graph >= len(ptr) - 1:
            break
        start, size = ptr[graph], ptr[graph + 1] - ptr[graph]
        result = part(results, graph * width, width)
        for k in range(width):
            result[0, k] = 0.0
        if found[graph, 0] != found[graph, 0]:
            for j in range(size):
                for d in range(dim):
                    to_nodes[order[start + j], d] = 0.0
                if len(to_masses):
                    to_masses[order[start + j]] = 0.0
            continue
        length = padded(size)
        own, own_masses = part(buffer, used, length), part(buffer, used + dim * length, length)
        back, own_to_masses = (
            part(buffer, used + (dim + 1) * length, length),
            part(buffer, used + (2 * dim + 1) * length, length),
        )
        plan = part(buffer, used + (2 * dim + 2) * length, length)
        pulls = part(buffer, used + (2 * dim + 2 + count) * length, length)
        own_portions = part(plans, first_of(ptr, graph, count), length)
        own_found = part(all_found, graph * found.shape[1], dim)
        row, row_masses = part(given, graph * upstream[0].shape[1], dim), part(given_masses, graph * count, count)
        sums = part(row, 2 * count * dim, dim + 1)

        whole = take_nodes(nodes, order, masses, start, size, features, own, own_masses)
        centre(own, own_masses, dim, size, mean, squares)
        units(squares, features, dim, epsilon[graph], switches, unit)
        slope_points(points, features, mean, unit, switches, count, dim, slopes, part(work, FACTORS * side, side))
        for j in range(0, length, WIDTH):
            store(own_to_masses, 0, j, splat(0.0))
            for i in range(count):
                store(plan, i, j, multiply(load(own_masses, 0, j), load(own_portions, i, j)))
        open_gradient(own_found, row, row_masses, switches, count, dim, direct, bent, work)
        pull_plan(own, own_found, direct, bent, count, dim, length, work, pulls)
        through_softmax(own_portions, plan, count, length, pulls, own_to_masses, 1.0)
        if switches & FREE or size == 0:
            for i in range(count):
                work[STEP, i] = row_total(pulls, i, length)
        else:
            through_shares(own_portions, plan, count, length, pulls, own_to_masses, work)
        row_products(pulls, count, own, 0, dim, length, pulled, False)
        by_radius, by_cost = to_reference(
            points, features, mean, unit, switches, count, dim, slopes, pulled, row, epsilon[graph], work, result
        )
        to_scale(features, unit, switches, by_radius, by_cost, count, dim, row, points, mean, work, bends, shift)
        for d in range(dim):
            if unit[0, 4] > 0.0:
                result[0, count * dim + count + d] += by_cost * squares[0, d] / unit[0, 1]
        for i in range(count):
            if switches & FREE:
                result[0, count * dim + i] /= given_shares[0, i]
        push_nodes(own, own_found, direct, bent, slopes, plan, pulls, count, dim, length, back)
        leave_mean(own, own_masses, dim, length, bends, shift, sums, whole, back, own_to_masses)
        by_slope = part(result, count * dim + count + dim, dim)
        by_bias = part(result, count * dim + count + 2 * dim, dim)
        give_nodes(nodes, order, start, size, features, back, to_nodes, by_slope, by_bias)
        if len(to_masses):
            give_masses(own, mean, dim, order, start, size, own_masses, whole, sums, own_to_masses, to_masses)


@entry
def leave_norm(gradient, nodes, masses, graph, statuses, table, sums, statistics, result):  # type: ignore[no-untyped-def]
    """Fills the gradient in the nodes less what the mean and the variance of the batch take of it."""
    dim, number = nodes.shape[1], statistics[0, 0]
    slopes = np.empty((2, dim))
    for d in range(dim):
        share = table[SLOPE, d] / number if number >= 2 else 0.0
        slopes[0, d] = share * sums[d]
        slopes[1, d] = share * sums[dim + d] * table[INVERSE, d] * table[INVERSE, d]
    for row in range(len(nodes)):
        counts = statuses[graph[row]] == OK and (len(masses) == 0 or masses[row] > 0)
        for d in range(dim):
            away = slopes[0, d] + slopes[1, d] * (nodes[row, d] - table[MIDDLE, d])
            result[row, d] = gradient[row, d] - (away if counts else 0.0)


def receive(given, switches, outputs, threads):  # type: ignore[no-untyped-def]
    """Calls :func:`receive_graphs` for all graphs."""
    _for_all_graphs(receive_graphs, given, (switches, outputs), threads)
    if switches & ROOTS:
        rows, found = outputs[:2]
        size = given[4].size
        np.sqrt(found[:, size : 2 * size], out=found[:, size : 2 * size])
        rows[:, size : 2 * size] = found[:, size : 2 * size]


def adjoint(given, switches, kept, upstream, gradients, threads):  # type: ignore[no-untyped-def]
    """Calls :func:`send_back` for all graphs."""
    _for_all_graphs(send_back, given, (switches, kept, upstream, gradients), threads)


def _for_all_graphs(kernel, given, rest, threads):  # type: ignore[no-untyped-def]
    """In some threads, each with a buffer that is large enough for the largest graph."""
    ptr, (count, dim) = given[3], given[4].shape
    numbers = int(ptr[-1]) * count
    space = room(count, dim, padded(int(np.diff(ptr).max(initial=0))))
    run(
        lambda counter: kernel(counter, aligned(space)[np.newaxis], *given, *rest),
        len(ptr) - 1,
        min(threads, 1 + numbers // SHARE),
        patient=numbers > LONG,
    )
