"""Mean, sum and maximum of the node features: the plain readouts."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch_geometric.nn.aggr import Aggregation, MaxAggregation, MeanAggregation, SumAggregation

from flowpool.lab.pools.base import Pool, Readout, no_loss


class _ReducePool(Pool):
    """One number per feature, by a PyG aggregation that keeps the number of features."""

    aggregation_type: ClassVar[type[Aggregation]]

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(in_channels)
        self.aggregation = self.aggregation_type()

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        return Readout(self.aggregation(x, batch, dim_size=num_graphs), no_loss(x))


class MeanPool(_ReducePool):
    aggregation_type = MeanAggregation


class SumPool(_ReducePool):
    aggregation_type = SumAggregation


class MaxPool(_ReducePool):
    aggregation_type = MaxAggregation
