"""The record that every dataset of the lab becomes: ragged graphs, held as flat tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Graph(NamedTuple):
    """One graph: node features ``(N, D)``, edges ``(2, E)`` with nodes counted from 0, class number or numbers ``(T,)``."""

    x: Tensor
    edge_index: Tensor
    y: int | Tensor
    edge_features: Tensor | None = None


class GraphBatch(NamedTuple):
    """Several graphs side by side: ``x (N, D)``, ``edge_index (2, E)``, ``batch (N,)``, ``y (B,)`` or ``(B, T)``."""

    x: Tensor
    edge_index: Tensor
    batch: Tensor
    y: Tensor
    edge_features: Tensor | None = None  # (E, F)


class Fold(NamedTuple):
    """One fold: graph numbers of its three parts, each sorted int64."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


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
        labels: class numbers 0..C-1, ``(B,)``; or numbers to be predicted, ``(B, T)`` float64.
        class_names: what class number c was called at its source, C entries in sorted order; none where numbers are
            predicted.
        masses: of the nodes, ``(N,)``; None: nodes of a graph count the same.
        edge_features: ``(E, F)`` float32, in the order of the edges.
        keys: what a graph is, in words: graphs with equal keys are the same one. None: nothing is known.
        places: what a message calls each graph, such as ``"line 5 (CCO)"``. None: by its number.
        folds: that belong to the dataset; None: they are drawn, or read from elsewhere.
        notes: what a reader has to know, such as rows that were left out.
    """

    name: str
    features: Tensor
    node_ptr: Tensor
    edge_index: Tensor
    edge_ptr: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    masses: Tensor | None = None
    edge_features: Tensor | None = None
    keys: tuple[str, ...] | None = None
    places: tuple[str, ...] | None = None
    folds: tuple[Fold, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def has_classes(self) -> bool:
        return self.labels.dim() == 1

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def num_outputs(self) -> int:
        """Classes C, or numbers to be predicted T."""
        return self.num_classes if self.has_classes else self.labels.shape[1]

    @property
    def num_features(self) -> int:
        return self.features.shape[1]

    def place(self, number: int) -> str:
        """What a message calls a graph."""
        return f"graph {number}" if self.places is None else self.places[number]

    def __len__(self) -> int:
        return self.labels.shape[0]

    def __getitem__(self, index: int) -> Graph:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} graphs; there is no graph {index}.")
        index %= len(self)
        nodes = slice(int(self.node_ptr[index]), int(self.node_ptr[index + 1]))
        edges = slice(int(self.edge_ptr[index]), int(self.edge_ptr[index + 1]))
        y = int(self.labels[index]) if self.has_classes else self.labels[index]
        bonds = None if self.edge_features is None else self.edge_features[edges]
        return Graph(self.features[nodes], self.edge_index[:, edges], y, bonds)

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
        bonds = None if self.edge_features is None else self.edge_features[edges]
        return GraphBatch(self.features[nodes], edge_index, owner, self.labels[chosen], bonds)


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


def smooth(features: Tensor, edges: Tensor, hops: int = 2) -> Tensor:
    """Features after ``hops`` products with the normalised adjacency with self-loops, ``(N, D)``.

    Args:
        features: ``(N, D)``.
        edges: both directions of every edge, ``(2, E)``.
    """
    size = len(features)
    adjacency = torch.eye(size, dtype=features.dtype)
    adjacency[edges[0], edges[1]] = 1.0
    root = adjacency.sum(1).rsqrt()
    propagate = root[:, None] * adjacency * root
    for _ in range(hops):
        features = propagate @ features
    return features


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


def cloud_dataset(
    name: str, members: np.ndarray, sizes: np.ndarray, labels: Tensor, class_names: tuple[str, ...], **more: Any
) -> GraphDataset:
    """Sets of vectors as graphs without edges: ``members (N, D)`` one set after the other, of the given sizes."""
    return GraphDataset(
        name=name,
        features=torch.from_numpy(np.ascontiguousarray(members, np.float32)),
        node_ptr=offsets(sizes),
        edge_index=torch.empty(2, 0, dtype=torch.int64),
        edge_ptr=torch.zeros(len(sizes) + 1, dtype=torch.int64),
        labels=labels,
        class_names=class_names,
        **more,
    )


def offsets(sizes: np.ndarray) -> Tensor:
    """Where each of B consecutive groups of the given sizes begins, and the end: ``(B + 1,)`` int64."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
