"""Algorithm 1 exactly as printed."""

import math

import pytest
import torch
from helpers import central_difference

from flowpool import FlowPool, Status, algorithm_1, costs, flow_pool, sinkhorn_divergence
from flowpool.core.divergence import sinkhorn_loss

GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(8, 2, generator=GENERATOR, dtype=torch.float64) + 3
START = torch.randn(3, 2, generator=GENERATOR, dtype=torch.float64)
COTANGENT = torch.randn(1, 3, 2, generator=GENERATOR, dtype=torch.float64)
SETTINGS = {"start": START, "epsilon": 0.7, "step_size": 0.4}


@pytest.mark.parametrize("debias", [True, False])
def test_every_step_is_that_of_the_paper(debias):
    """X - tau grad, with the gradient by autograd of the value itself, in the coordinates given."""
    energy = sinkhorn_divergence if debias else sinkhorn_loss
    points = START.unsqueeze(0)
    for _ in range(3):
        leaf = points.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(energy(leaf, NODES.unsqueeze(0), 0.7).sum(), leaf)
        points = points - 0.4 * gradient
    found = algorithm_1(NODES, max_steps=3, debias=debias, **SETTINGS)
    assert torch.allclose(found.points, points, atol=1e-10)
    assert found.steps.tolist() == [3] and found.status.tolist() == [Status.MAX_STEPS]


def test_any_function_can_be_the_update():
    def rounds(points, gradient, step, state):
        count = 1 if state is None else state + 1
        return points - step / count * gradient.sign(), count

    found = algorithm_1(NODES, max_steps=4, update_step=rounds, **SETTINGS)
    points, state = START.unsqueeze(0), None
    for _ in range(4):
        leaf = points.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(sinkhorn_divergence(leaf, NODES.unsqueeze(0), 0.7).sum(), leaf)
        points, state = rounds(points, gradient, 0.4, state)
    assert torch.allclose(found.points, points, atol=1e-10)


def test_an_update_may_write_into_its_arguments():
    def in_place(points, gradient, step, state):
        return points.sub_(step * gradient), state

    batch = torch.tensor([0] * 5 + [1] * 3)  # which do not arrive together
    options = {"tolerance": 1e-6, "max_steps": 100, **SETTINGS}
    found, expected = (algorithm_1(NODES, batch, update_step=step, **options) for step in (in_place, "gradient"))
    assert torch.equal(found.points, expected.points) and torch.equal(found.steps, expected.steps)


@pytest.mark.parametrize(
    ("update_step", "error", "message"),
    [
        (lambda points, gradient, step, state: points, TypeError, "returned a Tensor; return the points and a state"),
        (lambda points, gradient, step, state: (points[:, :1], state), ValueError, r"shape \(1, 1, 2\) for points of"),
    ],
)
def test_what_an_update_returns_is_checked(update_step, error, message):
    with pytest.raises(error, match=message):
        algorithm_1(NODES, update_step=update_step, **SETTINGS)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-7])
def test_it_ends_when_the_newton_step_is_short_and_says_so(tolerance):
    """Also where the gradient is shorter than the Newton step, as with a point for each pair of twins."""
    nodes = NODES[:3].repeat_interleave(2, 0)
    found = algorithm_1(nodes, tolerance=tolerance, max_steps=1000, **SETTINGS)
    assert found.status.tolist() == [Status.OK] and float(found.residual) <= tolerance
    assert int(found.steps) < 1000
    cut = algorithm_1(nodes, tolerance=tolerance, max_steps=int(found.steps) - 1, **SETTINGS)
    assert cut.status.tolist() == [Status.MAX_STEPS] and float(cut.residual) > tolerance


