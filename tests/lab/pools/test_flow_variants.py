"""Each variant of FlowPool in the bench differs from it in one thing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flowpool import costs, flow_pool, references
from flowpool.lab.model import build_model
from flowpool.lab.options import Shape
from flowpool.lab.pools import POOLS
from flowpool.lab.pools.flow_attention import FlowAttentionPool
from flowpool.lab.pools.flow_free import FlowFreePool
from flowpool.lab.pools.flow_kmeans import FlowKMeansPool
from flowpool.lab.pools.flow_mahalanobis import FlowMahalanobisPool
from flowpool.lab.pools.flow_readout import FlowReadoutPool
from flowpool.nn.readout import FlowReadout

GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(14, 3, generator=GENERATOR)
BATCH = torch.tensor([0] * 5 + [1] * 9)
EDGES = torch.empty(2, 0, dtype=torch.long)


def vector(pool: torch.nn.Module, nodes: Tensor = NODES) -> Tensor:
    result: Tensor = pool(nodes, EDGES, BATCH, 2).vector
    return result


def test_untrained_variants_are_flowpool_itself() -> None:
    expected = vector(POOLS["flow"](3, 4, seed=1))
    for variant in ("flow-attention", "flow-mahalanobis"):
        assert torch.allclose(vector(POOLS[variant](3, 4, seed=1)), expected, atol=1e-5)
    deviations = vector(POOLS["flow-deviations"](3, 4, seed=1)).view(2, 4, 3)
    points = expected.view(2, 4, 3)
    assert torch.allclose(deviations[:, 0], points.mean(1), atol=1e-6)
    assert torch.allclose(deviations[:, :1] + deviations[:, 1:], points[:, :-1], atol=1e-6)


def test_trained_variants_pool_with_what_they_learned() -> None:
    weighted = POOLS["flow-mahalanobis"](3, 4, seed=1)
    assert isinstance(weighted, FlowMahalanobisPool)
    cost = costs.Mahalanobis(3)
    with torch.no_grad():
        for weight in (weighted.layer.cost.weight, cost.weight):
            assert isinstance(weight, Tensor)
            weight.copy_(torch.tensor([0.8, -0.5, 0.0]))
    expected = flow_pool(NODES, BATCH, reference=weighted.layer.reference, cost=cost).points
    assert torch.equal(vector(weighted), expected.flatten(1))
    attentive = POOLS["flow-attention"](3, 4, seed=1)
    assert isinstance(attentive, FlowAttentionPool)
    torch.nn.init.constant_(attentive.attention.score.weight, 0.7)
    masses = torch.cat([(0.7 * part.sum(1)).softmax(0) for part in NODES.split([5, 9])])
    expected = flow_pool(NODES, BATCH, reference=attentive.layer.reference, masses=masses).points
    assert torch.allclose(vector(attentive), expected.flatten(1), atol=1e-4)


@pytest.mark.parametrize("variant", ["flow-mahalanobis", "flow-attention", "flow-free", "flow-step"])
def test_what_is_learned_gets_a_gradient(variant: str) -> None:
    pool = POOLS[variant](3, 4, seed=1)
    pool.fit(NODES, BATCH)
    weights = torch.randn(2, pool.out_channels, generator=torch.Generator().manual_seed(1))
    (vector(pool) * weights).sum().backward()
    (parameter,) = pool.parameters()
    assert parameter.grad is not None
    assert float(parameter.grad.abs().max()) > 1e-4


def test_k_means_is_taken_from_the_nodes_that_fit_is_shown() -> None:
    pool = POOLS["flow-kmeans"](3, 4, seed=1)
    assert isinstance(pool, FlowKMeansPool)
    pool.fit(NODES, BATCH)
    expected = references.kmeans(NODES, 4, pool.layer.seed)
    assert torch.allclose(pool.layer.reference, expected, atol=1e-6)
    assert torch.equal(vector(pool), flow_pool(NODES, BATCH, reference=pool.layer.reference).points.flatten(1))


def test_free_masses_count_the_nodes_around_each_prototype() -> None:
    """Four tight clusters, so that shares are counts and prototypes are their centres."""
    centres = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0]])
    kind = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 0, 1, 2, 2])
    nodes = centres[kind] + 0.01 * NODES
    pool = POOLS["flow-free"](3, 4, seed=1)
    assert isinstance(pool, FlowFreePool)
    assert pool.out_channels == 4 * 4
    pool.fit(nodes, BATCH)
    nearest = torch.cdist(pool.reference.detach(), centres).argmin(1)  # which cluster each prototype is
    found = vector(pool, nodes).detach()
    for graph, own in enumerate(kind.split([5, 9])):
        counts = torch.bincount(own, minlength=4)[nearest].float()
        assert torch.allclose(found[graph, :4], counts, atol=0.02)
        carried = found[graph, 4:].view(4, 3)
        for point in range(4):
            members = nodes[(graph == BATCH) & (kind == nearest[point])]
            assert torch.allclose(carried[point], (members - pool.reference[point].detach()).sum(0), atol=0.05)


def test_the_readout_is_the_layer_of_the_library_as_it_is() -> None:
    """Its output norm weighs the shape, so that nothing may normalise its rows again."""
    pool = POOLS["flow-readout"](3, 4, seed=1)
    assert isinstance(pool, FlowReadoutPool) and isinstance(pool.layer, FlowReadout) and pool.finished
    other = FlowReadout(3, 4, seed=pool.layer.seed)
    assert torch.equal(vector(pool), other(NODES, BATCH))
    model = build_model("flow-readout", Shape(size="append", norm="both"), 5, 2, 0)
    assert isinstance(model.node_norm, torch.nn.Identity) and isinstance(model.output_norm, torch.nn.Identity)
    assert model.size == "none" and model.head.in_features == model.pool.out_channels
    masses = torch.rand(14, generator=GENERATOR) + 0.1
    weighted = pool(NODES, EDGES, BATCH, 2, masses).vector
    assert torch.equal(weighted, other(NODES, BATCH, masses=masses)) and not torch.allclose(weighted, vector(pool))
