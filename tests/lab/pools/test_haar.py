from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.linalg import eigh

from flowpool.lab.pools import haar
from flowpool.lab.pools.haar import (
    HaarPool,
    canonical_order,
    cluster_chain,
    fiedler_vector,
    haar_basis,
    low_frequencies,
    nested_cuts,
    normalised_cut,
)


def random_adjacency(size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.random((size, size)) < 0.25, 1)
    return (upper | upper.T).astype(float)


def edges_of(adjacency: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack(adjacency.nonzero()))


def two_triangles() -> np.ndarray:
    adjacency = np.zeros((6, 6))
    for a, b in [(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5), (2, 3)]:
        adjacency[a, b] = adjacency[b, a] = 1
    return adjacency


def asymmetric_adjacency(size: int) -> np.ndarray:
    """A path with a leaf beside its third node: legs of 1, 2 and more nodes, so nothing can be swapped."""
    adjacency = np.zeros((size, size))
    path = np.arange(size - 1)
    adjacency[path[:-1], path[1:]] = adjacency[path[1:], path[:-1]] = 1
    adjacency[2, size - 1] = adjacency[size - 1, 2] = 1
    return adjacency


def symmetric_adjacency(graph: str) -> np.ndarray:
    if graph == "triangles":
        return two_triangles()
    if graph == "cycle":
        return np.roll(np.eye(9), 1, axis=0) + np.roll(np.eye(9), -1, axis=0)
    if graph == "star":
        adjacency = np.zeros((7, 7))
        adjacency[0, 1:] = adjacency[1:, 0] = 1
        return adjacency
    if graph == "cube":
        corners = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)])
        return np.asarray(np.abs(corners[:, None] - corners).sum(2) == 1, dtype=float)
    return np.zeros((4, 4))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 18, 40])
@pytest.mark.parametrize("num_clusters", [1, 5, 8])
def test_basis_is_orthonormal(size: int, num_clusters: int) -> None:
    chain = cluster_chain(random_adjacency(size, seed=size), num_clusters)
    basis = haar_basis(chain)
    assert basis.shape == (size, size)
    assert np.abs(basis.T @ basis - np.eye(size)).max() < 1e-10
    np.testing.assert_array_equal(low_frequencies(chain), basis[:, : min(size, num_clusters)])


def renumbered(adjacency: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed).permutation(len(adjacency))
    return order, adjacency[np.ix_(order, order)]


def pooled(adjacency: np.ndarray, signal: np.ndarray) -> np.ndarray:
    batch = torch.zeros(len(signal), dtype=torch.long)
    vector: torch.Tensor = HaarPool(signal.shape[1], 5)(torch.from_numpy(signal), edges_of(adjacency), batch, 1).vector
    return vector.numpy()


@pytest.mark.parametrize("size", [8, 13, 18, 30])
def test_numbering_does_not_matter_in_graphs_without_symmetries(size: int) -> None:
    adjacency = asymmetric_adjacency(size)
    signal = np.random.default_rng(1).standard_normal((size, 3))
    for seed in range(5):
        order, shuffled = renumbered(adjacency, seed)
        np.testing.assert_allclose(pooled(shuffled, signal[order]), pooled(adjacency, signal), atol=1e-10)


@pytest.mark.parametrize("graph", ["triangles", "cycle", "star", "cube", "empty"])
def test_numbering_does_not_matter_in_symmetric_graphs_for_signals_with_the_same_symmetry(graph: str) -> None:
    adjacency = symmetric_adjacency(graph)
    degrees = adjacency.sum(1)
    signal = np.stack([degrees, adjacency @ degrees + 1], axis=1)
    for seed in range(5):
        order, shuffled = renumbered(adjacency, seed)
        np.testing.assert_allclose(pooled(shuffled, signal[order]), pooled(adjacency, signal), atol=1e-10)


@pytest.mark.parametrize("graph", ["triangles", "cycle", "star", "cube", "empty"])
def test_canonical_order_gives_isomorphic_graphs_the_same_matrix(graph: str) -> None:
    adjacency = symmetric_adjacency(graph)
    order = canonical_order(adjacency)
    canonical = adjacency[np.ix_(order, order)]
    assert sorted(order.tolist()) == list(range(len(adjacency)))
    for seed in range(5):
        _, shuffled = renumbered(adjacency, seed)
        order = canonical_order(shuffled)
        np.testing.assert_array_equal(shuffled[np.ix_(order, order)], canonical)


def test_cut_separates_two_triangles_at_the_bridge() -> None:
    side = normalised_cut(two_triangles())
    assert side[:3].tolist() in ([True] * 3, [False] * 3)
    assert side[3:].tolist() == (~side[:3]).tolist()


def test_cut_parts_a_disconnected_graph_with_its_largest_component() -> None:
    adjacency = two_triangles()
    adjacency[2, 3] = adjacency[3, 2] = adjacency[5, 3] = adjacency[3, 5] = adjacency[4, 5] = adjacency[5, 4] = 0
    assert normalised_cut(adjacency).tolist() == [True] * 3 + [False] * 3


def test_clusterings_are_nested_and_grow_by_one() -> None:
    cuts = nested_cuts(random_adjacency(15, seed=1), 6)
    for number, (coarse, fine) in enumerate(zip(cuts, cuts[1:], strict=False), start=1):
        assert len(np.unique(coarse)) == number
        assert all(len(np.unique(coarse[fine == cluster])) == 1 for cluster in np.unique(fine))
    assert len(np.unique(cuts[-1])) == 6


