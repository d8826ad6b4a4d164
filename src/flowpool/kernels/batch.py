"""The kernels on a batch of graphs, as functions of NumPy arrays.

:func:`arrange` groups the nodes by graph, :func:`solve` pools, and :func:`adjoint` takes gradients back to what was given. They
check nothing but what would make the kernels read or write outside their arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowpool.core.law import STATE
from flowpool.kernels.adjoint import adjoint_graphs
from flowpool.kernels.machine.linear import padded
from flowpool.kernels.machine.threads import run
from flowpool.kernels.records import FACTS, Array, Found, Given, Gradients, Index, Kept
from flowpool.kernels.solve import solve_graphs

LONG = 20_000  # nodes times points from which a call may take longer than a person waits to interrupt it


def arrange(graph: Index, ptr: Index) -> Index:
    """The nodes grouped by graph, ``(N,)``, given the graph of each and the offsets of the groups, ``(B + 1,)``."""
    if not np.array_equal(np.diff(ptr), np.bincount(graph, minlength=len(ptr) - 1)):
        raise ValueError(f"ptr {ptr.shape} does not count the graphs of {len(graph)} nodes, {graph.shape}.")
    order: Index = np.argsort(graph, kind="stable")
    return order


def solve(given: Given, tolerance: float, max_steps: int, threads: int) -> tuple[Found, Kept]:
    """Pooled points, and what is kept for gradients.

    Args:
        tolerance: on the Newton step.
        max_steps: of all kinds together.
        threads: at most so many; the answer is the same for any number.
    """
    graphs, number, (count, features) = _check(given), len(given.nodes), given.reference.shape
    kept = Kept(
        np.empty(number, np.int64), np.zeros(number, np.int64), np.empty(number), np.zeros((number, features)),
        np.zeros((number + graphs * count, padded(features))), np.empty((graphs, 3, features)),
        np.zeros((graphs, FACTS)), np.zeros((graphs, count, features + 2)),
    )  # fmt: skip
    steps, status = np.zeros(graphs, np.int64), np.zeros(graphs, np.int8)
    found = Found(np.empty((graphs, count, features)), np.zeros(graphs), steps, status)
    turns, most, patient = _turns(given)

    def work(counter: Index) -> None:
        solve_graphs(given, tolerance, max_steps, most, turns, counter, np.zeros(1, STATE), kept, found)

    run(work, graphs, threads, patient)
    return found, kept


def adjoint(given: Given, kept: Kept, cotangent: Array, ridge: float, threads: int) -> Gradients:
    """Gradients of ``<cotangent, X*>``, given what :func:`solve` kept.

    Args:
        cotangent: V, ``(B, M, D)``.
        ridge: lambda of the Tikhonov term, in units of ``(2 / M)^2``.
    """
    graphs, number, (count, features) = _check(given), len(given.nodes), given.reference.shape
    _require(cotangent, (graphs, count, features), "cotangent")
    _require(kept.ends, (graphs, count, features + 2), "ends")
    _require(kept.coordinates, (number, features), "coordinates")
    gradients = Gradients(
        np.zeros((number, features)), np.zeros(number), np.zeros(graphs), np.zeros((graphs, features)),
        np.zeros(graphs), np.zeros(graphs, np.bool_),
    )  # fmt: skip
    turns, most, patient = _turns(given)

    def work(counter: Index) -> None:
        adjoint_graphs(given, kept, cotangent, ridge, most, turns, counter, gradients)

    run(work, graphs, threads, patient)
    return gradients


def _turns(given: Given) -> tuple[Index, int, bool]:
    """The graphs, the largest first; the size of that; and whether all together may take long."""
    sizes = np.diff(given.ptr)
    turns = np.argsort(-sizes, kind="stable")
    return turns, int(sizes.max(initial=0)), len(given.nodes) * len(given.point_masses) > LONG


def _check(given: Given) -> int:
    """The number of graphs, if the arrays fit together."""
    number, features = given.nodes.shape
    graphs, count = len(given.epsilon), len(given.reference)
    _require(given.nodes, (number, features), "nodes")
    if len(given.masses):
        _require(given.masses, (number,), "masses")
    _require(given.weights, (features,), "weights")
    _require(given.reference, (count, features), "reference")
    _require(given.point_masses, (count,), "point_masses")
    _require(given.epsilon, (graphs,), "epsilon")
    ptr, order = given.ptr, given.order
    _require(order, (number,), "order", np.int64)
    _require(ptr, (graphs + 1,), "ptr", np.int64)
    if ptr[0] != 0 or ptr[-1] != number or (np.diff(ptr) < 0).any():
        raise ValueError(f"ptr must rise from 0 to {number}, the number of nodes.")
    if number and (order.min() < 0 or order.max() >= number):
        raise ValueError(f"order must hold the places of {number} nodes.")
    return graphs


def _require(value: Array | Index, shape: tuple[int, ...], name: str, dtype: Any = np.float64) -> None:
    if value.shape != shape or value.dtype != dtype or not value.flags.c_contiguous:
        raise ValueError(
            f"{name} has shape {value.shape}, dtype {value.dtype}, strides {value.strides}; expected {shape}, "
            f"C-contiguous {np.dtype(dtype).name}."
        )
