import pytest
import torch
from helpers import central_difference, mutag_clouds
from torch.autograd import gradcheck

from flowpool import Status, costs, flow_pool
from flowpool.core import sinkhorn
from flowpool.core.divergence import make_energy, sinkhorn_divergence
from flowpool.core.hessian import dense_hessian

GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(11, 2, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.tensor([0] * 6 + [1] * 5)
MASSES = torch.rand(11, generator=GENERATOR, dtype=torch.float64) + 0.3
REFERENCE = torch.randn(3, 2, generator=GENERATOR, dtype=torch.float64)
TIGHT = {"tolerance": 1e-11, "engine": "torch"}


def test_one_point_is_the_weighted_mean():
    pooled = flow_pool(NODES, BATCH, reference=REFERENCE[:1], masses=MASSES, **TIGHT)
    for graph in range(2):
        own = graph == BATCH
        mean = (MASSES[own, None] * NODES[own]).sum(0) / MASSES[own].sum()
        assert torch.allclose(pooled.points[graph, 0], mean, atol=1e-12)


def test_as_many_points_as_nodes_are_the_nodes_with_the_identity_as_jacobian():
    nodes = NODES[:4].clone().requires_grad_()
    pooled = flow_pool(nodes, reference=nodes.detach() + 0.1, relative=False, epsilon=0.05, **TIGHT)
    nearest = torch.cdist(pooled.points[0], nodes).argmin(1)
    assert sorted(nearest.tolist()) == [0, 1, 2, 3]
    assert torch.allclose(pooled.points[0], nodes[nearest], atol=1e-9)
    assert pooled.divergence.abs().max() < 1e-12
    jacobian = torch.autograd.functional.jacobian(
        lambda y: flow_pool(y, reference=nodes.detach() + 0.1, relative=False, epsilon=0.05, **TIGHT).points[0][
            nearest.argsort()
        ],
        nodes.detach(),
    )
    assert torch.allclose(jacobian.view(8, 8), torch.eye(8, dtype=torch.float64), atol=1e-8)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("debias", [True, False])
def test_gradcheck_in_nodes_masses_and_epsilon(relative, debias):
    def points(nodes, masses, epsilon):
        return flow_pool(
            nodes, BATCH, reference=REFERENCE, masses=masses, epsilon=epsilon, relative=relative, debias=debias, **TIGHT
        ).points

    epsilon = torch.tensor(0.3, dtype=torch.float64)
    assert gradcheck(points, [x.clone().requires_grad_() for x in (NODES, MASSES, epsilon)])


def test_gradcheck_in_point_masses_and_per_graph_epsilon():
    def points(weights, epsilon):
        return flow_pool(NODES, BATCH, reference=REFERENCE, point_masses=weights, epsilon=epsilon, **TIGHT).points

    weights = torch.tensor([0.5, 0.3, 0.4], dtype=torch.float64, requires_grad=True)
    assert gradcheck(points, (weights, torch.tensor([0.3, 0.6], dtype=torch.float64, requires_grad=True)))


@pytest.mark.parametrize("rank", [None, 2])
def test_parameters_of_a_cost_get_exact_gradients(rank):
    cost = costs.Mahalanobis(2, rank).double()
    torch.nn.init.normal_(cost.weight, std=0.5, generator=torch.Generator().manual_seed(3))

    def loss(weight):
        with torch.no_grad():
            cost.weight.copy_(weight)
        pooled = flow_pool(NODES, BATCH, reference=REFERENCE, cost=cost, epsilon=0.3, **TIGHT)
        return (pooled.points * torch.arange(12.0).view(2, 3, 2)).sum()

    value = cost.weight.detach().clone()
    loss(value).backward()
    found = cost.weight.grad.clone()
    for _ in range(3):
        direction = torch.randn(value.shape, generator=GENERATOR, dtype=torch.float64)
        slope = central_difference(lambda w: loss(w).detach(), value, direction)
        assert float((found * direction).sum()) == pytest.approx(float(slope), rel=1e-6)


def paper_gradients(points, nodes, epsilon, cost, cotangent, ridge):
    """v^T J in nodes and parameters for (A + lambda I) J = B, with every matrix of section 8.2 formed.

    Without lambda and where A is singular J is the solution of least norm.
    """
    energy = make_energy(points, nodes, epsilon, cost=cost)
    here = energy.evaluate(points, None, 1e-13)
    hessian, leaf = dense_hessian(energy, here)[0], nodes.clone().requires_grad_()
    normal = hessian @ hessian + ridge * torch.eye(len(hessian), dtype=torch.float64)
    inverse = torch.linalg.pinv(normal, rtol=1e-12, hermitian=True)
    way = (inverse @ (hessian @ cotangent.flatten())).view_as(points)
    mixed = make_energy(points, leaf, epsilon, cost=cost).gradient(points, here)
    return torch.autograd.grad(mixed, [leaf, *cost.parameters()], -way)


@pytest.mark.parametrize("ridge", [0.0, 1e-2, 1.0, 1e6])
@pytest.mark.parametrize(
    ("cost", "engine", "epsilon"),
    [
        (costs.SquaredEuclidean(), "torch", 3.0),
        (costs.SquaredEuclidean(), "compiled", 3.0),
        (costs.Euclidean(3.0), "torch", 30.0),
        (costs.Cosine(), "torch", 0.02),  # blind to lengths, so that its Hessian is singular
        (costs.Mahalanobis(2).double(), "auto", 2.0),
    ],
    ids=str,
)
def test_an_absolute_ridge_is_lambda_of_the_paper(cost, engine, epsilon, ridge):
    generator = torch.Generator().manual_seed(3)
    nodes = 3 * torch.randn(7, 2, generator=generator, dtype=torch.float64) + 5
    cotangent = torch.randn(1, 3, 2, generator=generator, dtype=torch.float64)
    for parameter in cost.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.5, generator=generator)
    leaf = nodes.clone().requires_grad_()
    options = {"relative": False, "epsilon": epsilon, "cost": cost, "engine": engine, "tolerance": 1e-11}
    points = flow_pool(leaf, reference=REFERENCE, ridge=ridge, **options).points
    found = torch.autograd.grad(points, [leaf, *cost.parameters()], cotangent)
    expected = paper_gradients(points.detach(), nodes[None], epsilon, cost, cotangent, ridge)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other.view_as(one), rtol=0, atol=1e-6 * float(other.norm()))


