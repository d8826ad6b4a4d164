from __future__ import annotations

import math

import pytest
import torch

from flowpool.lab.pools.otke import OTKEPool


def nodes_with_padding() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.tensor([[True] * 7, [True] * 3 + [False] * 4])
    return torch.randn(2, 7, 4) * mask.unsqueeze(2), mask


def test_plan_marginals() -> None:
    nodes, mask = nodes_with_padding()
    pool = OTKEPool(4, 5)
    plan = pool.plan(pool.features(nodes), mask)
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
        scores = pool.features(x) @ pool.reference.mT
        centred = (
            scores - scores.mean(1, keepdim=True) - scores.mean(2, keepdim=True) + scores.mean((1, 2), keepdim=True)
        )
        closed_form = (1 + centred / epsilon) / 30
        errors.append(float((pool.plan(pool.features(x), mask) - closed_form).abs().max().detach()))
    assert errors[0] < 1e-4
    assert 50 < errors[0] / errors[1] < 200  # second order: ten times the epsilon, a hundredth of the error


def test_readout_is_the_plan_weighted_sum_of_features_scaled_by_the_root_of_the_points() -> None:
    nodes, mask = nodes_with_padding()
    pool = OTKEPool(4, 5)
    x, batch = nodes[mask], torch.tensor([0] * 7 + [1] * 3)
    readout = pool(x, torch.empty(2, 0, dtype=torch.long), batch, 2)
    features = pool.features(nodes[1:, :3])
    expected = math.sqrt(5) * pool.plan(features, mask[1:, :3])[0].T @ features[0]
    torch.testing.assert_close(readout.vector[1].view(5, 4), expected)


def test_inner_products_of_features_are_the_gaussian_kernel_at_the_anchors() -> None:
    """Nystroem is exact where one of the two is an anchor, and below the kernel on the diagonal elsewhere."""
    torch.manual_seed(0)
    pool, x = OTKEPool(4, 5).double(), torch.randn(9, 4, dtype=torch.float64)
    with torch.no_grad():
        pool.bandwidth.fill_(1.7)
    products = pool.features(x) @ pool.features(pool.anchors).mT
    kernel = torch.exp(-torch.cdist(x, pool.anchors).square() / (2 * 1.7**2))
    torch.testing.assert_close(products, kernel, rtol=0, atol=1e-4)
    lengths = pool.features(x).square().sum(1)
    assert bool((lengths <= 1).all())
    assert float(pool.features(100 + x).detach().abs().max()) < 1e-6  # far from every anchor


def test_fit_takes_anchors_and_reference_from_the_training_nodes() -> None:
    centres = torch.tensor([[0.0, 0.0], [8.0, 0.0]])
    x = centres.repeat_interleave(10, 0) + 0.01 * torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    pool = OTKEPool(2, 2)
    pool.fit(x, torch.zeros(20, dtype=torch.long))
    order = pool.anchors[:, 0].argsort()
    torch.testing.assert_close(pool.anchors[order].detach(), centres, rtol=0, atol=0.02)
    assert float(pool.bandwidth) == pytest.approx(4, abs=0.05)
    found = torch.cdist(pool.reference, pool.features(centres))
    torch.testing.assert_close(found.min(1).values.detach(), torch.zeros(2), rtol=0, atol=0.01)


def test_cloud_keeps_the_mean_of_the_nodes() -> None:
    nodes, _ = nodes_with_padding()
    cloud = OTKEPool(4, 5).points(nodes[0], torch.empty(2, 0, dtype=torch.long), torch.zeros(7, dtype=torch.long), 1)
    torch.testing.assert_close(cloud.points[0].mean(0), nodes[0].mean(0))
