"""Costs with parameters: their values, their gradients through pooling, and what both engines make of them."""

import pytest
import torch
from helpers import central_difference, mutag_clouds, random_pair
from torch.autograd import gradcheck
from torch.func import functional_call

from flowpool import FlowPool, costs, flow_pool
from flowpool.costs import Mahalanobis, Neural

GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(11, 2, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.tensor([0] * 6 + [1] * 5)
MASSES = torch.rand(11, generator=GENERATOR, dtype=torch.float64) + 0.3
REFERENCE = torch.randn(3, 2, generator=GENERATOR, dtype=torch.float64)
WEIGHTS = torch.randn(2, 3, 2, generator=GENERATOR, dtype=torch.float64)
TIGHT = {"tolerance": 1e-11, "engine": "torch"}


def bent(in_channels=2, hidden=4, out_channels=None, seed=3):
    """A neural cost away from its start, where every parameter matters."""
    cost = Neural(in_channels, hidden, out_channels).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in cost.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return cost


def parameters_of(cost):
    return {name: value.detach().clone() for name, value in cost.named_parameters()}


# Neural


def test_a_neural_cost_starts_as_the_squared_euclidean_one():
    pair = random_pair()
    form = costs.bind(Neural(3, 5), torch.float64, torch.device("cpu"))
    assert torch.allclose(form.matrix(pair.points, pair.nodes), torch.cdist(pair.points, pair.nodes) ** 2)
    narrow = Neural(3, 5, out_channels=2)
    mapped = narrow.skip.weight.detach().double().T
    assert torch.allclose(mapped.T @ mapped, torch.eye(2, dtype=torch.float64), atol=1e-6)
    form = costs.bind(narrow, torch.float64, torch.device("cpu"))
    expected = torch.cdist(pair.points @ mapped, pair.nodes @ mapped) ** 2
    assert torch.allclose(form.matrix(pair.points, pair.nodes), expected)


def test_a_neural_cost_is_the_distance_behind_its_network():
    pair, cost = random_pair(), bent(3, 4)
    first, second = cost.first, cost.second

    def embed(x):
        return x + torch.tanh(x @ first.weight.T + first.bias) @ second.weight.T

    expected = torch.cdist(embed(pair.points), embed(pair.nodes)) ** 2
    found = costs.bind(cost, torch.float64, torch.device("cpu")).matrix(pair.points, pair.nodes)
    assert torch.allclose(found, expected)
    assert not torch.allclose(expected, torch.cdist(pair.points, pair.nodes) ** 2, rtol=0.1)
    cost.reset_parameters()
    found = costs.bind(cost, torch.float64, torch.device("cpu")).matrix(pair.points, pair.nodes)
    assert torch.allclose(found, torch.cdist(pair.points, pair.nodes) ** 2)


def test_gradcheck_of_a_neural_cost():
    pair, cost = random_pair(batch=1, num_points=2, num_nodes=3), bent(3, 4, out_channels=2)
    names = list(parameters_of(cost))

    def matrix(x, y, *values):
        return functional_call(cost, dict(zip(names, values, strict=True)), (x.unsqueeze(-2), y.unsqueeze(-3)))

    inputs = [pair.points, pair.nodes, *parameters_of(cost).values()]
    assert gradcheck(matrix, [value.clone().requires_grad_() for value in inputs])


def test_a_neural_cost_gets_exact_gradients_through_pooling():
    cost = bent()

    def points():
        return flow_pool(NODES, BATCH, reference=REFERENCE, masses=MASSES, cost=cost, epsilon=0.3, **TIGHT)

    pooled = points()
    assert pooled.converged.all()
    found = dict(
        zip(
            parameters_of(cost),
            torch.autograd.grad((pooled.points * WEIGHTS).sum(), list(cost.parameters())),
            strict=True,
        )
    )
    for name, parameter in cost.named_parameters():

        def at(value, parameter=parameter):
            with torch.no_grad():
                parameter.copy_(value)
                return (points().points * WEIGHTS).sum()

        start = parameter.detach().clone()
        direction = torch.randn(start.shape, generator=GENERATOR, dtype=torch.float64)
        slope = central_difference(at, start, direction)
        at(start)
        assert float((found[name] * direction).sum()) == pytest.approx(float(slope), rel=1e-6, abs=1e-9)
        assert abs(float(slope)) > 1e-4


def test_a_neural_cost_gives_exact_gradients_in_the_nodes():
    cost = bent()

    def loss(nodes):
        pooled = flow_pool(nodes, BATCH, reference=REFERENCE, cost=cost, epsilon=0.3, **TIGHT)
        return (pooled.points * WEIGHTS).sum()

    nodes = NODES.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(nodes), nodes)
    direction = torch.randn(NODES.shape, generator=GENERATOR, dtype=torch.float64)
    slope = central_difference(lambda value: loss(value).detach(), NODES, direction)
    assert float((found * direction).sum()) == pytest.approx(float(slope), rel=1e-6)


