"""X* of one graph with very many nodes, in memory that does not grow with them.

The nodes are read in blocks straight from an array of any precision, and only then taken into their frame; no M x N array
exists, and none of the nodes in double precision. A pass over all blocks gives what one Newton iteration of the inner
problem needs, or the moments that make up the Hessian. Passes are spread over threads: each
takes the next chunk of blocks, and the sums of the chunks are added in their order, so that the bits do not depend on
the number of threads. What happens between passes is small, and decided by the law of the flow as for any other graph.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowpool.core.constants import DAMPING, LEAST_RIDGE, LOOSE, MAX_ITERATIONS, MISPLACED, ROUNDING, SINGULAR, STAGE
from flowpool.core.law import CLOCK, CURVE, FINISHED, advance, begin
from flowpool.kernels.cloud import fill_moment_columns
from flowpool.kernels.divergence import fill_gradient
from flowpool.kernels.flow import conclude, depart, has_equal_masses, move_to, needs_evaluation
from flowpool.kernels.hessian import assemble, pair_weights
from flowpool.kernels.machine.jit import entry, kernel
from flowpool.kernels.machine.lanes import WIDTH, load, multiply, store
from flowpool.kernels.machine.linear import padded, row_products
from flowpool.kernels.machine.memory import views
from flowpool.kernels.machine.rows import draw, rows_of, stay_apart
from flowpool.kernels.machine.threads import run
from flowpool.kernels.memory import BLOCK, GRAPH, GRAPH_PLACES, SIZES, arrange_graph, open_graph, set_graph_sizes
from flowpool.kernels.response import cost_changes, plan_changes, scale_direction
from flowpool.kernels.self_sinkhorn import solve_self_transport
from flowpool.kernels.sinkhorn import HOPELESS, STALLED, gibbs, marginals, propose, scale_rows

Array = NDArray[np.float64]

CHUNK = 64  # blocks that a thread takes at once

# What a pass collects.
_SUMS, _MOMENTS, _RESPONSE, _CHANGE, _GRADIENTS = 0, 1, 2, 3, 4


class _Memory(NamedTuple):
    """Arrays of :data:`~flowpool.kernels.memory.GRAPH`: of a block of nodes, or of the points alone."""

    sizes: NDArray[np.int64]
    places: NDArray[np.int64]
    numbers: Array

    def array(self, name: str) -> Array:
        found: Array = views(GRAPH, name, self.sizes, self.numbers, self.places)
        return found


@lru_cache(maxsize=64)
def _layout(count: int, features: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Sizes, places and numbers of the arrays of a graph with ``length`` nodes that span all features."""
    sizes, places = np.zeros(SIZES, np.int64), np.empty(GRAPH_PLACES, np.int64)
    set_graph_sizes(sizes, count, length, features, features, features)
    return sizes, places, int(arrange_graph(sizes, places))


def _memory(point_masses: Array, features: int, length: int) -> _Memory:
    sizes, places, numbers = _layout(len(point_masses), features, length)
    memory = _Memory(sizes, places, np.zeros(numbers))
    memory.array("point_masses")[:] = point_masses
    return memory


@kernel
def take_block(graph, nodes, mean, inverse, masses, place, size):  # type: ignore[no-untyped-def]
    """Fills the nodes ``place .. place + size`` in their frame, and their masses, with zeros up to a whole block."""
    stay_apart()
    features = graph.hull
    for j in range(graph.length):
        inside = j < size
        graph.nodes[0, j] = 1.0
        graph.masses[0, j] = masses[place + j] if inside else 0.0
        for d in range(features):
            graph.nodes[1 + d, j] = (nodes[place + j, d] - mean[d]) * inverse[d] if inside else 0.0


