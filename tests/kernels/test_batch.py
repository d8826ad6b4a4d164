"""The compiled solver and its adjoint: closed forms, finite differences, threads, and the torch engine as the specification."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flowpool.core.constants import RIDGE
from flowpool.core.divergence import make_energy
from flowpool.core.flow import follow
from flowpool.kernels import batch as compiled
from flowpool.kernels.records import Given
from flowpool.status import Status

Array = NDArray[np.float64]
RESOLUTION = 1e-10
OK, SINGULAR = Status.OK.value, Status.SINGULAR.value


def batch(
    clouds: Sequence[Array], count: int, epsilon: float, seed: int = 0, masses: Sequence[Array] | None = None
) -> tuple[Any, ...]:
    """Centred clouds of variance one and a random start, as arguments of ``solve`` up to epsilon."""
    weights = [np.full(len(y), 1 / len(y)) for y in clouds] if masses is None else [b / b.sum() for b in masses]
    framed = []
    for y, b in zip(clouds, weights, strict=True):
        y = y - b @ y
        framed.append(y / math.sqrt(b @ (y**2).sum(1)))
    features = clouds[0].shape[1]
    start = np.random.default_rng(seed).standard_normal((count, features))
    ptr = np.cumsum([0, *(len(y) for y in clouds)])
    return (
        np.concatenate(framed), np.concatenate(weights), ptr, np.repeat(start[None], len(clouds), 0),
        np.full(count, 1 / count), np.full(len(clouds), epsilon),
    )  # fmt: skip


def random_clouds(graphs: int, features: int, seed: int = 0, smallest: int = 6, largest: int = 20) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((rng.integers(smallest, largest), features)) for _ in range(graphs)]


def given(arguments: tuple[Any, ...]) -> Given:
    """The same for the kernels; the frames of such clouds are where they are."""
    nodes, masses, ptr, start, point_masses, epsilon = arguments
    order, weights = np.arange(len(nodes)), np.ones(nodes.shape[1])
    reference = start[0] if len(start) else np.zeros(start.shape[1:])
    return Given(nodes, masses, order, ptr, weights, reference, point_masses, epsilon, True, RESOLUTION)


def solve(arguments: tuple[Any, ...], tolerance: float = 1e-5, max_steps: int = 1000, threads: int = 1) -> Any:
    return compiled.solve(given(arguments), tolerance, max_steps, threads)


def adjoint(arguments: tuple[Any, ...], kept: Any, cotangent: Array, ridge: float = RIDGE, threads: int = 1) -> Any:
    return compiled.adjoint(given(arguments), kept, cotangent, ridge, threads)


def specified(arguments: tuple[Any, ...], tolerance: float) -> Any:
    """The torch engine on the same batch, padded."""
    nodes, masses, ptr, start, point_masses, epsilon = arguments
    sizes = np.diff(ptr)
    padded = np.zeros((len(sizes), sizes.max(), nodes.shape[1]))
    weights = np.zeros(padded.shape[:2])
    for g, size in enumerate(sizes):
        padded[g, :size], weights[g, :size] = nodes[ptr[g] : ptr[g + 1]], masses[ptr[g] : ptr[g + 1]]
    energy = make_energy(
        torch.from_numpy(start),
        torch.from_numpy(padded),
        torch.from_numpy(epsilon),
        torch.from_numpy(np.repeat(point_masses[None], len(sizes), 0)),
        torch.from_numpy(weights),
    )
    return follow(energy, torch.from_numpy(start), tolerance, 1000)


@pytest.mark.parametrize(("count", "features", "epsilon"), [(5, 8, 0.3), (3, 2, 0.1), (8, 24, 0.3)])
def test_gives_the_answer_of_the_torch_engine(count: int, features: int, epsilon: float) -> None:
    arguments = batch(random_clouds(6, features), count, epsilon)
    (solved, _), expected = solve(arguments, 1e-10), specified(arguments, 1e-10)
    assert (solved.status == 0).all()
    np.testing.assert_allclose(solved.points, expected.points.numpy(), atol=1e-9)


def test_unequal_point_masses_give_the_answer_of_the_torch_engine() -> None:
    arguments = batch(random_clouds(4, 3), 4, 0.3)
    arguments = (*arguments[:4], np.array([0.1, 0.4, 0.3, 0.2]), arguments[5])
    (solved, _), expected = solve(arguments, 1e-10), specified(arguments, 1e-10)
    np.testing.assert_allclose(solved.points, expected.points.numpy(), atol=1e-9)


def test_one_point_is_the_mean() -> None:
    solved, _ = solve(batch(random_clouds(3, 4), 1, 0.5), 1e-9)
    np.testing.assert_allclose(solved.points, 0.0, atol=1e-9)


def test_as_many_points_as_nodes_are_the_nodes() -> None:
    clouds = [np.random.default_rng(seed).standard_normal((4, 3)) for seed in range(3)]
    arguments = batch(clouds, 4, 0.05, seed=5)
    solved, _ = solve(arguments, 1e-9)
    for g in range(3):
        nodes = arguments[0][4 * g : 4 * g + 4]
        apart = np.abs(solved.points[g][:, None] - nodes[None]).max(-1)
        # A local minimum may put two points on one node; where no node is left out, points and nodes are equal.
        if len(set(apart.argmin(1))) == 4:
            np.testing.assert_allclose(apart.min(1), 0.0, atol=1e-7)
    gaps = [np.abs(solved.points[g][:, None] - arguments[0][4 * g : 4 * g + 4][None]).max(-1) for g in range(3)]
    assert any(len(set(gap.argmin(1))) == 4 for gap in gaps)


@pytest.mark.parametrize("count", [3, 7])
def test_more_points_than_nodes_end_stationary(count: int) -> None:
    arguments = batch([np.random.default_rng(1).standard_normal((2, 3))], count, 0.1)
    solved, _ = solve(arguments)
    assert solved.status[0] in (OK, SINGULAR)
    assert solved.residual[0] <= (1e-3 if solved.status[0] == SINGULAR else 1e-5)  # in a valley the divergence decides


def test_twins_weigh_as_one_node_and_empty_nodes_are_absent() -> None:
    rng = np.random.default_rng(2)
    cloud = rng.standard_normal((7, 3))
    masses = np.array([2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    doubled = np.concatenate([cloud, cloud[:1], rng.standard_normal((1, 3))])
    merged, _ = solve(batch([cloud], 3, 0.2, masses=[masses]), 1e-9)
    twin, _ = solve(batch([doubled], 3, 0.2, masses=[np.array([1.0] * 8 + [0.0])]), 1e-9)
    np.testing.assert_allclose(twin.points, merged.points, atol=1e-12)


def test_points_end_in_the_hull_of_the_nodes() -> None:
    flat = np.random.default_rng(3).standard_normal((9, 6))
    flat[:, 4:] = 0.0
    solved, _ = solve(batch([flat], 4, 0.3), 1e-8)
    np.testing.assert_allclose(solved.points[0, :, 4:], 0.0, atol=1e-8)


@pytest.mark.parametrize(("count", "features"), [(3, 3), (6, 20)], ids=["factor", "conjugate gradients"])
def test_adjoint_is_the_derivative(count: int, features: int) -> None:
    masses = np.random.default_rng(9).uniform(0.5, 1.5, 9)
    cloud = np.random.default_rng(4).standard_normal((9, features))
    arguments = batch([cloud], count, 0.3, masses=[masses])
    solved, kept = solve(arguments, 1e-11)
    rng = np.random.default_rng(5)
    cotangent = rng.standard_normal(solved.points.shape)
    found = adjoint(arguments, kept, cotangent)
    assert not found.damped.any()
    assert found.residual[0] < 1e-8

    def value(nodes: Array, b: Array, epsilon: Array) -> float:
        # Started at X*, so that the flow ends in the same basin.
        moved = (nodes, b, arguments[2], solved.points, arguments[4], epsilon)
        return float((solve(moved, 1e-11)[0].points[0] * cotangent[0]).sum())

    nodes, b, epsilon = arguments[0], arguments[1], arguments[5]
    step = 2e-5
    way = rng.standard_normal(nodes.shape)
    slope = (value(nodes + step * way, b, epsilon) - value(nodes - step * way, b, epsilon)) / (2 * step)
    assert (found.nodes * way).sum() == pytest.approx(slope, rel=1e-5)
    turn = rng.standard_normal(len(b)) * b
    turn -= turn.mean()
    slope = (value(nodes, b + step * turn, epsilon) - value(nodes, b - step * turn, epsilon)) / (2 * step)
    assert (found.masses * turn).sum() == pytest.approx(slope, rel=1e-5)
    slope = (value(nodes, b, epsilon + step) - value(nodes, b, epsilon - step)) / (2 * step)
    assert found.epsilon[0] == pytest.approx(slope, rel=1e-5)


def test_mean_of_the_points_moves_with_the_nodes() -> None:
    arguments = batch(random_clouds(5, 8), 4, 0.3)
    _, kept = solve(arguments, 1e-9)
    cotangent = np.tile(np.arange(8.0), (5, 4, 1)) / 4
    found = adjoint(arguments, kept, cotangent)
    # The mean of X* is that of the nodes, so each node gets its mass times the gradient of the mean.
    np.testing.assert_allclose(found.nodes, arguments[1][:, None] * np.arange(8.0), atol=1e-6)


def test_the_gradient_of_a_singular_graph_is_the_minimum_norm_one() -> None:
    # Each of two stationary points taken twice: any way of pulling a pair apart leaves the divergence as it is.
    arguments = batch(random_clouds(1, 3), 2, 0.3)
    solved, kept = solve(arguments, 1e-10)
    cotangent = np.random.default_rng(0).standard_normal(solved.points.shape)
    expected = adjoint(arguments, kept, cotangent)
    twice = kept._replace(ends=np.repeat(kept.ends, 2, 1))
    doubled = (*arguments[:3], np.zeros((1, 4, 3)), np.full(4, 0.25), arguments[5])
    apart = np.random.default_rng(1).standard_normal(solved.points.shape)
    pulled = np.stack([cotangent / 2 + apart, cotangent / 2 - apart], 2).reshape(1, 4, 3)
    found = adjoint(doubled, twice, pulled)
    assert found.damped[0] and not expected.damped[0]
    np.testing.assert_allclose(found.nodes, expected.nodes, atol=1e-7)
    np.testing.assert_allclose(found.epsilon, expected.epsilon, atol=1e-7)


def test_a_large_ridge_damps_the_gradient() -> None:
    arguments = batch(random_clouds(1, 3), 3, 0.3)
    solved, kept = solve(arguments)
    cotangent = np.random.default_rng(0).standard_normal(solved.points.shape)
    cotangent -= cotangent.mean(1, keepdims=True)  # the mean moves with the frame
    plain, damped = (adjoint(arguments, kept, cotangent, ridge=ridge) for ridge in (RIDGE, 1.0))
    assert not damped.damped[0] and not plain.damped[0]  # no direction is flat, however large the ridge
    assert np.linalg.norm(damped.nodes) < 0.9 * np.linalg.norm(plain.nodes)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    arguments = batch(random_clouds(17, 8), 5, 0.3)
    reference, kept = solve(arguments)
    cotangent = np.random.default_rng(0).standard_normal(reference.points.shape)
    gradients = adjoint(arguments, kept, cotangent)
    for threads in (2, 3, 8):
        for one, other in zip(solve(arguments, threads=threads)[0], reference, strict=True):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(adjoint(arguments, kept, cotangent, threads=threads), gradients, strict=True):
            np.testing.assert_array_equal(one, other)


def test_graphs_do_not_know_of_each_other() -> None:
    clouds = random_clouds(6, 8)
    together, _ = solve(batch(clouds, 5, 0.3))
    for g, cloud in enumerate(clouds):
        np.testing.assert_array_equal(solve(batch([cloud], 5, 0.3))[0].points[0], together.points[g])


def test_steps_are_capped_and_the_residual_says_how_far() -> None:
    arguments = batch(random_clouds(4, 8), 5, 0.3)
    solved, _ = solve(arguments, max_steps=5)
    assert (solved.steps == 5).all()
    assert (solved.status == 3).all()
    assert (solved.residual > 1e-5).all()


def test_overflow_is_reported_for_its_graph_alone() -> None:
    arguments = batch(random_clouds(3, 8), 5, 0.3)
    clean, _ = solve(arguments)
    broken, _ = solve((*arguments[:5], np.array([0.3, 1e-310, 0.3])))
    assert broken.status[1] == 5
    np.testing.assert_array_equal(broken.points[[0, 2]], clean.points[[0, 2]])


def test_an_empty_batch_gives_empty_arrays() -> None:
    arguments = (
        np.zeros((0, 3)),
        np.zeros(0),
        np.zeros(1, np.int64),
        np.zeros((0, 4, 3)),
        np.full(4, 0.25),
        np.zeros(0),
    )
    solved, kept = solve(arguments)
    assert solved.points.shape == (0, 4, 3)
    assert adjoint(arguments, kept, np.zeros((0, 4, 3))).nodes.shape == (0, 3)


def test_arrays_that_do_not_fit_are_refused() -> None:
    arguments = batch(random_clouds(2, 3), 3, 0.3)
    with pytest.raises(ValueError, match="nodes has shape"):
        solve((arguments[0].astype(np.float16), *arguments[1:]))
    with pytest.raises(ValueError, match="ptr must rise"):
        solve((*arguments[:2], arguments[2] + 1, *arguments[3:]))
    with pytest.raises(ValueError, match="reference has shape"):
        solve((*arguments[:3], [np.asfortranarray(arguments[3][0])], *arguments[4:]))


def run(program: str, **environment: str) -> str:
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip
    return done.stdout


def test_import_loads_no_compiler() -> None:
    assert run("import sys, flowpool.kernels; print('numba' in sys.modules)").strip() == "False"


def test_works_after_fork() -> None:
    arguments = batch(random_clouds(8, 8), 5, 0.3)
    expected, _ = solve(arguments, threads=2)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = np.array_equal(solve(arguments, threads=2)[0].points, expected.points)
        finally:  # whatever happens, the child must not go on with the tests of its parent
            os.write(writer, b"1" if same else b"0")
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    assert os.waitpid(child, 0)[1] == 0
