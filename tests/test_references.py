import pytest
import torch

from flowpool import references


def test_normal_is_seeded_and_has_unit_variance():
    assert torch.equal(references.normal(5, 3, seed=1), references.normal(5, 3, seed=1))
    assert not torch.equal(references.normal(5, 3, seed=1), references.normal(5, 3, seed=2))
    many = references.normal(8, 20_000)
    assert many.shape == (20_000, 8)
    assert float(many.square().sum(-1).mean()) == pytest.approx(1, abs=0.02)


def test_a_draw_leaves_the_random_state_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    references.normal(5, 3, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_kmeans_finds_the_centres_in_standard_units():
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 20.0]], dtype=torch.float64)
    noise = 1e-3 * torch.randn(300, 2, generator=generator, dtype=torch.float64)
    features = centres.repeat(100, 1) + noise
    found = references.kmeans(features, 3)
    scale = (features - features.mean(0)).square().sum(-1).mean().sqrt()
    expected = (centres - centres.mean(0)) / scale
    distance = torch.cdist(expected, found)
    assert distance.amin(1).max() < 1e-3 and distance.amin(0).max() < 1e-3
    # Moving and scaling the features changes nothing in standard units.
    assert torch.allclose(references.kmeans(7 * features + 3, 3), found, atol=1e-9)
    # In their own coordinates the centres are those of the clusters.
    own = references.kmeans(features, 3, relative=False)
    assert torch.cdist(centres, own).amin(1).max() < 1e-3
    assert torch.allclose(references.kmeans(7 * features + 3, 3, relative=False), 7 * own + 3, atol=1e-9)
    one = torch.full((4, 2), 3.0)
    assert torch.equal(references.kmeans(one, 1), torch.zeros(1, 2))
    assert torch.equal(references.kmeans(one, 1, relative=False), one[:1])


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="only 2 distinct rows"):
        references.kmeans(torch.tensor([[0.0], [1.0], [1.0]]), 3)
    with pytest.raises(ValueError, match="NaN"):
        references.kmeans(torch.tensor([[0.0], [torch.nan]]), 1)
    with pytest.raises(ValueError, match="Rows 0 and 2 of the reference are equal"):
        references.check(torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 1.0]]), 2)
    with pytest.raises(ValueError, match=r"shape \(3, 4\); expected \(num_points, 2\)"):
        references.check(torch.zeros(3, 4), 2)
    with pytest.raises(TypeError, match="reference is torch.int64"):
        references.check(torch.zeros(3, 2, dtype=torch.long), 2)
    with pytest.raises(ValueError, match="Rows 1 and 2 of the reference are equal"):
        references.check(torch.tensor([[1.0, 1.0], [0.0, 1.0], [-0.0, 1.0]]), 2)
    with pytest.raises(ValueError, match="reference holds NaN"):
        references.check(torch.tensor([[torch.nan, 1.0]]), 2)
    with pytest.raises(ValueError, match="in_channels is 0; pass a whole number that is at least 1"):
        references.normal(0, 3)
    with pytest.raises(TypeError, match="x is a ndarray; pass a tensor"):
        references.kmeans(torch.rand(4, 2).numpy(), 2)
    with pytest.raises(TypeError, match="num_points is 2.5; pass a whole number"):
        references.kmeans(torch.rand(4, 2), 2.5)
