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
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowpool import references
from flowpool.measures import Clouds, check_features, make_clouds, require_like

_NOTHING = 1e-30  # share of a graph below which a point is told to have received nothing
_PRECISION = 1e-10  # of the shares, in units of 1/M; the last Newton step squares it
_ROUGH = 0.1  # the same, before epsilon is lowered further
_COOLING = 4.0
_WIDE = 30.0  # range of the scores of a node, in units of epsilon, above which epsilon is approached from above
_MAX_STEPS = 200
_ROUNDING = 1e-14  # keeps the Hessian of a plan that leaves no doubt factorisable


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

    Gradients in nodes, masses, points and epsilon are exact, without memory for the iterations. A graph with NaN
    features has NaN rows.
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
    clouds, nearby = clouds.moved(clouds.nodes - middle), reference - middle
    centred = clouds.nodes
    cost = centred.square().sum(-1, keepdim=True) + nearby.square().sum(-1) - 2 * centred @ nearby.T  # (N, M)
    scores = -cost / level
    if not free:
        scores = scores + _potential(clouds, scores)[clouds.batch]
    plan = _plan(clouds, scores)  # (N, M), P^T

    received = clouds.sum(plan).unsqueeze(-1)  # (B, M, 1)
    mean = clouds.mean().unsqueeze(1)  # (B, 1, D)
    deviations = clouds.nodes - mean.squeeze(1)[clouds.batch]  # whose squares are as small as they can be
    first = _sums_of_products(plan, deviations, clouds.ptr) + _NOTHING * (nearby - mean)  # (B, M, D)
    second = _sums_of_products(plan, deviations.square(), clouds.ptr)
    shift = first / (received + _NOTHING)
    variances = (second - received * shift.square()) / (received + _NOTHING)
    values = received.squeeze(-1), middle + mean + shift, variances
    return Received(*(value.to(nodes.dtype) for value in values))


@torch.library.custom_op("flowpool::sums_of_products", mutates_args=())
def _sums_of_products(left: Tensor, right: Tensor, ptr: Tensor) -> Tensor:
    """Sum of the outer products of the rows ``(N, K)`` and ``(N, L)`` over each graph, ``(B, K, L)``.

    One product of matrices per graph: there may be no room for all outer products, and sorting them back into graphs
    takes longer than computing them.
    """
    total = left.new_zeros(ptr.shape[0] - 1, left.shape[1], right.shape[1])
    for graph, (start, end) in enumerate(pairwise(ptr.tolist())):
        torch.mm(left[start:end].T, right[start:end], out=total[graph])
    return total


@torch.library.custom_op("flowpool::products_of_rows", mutates_args=())
def _products_of_rows(rows: Tensor, matrices: Tensor, ptr: Tensor) -> Tensor:
    """Each row ``(N, K)`` times the matrix of its graph ``(B, K, L)``, ``(N, L)``."""
    products = rows.new_empty(rows.shape[0], matrices.shape[2])
    for graph, (start, end) in enumerate(pairwise(ptr.tolist())):
        torch.mm(rows[start:end], matrices[graph], out=products[start:end])
    return products


@_sums_of_products.register_fake
def _(left: Tensor, right: Tensor, ptr: Tensor) -> Tensor:
    return left.new_empty(ptr.shape[0] - 1, left.shape[1], right.shape[1])


