"""Costs that would give wrong points or wrong gradients are refused before they are used."""

import re
import warnings
from functools import partial

import pytest
import torch
from helpers import central_difference
from torch import nn

from flowpool import costs, flow_pool, pooling

GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(6, 2, generator=GENERATOR, dtype=torch.float64)
REFERENCE = torch.randn(2, 2, generator=GENERATOR, dtype=torch.float64)
WEIGHT = torch.tensor([1.3, 0.7], dtype=torch.float64, requires_grad=True)


def weighed(weight, x, y):
    return ((x - y) * weight).square().sum(-1)


class Weighing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(WEIGHT.detach().clone())

    def forward(self, x, y):
        return weighed(self.weight, x, y)

    def bound(self, x, y):
        return self(x, y)


class Hiding(nn.Module):
    """Its tensor is an attribute like any other, not a parameter."""

    def __init__(self):
        super().__init__()
        self.weights = [WEIGHT]

    def forward(self, x, y):
        return weighed(self.weights[0], x, y)


CLOSED = {
    "closure": lambda x, y, hidden=None: weighed(WEIGHT, x, y),
    "default": lambda x, y, hidden=WEIGHT: weighed(hidden, x, y),
    "partial": partial(weighed, WEIGHT),
    "bound method": Weighing().bound,
    "module": Hiding(),
}


@pytest.mark.parametrize("cost", CLOSED.values(), ids=CLOSED)
@pytest.mark.parametrize("relative", [True, False])
def test_tensors_that_a_cost_hides_are_refused(cost, relative):
    with pytest.raises(ValueError, match="make it an nn.Module"):
        flow_pool(NODES, reference=REFERENCE, cost=cost, relative=relative)
    with torch.no_grad():  # nobody asks for a gradient
        assert flow_pool(NODES, reference=REFERENCE, cost=cost, relative=relative).converged.all()
    assert flow_pool(NODES, reference=REFERENCE, cost=cost, relative=relative, gradient="none").converged.all()


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("kind", ["module", "unrolled closure"])
def test_otherwise_the_gradient_of_a_cost_is_exact(kind, relative):
    """As a module, or where autograd follows every step."""
    options = {"relative": relative, "epsilon": 0.3, "engine": "torch", "tolerance": 1e-11}
    if kind == "unrolled closure":
        options |= {"gradient": "unrolled", "max_steps": 5}

    def loss(weight):
        cost = Weighing()
        with torch.no_grad():
            cost.weight.copy_(weight)
        return (flow_pool(NODES, reference=REFERENCE, cost=cost, **options).points ** 2).sum(), cost.weight

    way = torch.tensor([0.4, -0.9], dtype=torch.float64)
    expected = central_difference(lambda w: loss(w)[0].detach(), WEIGHT.detach(), way)
    if kind == "module":
        value, weight = loss(WEIGHT)
    else:
        weight = WEIGHT.detach().clone().requires_grad_()
        value = (flow_pool(NODES, reference=REFERENCE, cost=partial(weighed, weight), **options).points ** 2).sum()
    value.backward()
    assert float((weight.grad * way).sum()) == pytest.approx(float(expected), rel=1e-6)


KINKS = {
    "name": "euclidean",
    "class": costs.Euclidean(1.0),
    "sum": costs.Manhattan(),
    "callable": lambda x, y: (x - y).abs().sum(-1),
    "power": costs.Euclidean(0.8),
    "tiny radius": costs.Euclidean(1.0, radius=1e-6),
}


@pytest.mark.parametrize("cost", KINKS.values(), ids=KINKS)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_a_kink_is_refused_with_what_to_use_instead(cost, offset):
    with pytest.raises(ValueError, match=r"has a kink where x = y.*costs.Euclidean\(1, radius=0.1\)"):
        flow_pool(NODES + offset, reference=REFERENCE + offset, cost=cost)


SMOOTH = {
    "rounded": costs.Euclidean(1.0, radius=0.1),
    "rounded sum": costs.Manhattan(radius=0.1),
    "power": costs.Euclidean(1.5),
    "formula without a second derivative": lambda x, y: (x - y).norm(dim=-1) ** 3,
    "product": lambda x, y: (x - y).square().sum(-1) - (x * y).sum(-1),
}


