"""Embeddings and kernels of the frozen protocol: values against definitions and other solvers."""

import itertools
import math

import numpy as np
import ot
import pytest
import torch

from flowpool.lab.datasets import GraphDataset, load_dataset, make_digits
from flowpool.lab.frozen.embeddings import FSW, OTKE, WEGL, Moments, Sorted
from flowpool.lab.frozen.methods import METHODS, labels_are_degrees, squared_distances, weights_of
from flowpool.lab.leakproof import subset
from flowpool.lab.pools import POOLS

SETS = [np.random.default_rng(number).normal(size=(12 + number, 2)) for number in range(8)]
WEIGHTS = [
    np.random.default_rng(number).integers(1, 4, len(members)).astype(float) for number, members in enumerate(SETS)
]
REPEATED = [np.repeat(members, own.astype(int), axis=0) for members, own in zip(SETS, WEIGHTS, strict=True)]


def small(count: int = 24) -> GraphDataset:
    return subset(load_dataset("MUTAG"), np.arange(count))


def test_moments():
    expected = [np.concatenate([members.mean(0), members.std(0)]) for members in REPEATED]
    np.testing.assert_allclose(Moments("deviations").fit(SETS).transform(SETS, WEIGHTS), expected)
    np.testing.assert_allclose(Moments("mean").transform(SETS), [members.mean(0) for members in SETS])
    np.testing.assert_allclose(Moments("sum").transform(SETS, WEIGHTS), [members.sum(0) for members in REPEATED])


def test_sort_is_the_pool_of_the_bench():
    sets = [members[:number] for members, number in zip(SETS, (3, 4, 12, 7, 6, 5, 9, 11), strict=True)]
    batch = torch.arange(8).repeat_interleave(torch.tensor([len(members) for members in sets]))
    pool = POOLS["sort"](2, 5)
    expected = pool(torch.from_numpy(np.concatenate(sets)), torch.empty(2, 0, dtype=torch.long), batch, 8).vector
    np.testing.assert_array_equal(Sorted(5).transform(sets), expected)


@pytest.mark.parametrize("kind", [WEGL, OTKE])
def test_references_are_those_of_the_vectorizer_and_weights_are_repetitions(kind):
    fitted = kind(3, random_state=0).fit(SETS)
    np.testing.assert_allclose(fitted.transform(SETS, WEIGHTS), fitted.transform(REPEATED), atol=1e-6)


def test_wegl_is_the_pool_of_the_bench():
    fitted = WEGL(3, random_state=0).fit(SETS)
    pool = POOLS["wegl"](2, 3).double()
    pool.reference.copy_(torch.from_numpy(fitted.reference_))
    pool.is_fitted.fill_(True)
    batch = torch.arange(8).repeat_interleave(torch.tensor([len(members) for members in SETS]))
    expected = pool(torch.from_numpy(np.concatenate(SETS)), torch.empty(2, 0, dtype=torch.long), batch, 8).vector
    np.testing.assert_allclose(fitted.transform(SETS), expected, atol=1e-9)


def test_linear_transport_of_moved_sets_is_exact_and_otherwise_never_below_the_distance():
    generator = np.random.default_rng(0)
    sets = [generator.normal(size=(5, 2)) for _ in range(6)]
    fitted = WEGL(5, random_state=0).fit(sets)
    one, moved = fitted.transform([sets[0], sets[0] + [3.0, -4.0]])
    assert np.linalg.norm(one - moved) == pytest.approx(5)
    vectors, equal = fitted.transform(sets), np.full(5, 0.2)
    for a, b in itertools.combinations(range(6), 2):
        distance = math.sqrt(ot.emd2(equal, equal, ot.dist(sets[a], sets[b])))
        assert np.linalg.norm(vectors[a] - vectors[b]) >= distance - 1e-12


def test_fsw_is_the_pool_of_the_bench_and_weights_are_repetitions():
    fitted = FSW(8, random_state=0).fit(SETS)
    np.testing.assert_allclose(fitted.transform(SETS, WEIGHTS), fitted.transform(REPEATED), atol=1e-9)
    pool = POOLS["fsw"](2, 1).double()
    pool.embedding.load_state_dict(fitted.embedding_.state_dict())
    batch = torch.arange(8).repeat_interleave(torch.tensor([len(members) for members in SETS]))
    found = pool(torch.from_numpy(np.concatenate(SETS)), torch.empty(2, 0, dtype=torch.long), batch, 8).vector
    np.testing.assert_allclose(fitted.transform(SETS), found.detach(), atol=1e-9)