def test_pooling_with_an_untrained_neural_cost_is_pooling_with_the_squared_euclidean_one():
    plain = flow_pool(NODES, BATCH, reference=REFERENCE, **TIGHT).points
    found = flow_pool(NODES, BATCH, reference=REFERENCE, cost=Neural(2, 4).double(), **TIGHT).points
    assert torch.allclose(found, plain, atol=1e-8)


# Mahalanobis


def diagonal(width=2, spread=0.7, seed=3):
    cost = Mahalanobis(width).double()
    torch.nn.init.normal_(cost.weight, std=spread, generator=torch.Generator().manual_seed(seed))
    return cost


@pytest.mark.parametrize("engine", ["torch", "compiled"])
def test_a_diagonal_cost_is_the_squared_euclidean_one_of_weighted_features(engine):
    cost = diagonal()
    weights, options = cost.weight.detach().exp(), {"masses": MASSES, "tolerance": 1e-11, "engine": engine}
    found = flow_pool(NODES, BATCH, reference=REFERENCE, cost=cost, epsilon=0.2, relative=False, **options)
    mapped = flow_pool(NODES * weights, BATCH, reference=REFERENCE * weights, epsilon=0.2, relative=False, **options)
    assert found.converged.all()
    assert torch.allclose(found.points, mapped.points / weights, atol=1e-10)
    assert torch.allclose(found.divergence, mapped.divergence, atol=1e-11)
    assert torch.allclose(found.plan(1), mapped.plan(1), atol=1e-10)


def test_relative_units_of_a_diagonal_cost_are_the_radius_for_the_reference_and_the_cost_for_epsilon():
    cost, nodes = diagonal(), NODES[:6]
    weights, mean = cost.weight.detach().exp(), nodes.mean(0)
    radius = (nodes - mean).square().sum(-1).mean().sqrt()
    mean_cost = ((nodes - mean) * weights).square().sum(-1).mean()
    relative = flow_pool(nodes, reference=REFERENCE, cost=cost, epsilon=0.3, **TIGHT)
    absolute = flow_pool(
        nodes, reference=mean + radius * REFERENCE, cost=cost, epsilon=0.3 * mean_cost, relative=False, **TIGHT
    )
    assert torch.allclose(relative.points, absolute.points, atol=1e-10)


@pytest.mark.parametrize("engine", ["torch", "compiled"])
def test_equal_weights_of_any_size_are_the_squared_euclidean_cost(engine):
    plain = flow_pool(NODES, BATCH, reference=REFERENCE, tolerance=1e-11, engine=engine)
    for weight in (0.0, 5.0, -200.0):
        cost = Mahalanobis(2).double()
        torch.nn.init.constant_(cost.weight, weight)
        found = flow_pool(NODES, BATCH, reference=REFERENCE, cost=cost, tolerance=1e-11, engine=engine)
        assert torch.allclose(found.points, plain.points, atol=1e-9)


@pytest.mark.parametrize(("engine", "relative"), [("torch", True), ("compiled", True), ("compiled", False)])
def test_a_diagonal_cost_has_exact_gradients_in_everything(engine, relative):
    cost = diagonal()
    epsilon = torch.tensor(0.3, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for x in (NODES, MASSES, epsilon)] + [cost.weight]

    def points(nodes, masses, epsilon, weight):
        with torch.no_grad():
            cost.weight.copy_(weight)
        options = {"relative": relative, "engine": engine, "tolerance": 1e-12}
        return flow_pool(nodes, BATCH, reference=REFERENCE, masses=masses, cost=cost, epsilon=epsilon, **options).points

    found = torch.autograd.grad((points(*inputs) * WEIGHTS).sum(), inputs)
    values = [value.detach().clone() for value in inputs]
    for place, gradient in enumerate(found):
        direction = torch.randn(gradient.shape, generator=GENERATOR, dtype=torch.float64)

        def along(value, place=place):
            changed = [value if k == place else kept for k, kept in enumerate(values)]
            return (points(*changed) * WEIGHTS).sum().detach()

        slope = central_difference(along, values[place], direction)
        assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-6)
        assert abs(float(slope)) > 1e-4


