r"""What each point of a shared reference receives of a graph: the first step of the flow, seen from where it starts.

The flow forgets its reference: where it ends depends on the graph alone, apart from the choice among local minima. Here
the reference X stays where it is for all graphs, and may be learned. The nodes are sent to it by one entropic transport
(section 3.2 of the paper), and each point tells what it got:

.. math::
    P_{ij} = b_j \, \mathrm{softmax}_i\Bigl(\frac{f_i - C_{ij}}{\varepsilon} + \log a_i\Bigr), \qquad
    \hat x_i = \tfrac1{a_i} \sum_j P_{ij} y_j

With the potential f for which every point receives its share :math:`a_i = 1/M`, :math:`\hat x` is the barycentric map,
the place where one step of size one of the flow without debiasing puts the points. With free masses f is zero and the
marginal of the points is whatever comes out (semi-relaxed transport): nothing is iterated then.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flowpool import references
from flowpool.core.measures import Clouds, check_features, make_clouds, require_like
from flowpool.step.balance import balanced
from flowpool.step.ragged import products_of_rows, sums_of_products

_NOTHING = 1e-30  # share of a graph below which a point is told to have received nothing


class Received(NamedTuple):
    """What went where in each of B graphs.

    Attributes:
        masses: share of the graph that each point received, ``(B, M)``; sums to one, zeros for an empty graph. Times
            the number of nodes it counts them.
        points: mean of what each point received, ``(B, M, D)``; the reference point itself where that is nothing.
        variances: of each feature within what each point received, ``(B, M, D)``; zero where that is nothing.
    """

    masses: Tensor
    points: Tensor
    variances: Tensor


def transport_pool(
    nodes: Tensor,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    points: Tensor,
    epsilon: float | Tensor,
    free: bool = False,
    masses: Tensor | None = None,
    dim_size: int | None = None,
) -> Received:
    """How much of each graph goes to each reference point, and the mean and the variances of that share.

    The mean of the graph is the mean of the points weighted by their masses, and its variance is in the output too:
    that of the points plus the mean of their variances.

    Args:
        nodes: Y of all graphs, ``(N, D)``. Computed in float64, returned in the dtype given.
        batch: graph of each node, ``(N,)``, in any order.
        ptr: or the offsets of nodes sorted by graph, ``(B + 1,)``. With neither, all nodes form one graph.
        points: X, ``(M, D)``, shared by all graphs, in the coordinates of the nodes. A gradient flows to it.
        epsilon: entropic regularisation in units of the squared distance, a number or a scalar tensor. A large one
            sends the same mixture to every point, a small one sends each node to one point.
        free: the points receive whatever is near them, a soft histogram of the nodes over M prototypes; otherwise each
            receives 1/M of the graph, and the shape of the graph shows in where that lies.
        masses: b, ``(N,)``, not negative, normalised per graph; ``None``: equal.
        dim_size: B, to keep trailing graphs without nodes.

    Gradients in nodes, masses, points and epsilon are exact, without memory for the iterations; a second derivative is
    refused. A graph with NaN features has NaN rows.
    """
    check_features(nodes)
    references.check_shape(points, nodes.shape[1])
    require_like(points, nodes, "points")
    clouds, _ = precise_clouds(nodes, batch, ptr, masses, dim_size)
    level = torch.as_tensor(epsilon, dtype=clouds.nodes.dtype, device=nodes.device)
    value = epsilon.detach() if isinstance(epsilon, Tensor) else epsilon
    traced = torch.compiler.is_compiling() and isinstance(value, Tensor)  # its value is not known yet
    if level.dim() or not (traced or 0 < float(value) < math.inf):
        raise ValueError(f"epsilon is {epsilon}; pass one finite number > 0, in units of the squared distance.")
    return Received(*(value.to(nodes.dtype) for value in receive(clouds, points, level, free)))


def precise_clouds(
    nodes: Tensor, batch: Tensor | None, ptr: Tensor | None, masses: Tensor | None, dim_size: int | None
) -> tuple[Clouds, Tensor]:
    """:func:`flowpool.core.measures.make_clouds` in the precision in which plans are computed."""
    precision = torch.float32 if nodes.device.type == "mps" else torch.float64
    if isinstance(masses, Tensor):
        require_like(masses, nodes, "masses")
        masses = masses.to(precision)
    return make_clouds(nodes.to(precision), batch, ptr, masses, dim_size)


def receive(clouds: Clouds, points: Tensor, epsilon: float | Tensor, free: bool) -> Received:
    """:func:`transport_pool` of clouds from :func:`precise_clouds`, in their dtype."""
    dim, ptr = points.shape[1], clouds.ptr
    reference = points.to(clouds.nodes.dtype)
    # Squares of distances are differences of squares, in which offsets would cancel. No result depends on which offset
    # is taken off, so these have no gradient.
    with torch.no_grad():
        middle = reference.mean(0)  # (D,)
        mean = sums_of_products(clouds.masses.unsqueeze(-1), clouds.nodes, ptr).squeeze(1)  # (B, D)
    nearby = reference - middle
    deviations = clouds.nodes - mean[clouds.batch]
    terms = torch.cat([torch.ones_like(deviations[:, :1]), deviations], 1)  # (N, 1 + D)

    # -|x - y|^2 = 2 x.y - |x|^2 up to a number that is the same for all points, and y is its mean and its deviation.
    from_mean = (nearby * (2 * (mean - middle).unsqueeze(1) - nearby)).sum(-1, keepdim=True)  # (B, M, 1)
    coefficients = torch.cat([from_mean, 2 * nearby.expand(len(mean), -1, -1)], -1)  # (B, M, 1 + D)
    scores = products_of_rows(terms, coefficients.mT / epsilon, ptr)  # (N, M)
    portions = scores.softmax(-1) if free else balanced(scores, clouds.masses, ptr)
    plan = clouds.masses.unsqueeze(-1) * portions  # (N, M), P^T

    received, first = sums_of_products(plan, terms, ptr).split([1, dim], -1)  # (B, M, 1), (B, M, D)
    second = sums_of_products(plan, deviations.square(), ptr)
    # Next to nothing lies at every point from the start, so that there is a mean where nothing comes.
    place, total = reference - mean.unsqueeze(1), received + _NOTHING
    shift = (first + _NOTHING * place) / total
    variances = (second + _NOTHING * place.square()) / total - shift.square()
    return Received(received.squeeze(-1), mean.unsqueeze(1) + shift, variances)
