"""A reader's own files: molecules in a CSV file, or sets of vectors in a Parquet file, one row each.

A row that cannot be used is left out, counted, and named in the notes of the dataset with its line and the reason. What
is wrong with the whole file raises: it is not there, has no such column, or nothing in it can be used.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flowpool.lab.datasets.drawn import columns_as_folds
from flowpool.lab.datasets.errors import DatasetFormatError, DatasetNotFoundError
from flowpool.lab.datasets.record import GraphDataset, cloud_dataset, offsets

Kind = Literal["classes", "numbers"]

MOST_CLASSES = 20  # different whole numbers in a target; more are numbers to be predicted
_MISSING = {"", "na", "nan", "n/a", "none", "null", "?"}
_SHOWN = 3  # rows that a note names
_LONGEST = 40  # characters of an entry that a message shows


class LeftOut:
    """Rows of a file that are not used, by reason."""

    def __init__(self, file: str, word: str = "line") -> None:
        self._file, self._word, self._reasons = file, word, dict[str, list[str]]()

    def add(self, reason: str, line: int, entry: str = "") -> None:
        shown = entry if len(entry) <= _LONGEST else f"{entry[:_LONGEST]}..."
        self._reasons.setdefault(reason, []).append(f"{self._word} {line}" + (f": {shown!r}" if entry else ""))

    def notes(self) -> tuple[str, ...]:
        """One sentence per reason."""
        return tuple(
            f"{self._file}: {len(places)} {'row is' if len(places) == 1 else 'rows are'} left out, {reason} "
            f"({'; '.join(places[:_SHOWN])}{'; ...' if len(places) > _SHOWN else ''})."
            for reason, places in self._reasons.items()
        )

    def nothing_left(self) -> ValueError:
        return ValueError(f"{self._file} has no row that can be used. {' '.join(self.notes())}".strip())


class Rows:
    """Some columns of a table as text, each row with its line in the file."""

    def __init__(self, lines: list[int], columns: dict[str, list[str]]) -> None:
        self.lines, self.columns = lines, columns

    def kept(self, places: Sequence[int]) -> Rows:
        return Rows(
            [self.lines[place] for place in places],
            {name: [column[place] for place in places] for name, column in self.columns.items()},
        )


def read_csv(path: Path, wanted: Sequence[str], left_out: LeftOut) -> Rows:
    """The wanted columns of a CSV or TSV file; numbers stand for the columns of a file without a header, from 1."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            table = [(reader.line_num, [entry.strip() for entry in row]) for row in reader if row]
    except FileNotFoundError:
        raise DatasetNotFoundError(f"{path} does not exist.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start}); save it as UTF-8.") from None
    except IsADirectoryError:
        raise DatasetNotFoundError(f"{path} is a folder, not a file.") from None
    except csv.Error as error:
        problem = f"{error}; look for a quotation mark that is not closed, here or above."
        raise DatasetFormatError(path.name, reader.line_num, problem) from None
    if not table:
        raise ValueError(f"{path} is empty; a table with one row per molecule is expected.")
    header = table[0][1]
    if all(name.isdecimal() for name in wanted) and not set(wanted) <= set(header):
        places = [int(name) - 1 for name in wanted]
        if not all(0 <= place < len(header) for place in places):
            asked = ", ".join(wanted)
            raise ValueError(f"{path} has {len(header)} columns, counted from 1; asked for are {asked}.")
    else:
        missing = [name for name in wanted if name not in header]
        if missing:
            there = ", ".join(header[:20])
            advice = "For a file without such a line give the numbers of the columns, counted from 1."
            if len(header) == 1:
                advice = f"Columns are separated by {'tabs' if path.suffix == '.tsv' else 'commas'} here; save it so."
            raise ValueError(f"{path} has no column {missing[0]!r}; its first line names {there}. {advice}")
        if twice := [name for name in wanted if header.count(name) > 1]:
            raise ValueError(f"{path} has two columns {twice[0]!r}; give each another name in its first line.")
        places, table = [header.index(name) for name in wanted], table[1:]
    rows = []
    for line, entries in table:
        if len(entries) <= max(places) or any(entries[len(header) :]):
            left_out.add(f"with {len(entries)} entries, where the first line has {len(header)}", line)
        else:
            rows.append((line, [entries[place] for place in places]))
    return Rows([line for line, _ in rows], {name: [row[k] for _, row in rows] for k, name in enumerate(wanted)})


