"""FlowPool with learned node masses."""

from __future__ import annotations

from torch import Tensor

from flowpool.lab.pools.base import Cloud, no_loss
from flowpool.lab.pools.dense import every_cluster
from flowpool.lab.pools.flow import FlowPool
from flowpool.masses import Attention


class FlowAttentionPool(FlowPool):
    """FlowPool that learns how much each node weighs in its graph; it starts as FlowPool."""

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(in_channels, num_points)
        self.attention = Attention(in_channels)

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        masses = self.attention(x, batch, num_graphs)  # (N,)
        flat = self.layer(x, batch, dim_size=num_graphs, masses=masses)  # (B, M * D)
        points = flat.view(num_graphs, self.num_points, x.shape[1])  # (B, M, D)
        return Cloud(points, every_cluster(points), no_loss(x))
