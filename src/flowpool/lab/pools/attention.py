"""Softmax attention as a readout (Li et al., 2016): a few means of learned values, weighted by learned scores."""

from __future__ import annotations

from torch import Tensor, nn
from torch_geometric.nn.aggr import AttentionalAggregation

from flowpool.lab.pools.base import Pool, Readout, no_loss

NUM_HEADS = 4


class AttentionPool(Pool):
    """Four of PyG's AttentionalAggregation side by side, each with scores and D values of its own."""

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(NUM_HEADS * in_channels)
        self.aggregation = AttentionalAggregation(
            gate_nn=nn.Sequential(
                nn.Linear(in_channels, in_channels),
                nn.ReLU(),
                nn.Linear(in_channels, NUM_HEADS),
                _Repeated(in_channels),
            ),
            nn=nn.Linear(in_channels, NUM_HEADS * in_channels),
        )

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        return Readout(self.aggregation(x, batch, dim_size=num_graphs), no_loss(x))


class _Repeated(nn.Module):
    """One score per head, for each of the values of that head, ``(N, H)`` to ``(N, H * D)``."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, scores: Tensor) -> Tensor:
        return scores.repeat_interleave(self.times, 1)
