import torch

from flowpool.core.constants import MOST_LEADING
from flowpool.core.directions import leading_directions

MASSES = torch.full((2, 9), 1 / 9, dtype=torch.float64)
LEVELS = torch.full((2,), 0.3, dtype=torch.float64)


def centred_nodes(rank, dim=12, decay=1.0):
    """Two clouds of nine nodes about their mean in a hull of the given rank, and its basis."""
    generator = torch.Generator().manual_seed(rank)
    inside = torch.randn(2, 9, rank, generator=generator, dtype=torch.float64) * decay ** torch.arange(rank)
    basis = torch.linalg.qr(torch.randn(dim, rank, generator=generator, dtype=torch.float64))[0].T
    return (inside - inside.mean(1, keepdim=True)) @ basis, basis


def test_a_small_hull_is_spanned_by_orthonormal_rows():
    nodes, basis = centred_nodes(3)
    found, spanned = leading_directions(nodes, MASSES, LEVELS, num_points=MOST_LEADING // 8)
    assert spanned.all()
    inner = found @ found.transpose(-1, -2)
    assert torch.allclose(inner, torch.diag_embed(torch.tensor([1.0] * 3 + [0.0] * 5).double()).expand_as(inner))
    assert torch.allclose(found.transpose(-1, -2) @ found, (basis.T @ basis).expand(2, 12, 12))


def test_of_a_large_hull_no_more_is_taken_than_leaves_little_variance():
    nodes, _ = centred_nodes(8, decay=0.4)
    found, spanned = leading_directions(nodes, MASSES, LEVELS, num_points=MOST_LEADING // 4)
    assert found.shape == (2, 4, 12) and not spanned.any()
    for levels in (LEVELS, 10 * LEVELS):
        basis, _ = leading_directions(nodes, MASSES, levels, num_points=MOST_LEADING // 4)
        for cloud_nodes, rows, level in zip(nodes, basis, levels, strict=True):
            taken = int((rows.norm(dim=-1) > 0).sum())
            left = [(cloud_nodes - cloud_nodes @ rows[:k].T @ rows[:k]).square().sum(-1).mean() for k in range(5)]
            assert left[taken] <= 0.03 * level or taken == 4
            assert left[taken - 1] > 0.03 * level or taken == 1
    assert (basis.norm(dim=-1) == 0).any()  # not all are needed at the larger epsilon


def test_nodes_without_mass_have_no_say():
    nodes, _ = centred_nodes(2)
    padded = torch.cat([nodes, 100 * torch.ones(2, 1, 12).double()], 1)
    masses = torch.cat([MASSES, torch.zeros(2, 1).double()], 1)
    expected = leading_directions(nodes, MASSES, LEVELS, 4)
    found = leading_directions(padded, masses, LEVELS, 4)
    assert torch.allclose(found.basis[:, :9], expected.basis) and torch.equal(found.spanned, expected.spanned)