@kernel
def add_sums(graph, size, partial, chunk):  # type: ignore[no-untyped-def]
    """Adds ``P 1``, ``P A^T``, ``P Y`` and the sum over nodes of the logarithm in the objective."""
    stay_apart()
    count, features, length = graph.count, graph.hull, graph.length
    plan, pulled = graph.double.plan, graph.there.pulled
    row_products(plan, count, graph.double.conditional, 0, count, length, graph.overlap, False)
    row_products(plan, count, graph.nodes, 1, features, length, pulled, False)
    place = 0
    for i in range(count):
        partial[chunk, place] += graph.rows[0, i]
        place += 1
    for i in range(count):
        for k in range(count):
            partial[chunk, place] += graph.overlap[i, k]
            place += 1
    for i in range(count):
        for d in range(features):
            partial[chunk, place] += pulled[i, d]
            place += 1
    for j in range(size):
        partial[chunk, place] += graph.masses[0, j] * (graph.old_sums[0, j] + math.log(graph.sums[0, j]))


@kernel
def add_moments(graph, partial, chunk):  # type: ignore[no-untyped-def]
    """Adds the moments of the block."""
    stay_apart()
    count, lead, length = graph.count, graph.lead, graph.length
    pairs, columns = count * (count + 1) // 2, 1 + lead + lead * (lead + 1) // 2
    fill_moment_columns(graph.nodes, length, lead, lead)
    pair_weights(count, length, graph.double.conditional, graph.double.plan, graph.pairs)
    row_products(graph.pairs, pairs, graph.nodes, 0, columns, length, graph.moments, False)
    for p in range(pairs):
        for k in range(columns):
            partial[chunk, p * columns + k] += graph.moments[p, k]


@kernel
def add_change(graph, partial, chunk):  # type: ignore[no-untyped-def]
    """Adds ``dP Y``."""
    stay_apart()
    count, features, tangent, pulled = graph.count, graph.hull, graph.double, graph.there.pulled
    for j in range(0, graph.length, WIDTH):
        for i in range(count):
            store(tangent.plan, i, j, multiply(load(graph.masses, 0, j), load(tangent.change, i, j)))
    row_products(tangent.plan, count, graph.nodes, 1, features, graph.length, pulled, False)
    for i in range(count):
        for d in range(features):
            partial[chunk, i * features + d] += pulled[i, d]


@kernel
def write_block(graph, place, size, inverse, epsilon, order, frame, grad_nodes, grad_masses):  # type: ignore[no-untyped-def]
    """Writes gradients of the block's nodes and masses; ``frame`` holds shift, stretch, tilt and bend, ``(4, D)``."""
    stay_apart()
    count, features, tangent = graph.count, graph.hull, graph.double
    for j in range(size):
        to_mass = -epsilon * tangent.dual[0, j]
        for d in range(features):
            value = 0.0
            for i in range(count):
                value += tangent.conditional[i, j] * graph.solution[i, d]
                value += tangent.change[i, j] * graph.here.points[i, d]
            here = graph.nodes[1 + d, j]
            value = 2.0 * value * inverse[d] + frame[0, d] + frame[1, d] * here
            grad_nodes[order[place + j], d] = graph.masses[0, j] * value
            to_mass += (frame[2, d] + frame[3, d] * here) * here
        grad_masses[place + j] = to_mass


