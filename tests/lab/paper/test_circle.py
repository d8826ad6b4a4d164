"""Pooled points are driven onto the circle, and the gradients of both ways agree when the flow is long enough."""

import torch

from flowpool.lab.paper import circle


def test_objective_and_distance_vanish_on_the_circle_alone() -> None:
    angles = torch.tensor([0.1, 2.0, 4.0], dtype=torch.float64)
    points = torch.stack([angles.cos(), angles.sin()], 1)
    assert float(circle.objective(points)) < 1e-30
    assert float(circle.objective(2 * points)) == 3 * 9
    torch.testing.assert_close(circle.distances(2 * points), torch.ones(3, dtype=torch.float64))


def test_pooled_points_reach_the_circle() -> None:
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randn(7, 2, generator=generator, dtype=torch.float64)
    nodes = 1.2 * nodes / nodes.norm(dim=1, keepdim=True)
    reference = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    descent = circle.minimise(nodes, reference, max_steps=400)
    assert float(circle.distances(descent.points[0]).max()) > 0.05
    assert float(circle.distances(descent.points[-1]).max()) < 1e-3


def test_long_unrolling_gives_the_implicit_gradient() -> None:
    nodes, reference = circle.start()
    exact = circle.first_gradient(nodes[:8], reference[:3], None)
    short, long = (circle.first_gradient(nodes[:8], reference[:3], steps) for steps in (5, 150))
    assert float((long - exact).norm()) < 5e-3 * float(exact.norm())
    assert float((short - exact).norm()) > 0.05 * float(exact.norm())
