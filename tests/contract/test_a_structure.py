"""Section A of the contract: batch structure, rows 1 to 10."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from contract.support import Pool, cloud, grid_cloud, index_of, radius, run, start, weighting
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowpool import Status, flow_pool
from flowpool.core.divergence import sinkhorn_divergence

DTYPES = (torch.float32, torch.float64)
REACHED = (Status.OK, Status.SINGULAR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("structure", ["index", "index_and_size", "ptr"])
def test_row_01_empty_batch_gives_no_rows_and_a_zero_size_backward(
    pool: Pool, dtype: torch.dtype, structure: str
) -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    given_as = {
        "index": {"batch": nothing},
        "index_and_size": {"batch": nothing, "dim_size": 0},
        "ptr": {"ptr": torch.zeros(1, dtype=torch.long)},
    }
    x = torch.zeros(0, 2, dtype=dtype, requires_grad=True)
    pooled = pool(x, **given_as[structure])
    assert pooled.points.shape == (0, 3, 2)
    assert pooled.points.dtype == dtype
    assert pooled.status.shape == pooled.residual.shape == (0,)
    pooled.points.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 2)


def test_row_02_empty_graphs_are_zero_rows_and_leave_neighbours_alone(pool: Pool) -> None:
    x = cloud(8, 2)
    together = pool(x, index_of([5, 0, 3, 0]), dim_size=4)
    assert together.status.tolist() == [Status.OK, Status.EMPTY, Status.OK, Status.EMPTY]
    assert torch.equal(together.points[1], torch.zeros(3, 2).double())
    assert torch.equal(together.points[3], torch.zeros(3, 2).double())
    assert pool.same(together.points[0], pool(x[:5]).points[0])
    assert pool.same(together.points[2], pool(x[5:]).points[0])
    by_offsets = pool(x, ptr=torch.tensor([0, 5, 5, 8, 8]))
    assert torch.equal(by_offsets.points, together.points)


@pytest.mark.parametrize("dim_size", [3, 4, 9])
def test_row_02_dim_size_is_the_number_of_rows(pool: Pool, dim_size: int) -> None:
    pooled = pool(cloud(8, 2), index_of([5, 0, 3]), dim_size=dim_size)
    assert pooled.points.shape[0] == pooled.status.shape[0] == dim_size
    assert pooled.status[3:].tolist() == [Status.EMPTY] * (dim_size - 3)


def test_row_02_an_empty_graph_sends_no_gradient_to_what_is_shared(function: Pool) -> None:
    x, masses = cloud(8, 2).requires_grad_(), torch.ones(8).double().requires_grad_()
    shares = torch.ones(3).double().requires_grad_(function.engine == "torch")
    epsilon = torch.tensor(0.1).double().requires_grad_()
    pooled = function(x, index_of([5, 0, 3]), masses=masses, point_masses=shares, epsilon=epsilon)
    inputs = [value for value in (x, masses, shares, epsilon) if value.requires_grad]
    found = torch.autograd.grad(pooled.points[1].sum(), inputs, allow_unused=True)
    for gradient, value in zip(found, inputs, strict=True):
        assert torch.equal(torch.zeros_like(value) if gradient is None else gradient, torch.zeros_like(value))


def test_row_03_unsorted_batch_is_sorted_inside_and_gradients_return_in_order(pool: Pool) -> None:
    x, batch = cloud(12, 2).requires_grad_(), index_of([4, 5, 3])
    expected = pool(x, batch).points
    (sorted_gradient,) = torch.autograd.grad((weighting(expected) * expected).sum(), x)
    # Interleaves the graphs but keeps the order inside each, so that a stable sort restores the very same rows.
    order = torch.tensor([4, 0, 9, 5, 1, 2, 10, 6, 3, 7, 11, 8])
    shuffled = x.detach()[order].requires_grad_()
    pooled = pool(shuffled, batch[order])
    assert torch.equal(pooled.points, expected)
    (gradient,) = torch.autograd.grad((weighting(expected) * pooled.points).sum(), shuffled)
    assert torch.equal(gradient, sorted_gradient[order])


@pytest.mark.parametrize(
    ("batch", "dim_size", "message"),
    [
        (torch.tensor([0, 0, -1, 1]), None, r"(batch|index)\[2\] is -1"),
        (torch.tensor([0, 0, 5, 7]), 5, r"(batch|index)\[2\] is 5"),
        (torch.tensor([0, 0, 1]), None, r"\(3,\).*\(4,\)"),
        (torch.tensor([[0, 0, 1, 1]]), None, r"\(1, 4\)"),
        (torch.tensor([0.0, 0.0, 1.0, 1.0]), None, "float32"),
        (torch.tensor([True, True, False, False]), None, "bool"),
        (torch.tensor([0j, 0j, 1, 1]), None, "complex64"),
        ([0, 0, 1, 1], None, "list"),
        (torch.tensor([0, 0, 1, 2]), 2, r"(batch|index)\[3\] is 2.*dim_size=2"),
        (torch.tensor([0, 0, 1, 1]), -1, "dim_size is -1"),
        (torch.tensor([0, 0, 1, 2**62]), None, r"(batch|index)\[3\] is 4611686018427387904"),
    ],
)
def test_row_04_a_bad_index_is_named_before_anything_is_computed(
    pool: Pool, batch: Tensor, dim_size: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pool(cloud(4, 2), batch, dim_size=dim_size)


def test_row_04_thousands_of_random_structures_give_a_result_or_a_value_error(engine: str) -> None:
    calls, results, refused = map(
        int, run("fuzz_structure.py", engine, "10000" if engine == "compiled" else "3000", timeout=120).split()
    )
    assert calls == results + refused >= 3000
    assert results > 500
    assert refused > 500


@pytest.mark.parametrize(
    ("ptr", "message"),
    [
        (torch.tensor([1, 4]), r"ptr\[0\] is 1"),
        (torch.tensor([0, 3, 2, 4]), "falls from 3 to 2"),
        (torch.tensor([0, 3]), r"ptr\[-1\] is 3, but there are 4"),
        (torch.tensor([0, 5]), r"ptr\[-1\] is 5, but there are 4"),
        (torch.tensor([0, 2, 2**62]), "4611686018427387904"),
        (torch.tensor([], dtype=torch.long), r"\(0,\)|dim_size is -1"),
        (torch.tensor(4), r"\(\)"),
        (torch.tensor([[0, 4]]), r"\(1, 2\)"),
        (torch.tensor([0.0, 4.0]), "float32"),
        ([0, 4], "list"),
        (torch.tensor([0]), r"ptr\[-1\] is 0, but there are 4"),
    ],
)
def test_row_05_bad_offsets_are_refused(pool: Pool, ptr: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool(cloud(4, 2), ptr=ptr)


def test_row_05_index_and_offsets_must_agree(pool: Pool) -> None:
    x, ptr = cloud(5, 2), torch.tensor([0, 2, 5])
    both = pool(x, torch.tensor([0, 0, 1, 1, 1]), ptr)
    assert torch.equal(both.points, pool(x, ptr=ptr).points)
    with pytest.raises(ValueError, match=r"(batch|index)\[2\] is 0.*graph 1"):
        pool(x, torch.tensor([0, 0, 0, 1, 1]), ptr)
    with pytest.raises(ValueError, match="dim_size.*3"):
        pool(x, ptr=ptr, dim_size=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_points", range(1, 9))
def test_row_06_a_single_node_is_pooled_to_copies_of_it(pool: Pool, num_points: int, dtype: torch.dtype) -> None:
    x = cloud(1, 3, seed=num_points, dtype=dtype)
    pooled = pool(x, num_points=num_points)
    assert torch.equal(pooled.points, x.expand(1, num_points, 3))
    assert pooled.status.tolist() == [Status.OK]
    assert pooled.residual.tolist() == [0.0]
    jacobian = torch.autograd.functional.jacobian(lambda v: pool(v, num_points=num_points).points.mean(1), x)
    torch.testing.assert_close(jacobian.view(3, 3), torch.eye(3, dtype=dtype), rtol=0, atol=1e-6)


def test_row_06_no_point_stays_behind_at_the_origin_or_far_away(pool: Pool) -> None:
    for value in (0.0, 1e-30, 1e30):
        x = torch.full((1, 2), value, dtype=torch.float32)
        assert torch.equal(pool(x).points, x.expand(1, 3, 2))


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 7, 18, 50])
def test_row_07_identical_nodes_pool_like_one_and_share_its_gradient(pool: Pool, num_nodes: int) -> None:
    one = cloud(1, 3, seed=4).requires_grad_()
    single = pool(one, num_points=4)
    seed = weighting(single.points)
    (expected,) = torch.autograd.grad((seed * single.points).sum(), one)

    many = one.detach().repeat(num_nodes, 1).requires_grad_()
    pooled = pool(many, num_points=4)
    torch.testing.assert_close(pooled.points, single.points, rtol=0, atol=1e-14)
    (gradient,) = torch.autograd.grad((seed * pooled.points).sum(), many)
    # Of all gradients with this sum, equal shares have the least norm.
    torch.testing.assert_close(gradient, expected / num_nodes * torch.ones(num_nodes, 1), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient.sum(0, keepdim=True), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_nodes", [3, 7, 50])
def test_row_07_identical_nodes_that_do_not_round_well(pool: Pool, num_nodes: int) -> None:
    """A mean of equal numbers is not always that number: its rounding must not become a cloud of its own."""
    for value in (0.1, 1e6 + 0.1, 1 / 3e-9):
        x = torch.full((num_nodes, 2), value, dtype=torch.float64, requires_grad=True)
        pooled = pool(x)
        torch.testing.assert_close(pooled.points, x.detach()[:3].unsqueeze(0), rtol=1e-12, atol=0)
        (gradient,) = torch.autograd.grad(pooled.points.sum(), x)
        torch.testing.assert_close(gradient, torch.full_like(gradient, 3 / num_nodes), rtol=1e-12, atol=0)


@pytest.mark.parametrize("distance", [1e-1, 3e-2, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 0.0])
def test_row_08_nearly_equal_nodes_have_a_bounded_gradient(function: Pool, distance: float) -> None:
    base = cloud(4, 2, seed=3)
    x = torch.cat([base, base[:1] + distance * torch.tensor([[0.6, 0.8]]).double()]).requires_grad_()
    pooled = function(x, num_points=3, tolerance=1e-9)
    assert int(pooled.status[0]) in REACHED
    seed = weighting(pooled.points)
    (gradient,) = torch.autograd.grad((seed * pooled.points).sum(), x)
    assert gradient.isfinite().all()
    # The stated floor of the solve bounds the gradient; these twins must not even come near it.
    assert gradient.norm() <= 1e3 * seed.norm()
    if distance == 0.0:
        torch.testing.assert_close(gradient[0], gradient[4], rtol=1e-9, atol=1e-12)
    elif distance <= 1e-3:
        assert (gradient[0] - gradient[4]).norm() <= 1e3 * distance * gradient.norm()


@pytest.mark.parametrize("distance", [1e-1, 3e-2, 2e-2, 1e-2, 1e-4, 1e-6, 1e-8, 0.0])
def test_row_08_the_jacobian_stays_the_identity_until_nodes_touch(pool: Pool, distance: float) -> None:
    """M = N with one pair at this distance: X* = Y, so the Jacobian is a permutation while the pair is apart."""
    base = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]]).double()
    x = torch.cat([base, base[2:] + torch.tensor([[0.0, distance]]).double()])
    begin = x + torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, -1e-3], [0.0, 1e-3]]).double()
    options = {"reference": _frame(begin, x), "tolerance": 1e-9, "max_steps": 5000}
    jacobian = torch.autograd.functional.jacobian(lambda v: pool(v, **options).points, x).view(8, 8)
    assert jacobian.isfinite().all()
    floor = 1e-9  # what the solve calls zero
    assert torch.linalg.matrix_norm(jacobian, 2) <= 1 / floor
    if distance > 1e-2:
        torch.testing.assert_close(jacobian, torch.eye(8).double(), rtol=0, atol=1e-4)
    # However close: the twins' common motion is known, only its sharing is not.
    common = jacobian.view(4, 2, 4, 2)[2:].sum(0)[:, 2:].sum(1)
    torch.testing.assert_close(common, 2 * torch.eye(2).double(), rtol=0, atol=1e-4)


def _frame(reference: Tensor, nodes: Tensor) -> Tensor:
    """Points given in the nodes' own coordinates, as a reference in units of their mean and scale."""
    return (reference - nodes.mean(0)) / radius(nodes)


