"""FlowReadout of the library, as users have it."""

from __future__ import annotations

import torch
from torch import Tensor

from flowpool.lab.pools.base import Pool, Readout, no_loss
from flowpool.nn.readout import FlowReadout


class FlowReadoutPool(Pool):
    """The sum, the size, and the shape of each graph, with BatchNorm before and after."""

    finished = True

    def __init__(self, in_channels: int, num_points: int) -> None:
        layer = FlowReadout(in_channels, num_points, seed=int(torch.randint(2**31 - 1, ())))
        super().__init__(layer.out_channels)
        self.layer = layer

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        return Readout(self.layer(x, batch, dim_size=num_graphs), no_loss(x))

    def weighted(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int, masses: Tensor) -> Readout:
        return Readout(self.layer(x, batch, dim_size=num_graphs, masses=masses), no_loss(x))
