"""Who trains, who validates, who tests: ten stratified folds with one validation part each.

This is the protocol of Errica et al., "A Fair Comparison of Graph Neural Networks for Graph Classification"
(ICLR 2020), which the paper follows. Their published files are used where the data folder has them. For MUTAG
and PTC_MR, which they lack, files of the same layout come with the package; they equal
``repeat_splits(labels, repeat=0)``, and keep it from changing with the version of scikit-learn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from flowpool.lab.datasets.catalog import data_folder, load_dataset
from flowpool.lab.datasets.tu import NodeFeatures

NUM_FOLDS = 10
VALIDATION_SHARE = 0.1  # of the graphs outside of the test part

Labels = Sequence[int] | np.ndarray | Tensor


class Fold(NamedTuple):
    """One fold: graph numbers of its three parts, each sorted int64."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def load_splits(
    name: str,
    labels: Labels | None = None,
    *,
    data: str | Path | None = None,
    node_features: NodeFeatures = "degree",
) -> tuple[Fold, ...]:
    """The folds on which results for dataset ``name`` are compared.

    From ``splits/`` of the data folder, else from the package, else seeded stratified ones.

    Args:
        name: the dataset.
        labels: its class numbers, ``(B,)``; with them the number of graphs is checked too. They are read from
            the dataset if they are needed and not given.
        data: the data folder; default: ``FLOWPOOL_DATA``.
        node_features: as in :func:`load_dataset`. IMDB-BINARY has published splits for each choice.
    """
    file = _find_file(name, data, node_features)
    if file is None:
        return repeat_splits(load_dataset(name, data).labels if labels is None else labels, repeat=0)
    return read_splits(file, None if labels is None else len(labels))


def repeat_splits(labels: Labels, repeat: int) -> tuple[Fold, ...]:
    """Ten stratified folds, drawn with the seed ``repeat``; 10 % of each fold's rest validate.

    Args:
        labels: class numbers, ``(B,)``; every class needs at least ten graphs.
        repeat: number of the repetition, 0, 1, 2, ...
    """
    # scikit-learn takes a second to import, which callers that read files need not spend.
    from sklearn.model_selection import StratifiedKFold, StratifiedShuffleSplit

    classes = np.asarray(labels)
    values, counts = np.unique(classes, return_counts=True)
    if len(classes) == 0 or counts.min() < NUM_FOLDS:
        found = ", ".join(f"class {value}: {count}" for value, count in zip(values, counts, strict=True))
        raise ValueError(f"{NUM_FOLDS} folds need {NUM_FOLDS} graphs of each class; found {found or 'none'}.")
    outer = StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=repeat)
    inner = StratifiedShuffleSplit(1, test_size=VALIDATION_SHARE, random_state=repeat)
    folds = []
    for rest, test in outer.split(classes, classes):
        train, validation = next(inner.split(rest, classes[rest]))
        folds.append(Fold(np.sort(rest[train]), np.sort(rest[validation]), np.sort(test)))
    return tuple(folds)


def read_splits(file: Path | Traversable, num_graphs: int | None = None) -> tuple[Fold, ...]:
    """The folds in a JSON file of the published layout, checked.

    Args:
        file: ``[{"test": [...], "model_selection": [{"train": [...], "validation": [...]}]}, ...]``.
        num_graphs: B; default: as many as the test parts hold.
    """
    try:
        folds = _from_layout(json.loads(file.read_text(encoding="utf-8")))
        check_splits(folds, num_graphs)
    except RecursionError:
        raise ValueError(f"{file}: nested too deeply for a file of splits.") from None
    except ValueError as error:  # of JSON, of UTF-8, or our own
        raise ValueError(f"{file}: {error}") from error
    return folds


def write_splits(folds: Sequence[Fold]) -> str:
    """The folds as JSON text of the published layout, one fold per line."""
    lines = [
        json.dumps(
            {
                "test": fold.test.tolist(),
                "model_selection": [{"train": fold.train.tolist(), "validation": fold.validation.tolist()}],
            }
        )
        for fold in folds
    ]
    return "[" + ",\n".join(lines) + "]\n"


def check_splits(folds: Sequence[Fold], num_graphs: int | None = None) -> None:
    """Raises ValueError unless the tests partition the graphs, and the three parts of each fold do."""
    if len(folds) < 2:
        raise ValueError(f"{len(folds)} folds; at least 2 are needed.")
    tests = np.concatenate([fold.test for fold in folds])
    expected = len(tests) if num_graphs is None else num_graphs
    _check_partition(tests, expected, "the test parts of all folds")
    for number, fold in enumerate(folds, start=1):
        for part, members in fold._asdict().items():
            if len(members) == 0:
                raise ValueError(f"the {part} part of fold {number} is empty.")
        _check_partition(np.concatenate(fold), expected, f"train, validation and test of fold {number}")


def _check_partition(members: np.ndarray, num_graphs: int, what: str) -> None:
    outside = members[(members < 0) | (members >= num_graphs)]
    if outside.size:
        raise ValueError(f"graph {outside[0]} in {what}, but the graphs are 0..{num_graphs - 1}.")
    counts = np.bincount(members, minlength=num_graphs)
    for bad, problem in ((counts > 1, "more than once"), (counts == 0, "never")):
        if bad.any():
            first = int(np.argmax(bad))
            raise ValueError(f"{int(bad.sum())} graphs stand {problem} in {what} (first: graph {first}).")


def _from_layout(layout: Any) -> tuple[Fold, ...]:
    if not isinstance(layout, list):
        raise ValueError(f"a list of folds is expected, found {type(layout).__name__}.")
    folds = []
    for number, entry in enumerate(layout, start=1):
        try:
            (selection,) = entry["model_selection"]
            parts = selection["train"], selection["validation"], entry["test"]
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f'fold {number} is not of the form {{"test": [...], "model_selection": '
                f'[{{"train": [...], "validation": [...]}}]}}.'
            ) from None
        for part in parts:
            # bool is an int to Python; 2**63 and above are none to NumPy.
            if not isinstance(part, list) or not all(type(i) is int and abs(i) < 2**63 for i in part):
                raise ValueError(f"fold {number} holds something else than lists of graph numbers.")
        folds.append(Fold(*(np.sort(np.array(part, dtype=np.int64)) for part in parts)))
    return tuple(folds)


def _find_file(name: str, data: str | Path | None, node_features: NodeFeatures) -> Path | Traversable | None:
    plain = f"{name}_splits.json"
    names = [f"{name}_degree_splits.json", plain] if node_features == "degree" else [plain]
    folder = data_folder(data)
    if folder is not None:
        for file in (folder / "splits" / candidate for candidate in names):
            if file.is_file():
                return file
    packaged = resources.files("flowpool.lab.datasets") / "splits" / plain
    return packaged if packaged.is_file() else None
