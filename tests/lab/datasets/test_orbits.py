"""ORBIT5K: the map, and its draws."""

import numpy as np

from flowpool.lab.datasets import make_orbits
from flowpool.lab.datasets.orbits import PARAMETERS


def test_each_point_follows_from_the_one_before() -> None:
    dataset = make_orbits(num_per_class=3, num_points=20)
    assert len(dataset) == 15 and dataset.node_ptr.diff().tolist() == [20] * 15
    assert dataset.class_names == ("2.5", "3.5", "4.0", "4.1", "4.3")
    for number in range(15):
        graph, r = dataset[number], PARAMETERS[number % 5]
        assert graph.y == number % 5
        x, y = graph.x.double().numpy().T
        following = (x[:-1] + r * y[:-1] * (1 - y[:-1])) % 1
        wrapped = np.abs(following - x[1:])
        np.testing.assert_allclose(np.minimum(wrapped, 1 - wrapped), 0, atol=1e-6)
        np.testing.assert_allclose(np.abs((y[:-1] + r * x[1:] * (1 - x[1:])) % 1 - y[1:]) % 1, 0, atol=1e-5)


def test_draws_are_stratified_seven_to_three() -> None:
    dataset = make_orbits(num_per_class=20, num_points=2)
    folds = dataset.folds or ()
    assert len(folds) == 5
    for fold in folds:
        assert sorted(np.concatenate(fold).tolist()) == list(range(100))
        counts = [np.bincount(dataset.labels[part], minlength=5).tolist() for part in fold]
        assert counts == [[13] * 5, [1] * 5, [6] * 5]
    assert not np.array_equal(folds[0].test, folds[1].test)


def test_orbits_are_the_same_every_time() -> None:
    one, other = (make_orbits(num_per_class=2, num_points=5) for _ in range(2))
    assert np.array_equal(one.features.numpy(), other.features.numpy())
