from dataclasses import replace

import pytest
import torch
from helpers import random_pair
from torch.autograd import gradcheck

from flowpool import FlowPool, FlowReadout, costs, flow_pool, transport_pool
from flowpool.costs import Cosine, Custom, Euclidean, Geometry, Mahalanobis, SquaredEuclidean

PAIR = random_pair()
ALL = [SquaredEuclidean(), Euclidean(), Euclidean(1.5), Cosine(), Mahalanobis(3), Mahalanobis(3, rank=2)]


def geometry(cost):
    return costs.bind(cost, torch.float64, torch.device("cpu"))


def test_values_against_their_formulas():
    x, y = PAIR.points, PAIR.nodes
    distance = torch.cdist(x, y)
    assert torch.allclose(geometry(SquaredEuclidean()).matrix(x, y), distance**2)
    assert torch.allclose(geometry(Euclidean(1.5)).matrix(x, y), distance**1.5)
    cosine = torch.nn.functional.cosine_similarity(x[:, :, None], y[:, None], dim=-1)
    assert torch.allclose(geometry(Cosine()).matrix(x, y), 1 - cosine)
    diagonal = Mahalanobis(3)
    torch.nn.init.normal_(diagonal.weight)
    scale = diagonal.weight.detach().double().exp()
    assert torch.allclose(geometry(diagonal).matrix(x, y), torch.cdist(x * scale, y * scale) ** 2)
    low = Mahalanobis(3, rank=2)
    mapped = low.weight.detach().double().T
    assert torch.allclose(geometry(low).matrix(x, y), torch.cdist(x @ mapped, y @ mapped) ** 2)


@pytest.mark.parametrize("cost", [c for c in ALL if c.degree is not None], ids=str)
def test_degree_tells_how_the_cost_scales(cost):
    x, y, form = PAIR.points, PAIR.nodes, geometry(cost)
    moved = form.matrix(3 * x + 5, 3 * y + 5)
    assert torch.allclose(moved, 3**cost.degree * form.matrix(x, y), rtol=1e-10)


@pytest.mark.parametrize("cost", ALL, ids=str)
def test_gradient_at_zero_distance_is_finite_and_right(cost):
    x = PAIR.points[:1].clone()
    y = torch.cat([x[:, :2], PAIR.nodes[:1]], 1)
    plan = torch.ones(1, x.shape[1], y.shape[1], dtype=torch.float64)
    form = geometry(cost)
    gradient = form.opened(x, y)[1](plan)
    assert gradient.isfinite().all()
    # Coinciding points pull in no direction: leaving them out changes nothing where the cost is smooth or has a kink.
    separate = plan.clone()
    separate[:, 0, 0] = separate[:, 1, 1] = 0
    assert torch.allclose(gradient, form.opened(x, y)[1](separate), atol=1e-12)


@pytest.mark.parametrize("cost", ALL, ids=str)
def test_an_opened_cost_gives_the_gradient_and_is_differentiable(cost):
    x, y = PAIR.points[:1, :2].clone().requires_grad_(), PAIR.nodes[:1, :3].clone().requires_grad_()
    plan = torch.rand(1, 2, 3, dtype=torch.float64).requires_grad_()
    form = geometry(cost)
    (expected,) = torch.autograd.grad((plan * form.matrix(x, y)).sum(), x)
    assert torch.allclose(form.opened(x, y)[1](plan), expected)
    assert gradcheck(lambda p, a, b: form.opened(a, b)[1](p), (plan, x, y))


@pytest.mark.parametrize("constant", [True, False])
def test_a_cloud_opened_with_others_and_itself_gives_the_gradient_in_the_first_argument(constant):
    x, y = PAIR.points[:1].clone().requires_grad_(), PAIR.nodes[:1]
    plan = torch.rand(1, 4, 11, dtype=torch.float64)
    form = replace(geometry(Custom(lambda a, b: (a - b).pow(4).sum(-1) + 3)), constant=constant)
    fixed = torch.cat([y, x.detach()], 1)
    (expected,) = torch.autograd.grad((plan * form.matrix(x, fixed)).sum(), x)
    cost, pulled = form.opened(x, torch.cat([y, x], 1), 4)
    assert torch.allclose(cost, form.matrix(x, fixed)) and torch.allclose(pulled(plan), expected)
    assert gradcheck(lambda p, a: form.opened(a, torch.cat([y, a], 1), 4)[1](p), (plan.requires_grad_(), x))


