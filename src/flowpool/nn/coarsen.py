r"""Hierarchical pooling: a graph of N nodes becomes a graph of M points, with the coupling as the assignment.

.. math:: X^* = \arg\min_X S_\varepsilon(X, Y), \qquad S_{ji} = P_{ij} / b_j, \qquad A^* = S^\top A S

P is the optimal coupling of the points with the nodes. Divided by the mass of its node it says which share of node j
belongs to point i: rows of S sum to one, as the soft clusters of other hierarchical pools do. Every edge is then handed
over whole, so that :math:`A^*` keeps the total weight of A, its rows the degrees :math:`S^\top A 1`, and its diagonal
what lies within a point. P itself would shrink the weights by :math:`N^2`, and :math:`P_{ij} / a_i`, which averages
over the nodes of a point, would give densities that forget how many edges there were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from flowpool import costs
from flowpool.core.measures import graphs_of
from flowpool.core.updates import UpdateStep
from flowpool.costs import CostFunction
from flowpool.engines.devices import precision_on
from flowpool.inputs import check_choice, check_like, checked_epsilon, checked_point_masses
from flowpool.nn.edges import check_edges, check_nodes, check_within
from flowpool.nn.pool import FlowPool
from flowpool.nn.report import Report
from flowpool.options import Engine, Gradient, OnFailure
from flowpool.step.in_torch import MORE_STEPS, newton_step, share_out, sums


@dataclass(frozen=True, eq=False)
class Coarsened:
    """A batch of B graphs of N nodes in all, as graphs of M points each.

    Attributes:
        x: X*, graph after graph, ``(B * M, D)``.
        adjacency: ``S^T A S`` of each graph, ``(B, M, M)``.
        edge_index: the same as edges, source and target, ``(2, E*)``: all pairs of points, loops too, of every graph
            that has edges.
        edge_weight: entry of the adjacency that belongs to each edge, ``(E*,)``.
        edge_attr: features of each edge, ``(E*, F)``; None if the nodes' edges have none.
        batch: graph of each point, ``(B * M,)``.
        assignment: S, the share of each node that belongs to each point of its graph, ``(N, M)``; rows sum to one.
        node_batch: graph of each node, ``(N,)``.
    """

    x: Tensor
    adjacency: Tensor
    edge_index: Tensor
    edge_weight: Tensor
    edge_attr: Tensor | None
    batch: Tensor
    assignment: Tensor
    node_batch: Tensor

    def lift(self, features: Tensor) -> Tensor:
        """Features of the points ``(B * M, F)`` brought back to the nodes, ``(N, F)``.

        A node gets the average of the points that it belongs to, weighted by S.
        """
        num_graphs, num_points, _ = self.adjacency.shape
        if features.dim() != 2 or features.shape[0] != num_graphs * num_points:
            raise ValueError(
                f"features has shape {tuple(features.shape)}; expected ({num_graphs * num_points}, num_features), one "
                f"row for each of the {num_points} points of {num_graphs} graphs."
            )
        check_like(features, self.assignment, "features", "assignment")
        values = features.to(self.assignment.dtype).view(num_graphs, num_points, features.shape[1])
        return (self.assignment.unsqueeze(1) @ values[self.node_batch]).squeeze(1)


class FlowCoarsen(nn.Module):
    r"""Graphs of M points each: X*, the adjacency :math:`S^\top A S`, and the way back to the nodes.

    Gradients reach the nodes through the points and through S, and the edges through the adjacency. All are exact: the
    points are differentiated through their optimality condition, the coupling through its own.

    Args:
        in_channels: number of features, D. It is needed at once: the reference is a buffer, which must exist before
            weights are loaded or moved.
        num_points: number of points, M.
        reference, seed: as in :class:`flowpool.FlowPool`, which is the submodule ``pool``.
        edge_attr: how the features of edges are handed over: ``"mean"``, weighted by how much of each edge runs between
            two points, or that weighted ``"sum"``.
        epsilon, relative, cost, debias, gradient, tolerance, max_steps, step_size, update_step, ridge, engine, on_failure:
            as in :class:`flowpool.FlowPool`.
    """

    def __init__(
        self,
        in_channels: int,
        num_points: int = 8,
        *,
        reference: Literal["normal"] | Tensor = "normal",
        seed: int = 0,
        edge_attr: Literal["mean", "sum"] = "mean",
        epsilon: float = 0.1,
        relative: bool = True,
        cost: str | CostFunction = "sqeuclidean",
        debias: bool = True,
        gradient: Gradient = "implicit",
        tolerance: float = 1e-5,
        max_steps: int = 1000,
        step_size: float | None = None,
        update_step: str | UpdateStep | None = None,
        ridge: float | None = None,
        engine: Engine = "auto",
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__()
        check_choice("edge_attr", edge_attr, ("mean", "sum"))
        self.edge_attr = edge_attr
        self.pool = FlowPool(
            in_channels, num_points, reference=reference, seed=seed, epsilon=epsilon, relative=relative, cost=cost,
            debias=debias, gradient=gradient, tolerance=tolerance, max_steps=max_steps, step_size=step_size,
            update_step=update_step, ridge=ridge, engine=engine, on_failure=on_failure,
        )  # fmt: skip

    @property
    def report(self) -> Report:
        """How well the last call in this thread went; a RuntimeError before the first one."""
        return self.pool.report

    def reset_parameters(self) -> None:
        """The reference that the layer was made with, and a fresh cost."""
        self.pool.reset_parameters()

    def __call__(self, *arguments: Any, **options: Any) -> Coarsened:
        return cast(Coarsened, super().__call__(*arguments, **options))

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        dim_size: int | None = None,
        *,
        masses: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> Coarsened:
        """The coarse graphs.

        Args:
            x: node features, ``(N, D)``.
            edge_index: edges from source to target, ``(2, E)``; an undirected edge stands in both directions.
            edge_weight: ``(E,)``; None: all one.
            batch: graph of each node, ``(N,)``, in any order; None: all nodes form one graph.
            dim_size: B, to keep trailing graphs without nodes. A graph without nodes has M points at zero and no
                edges.
            masses: of the nodes, ``(N,)``, not negative; None: all equal. A node without mass still hands its edges over.
            edge_attr: features of the edges, ``(E, F)``.
        """
        self.pool._check(x)
        check_edges(edge_index)
        if edge_index.device != x.device:
            raise ValueError(f"edge_index is on {edge_index.device}, x is on {x.device}; move one of them.")
        if masses is not None:
            check_like(masses, x, "masses", "x")
        num_edges = edge_index.shape[1]
        if edge_weight is not None:
            check_like(edge_weight, x, "edge_weight", "x")
            if edge_weight.shape != (num_edges,):
                raise ValueError(
                    f"edge_weight has shape {tuple(edge_weight.shape)}; expected ({num_edges},), one number per edge."
                )
        if edge_attr is not None:
            check_like(edge_attr, x, "edge_attr", "x")
            if edge_attr.dim() != 2 or edge_attr.shape[0] != num_edges:
                raise ValueError(
                    f"edge_attr has shape {tuple(edge_attr.shape)}; expected ({num_edges}, num_edge_features)."
                )
        check_nodes(edge_index, x.shape[0])
        offsets, node_batch = graphs_of(x.detach(), batch, None, None, dim_size)  # masses are checked by the pool
        check_within(edge_index, node_batch)
        num_graphs = len(offsets) - 1
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.pool.options.gradient != "none"):
            pooled = self.pool.pooled(x, node_batch, None, num_graphs, masses)
            self.pool._conclude(Report.of(pooled), x.device)
            shares = _assignment(self.pool, x, masses, node_batch, pooled.points)  # (N, M)
            adjacency, attributes = _coarse_edges(
                shares, edge_index, edge_weight, edge_attr, self.edge_attr, node_batch, num_graphs
            )
        pairs, chosen = _all_pairs(edge_index, node_batch, num_graphs, self.pool.num_points)
        return Coarsened(
            pooled.points.flatten(0, 1).to(x.dtype),
            adjacency.to(x.dtype),
            pairs,
            adjacency[chosen].flatten().to(x.dtype),
            None if attributes is None else attributes[chosen].flatten(0, 2).to(x.dtype),
            torch.arange(num_graphs, device=x.device).repeat_interleave(self.pool.num_points),
            shares.to(x.dtype),
            node_batch,
        )

    def extra_repr(self) -> str:
        return f"edge_attr={self.edge_attr!r}"


def _assignment(pool: FlowPool, x: Tensor, masses: Tensor | None, graph: Tensor, points: Tensor) -> Tensor:
    """S as a differentiable function of the nodes, of the points and of the cost's parameters, ``(N, M)``.

    The points are those that the flow ended with, ``(B, M, D)``; their coupling with the nodes is solved here once more.
    One further Newton step, which changes nothing, then tells autograd how the potentials depend on everything.
    """
    num_graphs, num_points, _ = points.shape
    broken = points.detach().isfinite().flatten(1).all(1).logical_not()  # (B,), not pooled: their rows are NaN
    precision = precision_on(x.device)
    nodes = x.to(precision).masked_fill(broken[graph, None], 0.0)
    points = points.to(precision).masked_fill(broken[:, None, None], 0.0)
    weights = torch.ones_like(nodes[:, :1]) if masses is None else masses.to(precision).unsqueeze(-1)
    weights = weights / sums(weights, graph, num_graphs)[graph]  # (N, 1)
    geometry = costs.geometry_of(pool.cost).to(precision, x.device)
    epsilon = checked_epsilon(pool.epsilon, num_graphs, nodes).unsqueeze(-1)  # (B, 1)
    if pool.relative:
        to_mean = geometry.pairwise(sums(weights * nodes, graph, num_graphs)[graph], nodes).unsqueeze(-1)
        unit = sums(weights * to_mean, graph, num_graphs)
        epsilon = epsilon * torch.where(unit > 0, unit, 1.0)  # in a graph that is one point all is shared equally
    scores = -geometry.pairwise(points[graph], nodes.unsqueeze(1)) / epsilon[graph]  # (N, M)
    equal = checked_point_masses(None, num_points, nodes)
    with torch.no_grad():
        found, _ = share_out(scores, weights, equal, graph, num_graphs, MORE_STEPS)
    log_shares = found.log() + scores - scores.detach()
    received = sums(weights * log_shares.softmax(-1), graph, num_graphs)
    change = newton_step(found, weights.detach(), equal - received, received.detach(), graph)
    return (log_shares + change[graph]).softmax(-1).masked_fill(broken[graph, None], torch.nan)


def _coarse_edges(
    shares: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor | None,
    edge_attr: Tensor | None,
    reduce: str,
    node_batch: Tensor,
    num_graphs: int,
) -> tuple[Tensor, Tensor | None]:
    """``S^T A S`` of each graph, ``(B, M, M)``, and the features between its points, ``(B, M, M, F)``."""
    source, target = edge_index
    ends = shares[target]  # (E, M)
    if edge_weight is not None:
        ends = ends * edge_weight.to(shares.dtype).unsqueeze(-1)
    adjacency = _handed_over(shares, sums(ends, source, len(shares)), node_batch, num_graphs)
    if edge_attr is None:
        return adjacency, None
    borne = (ends.unsqueeze(-1) * edge_attr.to(shares.dtype).unsqueeze(1)).flatten(1)  # (E, M * F)
    total = _handed_over(shares, sums(borne, source, len(shares)), node_batch, num_graphs)
    total = total.view(*adjacency.shape, edge_attr.shape[1])
    if reduce == "sum":
        return adjacency, total
    joined = (adjacency != 0).unsqueeze(-1)
    return adjacency, torch.where(joined, total / torch.where(joined, adjacency.unsqueeze(-1), 1.0), 0.0)


def _handed_over(shares: Tensor, values: Tensor, node_batch: Tensor, num_graphs: int) -> Tensor:
    """What the nodes ``(N, K)`` of each graph give to its points, by their shares, ``(B, M, K)``."""
    return torch.stack([sums(share * values, node_batch, num_graphs) for share in shares.split(1, 1)], 1)


def _all_pairs(edge_index: Tensor, node_batch: Tensor, num_graphs: int, num_points: int) -> tuple[Tensor, Tensor]:
    """All pairs of points of each graph that has edges, ``(2, E*)``, and these graphs.

    Which pairs there are follows from the graphs alone, not from values that may be zero and still have a gradient; and
    a graph without edges stays one, also for convolutions that do not look at weights.
    """
    chosen = torch.bincount(node_batch[edge_index[0]], minlength=num_graphs).nonzero().squeeze(-1)  # (K,)
    inside = torch.arange(num_points, device=chosen.device)
    sources = inside.repeat_interleave(num_points)
    targets = inside.repeat(num_points)
    pairs = torch.stack([sources, targets])  # (2, M * M)
    return (num_points * chosen[None, :, None] + pairs[:, None, :]).flatten(1), chosen
