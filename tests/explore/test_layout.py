"""Places of nodes: known figures come out, and no graph is refused."""

import numpy as np
import pytest

from flowpool.explore.layout import layout


def both(pairs: list[tuple[int, int]]) -> np.ndarray:
    forward = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return np.concatenate([forward, forward[::-1]], axis=1)


def test_a_path_is_a_straight_line_with_equal_steps() -> None:
    places = layout(both([(i, i + 1) for i in range(6)]), 7)
    steps = np.diff(places[:, 0])
    np.testing.assert_allclose(steps, steps[0], rtol=0.02)
    assert np.abs(places[:, 1]).max() < 0.02
    assert np.abs(places).max() == pytest.approx(1.0)


def test_a_ring_is_round() -> None:
    places = layout(both([(i, (i + 1) % 6) for i in range(6)]), 6)
    radii = np.linalg.norm(places - places.mean(0), axis=1)
    np.testing.assert_allclose(radii, radii.mean(), rtol=0.02)
    sides = np.linalg.norm(places - np.roll(places, 1, axis=0), axis=1)
    np.testing.assert_allclose(sides, sides.mean(), rtol=0.02)


def test_nodes_that_look_alike_do_not_lie_on_one_another() -> None:
    places = layout(both([(0, i) for i in range(1, 5)]), 5)
    gaps = np.linalg.norm(places[:, None] - places, axis=-1)[~np.eye(5, dtype=bool)]
    assert gaps.min() > 0.3


def test_parts_without_a_connection_lie_apart() -> None:
    places = layout(both([(0, 1), (2, 3)]), 5)
    assert np.isfinite(places).all()
    gaps = np.linalg.norm(places[:, None] - places, axis=-1)[~np.eye(5, dtype=bool)]
    assert gaps.min() > 0.1


def test_graphs_without_edges_and_with_one_node() -> None:
    assert layout(both([]), 1).tolist() == [[0.0, 0.0]]
    assert np.isfinite(layout(both([]), 3)).all()
