"""Gradient, Hessian and its products inside the kernels, against plain NumPy and finite differences."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from flowpool.kernels.cloud import make_cloud, merge_nodes, rotate_points, scratch_size
from flowpool.kernels.divergence import evaluate
from flowpool.kernels.hessian import leading_hessian, shifted_factor, solve_factored
from flowpool.kernels.machine.jit import entry
from flowpool.kernels.machine.lanes import exponential, load, store
from flowpool.kernels.machine.rows import rows_of
from flowpool.kernels.response import hessian_product, keep_plans
from flowpool.kernels.scratch import PLACES, open_track, open_work, place_track, place_work
from flowpool.kernels.systems import conjugate_gradients, precondition

Array = NDArray[np.float64]


@entry
def exponentials(values, result):  # type: ignore[no-untyped-def]
    source, target = rows_of(values), rows_of(result)
    for j in range(0, values.shape[1], 8):
        store(target, 0, j, exponential(load(source, 0, j)))


def test_exponential_is_exact_to_rounding() -> None:
    values = np.linspace(-700, 700, 4096).reshape(1, -1)
    result = np.empty_like(values)
    exponentials(values, result)
    np.testing.assert_allclose(result, np.exp(values), rtol=1e-15)


def test_exponential_keeps_nan_and_survives_minus_infinity() -> None:
    values = np.array([[np.nan, -np.inf, -1e300, 0.0, 1.0, -1.0, 0.5, np.nan]])
    result = np.empty_like(values)
    exponentials(values, result)
    assert np.isnan(result[0, [0, 7]]).all()
    assert (result[0, 1:3] < 1e-300).all()
    assert result[0, 3] == 1.0


@entry
def one_graph(  # type: ignore[no-untyped-def]
    nodes, bits, masses, start, given_masses, epsilon, direction, fine, memory, table, members, merged, atom_of, places,
    gradient, product, matrix, lead_product, solved, images, basis,
):  # fmt: skip
    """Gradient, Hessian and H W of one graph, and solutions of ``(H + 50 diag(2 a)) w = W``.

    The matrix is that of the coordinates in the hull, ``lead_product`` the image of W without its other coordinates and
    ``solved`` the solution by the factor. ``images`` are ``H w`` for two solutions w by conjugate gradients, with all
    coordinates of the hull in their model and with only one.
    """
    count, features = start.shape[1], start.shape[2]
    buffer = rows_of(memory)
    atoms = merge_nodes(bits, masses, 0, nodes.shape[0], False, table, members, merged, atom_of)
    cloud, used = make_cloud(nodes, features, members, merged, atoms, given_masses, epsilon, 1e-10, buffer, places)
    dimension = rotate_points(start, 0, count, features, cloud.hull, 1e-13, cloud.basis, cloud.parked, cloud.outside)
    used = place_track(places, used, count, dimension)
    track = open_track(buffer, places)
    place_work(places, used, count, cloud.length, dimension, cloud.widest)
    work = open_work(buffer, places)
    here = track.here
    for i in range(count):
        here.potential[0, i] = 0.0
        here.self_potential[0, i] = 0.5 * epsilon * math.log(given_masses[i])
        for e in range(dimension):
            here.points[i, e] = cloud.parked[i, e]
            here.potential[0, i] += here.points[i, e] ** 2
            for d in range(features):
                track.first[i, e] += direction[i, d] * cloud.basis[e, d]
    evaluate(
        cloud.coordinates, cloud.masses, cloud.length, cloud.hull, dimension, here.points, count, cloud.point_masses,
        epsilon, max(epsilon, 4.0), 1e-14, here, work,
    )  # fmt: skip
    keep_plans(cloud, count, work)
    hull = cloud.hull
    leading_hessian(
        cloud.coordinates, cloud.length, hull, hull, here.points, count, here.pulled, cloud.point_masses, epsilon, work
    )
    hessian_product(cloud, dimension, here.points, count, track.first, epsilon, 0.0, fine, work, track.solution)
    for i in range(count):
        for e in range(dimension):
            for d in range(features):
                gradient[i, d] += here.gradient[i, e] * cloud.basis[e, d]
                product[i, d] += track.solution[i, e] * cloud.basis[e, d]
        for e in range(hull):
            track.right[i, e] = track.first[i, e]
            for k in range(i, count):
                for c in range(hull):
                    if k > i or c >= e:
                        value = work.hessian[i * hull + e, k * hull + c]
                        matrix[i, e, k, c] = value
                        matrix[k, c, i, e] = value
    hessian_product(cloud, dimension, here.points, count, track.right, epsilon, 0.0, True, work, track.solution)
    shifted_factor(count, hull, cloud.point_masses, 50.0, work.hessian, work.factor, work.pivots)
    solve_factored(count, hull, work.factor, work.pivots, track.first, track.newton, work)
    for i in range(count):
        for e in range(hull):
            lead_product[i, e] = track.solution[i, e]
            solved[i, e] = track.newton[i, e]
    for e in range(dimension):
        for d in range(features):
            basis[e, d] = cloud.basis[e, d]
    for attempt in range(2):
        lead = hull if attempt == 0 else 1
        if lead < hull:
            leading_hessian(
                cloud.coordinates, cloud.length, hull, lead, here.points, count, here.pulled, cloud.point_masses,
                epsilon, work,
            )  # fmt: skip
        precondition(count, cloud.point_masses, 50.0, work)
        shifted_factor(count, lead, cloud.point_masses, 50.0, work.hessian, work.factor, work.pivots)
        conjugate_gradients(
            cloud, dimension, lead, here.points, count, epsilon, 50.0, 1e-13, math.inf, False, True, work.factor,
            work.pivots, track.first, track.newton, track, work,
        )  # fmt: skip
        hessian_product(cloud, dimension, here.points, count, track.newton, epsilon, 0.0, True, work, track.solution)
        for i in range(count):
            for e in range(dimension):
                images[attempt, i, e] = track.solution[i, e] + 100.0 * given_masses[i] * track.newton[i, e]
    return dimension, cloud.hull, atoms


class Graph:
    """One graph with everything that :func:`one_graph` says about it."""

    def __init__(
        self, nodes: Array, masses: Array, points: Array, point_masses: Array, epsilon: float, way: Array,
        fine: bool = True,
    ) -> None:  # fmt: skip
        count, features = points.shape
        most = len(nodes)
        self.gradient, self.product = np.zeros_like(points), np.zeros_like(points)
        matrix = np.zeros((count, features, count, features))
        lead_product, solved = np.zeros((count, features)), np.zeros((count, features))
        images = np.zeros((2, count, features))
        basis = np.zeros((features, features))
        self.dimension, self.hull, self.atoms = one_graph(
            nodes, nodes.view(np.int64), masses, points[None].copy(), point_masses, epsilon, way, fine,
            np.zeros((1, 2 * scratch_size(count, features, most))), np.full(4 * most, -1), np.empty(most, np.int64),
            np.empty(most), np.empty(most, np.int64), np.empty((PLACES, 2), np.int64),
            self.gradient, self.product, matrix, lead_product, solved, images, basis,
        )  # fmt: skip
        hull = self.hull
        self.matrix = matrix[:, :hull, :, :hull].reshape(count * hull, count * hull)
        self.lead_product, self.solved = lead_product[:, :hull], solved[:, :hull]
        self.images = images[:, :, : self.dimension]
        self.basis = basis[: self.dimension]


def plan(cost: Array, rows: Array, columns: Array, epsilon: float) -> Array:
    """Entropic transport by Sinkhorn's algorithm in the log domain."""
    f = np.zeros(len(rows))
    for _ in range(20_000):
        g = -epsilon * np.log(np.exp((f[:, None] - cost) / epsilon).sum(0)) + epsilon * np.log(columns)
        step = epsilon * np.log(rows / np.exp((f[:, None] + g - cost) / epsilon).sum(1))
        f = f + step
        if np.abs(step).max() < 1e-14:
            break
    result: Array = np.exp((f[:, None] + g - cost) / epsilon)
    return result


