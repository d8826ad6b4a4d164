r"""Hierarchical pooling: a graph of N nodes becomes a graph of M points, with the coupling as the assignment.

.. math:: X^* = \arg\min_X S_\varepsilon(X, Y), \qquad S_{ji} = P_{ij} / b_j, \qquad A^* = S^\top A S

P is the optimal coupling of the points with the nodes. Divided by the mass of its node it says which share of node j
belongs to point i: rows of S sum to one, as the soft clusters of other hierarchical pools do. Every edge is then handed
over whole, so that :math:`A^*` keeps the total weight of A, its rows the degrees :math:`S^\top A 1`, and its diagonal
what lies within a point. P itself would shrink the weights by :math:`N^2`, and :math:`P_{ij} / a_i`, which averages
over the nodes of a point, would give densities that forget how many edges there were.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from flowpool import costs
from flowpool.core.measures import Clouds
from flowpool.core.updates import UpdateStep
from flowpool.costs import CostFunction, Geometry
from flowpool.engines.choice import say_where
from flowpool.engines.devices import HOST, carried
from flowpool.inputs import check_choice, check_like, checked_epsilon, checked_point_masses
from flowpool.nn.edges import check_edges, check_nodes, check_within
from flowpool.nn.pool import FlowPool
from flowpool.nn.report import Report
from flowpool.options import Engine, Gradient, OnFailure
from flowpool.step.balance import balanced
from flowpool.step.pool import Step, centre, precise_clouds, scores_of, without_broken
from flowpool.step.ragged import products_of_rows, sums_of_products, use_kernels


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
        order, ptr = _grouped(self.node_batch, num_graphs)
        values = features.to(self.assignment.dtype).view(num_graphs, num_points, features.shape[1])
        return products_of_rows(self.assignment[order], values, ptr, compiled=False)[order.argsort()]


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
        geometry = costs.geometry_of(self.pool.cost)
        given: list[Any] = [x, edge_index, edge_weight, batch, masses, edge_attr, self.pool.reference]
        given += geometry.tensors.values()
        if self.pool._leaves_device(x):
            say_where(x.device)
            given = carried(given, HOST)
        found = self._coarsened(dim_size, x.device, geometry.having(given[7:]), *given[:7])
        return Coarsened(*carried([getattr(found, place.name) for place in fields(found)], x.device))

    def _coarsened(
        self,
        dim_size: int | None,
        device: torch.device,
        geometry: Geometry,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        batch: Tensor | None,
        masses: Tensor | None,
        edge_attr: Tensor | None,
        reference: Tensor,
    ) -> Coarsened:
        """:meth:`forward` where everything is, with a report for a caller on a device."""
        check_nodes(edge_index, x.shape[0])
        differentiable = torch.is_grad_enabled() and self.pool.options.gradient != "none"
        with torch.set_grad_enabled(differentiable):
            clouds, order = precise_clouds(x, batch, None, masses, dim_size)
            back = order.argsort()
            node_batch = clouds.batch[back]
            check_within(edge_index, node_batch)
            pooled = self.pool._pooled(reference, geometry, x, batch, None, clouds.num_graphs, masses)
            self.pool._conclude(Report.of(pooled), device)
            shares = _assignment(self.pool, geometry, clouds, pooled.points.to(clouds.nodes.dtype))[back]  # (N, M)
            adjacency, attributes = _coarse_edges(
                shares, edge_index, edge_weight, edge_attr, self.edge_attr, node_batch, clouds.num_graphs
            )
        pairs, chosen = _all_pairs(edge_index, node_batch, clouds.num_graphs, self.pool.num_points)
        return Coarsened(
            pooled.points.flatten(0, 1).to(x.dtype),
            adjacency.to(x.dtype),
            pairs,
            adjacency[chosen].flatten().to(x.dtype),
            None if attributes is None else attributes[chosen].flatten(0, 2).to(x.dtype),
            torch.arange(clouds.num_graphs, device=x.device).repeat_interleave(self.pool.num_points),
            shares.to(x.dtype),
            node_batch,
        )

    def extra_repr(self) -> str:
        return f"edge_attr={self.edge_attr!r}"


def _assignment(pool: FlowPool, geometry: Geometry, clouds: Clouds, points: Tensor) -> Tensor:
    """S as a differentiable function of the nodes, of the points and of the cost's parameters, ``(N, M)``.

    The points are those that the flow ended with, ``(B, M, D)``; their coupling with the nodes is solved here once more,
    since it is one entropic transport whose way to the points, to the nodes and to the cost autograd then knows.
    """
    clouds, broken = without_broken(clouds)
    overflowed = points.detach().isfinite().flatten(1).all(1).logical_not()
    broken = overflowed if broken is None else broken | overflowed
    points = points.masked_fill(broken[:, None, None], 0.0)
    geometry = geometry.to(clouds.nodes.dtype, clouds.nodes.device)
    epsilon = checked_epsilon(pool.epsilon, clouds.num_graphs, clouds.nodes)
    if pool.relative:
        to_mean = geometry.pairwise(clouds.mean()[clouds.batch], clouds.nodes)
        unit = clouds.sum(clouds.masses * to_mean)  # (B,)
        epsilon = epsilon * torch.where(unit > 0, unit, 1.0)  # in a graph that is one point all is shared equally
    compiled = use_kernels("auto" if pool.options.engine == "compiled" else pool.options.engine, clouds.nodes)
    equal = checked_point_masses(None, pool.num_points, clouds.nodes)
    if costs.is_weighing(pool.cost):
        step = Step(points, equal, epsilon, geometry.feature_weights, False, compiled)
        scores = scores_of(clouds, *centre(clouds, compiled), points, step)
    else:
        cost = geometry.pairwise(points[clouds.batch].unsqueeze(2), clouds.nodes[:, None, None])  # (N, M, 1)
        scores = -cost.squeeze(-1) / epsilon[clouds.batch, None]
    shares = balanced(scores, clouds.masses, equal, clouds.ptr, compiled)
    return shares.masked_fill(broken[clouds.batch, None], torch.nan)


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
    order, ptr = _grouped(node_batch[edge_index[0]], num_graphs)
    source, target = edge_index[:, order]
    ends = shares[target]  # (E, M)
    if edge_weight is not None:
        ends = ends * edge_weight.to(shares.dtype)[order, None]
    compiled = use_kernels("auto", shares)
    adjacency = sums_of_products(shares[source], ends, ptr, compiled)
    if edge_attr is None:
        return adjacency, None
    borne = ends.unsqueeze(-1) * edge_attr.to(shares.dtype)[order].unsqueeze(1)  # (E, M, F)
    sums = sums_of_products(shares[source], borne.flatten(1), ptr, compiled)
    sums = sums.view(*adjacency.shape, edge_attr.shape[1])
    if reduce == "sum":
        return adjacency, sums
    joined = (adjacency != 0).unsqueeze(-1)
    return adjacency, torch.where(joined, sums / torch.where(joined, adjacency.unsqueeze(-1), 1.0), 0.0)


def _grouped(batch: Tensor, num_graphs: int) -> tuple[Tensor, Tensor]:
    """The order that puts what belongs to each graph together, and the offsets of the graphs then, ``(B + 1,)``."""
    sizes = torch.bincount(batch, minlength=num_graphs)
    return batch.argsort(stable=True), torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


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
