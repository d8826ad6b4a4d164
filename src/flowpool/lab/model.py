"""The classifier that every pool is put into: backbone, pool, linear head, and what all pools share."""

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
    """

    backbone: Backbone = "sgc"
    channels: int = 8
    num_points: int = 5
    size: Size = "none"
    norm: Norm = "none"
    padding: Padding = "none"

    def __post_init__(self) -> None:
        if self.size not in get_args(Size):
            raise ValueError(f"Unknown size {self.size!r}; pass {', '.join(get_args(Size))}.")
        if self.norm not in get_args(Norm):
            raise ValueError(f"Unknown norm {self.norm!r}; pass {', '.join(get_args(Norm))}.")
        if self.padding not in get_args(Padding):
            raise ValueError(f"Unknown padding {self.padding!r}; pass {', '.join(get_args(Padding))}.")
        check_count(self.channels, "channels", MOST_POINTS)
        check_count(self.num_points, "points", MOST_POINTS)


class Classifier(nn.Module):
    """Nodes to class scores.

    Args:
        backbone: maps ``(N, D)`` and ``(2, E)`` to ``(N, channels)``.
        pool: maps nodes to one vector per graph.
        num_classes: C.
        shape: see `Shape`.
        largest: nodes of the largest graph, to which graphs are padded if the shape says so.
    """

    mean_size: Tensor

    def __init__(self, backbone: nn.Module, pool: Pool, num_classes: int, shape: Shape, largest: int = 0) -> None:
        super().__init__()
        self.padding, self.largest = shape.padding, largest
        width = pool.out_channels + (shape.size == "append")
        self.size = shape.size
        self.backbone = backbone
        self.node_norm = nn.BatchNorm1d(shape.channels) if shape.norm in ("nodes", "both") else nn.Identity()
        self.pool = pool
        self.output_norm = nn.BatchNorm1d(width) if shape.norm in ("output", "both") else nn.Identity()
        self.head = nn.Linear(width, num_classes)
        self.register_buffer("mean_size", torch.ones(()))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Output:
        nodes = self.node_norm(self.backbone(x, edge_index))  # (N, channels)
        vector, loss = self._pooled(nodes, edge_index, batch, num_graphs)  # (B, out_channels)
        if self.size != "none":
            sizes = torch.bincount(batch, minlength=num_graphs).to(vector.dtype).unsqueeze(1)  # (B, 1)
            scaled = self.size == "scale"
            vector = vector * sizes if scaled else torch.cat([vector, sizes / self.mean_size], dim=1)
        return Output(self.head(self.output_norm(vector)), loss)

    def _pooled(self, nodes: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        masses = None
        if self.padding != "none":
            nodes, edge_index, batch, is_node = pad(nodes, edge_index, batch, num_graphs, self.largest)
            masses = is_node.to(nodes.dtype) if self.padding == "empty" else None
        readout: Readout = self.pool(nodes, edge_index, batch, num_graphs, masses)
        return readout

    @torch.no_grad()
    def fit(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> None:
        """Takes from the training graphs what is fixed before training: their mean size, the pool's own needs."""
        self.mean_size.fill_(len(batch) / num_graphs)
        # In training mode BatchNorm shows the pool what it will see during training.
        self.train()
        nodes = self.node_norm(self.backbone(x, edge_index))
        if self.padding == "mass":
            padded = pad(nodes, edge_index, batch, num_graphs, self.largest)
            nodes, batch = padded.nodes, padded.batch
        self.pool.fit(nodes, batch)


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
        backbone = build_backbone(shape.backbone, in_channels, shape.channels)
        pooling = POOLS[pool](shape.channels, shape.num_points, seed=derived_seed(seed, "pool"), flow=flow)
        torch.manual_seed(derived_seed(seed, "head"))
        return Classifier(backbone, pooling, num_classes, shape, largest)


def derived_seed(*parts: int | str) -> int:
    """A seed that depends on all parts; other parts give an independent one."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1  # 31 bits, which every library takes
