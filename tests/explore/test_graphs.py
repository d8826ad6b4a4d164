"""Graphs: shares, names and the plane of the features."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowpool.explore import graphs
from flowpool.lab.datasets.source import Source
from flowpool.lab.options import Columns

DATASET = {"A": "1, 2\n2, 1\n3, 4\n4, 3\n4, 5\n5, 4\n", "graph_indicator": "1\n1\n2\n2\n2\n", "graph_labels": "1\n-1\n"}


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWPOOL_DATA", raising=False)


def ask(data: str | None = None, own: Source | None = None, **changes: Any) -> dict[str, Any]:
    body = {"dataset": "MUTAG", "table": "", "graph": 53, "points": 5, "epsilon": 0.1, "seed": 0, "hops": 2}
    return graphs.answer(data, own, body | changes)


def test_every_node_is_divided_and_every_point_gets_its_part() -> None:
    given = ask()
    shares = np.array(given["shares"])  # (N, M)
    np.testing.assert_allclose(shares.sum(1), 1.0)
    np.testing.assert_allclose(shares.sum(0), len(shares) / 5, rtol=1e-6)
    assert given["status"] == "OK" and given["graphs"] == 188


def test_the_molecule_is_the_one_of_the_dataset() -> None:
    given = ask()
    assert sorted(given["names"]).count("Cl") == 2 and given["names"].count("N") == 1 and given["names"].count("O") == 4
    assert len(given["edges"]) == 21 and all(first < second for first, second in given["edges"])
    assert len(given["places"]) == len(given["names"]) == 19


def test_one_hot_atoms_without_hops_are_pooled_by_kind() -> None:
    """Without averaging, equal atoms have equal features, and so equal shares."""
    given = ask(hops=0)
    carbon = [row for row, name in zip(given["shares"], given["names"], strict=True) if name == "C"]
    np.testing.assert_allclose(carbon, [carbon[0]] * len(carbon), atol=1e-9)


def test_the_plane_keeps_distances_in_two_dimensions() -> None:
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randn(7, 2, generator=generator, dtype=torch.float64)
    points = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    flat, share = graphs.plane(nodes, points)
    assert share == pytest.approx(1.0)
    together = torch.cat([nodes, points])
    np.testing.assert_allclose(
        torch.cdist(torch.from_numpy(flat), torch.from_numpy(flat)), torch.cdist(together, together)
    )


def test_the_plane_of_one_feature_is_a_line() -> None:
    flat, share = graphs.plane(torch.tensor([[0.0], [2.0]]).double(), torch.tensor([[1.0]]).double())
    assert share == 1.0
    np.testing.assert_allclose(np.abs(flat), [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])


def test_datasets_are_those_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowpool.lab.datasets.catalog.cache_folder", lambda: tmp_path / "no cache")
    assert graphs.list_all(None, None, {}) == {"datasets": ["MUTAG", "SHAPES", graphs.PASTED], "own": None}
    folder = tmp_path / "TINY"
    folder.mkdir()
    for name, text in DATASET.items():
        (folder / f"TINY_{name}.txt").write_text(text)
    (tmp_path / "not a dataset").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert graphs.at_hand(str(tmp_path)) == ["MUTAG", "TINY", "SHAPES"]
    given = ask(str(tmp_path), dataset="TINY", graph=1, points=2)
    assert given["label"] == ", class -1"
    assert given["graphs"] == 2 and given["edges"] == [[0, 1], [1, 2]]


def test_coordinates_are_no_labels() -> None:
    assert set(ask(dataset="SHAPES", graph=2)["names"]) == {""}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dataset": "NOPE"}, "'NOPE' is not on this machine; .*MUTAG"),
        ({"dataset": "../../etc"}, "is not on this machine"),
        ({"graph": 188}, "graph is 188; expected a whole number from 0 to 187"),
        ({"points": 9}, "points is 9; expected a whole number from 1 to 8"),
        ({"hops": -1}, "hops is -1"),
    ],
)
def test_bad_questions_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ask(**changes)


def test_a_graph_too_large_to_draw_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_NODES", 18)
    with pytest.raises(ValueError, match="Graph 53 has 19 nodes; the page draws graphs of up to 18 nodes"):
        ask()


def test_a_reader_s_own_sets_stand_first_and_keep_their_masses(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = {"x": [[[0.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 1.0], [3.0, 1.0]]], "w": [[1.0, 1.0], [2.0, 1.0, 0.0]]}
    parquet.write_table(pa.table(rows), tmp_path / "mine.parquet")
    own = Source(str(tmp_path / "mine.parquet"), None, Columns(nodes="x", masses="w")).checked(targets=False)
    assert graphs.list_all(None, own, {})["datasets"][0] == graphs.list_all(None, own, {})["own"] == "mine"
    given = ask(None, own, dataset="mine", graph=1, points=1)
    assert given["graphs"] == 2 and given["label"] == "" and given["edges"] == []
    # The one point is the mean; its distance to the nodes is R, which the node without mass does not change.
    assert given["lost"] == pytest.approx(1.0)


def test_a_pasted_table_is_shown_as_it_was_written() -> None:
    text = "name\tu\tv\nC\t1\t2\nO 2, 3\n\n1;4\n"
    given = ask(dataset=graphs.PASTED, table=text, graph=0, points=2)
    assert given["graphs"] == 2 and given["names"] == ["C", "O"]
    assert given["lost"] == pytest.approx(0.0, abs=1e-6) and np.allclose(
        np.sort(np.array(given["points"])[:, 0]), [-(0.5**0.5), 0.5**0.5]
    )
    assert ask(dataset=graphs.PASTED, table=text, graph=1, points=1)["names"] == [""]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (" \n", "The table is empty: write one node per line"),
        ("a b\n", "The table is empty"),
        ("1 2\n1 2 3\n", "Line 2 has 3 numbers, where the lines before have 2"),
        ("1 2\nC 1 x\n", "Line 2: 'x' is not a finite number"),
        ("1 nan\n", "Line 1: 'nan' is not a finite number"),
        ("1 2\nC\n", "Line 2: 'C' is not a finite number"),
        ("1 " * 101, "Line 1 has 101 numbers; the page takes up to 100"),
    ],
)
def test_what_is_wrong_in_a_pasted_table_is_said_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ask(dataset=graphs.PASTED, table=text, graph=0)