def test_implicit_unrolled_and_finite_differences_agree():
    nodes, masses = NODES.clone().requires_grad_(), MASSES.clone().requires_grad_()
    epsilon = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    inputs = (nodes, masses, epsilon)
    weights = torch.randn(2, 3, 2, generator=GENERATOR, dtype=torch.float64)

    def pool(nodes, masses, epsilon, **options):
        return flow_pool(nodes, BATCH, reference=REFERENCE, masses=masses, epsilon=epsilon, **options)

    implicit = pool(*inputs, **TIGHT)
    unrolled = pool(*inputs, gradient="unrolled", tolerance=1e-12, max_steps=4000)
    assert torch.allclose(implicit.points, unrolled.points, atol=1e-9)
    by_implicit = torch.autograd.grad((implicit.points * weights).sum(), inputs)
    by_unrolling = torch.autograd.grad((unrolled.points * weights).sum(), inputs)
    for place, (one, other) in enumerate(zip(by_implicit, by_unrolling, strict=True)):
        assert (one - other).norm() <= 1e-6 * one.norm()
        direction = torch.randn(inputs[place].shape, generator=GENERATOR, dtype=torch.float64)

        def value(x, place=place):
            changed = [x if k == place else y.detach() for k, y in enumerate(inputs)]
            return (pool(*changed, **TIGHT).points * weights).sum()

        slope = central_difference(value, inputs[place].detach(), direction)
        assert float((one * direction).sum()) == pytest.approx(float(slope), rel=1e-6)
    assert implicit.backward.residual.max() < 1e-9
    assert not implicit.backward.damped.any()


