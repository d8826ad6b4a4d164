"""Shares on lines: exact where that is known, and the same to the bit in any company."""

import math

import numpy as np
import pytest
from scipy.spatial.distance import cdist, pdist

from flowpool.lab.frozen.embeddings import Slices
from flowpool.lab.frozen.slices import NUM_SLICES, random_directions, shares_on_lines
from flowpool.sklearn import wasserstein_distances
from flowpool.sklearn.sets import read_sets


def draw(count: int = 12, smallest: int = 12) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [
        random.normal(random.normal(size=3), size=(size, 3)) for size in random.integers(smallest, smallest + 20, count)
    ]


def test_slices_bound_the_distance_from_below():
    sets = draw(12, smallest=30)
    exact = wasserstein_distances(sets)[np.triu_indices(12, 1)]
    means = shares_on_lines(read_sets(sets), random_directions(3, 63, np.random.RandomState(0)), 8)  # whole bases
    assert (pdist(means.reshape(12, -1)) * math.sqrt(3 / (63 * 8)) < exact).all()


@pytest.mark.parametrize("dim", [1, 3, 8, 70])
def test_directions_are_orthonormal_bases(dim):
    directions = random_directions(dim, NUM_SLICES, np.random.RandomState(0))
    assert directions.shape == (dim, NUM_SLICES)
    for first in range(0, NUM_SLICES, dim):
        basis = directions[:, first : first + dim]
        np.testing.assert_allclose(basis.T @ basis, np.eye(basis.shape[1]), atol=1e-12)
    if dim == 3:
        assert np.abs(directions[:, :3] - directions[:, 3:6]).max() > 0.1


def test_slices_on_a_line_are_exact_transport():
    # In one dimension every direction is the line itself, and sets of M members are their own quantiles.
    sets = [np.sort(members[:6, :1], axis=0) for members in draw()]
    vectors = shares_on_lines(read_sets(sets), np.ones((1, 1)), 6).reshape(len(sets), -1) / math.sqrt(6)
    np.testing.assert_allclose(cdist(vectors, vectors), wasserstein_distances(sets), atol=1e-9)


def test_shares_on_lines_are_the_means_of_parts():
    members = np.random.default_rng(0).permutation(12)[:, None] + 0.0
    means = shares_on_lines(read_sets([members, members[:4]]), np.array([[1.0, -1.0]]), 3)
    np.testing.assert_allclose(means[0].T, [[1.5, 5.5, 9.5], [-9.5, -5.5, -1.5]])
    cut = np.sort(np.repeat(members[:4], 3)).reshape(3, 4).mean(1)  # shares end inside of members
    np.testing.assert_allclose(means[1, :, 0], cut)


@pytest.mark.parametrize("dim", [1, 2, 40])
@pytest.mark.parametrize("weighted", [False, True])
def test_company_changes_no_bit_of_a_slice(dim, weighted):
    random = np.random.default_rng(dim)
    members = [random.normal(size=(size, dim)) for size in random.integers(1, 300, 60)]
    sets = read_sets(members, [random.uniform(size=len(own)) for own in members] if weighted else None)
    directions = random.normal(size=(dim, 64))
    together = shares_on_lines(sets, directions, 8)
    for number in range(60):
        np.testing.assert_array_equal(
            shares_on_lines(sets.part(number, number + 1), directions, 8)[0], together[number]
        )


def test_slices_do_not_feel_an_offset():
    sets = draw()
    near, far = (Slices(4, 0).fit_transform([members + offset for members in sets]) for offset in (0, 1e7))
    np.testing.assert_allclose(far - far.mean(0), near - near.mean(0), atol=1e-6)