@_products_of_rows.register_fake
def _(rows: Tensor, matrices: Tensor, ptr: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


def _keep_factors(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_sums(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
    left, right, ptr = ctx.saved_tensors
    return _products_of_rows(right, upstream.mT, ptr), _products_of_rows(left, upstream, ptr), None


_sums_of_products.register_autograd(_differentiate_sums, setup_context=_keep_factors)


def _plan(clouds: Clouds, scores: Tensor) -> Tensor:
    """Each node's mass, divided among the points, ``(N, M)``."""
    return clouds.masses.unsqueeze(-1) * scores.softmax(-1)


def _potential(clouds: Clouds, scores: Tensor) -> Tensor:
    """f / epsilon for which every point receives 1/M, ``(B, M)``, differentiable in masses and scores."""
    potential: Tensor
    factor: Tensor
    potential, factor = _balance(clouds.masses.detach(), clouds.ptr, clouds.batch, scores.detach())
    # The derivative of the maximum is that of one Newton step from it.
    missing = _missing(clouds, _plan(clouds, scores + potential[clouds.batch]))
    return potential + torch.cholesky_solve(missing.unsqueeze(-1), factor).squeeze(-1)


@torch.library.custom_op("flowpool::balance", mutates_args=())
def _balance(masses: Tensor, ptr: Tensor, batch: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of the concave semi-dual ``(B, M)``, and the factor of minus its Hessian there ``(B, M, M)``.

    By Newton's method. The third derivative along a direction is bounded by the second times the range of the
    direction, so log(1 + range) / range of Newton's step always ascends (Sun and Tran-Dinh, 2019) and nothing has to be
    searched. Such steps are short where epsilon is small: it is then lowered bit by bit.
    """
    clouds = Clouds(scores, masses, ptr, batch)
    heat = _first_heat(clouds, scores)  # (B, 1), of each graph: it never feels what the others need
    potential = _sinkhorn_step(clouds, scores / heat[batch])
    for _ in range(_MAX_STEPS):
        missing, factor = _newton_system(clouds, scores / heat[batch], potential)
        error = scores.shape[1] * missing.abs().amax(-1, keepdim=True)  # (B, 1); that of NaN is never too large
        going = error > torch.where(heat > 1, _ROUGH, _PRECISION)
        if not bool((going | (heat > 1)).any()):
            break
        step = torch.cholesky_solve(missing.unsqueeze(-1), factor).squeeze(-1)
        width = step.amax(-1, keepdim=True) - step.amin(-1, keepdim=True) + _NOTHING
        cooler = (heat / _COOLING).clamp(min=1)
        potential = torch.where(going, potential + step * width.log1p() / width, potential * heat / cooler)
        heat = torch.where(going, heat, cooler)
    return potential, factor


@_balance.register_fake
def _(masses: Tensor, ptr: Tensor, batch: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    num_graphs, num_points = ptr.shape[0] - 1, scores.shape[1]
    return scores.new_empty(num_graphs, num_points), scores.new_empty(num_graphs, num_points, num_points)


def _first_heat(clouds: Clouds, scores: Tensor) -> Tensor:
    """Factor by which epsilon is first enlarged, ``(B, 1)``, so that the scores of a graph are not too far apart."""
    ranges = scores.amax(-1) - scores.amin(-1)  # (N,)
    widest = ranges.new_zeros(clouds.num_graphs).scatter_reduce(0, clouds.batch, ranges, "amax").unsqueeze(-1)
    return torch.where(widest > _WIDE, widest / _WIDE, 1.0)  # a range of NaN is left alone


def _sinkhorn_step(clouds: Clouds, scores: Tensor) -> Tensor:
    """A first potential, ``(B, M)``, under which no point is left out."""
    weights = scores - scores.logsumexp(-1, keepdim=True) + clouds.masses.log().unsqueeze(-1)  # (N, M)
    lowest = weights.new_full((clouds.num_graphs, scores.shape[1]), -math.inf)
    highest = lowest.scatter_reduce(0, clouds.batch.unsqueeze(-1).expand_as(weights), weights, "amax")  # (B, M)
    total = highest + clouds.sum((weights - highest[clouds.batch]).exp()).log()
    return torch.where(clouds.sizes.unsqueeze(-1) > 0, -total, 0.0)


def _newton_system(clouds: Clouds, scores: Tensor, potential: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the semi-dual ``(B, M)``, and the Cholesky factor of minus its Hessian ``(B, M, M)``."""
    plan = _plan(clouds, scores + potential[clouds.batch])  # (N, M)
    received = clouds.sum(plan)
    portions = plan / clouds.masses.unsqueeze(-1).clamp(min=_NOTHING)
    shared = _sums_of_products(plan, portions, clouds.ptr)  # (B, M, M)
    # The constant is free and changes nothing; the outer product ties it down.
    hessian = torch.diag_embed(received) - shared + received.unsqueeze(-1) * received.unsqueeze(-2)
    ridge = _ROUNDING * torch.eye(scores.shape[1], dtype=scores.dtype, device=scores.device)
    return _missing(clouds, plan), torch.linalg.cholesky_ex(hessian + ridge).L


def _missing(clouds: Clouds, plan: Tensor) -> Tensor:
    """What each point still lacks of its share, ``(B, M)``; nothing in an empty graph, which has nothing to give."""
    return torch.where(clouds.sizes.unsqueeze(-1) > 0, 1 / plan.shape[1] - clouds.sum(plan), 0.0)
