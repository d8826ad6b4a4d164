"""X* of one graph with very many nodes, in memory that does not grow with them.

The nodes are read in blocks straight from an array of any precision, and only then taken into their frame; no M x N array
exists, and none of the nodes in double precision. A pass over all blocks gives what one Newton iteration of the inner
problem needs, or the moments that make up the Hessian. Passes are spread over threads: each
takes the next chunk of blocks, and the sums of the chunks are added in their order, so that the bits do not depend on
the number of threads. What happens between passes is small, and decided by the law of the flow as for any other graph.

Every gradient, every Newton step and the residual are those of all nodes. A sample of them helps in two places where no
more than a digit or two is needed: it says from which potentials to start, and it gives the Hessian of an implicit step,
which keeps its order with any matrix, while that is short (:data:`SAMPLE`; ``docs/numerics.md`` has what was tried).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowpool.core.constants import (
    DAMPING,
    LEAST_RIDGE,
    LOOSE,
    MAX_ITERATIONS,
    MISPLACED,
    ROUNDING,
    SINGULAR,
    SLOW,
    STAGE,
)
from flowpool.core.law import DONE, HESSIAN, IMPLICIT, STATE, TIGHTEN, advance, begin
from flowpool.kernels.divergence import fill_gradient
from flowpool.kernels.flow import conclude, depart, has_equal_masses, move_to, needs_evaluation
from flowpool.kernels.hessian import assemble, pair_weights
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
from flowpool.kernels.machine.linear import add_combinations, padded, row_products
from flowpool.kernels.machine.memory import PLACE, Table, aligned, views
from flowpool.kernels.machine.rows import draw, rows_of, stay_apart
from flowpool.kernels.machine.threads import run
from flowpool.kernels.machine.vectors import fill
from flowpool.kernels.memory import (
    BLOCK,
    CLOUD_BLOCK,
    GRAPH,
    SIZES,
    arrange_block,
    arrange_graph,
    open_block,
    open_graph,
    set_graph_sizes,
)
from flowpool.kernels.response import cost_changes, plan_changes, scale_direction
from flowpool.kernels.self_sinkhorn import solve_self_transport
from flowpool.kernels.sinkhorn import HOPELESS, STALLED, affine, propose, scale_rows

Array = NDArray[np.float64]

CHUNK = 64  # blocks that a thread takes at once
SAMPLE = 16_384  # nodes of a sample at least, and 2 M / epsilon^2; with a twentieth of that it lost a minimum of 72

# What a pass collects.
_SUMS, _OBJECTIVE, _MOMENTS, _RESPONSE, _CHANGE, _GRADIENTS = range(6)


class _Memory(NamedTuple):
    """Arrays of a table: :data:`~flowpool.kernels.memory.CLOUD_BLOCK` for a block of nodes, ``GRAPH`` for the points."""

    table: Table
    sizes: NDArray[np.int64]
    places: NDArray[np.int64]
    numbers: Array

    def array(self, name: str) -> Array:
        found: Array = views(self.table, name, self.sizes, self.numbers, self.places)
        return found


@lru_cache(maxsize=64)
def _layout(table: Table, count: int, features: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Sizes, places and numbers of the arrays of a graph whose nodes span all features."""
    sizes, places = np.zeros(SIZES, np.int64), np.empty((len(table.shapes), PLACE), np.int64)
    set_graph_sizes(sizes, count, BLOCK if table is CLOUD_BLOCK else WIDTH, features, features, features)
    arrange = arrange_block if table is CLOUD_BLOCK else arrange_graph
    return sizes, places, int(arrange(sizes, places))


def _memory(table: Table, count: int, features: int) -> _Memory:
    sizes, places, numbers = _layout(table, count, features)
    memory: Array = aligned(numbers)
    memory[:] = 0.0
    return _Memory(table, sizes, places, memory)


