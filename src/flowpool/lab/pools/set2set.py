"""Set2Set (Vinyals et al., 2016): a recurrent network that reads the nodes by attention, several times."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.nn.aggr import Set2Set

from flowpool.lab.pools.base import Pool, Readout, no_loss

NUM_STEPS = 3


class Set2SetPool(Pool):
    """PyG's Set2Set with three steps: the last query, and what it read."""

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(2 * in_channels)
        self.aggregation = Set2Set(in_channels, NUM_STEPS)

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        return Readout(self.aggregation(x, batch, dim_size=num_graphs), no_loss(x))
