"""The kernels on a batch of graphs, as functions of NumPy arrays.

:func:`arrange` sorts the nodes, :func:`frame` finds the frames of the graphs, :func:`begin` places the start in them,
:func:`solve` finds the stationary points, :func:`end` hands them out, and :func:`adjoint` takes gradients back to the
nodes as they were given. They check nothing but what would make the kernels read or write outside their arrays.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowpool.core.law import STATE
from flowpool.kernels.adjoint import adjoint_graphs
from flowpool.kernels.frame import (
    CLOUD,
    SINGLE,
    enter_frames,
    find_frames,
    leave_frames,
    order_nodes,
    place_points,
    place_start,
    share_masses,
    unshare_masses,
)
from flowpool.kernels.machine.threads import run
from flowpool.kernels.solve import solve_graphs

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Floats = NDArray[np.floating]  # in the precision of the caller, float32 or float64
_PRECISIONS = (np.dtype(np.float32), np.dtype(np.float64))
LONG = 20_000  # nodes times points from which a call may take longer than a person waits to interrupt it


class Batch(NamedTuple):
    """B ragged graphs: graph g owns the nodes ``ptr[g]:ptr[g + 1]``."""

    nodes: Floats  # Y, ordered, (N, D)
    masses: Array  # b, summing to one in each graph, (N,)
    ptr: Index  # (B + 1,)
    sizes: Index  # (B,)


class Frames(NamedTuple):
    """Where B graphs are solved, as :func:`flowpool.kernels.frame.find_frames` fills it; columns of one table."""

    mean: Array  # (B, D)
    scale: Array  # (B, D)
    share: Array  # (B, D)
    radius: Array  # (B,), R
    unit: Array  # (B,), U
    kind: Array  # (B,), one of those in flowpool.kernels.frame

    @staticmethod
    def of(table: Array) -> Frames:
        """The columns of a table ``(B, 3 D + 3)``."""
        features = table.shape[1] // 3 - 1
        parts = (table[:, k * features : (k + 1) * features] for k in range(3))
        return Frames(*parts, *table.T[3 * features :])


class Solved(NamedTuple):
    """End of the flow for each of B graphs, in its frame; zeros for those that need none.

    Attributes:
        points: X*, ``(B, M, D)``.
        potentials: f, ``(B, M)``.
        self_potentials: h, ``(B, M)``.
        residual: length of the Newton step left at X*, ``(B,)``.
        steps: ``(B,)`` int64.
        status: 0 stationary, 3 cut off by ``max_steps``, 5 overflow, ``(B,)`` int8.
        singular: the Hessian at X* is singular, ``(B,)`` bool.
    """

    points: Array
    potentials: Array
    self_potentials: Array
    residual: Array
    steps: Index
    status: NDArray[np.int8]
    singular: NDArray[np.bool_]


class Adjoint(NamedTuple):
    """Gradients of ``<V, X*>`` for B graphs with N nodes in all.

    Attributes:
        nodes: in the order and in the precision in which they were given, ``(N, D)``.
        masses: of the ordered nodes, up to a constant per graph, ``(N,)``.
        epsilon: ``(B,)``.
        weights: ``(D,)``.
        residual: of the linear system, relative, ``(B,)``.
        damped: the Hessian is singular, so that the minimum-norm solution was taken, ``(B,)`` bool.
    """

    nodes: Floats
    masses: Array
    epsilon: Array
    weights: Array
    residual: Array
    damped: NDArray[np.bool_]


class _Inside(NamedTuple):
    """Gradients in the frames of the graphs, as :func:`flowpool.kernels.adjoint.adjoint_graphs` fills it."""

    nodes: Array
    masses: Array
    epsilon: Array
    residual: Array
    damped: NDArray[np.bool_]


def arrange(nodes: Floats, graph: Index, ptr: Index) -> Index:
    """The order ``(N,)`` that sorts nodes by graph and then by features.

    Args:
        nodes: ``(N, D)``.
        graph: of each node, ``(N,)``, from 0 to B - 1.
        ptr: offsets of the sorted graphs, ``(B + 1,)``.
    """
    if graph.shape != (len(nodes),) or not np.array_equal(np.diff(ptr), np.bincount(graph, minlength=len(ptr) - 1)):
        raise ValueError(f"ptr {ptr.shape} does not count the graphs of {len(nodes)} nodes, {graph.shape}.")
    order, spare, keys = np.empty_like(graph), np.empty_like(graph), np.empty(len(graph))
    order_nodes(nodes, graph, ptr, _direction(nodes.shape[1]), order, spare, keys)
    return order


@lru_cache
def _direction(features: int) -> Array:
    """Any fixed direction tells different nodes apart."""
    direction: Array = np.cos(np.arange(1.0, features + 1.0))
    return direction


def share(given: Floats | None, order: Index, ptr: Index) -> Array:
    """Masses of the ordered nodes ``(N,)`` that sum to one in each graph, from ``(N,)`` in the caller's order, or equal."""
    if given is None:
        sizes = np.diff(ptr)
        return np.repeat(1.0 / np.maximum(sizes, 1), sizes)
    masses = np.empty(len(order))
    share_masses(given, order, ptr, masses)
    return masses