@pytest.mark.parametrize("angle", [0.0, 0.01, 0.1, 0.7, 1.5, 1.57, 2.0, 3.1])
def test_what_nothing_decides_is_singular(angle):
    cost = costs.Mahalanobis(2, rank=1).double()
    with torch.no_grad():
        cost.weight.copy_(torch.tensor([[math.cos(angle), math.sin(angle)]]))
    assert algorithm_1(NODES, cost=cost, max_steps=1000, **SETTINGS).status.tolist() == [Status.SINGULAR]
    settings = {"epsilon": SETTINGS["epsilon"], "relative": False, "on_failure": "ignore"}
    assert flow_pool(NODES, reference=START, cost=cost, **settings).status.tolist() == [Status.SINGULAR]


def test_what_leaves_for_infinity_is_not_finite():
    batch = torch.tensor([0] * 4 + [1] * 4)
    nodes = NODES * torch.tensor([1.0] * 4 + [1e-3] * 4, dtype=torch.float64).unsqueeze(-1)

    def flees(points, gradient, step, state):
        return points * torch.where(points.abs().amax((1, 2), keepdim=True) > 1, 1e30, 0.5), state

    found = algorithm_1(nodes, batch, start=START / 9, update_step=flees, epsilon=0.7, step_size=1.0, max_steps=40)
    fled = algorithm_1(nodes, batch, start=START * 9, update_step=flees, epsilon=0.7, step_size=1.0, max_steps=40)
    assert found.status.tolist() == [Status.MAX_STEPS] * 2
    assert fled.status.tolist() == [Status.NONFINITE] * 2