def test_engines_agree_on_a_diagonal_cost_on_mutag():
    features, batch = mutag_clouds(width=8, count=60)
    reference = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 8**0.5
    weights = torch.randn(60, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    used = [diagonal(8), diagonal(8)]
    results = [
        flow_pool(features, batch, reference=reference, cost=cost, epsilon=0.3, engine=engine, tolerance=1e-10)
        for cost, engine in zip(used, ("torch", "compiled"), strict=True)
    ]
    apart = (results[0].points - results[1].points).detach().abs().amax((1, 2))
    same = apart < 1e-8
    assert int(same.sum()) >= 59  # kernels solve implicit steps roughly: one graph comes to another minimum
    slopes = [
        torch.autograd.grad((pooled.points * weights)[same].sum(), cost.weight)[0]
        for cost, pooled in zip(used, results, strict=True)
    ]
    assert not (results[0].backward.damped | results[1].backward.damped).any()
    assert (slopes[0] - slopes[1]).norm() < 1e-6 * slopes[0].norm()


def test_with_a_rank_the_compiled_engine_refuses_and_a_square_map_finds_the_same_kind_of_minimum():
    low = Mahalanobis(2, rank=1).double()
    with pytest.raises(ValueError, match="squared Euclidean cost, not Mahalanobis"):
        flow_pool(NODES, BATCH, reference=REFERENCE, cost=low, engine="compiled")
    # A square L that happens to be diagonal has the same stationary points, though its flow runs in another metric.
    cost, square = diagonal(), Mahalanobis(2, rank=2).double()
    with torch.no_grad():
        square.weight.copy_(torch.diag(cost.weight.exp()))
    found = flow_pool(NODES, BATCH, reference=REFERENCE, cost=cost, epsilon=0.3, **TIGHT)
    again = flow_pool(NODES, BATCH, reference=REFERENCE, cost=square, epsilon=0.3, **TIGHT)
    assert torch.allclose(torch.cdist(found.points, again.points).amin(-1), torch.zeros(2, 3).double(), atol=1e-8)
    assert torch.allclose(found.divergence, again.divergence, atol=1e-10)


def test_the_layer_pools_with_a_diagonal_cost_on_the_compiled_engine_in_single_precision():
    layer = FlowPool(2, 3, cost=Mahalanobis(2), engine="compiled", tolerance=1e-9)
    torch.nn.init.constant_(layer.cost.weight[:1], 0.5)
    layer(NODES.float(), BATCH).square().sum().backward()
    twin = diagonal()
    with torch.no_grad():
        twin.weight.copy_(layer.cost.weight)
    points = flow_pool(
        NODES.float().double(), BATCH, reference=layer.reference.double(), cost=twin, tolerance=1e-9, engine="torch"
    ).points
    (expected,) = torch.autograd.grad(points.square().sum(), twin.weight)
    assert torch.allclose(layer.cost.weight.grad.double(), expected, rtol=1e-5)


def test_a_diagonal_cost_is_seen_by_torch_compile_with_its_gradient():
    layer = FlowPool(2, 3, cost=diagonal(), tolerance=1e-9).double()
    slopes = []
    for function in (
        layer,
        torch.compile(lambda x, index, dim_size: layer(x, index, dim_size=dim_size), fullgraph=True, backend="eager"),
    ):
        points = function(NODES, BATCH, dim_size=2)
        slopes.append((points, *torch.autograd.grad((points * WEIGHTS.flatten(1)).sum(), layer.cost.weight)))
    assert torch.equal(slopes[0][0], slopes[1][0])
    assert torch.allclose(slopes[0][1], slopes[1][1], rtol=1e-9)
