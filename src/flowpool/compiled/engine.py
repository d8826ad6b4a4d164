"""The compiled engine as two functions of NumPy arrays: :func:`solve` and :func:`adjoint`.

They check nothing but what would make the kernels read or write outside their arrays. What graphs may be given, and what
becomes of the answers, is decided by :mod:`flowpool.pooling`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowpool.compiled.backward import adjoint_graphs
from flowpool.compiled.cloud import PLACES, scratch_size
from flowpool.compiled.flow import CLOCK
from flowpool.compiled.forward import solve_graphs
from flowpool.compiled.jit import announce
from flowpool.compiled.threads import run

Array = NDArray[np.float64]
LONG = 20_000  # nodes times points from which a call may take longer than a person waits to interrupt it

FEWEST = 8192  # nodes from which a graph is read in blocks
WIDEST = 512  # largest M D for which it is; the Hessian is formed then


class Solved(NamedTuple):
    """End of the flow for each of B graphs.

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
    steps: NDArray[np.int64]
    status: NDArray[np.int8]
    singular: NDArray[np.bool_]


class Adjoint(NamedTuple):
    """Gradients of ``<V, X*>`` for each of B graphs with N nodes in all.

    Attributes:
        nodes: ``(N, D)``.
        masses: ``(N,)``, up to a constant per graph.
        epsilon: ``(B,)``.
        residual: of the linear system, relative, ``(B,)``.
        ok: the Hessian is definite and the ridge a small correction; elsewhere all gradients are zero, ``(B,)`` bool.
    """

    nodes: Array
    masses: Array
    epsilon: Array
    residual: Array
    ok: NDArray[np.bool_]


def solve(
    nodes: Array,
    masses: Array,
    ptr: NDArray[np.int64],
    start: Array,
    point_masses: Array,
    epsilon: Array,
    resolution: float,
    tolerance: float,
    max_steps: int,
    threads: int,
) -> Solved:
    """Stationary points of a ragged batch of graphs, each centred and of variance one.

    Args:
        nodes: Y of all graphs, ``(N, D)``.
        masses: b, ``(N,)``, summing to one in each graph.
        ptr: graph g owns the nodes ``ptr[g]:ptr[g + 1]``, ``(B + 1,)``.
        start: X^(0), ``(B, M, D)``.
        point_masses: a, ``(M,)``.
        epsilon: ``(B,)``.
        resolution: relative precision of the nodes; a direction in which they differ by less is left out.
        tolerance: on the Newton step.
        max_steps: of all kinds together.
        threads: at most so many; the answer is the same for any number.
    """
    graphs, count, features = start.shape
    _check(nodes, masses, ptr, graphs, features)
    _require(start, (graphs, count, features), "start")
    _require(point_masses, (count,), "point_masses")
    _require(epsilon, (graphs,), "epsilon")
    result = Solved(
        np.empty((graphs, count, features)),
        np.empty((graphs, count)),
        np.empty((graphs, count)),
        np.empty(graphs),
        np.empty(graphs, np.int64),
        np.empty(graphs, np.int8),
        np.empty(graphs, np.bool_),
    )
    bits = nodes.view(np.int64)
    large = _is_large(ptr, count, features)

    order, most = _small_graphs(ptr, large)

    def work(counter: NDArray[np.int64]) -> None:
        solve_graphs(
            nodes, bits, masses, ptr, start, point_masses, epsilon, resolution, tolerance, max_steps, order, counter,
            np.zeros(1, CLOCK), *_scratch(count, features, most), *result,
        )  # fmt: skip

    if len(order):
        announce(solve_graphs)
        run(work, len(order), threads, patient=int(np.diff(ptr)[order].sum()) * count > LONG)
    for graph in np.flatnonzero(large):
        from flowpool.compiled.large import solve_large

        own = slice(ptr[graph], ptr[graph + 1])
        found = solve_large(
            nodes[own], masses[own], start[graph], point_masses, float(epsilon[graph]), tolerance, max_steps, threads
        )
        targets: tuple[NDArray[Any], ...] = result
        for target, value in zip(targets, found, strict=True):
            target[graph] = value
    return result


