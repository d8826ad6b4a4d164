"""The model that every pool is put into: backbone, pool, head, and what all pools share."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from flowpool.lab.backbones import build_backbone
from flowpool.lab.datasets import GraphBatch
from flowpool.lab.options import FlowSettings, Shape
from flowpool.lab.padding import pad
from flowpool.lab.pools import POOLS, Pool, Readout
from flowpool.lab.pools.joined import PerLayerPool

_CONSTANT = 1e-6  # deviation over mean of a feature that does not vary, up to the rounding of single precision


class Output(NamedTuple):
    outputs: Tensor  # (B, C), scores of classes; or (B, T), numbers in units of their deviation over training graphs
    loss: Tensor  # (), the pool's auxiliary loss


class GraphModel(nn.Module):
    """Nodes to class scores, or to numbers.

    Args:
        backbone: see `build_backbone`; it may hand over all pooled layers side by side.
        pool: maps nodes to one vector per graph.
        in_channels: features of the nodes.
        num_outputs: classes C, or numbers T.
        shape: see `Shape`.
        largest: nodes of the largest graph, to which graphs are padded if the shape says so.
        numbers: whether numbers are predicted. They are learned in units of their deviation over the training graphs.
    """

    mean_size: Tensor
    feature_mean: Tensor
    feature_scale: Tensor
    target_mean: Tensor
    target_scale: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        pool: Pool,
        in_channels: int,
        num_outputs: int,
        shape: Shape,
        largest: int = 0,
        *,
        numbers: bool = False,
    ) -> None:
        super().__init__()
        self.padding, self.largest = shape.padding, largest
        self.size, norm = ("none", "none") if pool.finished else (shape.size, shape.norm)
        width = pool.out_channels + (self.size == "append")
        self.backbone = backbone
        channels = shape.channels * shape.pooled_layers
        self.node_norm = nn.BatchNorm1d(channels) if norm in ("nodes", "both") else nn.Identity()
        self.pool = pool
        self.output_norm = nn.BatchNorm1d(width) if norm in ("output", "both") else nn.Identity()
        self.head = _head(width, num_outputs, shape)
        self.register_buffer("mean_size", torch.ones(()))
        self.standardise, self.numbers = shape.standardise, numbers
        if shape.standardise:
            self.register_buffer("feature_mean", torch.zeros(in_channels))
            self.register_buffer("feature_scale", torch.ones(in_channels))
        if numbers:
            self.register_buffer("target_mean", torch.zeros(num_outputs, dtype=torch.float64))
            self.register_buffer("target_scale", torch.ones(num_outputs, dtype=torch.float64))

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int, edge_features: Tensor | None = None
    ) -> Output:
        nodes = self._nodes(x, edge_index, edge_features)  # (N, channels)
        vector, loss = self._pooled(nodes, edge_index, batch, num_graphs)  # (B, out_channels)
        if self.size != "none":
            sizes = torch.bincount(batch, minlength=num_graphs).to(vector.dtype).unsqueeze(1)  # (B, 1)
            scaled = self.size == "scale"
            vector = vector * sizes if scaled else torch.cat([vector, sizes / self.mean_size], dim=1)
        return Output(self.head(self.output_norm(vector)), loss)

    def loss(self, outputs: Tensor, truth: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy, or the squared error in units of the deviation of each target."""
        if not self.numbers:
            return cross_entropy(outputs, truth, reduction=reduction)
        wanted = ((truth - self.target_mean) / self.target_scale).to(outputs.dtype)
        squares = mse_loss(outputs, wanted, reduction=reduction)
        return squares if reduction == "mean" else squares / truth.shape[1]

    def predictions(self, outputs: Tensor, *, ranks: bool = False) -> Tensor:
        """Class numbers ``(B,)``, their scores ``(B, C)`` for a ranking, or numbers ``(B, T)`` in the caller's units."""
        if self.numbers:
            return outputs * self.target_scale + self.target_mean
        return outputs if ranks else outputs.argmax(1)

    def _nodes(self, x: Tensor, edge_index: Tensor, edge_features: Tensor | None) -> Tensor:
        """What the pool sees, before padding."""
        if self.standardise:
            x = (x - self.feature_mean) / self.feature_scale
        nodes: Tensor = self.node_norm(self.backbone(x, edge_index, edge_features))
        return nodes

    def _pooled(self, nodes: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        masses = None
        if self.padding != "none":
            nodes, edge_index, batch, is_node = pad(nodes, edge_index, batch, num_graphs, self.largest)
            masses = is_node.to(nodes.dtype) if self.padding == "empty" else None
        readout: Readout = self.pool(nodes, edge_index, batch, num_graphs, masses)
        return readout

    @torch.no_grad()
    def fit(self, part: GraphBatch) -> None:
        """Takes from the training graphs what is fixed before training: size, units of features, the pool's own needs."""
        x, edge_index, batch, y, edge_features = part
        self.mean_size.fill_(len(batch) / len(y))
        if self.numbers:
            deviation, mean = torch.std_mean(y, 0, correction=0)
            self.target_mean.copy_(mean)
            self.target_scale.copy_(torch.where(deviation > 0, deviation, 1.0))
        if self.standardise:
            deviation, mean = torch.std_mean(x.double(), 0, correction=0)
            self.feature_mean.copy_(mean)
            self.feature_scale.copy_(torch.where(deviation > _CONSTANT * mean.abs(), deviation, 1.0))
        # In training mode BatchNorm shows the pool what it will see during training.
        self.train()
        nodes = self._nodes(x, edge_index, edge_features)
        if self.padding == "mass":
            padded = pad(nodes, edge_index, batch, len(y), self.largest)
            nodes, batch = padded.nodes, padded.batch
        self.pool.fit(nodes, batch)


def _head(width: int, num_outputs: int, shape: Shape) -> nn.Module:
    if shape.hidden == 0:
        return nn.Linear(width, num_outputs)
    return nn.Sequential(
        nn.Dropout(shape.dropout),
        nn.Linear(width, shape.hidden),
        nn.ReLU(),
        nn.Dropout(shape.dropout),
        nn.Linear(shape.hidden, num_outputs),
    )


def build_model(
    pool: str,
    shape: Shape,
    in_channels: int,
    num_outputs: int,
    seed: int,
    *,
    edge_channels: int = 0,
    numbers: bool = False,
    flow: FlowSettings | None = None,
    largest: int = 0,
) -> GraphModel:
    """A model with fresh weights.

    Each part draws from a seed of its own, so that the backbone starts equal for all pools.

    Args:
        pool: its name in `POOLS`.
        shape, in_channels, num_outputs, numbers, largest: as in `GraphModel`.
        seed: of all weights.
        edge_channels: features of the edges.
        flow: settings for pools that run the flow.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "backbone"))
        backbone = build_backbone(
            shape.backbone,
            in_channels,
            shape.channels,
            shape.layers,
            jumping=shape.jumping,
            edge_channels=edge_channels,
        )
        pools = [
            POOLS[pool](shape.channels, shape.num_points, seed=derived_seed(seed, "pool", *layer), flow=flow)
            for layer in [(), *((number,) for number in range(1, shape.pooled_layers))]
        ]
        pooling = pools[0] if len(pools) == 1 else PerLayerPool(pools)
        torch.manual_seed(derived_seed(seed, "head"))
        return GraphModel(backbone, pooling, in_channels, num_outputs, shape, largest, numbers=numbers)


def derived_seed(*parts: int | str) -> int:
    """A seed that depends on all parts; other parts give an independent one."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1  # 31 bits, which every library takes
