"""HaarPool (Wang et al., 2020): the M lowest frequencies of the features in a Haar basis of the graph."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch_geometric.utils import to_dense_batch

from flowpool.lab.pools.base import Cloud, PointPool, filled, graph_sizes, local_edges, no_loss

Floats = NDArray[np.float64]

ZERO = 1e-8  # below this an entry of a vector of length one is zero but for rounding


class HaarPool(PointPool):
    r"""Compressive Haar transform :math:`\Phi^\top X` of each graph; zero rows if it has fewer than M nodes.

    Phi belongs to the chain of clusterings that cuts the largest cluster in two until there are M: a constant, and for
    each cut the difference between the means of its two sides. It depends on the structure alone and is kept, so each
    graph is cut once. The method has no parameters; gradients pass to the nodes.

    Where a symmetry of the graph exchanges nodes, the cuts may depend on their numbers.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.num_points = num_points
        self.bases: dict[tuple[int, bytes], Tensor] = {}

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        sizes = graph_sizes(batch, num_graphs).tolist()
        edges = local_edges(edge_index, batch, num_graphs)
        basis = torch.cat([self._basis(size, own) for size, own in zip(sizes, edges, strict=True)]).to(x)  # (N, M)
        padded_basis, _ = to_dense_batch(basis, batch, batch_size=num_graphs)  # (B, N, M)
        nodes, _ = to_dense_batch(x, batch, batch_size=num_graphs)  # (B, N, D)
        return Cloud(padded_basis.mT @ nodes, filled(batch, num_graphs, self.num_points), no_loss(x))

    def _basis(self, num_nodes: int, edges: Tensor) -> Tensor:
        own = edges.cpu().numpy()
        key = (num_nodes, own.tobytes())
        if key not in self.bases:
            adjacency = np.zeros((num_nodes, num_nodes))
            adjacency[own[0], own[1]] = adjacency[own[1], own[0]] = 1
            np.fill_diagonal(adjacency, 0)
            self.bases[key] = torch.from_numpy(low_frequencies(adjacency, self.num_points))
        return self.bases[key]


def low_frequencies(adjacency: Floats, num_points: int) -> Floats:
    """The compressive basis, ``(N, M)``: orthonormal columns, and zeros beyond the number of nodes."""
    num_nodes = len(adjacency)
    clusters = [np.arange(num_nodes)]
    basis = np.zeros((num_nodes, num_points))
    basis[:, 0] = 1 / np.sqrt(num_nodes)
    for column in range(1, min(num_points, num_nodes)):
        largest = max(range(column), key=lambda number: len(clusters[number]))
        members = clusters[largest]
        side = normalised_cut(adjacency[np.ix_(members, members)])
        first, second = members[side], members[~side]
        clusters[largest] = first
        clusters.append(second)
        scale = np.sqrt(len(first) * len(second) / len(members))
        basis[first, column], basis[second, column] = scale / len(first), -scale / len(second)
    return basis


def normalised_cut(links: Floats) -> NDArray[np.bool_]:
    """One side of a normalised cut of a graph of two or more nodes in two non-empty parts, ``(N,)`` bool.

    A disconnected graph parts with its largest component; a connected one is cut by the sign of the second
    eigenvector of its normalised Laplacian, with the sign that makes the sum of its cubes positive.
    """
    num_components, component = connected_components(csr_array(links), directed=False)
    if num_components > 1:
        return np.asarray(component == np.bincount(component).argmax())
    scale = 1 / np.sqrt(links.sum(1))
    vector = eigh(np.eye(len(links)) - scale[:, None] * links * scale, subset_by_index=[1, 1])[1][:, 0]
    return np.asarray(vector * (1 if (vector**3).sum() > -ZERO else -1) > ZERO)
