import pytest
import torch
from helpers import mutag_clouds, random_pair

from flowpool import references
from flowpool.core import flow
from flowpool.core.divergence import Energy, make_energy
from flowpool.core.hessian import dense_hessian
from flowpool.core.measures import make_clouds
from flowpool.core.updates import UPDATES
from flowpool.costs import Euclidean, Geometry, SquaredEuclidean


def fine_flow(energy, start, time, step=1 / 16):
    """The gradient flow itself, by plain Euler steps of 1/16, then polished at rest."""
    points, potential = start, None
    for _ in range(int(time / step)):
        here = energy.evaluate(points, potential, 1e-9)
        potential = here.transport.potential
        points = points - step * here.gradient / energy.scales.stiffness.unsqueeze(-1)
    return flow.follow(energy, points, 1e-9, 2000).points


def standardised(clouds):
    centred = clouds.nodes - clouds.mean()[clouds.batch]
    variance = clouds.sum(clouds.masses * centred.square().sum(-1))
    return clouds.moved(centred / variance.sqrt()[clouds.batch, None])


@pytest.mark.slow
@pytest.mark.parametrize("level", [0.3, 0.1])
def test_mutag_graphs_end_in_the_basin_of_the_fine_flow(level):
    features, batch = mutag_clouds(width=8, count=12, seed=3)
    clouds = standardised(make_clouds(features, batch)[0])
    start = references.normal(8, 5, seed=1).double().expand(12, 5, 8)
    uniform = torch.full((5,), 0.2, dtype=torch.float64)
    nodes, masses = clouds.padded(torch.arange(12))
    levels = torch.full((12,), level, dtype=torch.float64)
    energy = Energy(Geometry(SquaredEuclidean()), nodes, masses, uniform.expand(12, 5), levels)
    ended = flow.follow(energy, start, 1e-6, 1000)
    assert (ended.residual <= 1e-6).all()
    gap = (ended.points - fine_flow(energy, start, time=40)).abs().amax((1, 2))
    same = int((gap < 1e-3).sum())
    assert same >= 11


def test_residual_is_the_newton_step_and_the_gradient_vanishes():
    pair = random_pair(batch=4, num_points=3, num_nodes=9)
    energy = make_energy(pair.points, pair.nodes, 0.3, pair.point_masses, pair.masses)
    ended = flow.follow(energy, pair.points, 1e-9, 500)
    here = energy.evaluate(ended.points)
    step = torch.linalg.solve(dense_hessian(energy, here), here.gradient.flatten(1))
    assert (step.norm(dim=1) / energy.scales.radius <= 1e-8).all()
    assert (ended.residual <= 1e-9).all()
    assert here.gradient.abs().max() < 1e-9


def test_energy_never_rises_from_step_to_step():
    pair = random_pair(batch=3, num_points=3, num_nodes=8, seed=4)
    energy = make_energy(pair.points, pair.nodes, 0.2, pair.point_masses, pair.masses)
    values = []
    for steps in (0, 1, 2, 3, 4, 6, 8, 11, 14, 18, 22, 26, 30, 40):
        ended = flow.follow(energy, pair.points, 1e-9, steps) if steps else None
        points = pair.points if ended is None else ended.points
        values.append(energy.value(energy.evaluate(points)))
    drop = torch.stack(values).diff(dim=0)
    assert drop.max() <= 1e-9
    assert drop.min() < -1e-3


def test_algorithm_one_goes_where_the_adaptive_flow_goes():
    pair = random_pair(batch=3, num_points=3, num_nodes=9, seed=7)
    energy = make_energy(pair.points, pair.nodes, 0.5, pair.point_masses, pair.masses)
    plain, steps = flow.descend(energy, pair.points, 0.1, 3000, 1e-9)
    ended = flow.follow(energy, pair.points, 1e-9, 500)
    fixed = flow.follow(energy, pair.points, 1e-9, 500, step_size=0.1)
    assert (steps < 3000).all()
    assert torch.allclose(plain, ended.points, atol=1e-6)
    assert torch.allclose(fixed.points, ended.points, atol=1e-7)


def test_another_update_rule_reaches_the_same_points():
    pair = random_pair(batch=2, num_points=2, num_nodes=6, seed=5)
    energy = make_energy(pair.points, pair.nodes, 1.0, pair.point_masses, pair.masses)
    plain, _ = flow.descend(energy, pair.points, 0.1, 2000, 1e-9)
    for name, step in (("gradient", 0.1), ("momentum", 0.02), ("adam", 0.02)):
        found, _ = flow.descend(energy, pair.points, step, 2000, 1e-9, UPDATES[name])
        assert torch.allclose(found, plain, atol=1e-6), name


def test_clouds_that_have_ended_are_left_out_once_they_are_half(monkeypatch):
    pair = random_pair(batch=6, num_points=3, num_nodes=9)
    pair.points[1:] = pair.points[:1]
    pair.nodes[1:] = pair.nodes[:1]
    masses, weights = pair.masses[:1].expand(6, 9), pair.point_masses[:1].expand(6, 3)
    levels = torch.tensor([0.3, 0.3, 0.3, 0.3, 0.3, 5.0], dtype=torch.float64)
    energy = make_energy(pair.points, pair.nodes, levels, weights, masses)
    sizes = []
    original = flow._transported
    monkeypatch.setattr(
        flow, "_transported", lambda some, *rest: sizes.append(len(some.epsilon)) or original(some, *rest)
    )
    ended = flow.follow(energy, pair.points, 1e-8, 500)
    slowest = int((ended.steps == ended.steps.max()).sum())
    assert slowest in (1, 5)
    assert sizes[0] == 6
    assert sizes[-1] == (1 if slowest == 1 else 6)


@pytest.mark.parametrize("cost", ["sqeuclidean", Euclidean(1.5)], ids=["squared", "power"])
def test_by_products_alone_the_flow_ends_where_it_does_with_the_spectrum(cost, monkeypatch):
    pair = random_pair(batch=4, num_points=3, num_nodes=9, seed=2)
    energy = make_energy(pair.points, pair.nodes, 0.3, pair.point_masses, pair.masses, cost)
    dense = flow.follow(energy, pair.points, 1e-8, 500)
    monkeypatch.setattr(flow, "MOST_DENSE", 1)
    by_products = flow.follow(energy, pair.points, 1e-8, 500)
    assert torch.allclose(dense.points, by_products.points, atol=1e-6)
    assert (by_products.residual <= 1e-8).all()


def test_step_cap_is_honest():
    pair = random_pair(batch=3, num_points=4, num_nodes=9)
    energy = make_energy(pair.points, pair.nodes, 0.1, pair.point_masses, pair.masses)
    ended = flow.follow(energy, pair.points + 3, 1e-9, 4)
    assert (ended.steps == 4).all()
    assert (ended.residual > 1e-9).all() and ended.residual.isfinite().all()