@pytest.mark.parametrize("cost", ["cosine", costs.Euclidean(3.0), lambda x, y: (x - y).pow(4).sum(-1)])
def test_other_costs_reach_stationarity_with_right_gradients(cost):
    nodes = NODES + torch.tensor([2.0, 1.0])  # away from the origin, where the cosine is undefined
    pooled = flow_pool(nodes, BATCH, reference=REFERENCE, cost=cost, epsilon=0.3, **TIGHT)
    assert pooled.converged.all()
    weights = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(8), dtype=torch.float64)

    def loss(y):
        points = flow_pool(y, BATCH, reference=REFERENCE, cost=cost, epsilon=0.3, **TIGHT).points
        if cost == "cosine":  # the length of a point costs nothing, so only its direction is determined
            points = points / points.norm(dim=-1, keepdim=True)
        return (points * weights).sum()

    value = nodes.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(value), value)
    direction = torch.randn(nodes.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    slope = central_difference(lambda y: loss(y).detach(), nodes, direction)
    assert float((found * direction).sum()) == pytest.approx(float(slope), rel=1e-5)


def test_all_of_mutag_is_stationary():
    features, batch = mutag_clouds()
    reference = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pooled = flow_pool(features, batch, reference=reference, engine="torch")
    assert pooled.converged.all()
    assert pooled.residual.max() <= 1e-5
    assert (pooled.divergence >= 0).all() and pooled.divergence.max() < 1


def test_divergence_and_plan_are_those_of_the_points():
    pooled = flow_pool(NODES, BATCH.flip(0), reference=REFERENCE, masses=MASSES, epsilon=0.4, relative=False, **TIGHT)
    for graph in range(2):
        own = BATCH.flip(0) == graph
        masses = (MASSES[own] / MASSES[own].sum()).unsqueeze(0)
        expected = sinkhorn_divergence(pooled.points[graph : graph + 1], NODES[own].unsqueeze(0), 0.4, masses=masses)
        assert torch.allclose(pooled.divergence[graph], expected[0], atol=1e-11)
        plan = pooled.plan(graph)
        assert torch.allclose(plan.sum(0), masses[0]) and torch.allclose(plan.sum(1), torch.full((3,), 1 / 3).double())
        # At X* the two barycentric maps agree: that is what a vanishing gradient says.
        cost = torch.cdist(pooled.points[graph], pooled.points[graph]) ** 2
        equal = torch.full((1, 3), 1 / 3).double()
        own_plan = sinkhorn.solve(cost.unsqueeze(0), equal, equal, torch.tensor([0.4]).double()).plan
        assert torch.allclose(plan @ NODES[own], own_plan[0] @ pooled.points[graph], atol=1e-10)
    with pytest.raises(IndexError, match="graph 2 of a batch of 2"):
        pooled.plan(2)


def test_status_of_every_kind_of_graph_in_one_batch():
    nodes = torch.cat([NODES[:6], torch.full((2, 2), 1.5), torch.tensor([[0.0, torch.nan], [1.0, 2.0]]), NODES[6:7]])
    batch = torch.tensor([0] * 6 + [1, 1, 3, 3, 4])
    pooled = flow_pool(nodes, batch, reference=REFERENCE, dim_size=6, **TIGHT)
    names = [Status(code).name for code in pooled.status.tolist()]
    assert names == ["OK", "OK", "EMPTY", "NONFINITE_INPUT", "OK", "EMPTY"]
    assert torch.equal(pooled.points[1], torch.full((3, 2), 1.5).double())
    assert torch.equal(pooled.points[4], NODES[6].expand(3, 2))
    assert (pooled.points[[2, 5]] == 0).all() and pooled.points[3].isnan().all()
    assert pooled.divergence[[1, 2, 4, 5]].abs().max() == 0 and pooled.divergence[3].isnan()
    assert pooled.converged.tolist() == [True, True, True, False, True, True]
    assert pooled.plan(1).shape == (3, 2) and pooled.plan(2).shape == (3, 0)
    stopped = flow_pool(NODES, BATCH, reference=REFERENCE, max_steps=2, engine="torch")
    assert [Status(code).name for code in stopped.status.tolist()] == ["MAX_STEPS"] * 2
    assert all(status.advice for status in Status)


def test_more_points_than_nodes_and_twins_are_legal():
    reference = torch.randn(6, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    nodes = torch.cat([NODES[:3], NODES[:1]]).requires_grad_()  # three distinct nodes, one of them twice
    pooled = flow_pool(nodes, reference=reference, engine="torch")
    assert pooled.points.isfinite().all()
    pooled.points.square().sum().backward()
    assert nodes.grad.isfinite().all()
    assert torch.allclose(nodes.grad[0], nodes.grad[3], rtol=1e-6)  # twins share equally


def test_translation_scale_and_order():
    pooled = flow_pool(NODES, BATCH, reference=REFERENCE, **TIGHT).points
    moved = flow_pool(1e3 * NODES + 5e5, BATCH, reference=REFERENCE, **TIGHT).points
    assert torch.allclose(moved, 1e3 * pooled + 5e5, rtol=1e-12)
    order = torch.randperm(11, generator=GENERATOR)
    assert torch.allclose(
        flow_pool(NODES[order], BATCH[order], reference=REFERENCE, **TIGHT).points, pooled, atol=1e-10
    )


def test_reference_and_epsilon_have_the_same_meaning_in_both_modes():
    nodes = NODES[:6]
    mean = nodes.mean(0)
    radius = (nodes - mean).square().sum(-1).mean().sqrt()
    relative = flow_pool(nodes, reference=REFERENCE, epsilon=0.3, **TIGHT)
    absolute = flow_pool(nodes, reference=mean + radius * REFERENCE, epsilon=0.3 * radius**2, relative=False, **TIGHT)
    assert torch.allclose(relative.points, absolute.points, atol=1e-10)


def test_hessian_at_the_result_is_positive():
    pooled = flow_pool(NODES, BATCH, reference=REFERENCE, **TIGHT)
    from flowpool.core.divergence import make_energy

    for graph in range(2):
        nodes = NODES[graph == BATCH].unsqueeze(0)
        variance = (nodes - nodes.mean(1)).square().sum(-1).mean()
        energy = make_energy(pooled.points[graph : graph + 1], nodes, 0.1 * variance)
        matrix = dense_hessian(energy, energy.evaluate(pooled.points[graph : graph + 1]))[0]
        assert torch.linalg.eigvalsh(matrix).min() > 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epsilon": 0.0}, ValueError, "epsilon is 0.0; it must be finite and > 0"),
        ({"epsilon": torch.tensor([0.1, -1.0])}, ValueError, "epsilon is -1"),
        ({"epsilon": torch.tensor([0.1, 0.1, 0.1])}, ValueError, r"shape \(3,\).*one per graph, \(2,\)"),
        ({"gradient": "exact"}, ValueError, "Unknown gradient 'exact'"),
        ({"engine": "cuda"}, ValueError, "Unknown engine 'cuda'"),
        ({"tolerance": 0.0}, ValueError, "tolerance is 0"),
        ({"max_steps": 0}, ValueError, "max_steps is 0"),
        ({"step_size": 2.0}, ValueError, "step_size is 2"),
        ({"ridge": -1.0}, ValueError, "ridge is -1"),
        ({"reference": REFERENCE.long()}, TypeError, "reference is torch.int64"),
        ({"masses": MASSES.float()}, TypeError, "masses is torch.float32"),
        ({"point_masses": torch.tensor([1.0, 0.0, 1.0]).double()}, ValueError, "first: point 1, 0"),
        ({"point_masses": torch.ones(2).double()}, ValueError, r"expected a tensor of shape \(3,\)"),
        ({"cost": lambda x, y: (x - 2 * y).square().sum(-1)}, ValueError, "cost is not symmetric"),
        ({"eps": 0.1}, TypeError, "unexpected keyword argument 'eps'"),
    ],
)
def test_mistakes_are_named(options, error, message):
    with pytest.raises(error, match=message):
        flow_pool(NODES, BATCH, **{"reference": REFERENCE, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_precisions_are_computed_in_float64_and_returned_as_given(dtype):
    nodes, reference = NODES.to(dtype), REFERENCE.to(dtype)
    pooled = flow_pool(nodes, BATCH, reference=reference, engine="torch")
    exact = flow_pool(nodes.double(), BATCH, reference=reference.double(), engine="torch")
    assert pooled.points.dtype == dtype
    assert torch.equal(pooled.points, exact.points.to(dtype))


@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
def test_inference_mode_changes_nothing(cost):
    nodes = NODES + 2
    expected = flow_pool(nodes, BATCH, reference=REFERENCE, cost=cost)
    with torch.inference_mode():
        found = flow_pool(nodes, BATCH, reference=REFERENCE, cost=cost)
    assert torch.equal(found.points, expected.points)


@pytest.mark.parametrize("name", ["nodes", "epsilon"])
def test_second_derivatives_are_refused_also_where_the_first_is_constant(name):
    inputs = {"nodes": NODES.clone(), "epsilon": torch.tensor(0.3, dtype=torch.float64)}
    inputs[name].requires_grad_()
    pooled = flow_pool(inputs["nodes"], BATCH, reference=REFERENCE, epsilon=inputs["epsilon"])
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(pooled.points.sum(), inputs[name], create_graph=True)


def test_plan_columns_follow_the_order_in_which_nodes_were_given():
    pooled = flow_pool(NODES[:6], reference=REFERENCE, masses=MASSES[:6], **TIGHT)
    assert torch.allclose(pooled.plan(0).sum(0), MASSES[:6] / MASSES[:6].sum())