def test_otke_is_the_pool_of_the_bench():
    fitted = OTKE(3, random_state=0).fit(SETS)
    pool = POOLS["otke"](2, 3).double()
    with torch.no_grad():
        pool.anchors = torch.nn.Parameter(torch.from_numpy(fitted.anchors_))
        pool.reference = torch.nn.Parameter(torch.from_numpy(fitted.reference_))
        pool.bandwidth.fill_(fitted.bandwidth_)
        batch = torch.arange(8).repeat_interleave(torch.tensor([len(members) for members in SETS]))
        found = pool(torch.from_numpy(np.concatenate(SETS)), torch.empty(2, 0, dtype=torch.long), batch, 8).vector
    np.testing.assert_allclose(fitted.transform(SETS), found, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_distances_to_training_graphs(name):
    train, others = small(), subset(load_dataset("MUTAG"), np.arange(100, 106))
    fitted = METHODS[name](train, 2, 4, 0)
    for view, values in fitted.views(train).items():
        assert values.shape == (24, 24)
        np.testing.assert_allclose(values, values.T, atol=1e-6)
        np.testing.assert_allclose(np.diag(values), 1 if view == "kernel" else 0, atol=1e-6)
        assert fitted.views(others)[view].shape == (6, 24)
    # A training graph that comes as another graph is where it was.
    alone = subset(train, np.array([5]))
    for view, values in fitted.views(alone).items():
        np.testing.assert_allclose(values[0], fitted.views(train)[view][5], atol=1e-4)


def test_wasserstein_is_exact_and_knows_masses():
    digits = subset(make_digits(), np.arange(6))
    squares = METHODS["wasserstein"](digits, 0, 4, 0).views(digits)["raw"]
    features = (digits.features - digits.features.mean(0)) / digits.features.std(0, unbiased=False)
    clouds = features.double().split(digits.node_ptr.diff().tolist())
    masses = weights_of(digits)
    assert masses is not None
    a, b = (masses[number] / masses[number].sum() for number in (1, 4))
    assert squares[1, 4] == pytest.approx(ot.emd2(a, b, ot.dist(clouds[1].numpy(), clouds[4].numpy())), rel=1e-5)


def test_labels_are_compared_by_their_subtrees():
    # Two paths of three nodes, one with another label at an end; without rounds, the histograms are (3, 0) and (2, 1).
    features = torch.tensor([[1.0, 0], [1, 0], [1, 0], [1, 0], [1, 0], [0, 1]])
    path = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    graphs = GraphDataset(
        "PATHS",
        features,
        torch.tensor([0, 3, 6]),
        torch.cat([path, path], 1),
        torch.tensor([0, 4, 8]),
        torch.tensor([0, 1]),
        ("0", "1"),
    )
    assert METHODS["wl"](graphs, 0, 1, 0).views(graphs)["kernel"][0, 1] == pytest.approx(2 / math.sqrt(5))
    with pytest.raises(ValueError, match="DIGITS have attributes"):
        METHODS["wl"](subset(make_digits(), np.arange(3)), 0, 1, 0)


def test_degrees_are_compared_as_numbers():
    # Stars with 2, 3 and 9 leaves. As labels, any two degrees are as far apart as any others.
    sizes = torch.tensor([3, 4, 10])
    edges = [torch.stack([torch.zeros(n - 1, dtype=torch.long), torch.arange(1, n)]) for n in sizes.tolist()]
    degrees = torch.cat([torch.tensor([n - 1] + [1] * (n - 1)) for n in sizes.tolist()])
    graphs = GraphDataset(
        "STARS",
        torch.nn.functional.one_hot(degrees).float(),
        torch.cat([torch.tensor([0]), sizes.cumsum(0)]),
        torch.cat([torch.cat([own, own.flip(0)], 1) for own in edges], 1),
        torch.cat([torch.tensor([0]), (2 * (sizes - 1)).cumsum(0)]),
        torch.tensor([0, 0, 1]),
        ("0", "1"),
    )
    assert labels_are_degrees(graphs) and not labels_are_degrees(small())
    hubs = METHODS["sort"](graphs, 0, 1, 0).views(graphs)["raw"]
    assert hubs[0, 1] < hubs[0, 2] / 4
    assert METHODS["sort"](graphs, 0, 1, 0).views(subset(graphs, np.array([1])))["raw"][0, 1] == pytest.approx(0)


def test_squared_distances_far_from_the_origin():
    one, other = SETS[0] + 1e6, SETS[1] + 1e6
    np.testing.assert_allclose(squared_distances(one, other), ot.dist(SETS[0], SETS[1]), rtol=1e-6)
