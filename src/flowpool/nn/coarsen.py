r"""Hierarchical pooling: a graph of N nodes becomes a graph of M points, with the coupling as the assignment.

.. math:: X^* = \arg\min_X S_\varepsilon(X, Y), \qquad S_{ji} = P_{ij} / b_j, \qquad A^* = S^\top A S

P is the optimal coupling of the points with the nodes. Divided by the mass of its node it says which share of node j
belongs to point i: rows of S sum to one, as the soft clusters of other hierarchical pools do. Every edge is then handed
over whole, so that :math:`A^*` keeps the total weight of A, its rows the degrees :math:`S^\top A 1`, and its diagonal
what lies within a point. P itself would shrink the weights by :math:`N^2`, and :math:`P_{ij} / a_i`, which averages
over the nodes of a point, would give densities that forget how many edges there were.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from flowpool import costs
from flowpool.core import sinkhorn
from flowpool.core.constants import RIDGE
from flowpool.core.frame import Frame, make_frame
from flowpool.core.measures import check_features, checked_index, make_clouds, require_like
from flowpool.costs import CostFunction
from flowpool.engines import torch_engine as batching
from flowpool.nn.edges import check_edges, check_within
from flowpool.nn.pool import FlowPool, Report
from flowpool.pooling import Pooled


@dataclass(frozen=True, eq=False)
class Coarsened:
    """A batch of B graphs of N nodes in all, as graphs of M points each.

    Attributes:
        x: X*, graph after graph, ``(B * M, D)``.
        adjacency: ``S^T A S`` of each graph, ``(B, M, M)``.
        edge_index: the same as edges, source and target, ``(2, E*)``: all pairs of points, loops too, of every graph
            that has edges.
        edge_weight: entry of the adjacency that belongs to each edge, ``(E*,)``.
        batch: graph of each point, ``(B * M,)``.
        assignment: S, the share of each node that belongs to each point of its graph, ``(N, M)``; rows sum to one.
        node_batch: graph of each node, ``(N,)``.
    """

    x: Tensor
    adjacency: Tensor
    edge_index: Tensor
    edge_weight: Tensor
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
        require_like(features, self.assignment, "features")
        order, sizes = _grouped(self.node_batch, num_graphs)
        shares = self.assignment[order].split(sizes)  # B of (N_g, M)
        values = features.view(num_graphs, num_points, features.shape[1])
        # One product per graph: a row of features for every pair of node and point would not fit for large graphs.
        parts = (own @ value for own, value in zip(shares, values.unbind(), strict=True))
        return torch.cat([features[:0], *parts])[order.argsort()]


class FlowCoarsen(nn.Module):
    r"""Graphs of M points each: X*, the adjacency :math:`S^\top A S`, and the way back to the nodes.

    Gradients reach the nodes through the points and through S, and the edge weights through the adjacency. All are
    exact: the points are differentiated through their optimality condition, the coupling through its own.

    Args:
        num_points: M.
        in_channels: D. Asked for at once, not found out at the first call: the reference is a buffer, which has to be
            there before weights are loaded or moved.
        reference, seed, epsilon, relative, cost, tolerance, max_steps, ridge, engine, on_failure: as in
            :class:`flowpool.FlowPool`, which is the submodule ``pool``.
    """

    def __init__(
        self,
        num_points: int,
        in_channels: int,
        *,
        epsilon: float = 0.1,
        relative: bool = True,
        cost: str | CostFunction = "sqeuclidean",
        reference: Literal["normal"] | Tensor = "normal",
        seed: int = 0,
        tolerance: float = 1e-5,
        max_steps: int = 1000,
        ridge: float = RIDGE,
        engine: Literal["auto", "compiled", "torch"] = "auto",
        on_failure: Literal["ignore", "warn", "raise"] = "warn",
    ) -> None:
        super().__init__()
        self.pool = FlowPool(
            in_channels,
            num_points,
            epsilon=epsilon,
            relative=relative,
            cost=cost,
            reference=reference,
            seed=seed,
            tolerance=tolerance,
            max_steps=max_steps,
            ridge=ridge,
            engine=engine,
            on_failure=on_failure,
        )

    @property
    def report(self) -> Report | None:
        """How well the last call in this thread went; None before the first one."""
        return self.pool.report

    def reset_parameters(self) -> None:
        """The reference that the layer was made with, and a fresh cost."""
        self.pool.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        dim_size: int | None = None,
    ) -> Coarsened:
        """The coarse graphs.

        Args:
            x: node features, ``(N, D)``.
            edge_index: edges from source to target, ``(2, E)``; an undirected edge stands in both directions.
            edge_weight: ``(E,)``; None: all one.
            batch: graph of each node, ``(N,)``, in any order; None: all nodes form one graph.
            dim_size: B, to keep trailing graphs without nodes. A graph without nodes has M points at zero and no
                edges.
        """
        check_features(x)
        check_edges(edge_index, x.shape[0])
        if edge_index.device != x.device:
            raise ValueError(f"edge_index is on {edge_index.device}, the nodes are on {x.device}; move one of them.")
        if edge_weight is not None:
            _check_weights(edge_weight, edge_index, x)
        node_batch = torch.zeros_like(x[:, 0], dtype=torch.long)
        if batch is not None:
            node_batch = checked_index(batch, x.shape[0], dim_size).to(x.device)
        check_within(edge_index, node_batch)

        pooled = self.pool.pooled(x, batch, dim_size=dim_size)
        self.pool._conclude(pooled)
        assignment = _assignment(self.pool, pooled, x, batch, dim_size)  # (N, M), in the precision of the solver

        num_graphs, num_points, _ = pooled.points.shape
        weights = assignment.new_ones(edge_index.shape[1]) if edge_weight is None else edge_weight.to(assignment.dtype)
        adjacency = _coarse_adjacency(assignment, edge_index, weights, node_batch, num_graphs)
        adjacency = adjacency.to(x.dtype)
        pairs, chosen = _all_pairs(edge_index, node_batch, num_graphs, num_points)
        return Coarsened(
            pooled.points.flatten(0, 1).to(x.dtype),
            adjacency,
            pairs,
            adjacency[chosen].flatten(),
            torch.arange(num_graphs, device=x.device).repeat_interleave(num_points),
            assignment.to(x.dtype),
            node_batch,
        )

    def extra_repr(self) -> str:
        return f"num_points={self.pool.num_points}, in_channels={self.pool.in_channels}"


def _assignment(pool: FlowPool, pooled: Pooled, x: Tensor, batch: Tensor | None, dim_size: int | None) -> Tensor:
    """S as a differentiable function of the nodes, of the points and of the cost's parameters, ``(N, M)``.

    The values come from the coupling that the flow ended with; autograd then goes from the coupling to the cost matrix,
    and from there to the points and to the nodes.
    """
    behind, ended, solvable, _, _ = pooled._solution
    precision = behind.epsilon.dtype
    clouds, order = make_clouds(x.to(precision), batch, None, None, dim_size)
    geometry = costs.bind(pool.cost, precision, x.device)
    level = clouds.masses.new_full((clouds.num_graphs,), pool.epsilon)
    frame = make_frame(clouds, geometry, level, pool.reference.to(precision), pool.relative)
    # The same problem as before, with its history.
    problem = replace(behind, clouds=frame.clouds, epsilon=frame.epsilon, geometry=frame.geometry)
    placed = _inside(frame, pooled.points.to(precision))
    points = ended.points + (placed - placed.detach())  # (B, M, D), without the rounding of what was handed over

    chosen = solvable.nonzero().squeeze(-1)
    own = solvable[clouds.batch].nonzero().squeeze(-1)  # nodes of the graphs that had a flow
    rows, places = [], []
    for bucket in batching.buckets(problem.select(chosen)):
        energy, graphs = bucket.energy, chosen[bucket.graphs]
        cost = energy.geometry.matrix(points[graphs], energy.nodes)  # (K, M, N)
        given = energy.point_masses, energy.masses, energy.epsilon
        with torch.no_grad():
            solved = sinkhorn.solve(cost, *given, ended.potential[graphs])
        plan = sinkhorn.DifferentiablePlan.apply(cost, *given, solved)
        present = (bucket.gather < len(own)) & bucket.fresh[:, None]  # (K, N), neither padding nor a copy
        rows.append(plan.mT[present] / energy.masses[present, None])
        places.append(own[bucket.gather[present]])

    # A graph that is one point, or whose features are not finite, has no flow: as in `Pooled.plan`.
    shares = torch.where(frame.broken[clouds.batch, None], torch.nan, behind.point_masses)
    if rows:
        shares = shares.index_copy(0, torch.cat(places), torch.cat(rows))
    return shares[order.argsort()]


def _inside(frame: Frame, points: Tensor) -> Tensor:
    """Points ``(B, M, D)`` in the coordinates of the frame: the inverse of `Frame.outside`."""
    return (points - frame.mean.unsqueeze(1)) / frame.scale.unsqueeze(1)


def _coarse_adjacency(
    assignment: Tensor, edge_index: Tensor, weights: Tensor, node_batch: Tensor, num_graphs: int
) -> Tensor:
    """``S^T A S`` of each graph, ``(B, M, M)``."""
    source, target = edge_index
    spread = torch.zeros_like(assignment).index_add(0, source, weights[:, None] * assignment[target])  # A S, (N, M)
    order, sizes = _grouped(node_batch, num_graphs)
    pairs = zip(assignment[order].split(sizes), spread[order].split(sizes), strict=True)
    num_points = assignment.shape[1]
    blocks = torch.cat([assignment.new_zeros(0, num_points), *(own.T @ reached for own, reached in pairs)])
    return blocks.view(num_graphs, num_points, num_points)


def _grouped(node_batch: Tensor, num_graphs: int) -> tuple[Tensor, list[int]]:
    """The order that puts the nodes of each graph together, ``(N,)``, and the number of nodes of each graph."""
    sizes: list[int] = torch.bincount(node_batch, minlength=num_graphs).tolist()
    return node_batch.argsort(stable=True), sizes


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


def _check_weights(edge_weight: Tensor, edge_index: Tensor, x: Tensor) -> None:
    if not isinstance(edge_weight, Tensor):
        raise TypeError(f"edge_weight is a {type(edge_weight).__name__}; pass a tensor of shape (num_edges,), or None.")
    if edge_weight.shape != edge_index.shape[1:]:
        raise ValueError(
            f"edge_weight has shape {tuple(edge_weight.shape)}; expected ({edge_index.shape[1]},), one number per edge."
        )
    require_like(edge_weight, x, "edge_weight")
