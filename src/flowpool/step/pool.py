r"""What each point of a shared reference receives of a graph: the first step of the flow, seen from where it starts.

The flow forgets its reference: where it ends depends on the graph alone, apart from the choice among local minima. Here
the reference X stays where it is for all graphs, and may be learned. The nodes are sent to it by one entropic transport
(section 3.2 of the paper), and each point tells what it got:

.. math::
    P_{ij} = b_j \, \mathrm{softmax}_i\Bigl(\frac{f_i - C_{ij}}{\varepsilon} + \log a_i\Bigr), \qquad
    \hat x_i = \tfrac1{a_i} \sum_j P_{ij} y_j

With the potential f for which every point receives its share :math:`a_i`, :math:`\hat x` is the barycentric map, the
place where one step of size one of the flow without debiasing puts the points. With free masses f is zero and the
marginal of the points is whatever comes out (semi-relaxed transport): nothing is iterated then.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowpool import costs, references
from flowpool.core.measures import check_features, graphs_of
from flowpool.costs import Cost, CostFunction
from flowpool.engines.devices import opaque, precision_on
from flowpool.inputs import (
    check_choice,
    check_flag,
    check_like,
    check_plain,
    checked_epsilon,
    checked_point_masses,
    may_look,
)
from flowpool.options import ENGINES, Engine
from flowpool.step.receive import FREE, RELATIVE, receive, use_kernels


class Received(NamedTuple):
    """What went where in each of B graphs.

    Attributes:
        masses: share of the graph that each point received, ``(B, M)``; sums to one, zeros for an empty graph. Times
            the number of nodes it counts them.
        points: mean of what each point received, ``(B, M, D)``; the reference point itself where that is nothing.
        variances: of each feature within what each point received, ``(B, M, D)``; zero where that is nothing.
        residual: the largest relative error of a share, ``(B,)``; zero with free masses.
        status: :class:`flowpool.Status` codes, ``(B,)`` int8. MAX_STEPS: the shares are not right to 1e-9, and ``residual`` says by
            how much.
    """

    masses: Tensor
    points: Tensor
    variances: Tensor
    residual: Tensor
    status: Tensor

    @property
    def deviations(self) -> Tensor:
        r"""Standard deviations :math:`\sigma`, the square roots of the variances, ``(B, M, D)``.

        The slope of the root is infinite at zero, that of :math:`\sigma` in the nodes is not: what moves a node by one
        moves :math:`\sigma` by at most one. So the gradient is bounded however small a variance is, and where it is
        zero, at the tip of a cone, it is the one of the axis: zero.
        """
        none = ~(self.variances > 0)
        # The inner one keeps the root away from zero, or its infinite slope would turn the gradient into NaN.
        return self.variances.masked_fill(none, 1.0).sqrt().masked_fill(none, 0.0)


def transport_pool(
    nodes: Tensor,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    reference: Tensor,
    masses: Tensor | None = None,
    point_masses: Tensor | None = None,
    dim_size: int | None = None,
    cost: str | CostFunction = "sqeuclidean",
    epsilon: float | Tensor = 0.1,
    relative: bool = True,
    free: bool = False,
    engine: Engine = "auto",
) -> Received:
    """How much of each graph goes to each reference point, and the mean and the variances of that share.

    Without ``free`` the points are where one step of size one of ``flow_pool(..., debias=False)`` puts the reference.
    The mean of the graph is the mean of the points weighted by their masses, and its variance is in the output too:
    that of the points plus the mean of their variances.

    Args:
        nodes: Y of all graphs, ``(N, D)``. Computed in float64, returned in the dtype given.
        batch: graph of each node, ``(N,)``, in any order.
        ptr: or the offsets of nodes sorted by graph, ``(B + 1,)``. With neither, all nodes form one graph.
        reference: X, ``(M, D)``, shared by all graphs. A gradient flows to it.
        masses: b, ``(N,)``, not negative, normalised per graph; ``None``: equal.
        point_masses: a, ``(M,)``, positive, normalised; ``None``: equal. With ``free`` they say how readily each point
            receives.
        dim_size: B, to keep trailing graphs without nodes.
        cost: squared Euclidean, or a diagonal :class:`flowpool.costs.Mahalanobis`, whose weights get a gradient.
        epsilon: entropic regularisation, a number, a scalar tensor, or one value per graph ``(B,)``. A large one sends
            the same mixture to every point, a small one sends each node to one point.
        relative: epsilon in units of each graph's mean cost to its mean (R^2, the sum of its variances), and the
            reference in units of R around its mean. Otherwise both are absolute: the reference then stands at the same
            place for all graphs, which is what tells their places apart.
        free: the points receive whatever is near them, a soft histogram of the nodes over M prototypes; otherwise each
            receives its share of the graph, and the shape of the graph shows in where that lies.
        engine: as in :func:`flowpool.flow_pool`.

    Gradients in nodes, masses, reference, point masses and epsilon are exact, without memory for the iterations; a
    second derivative is refused. A graph with NaN or infinite features has NaN rows, and touches no gradient of others.
    """
    check_features(nodes)
    check_plain(nodes)
    references.check_shape(reference, nodes.shape[1])
    if reference.device != nodes.device:
        raise ValueError(f"reference is on {reference.device}, nodes are on {nodes.device}; move one of them.")
    check_flag("relative", relative)
    check_flag("free", free)
    check_choice("engine", engine, ENGINES)
    given = checked_cost(cost, nodes.shape[1])
    if masses is not None:
        check_like(masses, nodes, "masses", "nodes")
        masses = masses.to(nodes.dtype)
    offsets, graph = graphs_of_nodes(nodes, batch, ptr, masses, dim_size)
    num_graphs = len(offsets) - 1
    precise = reference.to(precision_on(nodes.device))
    told = receive(
        *computable(nodes, masses),
        precise,
        checked_point_masses(point_masses, len(reference), precise),
        checked_epsilon(epsilon, num_graphs, precise),
        costs.geometry_of(given).to(precise.dtype, nodes.device).feature_weights,
        graph,
        offsets,
        switches=FREE * free + RELATIVE * relative,
        compiled=use_kernels(engine, nodes),
        limit=largest(torch.float64),
    )
    size, shape = precise.numel(), (num_graphs, *precise.shape)
    points, variances = told.rows[:, :size].reshape(shape), told.rows[:, size : 2 * size].reshape(shape)
    dtype = nodes.dtype
    return Received(told.received.to(dtype), points.to(dtype), variances.to(dtype), told.error, told.status)


def computable(nodes: Tensor, masses: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The nodes and their masses in a precision that is computed with."""
    dtype = torch.promote_types(nodes.dtype, torch.float32)
    return nodes.to(dtype), None if masses is None else masses.to(dtype)


