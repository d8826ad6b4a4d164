"""Play: points, path, plan and numbers against closed forms and other ways to compute them."""

import numpy as np
import ot
import pytest
import torch
from explore.clouds import crescent, question
from scipy.optimize import linear_sum_assignment

from flowpool import references
from flowpool.core.divergence import make_energy
from flowpool.core.flow import descend
from flowpool.explore import play


def test_one_point_is_the_mean_and_loses_everything_but_it() -> None:
    nodes = [[0.0, 0.0, 1.0], [4.0, 0.0, 3.0]]
    given = play.answer(question(nodes, points=1))
    np.testing.assert_allclose(given["points"], [[3.0, 0.0]], atol=1e-9)
    np.testing.assert_allclose(given["plan"], [[0.25, 0.75]], atol=1e-12)
    assert given["radius"] == pytest.approx(np.sqrt(3))  # 0.25 * 9 + 0.75 * 1
    assert given["lost"] == pytest.approx(1.0)
    assert given["status"] == "OK"


def test_two_far_nodes_keep_their_places() -> None:
    given = play.answer(question([[-1.0, 0.0, 1.0], [1.0, 0.0, 1.0]], points=2, epsilon=0.02))
    assert sorted(x for x, _ in given["points"]) == pytest.approx([-1.0, 1.0], abs=1e-6)
    assert given["lost"] == pytest.approx(0.0, abs=1e-5)
    assert given["divergence"] == pytest.approx(0.0, abs=1e-9)


def test_lost_is_the_distance_of_the_best_assignment() -> None:
    nodes = [[x, y, 1.0] for x, y, _ in crescent(8)]
    given = play.answer(question(nodes, points=4))
    doubled = np.repeat(given["points"], 2, axis=0)  # every point has the mass of two nodes
    cost = ((doubled[:, None] - np.array(nodes)[None, :, :2]) ** 2).sum(-1)
    places = linear_sum_assignment(cost)
    assert given["lost"] * given["radius"] == pytest.approx(np.sqrt(cost[places].mean()))


@pytest.mark.parametrize("debias", [True, False])
def test_the_path_is_the_flow(debias: bool) -> None:
    """Every frame lies on what Algorithm 1 draws with a fifth of the shortest step, from the same start."""
    asked = play.read(question(crescent(), debias=debias))
    given = play.answer(question(crescent(), debias=debias))
    frames = torch.tensor(given["path"], dtype=torch.float64)
    start = asked.mean + asked.radius * references.normal(2, 4, seed=1).double()
    torch.testing.assert_close(frames[0], start)
    torch.testing.assert_close(frames[-1], torch.tensor(given["points"], dtype=torch.float64))
    assert given["path_steps"][0] == 0 and len(given["path_steps"]) == len(frames)
    assert given["path_steps"] == sorted(set(given["path_steps"]))

    visited = [start]

    def remember(points: torch.Tensor, gradient: torch.Tensor, step: float, _: None) -> tuple[torch.Tensor, None]:
        visited.append((points - step * gradient)[0])
        return visited[-1][None], None

    energy = make_energy(
        start[None],
        asked.nodes[None],
        asked.epsilon * asked.radius**2,
        masses=asked.masses[None],
        debias=debias,
    )
    with torch.no_grad():
        # The velocity is -grad / (2 a), with a = 1/4.
        descend(energy, start[None], 0.025 * 4 / 2, 3000, tolerance=1e-4, update_step=remember)
    way = torch.stack(visited)  # (L, M, 2)
    nearest = (frames[:, None] - way).norm(dim=-1).amax(-1).amin(1)  # (K,)
    length = (frames[0] - frames[-1]).norm(dim=-1).max()
    assert float(nearest.max()) < 0.06 * float(length)


def test_every_frame_is_where_the_solver_is_after_so_many_steps() -> None:
    given, asked = play.answer(question(crescent())), play.read(question(crescent()))
    for frame, step in list(zip(given["path"], given["path_steps"], strict=True))[1:]:
        stopped = asked.pool(step)
        assert int(stopped.steps[0]) == step
        np.testing.assert_allclose(frame, stopped.points[0], atol=1e-12)


def test_without_debiasing_every_step_goes_towards_the_barycentric_map() -> None:
    given = play.answer(question(crescent(), debias=False, epsilon=0.3))
    asked = play.read(question(crescent(), debias=False, epsilon=0.3))
    nodes, frames = asked.nodes.numpy(), np.array(given["path"])
    for here, there, size in zip(frames, frames[1:-1], play.EULER, strict=False):
        cost = ot.dist(here, nodes)
        level = 0.3 * asked.radius**2
        plan = ot.sinkhorn(np.full(4, 0.25), asked.masses.numpy(), cost, level, method="sinkhorn_log", stopThr=1e-13)
        np.testing.assert_allclose(there, here + size * (4 * plan @ nodes - here), atol=1e-6)
    assert len(frames) == len(play.EULER) + 2


def test_a_long_flow_is_thinned_out() -> None:
    given = play.answer(question(crescent(), points=6, epsilon=1.0))
    assert given["steps"] > play.MOST_FRAMES
    assert len(given["path"]) <= play.MOST_FRAMES + 1
    assert given["path_steps"][-1] == given["steps"]


@pytest.mark.parametrize("debias", [True, False])
def test_frames_are_measured_like_the_end(debias: bool) -> None:
    given = play.answer(question(crescent(), debias=debias, measured=True))
    assert given["path_lost"][-1] == pytest.approx(given["lost"])
    assert given["path_divergence"][-1] == pytest.approx(given["divergence"], rel=1e-5)
    assert given["path_divergence"][0] > given["path_divergence"][-1]
    assert len(given["path_lost"]) == len(given["path_divergence"]) == len(given["path"])


def test_the_plan_follows_the_order_of_the_nodes() -> None:
    nodes = crescent()
    plan = np.array(play.answer(question(nodes))["plan"])
    backwards = np.array(play.answer(question(nodes[::-1]))["plan"])
    np.testing.assert_allclose(backwards, plan[:, ::-1], atol=1e-9)
    np.testing.assert_allclose(plan.sum(1), 0.25, atol=1e-9)


def test_a_large_epsilon_without_debiasing_leaves_the_mean_alone() -> None:
    """From twice the largest variance on, all points of the biased minimiser are the mean (section 3.3)."""
    mean = play.read(question(crescent())).mean
    biased = play.answer(question(crescent(), debias=False, epsilon=4.0))
    np.testing.assert_allclose(biased["points"], mean.expand(4, 2), atol=1e-4)
    assert biased["lost"] == pytest.approx(1.0, abs=1e-4)
    debiased = play.answer(question(crescent(), epsilon=4.0))
    assert debiased["lost"] < 0.8


def test_no_nodes_and_one_place() -> None:
    empty = play.answer(question([]))
    assert empty["status"] == "EMPTY" and empty["points"] == [] and empty["lost"] is None
    single = play.answer(question([[2.0, 3.0, 1.0]], measured=True))
    np.testing.assert_allclose(single["points"], [[2.0, 3.0]] * 4)
    assert single["lost"] == 0.0 and single["divergence"] == 0.0