def plain_gradient(nodes: Array, masses: Array, points: Array, point_masses: Array, epsilon: float) -> Array:
    """``2 (Q X - P Y)``."""
    kept = masses > 0
    squares: Callable[[Array, Array], Array] = lambda x, y: ((x[:, None] - y[None]) ** 2).sum(-1)  # noqa: E731
    to_nodes = plan(squares(points, nodes[kept]), point_masses, masses[kept], epsilon)
    to_points = plan(squares(points, points), point_masses, point_masses, epsilon)
    return 2 * (to_points @ points - to_nodes @ nodes[kept])


@pytest.fixture(params=[(5, 3, 7, 0.5), (4, 6, 5, 1.0), (3, 2, 20, 0.3), (1, 4, 9, 0.4)], ids=str)
def case(request: pytest.FixtureRequest) -> tuple[Array, Array, Array, Array, float, Array]:
    count, features, number, epsilon = request.param
    rng = np.random.default_rng(number)
    nodes = rng.standard_normal((number, features))
    nodes[-1] = nodes[0]  # twins
    masses = rng.uniform(0.5, 1.5, number)
    masses[1] = 0.0
    masses /= masses.sum()
    nodes -= masses @ nodes
    nodes /= math.sqrt(masses @ (nodes**2).sum(1))
    point_masses = rng.uniform(0.5, 1.5, count)
    points = 0.4 * rng.standard_normal((count, features))
    return nodes, masses, points, point_masses / point_masses.sum(), epsilon, rng.standard_normal((count, features))


