"""Who trains, who validates, who tests: ten stratified folds with one validation part each.

This is the protocol of Errica et al., "A Fair Comparison of Graph Neural Networks for Graph Classification"
(ICLR 2020), which the paper follows. Their published files are used where ``splits/`` in the data folder or beside it
has them. For MUTAG and PTC_MR, which they lack, files of the same layout come with the package; they equal
``draw_folds(dataset, "folds", 0)``, and keep it from changing with the version of scikit-learn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from flowpool.lab.datasets.catalog import data_folder, load_dataset
from flowpool.lab.datasets.drawn import draw_folds
from flowpool.lab.datasets.record import Fold, GraphDataset
from flowpool.lab.datasets.tu import NodeFeatures

# SHA-256 of the files of Errica et al.
PUBLISHED = {
    "3acb1dbb1c7d52d019be2996ba52b9e1e7e9410eb5a84aad2eff766392aba8a8",  # DD
    "105daf1c521fbbb05c1500fba13446d74d7d2a85d385b8e4b1f08b4b4e00541a",  # ENZYMES
    "da73a722e88ee867b67e10efc2791c15fed0eab280c95269b9d814d145398d9a",  # IMDB-BINARY, degrees as features
    "9a5d452b422121d071fd5f84ecceabbe49e61dfcc0a0585698270627bf741d76",  # IMDB-BINARY, constant features
    "1c961b85422fb557edade036f614869bb996323efd21dbfa4b40ff1b80304924",  # NCI1
    "785c4225474a5467427b704e424602e6a4b88ebd3463cf152d3ec82d2422cd6a",  # PROTEINS
}


def load_splits(
    name: str,
    graphs: GraphDataset | None = None,
    *,
    data: str | Path | None = None,
    node_features: NodeFeatures = "degree",
) -> tuple[Fold, ...]:
    """The folds on which results for dataset ``name`` are compared.

    From ``splits/`` in the data folder or beside it, else from the package, else seeded stratified ones; which of these
    it was, `origin_of_splits` tells.

    Args:
        name: the dataset.
        graphs: the dataset itself; with it the number of graphs is checked too. It is loaded if it is needed and not
            given.
        data: the data folder, or the archive in it; default: ``FLOWPOOL_DATA``.
        node_features: as in :func:`load_dataset`. IMDB-BINARY has published splits for each choice.
    """
    file = _given_file(name, data, node_features) or _packaged_file(name)
    if file is None:
        return draw_folds(load_dataset(name, data) if graphs is None else graphs, "folds", 0)
    return read_splits(file, None if graphs is None else len(graphs))


def origin_of_splits(name: str, *, data: str | Path | None = None, node_features: NodeFeatures = "degree") -> str:
    """Where the folds of `load_splits` come from, for the reader of a result; arguments as there."""
    given = _given_file(name, data, node_features)
    if given is not None:
        published = hashlib.sha256(given.read_bytes()).hexdigest() in PUBLISHED
        return "published by Errica et al. (2020)" if published else f"read from {given.name}, not a published file"
    if _packaged_file(name) is not None:
        return "packaged, drawn with seed 0"
    return f"drawn with seed 0, for want of splits/{name}_splits.json in the data folder or beside it"


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


def _given_file(name: str, data: str | Path | None, node_features: NodeFeatures) -> Path | None:
    """The file in ``splits/`` of the data folder or beside it, or None."""
    folder = data_folder(data)
    if folder is None:
        return None
    if folder.is_file():  # an archive
        folder = folder.parent
    names = [f"{name}_degree_splits.json"] if node_features == "degree" else []
    candidates = [
        place / "splits" / file
        for place in (folder, folder.resolve().parent)
        for file in (*names, f"{name}_splits.json")
    ]
    return next((file for file in candidates if file.is_file()), None)


def _packaged_file(name: str) -> Traversable | None:
    file = resources.files("flowpool.lab.datasets") / "splits" / f"{name}_splits.json"
    return file if file.is_file() else None
