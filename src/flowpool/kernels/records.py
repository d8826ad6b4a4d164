"""What the kernels are given, what they keep of it, and what they find: arrays of NumPy for a batch of graphs.

B graphs with N nodes of D features in all are pooled to M points each; graph g owns the places ``ptr[g] : ptr[g + 1]``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]

# What a graph is.
CLOUD, SINGLE, EMPTY, BROKEN = 0, 1, 2, 3

# Columns of ``Kept.facts``.
(
    RADIUS,  # R, for which the variances of the nodes sum to R^2
    UNIT,  # U, the same for weighted features
    KIND,
    HEAVY,  # distinct nodes with mass,
    DISTINCT,  # and all of them
    HULL,  # directions that the nodes with mass span,
    DIMENSION,  # and with the points of the start
    FACTS,
) = range(8)


class Given(NamedTuple):
    """A batch as the caller has it.

    Attributes:
        nodes: Y, in any order, ``(N, D)``.
        masses: b, not normalised, ``(N,)``; empty: equal.
        order: a node of its graph for each place, ``(N,)``.
        ptr: ``(B + 1,)``.
        weights: of the features in the cost, ``(D,)``.
        reference: X^(0), ``(M, D)``.
        point_masses: a, ``(M,)``.
        epsilon: ``(B,)``.
        relative: epsilon and the reference are in units of each graph.
        resolution: relative precision of the nodes; a direction in which they differ by less is left out.
    """

    nodes: Array
    masses: Array
    order: Index
    ptr: Index
    weights: Array
    reference: Array
    point_masses: Array
    epsilon: Array
    relative: bool
    resolution: float


class Kept(NamedTuple):
    """The graphs in frames of their own, and where their flows ended: all that gradients, plans and divergences need.

    In the frame of a graph a node x is ``y = (x - mean) / scale``. Equal nodes are one, and y is told by its coordinates
    along a basis, which the nodes with mass span, and the points with them.

    Attributes:
        order: which node of the caller is at each place: by graph, and in a graph by features, ``(N,)``.
        distinct: the number of its distinct node in the graph; those with mass come first, ``(N,)``.
        masses: b, summing to one in each graph, ``(N,)``.
        coordinates: of distinct nodes; those of graph g are the rows from ``ptr[g]`` on, ``(N, D)``.
        basis: unit vectors; those of graph g are the rows from ``ptr[g] + g M`` on, ``(N + B M, D)``, D rounded up to whole lanes.
        frame: mean, scale, and the share of the variance in each feature, ``(B, 3, D)``.
        facts: the columns above, ``(B, 7)``.
        ends: X* along the basis, then f and h, ``(B, M, D + 2)``.
    """

    order: Index
    distinct: Index
    masses: Array
    coordinates: Array
    basis: Array
    frame: Array
    facts: Array
    ends: Array


class Found(NamedTuple):
    """Pooled points.

    Attributes:
        points: X*, as the caller measures, ``(B, M, D)``; NaN for a broken graph.
        residual: length of the Newton step left at X*, ``(B,)``; NaN where there is no meaning in it.
        steps: ``(B,)``.
        status: codes of :class:`flowpool.Status`, ``(B,)``.
    """

    points: Array
    residual: Array
    steps: Index
    status: NDArray[np.int8]


class Gradients(NamedTuple):
    """Gradients of ``<V, X*>`` in what was given.

    Attributes:
        nodes: ``(N, D)``.
        masses: ``(N,)``; for equal masses in those that sum to one.
        epsilon: ``(B,)``.
        weights: ``(B, D)``, to be summed.
        residual: of the linear system, relative, ``(B,)``.
        damped: the Hessian is singular, so that the minimum-norm solution was taken, ``(B,)``.
    """

    nodes: Array
    masses: Array
    epsilon: Array
    weights: Array
    residual: Array
    damped: NDArray[np.bool_]
