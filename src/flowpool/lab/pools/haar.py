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
Ints = NDArray[np.int64]

# Below this share of its length an entry of a Fiedler vector is zero but for rounding.
ZERO = 1e-8
# Eigenvalues that differ by less than this share are equal but for rounding.
EQUAL = 1e-6
# A node stands out in an eigenspace if its share is above this part of the mean share. The golden ratio, because no
# symmetry of a graph gives a share of exactly that, so that rounding cannot decide.
PROMINENT = 0.6180339887498949
LONGEST_WALK = 8
PRIME = 1_000_003


class HaarPool(PointPool):
    """Compressive Haar transform Phi^T X of each graph, padded with zero rows if it has fewer than M nodes.

    The clusters are nested normalised cuts: M, M/2, M/4, ..., 1 of them. Bases depend on the structure
    alone and are kept, so each graph is cut once. The method has no parameters; gradients pass to the
    nodes.

    The clusters do not depend on the machine: whatever rounding could decide is decided by the canonical order of the
    nodes. The vector does not depend on how the nodes are numbered, with one limit: nodes that a symmetry of the
    graph exchanges have no order of their own, and if the cuts part them, the given order decides which
    comes first.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.num_points = num_points
        self.bases: dict[tuple[int, bytes], Tensor] = {}

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        sizes = graph_sizes(batch, num_graphs).tolist()
        edges = local_edges(edge_index, batch, num_graphs)
        low = [self._low_frequencies(size, own.cpu().numpy()) for size, own in zip(sizes, edges, strict=True)]
        basis = torch.cat(low).to(x)  # (N, M), graphs one below the other
        padded_basis, _ = to_dense_batch(basis, batch, batch_size=num_graphs)  # (B, N, M)
        nodes, _ = to_dense_batch(x, batch, batch_size=num_graphs)  # (B, N, D)
        return Cloud(padded_basis.mT @ nodes, filled(batch, num_graphs, self.num_points), no_loss(x))

    def _low_frequencies(self, num_nodes: int, edges: Ints) -> Tensor:
        key = (num_nodes, edges.tobytes())
        if key not in self.bases:
            adjacency = np.zeros((num_nodes, num_nodes))
            adjacency[edges[0], edges[1]] = adjacency[edges[1], edges[0]] = 1
            np.fill_diagonal(adjacency, 0)
            order = canonical_order(adjacency)
            low = low_frequencies(cluster_chain(adjacency[np.ix_(order, order)], self.num_points))
            basis = np.zeros((num_nodes, self.num_points))  # columns beyond the number of nodes stay zero
            basis[order, : low.shape[1]] = low
            self.bases[key] = torch.from_numpy(basis)
        return self.bases[key]


def cluster_chain(adjacency: Floats, num_clusters: int) -> list[Ints]:
    """Nested clusterings, fine to coarse: each gives the cluster of every member of the one before it.

    The first entry maps nodes to at most `num_clusters` clusters, the next those to half as many, the last
    to one.
    """
    cuts = nested_cuts(adjacency, num_clusters)
    count = len(cuts)
    chain = [cuts[count - 1]]
    while count > 1:
        fine = cuts[count - 1]
        count = (count + 1) // 2
        # One node of each fine cluster tells in which coarse cluster all of it lies.
        chain.append(cuts[count - 1][np.unique(fine, return_index=True)[1]])
    return chain


def nested_cuts(adjacency: Floats, num_clusters: int) -> list[Ints]:
    """Clusterings of the nodes into 1, 2, ... clusters; each cuts the largest cluster of the last one in two.

    Equal sizes are told apart by the smallest node number, so the caller numbers the nodes canonically.
    """
    clusters: list[Ints] = [np.arange(len(adjacency))]
    labels = np.zeros(len(adjacency), dtype=np.int64)
    cuts = [labels]
    while len(cuts) < min(num_clusters, len(adjacency)):
        largest = max(range(len(clusters)), key=lambda index: (len(clusters[index]), -clusters[index][0]))
        members = clusters[largest]
        is_second = normalised_cut(adjacency[np.ix_(members, members)])
        halves = (members[~is_second], members[is_second])
        first, second = sorted(halves, key=lambda half: (-len(half), half[0]))
        labels = labels.copy()
        labels[second] = len(clusters)
        clusters[largest] = first
        clusters.append(second)
        cuts.append(labels)
    return cuts


def canonical_order(adjacency: Floats) -> Ints:
    """The nodes in an order that depends on the structure alone, ``(N,)``.

    Colours are the numbers of closed walks through each node, refined by the colours of the neighbours
    (Weisfeiler-Lehman). Where a tie is left, the first node of the first tied colour gets a colour of its own and
    refinement goes on. Tied nodes are, but for rare regular graphs, images of each other under a symmetry, so that any
    choice leads to the same renumbered matrix. All of it is done in whole numbers.
    """
    links = csr_array(adjacency.astype(np.int64))
    # A fixed table of large integers: sums over neighbours identify the multiset of their colours, exactly.
    tags = np.random.default_rng(0).integers(2**48, size=len(adjacency))
    _, colours = np.unique(closed_walks(adjacency), axis=0, return_inverse=True)
    colours = colours.reshape(-1)
    while True:
        colours = _refine(colours, links, tags)
        counts = np.bincount(colours)
        if len(counts) == len(adjacency):
            return np.argsort(colours)
        tied = int(np.flatnonzero(counts > 1)[0])
        colours = 2 * colours + 1
        colours[int(np.flatnonzero(colours == 2 * tied + 1)[0])] -= 1


def closed_walks(adjacency: Floats) -> Ints:
    """Closed walks of length 2 to 8 through each node, modulo a prime, ``(N, 7)``.

    They tell apart nodes of regular graphs, which have the same neighbourhoods as far as colours can see.
    """
    walks, columns = adjacency, []
    for _ in range(LONGEST_WALK - 1):
        walks = adjacency @ walks % PRIME  # sums of whole numbers below 2^53: exact in any order
        columns.append(walks.diagonal())
    return np.stack(columns, axis=1).astype(np.int64)


def normalised_cut(links: Floats) -> NDArray[np.bool_]:
    """One side of a normalised cut of a graph of two or more nodes in two non-empty parts, ``(N,)`` bool.

    A disconnected graph parts with its largest component; a connected one is cut by the sign of the second
    eigenvector of its normalised Laplacian, zeros on the negative side.
    """
    num_components, component = connected_components(csr_array(links), directed=False)
    if num_components > 1:
        return np.asarray(component == np.bincount(component).argmax())
    return np.asarray(fiedler_vector(links) > ZERO)


def fiedler_vector(links: Floats) -> Floats:
    r"""The second eigenvector of the normalised Laplacian of a connected graph, ``(N,)``, the same on any machine.

    .. math:: L = I - D^{-1/2} A D^{-1/2}

    A symmetric graph may have several second eigenvectors, of which a solver returns whichever rounding prefers, and
    even a single one has no sign of its own. The projector P on all of them is unique; the vector returned is that
    of its columns which belongs to the first prominent node, and is positive there.
    """
    scale = 1 / np.sqrt(links.sum(1))
    laplacian = np.eye(len(links)) - scale[:, None] * links * scale
    vectors = _second_eigenspace(laplacian)  # (N, k)
    shares = np.square(vectors).sum(1)  # (N,), diagonal of P
    first = int(np.argmax(shares > PROMINENT * shares.mean()))
    column = vectors @ vectors[first]
    vector: Floats = column / np.linalg.norm(column)
    return vector


def _second_eigenspace(laplacian: Floats) -> Floats:
    """All eigenvectors of the smallest eigenvalue but the first, orthonormal, ``(N, k)``."""
    last, count = 1, len(laplacian)
    while True:
        last = min(2 * last + 1, count - 1)
        values, vectors = eigh(laplacian, subset_by_index=[1, last])
        is_second = values - values[0] <= EQUAL * values[0]
        if last == count - 1 or not is_second[-1]:
            space: Floats = vectors[:, is_second]
            return space


def haar_basis(chain: list[Ints]) -> Floats:
    """Orthonormal Haar basis of the nodes, ``(N, N)``, low frequencies first; the chain ends in one cluster.

    Going down one level, the coarse basis is spread over the members of its clusters, and each cluster of k
    members adds k - 1 vectors that live inside it.
    """
    basis = np.ones((1, 1))
    for labels in reversed(chain):
        clusters = [np.flatnonzero(labels == cluster) for cluster in range(len(basis))]
        inner = [_inner_vectors(members, len(labels)) for members in clusters]
        basis = np.concatenate([_spread(basis, labels), *inner], axis=1)
    return basis


def low_frequencies(chain: list[Ints]) -> Floats:
    """The compressive basis, ``(N, M)``: the first vectors of `haar_basis`, one per cluster of level one."""
    return _spread(haar_basis(chain[1:]), chain[0])


def _spread(basis: Floats, labels: Ints) -> Floats:
    """Coarse vectors as vectors on the members: constant on each cluster, their lengths kept."""
    spread: Floats = basis[labels] / np.sqrt(np.bincount(labels))[labels, None]
    return spread


def _inner_vectors(members: Ints, length: int) -> Floats:
    """Orthonormal vectors of zero sum on the k `members` of one cluster, ``(length, k - 1)``.

    The j-th sets member j against the average of the members after it.
    """
    count = len(members)
    vectors = np.zeros((length, count - 1))
    for column in range(count - 1):
        after = count - 1 - column
        vectors[members[column], column] = 1
        vectors[members[column + 1 :], column] = -1 / after
        vectors[:, column] *= np.sqrt(after / (after + 1))
    return vectors


def _refine(colours: Ints, links: csr_array, tags: Ints) -> Ints:
    """Stable colours, numbered from zero without gaps, that keep the order of the colours they refine."""
    _, colours = np.unique(colours, return_inverse=True)
    while True:
        signature = np.stack([colours, links @ tags[colours]], axis=1)
        refined = np.unique(signature, axis=0, return_inverse=True)[1].reshape(-1)
        if refined.max() == colours.max():
            return refined
        colours = refined
