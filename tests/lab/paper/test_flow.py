"""The flow descends, its mean goes to the mean of the nodes at the known pace, and only L_eps shrinks."""

import torch

from flowpool import references
from flowpool.core.divergence import sinkhorn_divergence
from flowpool.lab.paper import flow


def test_mean_approaches_exponentially_and_energy_never_rises() -> None:
    nodes = flow.crescent(24)
    start = references.normal(2, 4, seed=0).double() + 1
    steps = flow.record_steps(nodes, start, 40)
    decay = (1 - flow.STEP) ** torch.arange(len(steps), dtype=torch.float64)
    torch.testing.assert_close(steps.mean(1), decay[:, None] * start.mean(0), atol=1e-10, rtol=0)
    energy = sinkhorn_divergence(steps, nodes.expand(len(steps), -1, -1), flow.EPSILON)
    assert bool((energy.diff() < 0).all())


def test_end_agrees_with_flow_pool_and_bias_shrinks_the_cloud() -> None:
    # Beyond twice the largest variance, which is below R^2, the minimiser of L_eps is the mean.
    record = flow.compute(levels=(0.1, 2.0))
    assert record.end_error < 1e-4
    biased, debiased = record.kept
    assert float(biased[1]) < 1e-4
    assert float(debiased.min()) > 0.9
    assert float(biased[0]) < float(debiased[0])
