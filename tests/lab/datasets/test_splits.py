"""Splits: partitions, strata, seeds, files, and what is said of bad ones."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowpool.lab.datasets import splits
from flowpool.lab.datasets.catalog import load_dataset
from flowpool.lab.datasets.drawn import draw_folds
from flowpool.lab.datasets.record import Fold, GraphDataset, cloud_dataset
from flowpool.lab.datasets.splits import (
    check_splits,
    load_splits,
    origin_of_splits,
    read_splits,
    write_splits,
)

DATA = Path(os.environ.get("FLOWPOOL_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data")
GRAKEL = importlib.util.find_spec("grakel")
MUTAG = Path(GRAKEL.submodule_search_locations[0]) / "tests" / "data" / "MUTAG"  # type: ignore
PACKAGED = Path(splits.__file__).parent / "splits"
SIZES = {"MUTAG": 188, "PTC_MR": 344}
# The labels of PTC_MR are needed to draw its splits; MUTAG's are on every machine.
WITH_LABELS = {"MUTAG": MUTAG} | {name: path for name in ("PTC_MR",) if (path := DATA / "tu" / f"{name}.zip").is_file()}
PUBLISHED = {
    name: size
    for name, size in {
        "ENZYMES": 600,
        "NCI1": 4110,
        "DD": 1178,
        "PROTEINS": 1113,
        "IMDB-BINARY": 1000,
    }.items()
    if (DATA / "splits" / f"{name}_splits.json").is_file()
}


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWPOOL_DATA", raising=False)


def equal(first: tuple[Fold, ...], second: tuple[Fold, ...]) -> bool:
    return len(first) == len(second) and all(
        np.array_equal(one, two) for pair in zip(first, second, strict=True) for one, two in zip(*pair, strict=True)
    )


def labelled(labels: Any, name: str = "MINE") -> GraphDataset:
    """Sets of one point with these classes."""
    given = torch.as_tensor(labels)
    names = tuple(str(value) for value in given.unique().tolist())
    return cloud_dataset(name, np.zeros((len(given), 1)), np.ones(len(given), int), given, names)


def drawn(labels: Any, repeat: int) -> tuple[Fold, ...]:
    return draw_folds(labelled(labels), "folds", repeat)


def is_partition(parts: list[np.ndarray], size: int) -> bool:
    return sorted(number for part in parts for number in part.tolist()) == list(range(size))


@pytest.mark.parametrize("name", SIZES)
def test_the_splits_of_the_package_are_partitions(name: str) -> None:
    folds = load_splits(name)
    assert len(folds) == 10
    assert is_partition([fold.test for fold in folds], SIZES[name])
    assert all(is_partition(list(fold), SIZES[name]) for fold in folds)


@pytest.mark.parametrize("name", WITH_LABELS)
def test_the_files_of_the_package_are_what_the_function_gives(name: str) -> None:
    graphs = load_dataset(name, WITH_LABELS[name])
    folds = draw_folds(graphs, "folds", 0)
    assert write_splits(folds) == (PACKAGED / f"{name}_splits.json").read_text()
    assert equal(load_splits(name, graphs), folds)


@pytest.mark.parametrize("counts", [[63, 125], [10, 10, 11], [100] * 6])
def test_repeats_are_stratified_seeded_partitions(counts: list[int]) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    size = len(labels)
    folds = drawn(labels, 3)
    assert len(folds) == 10
    assert is_partition([fold.test for fold in folds], size)
    for fold in folds:
        assert is_partition(list(fold), size)
        rest = size - len(fold.test)
        assert len(fold.validation) == -(-rest // 10)  # a tenth, rounded up
        # Any class is within one graph of its share, in the test part and in the validation part.
        for number, count in enumerate(counts):
            in_test = int((labels[fold.test] == number).sum())
            in_validation = int((labels[fold.validation] == number).sum())
            assert abs(in_test - count / 10) < 1
            assert abs(in_validation - (count - in_test) * len(fold.validation) / rest) < 1
    assert equal(folds, drawn(torch.from_numpy(labels), 3))
    assert equal(folds, drawn(list(labels), 3))
    other = drawn(labels, 4)
    assert not any(np.array_equal(one.test, two.test) for one, two in zip(folds, other, strict=True))
    assert not any(np.array_equal(one.validation, two.validation) for one, two in zip(folds, other, strict=True))


@pytest.mark.parametrize("labels", [[], [0] * 20 + [1] * 9])
def test_too_few_graphs_of_a_class_are_named(labels: list[int]) -> None:
    with pytest.raises(ValueError, match="10 folds need 10 graphs of each class; found .*class 1: 9|MINE has 0 graphs"):
        drawn(labels, 0)


def test_a_dataset_without_any_file_gets_repeat_zero(tmp_path: Path) -> None:
    labels = torch.arange(60) % 3
    assert equal(load_splits("MINE", labelled(labels), data=tmp_path), drawn(labels, 0))
    for file in MUTAG.glob("MUTAG_*.txt"):
        (tmp_path / file.name.replace("MUTAG", "MINE")).write_bytes(file.read_bytes())
    # Without labels they are read from the dataset: MUTAG under another name.
    assert equal(load_splits("MINE", data=tmp_path), load_splits("MUTAG"))


def test_files_of_the_data_folder_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.arange(188) % 2
    other, degree = drawn(labels, 5), drawn(labels, 6)
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "MUTAG_splits.json").write_text(write_splits(other))
    assert equal(load_splits("MUTAG", data=tmp_path), other)
    (tmp_path / "splits" / "MUTAG_degree_splits.json").write_text(write_splits(degree))
    monkeypatch.setenv("FLOWPOOL_DATA", str(tmp_path))
    assert equal(load_splits("MUTAG"), degree)
    assert equal(load_splits("MUTAG", node_features="constant"), other)
    assert not equal(other, degree)


def test_files_beside_the_data_folder_are_found_and_named(tmp_path: Path) -> None:
    labels = torch.arange(60) % 3
    (tmp_path / "tu").mkdir()
    archive = tmp_path / "tu" / "MINE.zip"
    archive.touch()
    for data in (tmp_path / "tu", archive):
        assert origin_of_splits("MINE", data=data).startswith("drawn with seed 0, for want of splits/MINE_splits.json")
        assert origin_of_splits("MUTAG", data=data) == "packaged, drawn with seed 0"
    (tmp_path / "splits").mkdir()
    beside = drawn(labels, 5)
    (tmp_path / "splits" / "MINE_splits.json").write_text(write_splits(beside))
    for data in (tmp_path / "tu", archive, tmp_path):
        assert equal(load_splits("MINE", labelled(labels), data=data), beside)
        assert origin_of_splits("MINE", data=data) == "read from MINE_splits.json, not a published file"
    (tmp_path / "tu" / "splits").mkdir()
    inside = drawn(labels, 6)
    (tmp_path / "tu" / "splits" / "MINE_splits.json").write_text(write_splits(inside))
    assert equal(load_splits("MINE", labelled(labels), data=archive), inside)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_known_by_their_content(name: str, tmp_path: Path) -> None:
    for data in (DATA, DATA / "tu"):
        for features in ("degree", "constant"):
            origin = origin_of_splits(name, data=data, node_features=features)  # type: ignore[arg-type]
            assert origin == "published by Errica et al. (2020)"
    (tmp_path / "splits").mkdir()
    text = (DATA / "splits" / f"{name}_splits.json").read_text()
    (tmp_path / "splits" / f"{name}_splits.json").write_text(text + " ")
    assert origin_of_splits(name, data=tmp_path).endswith("not a published file")


def test_the_published_files_beside_the_project_are_read() -> None:
    for name, size in PUBLISHED.items():
        folds = load_splits(name, data=DATA)
        suffix = "_degree_splits" if name == "IMDB-BINARY" else "_splits"
        layout = json.loads((DATA / "splits" / f"{name}{suffix}.json").read_text())
        assert is_partition([fold.test for fold in folds], size)
        for fold, entry in zip(folds, layout, strict=True):
            assert is_partition(list(fold), size)
            assert fold.test.tolist() == sorted(entry["test"])
            assert fold.validation.tolist() == sorted(entry["model_selection"][0]["validation"])


def test_writing_and_reading_gives_the_same_folds(tmp_path: Path) -> None:
    folds = drawn([0, 1] * 30, 1)
    (tmp_path / "s.json").write_text(write_splits(folds))
    assert equal(read_splits(tmp_path / "s.json", 60), folds)


def drop_a_test_graph(layout: Any) -> None:
    layout[2]["test"].pop()


def put_a_test_graph_into_train(layout: Any) -> None:
    layout[3]["model_selection"][0]["train"].append(layout[3]["test"][0])


def lose_a_validation_graph(layout: Any) -> None:
    layout[4]["model_selection"][0]["validation"].pop()


def name_a_graph_that_is_not_there(layout: Any) -> None:
    layout[0]["test"][0] = 60


def use_a_truth_value(layout: Any) -> None:
    layout[0]["test"][0] = True


def use_a_huge_number(layout: Any) -> None:
    layout[0]["test"][0] = 10**30


def forget_the_selection(layout: Any) -> None:
    del layout[5]["model_selection"]


def select_twice(layout: Any) -> None:
    layout[5]["model_selection"] *= 2


def empty_a_part(layout: Any) -> None:
    selection = layout[6]["model_selection"][0]
    selection["train"] += selection["validation"]
    selection["validation"] = []


def keep_one_fold(layout: Any) -> None:
    del layout[1:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_a_test_graph, "1 graphs stand never in the test parts"),
        (
            put_a_test_graph_into_train,
            "1 graphs stand more than once in train, validation and test of fold 4",
        ),
        (lose_a_validation_graph, "1 graphs stand never in train, validation and test of fold 5"),
        (
            name_a_graph_that_is_not_there,
            r"graph 60 in the test parts of all folds, but the graphs are 0\.\.59",
        ),
        (use_a_truth_value, "fold 1 holds something else"),
        (use_a_huge_number, "fold 1 holds something else"),
        (forget_the_selection, "fold 6 is not of the form"),
        (select_twice, "fold 6 is not of the form"),
        (empty_a_part, "the validation part of fold 7 is empty"),
        (keep_one_fold, "1 folds; at least 2"),
    ],
)
def test_bad_files_are_named_and_explained(damage: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    layout = json.loads(write_splits(drawn([0, 1] * 30, 1)))
    damage(layout)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(layout))
    with pytest.raises(ValueError, match=f"bad.json: .*{message}"):
        read_splits(file, 60)


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", "[[]]", "\ufeff[]", "[" * 100_000, "[]"])
def test_files_that_hold_no_splits_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="bad.json: "):
        read_splits(file)


def test_splits_of_another_dataset_are_noticed() -> None:
    with pytest.raises(ValueError, match="never in the test parts"):
        load_splits("MUTAG", labelled([0, 1] * 100))
    with pytest.raises(ValueError, match=r"graph 1\d\d in the test parts of all folds, but the graphs are 0\.\.99"):
        check_splits(load_splits("MUTAG"), 100)
