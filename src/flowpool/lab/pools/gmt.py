"""Graph Multiset Transformer (Baek et al., 2021): M attention seeds, their interaction, one vector."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.nn.aggr import GraphMultisetTransformer

from flowpool.lab.pools.base import Pool, Readout, no_loss


class GMTPool(Pool):
    """PyG's GraphMultisetTransformer with one head and M representative nodes."""

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(in_channels)
        self.aggregation = GraphMultisetTransformer(in_channels, k=num_points)

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        return Readout(self.aggregation(x, batch, dim_size=num_graphs), no_loss(x))
