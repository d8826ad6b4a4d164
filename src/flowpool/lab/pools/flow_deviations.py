"""FlowPool in other coordinates: the mean of a graph, and how its points deviate from it."""

from __future__ import annotations

import torch
from torch import Tensor

from flowpool.lab.options import FlowSettings
from flowpool.lab.pools.base import Cloud, Pool, Readout
from flowpool.lab.pools.flow import FlowPool


class FlowDeviationsPool(Pool):
    """The points of FlowPool as their mean and all but the last of their deviations, which sum to zero."""

    has_flow_settings = True

    def __init__(self, in_channels: int, num_points: int, settings: FlowSettings | None = None) -> None:
        super().__init__(num_points * in_channels)
        self.flow = FlowPool(in_channels, num_points, settings)

    def fit(self, x: Tensor, batch: Tensor) -> None:
        self.flow.fit(x, batch)

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        return _deviations(self.flow.flowed(x, batch, num_graphs, None))

    def weighted(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int, masses: Tensor) -> Readout:
        return _deviations(self.flow.flowed(x, batch, num_graphs, masses))


def _deviations(cloud: Cloud) -> Readout:
    mean = cloud.points.mean(1, keepdim=True)  # (B, 1, D)
    return Readout(torch.cat([mean, (cloud.points - mean)[:, :-1]], 1).flatten(1), cloud.loss)
