"""The classifier that every pool is put into: backbone, pool, head, and what all pools share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from flowpool.lab.backbones import build_backbone
from flowpool.lab.names import Backbone, Norm, Padding, Size
from flowpool.lab.padding import pad
from flowpool.lab.pools import POOLS, FlowSettings, Pool, Readout
from flowpool.lab.pools.base import MOST_POINTS, check_count
from flowpool.lab.pools.joined import PerLayerPool

MOST_LAYERS = 100
_CONSTANT = 1e-6  # deviation over mean of a feature that does not vary, up to the rounding of single precision


class Output(NamedTuple):
    logits: Tensor  # (B, C)
    loss: Tensor  # (), the pool's auxiliary loss


@dataclass(frozen=True)
class Shape:
    """The model apart from its pool; the same for every pool.

    Attributes:
        backbone: see `flowpool.lab.backbones`.
        channels: d, node features that the pool sees.
        num_points: number of points, M.
        size: the number of nodes N that a mean or a measure forgets: not handed over, appended to the pooled vector
            in units of the mean N of the training graphs, or multiplied into it.
        norm: BatchNorm before the pool, on the vector before the head, both, or none.
        padding: what the pool sees: the nodes alone, or every graph padded with rows of zeros to the size of the
            largest graph of the dataset, without mass (``"empty"``) or with that of a node (``"mass"``); see
            `flowpool.lab.padding`.
        layers: of the backbones gin and gine.
        jumping: whether each of these layers has a pool of its own, and the vectors are joined.
        hidden: units of the hidden layer of the head; 0: the head is linear.
        dropout: share of the units that are left out before each layer of the head.
        standardise: whether features come standardised by their mean and deviation over the training nodes.
    """

    backbone: Backbone = "sgc"
    channels: int = 8
    num_points: int = 5
    size: Size = "none"
    norm: Norm = "none"
    padding: Padding = "none"
    layers: int = 2
    jumping: bool = False
    hidden: int = 0
    dropout: float = 0.0
    standardise: bool = False

    def __post_init__(self) -> None:
        if self.size not in get_args(Size):
            raise ValueError(f"Unknown size {self.size!r}; pass {', '.join(get_args(Size))}.")
        if self.norm not in get_args(Norm):
            raise ValueError(f"Unknown norm {self.norm!r}; pass {', '.join(get_args(Norm))}.")
        if self.padding not in get_args(Padding):
            raise ValueError(f"Unknown padding {self.padding!r}; pass {', '.join(get_args(Padding))}.")
        check_count(self.channels, "channels", MOST_POINTS)
        check_count(self.num_points, "points", MOST_POINTS)
        check_count(self.layers, "layers", MOST_LAYERS)

    @property
    def pooled_layers(self) -> int:
        """Layers of the backbone that are pooled."""
        return self.layers if self.jumping and self.backbone in ("gin", "gine") else 1


class Classifier(nn.Module):
    """Nodes to class scores.

    Args:
        backbone: maps ``(N, in_channels)`` and ``(2, E)`` to ``(N, channels)``, or to all pooled layers side by side.
        pool: maps nodes to one vector per graph.
        in_channels: features of the nodes.
        num_classes: C.
        shape: see `Shape`.
        largest: nodes of the largest graph, to which graphs are padded if the shape says so.
    """

    mean_size: Tensor
    feature_mean: Tensor
    feature_scale: Tensor

    def __init__(
        self, backbone: nn.Module, pool: Pool, in_channels: int, num_classes: int, shape: Shape, largest: int = 0
    ) -> None:
        super().__init__()
        self.padding, self.largest = shape.padding, largest
        width = pool.out_channels + (shape.size == "append")
        self.size = shape.size
        self.backbone = backbone
        channels = shape.channels * shape.pooled_layers
        self.node_norm = nn.BatchNorm1d(channels) if shape.norm in ("nodes", "both") else nn.Identity()
        self.pool = pool
        self.output_norm = nn.BatchNorm1d(width) if shape.norm in ("output", "both") else nn.Identity()
        self.head = _head(width, num_classes, shape)
        self.register_buffer("mean_size", torch.ones(()))
        self.standardise = shape.standardise
        if shape.standardise:
            self.register_buffer("feature_mean", torch.zeros(in_channels))
            self.register_buffer("feature_scale", torch.ones(in_channels))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Output:
        nodes = self._nodes(x, edge_index)  # (N, channels)
        vector, loss = self._pooled(nodes, edge_index, batch, num_graphs)  # (B, out_channels)
        if self.size != "none":
            sizes = torch.bincount(batch, minlength=num_graphs).to(vector.dtype).unsqueeze(1)  # (B, 1)
            scaled = self.size == "scale"
            vector = vector * sizes if scaled else torch.cat([vector, sizes / self.mean_size], dim=1)
        return Output(self.head(self.output_norm(vector)), loss)

    def _nodes(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """What the pool sees, before padding."""
        if self.standardise:
            x = (x - self.feature_mean) / self.feature_scale
        nodes: Tensor = self.node_norm(self.backbone(x, edge_index))
        return nodes

    def _pooled(self, nodes: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        masses = None
        if self.padding != "none":
            nodes, edge_index, batch, is_node = pad(nodes, edge_index, batch, num_graphs, self.largest)
            masses = is_node.to(nodes.dtype) if self.padding == "empty" else None
        readout: Readout = self.pool(nodes, edge_index, batch, num_graphs, masses)
        return readout

    @torch.no_grad()
    def fit(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> None:
        """Takes from the training graphs what is fixed before training: size, units of features, the pool's own needs."""
        self.mean_size.fill_(len(batch) / num_graphs)
        if self.standardise:
            deviation, mean = torch.std_mean(x.double(), 0, correction=0)
            self.feature_mean.copy_(mean)
            self.feature_scale.copy_(torch.where(deviation > _CONSTANT * mean.abs(), deviation, 1.0))
        # In training mode BatchNorm shows the pool what it will see during training.
        self.train()
        nodes = self._nodes(x, edge_index)
        if self.padding == "mass":
            padded = pad(nodes, edge_index, batch, num_graphs, self.largest)
            nodes, batch = padded.nodes, padded.batch
        self.pool.fit(nodes, batch)


