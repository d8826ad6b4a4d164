"""Folds that are drawn with a seed, folds that a table names, and what keeps their parts apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from flowpool.lab.datasets.record import Fold, GraphDataset

Drawing = Literal["folds", "random", "scaffold", "stratified"]

NUM_FOLDS = 10
VALIDATION_SHARE = 0.1  # of the graphs outside of the test part
NUM_DRAWS = 5  # of a split that is no cross-validation
SHARES = (0.8, 0.1, 0.1)  # of these, for training, validation and test
_NAMED = 2  # graphs of a fold that a note names
_BINS = 10  # of numbers that are to be spread evenly
_PARTS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}


def draw_folds(dataset: GraphDataset, how: Drawing, repeat: int) -> tuple[Fold, ...]:
    """The folds of one repeat; other repeats have others.

    Args:
        dataset: whose graphs are divided.
        how: ``"folds"``: ten parts, each of which is the test once, stratified where there are classes. The others are
            drawn 80/10/10, five times: ``"random"``; ``"stratified"`` by class, or by tenths of the first target;
            ``"scaffold"``: no molecule of the training part shares its scaffold (Bemis and Murcko) with the others.
        repeat: number of the repetition, 0, 1, 2, ...
    """
    if how not in get_args(Drawing):
        raise ValueError(
            f"--split {how}: pass {', '.join(get_args(Drawing))}, or columns that hold train, validation and test."
        )
    if len(dataset) < NUM_FOLDS:
        raise ValueError(f"{dataset.name} has {len(dataset)} graphs; {NUM_FOLDS} are needed to draw folds.")
    if how == "folds":
        return _cross_validation(dataset, repeat)
    groups = _scaffolds(dataset) if how == "scaffold" else None
    return tuple(_draw(dataset, how, groups, [repeat, number]) for number in range(NUM_DRAWS))


def _cross_validation(dataset: GraphDataset, repeat: int) -> tuple[Fold, ...]:
    from sklearn.model_selection import KFold, ShuffleSplit, StratifiedKFold, StratifiedShuffleSplit

    labels = dataset.labels.numpy()
    if dataset.has_classes:
        values, counts = np.unique(labels, return_counts=True)
        if len(labels) == 0 or counts.min() < NUM_FOLDS:
            found = ", ".join(f"class {value}: {count}" for value, count in zip(values, counts, strict=True))
            raise ValueError(f"{NUM_FOLDS} folds need {NUM_FOLDS} graphs of each class; found {found or 'none'}.")
    outer_kind, inner_kind = (StratifiedKFold, StratifiedShuffleSplit) if dataset.has_classes else (KFold, ShuffleSplit)
    outer = outer_kind(NUM_FOLDS, shuffle=True, random_state=repeat)
    inner = inner_kind(1, test_size=VALIDATION_SHARE, random_state=repeat)
    folds = []
    for rest, test in outer.split(labels, labels):
        train, validation = next(inner.split(rest, labels[rest]))
        folds.append(Fold(np.sort(rest[train]), np.sort(rest[validation]), np.sort(test)))
    return tuple(folds)


def _draw(dataset: GraphDataset, how: str, groups: list[list[int]] | None, seed: list[int]) -> Fold:
    random = np.random.default_rng(seed)
    parts: tuple[list[int], ...] = ([], [], [])
    if groups is None:  # a part of every stratum for each
        for stratum in _strata(dataset, how):
            order = random.permutation(stratum)
            ends = np.round(np.cumsum(SHARES) * len(order)).astype(int)
            for part, found in zip(parts, np.split(order, ends[:-1]), strict=True):
                part += found.tolist()
    else:  # whole groups, large ones to the training part
        limits = [share * len(dataset) for share in SHARES]
        for number in sorted(random.permutation(len(groups)), key=lambda k: len(groups[k]) <= limits[1] / 2):
            place = next((k for k in (0, 1) if len(parts[k]) + len(groups[number]) <= limits[k]), 2)
            parts[place].extend(groups[number])
    fold = Fold(*(np.sort(np.array(part, dtype=np.int64)) for part in parts))
    if empty := [name for name, part in fold._asdict().items() if len(part) == 0]:
        raise ValueError(f"{dataset.name} cannot be divided by --split {how}: its {empty[0]} part would be empty.")
    return fold


def _strata(dataset: GraphDataset, how: str) -> list[list[int]]:
    """Numbers of the graphs of which each part gets its share."""
    everyone = np.arange(len(dataset))
    if how == "random":
        return [everyone.tolist()]
    labels = dataset.labels.numpy()
    if dataset.has_classes:
        return [everyone[labels == value].tolist() for value in np.unique(labels)]
    return [part.tolist() for part in np.array_split(np.argsort(labels[:, 0], kind="stable"), _BINS)]


def _scaffolds(dataset: GraphDataset) -> list[list[int]]:
    """Numbers of the molecules of each scaffold."""
    if dataset.keys is None or dataset.edge_features is None:
        raise ValueError(f"--split scaffold needs molecules, and {dataset.name} holds none; pass random or stratified.")
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    found: dict[str, list[int]] = {}
    for number, smiles in enumerate(dataset.keys):
        found.setdefault(MurckoScaffoldSmiles(smiles=smiles), []).append(number)
    return list(found.values())


def columns_as_folds(
    file: str, word: str, lines: Sequence[int], columns: Mapping[str, Sequence[str]]
) -> tuple[Fold, ...] | None:
    """One fold per column, whose entries are ``train``, ``validation`` or ``test``; rows without an entry are in no part.

    A column without ``validation`` has a tenth of its training rows drawn for that.
    """
    folds = []
    for name, column in columns.items():
        codes = np.full(len(column), -1)
        for place, entry in enumerate(column):
            if entry and entry.casefold() not in _PARTS:
                raise ValueError(
                    f"{file}, {word} {lines[place]}: {entry!r} in column {name!r}; a split holds train, validation or test."
                )
            codes[place] = _PARTS.get(entry.casefold(), -1)
        train, validation, test = (np.flatnonzero(codes == code) for code in range(3))
        if len(validation) == 0 and len(train) > 1:
            drawn = np.random.default_rng(0).permutation(train)
            count = max(1, round(VALIDATION_SHARE * len(train)))
            validation, train = np.sort(drawn[:count]), np.sort(drawn[count:])
        if len(train) == 0 or len(test) == 0:
            raise ValueError(
                f"{file}: column {name!r} names {len(train)} rows for training and {len(test)} for the test."
            )
        folds.append(Fold(train, validation, test))
    return tuple(folds) or None


def kept_apart(dataset: GraphDataset, folds: Sequence[Fold]) -> tuple[tuple[Fold, ...], tuple[str, ...]]:
    """The folds, of which no graph is learned from that is tested, and no row stands twice; and what was taken out.

    A row of the test part is taken out of the others, and one of the validation part out of the training part; so is
    every other row that is the same molecule.
    """
    keys = np.arange(len(dataset))
    if dataset.keys is not None:
        keys = np.unique(np.array(dataset.keys), return_inverse=True)[1]
    clean, gone, twice = [], [], []
    for number, fold in enumerate(folds):
        train, validation, test = (np.unique(part) for part in fold)
        free_validation = validation[~np.isin(keys[validation], keys[test])]
        free_train = train[~np.isin(keys[train], keys[np.concatenate([test, free_validation])])]
        if len(free_train) < 1 or (len(validation) and len(free_validation) < 1):
            raise ValueError(
                f"Fold {number} of {dataset.name} has nothing left to learn from: all of its graphs are tested, too."
            )
        rows = [*np.setdiff1d(train, free_train), *np.setdiff1d(validation, free_validation)]
        if rows:
            named = ", ".join(dataset.place(int(row)) for row in rows[:_NAMED]) + ", ..." * (len(rows) > _NAMED)
            gone.append(f"{len(rows)} in fold {number}: {named}")
        if repeated := sum(map(len, fold)) - len(train) - len(validation) - len(test):
            twice.append(f"{repeated} in fold {number}")
        clean.append(Fold(free_train, free_validation, test))
    notes = []
    if gone:
        notes.append(f"Taken out of training or validation, since they or their equals are tested: {'; '.join(gone)}.")
    if twice:
        notes.append(f"Rows that a part of a split names twice, counted once: {', '.join(twice)}.")
    return tuple(clean), tuple(notes)