def unshare(grad: Array, given: Floats, order: Index, ptr: Index) -> Floats:
    """Gradient in the masses as they were given to :func:`share`."""
    result = np.empty_like(given)
    unshare_masses(grad, given, order, ptr, result)
    return result


def make_batch(nodes: Floats, masses: Array, ptr: Index) -> Batch:
    """The batch, if its arrays fit together."""
    if nodes.ndim != 2 or nodes.dtype not in _PRECISIONS or not nodes.flags.c_contiguous:
        raise ValueError(
            f"nodes has shape {nodes.shape}, dtype {nodes.dtype}, strides {nodes.strides}; expected two axes, "
            "C-contiguous, float32 or float64."
        )
    _require(masses, (len(nodes),), "masses")
    if ptr.ndim != 1 or not len(ptr) or ptr.dtype != np.int64 or not ptr.flags.c_contiguous:
        raise ValueError(f"ptr has shape {ptr.shape} and dtype {ptr.dtype}; expected one axis of int64.")
    sizes = np.diff(ptr)
    if ptr[0] != 0 or ptr[-1] != len(nodes) or (len(sizes) and sizes.min() < 0):
        raise ValueError(f"ptr must rise from 0 to {len(nodes)}, the number of nodes.")
    return Batch(nodes, masses, ptr, sizes)


def frame(batch: Batch, weights: Array) -> Array:
    """The table of :class:`Frames` of all graphs, given the weights of the features in the cost, ``(D,)``."""
    features = batch.nodes.shape[1]
    _require(weights, (features,), "weights")
    table = np.empty((len(batch.sizes), 3 * features + 3))
    find_frames(batch.nodes, batch.masses, batch.ptr, weights, *Frames.of(table))
    return table


def begin(frames: Frames, reference: Array, point_masses: Array, epsilon: Array, relative: bool) -> tuple[Array, Array]:
    """X^(0) ``(B, M, D)`` and epsilon ``(B,)`` in the frames, from the reference ``(M, D)`` and epsilon as given."""
    graphs, features = frames.mean.shape
    _require(reference, (len(reference), features), "reference")
    _require(point_masses, (len(reference),), "point_masses")
    _require(epsilon, (graphs,), "epsilon")
    start, level = np.empty((graphs, *reference.shape)), np.empty(graphs)
    place_start(reference, relative, point_masses, *frames[:2], *frames[3:5], epsilon, start, level)
    return start, level


def end(frames: Frames, solved: Solved, precision: np.dtype[Any]) -> Floats:
    """X* outside the frames, ``(B, M, D)``; the residual and the status of :class:`Solved` become those of the caller."""
    placed: Floats = np.empty(solved.points.shape, precision)
    place_points(
        solved.points, frames.mean, frames.scale, frames.kind, solved.singular, solved.residual, solved.status, placed
    )
    return placed


def solve(
    batch: Batch,
    frames: Frames,
    start: Array,
    point_masses: Array,
    epsilon: Array,
    resolution: float,
    tolerance: float,
    max_steps: int,
    threads: int,
) -> Solved:
    """Stationary points of the graphs in their frames.

    Args:
        start: X^(0) in the frames, ``(B, M, D)``.
        point_masses: a, ``(M,)``.
        epsilon: in the frames, ``(B,)``.
        resolution: relative precision of the nodes; a direction in which they differ by less is left out.
        tolerance: on the Newton step.
        max_steps: of all kinds together.
        threads: at most so many; the answer is the same for any number.
    """
    graphs, count, features = start.shape
    _require(start, (len(batch.sizes), count, batch.nodes.shape[1]), "start")
    _require(point_masses, (count,), "point_masses")
    _require(epsilon, (graphs,), "epsilon")
    result = Solved(
        np.zeros((graphs, count, features)),
        np.zeros((graphs, count)),
        np.zeros((graphs, count)),
        np.zeros(graphs),
        np.zeros(graphs, np.int64),
        np.zeros(graphs, np.int8),
        np.zeros(graphs, np.bool_),
    )
    nodes, masses, ptr, sizes = batch
    order = _clouds(sizes, frames)
    if len(order):
        most = int(sizes[order[0]])
        framed = _framed(batch, frames, order)
        bits = framed.view(np.int64)

        def work(counter: Index) -> None:
            solve_graphs(
                framed, bits, masses, ptr, most, start, point_masses, epsilon, resolution, tolerance, max_steps, order,
                counter, np.zeros(1, STATE), *result,
            )  # fmt: skip

        run(work, len(order), threads, patient=int(sizes[order].sum()) * count > LONG)
    return result


