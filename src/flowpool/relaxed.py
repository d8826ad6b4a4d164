r"""Pooling with free point masses: how much of a graph goes to each point of a shared reference, and what.

Transport to M points of equal mass has to hand every point its share 1/M, whatever the graph is made of; the
composition of the graph then shows only in where the points end. Semi-relaxed transport keeps the marginal of the nodes
and sets the one of the points free, in the same entropic problem (section 3.2 of the paper):

.. math::
    \min_{P \ge 0,\; P^\top 1 = b} \langle P, C(X, Y)\rangle + \varepsilon \, \mathrm{KL}(P \,|\, \tfrac1M 1 b^\top)
    \quad\Rightarrow\quad P_{ij} = b_j \, \mathrm{softmax}_i(-C_{ij} / \varepsilon)

There is nothing to iterate and no flow: the reference X stays where it is for all graphs, and may be learned.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flowpool import references
from flowpool.measures import check_features, make_clouds, require_like

_NOTHING = 1e-30  # share of a graph below which a point is told to have received nothing


class Relaxed(NamedTuple):
    """What went where in each of B graphs.

    Attributes:
        masses: a, the share of the graph that each point received, ``(B, M)``; sums to one, zeros for an empty graph.
            Times the number of nodes it counts them.
        points: mean of what each point received, ``(B, M, D)``; the reference point itself where that is nothing.
    """

    masses: Tensor
    points: Tensor


def relaxed_pool(
    nodes: Tensor,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    points: Tensor,
    epsilon: float | Tensor,
    masses: Tensor | None = None,
    dim_size: int | None = None,
) -> Relaxed:
    r"""The share of each graph that goes to each reference point, and the mean of that share.

    .. math:: a_i = \sum_j P_{ij}, \qquad \hat x_i = \tfrac1{a_i} \sum_j P_{ij} y_j

    It helps where graphs differ in how much of what they hold, rather than in its shape: a soft histogram of the nodes
    over M prototypes, with the place of each bin's content. The mean of the graph is :math:`\sum_i a_i \hat x_i`. For
    a large epsilon every point receives 1/M of everything; for a small one each node goes to its nearest point.
    :func:`flowpool.flow_pool` differs twice: its points have fixed masses, and they move until they are nearest to the
    graph in Sinkhorn divergence. Here the reference looks at each graph once, from where it is.

    Args:
        nodes: Y of all graphs, ``(N, D)``. Computed in float64, returned in the dtype given.
        batch: graph of each node, ``(N,)``, in any order.
        ptr: or the offsets of nodes sorted by graph, ``(B + 1,)``. With neither, all nodes form one graph.
        points: X, ``(M, D)``, shared by all graphs, in the coordinates of the nodes. A gradient flows to it.
        epsilon: entropic regularisation in units of the squared distance, a number or a scalar tensor.
        masses: b, ``(N,)``, not negative, normalised per graph; ``None``: equal.
        dim_size: B, to keep trailing graphs without nodes.

    Gradients in nodes, masses, points and epsilon are those of the formulas. A graph with NaN features has NaN rows.
    """
    check_features(nodes)
    references.check_shape(points, nodes.shape[1])
    require_like(points, nodes, "points")
    precision = torch.float32 if nodes.device.type == "mps" else torch.float64
    if isinstance(masses, Tensor):
        require_like(masses, nodes, "masses")
        masses = masses.to(precision)
    clouds, _ = make_clouds(nodes.to(precision), batch, ptr, masses, dim_size)
    level = torch.as_tensor(epsilon, dtype=precision, device=nodes.device)
    value = epsilon.detach() if isinstance(epsilon, Tensor) else epsilon
    traced = torch.compiler.is_compiling() and isinstance(value, Tensor)  # its value is not known yet
    if level.dim() or not (traced or 0 < float(value) < math.inf):
        raise ValueError(f"epsilon is {epsilon}; pass one finite number > 0, in units of the squared distance.")

    reference = points.to(precision)
    middle = reference.detach().mean(0)  # squares of distances are differences of squares: offsets would cancel
    centred, nearby = clouds.nodes - middle, reference - middle
    cost = centred.square().sum(-1, keepdim=True) + nearby.square().sum(-1) - 2 * centred @ nearby.T  # (N, M)
    plan = clouds.masses.unsqueeze(-1) * (-cost / level).softmax(-1)  # (N, M), P^T

    received = clouds.sum(plan)  # (B, M)
    # One point after the other, for there may be no room for (N, M, D).
    moments = torch.stack([clouds.sum(share.unsqueeze(-1) * centred) for share in plan.unbind(-1)], 1)  # (B, M, D)
    means = (moments + _NOTHING * nearby) / (received.unsqueeze(-1) + _NOTHING)
    return Relaxed(received.to(nodes.dtype), (means + middle).to(nodes.dtype))
