"""FlowPool: the M points that are nearest to the node cloud in Sinkhorn divergence."""

from __future__ import annotations

import torch
from torch import Tensor

from flowpool.lab.pools.base import Cloud, PointPool, no_loss
from flowpool.lab.pools.dense import every_cluster
from flowpool.nn.pool import FlowPool as Layer


class FlowPool(PointPool):
    """The library's layer with its default settings and a reference of its own."""

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.num_points = num_points
        self.layer = Layer(in_channels, num_points, seed=int(torch.randint(2**31 - 1, ())))

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        flat = self.layer(x, batch, dim_size=num_graphs)  # (B, M * D)
        points = flat.view(num_graphs, self.num_points, x.shape[1])  # (B, M, D)
        return Cloud(points, every_cluster(points), no_loss(x))
