from __future__ import annotations

import numpy as np
import pytest
import torch

from flowpool.lab.pools.haar import HaarPool, low_frequencies, normalised_cut


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


@pytest.mark.parametrize("size", [1, 2, 3, 5, 18, 40])
@pytest.mark.parametrize("num_points", [1, 5, 8])
def test_basis_is_orthonormal(size: int, num_points: int) -> None:
    basis = low_frequencies(random_adjacency(size, seed=size), num_points)
    assert basis.shape == (size, num_points)
    expected = np.diag((np.arange(num_points) < size).astype(float))
    np.testing.assert_allclose(basis.T @ basis, expected, atol=1e-12)


@pytest.mark.parametrize("size", [8, 13, 30])
def test_numbering_does_not_matter_in_graphs_without_symmetries(size: int) -> None:
    # One cut: another may cut a path, which is symmetric.
    adjacency = asymmetric_adjacency(size)
    expected = low_frequencies(adjacency, 2)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(size)
        found = low_frequencies(adjacency[np.ix_(order, order)], 2)
        np.testing.assert_allclose(found, expected[order], atol=1e-12)


def test_cut_separates_two_triangles_at_the_bridge() -> None:
    side = normalised_cut(two_triangles())
    assert side[:3].tolist() in ([True] * 3, [False] * 3)
    assert side[3:].tolist() == (~side[:3]).tolist()


def test_cut_parts_a_disconnected_graph_with_its_largest_component() -> None:
    adjacency = two_triangles()
    adjacency[2, 3] = adjacency[3, 2] = adjacency[5, 3] = adjacency[3, 5] = adjacency[4, 5] = adjacency[5, 4] = 0
    assert normalised_cut(adjacency).tolist() == [True] * 3 + [False] * 3


def test_low_frequencies_are_the_signals_that_are_constant_on_clusters() -> None:
    """The pooled energy is that of the cluster means: all of it for such a signal, none for pure detail."""
    adjacency = random_adjacency(14, seed=2)
    labels = np.unique(low_frequencies(adjacency, 5).round(9), axis=0, return_inverse=True)[1].reshape(-1)
    assert labels.max() == 4
    signal = np.random.default_rng(0).standard_normal((14, 3))
    means = np.stack([signal[labels == cluster].mean(0) for cluster in range(5)])[labels]
    pool = HaarPool(3, 5)

    def energy(values: np.ndarray) -> np.ndarray:
        cloud = pool.points(torch.from_numpy(values), edges_of(adjacency), torch.zeros(14, dtype=torch.long), 1)
        return (cloud.points[0] ** 2).sum(0).numpy()

    np.testing.assert_allclose(energy(means), (means**2).sum(0), rtol=1e-10)
    np.testing.assert_allclose(energy(signal), (means**2).sum(0), rtol=1e-10)
    np.testing.assert_allclose(energy(signal - means), 0, atol=1e-20)


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