def test_low_frequencies_are_the_signals_that_are_constant_on_clusters() -> None:
    """The pooled energy is that of the cluster means: all of it for such a signal, none for pure detail."""
    adjacency = random_adjacency(14, seed=2)
    order = canonical_order(adjacency)  # the pool cuts the graph in this order, and ties depend on it
    labels = np.empty(14, dtype=np.int64)
    labels[order] = nested_cuts(adjacency[np.ix_(order, order)], 5)[-1]
    rng = np.random.default_rng(0)
    signal = rng.standard_normal((14, 3))
    means = np.stack([signal[labels == cluster].mean(0) for cluster in range(5)])[labels]
    pool = HaarPool(3, 5)

    def energy(values: np.ndarray) -> np.ndarray:
        cloud = pool.points(torch.from_numpy(values), edges_of(adjacency), torch.zeros(14, dtype=torch.long), 1)
        return (cloud.points[0] ** 2).sum(0).numpy()

    np.testing.assert_allclose(energy(means), (means**2).sum(0), rtol=1e-10)
    np.testing.assert_allclose(energy(signal), (means**2).sum(0), rtol=1e-10)
    np.testing.assert_allclose(energy(signal - means), 0, atol=1e-20)


EVERY_SYMMETRY = [nx.cycle_graph(9), nx.complete_graph(6), nx.star_graph(6), nx.hypercube_graph(3), nx.petersen_graph()]
EVERY_SYMMETRY += [nx.complete_bipartite_graph(4, 3), nx.ladder_graph(5), nx.grid_2d_graph(4, 4), nx.path_graph(8)]
REGULAR = [nx.frucht_graph(), nx.disjoint_union_all([nx.cycle_graph(6), nx.cycle_graph(3), nx.cycle_graph(3)])]


@pytest.mark.parametrize("graph", EVERY_SYMMETRY, ids=lambda graph: f"{graph.number_of_nodes()}")
def test_rounding_decides_no_cut(graph: nx.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver may return any basis of an eigenspace: turned, with other signs and noise, it gives the same clusters."""
    adjacency = nx.to_numpy_array(graph)
    expected = nested_cuts(adjacency, 5)
    rng = np.random.default_rng(0)

    def another(matrix: np.ndarray, subset_by_index: list[int]) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = eigh(matrix, subset_by_index=subset_by_index)
        for value in np.unique(values.round(9)):
            own = np.flatnonzero(values.round(9) == value)
            turned = np.linalg.qr(rng.standard_normal((len(own), len(own))))[0]
            vectors[:, own] = vectors[:, own] @ turned
        return values + 1e-15 * rng.standard_normal(len(values)), vectors + 1e-14 * rng.standard_normal(vectors.shape)

    monkeypatch.setattr(haar, "eigh", another)
    for _ in range(20):
        for one, other in zip(nested_cuts(adjacency, 5), expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_vector_is_an_eigenvector_of_the_second_eigenvalue() -> None:
    for graph in EVERY_SYMMETRY:
        links = nx.to_numpy_array(graph)
        laplacian = nx.normalized_laplacian_matrix(graph).toarray()
        vector = fiedler_vector(links)
        second = np.sort(np.linalg.eigvalsh(laplacian))[1]
        np.testing.assert_allclose(laplacian @ vector, second * vector, atol=1e-10)
        assert np.linalg.norm(vector) == pytest.approx(1)


def test_hundreds_of_renumbered_graphs_have_the_same_clusters() -> None:
    graphs = [nx.gnp_random_graph(6 + seed % 15, 0.3, seed=seed) for seed in range(20)]
    graphs += [nx.random_labeled_tree(5 + seed % 15, seed=seed) for seed in range(20)]
    for number, graph in enumerate([*graphs, *EVERY_SYMMETRY, *REGULAR]):
        adjacency = nx.to_numpy_array(graph)
        order = canonical_order(adjacency)
        canonical = adjacency[np.ix_(order, order)]
        for seed in range(4):
            _, shuffled = renumbered(adjacency, 100 * number + seed)
            other = canonical_order(shuffled)
            np.testing.assert_array_equal(shuffled[np.ix_(other, other)], canonical)


def test_two_triangles_in_closed_form() -> None:
    """Two clusters of three: their sum and difference, each over sqrt(2 * 3)."""
    x = torch.arange(6.0).unsqueeze(1)
    cloud = HaarPool(1, 2).points(x, edges_of(two_triangles()), torch.zeros(6, dtype=torch.long), 1)
    total, difference = cloud.points[0, :, 0].tolist()
    assert total == pytest.approx(15 / 6**0.5)
    assert abs(difference) == pytest.approx(9 / 6**0.5)  # which triangle comes first is a matter of symmetry


def test_each_structure_is_cut_once() -> None:
    pool = HaarPool(2, 3)
    edges = edges_of(two_triangles())
    both = torch.cat([edges, edges + 6], dim=1)
    batch = torch.tensor([0] * 6 + [1] * 6)
    first = pool(torch.randn(12, 2), both, batch, 2)
    assert len(pool.bases) == 1
    assert first.vector.shape == (2, 6)