def test_gradient_is_that_of_plain_sinkhorn(case: tuple[Array, Array, Array, Array, float, Array]) -> None:
    graph = Graph(*case)
    nodes, masses, points, point_masses, epsilon, _ = case
    assert graph.atoms == len(nodes) - 2  # one twin, one node without mass
    np.testing.assert_allclose(graph.gradient, plain_gradient(nodes, masses, points, point_masses, epsilon), atol=1e-11)


def test_product_is_the_derivative_of_the_gradient(case: tuple[Array, Array, Array, Array, float, Array]) -> None:
    nodes, masses, points, point_masses, epsilon, way = case
    graph, step = Graph(*case), 1e-5
    ahead = Graph(nodes, masses, points + step * way, point_masses, epsilon, way).gradient
    behind = Graph(nodes, masses, points - step * way, point_masses, epsilon, way).gradient
    np.testing.assert_allclose(graph.product, (ahead - behind) / (2 * step), atol=1e-7)


def test_product_in_float32_is_that_in_float64_to_its_precision(
    case: tuple[Array, Array, Array, Array, float, Array],
) -> None:
    double, single = Graph(*case), Graph(*case, fine=False)
    assert len(case[2]) == 1 or not np.array_equal(single.product, double.product)  # of one point no plan changes
    np.testing.assert_allclose(single.product, double.product, atol=1e-5 * np.abs(double.product).max())


def test_matrix_and_product_agree(case: tuple[Array, Array, Array, Array, float, Array]) -> None:
    graph, way = Graph(*case), case[5]
    np.testing.assert_allclose(graph.basis @ graph.basis.T, np.eye(graph.dimension), atol=1e-14)
    inside = (way @ graph.basis[: graph.hull].T).reshape(-1)
    np.testing.assert_allclose((graph.matrix @ inside).reshape(len(way), -1), graph.lead_product, atol=1e-12)


def test_factor_and_conjugate_gradients_solve_the_system(case: tuple[Array, Array, Array, Array, float, Array]) -> None:
    graph = Graph(*case)
    right = case[5] @ graph.basis.T
    matrix = graph.matrix + np.diag(np.repeat(100 * case[3], graph.hull))
    expected = np.linalg.solve(matrix, right[:, : graph.hull].reshape(-1)).reshape(graph.solved.shape)
    np.testing.assert_allclose(graph.solved, expected, atol=1e-11 * np.abs(expected).max())
    for image in graph.images:
        np.testing.assert_allclose(image, right, atol=1e-11 * np.abs(right).max())
