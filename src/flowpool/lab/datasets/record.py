"""The record that every dataset of the lab becomes: ragged graphs, held as flat tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Graph(NamedTuple):
    """One graph: node features ``(N, D)``, edges ``(2, E)`` with nodes counted from 0, class number."""

    x: Tensor
    edge_index: Tensor
    y: int


class GraphBatch(NamedTuple):
    """Several graphs side by side: ``x (N, D)``, ``edge_index (2, E)``, ``batch (N,)``, ``y (B,)``."""

    x: Tensor
    edge_index: Tensor
    batch: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class GraphDataset:
    """B labelled graphs in the manner of CSR matrices: flat values, and where each graph begins.

    Attributes:
        name: what the dataset is called.
        features: node features of all graphs in order, ``(N, D)`` float32.
        node_ptr: graph g owns the nodes ``node_ptr[g] : node_ptr[g + 1]``, ``(B + 1,)``.
        edge_index: edges of all graphs, ``(2, E)``; each edge stands in both directions, once each;
            nodes are counted from 0 within their own graph.
        edge_ptr: graph g owns the edges ``edge_ptr[g] : edge_ptr[g + 1]``, ``(B + 1,)``.
        labels: class numbers 0..C-1, ``(B,)``.
        class_names: what class number c was called at its source, C entries in sorted order.
        masses: of the nodes, ``(N,)``; None: nodes of a graph count the same.
    """

    name: str
    features: Tensor
    node_ptr: Tensor
    edge_index: Tensor
    edge_ptr: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    masses: Tensor | None = None

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def num_features(self) -> int:
        return self.features.shape[1]

    def __len__(self) -> int:
        return self.labels.shape[0]

    def __getitem__(self, index: int) -> Graph:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} graphs; there is no graph {index}.")
        index %= len(self)
        nodes = slice(int(self.node_ptr[index]), int(self.node_ptr[index + 1]))
        edges = slice(int(self.edge_ptr[index]), int(self.edge_ptr[index + 1]))
        return Graph(self.features[nodes], self.edge_index[:, edges], int(self.labels[index]))

    def __iter__(self) -> Iterator[Graph]:
        return (self[index] for index in range(len(self)))

    def batch(self, indices: Sequence[int] | np.ndarray | Tensor) -> GraphBatch:
        """The graphs ``indices``, in that order, as one disconnected graph.

        Args:
            indices: graph numbers 0..B-1, any order, repeats allowed, ``(b,)``.
        """
        given = torch.as_tensor(indices)
        no_integers = given.is_floating_point() or given.is_complex() or given.dtype == torch.bool
        if given.dim() != 1 or (no_integers and given.numel() > 0):  # an empty list has no integer dtype
            raise ValueError(f"Expected a list of graph numbers, found shape {tuple(given.shape)} of {given.dtype}.")
        chosen = given.long()  # (b,); narrower integers would index as masks or overflow
        outside = (chosen < 0) | (chosen >= len(self))
        if bool(outside.any()):
            first = int(outside.nonzero()[0])
            raise IndexError(
                f"{int(outside.sum())} graph numbers are outside 0..{len(self) - 1} of {self.name} "
                f"(first: entry {first}, {int(chosen[first])})."
            )
        nodes, owner = _ragged_rows(self.node_ptr, chosen)  # (n,), (n,)
        edges, edge_owner = _ragged_rows(self.edge_ptr, chosen)  # (e,), (e,)
        sizes = self.node_ptr[chosen + 1] - self.node_ptr[chosen]  # (b,)
        shift = torch.cumsum(sizes, 0) - sizes  # first node of each graph inside the batch, (b,)
        edge_index = self.edge_index[:, edges] + shift[edge_owner]
        return GraphBatch(self.features[nodes], edge_index, owner, self.labels[chosen])


def require_equal_masses(dataset: GraphDataset) -> None:
    """Raises where nodes have masses, for what would forget them."""
    if dataset.masses is not None:
        raise ValueError(
            f"The nodes of {dataset.name} have masses, which this does not take into account. "
            "The frozen protocol does: flowpool evaluate --protocol frozen."
        )


def _ragged_rows(ptr: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Flat positions of the chosen ragged rows one after the other, and the row each belongs to."""
    lengths = ptr[chosen + 1] - ptr[chosen]  # (b,)
    owner = torch.repeat_interleave(torch.arange(len(chosen)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths  # (b,)
    inside = torch.arange(len(owner)) - starts[owner]
    return ptr[chosen][owner] + inside, owner


def both_directions(edges: np.ndarray, num_nodes: int) -> np.ndarray:
    """Distinct edges in both directions, ``(2, E)``, sorted by first, then second node.

    Args:
        edges: pairs of node numbers 0..num_nodes-1 in any order, repeats allowed, ``(e, 2)``.
        num_nodes: N >= 1; N^2 must fit in 64 bits.
    """
    there = edges[:, 0] * num_nodes + edges[:, 1]
    back = edges[:, 1] * num_nodes + edges[:, 0]
    # One number per directed edge, sorted, then compared with its neighbour: on millions of edges this is
    # many times faster than np.unique, which hashes.
    keys = np.sort(np.concatenate([there, back]))
    keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if len(keys) else keys
    return np.stack([keys // num_nodes, keys % num_nodes])


def offsets(sizes: np.ndarray) -> Tensor:
    """Where each of B consecutive groups of the given sizes begins, and the end: ``(B + 1,)`` int64."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
