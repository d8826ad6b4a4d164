"""A reader's own files: what is in them, and what is said of everything that can be wrong with them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from flowpool.lab.datasets import GraphDataset, load_graphs, read_molecules, read_sets
from flowpool.sklearn import FlowVectorizer, Propagate

GOOD = ["CCO,1.5,a,train", "CCN,2.5,b,test", "C#C,0.5,a,train", "c1ccccc1,3,b,train"]
NAN = float("nan")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def molecules(
    rows: Sequence[str] = GOOD,
    *,
    head: str | None = "s,y,c,p",
    targets: str = "y",
    name: str = "m.csv",
    encoding: str = "utf-8",
    **more: Any,
) -> GraphDataset:
    Path(name).write_bytes("\n".join([*([head] if head else []), *rows, ""]).encode(encoding))
    return read_molecules(Path(name), "s" if head else "1", targets.split(","), **more)


SETS = [[[1.0, 2.0], [3.0, 4.0]], [[0.0, 1.0]], [[5.0, 6.0], [7.0, 8.0], [9.0, 9.0]]]


def sets(
    x: Any = SETS, y: Any = (1.0, 2.5, 3.0), *, targets: str = "y", more: dict[str, Any] | None = None, **given: Any
) -> GraphDataset:
    parquet.write_table(pa.table({"x": x, "y": list(y), **(more or {})}), "t.parquet")
    return read_sets(Path("t.parquet"), "x", targets.split(","), **given)


def test_molecules_are_graphs_of_atoms_and_bonds() -> None:
    dataset = molecules()
    assert (dataset.name, len(dataset), dataset.notes) == ("m", 4, ())
    assert dataset.node_ptr.diff().tolist() == [3, 3, 2, 6]
    assert dataset.edge_ptr.diff().tolist() == [4, 4, 2, 12]
    assert dataset.labels.tolist() == [[1.5], [2.5], [0.5], [3.0]] and not dataset.has_classes
    graph = dataset[0]
    assert graph.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    # One-hot: ethanol and ethylamine differ in one atom, and bonds are single, triple or aromatic.
    assert torch.equal(graph.x[:1], dataset[1].x[:1]) and not torch.equal(graph.x[2], dataset[1].x[2])
    assert set(dataset.features.unique().tolist()) == {0, 1}
    assert dataset.edge_features is not None and graph.edge_features is not None
    assert len(dataset.edge_features.unique(dim=0)) == 3
    assert dataset.keys == ("CCO", "CCN", "C#C", "c1ccccc1")
    assert dataset.place(3) == "line 5 (c1ccccc1)"


def test_the_same_molecule_has_the_same_key_however_it_is_written() -> None:
    assert molecules(["OCC,1,a,train", "C(O)C,2,b,test"]).keys == ("CCO", "CCO")


def test_targets_are_classes_or_numbers_and_may_be_several() -> None:
    classes = molecules(targets="c")
    assert (classes.class_names, classes.labels.tolist()) == (("a", "b"), [0, 1, 0, 1])
    assert molecules(["C,10,,", "CC,9,,", "CCC,10,,"]).class_names == ("9", "10")  # few whole numbers, in their order
    numbers = molecules(["C,10,,", "CC,9,,", "CCC,10,,"], kind="numbers")
    assert numbers.labels.tolist() == [[10], [9], [10]]
    both = molecules(["C,1,7.5,", "CC,2,8,"], targets="y,c")
    assert (both.labels.tolist(), both.num_outputs) == ([[1, 7.5], [2, 8]], 2)


def test_columns_may_be_numbered_and_separated_by_tabs() -> None:
    assert molecules(head=None, targets="2").labels.flatten().tolist() == [1.5, 2.5, 0.5, 3.0]
    tabs = [row.replace(",", "\t") for row in GOOD]
    assert len(molecules(tabs, head="s\ty\tc\tp", name="m.tsv")) == 4
    assert len(molecules(encoding="utf-8-sig")) == 4  # as spreadsheets write it
    assert molecules(["C,1.5,a,train", "", "C(,1,b,"], targets="y").notes[0].endswith("(line 4: 'C(').")


def test_splits_are_named_by_columns() -> None:
    (fold,) = molecules(splits=["p"]).folds or ()
    assert (fold.train.tolist() + fold.validation.tolist(), fold.test.tolist()) != ([], [])
    assert sorted([*fold.train, *fold.validation]) == [0, 2, 3] and fold.test.tolist() == [1]
    rows = ["C,1,Train,val", "CC,2,VALID,test", "CCC,3,test,", "CCCC,4,,train"]
    first, second = molecules(rows, splits=["c", "p"]).folds or ()
    assert [part.tolist() for part in first] == [[0], [1], [2]]
    assert [part.tolist() for part in second] == [[3], [0], [1]]


@pytest.mark.parametrize(
    ("row", "note"),
    [
        ("c1ccc(,1,a,train", "whose molecule RDKit cannot read (line 6: 'c1ccc(')."),
        ("C" * 60 + "(,1,a,train", "whose molecule RDKit cannot read (line 6: '" + "C" * 40 + "...')."),
        (",1,a,train", "whose molecule is empty (line 6)."),
        ("C,,a,train", "without y (line 6)."),
        ("C,N/A,a,train", "without y (line 6)."),
        ("C,n.d.,a,train", "whose y is no finite number (line 6: 'n.d.')."),
        ("C,inf,a,train", "whose y is no finite number (line 6: 'inf')."),
        ("C", "with 1 entries, where the first line has 4 (line 6)."),
        ("C,1,5,a,train", "with 5 entries, where the first line has 4 (line 6)."),
        ("[Fe+9],1,a,train", "whose atoms have a property that from_smiles does not know (line 6: '[Fe+9]')."),
    ],
)
def test_a_row_that_cannot_be_used_is_counted_and_named(row: str, note: str) -> None:
    dataset = molecules([*GOOD, row])
    assert len(dataset) == 4
    assert dataset.notes == (f"m.csv: 1 row is left out, {note}",)


def test_rows_are_grouped_by_what_is_wrong_with_them() -> None:
    dataset = molecules([*GOOD, *["C(,1,a,train"] * 5, "C,,a,test"])
    shown = "; ".join(f"line {line}: 'C('" for line in (6, 7, 8))
    assert dataset.notes == (
        f"m.csv: 5 rows are left out, whose molecule RDKit cannot read ({shown}; ...).",
        "m.csv: 1 row is left out, without y (line 11).",
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rows": []}, r"m.csv has no row that can be used\."),
        ({"rows": ["C(,1,a,train"]}, r"no row that can be used\. m.csv: 1 row is left out, whose molecule RDKit"),
        ({"targets": "z"}, "m.csv has no column 'z'; its first line names s, y, c, p"),
        ({"head": "s;y"}, "m.csv has no column 's'.*; its first line names s;y. Columns are separated by commas here"),
        ({"head": "s,y,y,p"}, "m.csv has two columns 'y'; give each another name"),
        ({"head": None, "targets": "9"}, "m.csv has 4 columns, counted from 1; asked for are 1, 9"),
        (
            {"rows": [*GOOD, "C,1,é,"], "encoding": "latin-1"},
            r"m.csv is not text in UTF-8 \(byte 78\); save it as UTF-8",
        ),
        ({"rows": [*GOOD, '"CC,1,a,train']}, "m.csv, line 6: .*look for a quotation mark that is not closed"),
        ({"rows": ["C,1,a,", "CC,2,a,"], "targets": "c"}, "The target c holds only 'a'; at least 2 classes are needed"),
        ({"targets": "c,y", "kind": "classes"}, "2 targets; classes can be told from one column only"),
        (
            {"rows": [*GOOD, "C,1,a,trian"], "splits": ["p"]},
            "m.csv, line 6: 'trian' in column 'p'; a split holds train, validation or test",
        ),
        (
            {"rows": ["C,1,a,train", "CC,2,b,train"], "splits": ["p"]},
            "m.csv: column 'p' names 1 rows for training and 0 for the test",
        ),
    ],
)
def test_what_is_wrong_with_a_whole_table_is_said(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        molecules(**given)


def test_files_that_are_none_are_named() -> None:
    Path("empty.csv").touch()
    Path("folder.csv").mkdir()
    for name, message in (
        ("nowhere.csv", "nowhere.csv does not exist"),
        ("empty.csv", "empty.csv is empty; a table with one row per molecule is expected"),
        ("folder.csv", "folder.csv is a folder, not a file"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            read_molecules(Path(name), "s", ["y"])
    Path("text.parquet").write_text("no")
    Path("folder.parquet").mkdir()
    sets()
    whole = Path("t.parquet").read_bytes()
    Path("cut.parquet").write_bytes(whole[: len(whole) // 2])
    for name, message in (
        ("nowhere.parquet", "nowhere.parquet does not exist"),
        ("folder.parquet", "folder.parquet is a folder, not a file"),
        ("text.parquet", "text.parquet cannot be read as a Parquet file"),
        ("cut.parquet", "cut.parquet cannot be read as a Parquet file"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            read_sets(Path(name), "x", ["y"])


def test_sets_are_graphs_without_edges() -> None:
    dataset = sets(more={"w": [[1.0, 0.0], [2.0], [1.0, 1.0, 3.0]]}, masses="w")
    assert dataset.node_ptr.tolist() == [0, 2, 3, 6]
    assert dataset.features.tolist() == [row for members in SETS for row in members]
    assert dataset.masses is not None and dataset.masses.tolist() == [1, 0, 2, 1, 1, 3]
    assert dataset.labels.tolist() == [[1], [2.5], [3]]
    assert dataset.edge_index.shape == (2, 0)
    assert dataset.place(1) == "row 2"


def test_equal_sets_have_equal_keys_in_any_order_of_their_vectors() -> None:
    first, other, same = sets([SETS[2], SETS[0], SETS[2][::-1]]).keys or ()
    assert first == same != other
    weighed = {"w": [[1.0, 2.0, 3.0], [1.0, 1.0], [1.0, 2.0, 3.0]]}  # other masses for the same vectors
    assert len(set(sets([SETS[2], SETS[0], SETS[2][::-1]], more=weighed, masses="w").keys or ())) == 3


def test_tables_of_several_row_groups_are_read_whole() -> None:
    table = pa.table({"x": pa.chunked_array([SETS[:1], SETS[1:]]), "y": [1.5, 2.0, 3.0]})
    parquet.write_table(table, "groups.parquet", row_group_size=1)
    assert read_sets(Path("groups.parquet"), "x", ["y"]).node_ptr.tolist() == [0, 2, 3, 6]


@pytest.mark.parametrize(
    ("members", "note"),
    [
        ([], "whose set is empty (row 4)."),
        (None, "whose set or a part of it is null (row 4)."),
        ([None, [1.0, 2.0]], "whose set or a part of it is null (row 4)."),
        ([[None, 2.0]], "whose set or a part of it is null (row 4)."),
        ([[1.0, 2.0, 3.0]], "with a vector of 3 numbers, where others have 2 (row 4)."),
        ([[NAN, 2.0]], "with a number that is not finite (row 4)."),
        ([[1e300, 2.0]], "with a number beyond 3e38, the largest of single precision (row 4)."),
    ],
)
def test_a_set_that_cannot_be_used_is_counted_and_named(members: Any, note: str) -> None:
    dataset = sets([*SETS, members], [1.0, 2.5, 3.0, 4.0])
    assert dataset.node_ptr.tolist() == [0, 2, 3, 6]
    assert dataset.notes == (f"t.parquet: 1 row is left out, {note}",)


@pytest.mark.parametrize(
    ("masses", "note"),
    [
        ([1.0], "with 1 masses for 2 vectors (row 1)."),
        ([1.0, -1.0], "with masses that are negative, not finite, or zero in sum (row 1)."),
        ([0.0, 0.0], "with masses that are negative, not finite, or zero in sum (row 1)."),
        ([NAN, 1.0], "with masses that are negative, not finite, or zero in sum (row 1)."),
        (None, "whose masses or a part of them is null (row 1)."),
    ],
)
def test_masses_that_cannot_be_used_are_counted_and_named(masses: Any, note: str) -> None:
    dataset = sets(more={"w": [masses, [1.0], [1.0, 1.0, 1.0]]}, masses="w")
    assert len(dataset) == 2 and dataset.notes == (f"t.parquet: 1 row is left out, {note}",)


def test_missing_targets_of_sets_are_counted_and_named() -> None:
    for absent in (None, NAN):
        assert sets(y=[1.0, absent, 3.5]).notes == ("t.parquet: 1 row is left out, without y (row 2).",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sets([], []), "t.parquet has no rows"),
        (lambda: sets(targets="z"), "t.parquet has no column 'z'; it has x, y"),
        (lambda: sets(more={"v": [1.0, 2, 3]}, masses="v"), "Column 'v'"),
        (lambda: sets([1.0, 2.0, 3.0]), "Column 'x' is of type double; it must hold lists of lists of numbers"),
        (lambda: sets(y=[[1.0], [2.0], [3.0]]), "Column 'y' of t.parquet is of type list.*; a target is one class"),
        (lambda: sets(more={"p": ["train", "tst", "test"]}, splits=["p"]), "t.parquet, row 2: 'tst' in column 'p'"),
        (
            lambda: sets([SETS[0], []], [NAN, 1.0]),
            "t.parquet has no row that can be used. t.parquet: 1 row is left out",
        ),
    ],
)
def test_what_is_wrong_with_a_whole_file_of_sets_is_said(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_propagate_and_the_vectorizer_take_what_is_read_here() -> None:
    dataset = molecules()
    found = Propagate(1).fit_transform(list(dataset))
    assert [len(members) for members in found] == [3, 3, 2, 6]
    vectors = FlowVectorizer(2, random_state=0).fit_transform(found)
    assert vectors.shape[0] == 4 and np.isfinite(vectors).all()
    assert load_graphs("MUTAG").places is None