def adjoint(
    batch: Batch,
    order: Index,
    frames: Frames,
    weights: Array,
    reference: Array,
    points: Array,
    potentials: Array,
    self_potentials: Array,
    point_masses: Array,
    epsilon: Array,
    relative: bool,
    resolution: float,
    ridge: float,
    cotangent: Array,
    threads: int,
) -> Adjoint:
    """Gradients of ``<cotangent, X*>`` with X* outside the frames, given what :func:`solve` returned.

    Args:
        order: which node of the caller stands at each place, ``(N,)``.
        weights: as for :func:`frame`.
        reference: as for :func:`begin`.
        points, potentials, self_potentials: of :class:`Solved`.
        epsilon: as given, ``(B,)``.
        relative: as for :func:`begin`.
        ridge: lambda of the Tikhonov term in units of ``(2 / M)^2``.
        cotangent: V, ``(B, M, D)``.
        Others as for :func:`solve`.
    """
    graphs, count, features = points.shape
    nodes, masses, ptr, sizes = batch
    for value, name in ((points, "points"), (cotangent, "cotangent")):
        _require(value, (len(sizes), count, nodes.shape[1]), name)
    for value, name in ((potentials, "potentials"), (self_potentials, "self_potentials")):
        _require(value, (graphs, count), name)
    _require(point_masses, (count,), "point_masses")
    _require(epsilon, (graphs,), "epsilon")
    if order.shape != (len(nodes),):
        raise ValueError(f"order has shape {order.shape}; expected ({len(nodes)},).")
    start, level = begin(frames, reference, point_masses, epsilon, relative)
    # What flat directions leave of the cotangent belongs to the start, if that depends on the graph.
    follows = not (relative and np.all(weights == weights[0]))
    left = np.zeros((graphs if follows else 0, count, features))
    seed = cotangent * frames.scale[:, None]  # gradient in X* in the frame
    inside = _Inside(
        np.zeros((len(nodes), features)),
        np.zeros(len(nodes)),
        np.zeros(graphs),
        np.zeros(graphs),
        np.zeros(graphs, np.bool_),
    )
    to_nodes, to_masses = np.zeros(nodes.shape, nodes.dtype), np.zeros(len(nodes))
    to_weights = np.zeros((graphs, features))
    clouds = _clouds(sizes, frames)
    single = np.flatnonzero(frames.kind == SINGLE)
    others = np.concatenate([clouds, single])
    framed = _framed(batch, frames, others)
    if len(clouds):
        most = int(sizes[clouds[0]])
        bits = framed.view(np.int64)

        def work(counter: Index) -> None:
            adjoint_graphs(
                framed, bits, masses, ptr, most, points, potentials, self_potentials, point_masses, level, resolution,
                ridge, seed, clouds, counter, left, *inside,
            )  # fmt: skip

        run(work, len(clouds), threads, patient=int(sizes[clouds].sum()) * count > LONG)
    moment, to_radius = _begun(left, start if relative else points, frames.radius, relative)
    leave_frames(
        framed, masses, ptr, order, others, frames.kind, frames.scale, frames.share, weights, points, cotangent,
        relative, inside.nodes, inside.masses, moment, to_radius, np.empty((6, features)), to_nodes, to_masses, to_weights,
    )  # fmt: skip
    to_epsilon = inside.epsilon if relative else inside.epsilon / frames.unit**2
    return Adjoint(to_nodes, to_masses, to_epsilon, to_weights.sum(0), inside.residual, inside.damped)


def _begun(left: Array, kept: Array, radius: Array, relative: bool) -> tuple[Array, Array]:
    """What flat directions add in :func:`~flowpool.kernels.frame.frame_response`, given what they left of the cotangent.

    Along them the points are where they began, ``R reference / scale`` in the frame; or, if that is absolute, they stay
    whatever happens to the frame, and depend on its scale as the nodes do.

    Args:
        kept: the start in the frame, or X* there, ``(B, M, D)``.
    """
    moment = (left * kept).sum(1) if len(left) else np.zeros((len(kept), kept.shape[2]))
    return moment, moment.sum(1) / radius**2 if relative else np.zeros(len(kept))


def _clouds(sizes: Index, frames: Frames) -> Index:
    """The graphs that need the flow, the largest first."""
    order: Index = np.argsort(-sizes, kind="stable")
    chosen: Index = order[frames.kind[order] == CLOUD]
    return chosen


def _framed(batch: Batch, frames: Frames, graphs: Index) -> Array:
    """The nodes in their frames, ``(N, D)``; rows of other graphs stay untouched, and so cost no memory."""
    framed = np.empty(batch.nodes.shape)
    enter_frames(batch.nodes, batch.ptr, graphs, frames.mean, frames.scale, framed)
    return framed


def _require(value: Array, shape: tuple[int, ...], name: str) -> None:
    if value.shape != shape or value.dtype != np.float64 or not value.flags.c_contiguous:
        raise ValueError(
            f"{name} has shape {value.shape}, dtype {value.dtype}, strides {value.strides}; expected {shape}, "
            "C-contiguous float64."
        )
