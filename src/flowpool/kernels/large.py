"""X* of one graph with very many nodes, in memory that does not grow with them.

The nodes are read in blocks straight from an array of any precision, and only then taken into their frame; no M x N array
exists, and none of the nodes in double precision. A pass over all blocks gives what one Newton iteration of the inner
problem needs, or the moments that make up the Hessian. Passes are spread over threads: each
takes the next chunk of blocks, and the sums of the chunks are added in their order, so that the bits do not depend on
the number of threads. What happens between passes is small, and decided by :func:`flowpool.kernels.flow.advance`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowpool.core.hessian import NULL
from flowpool.kernels.adjoint import NEGLIGIBLE
from flowpool.kernels.cloud import fill_moment_columns
from flowpool.kernels.divergence import self_pull
from flowpool.kernels.flow import CLOCK, CURVE, EVALUATE, SOLVE, advance
from flowpool.kernels.hessian import assemble, pair_weights, prepare_factor, solve_factored
from flowpool.kernels.machine.jit import announce, entry
from flowpool.kernels.machine.lanes import WIDTH, multiply, store
from flowpool.kernels.machine.lanes import load as load_lanes
from flowpool.kernels.machine.linear import padded, row_products
from flowpool.kernels.machine.rows import draw, part, rows_of, stay_apart
from flowpool.kernels.machine.threads import run
from flowpool.kernels.response import cost_changes, plan_changes, scale_direction
from flowpool.kernels.scratch import (
    PLACES,
    TRACK,
    TRACK_FIRST,
    WORK,
    WORK_FIRST,
    open_track,
    open_work,
    place_track,
    place_work,
    reserve,
)
from flowpool.kernels.self_sinkhorn import solve_self_transport
from flowpool.kernels.sinkhorn import HOPELESS, LOOSE, MAX_ITERATIONS, NOISE, ROUNDING, STAGE, gibbs, marginals

Array = NDArray[np.float64]

_BLOCK = 256  # nodes; a block with its moments stays in the second-level cache
_CHUNK = 32  # blocks that a thread takes at once

_TINY = 1e-4  # relative size up to which the first order of the correction by the ridge is all of it

# What a pass collects.
_INNER, _MOMENTS, _RESPONSE, _CHANGE, _GRADIENTS = 0, 1, 2, 3, 4


@lru_cache
def _block_places(count: int, features: int) -> tuple[NDArray[np.int64], int]:
    """Where the arrays of one block are in the memory of a thread, and how many numbers that needs."""
    places = np.empty((PLACES, 2), np.int64)
    pairs, columns = count * (count + 1) // 2, 1 + features + features * (features + 1) // 2
    used = reserve(places, 0, 1, 0, columns, _BLOCK)
    used = reserve(places, 1, 4, used, 1, _BLOCK)
    used = reserve(places, 5, 4, used, count, _BLOCK)
    used = reserve(places, 9, 1, used, pairs, _BLOCK)
    used = reserve(places, 10, 1, used, pairs, columns)
    used = reserve(places, 11, 1, used, count, count)
    used = reserve(places, 12, 1, used, count, features)
    used = reserve(places, 13, 3, used, 1, max(count, features))
    return places, int(reserve(places, 16, 1, used, count, features + 1))


@lru_cache
def _flow_places(count: int, features: int) -> tuple[NDArray[np.int64], int]:
    """Where track and scratch of the flow are in the memory of :func:`go_on`, and how many numbers that needs."""
    places = np.empty((PLACES, 2), np.int64)
    used = place_track(places, 0, count, features)
    return places, place_work(places, used, count, WIDTH, features, features) + padded(count)


@entry
def sweep(  # type: ignore[no-untyped-def]
    nodes, mean, inverse, masses, mode, scaled, points, direction, step, epsilon, counter, memory, places, partial,
    order, shift, stretch, tilt, bend, grad_nodes, grad_masses,
):  # fmt: skip
    """One pass over the chunks of blocks that are drawn from the counter; row k of ``partial`` gets the sums of chunk k.

    Args:
        nodes, masses: of the graph, ``(N, D)`` and ``(N,)``.
        mean, inverse: of its frame, ``(D,)``; a node x is ``(x - mean) inverse`` there.
        mode: what to collect: ``P 1``, ``P A^T``, ``P Y`` and the objective; the moments; the right-hand side of the
            response to ``direction``; given the change of f in ``step``, ``dP Y``; or nothing, but write the gradients.
        scaled: as :func:`flowpool.kernels.sinkhorn.scale_rows` makes it.
        order: row of ``grad_nodes`` that belongs to each node.
        shift, stretch, tilt, bend: as :func:`flowpool.kernels.frame.frame_response` gives them.
    """
    stay_apart()
    count, features = points.shape[0], nodes.shape[1]
    buffer = rows_of(memory)
    coordinates = part(buffer, places[0, 0], places[0, 1])
    weights = part(buffer, places[1, 0], places[1, 1])
    tops = part(buffer, places[2, 0], places[2, 1])
    sums = part(buffer, places[3, 0], places[3, 1])
    dual = part(buffer, places[4, 0], places[4, 1])
    kernel_rows = part(buffer, places[5, 0], places[5, 1])
    conditional = part(buffer, places[6, 0], places[6, 1])
    plan = part(buffer, places[7, 0], places[7, 1])
    change = part(buffer, places[8, 0], places[8, 1])
    pairs = part(buffer, places[9, 0], places[9, 1])
    moments = part(buffer, places[10, 0], places[10, 1])
    overlap = part(buffer, places[11, 0], places[11, 1])
    pulled = part(buffer, places[12, 0], places[12, 1])
    ones = part(buffer, places[13, 0], places[13, 1])
    rows = part(buffer, places[14, 0], places[14, 1])
    right = part(buffer, places[15, 0], places[15, 1])
    scaled_rows, point_rows, way, found_step = rows_of(scaled), rows_of(points), rows_of(direction), rows_of(step)
    scaled_way = part(buffer, places[16, 0], places[16, 1])
    scale_direction(point_rows, way, count, features, epsilon, scaled_way)
    for i in range(count):
        ones[0, i] = 1.0
    number = nodes.shape[0]
    num_pairs, columns = count * (count + 1) // 2, 1 + features + features * (features + 1) // 2
    while True:
        chunk = draw(counter)
        if chunk >= partial.shape[0]:
            break
        partial[chunk, :] = 0.0
        for begin in range(chunk * _CHUNK * _BLOCK, min((chunk + 1) * _CHUNK * _BLOCK, number), _BLOCK):
            size = min(_BLOCK, number - begin)
            length = padded(size)
            for j in range(size):
                coordinates[0, j] = 1.0
                weights[0, j] = masses[begin + j]
                for d in range(features):
                    coordinates[1 + d, j] = (nodes[begin + j, d] - mean[d]) * inverse[d]
            for j in range(size, length):
                weights[0, j] = 0.0
                for d in range(1 + features):
                    coordinates[d, j] = 0.0
            gibbs(coordinates, length, features, features, count, scaled_rows, kernel_rows, tops)
            marginals(weights, length, count, kernel_rows, ones, sums, conditional, plan, rows)
            if mode == _INNER:
                row_products(plan, count, conditional, 0, count, length, overlap, False)
                row_products(plan, count, coordinates, 1, features, length, pulled, False)
                place = 0
                for i in range(count):
                    partial[chunk, place] += rows[0, i]
                    place += 1
                for i in range(count):
                    for k in range(count):
                        partial[chunk, place] += overlap[i, k]
                        place += 1
                for i in range(count):
                    for d in range(features):
                        partial[chunk, place] += pulled[i, d]
                        place += 1
                for j in range(size):
                    partial[chunk, place] += weights[0, j] * (tops[0, j] + math.log(sums[0, j]))
            elif mode == _MOMENTS:
                fill_moment_columns(coordinates, length, features, features)
                pair_weights(count, length, conditional, plan, pairs)
                row_products(pairs, num_pairs, coordinates, 0, columns, length, moments, False)
                for p in range(num_pairs):
                    for k in range(columns):
                        partial[chunk, p * columns + k] += moments[p, k]
            else:
                cost_changes(
                    coordinates, length, features, features, count, scaled_way, conditional, plan, change, dual, right
                )
                if mode == _RESPONSE:
                    for i in range(count):
                        partial[chunk, i] += right[0, i]
                else:
                    plan_changes(length, count, found_step, conditional, conditional, change, dual)
                    if mode == _CHANGE:
                        for j in range(0, length, WIDTH):
                            for i in range(count):
                                store(plan, i, j, multiply(load_lanes(weights, 0, j), load_lanes(change, i, j)))
                        row_products(plan, count, coordinates, 1, features, length, pulled, False)
                        for i in range(count):
                            for d in range(features):
                                partial[chunk, i * features + d] += pulled[i, d]
                        continue
                    for j in range(size):
                        to_mass = -epsilon * dual[0, j]
                        for d in range(features):
                            value = 0.0
                            for i in range(count):
                                value += conditional[i, j] * way[i, d] + change[i, j] * point_rows[i, d]
                            place_in_frame = coordinates[1 + d, j]
                            value = 2.0 * value * inverse[d] + shift[d] + stretch[d] * place_in_frame
                            grad_nodes[order[begin + j], d] = weights[0, j] * value
                            to_mass += (tilt[d] + bend * place_in_frame) * place_in_frame
                        grad_masses[begin + j] = to_mass


@entry
def go_on(  # type: ignore[no-untyped-def]
    request, memory, places, clocks, masses, features, epsilon, tolerance, max_steps, error, only_hessian
):
    """What the flow needs next that only a pass over the nodes can give, or that it has finished.

    Args:
        request: what was asked for last and has been put in place: at ``there`` after ``EVALUATE`` the potential, ``P Y``
            and ``P 1``, solved up to ``error``; the moments after ``CURVE``.
        masses: a, ``(M,)``.
        only_hessian: form the Hessian at ``here`` and do not go on.
    """
    stay_apart()
    count, clock, buffer = masses.shape[0], clocks[0], rows_of(memory)
    track, work = open_track(buffer, places), open_work(buffer, places)
    here, there = track.here, track.there
    point_masses = part(buffer, memory.shape[1] - padded(count), padded(count))  # behind everything else
    for i in range(count):
        point_masses[0, i] = masses[i]
    if request == EVALUATE:
        own = solve_self_transport(
            there.points, features, count, point_masses, epsilon, there.self_potential, clock.inner, work
        )
        self_pull(
            count, features, there.points, work.self_plan, work.self_rows, there.pulled, there.rows, there.gradient
        )
        if not error < math.inf:
            there.gradient[0, 0] = math.nan
        clock.error = max(error, own)
    elif request == CURVE:
        pair = 0
        for i in range(count):
            work.rows[0, i] = here.rows[0, i]
            for k in range(i, count):
                work.overlap[i, k] = work.moments[pair, 0]
                pair += 1
        # The plan of the points with themselves may be that of a refused step.
        solve_self_transport(here.points, features, count, point_masses, epsilon, here.self_potential, 1e-13, work)
        if not assemble(count, features, here.points, here.pulled, point_masses, epsilon, work):
            work.hessian[0, 0] = math.nan
        clock.sliding = math.nan
        clock.jumping = math.nan
    if only_hessian:
        return CURVE
    while True:
        request = advance(clock, track, count, features, point_masses, tolerance, max_steps)
        if request != SOLVE:
            return request
        factor, pivots = prepare_factor(clock, count, features, point_masses, work)
        if clock.definite:
            solve_factored(count, features, factor, pivots, track.right, track.solution, work)


class _Sums(NamedTuple):
    """What a pass of the inner problem gives."""

    rows: Array  # P 1, (M,)
    overlap: Array  # P A^T, (M, M)
    pulled: Array  # P Y, (M, D)
    objective: float
    error: float


class Leaving(NamedTuple):
    """Where gradients are written, and what the frame adds to them (:func:`flowpool.kernels.frame.frame_response`)."""

    order: NDArray[np.int64]
    shift: Array
    stretch: Array
    tilt: Array
    bend: float
    grad_nodes: NDArray[np.floating]
    grad_masses: Array


class _Nodes:
    """The nodes of the graph, and passes over them."""

    def __init__(
        self,
        nodes: NDArray[np.floating],
        mean: Array,
        scale: Array,
        masses: Array,
        point_masses: Array,
        epsilon: float,
        threads: int,
    ) -> None:
        self.nodes, self.mean, self.inverse = nodes, mean, 1.0 / scale
        self.masses, self.point_masses, self.epsilon = masses, point_masses, epsilon
        self.count, self.features, self.threads = len(point_masses), nodes.shape[1], threads
        self.places, self.numbers = _block_places(self.count, self.features)
        self.spare: list[Array] = []

    def run(
        self, mode: int, points: Array, potential: Array, epsilon: float, numbers: int, direction: Array | None = None,
        step: Array | None = None, leaving: Leaving | None = None,
    ) -> Array:  # fmt: skip
        """Sums of one pass, ``(numbers,)``."""
        count, features = self.count, self.features
        scaled = np.empty((count, features + 1))
        scaled[:, :features] = 2.0 / epsilon * points
        scaled[:, features] = (potential - (points**2).sum(1)) / epsilon
        chunks = -(-len(self.nodes) // (_BLOCK * _CHUNK))
        partial = np.empty((chunks, numbers))
        way = _padded(points if direction is None else direction)
        change = np.zeros((1, count)) if step is None else step.reshape(1, -1)
        nowhere = np.empty(0)
        writes = leaving or (np.empty(0, np.int64), nowhere, nowhere, nowhere, 0.0, self.nodes[:0], nowhere)

        def work(counter: NDArray[np.int64]) -> None:
            memory = self.spare.pop() if self.spare else np.empty((1, self.numbers))
            sweep(
                self.nodes, self.mean, self.inverse, self.masses, mode, scaled, _padded(points), way, change,
                self.epsilon, counter, memory, self.places, partial, *writes,
            )  # fmt: skip
            self.spare.append(memory)

        run(work, chunks, self.threads)
        total: Array = partial.sum(0)
        return total

    def sums(self, points: Array, potential: Array, epsilon: float) -> _Sums:
        count, features = self.count, self.features
        found = self.run(_INNER, points, potential, epsilon, count + count * count + count * features + 1)
        rows, rest = found[:count], found[count:]
        overlap = rest[: count * count].reshape(count, count)
        pulled = rest[count * count : -1].reshape(count, features)
        objective = float(self.point_masses @ potential - epsilon * found[-1])
        return _Sums(rows, overlap, pulled, objective, float(np.abs(self.point_masses - rows).sum()))

    def moments(self, points: Array, potential: Array) -> Array:
        """``(M (M + 1) / 2, 1 + D + D (D + 1) / 2)``."""
        pairs, columns = (
            self.count * (self.count + 1) // 2,
            1 + self.features + self.features * (self.features + 1) // 2,
        )
        return self.run(_MOMENTS, points, potential, self.epsilon, pairs * columns).reshape(pairs, columns)

    def farthest(self) -> float:
        """Largest distance of a node from the origin of the frame."""
        squares = 0.0
        for begin in range(0, len(self.nodes), _BLOCK * _CHUNK):
            framed = (self.nodes[begin : begin + _BLOCK * _CHUNK] - self.mean) * self.inverse
            squares = max(squares, float(np.einsum("nd,nd->n", framed, framed).max()))
        return math.sqrt(squares)

    def transport(self, points: Array, potential: Array, stage: float, tolerance: float) -> tuple[Array, _Sums]:
        """The potential and the sums at the solution; the iteration of :func:`flowpool.core.sinkhorn.solve`."""
        target, damping = max(tolerance, ROUNDING), 1e-3
        now = self.sums(points, potential, stage)
        for _ in range(MAX_ITERATIONS):
            if not now.error < math.inf or damping > HOPELESS or (now.error <= target and stage <= self.epsilon):
                break
            if stage > self.epsilon and now.error <= LOOSE:
                stage = max(STAGE * stage, self.epsilon)
                now = self.sums(points, potential, stage)
                continue
            ridge = damping * now.error * self.point_masses
            matrix = np.diag(now.rows + ridge) - now.overlap + 1.0 / self.count**2
            try:
                np.linalg.cholesky(matrix)
                step = np.linalg.solve(matrix, self.point_masses - now.rows)
            except np.linalg.LinAlgError:
                step = np.log(self.point_masses / np.maximum(now.rows, 1e-300))
            moved = potential + stage * step
            trial = self.sums(points, moved, stage)
            better = trial.error <= now.error / 2
            if not better and now.error < NOISE:
                better, damping = trial.error < now.error, 10.0 * HOPELESS
            elif not better:
                better = trial.objective >= now.objective
            if better:
                potential, now = moved, trial
            damping *= 0.3 if better else 10.0
        return potential, now


def _padded(rows: Array) -> Array:
    """The rows with zeros up to whole lanes."""
    result = np.zeros((len(rows), padded(rows.shape[1])))
    result[:, : rows.shape[1]] = rows
    return result


class _Memory:
    """The memory of :func:`go_on`, with the fields that passes fill or read as arrays."""

    def __init__(self, point_masses: Array, features: int) -> None:
        count = len(point_masses)
        self.places, total = _flow_places(count, features)
        self.memory = np.zeros((1, total))
        pairs, columns = count * (count + 1) // 2, 1 + features + features * (features + 1) // 2

        def view(place: int, rows: int, columns: int) -> Array:
            first, stride = self.places[place]
            return self.memory[0, first : first + rows * stride].reshape(rows, stride)[:, :columns]

        def views(name: str) -> list[Array]:
            """Points, ``P Y``, potential, self-potential and ``P 1`` of one of the two places."""
            first, place = TRACK.fields[name]
            shapes = {"points": (count, features), "pulled": (count, features)}
            names = ("points", "pulled", "potential", "self_potential", "rows")
            found = [view(TRACK_FIRST + first + place.fields[name][0], *shapes.get(name, (1, count))) for name in names]
            return [*found[:2], *(row[0] for row in found[2:])]

        self.here_points, self.here_pulled, self.here_potential, self.here_self_potential, self.here_rows = views(
            "here"
        )
        self.points, self.pulled, self.potential, self.self_potential, self.rows = views("there")
        of_work = {name: WORK_FIRST + place for name, (place, _) in WORK.fields.items()}
        self.moments = view(of_work["moments"], pairs, columns)
        self.self_plan = view(of_work["self_plan"], count, count)
        self.hessian = view(of_work["hessian"], count * features, count * features)


def solve_large(
    nodes: NDArray[np.floating],
    mean: Array,
    scale: Array,
    masses: Array,
    start: Array,
    point_masses: Array,
    epsilon: float,
    tolerance: float,
    max_steps: int,
    threads: int,
) -> tuple[Any, ...]:
    """Points, potentials, self-potentials, residual, steps, status and singularity, as in :class:`engine.Solved`."""
    announce(sweep)
    announce(go_on)
    count, features = start.shape
    cloud = _Nodes(nodes, mean, scale, masses, point_masses, epsilon, threads)
    memory = _Memory(point_masses, features)
    memory.points[:] = start
    memory.potential[:] = (start**2).sum(1)
    memory.self_potential[:] = 0.5 * epsilon * np.log(point_masses)
    stage = max(epsilon, (math.sqrt(float(memory.potential.max())) + cloud.farthest()) ** 2 / 4)
    clocks = np.zeros(1, CLOCK)
    clocks["step"] = 0.1
    request, error = -1, 0.0
    while True:
        request = go_on(
            request,
            memory.memory,
            memory.places,
            clocks,
            point_masses,
            features,
            epsilon,
            tolerance,
            max_steps,
            error,
            False,
        )
        if request == EVALUATE:
            points = memory.points.copy()
            potential, sums = cloud.transport(points, memory.potential.copy(), stage, float(clocks["inner"][0]))
            memory.potential[:], memory.rows[:], memory.pulled[:] = potential, sums.rows, sums.pulled
            stage, error = epsilon, sums.error
        elif request == CURVE:
            memory.moments[:] = cloud.moments(memory.here_points.copy(), memory.here_potential.copy())
        else:
            break
    end = clocks[0]
    return (
        memory.here_points.copy(), memory.here_potential.copy(), memory.here_self_potential.copy(),
        end["residual"], end["steps"], end["status"], end["singular"],
    )  # fmt: skip


class LargeAdjoint(NamedTuple):
    """The solution of the linear system of one graph, from which its gradients can be written.

    Attributes:
        epsilon: gradient in epsilon.
        total, moment: sums over the nodes of their gradients g_j, and of ``y_j g_j``, ``(D,)``.
        residual: of the system, relative.
        damped: H is singular or indefinite, or the ridge no small correction: W is the filtered solution.
        potential, self_plan: f, ``(M,)``, and Q, ``(M, M)``, as the system has them.
        write: writes the gradients in nodes and masses.
    """

    epsilon: float
    total: Array
    moment: Array
    residual: float
    damped: bool
    potential: Array
    self_plan: Array
    write: Callable[[Leaving], object]


def adjoint_large(
    nodes: NDArray[np.floating],
    mean: Array,
    scale: Array,
    masses: Array,
    points: Array,
    potential: Array,
    self_potential: Array,
    point_masses: Array,
    epsilon: float,
    ridge: float,
    cotangent: Array,
    threads: int,
) -> LargeAdjoint:
    """The adjoint of one graph, given what :func:`solve_large` returned; the cotangent is that of X* in the frame."""
    announce(sweep)
    announce(go_on)
    count, features = points.shape
    cloud = _Nodes(nodes, mean, scale, masses, point_masses, epsilon, threads)
    memory = _Memory(point_masses, features)
    potential, sums = cloud.transport(points, potential.copy(), epsilon, 1e-12)
    memory.here_points[:], memory.here_pulled[:], memory.here_rows[:] = points, sums.pulled, sums.rows
    memory.here_self_potential[:] = self_potential
    memory.moments[:] = cloud.moments(points, potential)
    go_on(CURVE, memory.memory, memory.places, np.zeros(1, CLOCK), point_masses, features, epsilon, 0.0, 0, 0.0, True)
    hessian = np.triu(memory.hessian)
    hessian = hessian + np.triu(hessian, 1).T
    solution, residual, damped = solve_system(hessian, cotangent.reshape(-1), ridge, 2.0 / count)
    way = solution.reshape(count, features)

    answered = cloud.run(_RESPONSE, points, potential, epsilon, count, way)
    schur = np.diag(sums.rows) - sums.overlap + 1.0 / count**2
    step = np.linalg.solve(schur, answered)
    pull = cloud.run(_CHANGE, points, potential, epsilon, count * features, way, step).reshape(count, features)  # dP Y
    plan = memory.self_plan
    apart = points[:, None] - points[None]
    change = 2 * np.einsum("ikd,ikd->ik", apart, way[:, None] - way[None])
    turn = np.linalg.solve(np.diag(point_masses) + plan, (plan * change).sum(1))
    self_change = plan * (turn[:, None] + turn[None] - change) / epsilon
    slope = -2 * (points * pull).sum() + np.einsum("ik,id,kd->", self_change, points, points)

    def write(leaving: Leaving) -> None:
        cloud.run(_GRADIENTS, points, potential, epsilon, 1, way, step, leaving)

    total = 2 * sums.rows @ way  # rows of dP sum to zero
    moment = 2 * (way * sums.pulled + points * pull).sum(0)
    return LargeAdjoint(float(slope) / epsilon, total, moment, residual, damped, potential, plan, write)


def solve_system(hessian: Array, right: Array, ridge: float, unit: float) -> tuple[Any, float, bool]:
    """``H (H H + ridge unit^2)^-1 V``, without the part along a null space of H; its residual; and whether it is damped.

    Args:
        hessian: H, ``(K, K)``.
        right: V, ``(K, ...)``.
    """
    penalty = ridge * unit**2
    if not np.isfinite(hessian).all():
        return np.full_like(right, np.nan), math.nan, True
    share = math.inf
    with suppress(np.linalg.LinAlgError):
        np.linalg.cholesky(hessian)
        solution = np.linalg.solve(hessian, right)
        correction = penalty * np.linalg.solve(hessian, np.linalg.solve(hessian, solution))
        share = _relative(correction, solution)
    if share <= _TINY:
        return solution - correction, _relative(hessian @ solution - right, right), False
    values, vectors = np.linalg.eigh(hessian)
    safe = np.where(np.abs(values) > NULL * unit, values, np.inf)
    filtered = vectors @ ((vectors.T @ right).T / (safe + penalty / safe)).T
    image = hessian @ right
    error = hessian @ (hessian @ filtered) + penalty * filtered - image
    return filtered, _relative(error, image), not share <= NEGLIGIBLE


def _relative(error: Any, value: Any) -> float:
    length = float(np.linalg.norm(value))
    return float(np.linalg.norm(error)) / length if length > 0 else 0.0
