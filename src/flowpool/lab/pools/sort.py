"""SortPool (Zhang et al., 2018): the M nodes that are largest in the last feature, in that order."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.nn.aggr import SortAggregation

from flowpool.lab.pools.base import Cloud, PointPool, filled, no_loss


class SortPool(PointPool):
    """PyG's SortAggregation; graphs with fewer nodes are padded with zero rows."""

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.num_points = num_points
        self.aggregation = SortAggregation(k=num_points)

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        flat = self.aggregation(x, batch, dim_size=num_graphs)  # (B, M * D)
        points = flat.view(num_graphs, self.num_points, x.shape[1])  # (B, M, D)
        return Cloud(points, filled(batch, num_graphs, self.num_points), no_loss(x))
