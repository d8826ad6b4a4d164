"""What pooling kept, against closed forms and against POT called directly."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

from flowpool.core.divergence import sinkhorn_divergence
from flowpool.lab.backbones import propagate
from flowpool.lab.datasets import GraphDataset, load_dataset
from flowpool.lab.kept import cloud_pools, distances, kept_plot, kept_table, readings, write_csv
from flowpool.lab.pools import POOLS, PointPool

GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(6, 3, generator=GENERATOR, dtype=torch.float64)
RADIUS = float((NODES - NODES.mean(0)).square().sum(1).mean())  # R^2
BATCH = torch.tensor([0] * 4 + [1] * 2)
EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 4, 5], [1, 0, 2, 1, 3, 2, 5, 4]])


def equal(count: int) -> Tensor:
    return torch.full((count,), 1 / count, dtype=torch.float64)


def small_dataset(features: Tensor, sizes: list[int]) -> GraphDataset:
    """Graphs without edges, so that propagation changes nothing."""
    return GraphDataset(
        name="small",
        features=features,
        node_ptr=torch.tensor([0, *sizes]).cumsum(0),
        edge_index=torch.empty(2, 0, dtype=torch.long),
        edge_ptr=torch.zeros(len(sizes) + 1, dtype=torch.long),
        labels=torch.arange(len(sizes)) % 2,
        class_names=("one", "other"),
    )


def build(name: str) -> PointPool:
    pool = POOLS[name](3, 3, seed=1)
    assert isinstance(pool, PointPool)
    return pool.double()


def test_the_nodes_themselves_are_at_zero_and_a_moved_copy_at_its_move() -> None:
    move = torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    same, moved = distances(NODES, [(NODES[order], equal(6)), (NODES[order] + move, equal(6))])
    assert same == pytest.approx((0, 0), abs=1e-12)
    assert moved == pytest.approx((25 / RADIUS, 25 / RADIUS), rel=1e-9)


def test_the_mean_alone_is_at_one_and_points_without_mass_are_not_there() -> None:
    far = torch.stack([NODES.mean(0), 100 * torch.ones(3, dtype=torch.float64)])
    alone, accompanied = distances(NODES, [(far[:1], equal(1)), (far, torch.tensor([1.0, 0.0]).double())])
    assert alone[0] == pytest.approx(1, rel=1e-12)
    assert accompanied == pytest.approx(alone, rel=1e-12)


def test_masses_of_points_count() -> None:
    line = torch.tensor([[0.0], [0.0], [0.0], [4.0]], dtype=torch.float64)  # variance 3
    ends = torch.tensor([[0.0], [4.0]], dtype=torch.float64)
    fitting, even = distances(line, [(ends, torch.tensor([0.75, 0.25]).double()), (ends, equal(2))])
    assert fitting == pytest.approx((0, 0), abs=1e-12)
    assert even[0] == pytest.approx(0.25 * 16 / 3)


def test_divergence_is_that_of_the_library_in_absolute_units() -> None:
    points = torch.randn(3, 3, generator=GENERATOR, dtype=torch.float64)
    masses = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    expected = sinkhorn_divergence(points[None], NODES[None], 0.1 * RADIUS, masses[None]) / RADIUS
    assert distances(NODES, [(points, masses)])[0][1] == pytest.approx(float(expected), rel=1e-8)


@pytest.mark.parametrize("name", ["mincut", "struct"])
def test_cluster_means_are_the_sums_over_their_masses_and_keep_the_mean(name: str) -> None:
    plain, means = readings(name, build(name), NODES, EDGES, BATCH)
    assert (plain.label, means.label) == (name, f"{name} (means)")
    torch.testing.assert_close(plain.masses, torch.full((2, 3), 1 / 3, dtype=torch.float64))
    sizes = torch.tensor([4.0, 2.0], dtype=torch.float64)[:, None]
    torch.testing.assert_close(means.points * (means.masses * sizes)[..., None], plain.points)
    # Each node is shared out whole, so the weighted means have the mean of the nodes.
    expected = torch.stack([NODES[:4].mean(0), NODES[4:].mean(0)])
    torch.testing.assert_close((means.masses[..., None] * means.points).sum(1), expected)


@pytest.mark.parametrize("name", ["topk", "sag"])
def test_chosen_nodes_are_read_without_their_score(name: str) -> None:
    plain, nodes = readings(name, build(name), NODES, EDGES, BATCH)
    assert nodes.label == f"{name} (nodes)"
    assert nodes.masses.tolist() == [[pytest.approx(1 / 3)] * 3, [0.5, 0.5, 0.0]]
    for graph, own in enumerate((NODES[:4], NODES[4:])):
        kept = nodes.points[graph, nodes.masses[graph] > 0]
        gap, place = torch.cdist(kept, own).min(1)
        assert float(gap.max()) == 0 and len(place.unique()) == len(kept)
        cosine = torch.cosine_similarity(kept, plain.points[graph, : len(kept)])
        torch.testing.assert_close(cosine.abs(), torch.ones_like(cosine))


def test_other_pools_have_one_reading() -> None:
    assert [reading.label for reading in readings("sort", build("sort"), NODES, EDGES, BATCH)] == ["sort"]


def test_table_of_real_graphs_against_exact_transport() -> None:
    dataset = load_dataset("MUTAG")
    rows = kept_table(dataset, ["sort", "mincut", "flow"], features="propagated", count=9, seed=2)
    assert [row.pool for row in rows] == sorted((row.pool for row in rows), key=_median_of(rows))
    assert {row.pool for row in rows} == {"sort", "mincut", "mincut (means)", "flow"}
    drawn = np.sort(np.random.default_rng(2).permutation(188)[:9])
    sort = next(row for row in rows if row.pool == "sort").wasserstein
    features = propagate(dataset, "normalised").double().numpy()
    for place, number in enumerate(drawn):
        nodes = features[dataset.node_ptr[number] : dataset.node_ptr[number + 1]]
        # SortPool keeps the five nodes that are largest in the last feature; among equals its choice is not ours.
        last = np.sort(nodes[:, -1])[::-1]
        if last[4] == last[5]:
            continue
        chosen = nodes[np.argsort(-nodes[:, -1])[:5]]
        exact = ot.emd2(ot.unif(5), ot.unif(len(nodes)), ot.dist(chosen, nodes))
        assert sort[place] == pytest.approx(exact / nodes.var(0).sum(), rel=1e-5)
    least = np.min([row.wasserstein for row in rows], axis=0)
    for row in rows:
        assert row.nearest == np.mean(row.wasserstein <= least + 1e-9)


def _median_of(rows):  # type: ignore[no-untyped-def]
    return lambda pool: next(float(np.median(row.wasserstein)) for row in rows if row.pool == pool)


def test_ties_count_for_all_and_graphs_of_equal_nodes_are_left_out() -> None:
    features = torch.cat([torch.ones(3, 2), torch.tensor([[0.0, 1.0], [2.0, 0.0], [5.0, 4.0]])])
    rows = kept_table(small_dataset(features, [3, 3]), ["sort", "haar"], features="propagated", num_points=3)
    sort = next(row for row in rows if row.pool == "sort")
    assert sort.wasserstein.tolist() == [pytest.approx(0, abs=1e-12)]  # the three nodes are its points
    assert sum(row.nearest for row in rows) == 1
    with pytest.raises(ValueError, match="nothing to keep"):
        kept_table(small_dataset(features[:3], [3]), ["sort"], features="propagated")


def test_linear_layer_has_the_width_and_the_seed_that_were_asked_for() -> None:
    data = small_dataset(torch.randn(12, 4, generator=GENERATOR), [6, 6])
    first, again, other = (kept_table(data, ["flow"], channels=2, num_points=2, seed=seed)[0] for seed in (0, 0, 1))
    assert np.array_equal(first.wasserstein, again.wasserstein)
    assert not np.allclose(first.wasserstein, other.wasserstein)


def test_progress_counts_every_graph() -> None:
    seen: list[int] = []
    kept_table(small_dataset(NODES.float(), [4, 2]), ["sort"], num_points=2, on_progress=seen.append)
    assert sum(seen) == 2


def test_mistakes_are_named() -> None:
    data = small_dataset(NODES.float(), [4, 2])
    with pytest.raises(ValueError, match="sum, gmt gives a cloud of points; these do: flow, flow-attention"):
        kept_table(data, ["sort", "sum", "gmt"])
    with pytest.raises(ValueError, match="Unknown features 'raw'"):
        kept_table(data, ["sort"], features="raw")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 graphs are asked for; pass at least 1"):
        kept_table(data, ["sort"], count=0)


def test_all_pools_that_give_clouds_are_there_unless_named() -> None:
    assert set(cloud_pools()) >= {"flow", "sort", "topk", "sag", "mincut", "struct", "haar", "otke", "wegl"}
    assert not set(cloud_pools()) & {"mean", "sum", "max", "gmt"}


def test_files_and_picture_hold_the_rows(tmp_path: Path) -> None:
    data = small_dataset(torch.randn(12, 3, generator=GENERATOR), [6, 6])
    kinds = [kept_table(data, ["sort", "mincut"], features=kind, num_points=2) for kind in ("linear", "propagated")]
    rows = [row for kind in kinds for row in kind]
    with write_csv(rows, tmp_path / "kept.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["features"], line["pool"]) for line in lines] == [(row.features, row.pool) for row in rows]
    assert math.isclose(float(lines[0]["mean"]), rows[0].wasserstein.mean(), rel_tol=1e-9)
    panels = kept_plot(rows).axes
    assert [axes.get_title() for axes in panels] == ["small, linear features", "small, propagated features"]
    for axes, kind in zip(panels, kinds, strict=True):
        assert [tick.get_text() for tick in axes.get_yticklabels()] == [row.pool for row in kind]
        assert [line.get_xdata()[0] for line in axes.lines if line.get_linewidth() == 1.8] == pytest.approx(
            [float(np.median(row.wasserstein)) for row in kind]
        )
    assert len(kept_plot(rows + kinds[0]).axes) == 3
