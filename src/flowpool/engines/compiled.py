"""The compiled engine on tensors: pooling from the nodes as they were given to the points as they are handed out.

It computes what :mod:`flowpool.core.frame` and the torch engine specify, but order, frames, solution and gradients are kernels
of :mod:`flowpool.kernels`. Nothing here is seen by autograd; :mod:`flowpool.pooling` and :mod:`flowpool.engines.operators` do that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowpool.core.constants import hull_tolerance


class Given(NamedTuple):
    """What is pooled.

    Attributes:
        masses: b, ``(N,)``, checked but not normalised; ``None``: equal.
        order: which node of the caller stands at each place, ``(N,)``.
        ptr: offsets of the graphs, ``(B + 1,)``.
        epsilon: ``(B,)`` float64.
        weights: w of the cost ``|w (x - y)|^2``, ``(D,)`` float64; ``None``: one.
        point_masses: a, ``(M,)`` float64.
        relative: epsilon and the reference are in units of the graph.
        resolution: relative precision that the nodes were given in.
    """

    masses: Tensor | None
    order: Tensor
    ptr: Tensor
    epsilon: Tensor
    weights: Tensor | None
    point_masses: Tensor
    relative: bool
    resolution: float


class Ended(NamedTuple):
    """Pooled points of B graphs, and what their gradients and plans are computed from.

    Attributes:
        points: X*, in the precision of the nodes, ``(B, M, D)``; zeros for an empty graph, NaN for a broken one.
        residual: ``(B,)``, NaN for broken graphs.
        steps: ``(B,)``.
        status: :class:`flowpool.Status` codes, ``(B,)`` int8.
        singular: ``(B,)`` bool.
    """

    points: Tensor
    residual: Tensor
    steps: Tensor
    status: Tensor
    singular: Tensor
    inside: Tensor  # X* in the frames, (B, M, D); zeros for graphs without a flow
    potential: Tensor  # f, (B, M)
    self_potential: Tensor  # h, (B, M)
    nodes: Tensor  # Y, ordered, (N, D)
    masses: Tensor  # b, ordered, summing to one in each graph, (N,)
    frames: Tensor  # table of flowpool.kernels.engine.Frames, (B, 3 D + 3)


class Gradients(NamedTuple):
    """Gradients in what was given, in the order and the precision it was given in."""

    nodes: Tensor  # (N, D)
    masses: Tensor | None  # (N,)
    epsilon: Tensor  # (B,)
    weights: Tensor | None  # (D,)
    residual: Tensor  # of the linear solves, (B,)
    damped: Tensor  # the Hessian is singular, (B,) bool


def order_nodes(nodes: Tensor, graph: Tensor, num_graphs: int) -> tuple[Tensor, Tensor]:
    """Offsets of the graphs and order of the nodes, as :func:`flowpool.core.measures.arrange_nodes` has them."""
    from flowpool.kernels import engine

    rows, ids = _arrays(nodes, graph)
    ptr, order = engine.arrange(rows, ids, num_graphs)
    return torch.from_numpy(ptr), torch.from_numpy(order)


def solve(nodes: Tensor, given: Given, reference: Tensor, tolerance: float, max_steps: int) -> Ended:
    """The pooled points of nodes ``(N, D)``, float32 or float64, from the reference ``(M, D)``, float64."""
    from flowpool.kernels import engine

    order, ptr, level, weights, first = _arrays(given.order, given.ptr, given.epsilon, given.point_masses, reference)
    rows = _arrays(nodes)[0][order]
    masses = engine.share(None if given.masses is None else _arrays(given.masses)[0], order, ptr)
    batch = engine.make_batch(rows, masses, ptr)
    table = engine.frame(batch, _feature_weights(given, rows.shape[1]))
    frames = engine.Frames.of(table)
    start, epsilon = engine.begin(frames, first, level, given.relative)
    found = engine.solve(
        batch, frames, start, weights, epsilon, hull_tolerance(given.resolution), tolerance, max_steps,
        torch.get_num_threads(),
    )  # fmt: skip
    points = engine.end(frames, found, tolerance, rows.dtype)
    per_graph = (found.residual, found.steps, found.status, found.singular)
    ends = (found.points, found.potentials, found.self_potentials)
    return Ended(*map(torch.from_numpy, (points, *per_graph, *ends, rows, masses, table)))


def adjoint(ended: Ended, given: Given, cotangent: Tensor, ridge: float, wanted: set[str]) -> Gradients:
    """Gradients of ``<cotangent, points>``; those in masses and weights only where they are wanted.

    Args:
        ended: what :func:`solve` returned; from ``inside`` on its fields are read.
        cotangent: ``(B, M, D)``.
        ridge: as in :func:`flowpool.flow_pool`.
        wanted: of ``"nodes"``, ``"masses"``, ``"epsilon"`` and ``"weights"``.
    """
    from flowpool.kernels import engine

    inside, potential, self_potential, rows, masses, table = _arrays(*ended[5:])
    order, ptr, epsilon, weights, upstream = _arrays(
        given.order, given.ptr, given.epsilon, given.point_masses, cotangent.double()
    )
    found = engine.adjoint(
        engine.make_batch(rows, masses, ptr), order, engine.Frames.of(table), _feature_weights(given, rows.shape[1]),
        inside, potential, self_potential, weights, epsilon, given.relative, hull_tolerance(given.resolution), ridge, upstream,
        torch.get_num_threads(),
    )  # fmt: skip
    to_masses, to_weights = None, None
    if given.masses is not None and "masses" in wanted:
        to_masses = torch.from_numpy(engine.unshare(found.masses, _arrays(given.masses)[0], order, ptr))
    if given.weights is not None and "weights" in wanted:
        to_weights = torch.from_numpy(found.weights)
    nodes, to_epsilon, residual, damped = map(
        torch.from_numpy, (found.nodes, found.epsilon, found.residual, found.damped)
    )
    return Gradients(nodes, to_masses, to_epsilon, to_weights, residual, damped)


def _feature_weights(given: Given, features: int) -> Any:
    return np.ones(features) if given.weights is None else _arrays(given.weights)[0]


def _arrays(*tensors: Tensor) -> Any:
    return [tensor.detach().contiguous().numpy() for tensor in tensors]
