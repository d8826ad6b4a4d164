"""Pooled tables: what flow_pool says, in files that other tools read."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet

from flowpool import flow_pool, references
from flowpool.lab import tables
from flowpool.lab.datasets import GraphDataset
from flowpool.lab.tables import pool_dataset, write_table


@pytest.fixture(scope="module")
def dataset() -> GraphDataset:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(11, 2, generator=generator)
    features[6:] = features[6]  # the last two graphs have one distinct node each
    return GraphDataset(
        "TINY",
        features,
        torch.tensor([0, 3, 6, 10, 11]),
        torch.empty(2, 0, dtype=torch.long),
        torch.zeros(5, dtype=torch.long),
        torch.tensor([1, 0, 1, 0]),
        ("a", "b"),
    )


def test_rows_are_the_pooled_points_of_each_graph(dataset: GraphDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_GRAPHS_AT_ONCE", 3)  # graphs 0..2, then graph 3
    done: list[int] = []
    table = pool_dataset(dataset, 2, epsilon=0.2, seed=5, on_progress=done.append)
    assert done == [3, 1]
    reference = references.normal(2, 2, 5)
    assert np.array_equal(table.reference, reference.numpy())
    for graph in range(4):
        alone = flow_pool(dataset[graph].x, reference=reference, epsilon=0.2)
        np.testing.assert_allclose(table.points[graph], alone.points[0].numpy(), atol=1e-5)
    np.testing.assert_allclose(table.points[3], dataset.features[[6, 6]].numpy(), atol=1e-6)
    assert table.sizes.tolist() == [3, 3, 4, 1]
    assert table.status[2:].tolist() == ["OK", "OK"]
    assert table.num_unconverged == 0


def test_parquet_and_npz_hold_the_same_numbers(dataset: GraphDataset, tmp_path: Path) -> None:
    table = pool_dataset(dataset, 2, epsilon=0.1, seed=0)
    write_table(table, tmp_path / "t.parquet")
    write_table(table, tmp_path / "t.npz")
    arrow = parquet.read_table(tmp_path / "t.parquet")
    with np.load(tmp_path / "t.npz") as archive:  # refuses pickles by default
        arrays = dict(archive)
    points = np.stack([[arrow[f"point_{m}_feature_{d}"].to_numpy() for d in range(2)] for m in range(2)])  # (M, D, B)
    assert np.array_equal(points.transpose(2, 0, 1), table.points)
    assert np.array_equal(arrays["points"], table.points)
    for name, expected in {
        "graph": [0, 1, 2, 3],
        "label": [1, 0, 1, 0],
        "num_nodes": [3, 3, 4, 1],
        "status": table.status.tolist(),
        "residual": table.residual.tolist(),
        "steps": table.steps.tolist(),
    }.items():
        assert arrow[name].to_pylist() == expected
        assert arrays[name].tolist() == expected
    about = json.loads(arrow.schema.metadata[b"flowpool"])
    assert about.pop("reference") == table.reference.tolist() == arrays["reference"].tolist()
    assert about == json.loads(str(arrays["about"])) == {"dataset": "TINY", "num_points": 2, "epsilon": 0.1, "seed": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.npz", "t.parquet"]


def test_other_formats_are_refused(dataset: GraphDataset, tmp_path: Path) -> None:
    table = pool_dataset(dataset, 1, epsilon=0.1, seed=0)
    with pytest.raises(ValueError, match=r"must end with \.parquet or \.npz"):
        write_table(table, tmp_path / "t.csv")
    assert list(tmp_path.iterdir()) == []