@kernel
def take_block(block, nodes, mean, inverse, masses, place, size):  # type: ignore[no-untyped-def]
    """Fills the nodes ``place .. place + size`` in their frame, and their masses, with zeros up to a whole block."""
    stay_apart()
    features, length, rows, weights = block.hull, block.length, block.nodes, block.masses
    for j in range(size):
        weights[0, j] = masses[place + j]
        for d in range(features):
            rows[1 + d, j] = (nodes[place + j, d] - mean[d]) * inverse[d]
    for j in range(size, length):
        weights[0, j] = 0.0
        for d in range(features):
            rows[1 + d, j] = 0.0


@kernel
def couple(block):  # type: ignore[no-untyped-def]
    """Fills A, P, and of each column the largest logarithm and the sum of what it was divided by."""
    stay_apart()
    count, features, tangent = block.count, block.hull, block.tangent
    nodes, scaled, conditional, plan = block.nodes, block.scaled, tangent.conditional, tangent.plan
    tops, sums, masses = block.tops, block.sums, block.masses
    for j in range(0, block.length, WIDTH):
        affine(nodes, features, features, count, scaled, conditional, j)
        top = splat(-math.inf)
        for i in range(count):
            top = larger(top, load(conditional, i, j))
        column = splat(0.0)
        for i in range(count):
            value = exponential(subtract(load(conditional, i, j), top))
            column = add(column, value)
            store(conditional, i, j, value)
        store(tops, 0, j, top)
        store(sums, 0, j, column)
        inverse, mass = divide(splat(1.0), column), load(masses, 0, j)
        for i in range(count):
            value = multiply(load(conditional, i, j), inverse)
            store(conditional, i, j, value)
            store(plan, i, j, multiply(mass, value))


@kernel
def add_sums(block, partial, chunk):  # type: ignore[no-untyped-def]
    """Adds the upper triangle of ``P A^T``, then ``P 1`` and ``P Y``."""
    stay_apart()
    count, features, length, plan = block.count, block.hull, block.length, block.tangent.plan
    overlap, pulled = block.overlap, block.pulled
    row_products(plan, count, block.tangent.conditional, 0, count, length, overlap, True)
    row_products(plan, count, block.nodes, 0, 1 + features, length, pulled, False)
    for i in range(count):
        for k in range(i, count):
            partial[chunk, i * count + k] += overlap[i, k]
        for d in range(1 + features):
            partial[chunk, count * count + i * (1 + features) + d] += pulled[i, d]


@kernel
def add_moments(block):  # type: ignore[no-untyped-def]
    """Adds the moments of the block to those of its chunk, node after node: ``1, y, y y^T`` under each pair of points."""
    stay_apart()
    count, features, length, nodes, products = block.count, block.hull, block.length, block.nodes, block.products
    for j in range(length):
        for e in range(1 + features):
            products[j, e] = nodes[e, j]
        column = 1 + features
        for e in range(features):
            # What is stored past the last product of a row is written over by the next row.
            for c in range(0, e + 1, WIDTH):
                store(products, j, column + c, multiply(splat(nodes[1 + e, j]), load(products, j, 1 + c)))
            column += e + 1
    pair_weights(count, length, block.tangent.conditional, block.tangent.plan, block.pairs)
    pairs, columns = count * (count + 1) // 2, 1 + features + features * (features + 1) // 2
    add_combinations(block.pairs, pairs, length, products, padded(columns), block.moments)


@kernel
def add_change(block, partial, chunk):  # type: ignore[no-untyped-def]
    """Adds ``dP Y``."""
    stay_apart()
    count, features, tangent, pulled = block.count, block.hull, block.tangent, block.pulled
    for j in range(0, block.length, WIDTH):
        for i in range(count):
            store(tangent.plan, i, j, multiply(load(block.masses, 0, j), load(tangent.change, i, j)))
    row_products(tangent.plan, count, block.nodes, 1, features, block.length, pulled, False)
    for i in range(count):
        for d in range(features):
            partial[chunk, i * features + d] += pulled[i, d]


