"""Mean, sum and maximum of the node features: the plain readouts."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.nn.aggr import Aggregation

from flowpool.lab.pools.base import Pool, Readout, no_loss


class ReducePool(Pool):
    """One number per feature, by any PyG aggregation that keeps the number of features."""

    def __init__(self, in_channels: int, aggregation: Aggregation) -> None:
        super().__init__(in_channels)
        self.aggregation = aggregation

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        return Readout(self.aggregation(x, batch, dim_size=num_graphs), no_loss(x))
