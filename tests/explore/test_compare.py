"""Compare: each pool against what it is by definition."""

from typing import Any

import numpy as np
import ot
import pytest
from explore.clouds import crescent, question

from flowpool.explore import compare, play


def pools(nodes: list[list[float]], **changes: Any) -> dict[str, dict[str, Any]]:
    asked = question(nodes, **changes)
    del asked["measured"]
    return {pool["name"]: pool for pool in compare.answer(asked)["pools"]}


def test_the_mean_loses_the_radius() -> None:
    found = pools(crescent())["mean"]
    nodes = np.array(crescent())
    np.testing.assert_allclose(found["points"], [np.average(nodes[:, :2], axis=0, weights=nodes[:, 2])])
    assert found["lost"] == pytest.approx(1.0)


def test_flow_is_what_play_shows() -> None:
    given = play.answer(question(crescent()))
    found = pools(crescent())["flow"]
    np.testing.assert_allclose(found["points"], given["points"])
    assert found["lost"] == pytest.approx(given["lost"])


def test_sort_takes_the_highest_nodes() -> None:
    nodes = crescent()
    highest = sorted(nodes, key=lambda node: -node[1])[:4]
    np.testing.assert_allclose(pools(nodes)["sort"]["points"], [node[:2] for node in highest])


def test_wegl_with_a_point_for_every_node_loses_nothing() -> None:
    nodes = [[x, y, 1.0] for x, y, _ in crescent(5)]
    assert pools(nodes, points=5)["wegl"]["lost"] == pytest.approx(0.0, abs=1e-6)


def test_step_is_the_barycentric_map_of_sinkhorn() -> None:
    asked = play.read(question(crescent(), epsilon=0.2))
    start = (asked.mean + asked.radius * asked.reference).numpy()
    nodes, masses = asked.nodes.numpy(), asked.masses.numpy()
    plan = ot.sinkhorn(np.full(4, 0.25), masses, ot.dist(start, nodes), 0.2 * asked.radius**2, stopThr=1e-12)
    np.testing.assert_allclose(pools(crescent(), epsilon=0.2)["step"]["points"], 4 * plan @ nodes, atol=1e-6)


def test_k_means_of_few_places_finds_them_and_their_masses() -> None:
    nodes = [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 2.0], [0.0, 5.0, 4.0]]
    found = pools(nodes, points=6)["k-means"]
    order = np.lexsort(np.array(found["points"]).T)
    np.testing.assert_allclose(np.array(found["points"])[order], [[0, 0], [1, 0], [0, 5]], atol=1e-9)
    np.testing.assert_allclose(np.array(found["masses"])[order], [0.25, 0.25, 0.5])
    assert found["lost_with_masses"] == pytest.approx(0.0, abs=1e-6)
    assert found["lost"] > 0.1  # with equal masses they are another measure


def test_one_place_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="at least two distinct nodes"):
        pools([[1.0, 1.0, 1.0], [1.0, 1.0, 2.0]])
