"""The transport that gives every point its share, graph after graph: the kernels of :mod:`flowpool.step.balance`.

Inside, the scores of a graph lie point by point, ``(M, N)``, so that neighbouring nodes share a lane. The lanes are filled
up with nodes without mass.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from flowpool.core.constants import BALANCED, COOLING, DEFINITE, HALFWAY, MOST_STEPS, WIDE
from flowpool.kernels.machine.jit import entry, kernel
from flowpool.kernels.machine.lanes import (
    WIDTH,
    add,
    divide,
    exponential,
    fma,
    larger,
    load,
    multiply,
    splat,
    store,
    subtract,
)
from flowpool.kernels.machine.linear import padded, row_products, row_total
from flowpool.kernels.machine.memory import aligned
from flowpool.kernels.machine.rows import draw, part, rows_of, stay_apart
from flowpool.kernels.machine.threads import run

Array = NDArray[np.float64]
NOTHING = 1e-30  # keeps zero by zero away
SHARE = 2**14  # scores from which another thread pays
LONG = 2**20  # scores from which a call may take longer than a person waits to interrupt it


@kernel
def take_graph(given, given_masses, start, size, count, scores, masses):  # type: ignore[no-untyped-def]
    """Copies the scores and masses of a graph, and gives back the largest range among the scores of a node."""
    stay_apart()
    widest = 0.0
    for j in range(size):
        lowest = highest = given[start + j, 0]
        for i in range(count):
            value = given[start + j, i]
            scores[i, j] = value
            lowest, highest = min(lowest, value), max(highest, value)
        masses[0, j] = given_masses[0, start + j]
        widest = max(widest, highest - lowest)
    for j in range(size, padded(size)):
        for i in range(count):
            scores[i, j] = 0.0
        masses[0, j] = 0.0
    return widest


@kernel
def divide_nodes(scores, masses, length, count, heat, potential, portions, plan, received):  # type: ignore[no-untyped-def]
    """Fills A, P and what each point receives."""
    stay_apart()
    scale = splat(1.0 / heat)
    for j in range(0, length, WIDTH):
        top = splat(-math.inf)
        for i in range(count):
            value = fma(scale, load(scores, i, j), splat(potential[0, i]))
            store(portions, i, j, value)
            top = larger(value, top)
        column = splat(0.0)
        for i in range(count):
            value = exponential(subtract(load(portions, i, j), top))
            store(portions, i, j, value)
            column = add(column, value)
        inverse = divide(splat(1.0), column)
        mass = load(masses, 0, j)
        for i in range(count):
            value = multiply(load(portions, i, j), inverse)
            store(portions, i, j, value)
            store(plan, i, j, multiply(mass, value))
    for i in range(count):
        received[0, i] = row_total(plan, i, length)


@kernel
def factorise(matrix, first, size):  # type: ignore[no-untyped-def]
    """Replaces the symmetric matrix in the rows from ``first`` on by its Cholesky factor; NaN gives NaN."""
    stay_apart()
    for i in range(size):
        for k in range(i + 1):
            value = matrix[first + i, k]
            for p in range(k):
                value -= matrix[first + i, p] * matrix[first + k, p]
            matrix[first + i, k] = math.sqrt(value) if i == k else value / matrix[first + k, k]
        for k in range(i + 1, size):
            matrix[first + i, k] = 0.0


@kernel
def substitute(factor, first, size, values):  # type: ignore[no-untyped-def]
    """Replaces the row of values by the solution of the system with this factor."""
    stay_apart()
    for i in range(size):
        for k in range(i):
            values[0, i] -= factor[first + i, k] * values[0, k]
        values[0, i] /= factor[first + i, i]
    for i in range(size - 1, -1, -1):
        for k in range(i + 1, size):
            values[0, i] -= factor[first + k, i] * values[0, k]
        values[0, i] /= factor[first + i, i]


@kernel
def newton_step(portions, plan, length, count, shares, received, shared, factor, first, step):  # type: ignore[no-untyped-def]
    """Fills the factor of minus the Hessian, in the rows from ``first`` on, and the damped step."""
    stay_apart()
    row_products(plan, count, portions, 0, count, length, shared, False)
    for i in range(count):
        rest = 0.0
        for k in range(count):
            if k != i:
                rest += shared[i, k]
                factor[first + i, k] = received[0, i] * received[0, k] - shared[i, k]
        factor[first + i, i] = rest + received[0, i] * received[0, i] + DEFINITE
        step[0, i] = shares[0, i] - received[0, i]
    factorise(factor, first, count)
    substitute(factor, first, count, step)
    lowest = highest = step[0, 0]
    for i in range(count):
        lowest, highest = min(lowest, step[0, i]), max(highest, step[0, i])
    width = highest - lowest + NOTHING
    for i in range(count):
        step[0, i] *= math.log1p(width) / width


@entry
def balance_graphs(scores, masses, shares, ptr, counter, memory, portions, factors):  # type: ignore[no-untyped-def]
    """Fills A, ``(N, M)``, and the factors, ``(B M, M)``, of each graph that is drawn from the counter."""
    stay_apart()
    count = scores.shape[1]
    given, given_masses, given_shares, buffer = rows_of(scores), rows_of(masses), rows_of(shares), rows_of(memory)
    found, factor = rows_of(portions), rows_of(factors)
    side = padded(count)
    potential, received, step = part(buffer, 0, side), part(buffer, side, side), part(buffer, 2 * side, side)
    shared = part(buffer, 3 * side, side)
    while True:
        graph = draw(counter)
        if graph < 0 or graph >= len(ptr) - 1:
            break
        start, size, first = ptr[graph], ptr[graph + 1] - ptr[graph], graph * count
        if size == 0:
            for i in range(count):
                for k in range(count):
                    factor[first + i, k] = math.sqrt(DEFINITE) if i == k else 0.0
            continue
        length = padded(size)
        # Laid out afresh for each graph, which keeps a small one in the cache.
        used = (3 + side) * side
        own_masses, own_scores = part(buffer, used, length), part(buffer, used + length, length)
        own_portions = part(buffer, used + (1 + count) * length, length)
        plan = part(buffer, used + (1 + 2 * count) * length, length)

        widest = take_graph(given, given_masses, start, size, count, own_scores, own_masses)
        heat = widest / WIDE if widest > WIDE else 1.0
        for i in range(count):
            potential[0, i] = 0.0
        divide_nodes(own_scores, own_masses, length, count, heat, potential, own_portions, plan, received)
        for i in range(count):
            potential[0, i] = math.log(given_shares[0, i]) - math.log(received[0, i])
        for _ in range(MOST_STEPS):
            divide_nodes(own_scores, own_masses, length, count, heat, potential, own_portions, plan, received)
            newton_step(own_portions, plan, length, count, given_shares, received, shared, factor, first, step)
            error = 0.0
            for i in range(count):
                error = max(error, abs(given_shares[0, i] - received[0, i]) / given_shares[0, i])
            going = error > (HALFWAY if heat > 1.0 else BALANCED)
            if math.isnan(received[0, 0]) or counter[0] < 0 or not (going or heat > 1.0):
                break
            cooler = max(heat / COOLING, 1.0)
            for i in range(count):
                if going:
                    potential[0, i] += step[0, i]
                else:
                    potential[0, i] *= heat / cooler
            if not going:
                heat = cooler
        for i in range(count):
            potential[0, i] += step[0, i]
        divide_nodes(own_scores, own_masses, length, count, heat, potential, own_portions, plan, received)
        for j in range(size):
            for i in range(count):
                found[start + j, i] = own_portions[i, j]


@entry
def adjoin_balances(portions, masses, ptr, factors, upstream, counter, to_scores, to_masses, to_shares):  # type: ignore[no-untyped-def]
    """Fills the gradients in scores ``(N, M)``, masses ``(N,)`` and shares ``(B, M)`` of each graph that is drawn."""
    stay_apart()
    count = portions.shape[1]
    factor, answers = rows_of(factors), rows_of(to_shares)
    while True:
        graph = draw(counter)
        if graph < 0 or graph >= len(ptr) - 1:
            break
        answer = part(answers, graph * count, count)
        for i in range(count):
            answer[0, i] = 0.0
        for j in range(ptr[graph], ptr[graph + 1]):
            mean = 0.0
            for i in range(count):
                mean += portions[j, i] * upstream[j, i]
            for i in range(count):
                to_scores[j, i] = portions[j, i] * (upstream[j, i] - mean)
                answer[0, i] += to_scores[j, i]
        substitute(factor, graph * count, count, answer)
        for j in range(ptr[graph], ptr[graph + 1]):
            mean = 0.0
            for i in range(count):
                mean += portions[j, i] * answer[0, i]
            for i in range(count):
                to_scores[j, i] -= masses[j] * portions[j, i] * (answer[0, i] - mean)
            to_masses[j] = -mean


def solve(scores: Array, masses: Array, shares: Array, ptr: NDArray[np.int64], threads: int) -> tuple[Array, Array]:
    """A ``(N, M)``, and the Cholesky factors ``(B, M, M)``."""
    graphs, count = len(ptr) - 1, scores.shape[1]
    portions, factors = np.empty_like(scores), np.empty((graphs * count, count))
    side, length = padded(count), padded(int(np.diff(ptr).max(initial=0)))
    room = (3 + side) * side + (1 + 3 * count) * length
    run(
        lambda counter: balance_graphs(
            scores, masses[np.newaxis], shares[np.newaxis], ptr, counter, aligned(room)[np.newaxis], portions, factors
        ),
        graphs,
        min(threads, 1 + scores.size // SHARE),
        patient=scores.size > LONG,
    )
    return portions, factors.reshape(graphs, count, count)


def adjoint(
    portions: Array, masses: Array, ptr: NDArray[np.int64], factors: Array, upstream: Array, threads: int
) -> tuple[Array, Array, Array]:
    """Gradients of ``<upstream, A>`` in scores ``(N, M)``, masses ``(N,)`` and, graph by graph, shares ``(B, M)``."""
    graphs, count = len(ptr) - 1, portions.shape[1]
    flat, to_scores, to_masses = factors.reshape(-1, count), np.empty_like(portions), np.empty_like(masses)
    to_shares = np.empty((graphs, count))
    run(
        lambda counter: adjoin_balances(
            portions, masses, ptr, flat, upstream, counter, to_scores, to_masses, to_shares
        ),
        graphs,
        min(threads, 1 + portions.size // SHARE),
    )
    return to_scores, to_masses, to_shares