@pytest.mark.parametrize("update_step", ["gradient", "momentum", "adam"])
def test_unrolled_gradients_are_exact_after_any_number_of_steps(update_step):
    def points(nodes):
        return algorithm_1(nodes, max_steps=2, update_step=update_step, gradient="unrolled", **SETTINGS).points

    leaf = NODES.clone().requires_grad_()
    (found,) = torch.autograd.grad(points(leaf), leaf, COTANGENT)
    way = torch.randn(NODES.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = central_difference(lambda y: (points(y) * COTANGENT).sum().detach(), NODES, way)
    assert float((found * way).sum()) == pytest.approx(float(expected), rel=1e-6)


COSTS = {
    "squared": costs.SquaredEuclidean(),
    "cubed": costs.Euclidean(3.0),  # of a degree other than two: the unit of time depends on that of length
    "cosine": costs.Cosine(),
    "weighed": costs.Mahalanobis(2).double(),
    "low rank": costs.Mahalanobis(2, rank=1).double(),
    "callable": lambda x, y: (x - y).square().sum(-1) + (x - y).pow(4).sum(-1),
}


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("steps", [1, 3])
def test_recorded_steps_are_differentiated_exactly_however_few(cost, relative, steps):
    """X^(1) depends on the nodes through the frame, the start and the step, as far as these do."""
    if isinstance(cost, costs.Mahalanobis):
        torch.nn.init.normal_(cost.weight, 0.5, 0.5, generator=torch.Generator().manual_seed(2))
    options = {"step_size": 0.1, "max_steps": steps, "gradient": "unrolled", "on_failure": "ignore"}

    def points(nodes):
        return flow_pool(nodes, reference=START, epsilon=0.7, cost=cost, relative=relative, **options).points

    leaf = NODES.clone().requires_grad_()
    (found,) = torch.autograd.grad(points(leaf), leaf, COTANGENT)
    way = torch.randn(NODES.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = central_difference(lambda y: (points(y) * COTANGENT).sum().detach(), NODES, way)
    assert float((found * way).sum()) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("name", ["squared", "cubed", "cosine", "callable"])
def test_an_absolute_step_is_of_the_length_it_says(name):
    """It is -grad / (2 a) times its size, whatever the cost and the graph."""
    cost = COSTS[name]
    leaf = START.clone().requires_grad_()
    value = sinkhorn_divergence(leaf.unsqueeze(0), NODES.unsqueeze(0), 0.7, cost=cost).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    options = {"relative": False, "step_size": 0.1, "max_steps": 1, "gradient": "unrolled", "on_failure": "ignore"}
    found = flow_pool(NODES, reference=START, epsilon=0.7, cost=cost, **options).points[0]
    assert torch.allclose(found - START, -0.1 * gradient * 3 / 2, atol=1e-10)


def test_what_nothing_moves_has_no_gradient():
    """Where a cost is blind the points stay at an absolute start, which no node can change."""
    cost = costs.Mahalanobis(2, rank=1).double()
    torch.nn.init.constant_(cost.weight, 0.7)
    blind = torch.stack([-cost.weight.detach()[0, 1], cost.weight.detach()[0, 0]])
    leaf = NODES.clone().requires_grad_()
    pooled = flow_pool(leaf, reference=START, cost=cost, epsilon=0.7, relative=False, on_failure="ignore")
    along = pooled.points[0] @ blind
    assert torch.allclose(along, START @ blind, atol=1e-10)
    (found,) = torch.autograd.grad((along * COTANGENT[0, :, 0]).sum(), leaf)
    assert float(found.norm()) < 1e-6


@pytest.mark.parametrize("relative", [True, False])
def test_a_start_gets_its_gradient_through_recorded_steps_and_not_otherwise(relative):
    def points(start):
        options = {"gradient": "unrolled", "max_steps": 3, "relative": relative, "on_failure": "ignore"}
        return flow_pool(NODES, reference=start, epsilon=0.7, **options).points

    leaf = START.clone().requires_grad_()
    (found,) = torch.autograd.grad(points(leaf), leaf, COTANGENT)
    way = torch.randn(START.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = central_difference(lambda x: (points(x) * COTANGENT).sum().detach(), START, way)
    assert float((found * way).sum()) == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(ValueError, match="reference requires a gradient, but X. hardly depends on it"):
        flow_pool(NODES, reference=leaf, relative=relative)


def test_where_it_converges_it_is_the_flow_with_the_same_gradient():
    leaf = NODES.clone().requires_grad_()
    options = {"tolerance": 1e-9, "max_steps": 500}
    one = algorithm_1(leaf, **SETTINGS | options)
    other = flow_pool(leaf, reference=START, epsilon=0.7, relative=False, engine="torch", **options)
    assert torch.allclose(one.points, other.points, atol=1e-7)
    first, second = (torch.autograd.grad(pooled.points, leaf, COTANGENT)[0] for pooled in (one, other))
    assert torch.allclose(first, second, atol=1e-6)


def test_the_layer_and_relative_units_know_it_too():
    options = {"epsilon": 0.2, "step_size": 0.4, "update_step": "momentum", "max_steps": 5, "on_failure": "ignore"}
    layer = FlowPool(2, 3, reference=START, **options).double()
    mean = NODES.mean(0)
    radius = (NODES - mean).square().sum(1).mean().sqrt()
    settings = {"start": mean + radius * START, "epsilon": 0.2 * radius**2, "step_size": 0.4}
    found = algorithm_1(NODES, max_steps=5, update_step="momentum", **settings)
    assert torch.allclose(layer(NODES).view(3, 2), found.points[0], atol=1e-10)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"update_step": "newton"}, ValueError, "Unknown update_step 'newton'; pass 'gradient', 'momentum', 'adam'"),
        ({"update_step": 3}, TypeError, "update_step is a int"),
        ({"update_step": "adam", "step_size": None}, ValueError, "update_step needs a step_size"),
        ({"update_step": "adam", "step_size": -1.0}, ValueError, "step_size is -1.0; pass the tau"),
        ({"engine": "compiled", "update_step": "adam"}, ValueError, "does not run Algorithm 1 exactly as printed"),
    ],
)
def test_mistakes_are_named(change, error, message):
    with pytest.raises(error, match=message):
        flow_pool(NODES, **({"reference": START, "step_size": 0.4} | change))
