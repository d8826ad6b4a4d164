"""Pooling with free point masses: what a graph is made of, counted around learned prototypes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flowpool import references
from flowpool.lab.pools.base import Pool, Readout, graph_sizes, no_loss
from flowpool.step.pool import transport_pool


class FlowFreePool(Pool):
    """How many nodes each prototype received, and the sum of their differences to it; M counts and M such sums.

    Prototypes start at k-means centres of the training nodes and are learned. Like those of a sum, the counts tell
    the size of the graph. Call `fit` with the training nodes first.
    """

    epsilon: Tensor

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * (in_channels + 1))
        self.seed = int(torch.randint(2**31 - 1, ()))
        self.reference = nn.Parameter(references.normal(in_channels, num_points, self.seed))
        self.register_buffer("epsilon", torch.tensor(0.1))

    @torch.no_grad()
    def fit(self, x: Tensor, batch: Tensor) -> None:
        mean = x.mean(0)
        variance = (x - mean).square().sum(-1).mean()  # of all nodes together
        self.epsilon.fill_(0.1 * variance)
        self.reference.copy_(mean + variance.sqrt() * references.kmeans(x, len(self.reference), self.seed))

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        received = transport_pool(
            x, batch, reference=self.reference, epsilon=self.epsilon, relative=False, free=True, dim_size=num_graphs
        )
        counts = received.masses * graph_sizes(batch, num_graphs).unsqueeze(1)  # (B, M)
        # The mean of next to nothing says nothing: a sum is as loud as what was received.
        carried = counts.unsqueeze(-1) * (received.points - self.reference)  # (B, M, D)
        return Readout(torch.cat([counts, carried.flatten(1)], 1), no_loss(x))
