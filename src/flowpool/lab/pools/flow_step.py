"""The first step of the flow from a learned reference: what each of its points receives of a graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flowpool import references
from flowpool.lab.pools.base import Pool, Readout, no_loss
from flowpool.step.pool import transport_pool


class FlowStepPool(Pool):
    """How far one step carries each point, and the standard deviations of what it received; M rows of each.

    The pool of `flowpool.FlowReadout` by itself. The reference starts well inside the training nodes and is learned.
    Call `fit` with them first.
    """

    epsilon: Tensor

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(2 * num_points * in_channels)
        seed = int(torch.randint(2**31 - 1, ()))
        self.reference = nn.Parameter(references.normal(in_channels, num_points, seed))
        self.register_buffer("epsilon", torch.tensor(0.1))

    @torch.no_grad()
    def fit(self, x: Tensor, batch: Tensor) -> None:
        mean, variance = x.mean(0), x.var(0, correction=0)
        self.epsilon.fill_(0.1 * variance.sum())
        self.reference.copy_(mean + variance.mean().sqrt() * self.reference)

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        received = transport_pool(
            x, batch, reference=self.reference, epsilon=self.epsilon, relative=False, dim_size=num_graphs
        )
        moved = received.points - self.reference  # (B, M, D)
        return Readout(torch.cat([moved, received.deviations], 1).flatten(1), no_loss(x))
