"""FlowPool in the bench is the library's own, with a reference drawn from the seed."""

import torch

from flowpool import flow_pool
from flowpool.lab.pools import POOLS
from flowpool.lab.pools.flow import FlowPool


def test_points_and_gradients_are_those_of_the_library() -> None:
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randn(9, 3, generator=generator)
    batch = torch.tensor([0] * 5 + [1] * 4)
    edges = torch.empty(2, 0, dtype=torch.long)
    pool = POOLS["flow"](3, 2, seed=4)
    assert isinstance(pool, FlowPool)
    ours, theirs = nodes.clone().requires_grad_(), nodes.clone().requires_grad_()
    vector = pool(ours, edges, batch, 2).vector
    points = flow_pool(theirs, batch, reference=pool.layer.reference).points
    assert torch.equal(vector, points.flatten(1))
    weights = torch.randn(2, 6, generator=generator)
    (vector * weights).sum().backward()
    (points.flatten(1) * weights).sum().backward()
    assert ours.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
    assert float(ours.grad.abs().max()) > 0


def test_no_two_seeds_share_a_reference() -> None:
    references = [POOLS["flow"](3, 2, seed=seed).state_dict()["layer.reference"] for seed in (0, 1, 0)]
    assert torch.equal(references[0], references[2])
    assert not torch.equal(references[0], references[1])
