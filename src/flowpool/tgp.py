r"""FlowPool as a pooler of torch-geometric-pool: select, reduce, connect and lift.

.. math:: S_{ji} = P_{ij} / b_j, \qquad X^* = \arg\min_X S_\varepsilon(X, Y), \qquad A^* = S^\top A S

Select gives the coupling P of nodes and points, divided by the masses of the nodes, so that rows of S sum to one. Reduce
gives the points themselves, not :math:`S^\top X`. Connect and lift are those that every dense pooler of the library has.
After ``import flowpool.tgp``, ``tgp.poolers.get_pooler("flow", in_channels=..., k=...)`` finds it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from flowpool.nn.coarsen import FlowCoarsen

try:
    import tgp.poolers
    from tgp.connect import DenseConnect
    from tgp.lift import BaseLift
    from tgp.reduce import Reduce
    from tgp.select import Select, SelectOutput
    from tgp.src import DenseSRCPooling, PoolingOutput
    from tgp.utils.ops import postprocess_adj_pool_dense
except ImportError as missing:
    raise ImportError(
        "flowpool.tgp needs torch-geometric-pool: pip install torch_scatter --no-build-isolation, and then "
        "pip install 'flowpool[tgp]'."
    ) from missing

__all__ = ["FlowPooling"]


class FlowSelect(Select):
    """The share of each node that belongs to each point, with the points in ``points``, ``(B, K, D)``."""

    is_dense = True

    def __init__(self, coarsen: FlowCoarsen) -> None:
        super().__init__()
        self.coarsen = coarsen

    def reset_parameters(self) -> None:
        self.coarsen.reset_parameters()

    def forward(self, x: Tensor, mask: Tensor | None = None, batch: Tensor | None = None) -> SelectOutput:
        """S of padded nodes ``(B, N, D)`` with their mask ``(B, N)``, or of nodes ``(N, D)`` with their batch vector."""
        no_edges = torch.empty(2, 0, dtype=torch.long, device=x.device)
        if x.dim() == 2:
            coarse = self.coarsen(x, no_edges, batch=batch)
            return SelectOutput(s=coarse.assignment, batch=batch, points=self._by_graph(coarse.x))
        valid = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        graphs, places = valid.nonzero(as_tuple=True)
        coarse = self.coarsen(x[graphs, places], no_edges, batch=graphs, dim_size=x.shape[0])
        points = self._by_graph(coarse.x)
        shares = x.new_zeros(*x.shape[:2], points.shape[1]).index_put((graphs, places), coarse.assignment)
        return SelectOutput(s=shares, in_mask=valid, points=points)

    def _by_graph(self, points: Tensor) -> Tensor:
        return points.view(-1, *self.coarsen.pool.reference.shape)  # (B, K, D)


class FlowReduce(Reduce):
    """The pooled points of each graph, ``(B, K, D)``, or one graph after the other, ``(B * K, D)``."""

    def forward(
        self, x: Tensor, so: SelectOutput, *, batch: Tensor | None = None, return_batched: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        points = so.points if return_batched else so.points.flatten(0, 1)
        return points, self.reduce_batch(so, so.batch if batch is None else batch)


class FlowPooling(DenseSRCPooling):
    """A graph of K points in place of every graph; see :class:`flowpool.FlowCoarsen`.

    Args:
        in_channels: number of features, D.
        k: K, the points per graph.
        epsilon, seed, on_failure: as in :class:`flowpool.FlowPool`.
        remove_self_loops, degree_norm, edge_weight_norm, adj_transpose: how the coarse adjacency is finished, as in
            :class:`tgp.connect.DenseConnect`.
        batched: pad sparse input to ``(B, N, D)`` first. Otherwise nodes stay one after the other, which takes less memory.
        sparse_output: coarse graphs as one graph with ``edge_index``, instead of padded ones.
    """

    def __init__(
        self,
        in_channels: int,
        k: int,
        epsilon: float = 0.1,
        seed: int = 0,
        on_failure: Literal["ignore", "warn", "raise"] = "warn",
        remove_self_loops: bool = True,
        degree_norm: bool = True,
        edge_weight_norm: bool = False,
        adj_transpose: bool = True,
        batched: bool = True,
        sparse_output: bool = False,
    ) -> None:
        coarsen = FlowCoarsen(in_channels=in_channels, num_points=k, epsilon=epsilon, seed=seed, on_failure=on_failure)
        super().__init__(
            selector=FlowSelect(coarsen),
            reducer=FlowReduce(),
            lifter=BaseLift(matrix_op="transpose"),  # rows of S sum to one: a node gets the average of its points
            connector=DenseConnect(
                remove_self_loops=remove_self_loops,
                degree_norm=degree_norm,
                adj_transpose=adj_transpose,
                edge_weight_norm=edge_weight_norm,
                sparse_output=sparse_output,
            ),
            adj_transpose=adj_transpose,
            batched=batched,
            sparse_output=sparse_output,
        )

    def forward(
        self,
        x: Tensor,
        adj: Any = None,
        edge_weight: Tensor | None = None,
        so: SelectOutput | None = None,
        mask: Tensor | None = None,
        batch: Tensor | None = None,
        batch_pooled: Tensor | None = None,
        lifting: bool = False,
    ) -> PoolingOutput | Tensor:
        """The coarse graphs; or with ``lifting`` features of the points ``x`` brought back to the nodes of ``so``.

        Args:
            x: node features, ``(N, D)``, or padded ``(B, N, D)``.
            adj: ``edge_index`` or another sparse connectivity, or a padded adjacency ``(B, N, N)``.
            edge_weight: of sparse edges, ``(E,)``.
            so: what select gave, for lifting.
            mask: which padded nodes are real, ``(B, N)``.
            batch: graph of each node, ``(N,)``.
            batch_pooled: graph of each point, for lifting.
        """
        if lifting:
            if so is None:
                raise ValueError("Lifting needs so, which pooling returned.")
            lifted: Tensor = self.lift(
                x_pool=x, so=so, batch=so.batch if batch is None else batch, batch_pooled=batch_pooled
            )
            return lifted
        if not self.batched:
            so = self.select(x=x, batch=batch)
            points, batch_pooled = self.reduce(x=x, so=so, batch=batch, return_batched=not self.sparse_output)
            pooled_adj, weights = self.connect(
                edge_index=adj, so=so, edge_weight=edge_weight, batch=batch, batch_pooled=batch_pooled
            )
            return PoolingOutput(x=points, edge_index=pooled_adj, edge_weight=weights, batch=batch_pooled, so=so)
        x, adj, mask = self._ensure_batched_inputs(x=x, edge_index=adj, edge_weight=edge_weight, batch=batch, mask=mask)
        so = self.select(x=x, mask=mask)
        points, batch_pooled = self.reduce(x=x, so=so, batch=batch)
        pooled_adj = postprocess_adj_pool_dense(
            self.connector.dense_connect(adj=adj, s=so.s),
            remove_self_loops=self.connector.remove_self_loops,
            degree_norm=self.connector.degree_norm,
            adj_transpose=self.connector.adj_transpose,
            edge_weight_norm=self.connector.edge_weight_norm,
        )
        if not self.sparse_output:
            return PoolingOutput(x=points, edge_index=pooled_adj, so=so)
        points, edges, weights, batch_pooled = self._finalize_sparse_output(
            x_pool=points, adj_pool=pooled_adj, batch=batch, batch_pooled=batch_pooled, so=so
        )
        return PoolingOutput(x=points, edge_index=edges, edge_weight=weights, batch=batch_pooled, so=so)

    def extra_repr_args(self) -> dict[str, Any]:
        return {"batched": self.batched}


tgp.poolers.pooler_map.update(flow=FlowPooling)