@entry
def sweep(  # type: ignore[no-untyped-def]
    mode, nodes, mean, inverse, masses, memory, places, points, potential, way, step, epsilon, counter, partial,
    order, frame, grad_nodes, grad_masses,
):  # fmt: skip
    """One pass over the chunks of blocks that are drawn from the counter; row k of ``partial`` gets the sums of chunk k.

    Args:
        mode: what to collect: ``P 1``, ``P A^T``, ``P Y`` and the objective; the moments; the right-hand side of the
            response to ``way``; given the change of f in ``step``, ``dP Y``; or nothing, but write the gradients.
        nodes, masses: of the graph, ``(N, D)`` and ``(N,)``.
        mean, inverse: of its frame, ``(D,)``; a node x is ``(x - mean) inverse`` there.
        memory, places: of this thread, for a block.
        points, potential: X, ``(M, D)`` and f, ``(1, M)``.
        order, frame, grad_nodes, grad_masses: as for :func:`write_block`.
    """
    graph = open_graph(memory, places)
    count, features, tangent = graph.count, graph.hull, graph.double
    for i in range(count):
        graph.scaling[0, i] = 1.0
        for d in range(padded(features)):
            graph.here.points[i, d] = points[i, d] if d < features else 0.0
            graph.solution[i, d] = way[i, d] if d < features else 0.0
    scale_rows(graph.here.points, features, count, rows_of(potential), epsilon, graph.scaled)
    scale_direction(graph.here.points, graph.solution, count, features, epsilon, tangent.scaled)
    number, span = nodes.shape[0], CHUNK * BLOCK
    while True:
        chunk = draw(counter)
        if chunk < 0 or chunk >= partial.shape[0]:
            break
        partial[chunk, :] = 0.0
        for place in range(chunk * span, min((chunk + 1) * span, number), BLOCK):
            size = min(BLOCK, number - place)
            take_block(graph, nodes, mean, inverse, masses, place, size)
            gibbs(graph.nodes, BLOCK, features, features, count, graph.scaled, graph.gibbs, graph.old_sums)
            marginals(
                graph.masses, BLOCK, count, graph.gibbs, graph.scaling, graph.sums, tangent.conditional, tangent.plan,
                graph.rows,
            )  # fmt: skip
            if mode == _SUMS:
                add_sums(graph, size, partial, chunk)
            elif mode == _MOMENTS:
                add_moments(graph, partial, chunk)
            else:
                cost_changes(graph.nodes, BLOCK, features, features, count, tangent, graph.small_right)
                if mode == _RESPONSE:
                    for i in range(count):
                        partial[chunk, i] += graph.small_right[0, i]
                else:
                    plan_changes(BLOCK, count, rows_of(step), tangent, tangent.conditional)
                    if mode == _CHANGE:
                        add_change(graph, partial, chunk)
                    else:
                        write_block(graph, place, size, inverse, epsilon, order, frame, grad_nodes, grad_masses)


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
def go_on(request, clocks, memory, places, epsilon, tolerance, max_steps):  # type: ignore[no-untyped-def]
    """What the flow needs next that only a pass over the nodes can give, or that it has finished.

    Args:
        request: what was asked for last and has been put in place: at ``there`` after an evaluation the potential, ``P Y``
            and ``P 1``, solved up to ``clock.error``; the moments after ``CURVE``. Negative: nothing was asked for yet.
    """
    clock, graph = clocks[0], open_graph(memory, places)
    equal = has_equal_masses(graph)
    if request < 0:
        return begin(clock, 0.0)
    while True:
        if needs_evaluation(request):
            own = solve_self_transport(graph, graph.there.points, graph.there.self_potential, epsilon, clock.inner)
            fill_gradient(graph, graph.there)
            if not clock.error < math.inf:
                graph.there.gradient[0, 0] = math.nan
            clock.error = max(clock.error, own)
        if request == CURVE:
            for i in range(graph.count):
                for k in range(padded(graph.count)):
                    graph.kept_self_plan[i, k] = graph.self_plan[i, k]
            if not assemble(graph, epsilon):
                graph.hessian[0, 0] = math.nan
        else:
            conclude(request, clock, graph, epsilon)
        request = advance(clock, graph.count, equal, tolerance, max_steps)
        if clock.arrived:
            move_to(graph.there, graph.here, graph)
        if needs_evaluation(request):
            depart(request, clock, graph)
        if request in (CURVE, FINISHED) or needs_evaluation(request):
            return request