@kernel
def write_block(block, place, size, inverse, epsilon, order, frame, grad_nodes, grad_masses):  # type: ignore[no-untyped-def]
    """Writes gradients of the block's nodes and masses; ``frame`` holds shift, stretch, tilt and bend, ``(4, D)``."""
    stay_apart()
    count, features, tangent, gradient = block.count, block.hull, block.tangent, block.gradient
    nodes, masses, points, way = block.nodes, block.masses, block.points, block.way
    for d in range(features):
        for j in range(0, block.length, WIDTH):
            value = splat(0.0)
            for i in range(count):
                value = fma(splat(way[i, d]), load(tangent.conditional, i, j), value)
                value = fma(splat(points[i, d]), load(tangent.change, i, j), value)
            store(gradient, d, j, value)
    for j in range(size):
        to_mass = -epsilon * tangent.dual[0, j]
        for d in range(features):
            here = nodes[1 + d, j]
            value = 2.0 * gradient[d, j] * inverse[d] + frame[0, d] + frame[1, d] * here
            grad_nodes[order[place + j], d] = masses[0, j] * value
            to_mass += (frame[2, d] + frame[3, d] * here) * here
        grad_masses[place + j] = to_mass


@entry
def sweep(  # type: ignore[no-untyped-def]
    mode, nodes, mean, inverse, masses, memory, places, points, potential, way, step, epsilon, counter, partial,
    order, frame, grad_nodes, grad_masses,
):  # fmt: skip
    """One pass over the chunks of blocks that are drawn from the counter; row k of ``partial`` gets the sums of chunk k.

    Args:
        mode: what to collect: ``P A^T``, ``P 1`` and ``P Y``; the sum over nodes of the logarithm in the objective; the
            moments; the right-hand side of the response to ``way``; given the change of f in ``step``, ``dP Y``; or
            nothing, but write the gradients.
        nodes, masses: of the graph, ``(N, D)`` and ``(N,)``.
        mean, inverse: of its frame, ``(D,)``; a node x is ``(x - mean) inverse`` there.
        memory, places: of this thread, for a block.
        points, potential: X, ``(M, D)`` and f, ``(1, M)``.
        order, frame, grad_nodes, grad_masses: as for :func:`write_block`.
    """
    block = open_block(memory, places)
    count, features, tangent = block.count, block.hull, block.tangent
    for i in range(count):
        for d in range(padded(features)):
            block.points[i, d] = points[i, d] if d < features else 0.0
            block.way[i, d] = way[i, d] if d < features else 0.0
    scale_rows(block.points, features, count, rows_of(potential), epsilon, block.scaled)
    scale_direction(block.points, block.way, count, features, epsilon, tangent.scaled)
    fill(block.nodes, 1.0, BLOCK)  # the first row
    number, span, pairs = nodes.shape[0], CHUNK * BLOCK, count * (count + 1) // 2
    columns = 1 + features + features * (features + 1) // 2
    while True:
        chunk = draw(counter)
        if chunk < 0 or chunk >= partial.shape[0]:
            break
        partial[chunk, :] = 0.0
        if mode == _MOMENTS:
            fill(block.moments, 0.0, pairs * padded(columns))
        for place in range(chunk * span, min((chunk + 1) * span, number), BLOCK):
            size = min(BLOCK, number - place)
            take_block(block, nodes, mean, inverse, masses, place, size)
            couple(block)
            if mode == _SUMS:
                add_sums(block, partial, chunk)
            elif mode == _OBJECTIVE:
                for j in range(size):
                    partial[chunk, 0] += block.masses[0, j] * (block.tops[0, j] + math.log(block.sums[0, j]))
            elif mode == _MOMENTS:
                add_moments(block)
            else:
                cost_changes(block.nodes, BLOCK, features, features, count, tangent, block.right)
                if mode == _RESPONSE:
                    for i in range(count):
                        partial[chunk, i] += block.right[0, i]
                else:
                    plan_changes(BLOCK, count, rows_of(step), tangent, tangent.conditional)
                    if mode == _CHANGE:
                        add_change(block, partial, chunk)
                    else:
                        write_block(block, place, size, inverse, epsilon, order, frame, grad_nodes, grad_masses)
        if mode == _MOMENTS:
            for p in range(pairs):
                for k in range(columns):
                    partial[chunk, p * columns + k] = block.moments[p, k]