def _gap(points: Tensor, nodes: Tensor) -> float:
    """Distance between two clouds of equal size, whatever their order."""
    return min(float((points[list(order)] - nodes).abs().max()) for order in permutations(range(len(nodes))))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_nodes", [1, 2, 6, 40])
def test_row_09_one_point_is_the_weighted_mean(pool: Pool, num_nodes: int, weighted: bool) -> None:
    x = cloud(num_nodes, 3, seed=num_nodes)
    masses = cloud(num_nodes, 1, seed=8).squeeze(1).square() if weighted else torch.ones(num_nodes).double()
    pooled = pool(x, num_points=1, masses=masses)
    assert int(pooled.status[0]) == Status.OK
    torch.testing.assert_close(pooled.points[0, 0], masses @ x / masses.sum(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(4))
def test_row_09_as_many_points_as_nodes_are_the_nodes(pool: Pool, num_nodes: int, seed: int) -> None:
    x = cloud(num_nodes, 2, seed=seed)
    pooled = pool(x, num_points=num_nodes, tolerance=1e-9)
    assert int(pooled.status[0]) == Status.OK
    assert _gap(pooled.points[0], x) <= 1e-8


@pytest.mark.parametrize("num_nodes", [3, 4])
@pytest.mark.parametrize("extra", ["N+1", "2N", "3N", "10N"])
def test_row_09_more_points_than_nodes_arrive_or_say_so(pool: Pool, num_nodes: int, extra: str) -> None:
    num_points = {"N+1": num_nodes + 1, "2N": 2 * num_nodes, "3N": 3 * num_nodes, "10N": 10 * num_nodes}[extra]
    x = cloud(num_nodes, 2, seed=num_nodes)
    pooled = pool(x, num_points=num_points, max_steps=1000 if extra in ("N+1", "2N") else 30)
    status, residual = int(pooled.status[0]), float(pooled.residual[0])
    assert pooled.points.isfinite().all()
    epsilon = 0.1 * radius(x) ** 2
    divergence = float(sinkhorn_divergence(pooled.points, x.unsqueeze(0), epsilon))
    if status == Status.MAX_STEPS:
        assert 1e-5 < residual < math.inf
    else:
        assert status in REACHED
        if residual > 1e-5:
            # In a valley, where next to nothing is left to be gained: tolerance^2 R^2 to second order, and where points
            # merge, so that the divergence is flatter than its quadratic model, a few times as much.
            assert status == Status.SINGULAR
            options = {"relative": False, "epsilon": epsilon, "tolerance": 1e-9, "on_failure": "ignore"}
            further = flow_pool(x, reference=pooled.points[0], max_steps=100, **options).points
            gained = divergence - float(sinkhorn_divergence(further, x.unsqueeze(0), epsilon))
            assert gained <= 4 * 1e-10 * radius(x) ** 2
    begin = start(num_points, 2) * radius(x) + x.mean(0)
    before = float(sinkhorn_divergence(begin.unsqueeze(0), x.unsqueeze(0), epsilon))
    assert -1e-10 <= divergence <= before
    # More points than nodes approximate the cloud at least as well as one point does.
    assert divergence <= 0.5 * float(sinkhorn_divergence(x.mean(0).view(1, 1, 2), x.unsqueeze(0), epsilon))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, list[int]]:
    """Nodes and sizes of two to four graphs, with or without twins."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    seed = draw(st.integers(0, 10**6))
    make = draw(st.sampled_from([cloud, grid_cloud]))
    return make(sum(sizes), 2, seed), sizes


@given(batches(), st.randoms(use_true_random=False))
def test_row_10_node_order_changes_rounding_only(pool: Pool, drawn: tuple[Tensor, list[int]], random: object) -> None:
    x, sizes = drawn
    order = list(range(len(x)))
    random.shuffle(order)  # type: ignore[attr-defined]
    batch = index_of(sizes)
    size = max(radius(x), 1e-3)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        values = x.to(dtype)
        one, other = pool(values, batch), pool(values[order], batch[order])
        assert float((one.points - other.points).abs().max()) <= tolerance * size


@given(batches(), st.randoms(use_true_random=False))
def test_row_10_company_and_graph_order_change_nothing(
    pool: Pool, drawn: tuple[Tensor, list[int]], random: object
) -> None:
    x, sizes = drawn
    x.requires_grad_()
    parts = x.split(sizes)
    together = pool(x, index_of(sizes)).points
    seed = weighting(together)
    (gradient,) = torch.autograd.grad((seed * together).sum(), x)
    gradients = gradient.split(sizes)
    for graph, part in enumerate(parts):
        alone = pool(part).points
        assert pool.same(alone[0], together[graph])
        (own,) = torch.autograd.grad((seed[graph] * alone[0]).sum(), part)
        assert pool.same(own, gradients[graph])
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    swapped = torch.cat([parts[g] for g in order]).detach().requires_grad_()
    points = pool(swapped, index_of([sizes[g] for g in order])).points
    assert pool.same(points, together[order])
    (back,) = torch.autograd.grad((seed[order] * points).sum(), swapped)
    assert pool.same(back, torch.cat([gradients[g] for g in order]))


@pytest.mark.parametrize("num_points", [4, 5])
@pytest.mark.parametrize("sizes", [[5, 60, 300], [17, 16, 15, 33]])
def test_row_10_graphs_of_very_different_size_do_not_meet(pool: Pool, sizes: list[int], num_points: int) -> None:
    x = cloud(sum(sizes), 3, seed=2)
    together = pool(x, index_of(sizes), num_points=num_points).points
    for graph, part in enumerate(x.split(sizes)):
        assert pool.same(pool(part, num_points=num_points).points[0], together[graph])
