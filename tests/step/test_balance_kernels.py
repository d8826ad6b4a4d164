"""The kernels for given shares against their twins in torch, in good and in bad company."""

import numpy as np
import pytest
import torch

from flowpool.step import balance_kernels as balance
from flowpool.step.balance import adjoint_in_torch, solve_in_torch

GENERATOR = torch.Generator().manual_seed(3)


def ragged_batch(sizes, num_points, spread=3.0, weightless=False):
    """Scores, masses and offsets of graphs of these sizes; ``weightless``: every third node but the first has no mass."""
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    scores = spread * torch.randn(int(offsets[-1]), num_points, generator=GENERATOR, dtype=torch.float64)
    masses = torch.rand(len(scores), generator=GENERATOR, dtype=torch.float64) + 0.2
    graph = torch.arange(len(sizes)).repeat_interleave(offsets.diff())
    if weightless:
        place = torch.arange(len(scores)) - offsets[graph]
        masses[place % 3 == 2] = 0
    return scores, masses / torch.zeros(len(sizes)).double().index_add(0, graph, masses)[graph], offsets


def equal(scores):
    return torch.full(scores.shape[1:], 1 / scores.shape[1], dtype=torch.float64)


def solve(scores, masses, ptr, threads=1, shares=None):
    given = (scores, masses, equal(scores) if shares is None else shares, ptr)
    return [torch.from_numpy(value) for value in balance.solve(*(value.numpy() for value in given), threads)]


def adjoint(*given, threads=1):
    return [torch.from_numpy(value) for value in balance.adjoint(*(value.numpy() for value in given), threads)]


@pytest.mark.parametrize("weightless", [False, True])
@pytest.mark.parametrize("num_points", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("sizes", [[7, 0, 1, 30, 8, 0], [0], [3], [200, 17]])
def test_kernels_and_torch_agree(sizes, num_points, weightless):
    scores, masses, ptr = ragged_batch(sizes, num_points, weightless=weightless)
    shares = torch.linspace(1, 3, num_points).double() / torch.linspace(1, 3, num_points).double().sum()
    portions, factor = solve(scores, masses, ptr, shares=shares)
    expected = solve_in_torch(scores, masses, shares, ptr)
    assert torch.allclose(portions, expected[0], rtol=0, atol=1e-12)
    assert torch.allclose(factor, expected[1], rtol=1e-9, atol=1e-12)
    upstream = torch.randn(portions.shape, generator=GENERATOR, dtype=torch.float64)
    given = (portions, masses, ptr, factor, upstream)
    for found, wanted in zip(adjoint(*given), adjoint_in_torch(*given), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spread", [100.0, 1e3, 1e4])
def test_every_point_gets_its_share_however_small_epsilon_is(spread):
    """Where the plan leaves no doubt the potential is not determined any more, but what it achieves is."""
    scores, masses, ptr = ragged_batch([40, 0, 25, 8], 4, spread)
    portions, _ = solve(scores, masses, ptr)
    expected, _ = solve_in_torch(scores, masses, equal(scores), ptr)
    shares = torch.stack([(masses[:, None] * portions)[ptr[g] : ptr[g + 1]].sum(0) for g in range(4)])
    assert torch.allclose(shares[[0, 2, 3]], torch.full((3, 4), 0.25).double(), rtol=0, atol=1e-12)
    assert torch.allclose(portions, expected, rtol=0, atol=1e-12 * spread)


def test_an_epsilon_out_of_reach_does_no_harm():
    """Steps run out before the shares are equal; the last one must not throw away what was found."""
    scores, masses, ptr = ragged_batch([40, 25, 100], 4, 1e6)
    for portions, _ in (solve(scores, masses, ptr), solve_in_torch(scores, masses, equal(scores), ptr)):
        shares = torch.stack([(masses[:, None] * portions)[ptr[g] : ptr[g + 1]].sum(0) for g in range(3)])
        assert ((shares - 0.25).abs() < 0.1).all()


def test_trouble_stays_in_its_graph():
    scores, masses, ptr = ragged_batch([9, 6, 12], 5)
    clean = solve(scores, masses, ptr)
    for value in (torch.nan, torch.inf, -torch.inf):
        broken = scores.clone()
        broken[11, 2] = value
        portions, factor = solve(broken, masses, ptr)
        assert portions[9:15].isnan().all() and factor[1].diagonal().isnan().all()
        assert torch.equal(portions[:9], clean[0][:9]) and torch.equal(portions[15:], clean[0][15:])
        assert torch.equal(factor[[0, 2]], clean[1][[0, 2]])
        upstream = torch.ones_like(portions)
        found = adjoint(portions, masses, ptr, factor, upstream)
        wanted = adjoint(*clean[:1], masses, ptr, clean[1], upstream)
        assert all(torch.equal(one[15:], other[15:]) for one, other in zip(found[:2], wanted[:2], strict=True))
        assert torch.equal(found[2][[0, 2]], wanted[2][[0, 2]])


def test_no_bit_depends_on_company_or_threads(monkeypatch):
    monkeypatch.setattr(balance, "SHARE", 1)  # or such small graphs would get one thread
    scores, masses, ptr = ragged_batch([30, 5, 0, 64, 11, 23, 2, 90], 6, spread=20.0)
    upstream = torch.randn(scores.shape, generator=GENERATOR, dtype=torch.float64)
    together = solve(scores, masses, ptr)
    back = adjoint(together[0], masses, ptr, together[1], upstream)
    for threads in (2, 5):
        again = solve(scores, masses, ptr, threads)
        assert all(torch.equal(*pair) for pair in zip(together, again, strict=True))
        again = adjoint(together[0], masses, ptr, together[1], upstream, threads=threads)
        assert all(torch.equal(*pair) for pair in zip(back, again, strict=True))
    for graph in range(8):
        own = slice(int(ptr[graph]), int(ptr[graph + 1]))
        alone = torch.tensor([0, own.stop - own.start])
        portions, factor = solve(scores[own], masses[own], alone)
        assert torch.equal(portions, together[0][own]) and torch.equal(factor[0], together[1][graph])
        to_scores, to_masses, to_shares = adjoint(portions, masses[own], alone, factor, upstream[own])
        assert torch.equal(to_scores, back[0][own]) and torch.equal(to_masses, back[1][own])
        assert torch.equal(to_shares[0], back[2][graph])


def test_a_batch_without_graphs():
    portions, factors = balance.solve(np.empty((0, 3)), np.empty(0), np.full(3, 1 / 3), np.zeros(1, np.int64), 1)
    assert portions.shape == (0, 3) and factors.shape == (0, 3, 3)
