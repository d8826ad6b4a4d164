"""Gradient, Hessian, its products and its systems inside the kernels, against plain NumPy and finite differences."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flowpool.core.constants import FLAT, INVERSIONS, MOST_LEADING
from flowpool.kernels.cloud import (
    basis_of,
    cloud_memory,
    graph_memory,
    make_room,
    merge_nodes,
    reduce_start,
    reduce_to_hull,
)
from flowpool.kernels.divergence import evaluate, start_cold
from flowpool.kernels.flow import move_to
from flowpool.kernels.frame import arrange
from flowpool.kernels.hessian import form_hessian, shifted_factor, solve_factored
from flowpool.kernels.machine.jit import entry
from flowpool.kernels.machine.lanes import exponential, load, store
from flowpool.kernels.machine.linear import factorise, padded, smallest_eigenvalue, smallest_pivot
from flowpool.kernels.machine.rows import rows_of
from flowpool.kernels.memory import open_cloud, open_graph
from flowpool.kernels.records import DIMENSION, FACTS, HEAVY, Given, Kept
from flowpool.kernels.response import hessian_product, keep_plans
from flowpool.kernels.systems import conjugate_gradients, factorise_others, is_exact, solve_adjoint, solve_newton

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
def smallest(matrix, scratch):  # type: ignore[no-untyped-def]
    """Whether the matrix is positive definite, its smallest pivot and its smallest eigenvalue."""
    size, inverse, right, solution = len(matrix), rows_of(scratch[:1]), rows_of(scratch[1:2]), rows_of(scratch[2:])
    definite = factorise(rows_of(matrix), size, inverse)
    pivot = smallest_pivot(inverse, size)
    return definite, pivot, smallest_eigenvalue(rows_of(matrix), size, inverse, INVERSIONS, right, solution)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 40])
@pytest.mark.parametrize("flattest", [1e-6, 1e-3, 0.5])
def test_smallest_eigenvalue_is_seen_where_pivots_do_not_show_it(size: int, flattest: float) -> None:
    """In any direction; the others are as large as curvatures are."""
    rng = np.random.default_rng(size)
    for _ in range(20):
        basis = np.linalg.qr(rng.standard_normal((size, size)))[0]
        values = rng.uniform(1.0, 2.0, size)
        values[0] = flattest
        wide = np.zeros((size, padded_to_lanes(size)))
        wide[:, :size] = (basis * values) @ basis.T
        definite, pivot, found = smallest(wide, np.zeros((3, padded_to_lanes(size))))
        assert definite and flattest * (1 - 1e-9) <= found <= pivot * (1 + 1e-9)
        assert found <= 1.2 * flattest


def padded_to_lanes(size: int) -> int:
    return -(-size // 8) * 8


@entry
def one_graph(  # type: ignore[no-untyped-def]
    given, kept, start, epsilon, direction, shift, ridge,
    gradient, product, matrix, block_product, solved, image, newton, way, basis,
):  # fmt: skip
    """Everything that the kernels know about the points ``start`` of one graph, along the direction W.

    Gradient and ``H W``; the Hessian in the leading coordinates, its product with W there and the solution of
    ``(H + shift diag(2 a)) w = W`` there; the image of the same solution in all coordinates by conjugate gradients; the
    Newton step for W, and the solution of the adjoint.
    """
    count, features = start.shape
    room = make_room(len(given.nodes), features)
    arrange(given, kept, 0, room)
    merge_nodes(given, kept, 0, room)
    first = cloud_memory(given, kept, 0, room, np.empty(0))
    cloud = open_cloud(first, room.cloud_places)
    for i in range(count):
        for d in range(padded(features)):
            cloud.outside[i, d] = start[i, d] if d < features else 0.0
    reduce_to_hull(given, kept, 0, room, cloud)
    reduce_start(given, kept, 0, cloud)
    atoms, own_basis = int(kept.facts[0, HEAVY]), basis_of(kept, 0, given)
    second = graph_memory(
        given, kept, 0, room, epsilon, atoms, int(kept.facts[0, DIMENSION]), MOST_LEADING, np.empty(0)
    )
    graph = open_graph(second, room.graph_places)
    for i in range(count):
        for e in range(padded(graph.dimension)):
            graph.there.points[i, e] = cloud.points[i, e] if e < graph.dimension else 0.0
    evaluate(graph, graph.there, epsilon, start_cold(graph, graph.there, epsilon), 1e-14)
    move_to(graph.there, graph.here, graph)
    keep_plans(graph)
    form_hessian(graph, epsilon)
    dimension, lead = graph.dimension, graph.lead
    for e in range(dimension):
        for d in range(features):
            basis[e, d] = own_basis[e, d]
    for i in range(count):
        for e in range(padded(dimension)):
            graph.first[i, e] = 0.0
            graph.velocity[i, e] = 0.0
        for e in range(dimension):
            for d in range(features):
                graph.first[i, e] += direction[i, d] * own_basis[e, d]
            if e < lead:
                graph.velocity[i, e] = graph.first[i, e]
    hessian_product(graph, graph.first, epsilon, 0.0, graph.solution)
    for i in range(count):
        for e in range(dimension):
            gradient[i, e] = graph.here.gradient[i, e]
            product[i, e] = graph.solution[i, e]
        for e in range(lead):
            for k in range(i, count):
                for c in range(lead):
                    if k > i or c >= e:
                        matrix[i, e, k, c] = matrix[k, c, i, e] = graph.hessian[i * lead + e, k * lead + c]
    hessian_product(graph, graph.velocity, epsilon, 0.0, graph.solution)
    for i in range(count):
        for e in range(lead):
            block_product[i, e] = graph.solution[i, e]
    definite = shifted_factor(graph, shift, graph.slide_factor, graph.slide_pivots) and factorise_others(graph, shift)
    solve_factored(graph, graph.slide_factor, graph.slide_pivots, graph.first, graph.newton)
    for i in range(count):
        for e in range(padded(dimension)):
            graph.right[i, e] = graph.first[i, e]
        for e in range(lead):
            solved[i, e] = graph.newton[i, e]
    conjugate_gradients(graph, epsilon, shift, 1e-13, math.inf, False, 0.0, graph.slide_factor, graph.slide_pivots)
    hessian_product(graph, graph.solution, epsilon, shift, graph.velocity)
    for i in range(count):
        for e in range(padded(dimension)):
            if e < dimension:
                image[i, e] = graph.velocity[i, e]
            graph.right[i, e] = graph.first[i, e]
    flattest = solve_newton(graph, epsilon, 1e-12, math.inf, False, False)
    for i in range(count):
        for e in range(padded(dimension)):
            if e < dimension:
                newton[i, e] = graph.solution[i, e]
            graph.right[i, e] = graph.first[i, e]
    residual, _ = solve_adjoint(graph, epsilon, ridge, lead < features)
    for i in range(count):
        for e in range(dimension):
            way[i, e] = graph.solution[i, e]
    return dimension, graph.hull, lead, atoms, definite, is_exact(graph, epsilon), flattest, residual


class Graph:
    """One graph with everything that :func:`one_graph` says about it."""

    def __init__(
        self, nodes: Array, masses: Array, points: Array, point_masses: Array, epsilon: float, way: Array,
        shift: float = 50.0, ridge: float = 1e-12,
    ) -> None:  # fmt: skip
        count, features = points.shape
        gradient, product, block_product, solved, image, newton, answer = np.zeros((7, count, features))
        matrix, basis = np.zeros((count, features, count, features)), np.zeros((features, features))
        weights, level, ptr, order = (
            np.ones(features),
            np.array([epsilon]),
            np.array([0, len(nodes)]),
            np.arange(len(nodes)),
        )
        given = Given(nodes, masses, order, ptr, weights, points, point_masses, level, True, 1e-10)
        kept = Kept(
            order.copy(), order.copy(), masses.copy(), np.zeros(nodes.shape),
            np.zeros((len(nodes) + count, padded_to_lanes(features))), np.zeros((1, 3, features)), np.zeros((1, FACTS)),
            np.zeros((1, count, features + 2)),
        )  # fmt: skip
        kept.frame[0, 1] = 1.0
        found = one_graph(
            given, kept, points, epsilon, way, shift, ridge,
            gradient, product, matrix, block_product, solved, image, newton, answer, basis,
        )  # fmt: skip
        self.dimension, self.hull, self.lead, self.atoms, self.definite, self.exact, self.flattest, self.residual = (
            found
        )
        lead = self.lead
        self.basis = basis[: self.dimension]
        self.gradient, self.product = (
            gradient[:, : self.dimension] @ self.basis,
            product[:, : self.dimension] @ self.basis,
        )
        self.matrix = matrix[:, :lead, :, :lead].reshape(count * lead, count * lead)
        self.block_product, self.solved = block_product[:, :lead], solved[:, :lead]
        self.image, self.newton, self.way = (
            image[:, : self.dimension],
            newton[:, : self.dimension],
            answer[:, : self.dimension],
        )


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


Case = tuple[Array, Array, Array, Array, float, Array]


@pytest.fixture(params=[(5, 3, 7, 0.5), (4, 6, 5, 1.0), (3, 2, 20, 0.3), (1, 4, 9, 0.4), (12, 8, 20, 0.5)], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
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


def test_gradient_is_that_of_plain_sinkhorn(case: Case) -> None:
    graph = Graph(*case)
    nodes, masses, points, point_masses, epsilon, _ = case
    assert graph.atoms == len(nodes) - 2  # one twin, one node without mass
    np.testing.assert_allclose(graph.gradient, plain_gradient(nodes, masses, points, point_masses, epsilon), atol=1e-11)


def test_hull_and_leading_coordinates_are_those_of_the_specification(case: Case) -> None:
    nodes, masses, points, _, epsilon, _ = case
    graph = Graph(*case)
    kept = nodes[masses > 0]
    assert graph.hull == np.linalg.matrix_rank(kept)
    np.testing.assert_allclose(graph.basis @ graph.basis.T, np.eye(graph.dimension), atol=1e-14)
    np.testing.assert_allclose(points @ graph.basis.T @ graph.basis, points, atol=1e-14)
    from leading import leading_directions

    cloud = torch.from_numpy(nodes)[None], torch.from_numpy(masses)[None]
    found = leading_directions(*cloud, torch.tensor([epsilon], dtype=torch.float64), len(points))
    taken = int((found.basis[0].norm(dim=-1) > 0).sum())
    assert graph.lead == taken <= max(1, MOST_LEADING // len(points))
    basis = graph.basis[:taken]
    np.testing.assert_allclose(basis.T @ basis, (found.basis[0].T @ found.basis[0]).numpy(), atol=1e-12)


def test_product_is_the_derivative_of_the_gradient(case: Case) -> None:
    nodes, masses, points, point_masses, epsilon, way = case
    graph, step = Graph(*case), 1e-5
    ahead = Graph(nodes, masses, points + step * way, point_masses, epsilon, way).gradient
    behind = Graph(nodes, masses, points - step * way, point_masses, epsilon, way).gradient
    np.testing.assert_allclose(graph.product, (ahead - behind) / (2 * step), atol=1e-7)


def test_matrix_and_product_agree(case: Case) -> None:
    graph, way = Graph(*case), case[5]
    inside = (way @ graph.basis[: graph.lead].T).reshape(-1)
    np.testing.assert_allclose((graph.matrix @ inside).reshape(len(way), -1), graph.block_product, atol=1e-12)


def test_factor_and_conjugate_gradients_solve_the_system(case: Case) -> None:
    graph = Graph(*case)
    right = case[5] @ graph.basis.T
    assert graph.definite
    matrix = graph.matrix + np.diag(np.repeat(100 * case[3], graph.lead))
    expected = np.linalg.solve(matrix, right[:, : graph.lead].reshape(-1)).reshape(graph.solved.shape)
    np.testing.assert_allclose(graph.solved, expected, atol=1e-11 * np.abs(expected).max())
    np.testing.assert_allclose(graph.image, right, atol=1e-11 * np.abs(right).max())


def whole_hessian(case: Case, dimension: int) -> Array:
    """H in the coordinates of the graph, column by column."""
    nodes, masses, points, point_masses, epsilon, _ = case
    basis = Graph(*case).basis
    columns = []
    for i in range(len(points)):
        for e in range(dimension):
            way = np.zeros_like(points)
            way[i] = basis[e]
            columns.append((Graph(nodes, masses, points, point_masses, epsilon, way).product @ basis.T).reshape(-1))
    matrix = np.array(columns)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-11)
    return matrix


def test_adjoint_solves_the_normal_equations(case: Case) -> None:
    ridge = 1e-4
    graph = Graph(*case, ridge=ridge)
    matrix, right = whole_hessian(case, graph.dimension), (case[5] @ graph.basis.T).reshape(-1)
    penalty = ridge * (2 / len(case[2])) ** 2
    expected = np.linalg.solve(matrix @ matrix + penalty * np.eye(len(matrix)), matrix @ right)
    np.testing.assert_allclose(graph.way.reshape(-1), expected, atol=1e-6 * np.abs(expected).max())
    assert graph.residual < 1e-6


def test_newton_step_is_the_filtered_inverse_or_refused(case: Case) -> None:
    graph = Graph(*case)
    matrix, right = whole_hessian(case, graph.dimension), (case[5] @ graph.basis.T).reshape(-1)
    unit = np.repeat(2 * case[3], graph.dimension)
    values, vectors = np.linalg.eigh(matrix / np.sqrt(unit[:, None] * unit[None]))
    if values[0] < -FLAT:  # these points are far from a minimum
        assert graph.flattest < -FLAT
        return
    turned = vectors.T @ (right / np.sqrt(unit))
    expected = vectors @ (values / (values**2 + FLAT**2) * turned) / np.sqrt(unit)
    np.testing.assert_allclose(graph.newton.reshape(-1), expected, atol=1e-2 * np.abs(expected).max())