@entry
def newton_step(rows, overlap, point_masses, ridge, small, inverse, right, step):  # type: ignore[no-untyped-def]
    """:func:`flowpool.kernels.sinkhorn.propose` on arrays ``(1, M)`` and ``(M, M)`` whose rows are whole lanes."""
    count = point_masses.shape[0]
    masses = rows_of(right)
    for i in range(count):
        masses[0, i] = point_masses[i]
    propose(
        count, masses, rows_of(rows), rows_of(overlap), ridge, rows_of(small), rows_of(inverse), masses, rows_of(step)
    )


@entry
def go_on(request, states, memory, places, epsilon, tolerance, max_steps, exact):  # type: ignore[no-untyped-def]
    """What the flow needs next that only a pass over the nodes can give, or that it has finished.

    Args:
        request: what was asked for last and has been put in place: at ``there`` after an evaluation the potential, ``P Y``
            and ``P 1``, solved up to ``state.error``; else the Hessian. Negative: nothing was asked for yet.
        exact: the Hessian is that of all nodes, and not that of a sample, which serves an implicit step only.
    """
    state, graph = states[0], open_graph(memory, places)
    equal = has_equal_masses(graph)
    if request < 0:
        return begin(state, 0.0)
    while True:
        if needs_evaluation(request):
            own = solve_self_transport(graph, graph.there.points, graph.there.self_potential, epsilon, state.inner)
            fill_gradient(graph, graph.there)
            if not state.error < math.inf:
                graph.there.gradient[0, 0] = math.nan
            state.error = max(state.error, own)
        if request != HESSIAN:
            conclude(request, state, graph, epsilon)
        request = advance(state, graph.count, equal, tolerance, max_steps)
        if state.arrived:
            move_to(graph.there, graph.here, graph)
        if needs_evaluation(request):
            depart(request, state, graph)
        if request in (HESSIAN, DONE) or needs_evaluation(request) or not (exact or request == IMPLICIT):
            return request


@entry
def form(memory, places, epsilon):  # type: ignore[no-untyped-def]
    """The Hessian at ``here`` from the moments, ``P 1`` and ``P Y``; NaN where it cannot be formed."""
    graph = open_graph(memory, places)
    solve_self_transport(graph, graph.here.points, graph.here.self_potential, epsilon, 1e-13)
    for i in range(graph.count):
        for k in range(padded(graph.count)):
            graph.kept_self_plan[i, k] = graph.self_plan[i, k]
    if not assemble(graph, epsilon):
        graph.hessian[0, 0] = math.nan


class _Sums(NamedTuple):
    """What a pass of the inner problem gives."""

    rows: Array  # P 1, (M,)
    overlap: Array  # upper triangle of P A^T, (M, M)
    pulled: Array  # P Y, (M, D)
    error: float


class Leaving(NamedTuple):
    """Where gradients are written, and what the frame adds to them (:func:`flowpool.kernels.frame.frame_response`)."""

    order: NDArray[np.int64]
    frame: Array  # shift, stretch, tilt and bend, (4, D)
    grad_nodes: NDArray[np.floating]
    grad_masses: Array


