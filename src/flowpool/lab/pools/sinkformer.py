"""Sinkformer readout (Sander et al., 2022): doubly stochastic attention between nodes, then seed queries."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch_geometric.utils import to_dense_batch

from flowpool.lab.pools.base import Pool, Readout, no_loss
from flowpool.lab.pools.scaling import transport_plan

# Blocks with tied weights: steps of one flow, see below.
NUM_BLOCKS = 3


class SinkformerPool(Pool):
    r"""Attention blocks, their matrices scaled by Sinkhorn instead of softmax, read out by M learned queries.

    .. math::
        Y_{l+1} = Y_l + \tfrac1L A_l \, Y_l W_V, \qquad A_l = \mathrm{Sinkhorn}(Y_l W_Q W_K^\top Y_l^\top / \sqrt{D}),
        \quad A 1 = A^\top 1 = 1

    All L blocks share their weights, so that they are Euler steps of the flow :math:`\dot Y = A(Y) Y W_V` over unit
    time, which is a gradient flow in Wasserstein space for suitable weights (section 4 of that paper). Sinkhorn is run
    to convergence, the limit that the paper analyses, and differentiated there.
    """

    def __init__(self, in_channels: int, num_points: int, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__(num_points * in_channels)
        self.num_blocks = num_blocks
        self.query = nn.Linear(in_channels, in_channels, bias=False)
        self.key = nn.Linear(in_channels, in_channels, bias=False)
        self.value = nn.Linear(in_channels, in_channels, bias=False)
        self.seeds = nn.Parameter(torch.randn(num_points, in_channels))

    def attention(self, nodes: Tensor, mask: Tensor) -> Tensor:
        """Doubly stochastic attention, ``(B, N, N)``, of padded nodes ``(B, N, D)`` with mask ``(B, N)``."""
        scores = self.query(nodes) @ self.key(nodes).mT / math.sqrt(nodes.shape[2])  # (B, N, N)
        pairs = mask.unsqueeze(2) & mask.unsqueeze(1)  # (B, N, N)
        ones = mask.to(nodes.dtype)  # (B, N)
        return transport_plan(scores.masked_fill(~pairs, -math.inf), ones, ones)

    def walk(self, nodes: Tensor, mask: Tensor, num_blocks: int) -> Iterator[Tensor]:
        """The nodes ``(B, N, D)`` before the first of some blocks and after each of them."""
        yield nodes
        for _ in range(num_blocks):
            nodes = nodes + self.attention(nodes, mask) @ self.value(nodes) / num_blocks
            yield nodes

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        nodes, mask = to_dense_batch(x, batch, batch_size=num_graphs)  # (B, N, D), (B, N)
        *_, hidden = self.walk(nodes, mask, self.num_blocks)
        scores = self.seeds @ hidden.mT / math.sqrt(x.shape[1])  # (B, M, N)
        weights = scores.masked_fill(~mask.unsqueeze(1), -math.inf).softmax(2)  # (B, M, N)
        return Readout((weights @ hidden).flatten(1), no_loss(x))
