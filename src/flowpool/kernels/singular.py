"""The adjoint of one graph whose Hessian is singular or indefinite, by eigenvectors.

Nodes and points are turned into the few directions that they span, which the squared Euclidean cost does not notice. What
the cotangent has outside of them meets the Hessian ``2 Q``, for each direction the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowpool.core.hessian import DIRECT_LIMIT
from flowpool.kernels.large import Leaving, adjoint_large, solve_system

Array = NDArray[np.float64]
_FLAT = 1e-13  # size of a direction, relative to the largest, that is rounding


class SingularAdjoint(NamedTuple):
    """Gradients of ``<V, X*>`` of one graph in its frame."""

    nodes: Array  # (N, D)
    masses: Array  # (N,)
    epsilon: float
    residual: float  # of the linear system
    damped: bool  # the Hessian is singular, or the ridge no small correction


def adjoint_singular(
    nodes: Array,
    masses: Array,
    points: Array,
    potential: Array,
    self_potential: Array,
    point_masses: Array,
    epsilon: float,
    ridge: float,
    cotangent: Array,
) -> SingularAdjoint | None:
    """The minimum-norm adjoint, or None if the graph spans too many directions for eigenvectors.

    Args:
        nodes, masses: of the graph, in its frame, ``(N, D)`` and ``(N,)``.
        Others: one graph's part of the arguments of :func:`flowpool.kernels.engine.adjoint`.
    """
    count = len(points)
    basis = span(np.concatenate([nodes, points]))  # (K, D)
    width = len(basis)
    if count * width > DIRECT_LIMIT:
        return None
    turned, inside = (np.einsum("nd,kd->nk", rows, basis) for rows in (nodes, cotangent))
    ends = np.einsum("id,kd->ik", points, basis)
    found = adjoint_large(
        turned, np.zeros(width), np.ones(width), masses, ends, potential, self_potential, point_masses, epsilon, ridge,
        inside, threads=1,
    )  # fmt: skip
    to_turned, to_masses = np.empty_like(turned), np.empty(len(nodes))
    nothing = np.zeros(width)
    found.write(Leaving(np.arange(len(nodes)), nothing, nothing, nothing, 0.0, to_turned, to_masses))
    to_nodes = np.einsum("nk,kd->nd", to_turned, basis)

    damped = found.damped
    if width < nodes.shape[1]:
        outside = cotangent - np.einsum("ik,kd->id", inside, basis)
        way, _, flat = solve_system(2 * found.self_plan, outside, ridge, 2.0 / count)
        scores = (found.potential - (ends**2).sum(1) + 2 * np.einsum("nk,ik->ni", turned, ends)) / epsilon
        conditional = np.exp(scores - scores.max(1, keepdims=True))  # (N, M)
        conditional *= (masses / conditional.sum(1))[:, None]
        to_nodes += 2 * np.einsum("ni,id->nd", conditional, way)
        damped = damped or flat
    return SingularAdjoint(to_nodes, to_masses, found.epsilon, found.residual, damped)


def span(rows: Array) -> Array:
    """Orthonormal basis of what the rows span, ``(K, D)``."""
    _, sizes, directions = np.linalg.svd(np.linalg.qr(rows, mode="r"), full_matrices=False)
    basis: Array = directions[sizes > _FLAT * sizes[0]]
    return basis
