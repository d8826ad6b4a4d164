"""TopKPool (Gao and Ji, 2019): the M nodes that reach highest in a learned direction, times their score."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.nn import TopKPooling
from torch_geometric.utils import to_dense_batch

from flowpool.lab.pools.base import Cloud, PointPool, no_loss


class TopKPool(PointPool):
    """PyG's TopKPooling with a fixed number of nodes, in order of falling score, padded with zero rows."""

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.num_points = num_points
        self.layer = TopKPooling(in_channels, ratio=num_points)

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        kept, _, _, kept_batch, _, _ = self.layer(x, edge_index, batch=batch)
        points, mask = to_dense_batch(kept, kept_batch, max_num_nodes=self.num_points, batch_size=num_graphs)
        return Cloud(points, mask, no_loss(x))
