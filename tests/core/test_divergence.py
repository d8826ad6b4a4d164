import jax
import jax.numpy as jnp
import pytest
import torch
from helpers import random_pair
from ott.geometry import pointcloud
from ott.tools.sinkhorn_divergence import sinkhorn_divergence as ott_divergence
from torch.autograd import gradcheck

from flowpool import costs
from flowpool.core.divergence import make_energy, sinkhorn_divergence, sinkhorn_loss

jax.config.update("jax_enable_x64", True)
COSTS = ["sqeuclidean", "cosine", costs.Euclidean(1.5), lambda x, y: (x - y).abs().pow(3).sum(-1)]
IDS = ["sqeuclidean", "cosine", "power", "callable"]


def test_divergence_equals_ott_on_fifty_random_pairs():
    pair = random_pair(batch=50, num_points=5, num_nodes=9, seed=11)
    ours = sinkhorn_divergence(pair.points, pair.nodes, 0.5, pair.point_masses, pair.masses)

    @jax.jit
    def theirs(x, y, a, b):
        settings = {"threshold": 1e-13, "max_iterations": 20_000}
        return ott_divergence(pointcloud.PointCloud, x, y, a=a, b=b, epsilon=0.5, solve_kwargs=settings)[0]

    for graph in range(50):
        arrays = (jnp.asarray(x[graph].numpy()) for x in (pair.points, pair.nodes, pair.point_masses, pair.masses))
        assert float(theirs(*arrays)) == pytest.approx(float(ours[graph]), abs=1e-8)


def test_divergence_is_zero_for_equal_clouds_symmetric_and_positive():
    pair = random_pair(batch=5, num_points=6, num_nodes=6, seed=2)
    x, y, a, b = pair.points, pair.nodes, pair.point_masses, pair.masses
    order = torch.randperm(6)
    assert sinkhorn_divergence(x, x[:, order], 0.3, a, a[:, order]).abs().max() < 1e-12
    there, back = sinkhorn_divergence(x, y, 0.3, a, b), sinkhorn_divergence(y, x, 0.3, b, a)
    assert torch.allclose(there, back, atol=1e-11)
    assert (there > 0).all()


def test_entropic_bias_of_the_loss_alone():
    """L_eps is lower for a shrunken copy of the cloud than for the cloud; S_eps is not."""
    y = random_pair(batch=1, num_nodes=20, dim=2).nodes
    shrunk = 0.8 * (y - y.mean(1, keepdim=True)) + y.mean(1, keepdim=True)
    assert sinkhorn_loss(shrunk, y, 2.0) < sinkhorn_loss(y, y, 2.0)
    assert sinkhorn_divergence(shrunk, y, 2.0) > sinkhorn_divergence(y, y, 2.0)


def test_divergence_is_differentiable_in_everything():
    pair = random_pair(batch=1, num_points=2, num_nodes=3, dim=2)

    def value(x, y, a, b, level):
        a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
        return sinkhorn_divergence(x, y, level, a, b)

    level = torch.tensor(0.4, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for x in (pair.points, pair.nodes, pair.point_masses, pair.masses, level)]
    assert gradcheck(value, inputs)


def test_a_second_derivative_is_refused():
    """The envelope holds the plans fixed: what it would say of curvatures is wrong."""
    pair = random_pair(batch=1)
    x = pair.points.clone().requires_grad_()
    for value in (sinkhorn_loss(x, pair.nodes, 0.5), sinkhorn_divergence(x, pair.nodes, 0.5)):
        with pytest.raises(RuntimeError, match="A Sinkhorn loss cannot be differentiated twice"):
            torch.autograd.grad(value.sum(), x, create_graph=True)


def unrolled_loss(geometry, x, y, a, b, level):
    """L_eps by Sinkhorn's iteration in the log domain, every step of it recorded by autograd."""
    cost, f = geometry.matrix(x, y), torch.zeros_like(a)
    for _ in range(300):
        g = -level * ((f.unsqueeze(-1) - cost) / level).logsumexp(-2) + level * b.log()
        f = -level * ((g.unsqueeze(-2) - cost) / level).logsumexp(-1) + level * a.log()
    # Up to the marginal error, <f, a> + <g, b> - eps is the value of the dual.
    plan = ((f.unsqueeze(-1) + g.unsqueeze(-2) - cost) / level).exp()
    return (f * a).sum(-1) + (g * b).sum(-1) - level * (plan.sum((-1, -2)) - 1)


@pytest.mark.parametrize("cost", COSTS, ids=IDS)
def test_envelope_implicit_and_unrolled_gradients_agree(cost):
    pair = random_pair(batch=2)
    y, a, b = pair.nodes, pair.point_masses, pair.masses
    x = pair.points.clone().requires_grad_()
    energy = make_energy(x, y, 2.0, a, b, cost)
    envelope = energy.evaluate(pair.points).gradient
    (implicit,) = torch.autograd.grad(sinkhorn_divergence(x, y, 2.0, a, b, cost).sum(), x)
    value = unrolled_loss(energy.geometry, x, y, a, b, 2.0) - unrolled_loss(energy.geometry, x, x, a, a, 2.0) / 2
    (unrolled,) = torch.autograd.grad(value.sum(), x)
    assert torch.allclose(envelope, implicit, atol=1e-10)
    assert torch.allclose(envelope, unrolled, atol=1e-8)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("cost", COSTS, ids=IDS)
def test_energy_gradient_is_the_derivative_of_its_value(cost, debias):
    pair = random_pair(batch=2)
    energy = make_energy(pair.points, pair.nodes, 0.3, pair.point_masses, pair.masses, cost, debias)
    direction = torch.randn(pair.points.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    here = energy.evaluate(pair.points)
    step = 1e-5
    ahead, behind = (
        energy.value(energy.evaluate(p)) for p in (pair.points + step * direction, pair.points - step * direction)
    )
    slope = (here.gradient * direction).sum((-1, -2))
    assert torch.allclose((ahead - behind) / (2 * step), slope, rtol=1e-7, atol=1e-8)
    assert torch.allclose(energy.gradient(pair.points, here), here.gradient)


def test_squared_euclidean_gradient_in_closed_form():
    pair = random_pair(batch=2)
    here = make_energy(pair.points, pair.nodes, 0.3, pair.point_masses, pair.masses).evaluate(pair.points)
    assert torch.allclose(here.gradient, 2 * (here.self_plan @ pair.points - here.plan @ pair.nodes))


def test_warm_evaluation_equals_a_cold_one():
    pair = random_pair(batch=2)
    energy = make_energy(pair.points, pair.nodes, 0.05, pair.point_masses, pair.masses)
    moved = pair.points + 0.05
    warm = energy.evaluate(moved, energy.evaluate(pair.points).transport.potential)
    cold = energy.evaluate(moved)
    assert torch.allclose(warm.gradient, cold.gradient, atol=1e-11)
