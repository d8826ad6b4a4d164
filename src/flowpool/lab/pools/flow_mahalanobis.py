"""FlowPool with a learned cost."""

from __future__ import annotations

from flowpool.costs import Mahalanobis
from flowpool.lab.options import FlowSettings
from flowpool.lab.pools.flow import FlowPool


class FlowMahalanobisPool(FlowPool):
    """FlowPool that learns how much each feature counts; it starts as FlowPool."""

    def __init__(self, in_channels: int, num_points: int, settings: FlowSettings | None = None) -> None:
        super().__init__(in_channels, num_points, settings)
        self.layer.cost = Mahalanobis(in_channels)