class LargeGraph:
    """A graph whose nodes are read in blocks.

    Args:
        nodes, masses: ``(N, D)`` and ``(N,)``.
        mean, scale: of its frame, ``(D,)``.
        point_masses: a, ``(M,)``.
        epsilon: in the frame.
    """

    def __init__(
        self,
        nodes: NDArray[np.floating],
        masses: Array,
        mean: Array,
        scale: Array,
        point_masses: Array,
        epsilon: float,
        threads: int,
    ) -> None:
        self.nodes, self.mean, self.inverse = nodes, mean, 1.0 / scale
        self.masses, self.point_masses, self.epsilon = masses, point_masses, epsilon
        self.count, self.features, self.threads = len(point_masses), nodes.shape[1], threads
        self._spare: list[_Memory] = []

    def _sample(self) -> LargeGraph | None:
        """Every so many nodes, which are in the order of their features; none where they are few or hold little mass."""
        enough = max(SAMPLE, 2 * self.count / self.epsilon**2)
        stride = int(len(self.nodes) // enough)
        if stride < 2:
            return None
        nodes, masses = np.ascontiguousarray(self.nodes[::stride]), self.masses[::stride]
        if masses.sum() ** 2 < 0.5 * enough * (masses**2).sum():
            return None
        masses = masses / masses.sum()
        return LargeGraph(nodes, masses, self.mean, 1.0 / self.inverse, self.point_masses, self.epsilon, self.threads)

    def _pass(
        self,
        mode: int,
        points: Array,
        potential: Array,
        epsilon: float,
        numbers: int,
        way: Array | None = None,
        step: Array | None = None,
        leaving: Leaving | None = None,
    ) -> Array:
        """Sums of one pass, ``(numbers,)``."""
        chunks = -(-len(self.nodes) // (BLOCK * CHUNK))
        partial = np.empty((chunks, numbers))
        writes = leaving or Leaving(np.empty(0, np.int64), np.empty((4, 0)), self.nodes[:0], np.empty(0))
        row = np.ascontiguousarray(potential).reshape(1, -1)
        change = np.zeros_like(row) if step is None else step.reshape(1, -1)

        def work(counter: NDArray[np.int64]) -> None:
            memory = self._spare.pop() if self._spare else _memory(CLOUD_BLOCK, self.count, self.features)
            sweep(
                mode, self.nodes, self.mean, self.inverse, self.masses, memory.numbers, memory.places, points, row,
                points if way is None else way, change, epsilon, counter, partial, *writes,
            )  # fmt: skip
            self._spare.append(memory)

        run(work, chunks, self.threads)
        total: Array = partial.sum(0)
        return total

    def _sums(self, points: Array, potential: Array, epsilon: float) -> _Sums:
        count, features = self.count, self.features
        found = self._pass(_SUMS, points, potential, epsilon, count * (count + 1 + features))
        overlap = found[: count * count].reshape(count, count)
        pulled = found[count * count :].reshape(count, 1 + features)
        rows = pulled[:, 0]
        return _Sums(rows, overlap, pulled[:, 1:], float(np.abs(self.point_masses - rows).sum()))

    def _objective(self, points: Array, potential: Array, epsilon: float) -> float:
        logarithms = float(self._pass(_OBJECTIVE, points, potential, epsilon, 1)[0])
        return float(self.point_masses @ potential) - epsilon * logarithms

    def _moments(self, points: Array, potential: Array) -> Array:
        """``(M (M + 1) / 2, 1 + D + D (D + 1) / 2)``."""
        features = self.features
        pairs, columns = self.count * (self.count + 1) // 2, 1 + features + features * (features + 1) // 2
        return self._pass(_MOMENTS, points, potential, self.epsilon, pairs * columns).reshape(pairs, columns)

    def _farthest(self) -> float:
        """Largest distance of a node from the origin of the frame."""
        squares = 0.0
        for place in range(0, len(self.nodes), BLOCK * CHUNK):
            framed = (self.nodes[place : place + BLOCK * CHUNK] - self.mean) * self.inverse
            squares = max(squares, float(np.einsum("nd,nd->n", framed, framed).max()))
        return math.sqrt(squares)

    def _transport(
        self, points: Array, potential: Array, stage: float, tolerance: float, known: _Sums | None = None
    ) -> tuple[Array, _Sums]:
        """The potential and the sums at the solution; the iteration of :mod:`flowpool.kernels.sinkhorn`."""
        target, damping = max(tolerance, ROUNDING), DAMPING
        now = known or self._sums(points, potential, stage)
        for _ in range(MAX_ITERATIONS):
            if not now.error < math.inf or damping > HOPELESS or (now.error <= target and stage <= self.epsilon):
                break
            if stage > self.epsilon and now.error <= min(LOOSE, MISPLACED / self.count):
                stage = max(STAGE * stage, self.epsilon)
                now = self._sums(points, potential, stage)
                continue
            moved = potential + stage * self._newton_step(now, damping * now.error)
            trial = self._sums(points, moved, stage)
            better = trial.error <= now.error / 2
            if not better and now.error < STALLED:
                better, damping = trial.error < now.error, 10.0 * HOPELESS
            elif not better:
                better = self._objective(points, moved, stage) >= self._objective(points, potential, stage)
            if better:
                potential, now = moved, trial
            damping *= 0.3 if better else 10.0
        return potential, now

    def _newton_step(self, sums: _Sums, ridge: float) -> Array:
        width = padded(self.count)
        overlap, small = np.zeros((2, self.count, width))
        rows, inverse, right, step = np.zeros((4, 1, width))
        rows[0, : self.count], overlap[:, : self.count] = sums.rows, sums.overlap
        newton_step(rows, overlap, self.point_masses, ridge, small, inverse, right, step)
        found: Array = step[0, : self.count]
        return found

    def _put_hessian(self, memory: _Memory, source: LargeGraph) -> None:
        """The Hessian at ``here`` of the nodes of a source: these, or a sample of them."""
        rows, pulled, moments = (memory.array(name) for name in ("here.rows", "here.pulled", "moments"))
        kept = rows.copy(), pulled.copy()
        moments[:] = source._moments(memory.array("here.points").copy(), memory.array("here.potential")[0])
        # P 1 and P Y of the same nodes: the conditional plans of a node sum to one.
        each = np.zeros((self.count, self.count, 1 + self.features))
        upper = np.triu_indices(self.count)
        each[upper] = each[upper[::-1]] = moments[:, : 1 + self.features]
        rows[:], pulled[:] = each[:, :, 0].sum(1), each[:, :, 1:].sum(1)
        form(memory.numbers, memory.places, self.epsilon)
        rows[:], pulled[:] = kept

    def solve(self, start: Array, tolerance: float, max_steps: int) -> tuple[Any, ...]:
        """Points, potentials, self-potentials, residual, steps, status and singularity, as in :class:`engine.Solved`."""
        memory = _memory(GRAPH, self.count, self.features)
        memory.array("point_masses")[:] = self.point_masses
        points, potential = memory.array("there.points"), memory.array("there.potential")[0]
        points[:], potential[:] = start, (start**2).sum(1)
        memory.array("there.self_potential")[:] = 0.5 * self.epsilon * np.log(self.point_masses)
        stage = max(self.epsilon, (math.sqrt(float(potential.max())) + self._farthest()) ** 2 / 4)
        states = np.zeros(1, STATE)
        sample, known, request, exact = self._sample(), None, -1, True
        if sample:  # what is found from nothing is found for the sample first
            near, sums = sample._transport(start, potential.copy(), stage, 0.1 * LOOSE)
            if sums.error <= LOOSE:
                potential[:], stage = near, self.epsilon
        while True:
            request = go_on(request, states, memory.numbers, memory.places, self.epsilon, tolerance, max_steps, exact)
            if request == DONE:
                break
            if needs_evaluation(request):
                place, known = points.copy(), known if request == TIGHTEN else None
                potential[:], known = self._transport(place, potential.copy(), stage, float(states["inner"][0]), known)
                memory.array("there.rows")[:], memory.array("there.pulled")[:] = known.rows, known.pulled
                states["error"] = known.error
                stage = self.epsilon
            else:
                # Up to this length of an implicit step its shift outweighs all curvatures, and so the error of a sample.
                exact = not (sample and request == HESSIAN and not states["jumped"][0] and states["step"][0] < SLOW)
                self._put_hessian(memory, sample if sample and not exact else self)
        ends = (memory.array(f"here.{name}").copy() for name in ("points", "potential", "self_potential"))
        return (*ends, *(states[name][0] for name in ("residual", "steps", "status", "singular")))

    def adjoint(
        self, points: Array, potential: Array, self_potential: Array, cotangent: Array, ridge: float
    ) -> LargeAdjoint:
        """The solution of the linear system for the cotangent of X* in the frame, given what :meth:`solve` returned."""
        count, features, epsilon = self.count, self.features, self.epsilon
        memory = _memory(GRAPH, count, features)
        memory.array("point_masses")[:] = self.point_masses
        potential, sums = self._transport(points, potential.copy(), epsilon, 1e-12)
        for name, value in {"points": points, "potential": potential, "self_potential": self_potential}.items():
            memory.array(f"here.{name}")[:] = value
        self._put_hessian(memory, self)
        hessian = np.triu(memory.array("hessian")[: count * features, : count * features])
        hessian = hessian + np.triu(hessian, 1).T
        solution, residual, damped = solve_system(hessian, cotangent.ravel(), ridge, count)
        way = solution.reshape(count, features)
        left = cotangent - (hessian @ solution).reshape(count, features)

        answered = self._pass(_RESPONSE, points, potential, epsilon, count, way)
        overlap = np.triu(sums.overlap) + np.triu(sums.overlap, 1).T
        schur = np.diag(sums.rows) - overlap + 1.0 / count**2 + ROUNDING * np.eye(count)
        step: Array = np.linalg.lstsq(schur, answered, rcond=None)[0].astype(np.float64)
        pull = self._pass(_CHANGE, points, potential, epsilon, count * features, way, step).reshape(count, features)
        plan = memory.array("kept_self_plan")
        change = 2 * np.einsum("ikd,ikd->ik", points[:, None] - points[None], way[:, None] - way[None])
        turn = np.linalg.solve(np.diag(self.point_masses) + plan, (plan * change).sum(1))
        self_change = plan * (turn[:, None] + turn[None] - change) / epsilon
        slope = -2 * (points * pull).sum() + np.einsum("ik,id,kd->", self_change, points, points)
        total = 2 * sums.rows @ way  # rows of dP sum to zero
        moment = 2 * (way * sums.pulled + points * pull).sum(0)
        return LargeAdjoint(float(slope) / epsilon, total, moment, residual, damped, left, points, potential, way, step)

    def write(self, found: LargeAdjoint, *leaving: Any) -> None:
        """Writes the gradients in nodes and masses, to the fields of :class:`Leaving`."""
        where = Leaving(*leaving)
        self._pass(_GRADIENTS, found.points, found.potential, self.epsilon, 1, found.way, found.step, where)


class LargeAdjoint(NamedTuple):
    """The solution of the linear system of one graph, from which its gradients can be written."""

    epsilon: float  # gradient in epsilon
    total: Array  # sum over the nodes of their gradients g_j, (D,)
    moment: Array  # the same of y_j g_j, (D,)
    residual: float  # of the system, relative
    damped: bool  # H has flat directions, so that the ridge decides
    left: Array  # V - H W, along flat directions, (M, D)
    points: Array  # X*, (M, D)
    potential: Array  # f, (M,)
    way: Array  # W, (M, D)
    step: Array  # df, (M,)


def solve_system(hessian: Array, right: Array, ridge: float, count: int) -> tuple[Array, float, bool]:
    """``H (H H + lambda)^-1 V`` by eigenvectors; its residual; and whether H has flat directions.

    Args:
        hessian: H, ``(K, K)``.
        right: V, ``(K,)``.
        ridge: lambda in units of ``(2 / M)^2``.
        count: M.
    """
    if not np.isfinite(hessian).all():
        return np.full_like(right, np.nan), math.nan, True
    unit = 2.0 / count
    penalty = max(ridge, LEAST_RIDGE) * unit**2
    values, vectors = np.linalg.eigh(hessian)
    solution = vectors @ (values / (values**2 + penalty) * (vectors.T @ right))
    image = hessian @ right
    length = float(np.linalg.norm(image))
    missed = float(np.linalg.norm(hessian @ (hessian @ solution) + penalty * solution - image))
    return solution, missed / length if length > 0 else 0.0, bool(values[0] <= SINGULAR * unit)