def _head(width: int, num_classes: int, shape: Shape) -> nn.Module:
    if shape.hidden == 0:
        return nn.Linear(width, num_classes)
    return nn.Sequential(
        nn.Dropout(shape.dropout),
        nn.Linear(width, shape.hidden),
        nn.ReLU(),
        nn.Dropout(shape.dropout),
        nn.Linear(shape.hidden, num_classes),
    )


def build_model(
    pool: str,
    shape: Shape,
    in_channels: int,
    num_classes: int,
    seed: int,
    *,
    flow: FlowSettings | None = None,
    largest: int = 0,
) -> Classifier:
    """A classifier with fresh weights.

    Each part draws from a seed of its own, so that the backbone starts equal for all pools.

    Args:
        pool: its name in `POOLS`.
        shape, in_channels, num_classes: the model.
        seed: of all weights.
        flow: settings for pools that run the flow.
        largest: as in `Classifier`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "backbone"))
        backbone = build_backbone(shape.backbone, in_channels, shape.channels, shape.layers, jumping=shape.jumping)
        pools = [
            POOLS[pool](shape.channels, shape.num_points, seed=derived_seed(seed, "pool", *layer), flow=flow)
            for layer in [(), *((number,) for number in range(1, shape.pooled_layers))]
        ]
        pooling = pools[0] if len(pools) == 1 else PerLayerPool(pools)
        torch.manual_seed(derived_seed(seed, "head"))
        return Classifier(backbone, pooling, in_channels, num_classes, shape, largest)


def derived_seed(*parts: int | str) -> int:
    """A seed that depends on all parts; other parts give an independent one."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1  # 31 bits, which every library takes
