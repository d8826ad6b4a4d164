"""FlowPool in other coordinates: the mean of a graph, and how its points deviate from it."""

from __future__ import annotations

import torch
from torch import Tensor

from flowpool.lab.pools.base import Pool, Readout
from flowpool.lab.pools.flow import FlowPool


class FlowDeviationsPool(Pool):
    """The points of FlowPool as their mean and all but the last of their deviations, which sum to zero."""

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.flow = FlowPool(in_channels, num_points)

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        points, _, loss = self.flow.cloud(x, edge_index, batch, num_graphs)  # (B, M, D)
        mean = points.mean(1, keepdim=True)  # (B, 1, D)
        return Readout(torch.cat([mean, (points - mean)[:, :-1]], 1).flatten(1), loss)