def largest(dtype: torch.dtype) -> float:
    """Size of a feature up to which sums of squares stay finite in a precision."""
    return 1e150 if dtype == torch.float64 else 1e18


def graphs_of_nodes(
    nodes: Tensor, batch: Tensor | None, ptr: Tensor | None, masses: Tensor | None, num_graphs: int | None
) -> tuple[Tensor, Tensor]:
    """Offsets of the graphs once their nodes are sorted ``(B + 1,)`` and the graph of each node ``(N,)``, after all checks.

    What is on a device is not looked at where the number of graphs is known: that would be waiting for it.
    """
    if num_graphs is None or may_look(nodes):
        return graphs_of(nodes, batch, ptr, masses, num_graphs)
    if nodes.device.type == "cpu":
        return looked_at(nodes.detach(), batch, ptr, None if masses is None else masses.detach(), num_graphs)
    if ptr is not None:
        ptr = ptr.to(nodes.device)
        ids = torch.arange(num_graphs, device=nodes.device)
        return ptr, ids.repeat_interleave(ptr.diff(), output_size=len(nodes))
    if batch is None:
        batch = torch.zeros(len(nodes), dtype=torch.long, device=nodes.device)
    batch = batch.to(nodes.device, torch.long)
    sizes = batch.new_zeros(num_graphs + 1).index_add_(0, batch + 1, torch.ones_like(batch))
    return sizes.cumsum(0), batch


@opaque(
    lambda nodes, batch, ptr, masses, num_graphs: (
        nodes.new_empty(num_graphs + 1, dtype=torch.long),
        nodes.new_empty(nodes.shape[0], dtype=torch.long),
    )
)
def looked_at(
    nodes: Tensor, batch: Tensor | None, ptr: Tensor | None, masses: Tensor | None, num_graphs: int
) -> tuple[Tensor, Tensor]:
    """:func:`flowpool.core.measures.graphs_of` for traced graphs, whose values are not known before."""
    offsets, graph = graphs_of(nodes, batch, ptr, masses, num_graphs)
    return offsets.clone(), graph.clone()


def checked_cost(cost: str | CostFunction, num_features: int) -> Cost:
    """The cost as a module; raises unless it is one that the step knows."""
    given = costs.resolve(cost)
    costs.check_width(given, num_features)
    if not costs.is_weighing(given):
        raise ValueError(
            f"One step knows the squared Euclidean and the diagonal Mahalanobis cost, not {given}; "
            "use flow_pool or FlowPool, which take any cost."
        )
    return given
