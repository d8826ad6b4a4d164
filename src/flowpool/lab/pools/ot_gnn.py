"""OT-GNN (Chen et al., 2020): distances to learned clouds, and a loss that keeps these clouds spread out."""

from __future__ import annotations

import ot
import torch
from torch import Tensor, nn

from flowpool.lab.pools.base import Pool, Readout, graph_sizes

NUM_PROTOTYPES = 8
WEIGHT = 0.1  # of the loss


class OTGNNPool(Pool):
    r"""Exact squared Wasserstein distances to eight learned clouds of M points of equal mass, and their regulariser.

    .. math:: L = - w \; \mathrm{mean} \, \log \frac{e^{-\langle T, C \rangle}}{\sum_{T'} e^{-\langle T', C \rangle}}

    T is the optimal plan between a graph and a prototype, T' runs over it and plans that are not optimal. Where all points
    of a prototype fall together, all plans cost the same and the loss is at its largest. The paper draws ten other plans
    at random; these are the optimal one with the points of the prototype moved on by 1, 2, ..., M - 1, so that no graph
    depends on chance.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(NUM_PROTOTYPES)
        self.prototypes = nn.Parameter(torch.randn(NUM_PROTOTYPES, num_points, in_channels))

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        count, num_points, _ = self.prototypes.shape
        costs = ot.dist(self.prototypes.flatten(0, 1), x).view(count, num_points, -1)  # (T, M, N)
        rows, losses = [], []
        for cost in costs.split(graph_sizes(batch, num_graphs).tolist(), dim=2):
            plans = torch.stack(
                [_plan(one) for one in cost.detach()]
            )  # (T, M, N), as good as constant: they are optimal
            others = torch.stack([plans.roll(shift, 1) for shift in range(num_points)])  # (M, T, M, N), itself first
            values = (others * cost).sum((2, 3))  # (M, T)
            rows.append(values[0])
            losses.append(-(-values).log_softmax(0)[0].mean())
        return Readout(torch.stack(rows), WEIGHT * torch.stack(losses).mean())


def _plan(cost: Tensor) -> Tensor:
    """The optimal plan between equal masses, ``(M, N)``."""
    masses = [cost.new_full((size,), 1 / size, dtype=torch.float64) for size in cost.shape]
    plan: Tensor = ot.emd(*masses, cost.double())
    return plan.to(cost.dtype)
