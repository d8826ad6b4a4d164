"""Section D of the contract: gradients, rows 26 to 34."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract.support import Pool, cloud, grid_cloud, index_of, radius, run, start, weighting
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from flowpool import Status, costs

TIGHT = 1e-11  # of the solver: far below the step of finite differences, which would otherwise see the stopping rule
# What each engine calls once per backward pass.
BACKWARD = {"torch": ("flowpool.engines.torch_engine", "adjoint"), "compiled": ("flowpool.engines.compiled", "adjoint")}


def test_row_26_gradcheck_in_the_features(pool: Pool) -> None:
    x, batch = cloud(5, 2, seed=11).requires_grad_(), index_of([3, 2])
    assert gradcheck(lambda v: pool(v, batch, tolerance=TIGHT).points, (x,), check_undefined_grad=True)


def test_row_26_gradcheck_with_more_points_than_dimensions_and_masses(pool: Pool) -> None:
    x, masses = cloud(4, 2, seed=12).requires_grad_(), cloud(4, 1, seed=3).abs().squeeze(1).requires_grad_()
    assert gradcheck(lambda v, m: pool(v, masses=m, num_points=3, tolerance=TIGHT).points, (x, masses))


def test_row_26_gradcheck_with_twins(pool: Pool) -> None:
    """M below the number of distinct nodes: the minimiser is isolated although nodes are equal."""
    x = torch.cat([cloud(4, 2, seed=2), cloud(4, 2, seed=2)[:2]]).requires_grad_()
    assert gradcheck(lambda v: pool(v, num_points=2, tolerance=TIGHT).points, (x,))


@pytest.mark.parametrize("of_shares", [False, True])
def test_row_26_gradcheck_in_epsilon_and_point_masses(function: Pool, of_shares: bool) -> None:
    x, batch = cloud(7, 2, seed=11), index_of([4, 3])
    epsilon = torch.tensor([0.1, 0.3]).double().requires_grad_()
    shares = torch.tensor([1.0, 2.0, 1.5]).double().requires_grad_(of_shares)

    def points(e: Tensor, a: Tensor) -> Tensor:
        return function(x, batch, epsilon=e, point_masses=a, tolerance=TIGHT).points

    assert gradcheck(points, (epsilon, shares))


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("debias", [True, False])
def test_row_26_gradcheck_of_every_kind_of_problem(function: Pool, relative: bool, debias: bool) -> None:
    x = cloud(4, 2, seed=13).requires_grad_()
    assert gradcheck(lambda v: function(v, relative=relative, debias=debias, tolerance=TIGHT).points, (x,))


class Stretched(costs.Cost):
    """Squared Euclidean cost with a learnt scale for each feature."""

    degree = 2.0

    def __init__(self, logarithms: Tensor) -> None:
        super().__init__()
        self.register_buffer("logarithms", logarithms)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x - y) * self.logarithms.exp()).square().sum(-1)


def test_row_26_gradcheck_in_the_parameters_of_the_cost() -> None:
    pool = Pool("function", "torch")  # costs with parameters are torch's alone
    x, scales = cloud(4, 2, seed=14).requires_grad_(), torch.tensor([0.2, -0.3]).double().requires_grad_()
    assert gradcheck(lambda v, s: pool(v, cost=Stretched(s), num_points=2, tolerance=TIGHT).points, (x, scales))


def test_row_26_strided_and_missing_upstream_gradients(pool: Pool) -> None:
    x, batch = cloud(9, 2, seed=3).requires_grad_(), index_of([5, 4])
    points = pool(x, batch).points
    upstream = weighting(points)
    (expected,) = torch.autograd.grad(points, x, upstream, retain_graph=True)
    for strided in (
        upstream.transpose(0, 2).contiguous().transpose(0, 2),
        torch.stack([upstream, upstream], -1)[..., 0],
    ):
        assert not strided.is_contiguous()
        (gradient,) = torch.autograd.grad(points, x, strided, retain_graph=True)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    # A loss of one graph alone leaves the other's nodes without gradient.
    (first,) = torch.autograd.grad((upstream * points)[0].sum(), x)
    assert torch.equal(first[:5], expected[:5])
    assert torch.equal(first[5:], torch.zeros(4, 2).double())


def _difference(points: Callable[[Tensor], Tensor], x: Tensor, seed: Tensor, step: float = 1e-4) -> Tensor:
    """Gradient of ``<seed, points(x)>`` by central differences of fourth order."""
    result = torch.zeros_like(x)
    for place in range(x.numel()):
        shift = torch.zeros_like(x).flatten()
        shift[place] = step
        shift = shift.view_as(x)
        near, far = ((seed * (points(x + k * shift) - points(x - k * shift))).sum() / (2 * k * step) for k in (1, 2))
        result.view(-1)[place] = (4 * near - far) / 3
    return result


@pytest.mark.parametrize(("num_nodes", "num_points", "seed"), [(4, 2, 0), (5, 3, 1), (3, 3, 2), (6, 2, 5)])
def test_row_27_implicit_unrolled_and_finite_differences_agree(
    function: Pool, num_nodes: int, num_points: int, seed: int
) -> None:
    x = cloud(num_nodes, 2, seed)
    implicit, unrolled = x.clone().requires_grad_(), x.clone().requires_grad_()
    points = function(implicit, num_points=num_points, tolerance=1e-12).points
    cotangent = weighting(points)
    (by_rule,) = torch.autograd.grad((cotangent * points).sum(), implicit)

    recorded = Pool("function", "torch")(  # which alone records steps
        unrolled, num_points=num_points, gradient="unrolled", step_size=0.5, tolerance=1e-11, max_steps=5000
    ).points
    torch.testing.assert_close(recorded, points, rtol=0, atol=1e-8)
    (by_steps,) = torch.autograd.grad((cotangent * recorded).sum(), unrolled)

    # Differences start from X*: from X^(0) a step of Y could change the basin.
    found = points.detach()[0]
    begin = (found - x.mean(0)) / radius(x)
    by_differences = _difference(lambda v: function(v, reference=begin, tolerance=1e-12).points, x, cotangent)
    assert float((by_rule - by_steps).abs().max()) <= 1e-6
    assert float((by_rule - by_differences).abs().max()) <= 1e-6
    assert float((by_steps - by_differences).abs().max()) <= 1e-6


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_row_27_as_many_points_as_nodes_have_the_identity_as_jacobian(pool: Pool, num_nodes: int, seed: int) -> None:
    x = cloud(num_nodes, 2, seed)
    begin = (x - x.mean(0)) / radius(x) + 0.01 * weighting(x)
    options = {"reference": begin, "tolerance": 1e-12}
    assert float((pool(x, **options).points[0] - x).abs().max()) <= 1e-9
    jacobian = torch.autograd.functional.jacobian(lambda v: pool(v, **options).points, x)
    identity = torch.eye(2 * num_nodes).double()
    assert float((jacobian.view(2 * num_nodes, -1) - identity).abs().max()) <= 1e-6


# A gradient error of at most this many times the residual, both relative to what they are measured in.
GRADIENT_ERROR_PER_RESIDUAL = 30.0


def _gradient(pool: Pool, nodes: Tensor, **options: Any) -> tuple[Tensor, float, int]:
    leaf = nodes.clone().requires_grad_()
    pooled = pool(leaf, **options)
    (gradient,) = torch.autograd.grad((weighting(pooled.points) * pooled.points).sum(), leaf)
    return gradient, float(pooled.residual[0]), int(pooled.status[0])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_row_28_the_error_of_the_gradient_is_bounded_by_the_residual(pool: Pool, seed: int) -> None:
    x = cloud(6, 2, seed)
    exact, _, _ = _gradient(pool, x, tolerance=1e-13)
    for tolerance in (3e-1, 1e-1, 1e-2, 1e-3, 1e-5):
        gradient, residual, status = _gradient(pool, x, tolerance=tolerance)
        assert status == Status.OK
        assert residual <= tolerance
        error = float((gradient - exact).norm() / exact.norm())
        assert error <= GRADIENT_ERROR_PER_RESIDUAL * residual + 1e-9


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_row_28_a_flow_cut_short_says_how_far_it_is(pool: Pool, seed: int) -> None:
    x = cloud(6, 2, seed)
    end = pool(x, tolerance=1e-12).points
    steps = int(pool(x, tolerance=1e-12).steps[0])
    for cap in {1, 3, steps // 2, steps - 3}:
        pooled = pool(x, max_steps=cap, tolerance=1e-12)
        assert int(pooled.status[0]) == Status.MAX_STEPS
        distance = float((pooled.points - end).norm()) / radius(x)
        residual = float(pooled.residual[0])
        assert residual > 1e-12
        assert residual < float("inf")
        # Near the end a Newton step is the distance itself.
        if distance < 1e-2:
            assert 0.5 * distance <= residual <= 2 * distance
    gradient, residual, _ = _gradient(pool, x, max_steps=steps - 3, tolerance=1e-12)
    exact, _, _ = _gradient(pool, x, tolerance=1e-13)
    assert float((gradient - exact).norm() / exact.norm()) <= GRADIENT_ERROR_PER_RESIDUAL * residual + 1e-9


@pytest.mark.parametrize("num_points", [3, 6])
@pytest.mark.parametrize("seed", range(4))
def test_row_29_singular_systems_give_finite_gradients_and_are_reported(pool: Pool, num_points: int, seed: int) -> None:
    """Few distinct nodes, more points than those: the minimiser is not isolated."""
    x = grid_cloud(7, 2, seed).requires_grad_()
    pooled = pool(x, num_points=num_points, max_steps=200)
    (gradient,) = torch.autograd.grad((weighting(pooled.points) * pooled.points).sum(), x)
    assert gradient.isfinite().all()
    assert float(gradient.abs().max()) > 1e-3
    assert pooled.backward.damped is not None
    assert pooled.backward.residual is not None
    assert pooled.backward.residual.isfinite().all()
    # Twins share alike.
    for row in x.detach().unique(dim=0):
        shares = gradient[(x.detach() == row).all(-1)]
        torch.testing.assert_close(shares, shares[:1].expand_as(shares), rtol=1e-6, atol=1e-8)
    # Moving the whole graph moves the pooled points along, however singular the system is.
    moved = weighting(pooled.points).sum((0, 1))
    torch.testing.assert_close(gradient.sum(0), moved, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_row_29_saddles_give_finite_gradients_and_are_reported(pool: Pool, seed: int) -> None:
    """Cut off after a step or two, in the midst of negative curvature."""
    x = cloud(8, 2, seed).requires_grad_()
    pooled = pool(x, num_points=5, epsilon=0.05, max_steps=1 + seed % 3)
    assert int(pooled.status[0]) == Status.MAX_STEPS
    (gradient,) = torch.autograd.grad((weighting(pooled.points) * pooled.points).sum(), x)
    assert gradient.isfinite().all()
    assert float(gradient.abs().max()) > 1e-6


def test_row_29_an_exact_saddle_is_reported(pool: Pool) -> None:
    """Two points that start on the axis of symmetry of four nodes stay there, though apart they would be better off."""
    x = torch.tensor([[-1.0, -3.0], [-1.0, 3.0], [1.0, -3.0], [1.0, 3.0]]).double().requires_grad_()
    reference = torch.tensor([[-0.5, 0.0], [0.5, 0.0]]).double()
    pooled = pool(x, reference=reference, max_steps=60)
    (gradient,) = torch.autograd.grad((weighting(pooled.points) * pooled.points).sum(), x)
    assert gradient.isfinite().all()
    on_axis = bool((pooled.points[..., 1].abs() < 1e-6).all())
    assert not on_axis or int(pooled.status[0]) != Status.OK or bool(pooled.backward.damped[0])


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
@pytest.mark.parametrize("name", ["x", "masses", "epsilon", "point_masses"])
@pytest.mark.parametrize("relative", [True, False])
def test_row_30_second_derivatives_are_refused_and_never_wrong(
    function: Pool, name: str, gradient: str, relative: bool
) -> None:
    inputs = {
        "x": cloud(4, 2, seed=1),
        "masses": torch.tensor([1.0, 2.0, 1.0, 3.0]).double(),
        "epsilon": torch.tensor(0.3).double(),
        "point_masses": torch.tensor([1.0, 2.0]).double(),
    }
    inputs[name].requires_grad_()
    points = function(**inputs, num_points=2, gradient=gradient, relative=relative, max_steps=30).points
    with pytest.raises(RuntimeError, match="differentiate|derivative|once_differentiable"):
        (first,) = torch.autograd.grad((weighting(points) * points).sum(), inputs[name], create_graph=True)
        # Beside a term of its own: a first gradient that silently counts as constant would give a wrong number here.
        (first.square().sum() + inputs[name].square().sum()).backward()


def test_row_30_second_derivatives_with_a_cost_without_a_frame(function: Pool) -> None:
    x = cloud(4, 2, seed=1).requires_grad_()
    points = function(x, num_points=2, cost="cosine", max_steps=30).points
    with pytest.raises(RuntimeError, match="differentiate|derivative|once_differentiable"):
        (first,) = torch.autograd.grad((weighting(points) * points).sum(), x, create_graph=True)
        (first.square().sum() + x.square().sum()).backward()


def test_row_31_nothing_is_kept_when_nothing_needs_a_gradient(pool: Pool) -> None:
    kept: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    x, batch, masses = cloud(9, 2), index_of([5, 4]), torch.ones(9).double()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        points = pool(x, batch, masses=masses).points
    assert points.requires_grad is False
    assert points.grad_fn is None
    assert not kept


def test_row_31_gradient_none_gives_no_graph(pool: Pool) -> None:
    x = cloud(5, 2).requires_grad_()
    with torch.no_grad():
        expected = pool(x).points
    points = pool(x, gradient="none").points
    assert points.requires_grad is False
    assert torch.equal(points, expected)


@pytest.mark.parametrize("names", [("nodes",), ("masses",), ("nodes", "masses")])
def test_row_31_only_what_needs_a_gradient_costs_one(
    pool: Pool, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = BACKWARD[pool.engine]
    original = operator.attrgetter(name)(importlib.import_module(module))
    calls: list[set[str]] = []

    def counted(*arguments: Any) -> Any:
        calls.append(next(set(value) for value in arguments if isinstance(value, set)))
        return original(*arguments)

    monkeypatch.setattr(f"{module}.{name}", counted)
    inputs = {"nodes": cloud(9, 2), "masses": torch.ones(9).double()}
    for wanted in names:
        inputs[wanted].requires_grad_()
    points = pool(inputs["nodes"], index_of([5, 4]), masses=inputs["masses"]).points
    assert not calls
    points.sum().backward()
    assert calls == [set(names)]
    for key, value in inputs.items():
        assert (value.grad is not None) == (key in names)


def test_row_32_every_grad_mode_gives_the_same_bits(pool: Pool) -> None:
    x, batch = cloud(9, 2, seed=6), index_of([5, 4])
    plain = pool(x, batch).points
    with_graph = pool(x.clone().requires_grad_(), batch).points
    with torch.no_grad():
        without = pool(x.clone().requires_grad_(), batch).points
    with torch.inference_mode():
        inferred = pool(x, batch).points
        inside = pool(x.clone(), batch).points
    assert torch.equal(with_graph, plain)
    assert torch.equal(without, plain)
    assert torch.equal(inferred, plain)
    assert torch.equal(inside, plain)


@pytest.mark.parametrize("cost", [costs.Euclidean(1.5), "cosine"])
def test_row_32_inference_mode_with_every_cost(cost: str | costs.Cost) -> None:
    pool = Pool("function", "torch")  # other costs are torch's alone
    x = cloud(5, 2, seed=6)
    plain = pool(x, cost=cost, max_steps=20).points
    with torch.inference_mode():
        assert torch.equal(pool(x, cost=cost, max_steps=20).points, plain)
    with torch.no_grad():
        assert torch.equal(pool(x, cost=cost, max_steps=20).points, plain)


@pytest.mark.parametrize("enabled", [True, False])
def test_row_32_a_failing_call_leaves_the_grad_mode_alone(enabled: bool) -> None:
    pool, calls = Pool("function", "torch"), []

    def failing(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 5:
            raise ZeroDivisionError("on purpose")
        return (x - y).square().sum(-1)

    with torch.set_grad_enabled(enabled):
        for wrong in ({"cost": failing}, {"epsilon": -1.0}, {"masses": torch.zeros(4).double()}):
            for gradient in ("implicit", "none"):
                with pytest.raises((ZeroDivisionError, ValueError)):
                    pool(cloud(4, 2), gradient=gradient, **wrong)
                assert torch.is_grad_enabled() is enabled
                assert not torch.is_inference_mode_enabled()


def test_row_33_peak_memory_does_not_depend_on_the_steps(engine: str) -> None:
    few, many, few_steps, many_steps = map(int, run("memory_peak.py", engine, timeout=240, threads=1).split())
    assert few_steps <= 10
    # Nothing holds the compiled engine up for a thousand steps: it refuses a fixed step, and arrives.
    assert many_steps >= (40 if engine == "compiled" else 900)
    # Two megabytes are the noise of the allocator; a thousand recorded steps would take hundreds.
    assert many <= 1.05 * few + 2 * 2**20


def test_row_33_memory_stays_flat_over_many_passes(engine: str) -> None:
    # A pass that kept its points alone would show: each has a few kilobytes of tensors around them.
    growth = int(run("memory_leak.py", engine, "2000" if engine == "compiled" else "300", timeout=240, threads=1))
    assert growth < (10 if engine == "compiled" else 2) * 2**20


def test_row_34_backward_twice_needs_retain_graph(pool: Pool) -> None:
    x = cloud(5, 2).requires_grad_()
    points = pool(x).points
    (first,) = torch.autograd.grad(points.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(points.sum(), x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(points.sum(), x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_row_34_checkpointing_gives_the_same_bits(pool: Pool, use_reentrant: bool) -> None:
    batch = index_of([5, 4])
    plain, saved = cloud(9, 2).requires_grad_(), cloud(9, 2).requires_grad_()
    expected = pool(plain, batch).points
    seed = weighting(expected)
    (seed * expected).sum().backward()
    points = checkpoint(lambda v: pool(v, batch).points, saved, use_reentrant=use_reentrant)
    (seed * points).sum().backward()
    assert torch.equal(points, expected)
    assert torch.equal(saved.grad, plain.grad)  # type: ignore[arg-type]


def test_row_34_hooks_of_the_caller_see_the_gradients(pool: Pool) -> None:
    x = cloud(5, 2).requires_grad_()
    points = pool(x).points
    seen: list[Tensor] = []
    points.register_hook(lambda gradient: seen.append(gradient.clone()))
    x.register_hook(lambda gradient: 2 * gradient)
    seed = weighting(points)
    (seed * points).sum().backward()
    assert torch.equal(seen[0], seed)
    again = x.detach().clone().requires_grad_()
    (seed * pool(again).points).sum().backward()
    assert torch.equal(x.grad, 2 * again.grad)  # type: ignore[arg-type, operator]


def test_row_34_in_place_changes_between_the_passes_do_not_reach_the_gradient(pool: Pool) -> None:
    x, other = cloud(5, 2).requires_grad_(), cloud(5, 2).requires_grad_()
    expected = pool(other).points
    seed = weighting(expected)
    (gradient,) = torch.autograd.grad((seed * expected).sum(), other)
    points = pool(x).points
    with torch.no_grad():
        x.zero_()
    try:
        (found,) = torch.autograd.grad((seed * points).sum(), x)
    except RuntimeError as error:
        assert "inplace" in str(error) or "in-place" in str(error)
    else:
        assert torch.equal(found, gradient)


def test_row_34_saved_tensor_hooks_may_move_what_is_kept(pool: Pool) -> None:
    """As save_on_cpu does."""
    x, other = cloud(5, 2).requires_grad_(), cloud(5, 2).requires_grad_()
    expected = pool(other).points
    seed = weighting(expected)
    (gradient,) = torch.autograd.grad((seed * expected).sum(), other)
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value.numpy(), torch.from_numpy):
        points = pool(x, reference=start(3, 2)).points
    (found,) = torch.autograd.grad((seed * points).sum(), x)
    assert torch.equal(found, gradient)