def test_a_constant_diagonal_is_never_differentiated():
    x = PAIR.points[:1].clone().requires_grad_()
    plan = torch.ones(1, 4, 4, dtype=torch.float64)
    form = geometry(Custom(lambda a, b: (a - b).norm(dim=-1) ** 3))
    forms = (form, replace(form, constant=True))
    curved = [torch.autograd.grad(f.opened(x, x, 4)[1](plan).sum(), x)[0] for f in forms]
    assert not curved[0].isfinite().all() and curved[1].isfinite().all()


@pytest.mark.parametrize("cost", [*ALL[:1], *ALL[2:], Custom(lambda a, b: -(a * b).sum(-1))], ids=str)
def test_slopes_are_the_derivatives_of_every_pair(cost):
    """And those of a cost that is linear in each argument, whose second derivative in one of them vanishes."""
    x, y, form = PAIR.points[:1, :2].clone(), PAIR.nodes[:1, :3], geometry(cost)
    plan = torch.rand(1, 2, 5, dtype=torch.float64)
    slopes, bends, across = form.slopes(x, torch.cat([y, x], 1), plan, 2)
    for i in range(2):
        for j, other in enumerate([*y[0], *x[0]]):
            if j == 3 + i:
                continue  # some have no derivative there, and of none it matters
            hessian = torch.autograd.functional.hessian(form.pairwise, (x[0, i], other))
            slope = torch.autograd.functional.jacobian(lambda p, q=other: form.pairwise(p, q), x[0, i])
            assert torch.allclose(slopes[0, i, :, j], slope, atol=1e-12)
            if j >= 3:
                assert torch.allclose(across[0, i, :, j - 3], plan[0, i, j] * hessian[0][1], atol=1e-12)
    away = plan.clone()
    away[0, 0, 3] = away[0, 1, 4] = 0.0
    bends = form.slopes(x, torch.cat([y, x], 1), away, 2)[1]
    for i in range(2):
        expected = sum(
            away[0, i, j] * torch.autograd.functional.hessian(lambda p, q=other: form.pairwise(p, q), x[0, i])
            for j, other in enumerate([*y[0], *x[0]])
            if j != 3 + i
        )
        assert torch.allclose(bends[0, i], expected, atol=1e-12)


def test_a_float32_module_is_evaluated_in_float64_with_gradients_to_it():
    network = torch.nn.Linear(3, 4)
    cost = costs.resolve(Custom(lambda a, b: (network(a) - network(b)).square().sum(-1)))
    assert isinstance(cost, Custom)

    class Learned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, a, b):
            return (self.network(a) - self.network(b)).square().sum(-1)

    form = geometry(costs.resolve(Learned()))
    value = form.matrix(PAIR.points, PAIR.nodes)
    assert value.dtype == torch.float64
    weight = network.weight.double()
    assert torch.allclose(value, torch.cdist(PAIR.points @ weight.T, PAIR.nodes @ weight.T) ** 2)
    value.sum().backward()
    assert network.weight.grad.abs().max() > 0


def test_resolving_names_callables_and_mistakes():
    assert isinstance(costs.resolve("sqeuclidean"), SquaredEuclidean)
    given = Euclidean(3)
    assert costs.resolve(given) is given
    with pytest.raises(ValueError, match="Unknown cost 'euclid'; known names: sqeuclidean"):
        costs.resolve("euclid")
    with pytest.raises(TypeError, match="cost is a int"):
        costs.resolve(3)
    with pytest.raises(ValueError, match=r"returned shape \(4, 1, 3\).*expected \(4, 7\)"):
        Geometry(Custom(lambda a, b: a)).matrix(PAIR.points[0], PAIR.nodes[0])
    with pytest.raises(ValueError, match="power is 0"):
        Euclidean(0)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(
    "kind", [costs.Mahalanobis, lambda dim: costs.Mahalanobis(dim, rank=1), lambda dim: costs.Neural(dim, 4)]
)
def test_a_cost_for_other_features_is_refused(kind, width):
    x, reference, cost = torch.randn(6, 3), torch.eye(3), kind(width)
    calls = [
        lambda: flow_pool(x, reference=reference, cost=cost),
        lambda: transport_pool(x, reference=reference, cost=cost),
        lambda: FlowPool(3, 3, cost=cost),
        lambda: FlowReadout(3, 3, cost=cost),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"was made for {width} features; there are 3"):
            call()
