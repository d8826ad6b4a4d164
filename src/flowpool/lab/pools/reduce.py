"""Plain readouts: mean, sum, maximum, mean and deviations, and the sum that keeps its variance."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch_geometric.nn.aggr import (
    Aggregation,
    MaxAggregation,
    MeanAggregation,
    StdAggregation,
    SumAggregation,
    VariancePreservingAggregation,
)

from flowpool.lab.pools.base import Pool, Readout, no_loss


class _ReducePool(Pool):
    """One number per feature and aggregation, by PyG aggregations that keep the number of features."""

    aggregation_types: ClassVar[tuple[type[Aggregation], ...]]

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(len(self.aggregation_types) * in_channels)
        self.aggregations = [kind() for kind in self.aggregation_types]

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        found = [aggregation(x, batch, dim_size=num_graphs) for aggregation in self.aggregations]
        return Readout(torch.cat(found, 1), no_loss(x))


class MeanPool(_ReducePool):
    aggregation_types = (MeanAggregation,)


class SumPool(_ReducePool):
    aggregation_types = (SumAggregation,)


class MaxPool(_ReducePool):
    aggregation_types = (MaxAggregation,)


class SumMeanMaxPool(_ReducePool):
    aggregation_types = (SumAggregation, MeanAggregation, MaxAggregation)


class MeanDeviationsPool(_ReducePool):
    """Mean and standard deviation of each feature."""

    aggregation_types = (MeanAggregation, StdAggregation)


class VPAPool(_ReducePool):
    """The sum over the root of the number of nodes (Schneckenreiter et al., 2024)."""

    aggregation_types = (VariancePreservingAggregation,)
