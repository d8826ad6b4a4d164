from __future__ import annotations

import math

import torch

from flowpool.lab.pools.otke import OTKEPool


def nodes_with_padding() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.tensor([[True] * 7, [True] * 3 + [False] * 4])
    return torch.randn(2, 7, 4) * mask.unsqueeze(2), mask


def test_plan_marginals() -> None:
    nodes, mask = nodes_with_padding()
    plan = OTKEPool(4, 5).plan(nodes, mask)
    expected = torch.tensor([[1 / 7] * 7, [1 / 3] * 3 + [0.0] * 4])
    torch.testing.assert_close(plan.sum(2), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(plan.sum(1), torch.full((2, 5), 0.2), rtol=0, atol=1e-6)


def test_large_epsilon_is_centred_linear_attention() -> None:
    """P = (1 + K / epsilon) / (N M) + O(1 / epsilon^2) with K the scores, centred along both axes."""
    torch.manual_seed(0)
    x = torch.randn(1, 6, 4, dtype=torch.float64)
    mask = torch.ones(1, 6, dtype=torch.bool)
    errors = []
    for epsilon in (100.0, 1000.0):
        torch.manual_seed(1)
        pool = OTKEPool(4, 5, epsilon=epsilon).double()
        scores = x @ pool.reference.mT
        centred = (
            scores - scores.mean(1, keepdim=True) - scores.mean(2, keepdim=True) + scores.mean((1, 2), keepdim=True)
        )
        closed_form = (1 + centred / epsilon) / 30
        errors.append(float((pool.plan(x, mask) - closed_form).abs().max().detach()))
    assert errors[0] < 1e-4
    assert 50 < errors[0] / errors[1] < 200  # second order: ten times the epsilon, a hundredth of the error


def test_readout_is_the_plan_weighted_sum_scaled_by_the_root_of_the_points() -> None:
    nodes, mask = nodes_with_padding()
    pool = OTKEPool(4, 5)
    x, batch = nodes[mask], torch.tensor([0] * 7 + [1] * 3)
    readout = pool(x, torch.empty(2, 0, dtype=torch.long), batch, 2)
    expected = math.sqrt(5) * pool.plan(nodes[1:, :3], mask[1:, :3])[0].T @ x[7:]
    torch.testing.assert_close(readout.vector[1].view(5, 4), expected)


def test_cloud_keeps_the_mean_of_the_nodes() -> None:
    nodes, _ = nodes_with_padding()
    cloud = OTKEPool(4, 5).points(nodes[0], torch.empty(2, 0, dtype=torch.long), torch.zeros(7, dtype=torch.long), 1)
    torch.testing.assert_close(cloud.points[0].mean(0), nodes[0].mean(0))
