"""The one shape that every pooling method of the bench has: nodes of a batch in, one vector per graph out.

Letters in shape comments: B graphs, N nodes (of the batch, or of its largest graph once padded), M points,
D features.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn


class Readout(NamedTuple):
    """What a pool hands to the classifier."""

    vector: Tensor  # (B, out_channels)
    loss: Tensor  # (), the method's own auxiliary loss, zero where it has none


class Cloud(NamedTuple):
    """The points that stand for the nodes of each graph, exactly as the method outputs them."""

    points: Tensor  # (B, M, D), zero where the mask is False
    mask: Tensor  # (B, M) bool, False where a graph had too few nodes to fill the row
    loss: Tensor  # (), as in Readout


class Pool(nn.Module):
    """A pooling method. Subclasses implement `readout`, and `fit` if they need to see training nodes once."""

    has_flow_settings: ClassVar[bool] = False  # whether its constructor takes `FlowSettings`
    finished = False  # whether it normalises nodes and vector by itself, and tells the size of a graph

    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.out_channels = out_channels

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int, masses: Tensor | None = None
    ) -> Readout:
        """One vector per graph.

        Args:
            x: node features, ``(N, D)``.
            edge_index: directed edges, each undirected edge in both directions, ``(2, E)``.
            batch: graph of each node, sorted, ``(N,)``.
            num_graphs: B; every graph has at least one node.
            masses: zeros and ones, ``(N,)``; a node with mass zero is as good as absent. None: all ones.
        """
        check_batch(x, batch, num_graphs)
        if masses is not None:
            return self.weighted(x, edge_index, batch, num_graphs, masses)
        return self.readout(x, edge_index, batch, num_graphs)

    def weighted(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int, masses: Tensor) -> Readout:
        """`readout` with masses; methods that know none see the nodes that have any."""
        kept = masses > 0
        number = kept.cumsum(0) - 1  # (N,), new number of each node that is kept
        edges = number[edge_index[:, kept[edge_index].all(0)]]
        return self.readout(x[kept], edges, batch[kept], num_graphs)

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        """`forward` after the checks."""
        raise NotImplementedError

    def fit(self, x: Tensor, batch: Tensor) -> None:
        """Prepare from the nodes of the training graphs, once, before training. Most methods need nothing."""


class PointPool(Pool):
    """A pool whose output is a cloud of M points per graph, flattened row by row into the vector."""

    def points(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        """The cloud itself; arguments as in `forward`."""
        check_batch(x, batch, num_graphs)
        return self.cloud(x, edge_index, batch, num_graphs)

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        """`points` after the checks."""
        raise NotImplementedError

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        cloud = self.cloud(x, edge_index, batch, num_graphs)
        return Readout(cloud.points.flatten(1), cloud.loss)


def no_loss(x: Tensor) -> Tensor:
    """Zero, for methods without an auxiliary loss."""
    return x.new_zeros(())


def graph_sizes(batch: Tensor, num_graphs: int) -> Tensor:
    """Number of nodes of each graph, ``(B,)``."""
    return torch.bincount(batch, minlength=num_graphs)


def local_edges(edge_index: Tensor, batch: Tensor, num_graphs: int) -> list[Tensor]:
    """Edges of each graph, ``(2, E_g)``, its nodes counted from zero."""
    sizes = graph_sizes(batch, num_graphs)
    first_node = sizes.cumsum(0) - sizes  # (B,)
    edge_graph = batch[edge_index[0]]  # (E,)
    order = edge_graph.argsort(stable=True)
    local = (edge_index - first_node[edge_graph])[:, order]  # (2, E)
    return list(local.split(graph_sizes(edge_graph, num_graphs).tolist(), dim=1))


def filled(batch: Tensor, num_graphs: int, num_points: int) -> Tensor:
    """Mask of the rows that a graph with few nodes can fill when each row needs a node, ``(B, M)``."""
    rows = torch.arange(num_points, device=batch.device)
    return rows < graph_sizes(batch, num_graphs).unsqueeze(1)


def check_batch(x: Tensor, batch: Tensor, num_graphs: int) -> None:
    """Raise ValueError unless `batch` is a sorted graph id per row of `x` that leaves no graph empty."""
    if batch.shape != x.shape[:1]:
        raise ValueError(
            f"batch has shape {tuple(batch.shape)} but x has {x.shape[0]} nodes. Pass one graph id per node."
        )
    if bool((batch[1:] < batch[:-1]).any()):
        first = int((batch[1:] < batch[:-1]).nonzero()[0]) + 1
        raise ValueError(f"batch is not sorted (first: node {first}). Keep the nodes of a graph together, in order.")
    sizes = graph_sizes(batch, num_graphs)
    if len(sizes) > num_graphs:
        raise ValueError(f"batch names graph {len(sizes) - 1} but num_graphs is {num_graphs}.")
    if bool((sizes == 0).any()):
        empty = int((sizes == 0).nonzero()[0])
        raise ValueError(f"graph {empty} has no nodes. Pools need at least one node per graph; drop empty graphs.")