def targets_of(
    rows: Rows, names: Sequence[str], kind: Kind | None, left_out: LeftOut
) -> tuple[list[int], Tensor, tuple[str, ...]]:
    """Which rows have all targets, what these are as in `GraphDataset.labels`, and the names of the classes.

    A single column of text, or of whole numbers of which few are different, holds classes, unless ``kind`` says otherwise.
    """
    present = []
    for place, line in enumerate(rows.lines):
        absent = [name for name in names if rows.columns[name][place].casefold() in _MISSING]
        if absent:
            left_out.add(f"without {absent[0]}", line)
        else:
            present.append(place)
    if not present:
        return [], torch.empty(0), ()
    if kind is None:
        kind = (
            "classes" if len(names) == 1 and _are_classes([rows.columns[names[0]][p] for p in present]) else "numbers"
        )
    if kind == "classes":
        if len(names) > 1:
            raise ValueError(f"{len(names)} targets; classes can be told from one column only.")
        entries = [rows.columns[names[0]][place] for place in present]
        classes = sorted(set(entries), key=lambda text: (_number(text) is None, _number(text) or 0.0, text))
        if len(classes) < 2:
            raise ValueError(f"The target {names[0]} holds only {classes[0]!r}; at least 2 classes are needed.")
        number = {name: place for place, name in enumerate(classes)}
        return present, torch.tensor([number[entry] for entry in entries]), tuple(classes)
    good, values = [], []
    for place in present:
        found_numbers = [_number(rows.columns[name][place]) for name in names]
        if None in found_numbers:
            bad = names[found_numbers.index(None)]
            left_out.add(f"whose {bad} is no finite number", rows.lines[place], rows.columns[bad][place])
        else:
            good.append(place)
            values.append(found_numbers)
    return good, torch.tensor(values, dtype=torch.float64).reshape(len(good), len(names)), ()


def read_molecules(
    path: Path,
    smiles: str,
    targets: Sequence[str],
    *,
    splits: Sequence[str] = (),
    kind: Kind | None = None,
    name: str | None = None,
) -> GraphDataset:
    """Molecules of a CSV or TSV file as graphs of atoms and bonds, by PyTorch Geometric's ``from_smiles``.

    Every property of atoms and bonds that it knows is one-hot over the values that occur.

    Args:
        path: the file.
        smiles, targets, splits: columns; see `columns_as_folds` for what a split holds.
        kind: what the targets are, where that cannot be told from them.
        name: of the dataset; default: the file's.
    """
    try:
        from rdkit import Chem, RDLogger
    except ImportError:
        raise ImportError("Molecules need RDKit: pip install 'flowpool[chem]'.") from None
    from torch_geometric.utils.smiles import from_rdmol

    RDLogger.DisableLog("rdApp.*")  # type: ignore[attr-defined]
    left_out = LeftOut(path.name)
    rows = read_csv(path, list(dict.fromkeys([smiles, *targets, *splits])), left_out)
    molecules, readable = [], []
    for place, (line, text) in enumerate(zip(rows.lines, rows.columns[smiles], strict=True)):
        molecule = Chem.MolFromSmiles(text) if text else None
        if molecule is None or molecule.GetNumAtoms() == 0:
            left_out.add("whose molecule is empty" if not text else "whose molecule RDKit cannot read", line, text)
            continue
        try:
            graph = from_rdmol(molecule)
        except ValueError:  # a property outside of its tables, such as a charge of 9
            left_out.add("whose atoms have a property that from_smiles does not know", line, text)
            continue
        readable.append(place)
        molecules.append((Chem.MolToSmiles(molecule), graph))
    rows = rows.kept(readable)
    kept, labels, classes = targets_of(rows, targets, kind, left_out)
    if not kept:
        raise left_out.nothing_left()
    graphs = [molecules[place][1] for place in kept]
    rows = rows.kept(kept)
    return GraphDataset(
        name=name or path.stem,
        features=_one_hot(torch.cat([graph.x for graph in graphs])),
        node_ptr=offsets(np.array([len(graph.x) for graph in graphs])),
        edge_index=torch.cat([graph.edge_index for graph in graphs], 1),
        edge_ptr=offsets(np.array([graph.edge_index.shape[1] for graph in graphs])),
        labels=labels,
        class_names=classes,
        edge_features=_one_hot(torch.cat([graph.edge_attr for graph in graphs])),
        keys=tuple(molecules[place][0] for place in kept),
        places=tuple(f"line {line} ({text})" for line, text in zip(rows.lines, rows.columns[smiles], strict=True)),
        folds=columns_as_folds(path.name, "line", rows.lines, {split: rows.columns[split] for split in splits}),
        notes=left_out.notes(),
    )