@entry
def form(memory, places, epsilon):  # type: ignore[no-untyped-def]
    """The Hessian at ``here`` from the moments; whether it could be formed."""
    graph = open_graph(memory, places)
    solve_self_transport(graph, graph.here.points, graph.here.self_potential, epsilon, 1e-13)
    for i in range(graph.count):
        for k in range(padded(graph.count)):
            graph.kept_self_plan[i, k] = graph.self_plan[i, k]
    return assemble(graph, epsilon)


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
            memory = self._spare.pop() if self._spare else _memory(self.point_masses, self.features, BLOCK)
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
        found = self._pass(_SUMS, points, potential, epsilon, count + count * count + count * features + 1)
        rows, rest = found[:count], found[count:]
        overlap = rest[: count * count].reshape(count, count)
        pulled = rest[count * count : -1].reshape(count, features)
        objective = float(self.point_masses @ potential - epsilon * found[-1])
        return _Sums(rows, overlap, pulled, objective, float(np.abs(self.point_masses - rows).sum()))

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

    def _transport(self, points: Array, potential: Array, stage: float, tolerance: float) -> tuple[Array, _Sums]:
        """The potential and the sums at the solution; the iteration of :mod:`flowpool.kernels.sinkhorn`."""
        target, damping = max(tolerance, ROUNDING), DAMPING
        now = self._sums(points, potential, stage)
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
                better = trial.objective >= now.objective
            if better:
                potential, now = moved, trial
            damping *= 0.3 if better else 10.0
        return potential, now

    def _newton_step(self, sums: _Sums, ridge: float) -> Array:
        width = padded(self.count)
        rows, overlap = np.zeros((1, width)), np.zeros((self.count, width))
        rows[0, : self.count], overlap[:, : self.count] = sums.rows, sums.overlap
        step = np.zeros((1, width))
        newton_step(
            rows,
            overlap,
            self.point_masses,
            ridge,
            np.zeros_like(overlap),
            np.zeros((1, width)),
            np.zeros((1, width)),
            step,
        )
        return step[0, : self.count]

    def solve(self, start: Array, tolerance: float, max_steps: int) -> tuple[Any, ...]:
        """Points, potentials, self-potentials, residual, steps, status and singularity, as in :class:`engine.Solved`."""
        memory = _memory(self.point_masses, self.features, WIDTH)
        points, potential = memory.array("there.points"), memory.array("there.potential")[0]
        points[:], potential[:] = start, (start**2).sum(1)
        memory.array("there.self_potential")[:] = 0.5 * self.epsilon * np.log(self.point_masses)
        stage = max(self.epsilon, (math.sqrt(float(potential.max())) + self._farthest()) ** 2 / 4)
        clocks = np.zeros(1, CLOCK)
        request = -1
        while True:
            request = go_on(request, clocks, memory.numbers, memory.places, self.epsilon, tolerance, max_steps)
            if request == FINISHED:
                break
            if request == CURVE:
                here = memory.array("here.points").copy(), memory.array("here.potential")[0].copy()
                memory.array("moments")[:] = self._moments(*here)
            else:
                found, sums = self._transport(points.copy(), potential.copy(), stage, float(clocks["inner"][0]))
                potential[:] = found
                memory.array("there.rows")[:], memory.array("there.pulled")[:] = sums.rows, sums.pulled
                clocks["error"] = sums.error
                stage = self.epsilon
        ends = (memory.array(f"here.{name}").copy() for name in ("points", "potential", "self_potential"))
        return (*ends, *(clocks[name][0] for name in ("residual", "steps", "status", "singular")))

    def adjoint(
        self, points: Array, potential: Array, self_potential: Array, cotangent: Array, ridge: float
    ) -> LargeAdjoint:
        """The solution of the linear system for the cotangent of X* in the frame, given what :meth:`solve` returned."""
        count, features, epsilon = self.count, self.features, self.epsilon
        memory = _memory(self.point_masses, features, WIDTH)
        potential, sums = self._transport(points, potential.copy(), epsilon, 1e-12)
        values = {"points": points, "pulled": sums.pulled, "rows": sums.rows, "self_potential": self_potential}
        for name, value in values.items():
            memory.array(f"here.{name}")[:] = value
        memory.array("moments")[:] = self._moments(points, potential)
        formed = form(memory.numbers, memory.places, epsilon)
        hessian = np.triu(memory.array("hessian")[: count * features, : count * features])
        hessian = hessian + np.triu(hessian, 1).T
        solution, residual, damped = solve_system(
            hessian if formed else hessian * math.nan, cotangent.ravel(), ridge, count
        )
        way = solution.reshape(count, features)
        left = cotangent - (hessian @ solution).reshape(count, features)

        answered = self._pass(_RESPONSE, points, potential, epsilon, count, way)
        schur = np.diag(sums.rows) - sums.overlap + 1.0 / count**2 + ROUNDING * np.eye(count)
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
