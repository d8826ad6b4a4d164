"""Section B of the contract: values, rows 11 to 19."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from contract.support import Pool, cloud, index_of, radius, start, weighting
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.estimator_checks import check_sample_weight_equivalence_on_dense_data
from torch import Tensor

from flowpool import Status

REACHED = (Status.OK, Status.SINGULAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_row_11_a_nonfinite_graph_is_nan_and_the_others_keep_their_bits(
    pool: Pool, value: float, dtype: torch.dtype
) -> None:
    sizes = [4, 1, 6, 3, 5, 4]
    batch, clean = index_of(sizes), cloud(sum(sizes), 2, seed=1, dtype=dtype).requires_grad_()
    expected = pool(clean, batch).points
    seed = weighting(expected)
    (expected_gradient,) = torch.autograd.grad((seed * expected).sum(), clean)
    for graph in range(len(sizes)):
        others = [other for other in range(len(sizes)) if other != graph]
        place = int((batch == graph).nonzero()[-1])
        broken = clean.detach().clone()
        broken[place, graph % 2] = value
        broken.requires_grad_()
        pooled = pool(broken, batch)
        assert pooled.points[graph].isnan().all()
        assert int(pooled.status[graph]) == Status.NONFINITE_INPUT
        assert [int(pooled.status[other]) for other in others] == [Status.OK] * 5
        assert pool.same(pooled.points[others], expected[others])
        # As a loss over the whole batch sees it, and as a loss that leaves the broken graph out.
        for rows in (list(range(len(sizes))), others):
            (gradient,) = torch.autograd.grad((seed * pooled.points)[rows].sum(), broken, retain_graph=True)
            assert pool.same(gradient[batch != graph], expected_gradient[batch != graph])


SPREADS = st.floats(-3, 3).map(lambda power: 10.0**power)


@given(st.integers(0, 10**6), st.floats(-1e6, 1e6), SPREADS)
def test_row_12_pooling_commutes_with_moving_in_double(pool: Pool, seed: int, offset: float, spread: float) -> None:
    x = spread * cloud(6, 2, seed)
    size = radius(x)
    moved = pool(x + offset * size)
    assert float((moved.points - offset * size - pool(x).points).abs().max()) <= 1e-5 * size
    assert int(moved.status[0]) == Status.OK


@given(st.integers(0, 10**6), st.integers(-(10**6), 10**6))
def test_row_12_pooling_commutes_with_moving_in_float32(pool: Pool, seed: int, offset: int) -> None:
    """The nodes lie on multiples of 1/16, so that they can be moved by a million without rounding.

    The pooled points cannot: the nearest float32 is all that can be asked of them.
    """
    x = (cloud(6, 2, seed) * 16).round().div(16).float()
    moved = x + offset
    assert torch.equal(moved - offset, x)
    size = radius(x)
    expected = pool(x.double()).points + offset
    rounding = torch.from_numpy(np.spacing(expected.abs().float().numpy())).double() / 2
    found = pool(moved).points.double()
    assert bool(((found - expected).abs() <= 1e-5 * size + rounding).all())
    # Before that rounding, the promise holds as it stands.
    assert float((pool(moved.double()).points - expected).abs().max()) <= 1e-5 * size


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_row_12_no_cost_is_negative_far_from_the_origin(function: Pool, offset: float) -> None:
    for num_points in (1, 3, 6):
        x = cloud(6, 2) + offset
        assert float(function(x, num_points=num_points).divergence) >= -1e-10 * radius(x) ** 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [-20, -12, -8, -4, 4, 8, 12, 19, 20])
def test_row_13_pooling_commutes_with_scaling(pool: Pool, power: int, dtype: torch.dtype) -> None:
    x, scale = cloud(6, 2, seed=5).float(), 10.0**power
    scaled = (x.double() * scale).to(dtype)
    expected = pool(scaled.double() / scale).points * scale
    pooled = pool(scaled)
    assert pooled.status.tolist() == [Status.OK]
    tolerance = 1e-6 if dtype is torch.float32 else 1e-10
    assert float((pooled.points.double() - expected).abs().max()) <= tolerance * radius(x) * scale


@pytest.mark.parametrize("power", [-320, -310, -300, -200, 154, 200, 290, 300, 307, 308])
def test_row_13_overflow_is_reported_and_never_garbage(pool: Pool, power: int) -> None:
    scale = torch.tensor(float(f"1e{power}")).double() if power > -308 else torch.tensor(float(f"1e{power}"))
    unit = torch.tensor([[-1.0, 0.2], [0.9, -0.4], [0.3, 1.1], [-0.5, -1.2], [0.8, 0.7]]).double()
    x = unit * scale.double()
    pooled = pool(x)
    status = int(pooled.status[0])
    if status in REACHED:
        expected = pool(unit).points * scale.double()
        resolution = float(np.spacing(float(x.abs().max())))
        assert float((pooled.points - expected).abs().max()) <= 1e-9 * float(x.abs().max()) + 8 * resolution
    else:
        assert status in (Status.NONFINITE, Status.NONFINITE_INPUT)


@pytest.mark.parametrize("epsilon", [0.0, -0.1, -1e-300, math.nan, math.inf, -math.inf])
def test_row_14_epsilon_must_be_positive(pool: Pool, epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon"):
        pool(cloud(4, 2), epsilon=epsilon)


@pytest.mark.parametrize("epsilon", [1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2])
def test_row_14_every_epsilon_gives_finite_numbers_and_a_residual(pool: Pool, epsilon: float) -> None:
    x = cloud(18, 2, seed=6).requires_grad_()
    pooled = pool(x, index_of([6, 5, 7]), epsilon=epsilon, max_steps=100)
    assert pooled.points.isfinite().all()
    assert pooled.residual.isfinite().all()
    for status, residual in zip(pooled.status.tolist(), pooled.residual.tolist(), strict=True):
        assert status in (Status.OK, Status.SINGULAR, Status.MAX_STEPS)
        assert residual > 1e-5 or status != Status.MAX_STEPS
        # SINGULAR with more to go has ended in a valley (row 9), which the divergence becomes as epsilon grows.
        assert residual <= 1e-5 or status == Status.MAX_STEPS or (status == Status.SINGULAR and epsilon >= 1e2)
    (gradient,) = torch.autograd.grad(pooled.points.sum(), x)
    assert gradient.isfinite().all()
    # The centre of X* is the centre of Y, whatever epsilon is: so is the sum of the gradient.
    if Status.MAX_STEPS not in pooled.status.tolist():
        torch.testing.assert_close(gradient.sum(0), torch.full((2,), 9.0).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("epsilon", [1e2, 1e3, 1e4])
def test_row_15_huge_epsilon_two_points_on_a_line(pool: Pool, epsilon: float) -> None:
    """To first order in 1/epsilon stationary points have the covariance of the nodes: on a line, mean -+ deviation."""
    x = cloud(7, 1, seed=2)
    pooled = pool(x, num_points=2, epsilon=epsilon, max_steps=2000)
    assert float((pooled.points.mean() - x.mean()).abs()) <= 1e-5 * radius(x)
    if int(pooled.status[0]) == Status.MAX_STEPS:
        assert float(pooled.residual[0]) > 1e-5
        return
    expected = x.mean() + radius(x) * torch.tensor([-1.0, 1.0]).double()
    found = pooled.points.flatten().sort().values
    assert float((found - expected).abs().max()) <= max(4 / epsilon, 1e-4) * radius(x)


@pytest.mark.parametrize("epsilon", [10.0, 100.0, 1000.0])
def test_row_15_huge_epsilon_without_debiasing_is_copies_of_the_mean(function: Pool, epsilon: float) -> None:
    x = cloud(7, 2, seed=2).requires_grad_()
    pooled = function(x, epsilon=epsilon, debias=False)
    assert int(pooled.status[0]) == Status.OK
    assert float((pooled.points[0] - x.mean(0)).abs().max()) <= 1e-5 * radius(x.detach())
    (gradient,) = torch.autograd.grad(pooled.points[0, 1].sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(gradient, 1 / 7), rtol=0, atol=1e-4)


@pytest.mark.parametrize("epsilon", [10.0, 1e3, 1e6])
def test_row_15_a_gradient_that_cannot_be_trusted_is_reported(function: Pool, epsilon: float) -> None:
    x = cloud(6, 2, seed=3)
    pooled = function(x.clone().requires_grad_(), epsilon=epsilon, tolerance=1e-9, max_steps=300)
    if int(pooled.status[0]) != Status.OK:
        return
    leaf = x.clone().requires_grad_()
    points = function(leaf, epsilon=epsilon, tolerance=1e-9, max_steps=300).points
    seed = weighting(points)
    (gradient,) = torch.autograd.grad((seed * points).sum(), leaf)
    step = 1e-4 * weighting(x + 1.0)
    ends = [
        (seed * function(x + sign * step, epsilon=epsilon, tolerance=1e-9, max_steps=300).points).sum()
        for sign in (1, -1)
    ]
    difference = (ends[0] - ends[1]) / 2
    torch.testing.assert_close((gradient * step).sum(), difference, rtol=1e-3, atol=1e-9)


def test_row_16_a_node_without_mass_is_a_node_that_is_absent(pool: Pool) -> None:
    x, masses = cloud(7, 2, seed=4), torch.tensor([1.0, 2.0, 0.0, 1.0, 3.0, 0.0, 1.0]).double()
    kept = masses > 0
    expected_nodes = x[kept].clone().requires_grad_()
    expected = pool(expected_nodes, masses=masses[kept])
    seed = weighting(expected.points)
    (expected_gradient,) = torch.autograd.grad((seed * expected.points).sum(), expected_nodes)
    # Where the absent nodes are must not matter, even if it is far away.
    for distance in (1.0, 1e6):
        nodes = torch.where(kept[:, None], x, distance * x).requires_grad_()
        weights = masses.clone().requires_grad_()
        pooled = pool(nodes, masses=weights)
        torch.testing.assert_close(pooled.points, expected.points, rtol=0, atol=1e-11)
        assert pooled.status.tolist() == expected.status.tolist()
        gradient, to_weights = torch.autograd.grad((seed * pooled.points).sum(), (nodes, weights))
        assert torch.equal(gradient[~kept], torch.zeros(2, 2).double())
        torch.testing.assert_close(gradient[kept], expected_gradient, rtol=1e-7, atol=1e-10)
        assert to_weights.isfinite().all()


def test_row_16_the_gradient_of_an_absent_node_is_what_its_arrival_would_change(pool: Pool) -> None:
    x = cloud(6, 2, seed=4)
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0, 3.0, 1.0]).double().requires_grad_()
    points = pool(x, masses=weights, tolerance=1e-9).points
    seed = weighting(points)
    (gradient,) = torch.autograd.grad((seed * points).sum(), weights)
    step = 1e-6
    arrived = weights.detach().clone()
    arrived[2] += step
    more = arrived.clone()
    more[2] += step
    values = [(seed * pool(x, masses=w, tolerance=1e-9).points).sum() for w in (weights.detach(), arrived, more)]
    slope = (-3 * values[0] + 4 * values[1] - values[2]) / (2 * step)
    torch.testing.assert_close(gradient[2], slope, rtol=1e-4, atol=1e-6)


def test_row_16_a_far_absent_node_does_not_hide_the_scale(pool: Pool) -> None:
    """A node of mass zero at 1e20 must not make the others look like one point."""
    x = torch.cat([cloud(5, 2, seed=4), torch.full((1, 2), 1e20).double()])
    masses = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]).double()
    torch.testing.assert_close(pool(x, masses=masses).points, pool(x[:5]).points, rtol=0, atol=1e-11)


def test_row_16_a_graph_without_any_mass_is_named(pool: Pool) -> None:
    masses = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0]).double()
    with pytest.raises(ValueError, match="graph 1"):
        pool(cloud(5, 2), index_of([2, 2, 1]), masses=masses)


def test_row_17_masses_that_sum_to_infinity_are_refused(pool: Pool) -> None:
    masses = torch.tensor([1.0, 1.0, 1e308, 1e308], dtype=torch.float64)
    with pytest.raises(ValueError, match="graph 1 sum to more than torch.float64 holds"):
        pool(cloud(4, 2), index_of([2, 2]), masses=masses)


class PooledCloud(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """The pooled points of a weighted table as an estimator; ``transform`` gives distances to them."""

    def __init__(self, pool: Pool | None = None) -> None:
        self.pool = pool

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> PooledCloud:  # noqa: N803
        assert self.pool is not None
        nodes = torch.as_tensor(np.ascontiguousarray(X))
        masses = None if sample_weight is None else torch.as_tensor(np.asarray(sample_weight)).to(nodes.dtype)
        pooled = self.pool(nodes, masses=masses, reference=start(3, nodes.shape[1], nodes.dtype), tolerance=1e-9)
        self.points_ = pooled.points[0].numpy()
        return self

    def transform(self, X: Any) -> Any:  # noqa: N803
        return np.linalg.norm(np.asarray(X)[:, None] - self.points_, axis=-1)


def test_row_16_weights_mean_repetition(pool: Pool) -> None:
    check_sample_weight_equivalence_on_dense_data("PooledCloud", PooledCloud(pool))


def test_row_16_weights_mean_repetition_for_gradients(pool: Pool) -> None:
    x, times = cloud(5, 2, seed=9), torch.tensor([1, 3, 0, 2, 1])
    weighted = x.clone().requires_grad_()
    points = pool(weighted, masses=times.double(), tolerance=1e-9).points
    seed = weighting(points)
    (gradient,) = torch.autograd.grad((seed * points).sum(), weighted)
    repeated = x.repeat_interleave(times, 0).requires_grad_()
    copies = pool(repeated, tolerance=1e-9).points
    torch.testing.assert_close(copies, points, rtol=0, atol=1e-9)
    (shares,) = torch.autograd.grad((seed * copies).sum(), repeated)
    total = torch.zeros_like(x).index_add(0, torch.arange(5).repeat_interleave(times), shares)
    torch.testing.assert_close(total, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("masses", "message"),
    [
        (torch.tensor([1.0, -0.5, 1.0, -2.0]).double(), r"2 .*negative.*node 1, -0\.5"),
        (torch.tensor([1.0, 1.0, math.nan, 1.0]).double(), r"1 .*not finite.*node 2, nan"),
        (torch.tensor([1.0, math.inf, math.inf, 1.0]).double(), r"2 .*not finite.*node 1, inf"),
        (torch.tensor([-math.inf, 1.0, 1.0, 1.0]).double(), r"1 .*not finite.*node 0, -inf"),
        (torch.ones(3).double(), r"\(3,\).*\(4,\)"),
        (torch.ones(5).double(), r"\(5,\).*\(4,\)"),
        (torch.ones(4, 1).double(), r"\(4, 1\).*\(4,\)"),
        (torch.ones(()).double(), r"\(\).*\(4,\)"),
        (torch.ones(0).double(), r"\(0,\).*\(4,\)"),
    ],
)
def test_row_17_bad_masses_are_counted_and_shown(pool: Pool, masses: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool(cloud(4, 2), masses=masses)


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 0.1, 10.0, 1e3, 1e6])
def test_row_18_the_total_mass_does_not_matter(pool: Pool, factor: float) -> None:
    x, masses = cloud(9, 2, seed=1), cloud(9, 1, seed=2).squeeze(1).abs()
    batch = index_of([5, 4])
    expected = pool(x, batch, masses=masses).points
    assert float((pool(x, batch, masses=factor * masses).points - expected).abs().max()) <= 1e-10
    # Each graph is normalised by itself.
    mixed = torch.where(batch == 0, factor * masses, masses)
    assert float((pool(x, batch, masses=mixed).points - expected).abs().max()) <= 1e-10


def test_row_18_masses_are_differentiated_through_their_normalisation(pool: Pool) -> None:
    x = cloud(5, 2, seed=1)
    masses = torch.tensor([0.3, 1.1, 0.7, 2.0, 0.5]).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda m: pool(x, masses=m, tolerance=1e-11).points, (masses,))
    points = pool(x, masses=masses).points
    (gradient,) = torch.autograd.grad((weighting(points) * points).sum(), masses)
    # Euler: what does not change under scaling has a gradient at right angles to the masses.
    assert abs(float(gradient @ masses.detach())) <= 1e-9 * float(gradient.norm() * masses.detach().norm())


def test_row_18_no_masses_are_equal_masses_and_an_empty_list_is_an_error(pool: Pool) -> None:
    x, batch = cloud(9, 2, seed=1), index_of([5, 4])
    assert torch.equal(pool(x, batch).points, pool(x, batch, masses=torch.ones(9).double()).points)
    with pytest.raises((TypeError, ValueError), match="masses"):
        pool(x, batch, masses=[])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4, 0), r"\(4, 0\).*num_nodes"),
        (torch.zeros(4), r"\(4,\).*num_nodes"),
        (torch.zeros(()), r"\(\).*num_nodes"),
        (torch.zeros(2, 4, 2), r"\(2, 4, 2\).*num_nodes"),
    ],
)
def test_row_19_features_are_a_table(pool: Pool, x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool(x, reference=torch.zeros(1, 2))


def test_row_19_the_number_of_features_is_that_of_the_reference(pool: Pool) -> None:
    with pytest.raises(ValueError, match=r"3.*2|2.*3"):
        pool(cloud(4, 3), reference=start(3, 2))