@pytest.mark.parametrize("cost", SMOOTH.values(), ids=SMOOTH)
def test_smooth_costs_reach_stationarity_with_right_gradients(cost):
    options = {"reference": REFERENCE, "cost": cost, "epsilon": 0.3, "tolerance": 1e-9}
    nodes = NODES.clone().requires_grad_()
    pooled = flow_pool(nodes, **options)
    assert pooled.converged.all()
    pooled.points.pow(2).sum().backward()
    way = torch.randn(NODES.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = central_difference(lambda y: flow_pool(y, **options).points.pow(2).sum(), NODES, way)
    assert float((nodes.grad * way).sum()) == pytest.approx(float(expected), rel=1e-5)


def test_an_asymmetric_cost_is_refused_where_points_meet_points():
    def cost(x, y):
        return (x - y).square().sum(-1) + (x - y)[..., 0]

    with pytest.raises(ValueError, match=r"not symmetric: C\(x0, x1\)"):
        flow_pool(NODES, reference=REFERENCE, cost=cost)
    assert flow_pool(NODES, reference=REFERENCE, cost=cost, debias=False).converged.all()


CORNERS = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 2).repeat(3, 1)
LINE = torch.tensor([[x + shift, 0.0, 0.0] for x in (0, 1) for shift in (0, 0.01, 0.02)], dtype=torch.float64)
CUBE = torch.tensor([[-1.0, 0.5, 0.2], [0.1, -1.0, 0.6], [0.4, 0.3, -1.0], [1.0, 0.8, 0.5]], dtype=torch.float64)
LOW_RANK = costs.Mahalanobis(2, rank=1)
torch.nn.init.constant_(LOW_RANK.weight, 0.7)
CAUSES = {
    "cosine": ({"cost": "cosine"}, r"Cosine\(\) is blind in some directions"),
    "low rank": ({"cost": LOW_RANK}, "is blind in some directions"),
    "few nodes": (
        {"nodes": NODES[:2].repeat(3, 1), "reference": NODES[:4]},
        "There are 4 points, but 2 distinct nodes",
    ),
    "on nodes": (
        {"nodes": CORNERS, "reference": 0.9 * CORNERS[:4] + 0.1 * NODES[:4], "cost": costs.Euclidean(3.0)},
        r"Points sit on nodes, where the cost Euclidean\(power=3, radius=0\) is flat",
    ),
    "off the hull": (
        {"nodes": LINE, "reference": CUBE, "cost": costs.Euclidean(3.0)},
        "The nodes span 1 of 3 dimensions, and points have left these",
    ),
    "rough": ({"cost": costs.Euclidean(1.3), "max_steps": 3}, "curves without bound where x = y"),
    "cut off": ({"max_steps": 1}, "cut off by max_steps"),
    "fine": ({}, "stationary to the tolerance"),
}


@pytest.mark.parametrize(("options", "message"), CAUSES.values(), ids=CAUSES)
def test_the_cause_of_a_status_is_named(options, message):
    given = {"nodes": NODES, "reference": REFERENCE, "engine": "torch", "on_failure": "ignore"} | options
    assert re.search(message, flow_pool(**given).cause(0))
    assert re.search(message, flow_pool(**given).cause(-1))


def test_the_function_warns_once_for_each_kind_of_failure(monkeypatch):
    monkeypatch.setattr(pooling, "_announced", set())
    cut = {"reference": REFERENCE, "max_steps": 1, "engine": "torch"}
    broken = torch.cat([NODES, NODES.new_full((1, 2), torch.nan)])
    with pytest.warns(RuntimeWarning, match=r"1 of 1 graphs are MAX_STEPS \(graph 0\)") as caught:
        flow_pool(NODES, **cut)
        flow_pool(NODES, **cut)
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="NONFINITE_INPUT"):
        flow_pool(broken, **cut)
    with pytest.raises(ArithmeticError, match="1 of 1 graphs are MAX_STEPS"):
        flow_pool(NODES, on_failure="raise", **cut)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flow_pool(NODES, reference=REFERENCE)
        pooling._announced.clear()
        flow_pool(NODES, on_failure="ignore", **cut)
    with pytest.raises(ValueError, match="Unknown on_failure 'panic'"):
        flow_pool(NODES, reference=REFERENCE, on_failure="panic")