def read_sets(
    path: Path,
    nodes: str,
    targets: Sequence[str],
    *,
    masses: str | None = None,
    splits: Sequence[str] = (),
    kind: Kind | None = None,
) -> GraphDataset:
    """Sets of vectors, one row each of a Parquet file; columns as in ``flowpool pool``."""
    from pyarrow import lib, parquet, types

    from flowpool.arrow import check_columns, node_width, scalars_of, vectors_of

    if not path.is_file():
        raise DatasetNotFoundError(f"{path} {'is a folder, not a file' if path.is_dir() else 'does not exist'}.")
    try:
        there = parquet.read_schema(path).names
        wanted = list(dict.fromkeys([nodes, *targets, *splits, *([masses] if masses else [])]))
        if missing := [column for column in wanted if column not in there]:
            raise ValueError(f"{path} has no column {missing[0]!r}; it has {', '.join(there[:20])}.")
        table = parquet.read_table(path, columns=wanted).combine_chunks()
    except (lib.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} cannot be read as a Parquet file: {str(error).splitlines()[0]}") from None
    if len(table) == 0:
        raise ValueError(f"{path} has no rows.")
    check_columns(table.schema, nodes, masses, [])
    if nested := [name for name in (*targets, *splits) if types.is_nested(table.schema.field(name).type)]:
        raise ValueError(
            f"Column {nested[0]!r} of {path} is of type {table.schema.field(nested[0]).type}; a target is one class or one "
            "number in each row, and several are columns of their own."
        )
    width = node_width(table, nodes)
    left_out = LeftOut(path.name, "row")
    if width is None:
        raise ValueError(f"Column {nodes!r} of {path} has no vectors at all.")
    columns = {name: _texts(table[name]) for name in (*targets, *splits)}
    rows = Rows(list(range(1, len(table) + 1)), columns)
    vectors = vectors_of(table[nodes].chunk(0))
    weights = None if masses is None else scalars_of(table[masses].chunk(0))
    good = []
    for place, line in enumerate(rows.lines):
        sizes = np.diff(vectors.places[vectors.ptr[place] : vectors.ptr[place + 1] + 1])
        reason = _fault(vectors, place, sizes, width) or (weights and _fault_of_masses(weights, place, len(sizes)))
        if reason:
            left_out.add(str(reason), line)
        else:
            good.append(place)
    rows = rows.kept(good)
    kept, labels, classes = targets_of(rows, targets, kind, left_out)
    if not kept:
        raise left_out.nothing_left()
    chosen = np.zeros(len(table), bool)
    chosen[[good[place] for place in kept]] = True
    rows = rows.kept(kept)
    members, sizes = vectors.rows(chosen, width).numpy(), np.diff(vectors.ptr)[chosen]
    weighed = None if weights is None else weights.rows(chosen, 1).squeeze(-1).float()
    return cloud_dataset(
        path.stem,
        members,
        sizes,
        labels,
        classes,
        masses=weighed,
        keys=_contents(members, weighed, sizes),
        places=tuple(f"row {line}" for line in rows.lines),
        folds=columns_as_folds(path.name, "row", rows.lines, {split: rows.columns[split] for split in splits}),
        notes=left_out.notes(),
    )


def _fault(vectors: Any, place: int, sizes: np.ndarray, width: int) -> str | None:
    """Why a set cannot be used."""
    if vectors.null[place]:
        return "whose set or a part of it is null"
    if len(sizes) == 0:
        return "whose set is empty"
    if (sizes != width).any():
        return f"with a vector of {int(sizes[sizes != width][0])} numbers, where others have {width}"
    begin, end = vectors.places[vectors.ptr[place]], vectors.places[vectors.ptr[place + 1]]
    numbers = vectors.numbers[begin:end]
    if not bool(numbers.double().isfinite().all()):
        return "with a number that is not finite"
    return (
        None if bool(numbers.float().isfinite().all()) else "with a number beyond 3e38, the largest of single precision"
    )


def _fault_of_masses(weights: Any, place: int, size: int) -> str | None:
    begin, end = weights.ptr[place], weights.ptr[place + 1]
    values = weights.numbers[begin:end].float()
    if weights.null[place]:
        return "whose masses or a part of them is null"
    if end - begin != size:
        return f"with {end - begin} masses for {size} vectors"
    fine = bool((values.isfinite() & (values >= 0)).all()) and float(values.sum()) > 0
    return None if fine else "with masses that are negative, not finite, or zero in sum"


def _contents(members: np.ndarray, masses: Tensor | None, sizes: np.ndarray) -> tuple[str, ...]:
    """A fingerprint of each set, whatever the order of its vectors."""
    rows = members if masses is None else np.column_stack([members, masses.numpy()])
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    return tuple(hashlib.sha256(part[np.lexsort(part.T)].tobytes()).hexdigest() for part in parts)


def _texts(column: Any) -> list[str]:
    return ["" if value is None else str(value) for value in column.to_pylist()]


def _one_hot(values: Tensor) -> Tensor:
    """``(N, K)`` zeros and ones: of each column of integers, one for each value that occurs, if there are several."""
    columns = [column for column in values.T if len(column.unique()) > 1]
    hot = [(column[:, None] == column.unique()).float() for column in columns]
    return torch.cat(hot, 1) if hot else torch.ones(len(values), 1)


def _are_classes(entries: list[str]) -> bool:
    numbers = [_number(entry) for entry in entries]
    if sum(number is None for number in numbers) > len(entries) / 2:
        return True
    found = {number for number in numbers if number is not None}
    return len(found) <= MOST_CLASSES and all(number.is_integer() for number in found) and None not in numbers


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