def adjoint(
    nodes: Array,
    masses: Array,
    ptr: NDArray[np.int64],
    points: Array,
    potentials: Array,
    self_potentials: Array,
    point_masses: Array,
    epsilon: Array,
    resolution: float,
    ridge: float,
    cotangent: Array,
    threads: int,
) -> Adjoint:
    """Gradients of ``<cotangent, X*>``, given what :func:`solve` returned.

    Args:
        points, potentials, self_potentials: of :class:`Solved`.
        ridge: lambda of the Tikhonov term in units of ``(2 / M)^2``.
        cotangent: V, ``(B, M, D)``.
        Others as for :func:`solve`.
    """
    graphs, count, features = points.shape
    _check(nodes, masses, ptr, graphs, features)
    for value, name in ((points, "points"), (cotangent, "cotangent")):
        _require(value, (graphs, count, features), name)
    for value, name in ((potentials, "potentials"), (self_potentials, "self_potentials")):
        _require(value, (graphs, count), name)
    _require(point_masses, (count,), "point_masses")
    _require(epsilon, (graphs,), "epsilon")
    result = Adjoint(
        np.zeros_like(nodes), np.zeros(len(nodes)), np.zeros(graphs), np.zeros(graphs), np.zeros(graphs, np.bool_)
    )
    bits = nodes.view(np.int64)
    large = _is_large(ptr, count, features)

    order, most = _small_graphs(ptr, large)

    def work(counter: NDArray[np.int64]) -> None:
        adjoint_graphs(
            nodes, bits, masses, ptr, points, potentials, self_potentials, point_masses, epsilon, resolution, ridge,
            cotangent, order, counter, *_scratch(count, features, most), *result,
        )  # fmt: skip

    if len(order):
        announce(adjoint_graphs)
        run(work, len(order), threads)
    for graph in np.flatnonzero(large):
        from flowpool.compiled.large import adjoint_large

        own = slice(ptr[graph], ptr[graph + 1])
        result.epsilon[graph], result.residual[graph], result.ok[graph] = adjoint_large(
            nodes[own], masses[own], points[graph], potentials[graph], self_potentials[graph], point_masses,
            float(epsilon[graph]), ridge, cotangent[graph], threads, result.nodes[own], result.masses[own],
        )  # fmt: skip
    return result


def _is_large(ptr: NDArray[np.int64], count: int, features: int) -> NDArray[np.bool_]:
    """Graphs whose nodes are read in blocks."""
    return (np.diff(ptr) >= FEWEST) & (count * features <= WIDEST)


def _small_graphs(ptr: NDArray[np.int64], large: NDArray[np.bool_]) -> tuple[NDArray[np.int64], int]:
    """The graphs that are solved one by one, the largest first, and the size of the largest."""
    sizes = np.diff(ptr)
    order = np.argsort(-sizes, kind="stable")
    order = order[~large[order]]
    return order, int(sizes[order[0]]) if len(order) else 0


def _scratch(count: int, features: int, most: int) -> tuple[NDArray[np.generic], ...]:
    """Memory of one thread for graphs of up to ``most`` nodes."""
    slots = 1 << max(2 * most - 1, 1).bit_length()
    return (
        np.zeros((1, scratch_size(count, features, most))),
        np.full(slots, -1, np.int64),
        np.empty(most, np.int64),
        np.empty(most),
        np.empty(most, np.int64),
        np.empty((PLACES, 2), np.int64),
    )


def _check(nodes: Array, masses: Array, ptr: NDArray[np.int64], graphs: int, features: int) -> None:
    _require(nodes, (len(nodes), features), "nodes")
    _require(masses, (len(nodes),), "masses")
    if ptr.shape != (graphs + 1,) or ptr.dtype != np.int64 or not ptr.flags.c_contiguous:
        raise ValueError(f"ptr has shape {ptr.shape} and dtype {ptr.dtype}; expected ({graphs + 1},) of int64.")
    if ptr[0] != 0 or ptr[-1] != len(nodes) or (np.diff(ptr) < 1).any():
        raise ValueError(f"ptr must rise from 0 to {len(nodes)}, the number of nodes; every graph needs a node.")


def _require(value: Array, shape: tuple[int, ...], name: str) -> None:
    if value.shape != shape or value.dtype != np.float64 or not value.flags.c_contiguous:
        raise ValueError(
            f"{name} has shape {value.shape}, dtype {value.dtype}, strides {value.strides}; expected {shape}, "
            "C-contiguous float64."
        )
