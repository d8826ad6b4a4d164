"""FlowPool with learned node masses."""

from __future__ import annotations

from torch import Tensor

from flowpool.lab.options import FlowSettings
from flowpool.lab.pools.base import Cloud
from flowpool.lab.pools.flow import FlowPool
from flowpool.masses import Attention


class FlowAttentionPool(FlowPool):
    """FlowPool that learns how much each node weighs in its graph; it starts as FlowPool."""

    def __init__(self, in_channels: int, num_points: int, settings: FlowSettings | None = None) -> None:
        super().__init__(in_channels, num_points, settings)
        self.attention = Attention(in_channels)

    def flowed(self, x: Tensor, batch: Tensor, num_graphs: int, masses: Tensor | None) -> Cloud:
        learned = self.attention(x, batch, num_graphs)  # (N,)
        return super().flowed(x, batch, num_graphs, learned if masses is None else learned * masses)
