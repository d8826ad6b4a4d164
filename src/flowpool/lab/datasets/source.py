"""Where the graphs of an evaluation come from, and the folds that it is made on: a known name, or a reader's own file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import get_args

from flowpool.lab.datasets.catalog import holds, load_dataset
from flowpool.lab.datasets.drawn import Drawing, draw_folds, kept_apart
from flowpool.lab.datasets.errors import DatasetNotFoundError
from flowpool.lab.datasets.record import Fold, GraphDataset
from flowpool.lab.datasets.splits import load_splits, origin_of_splits
from flowpool.lab.datasets.tables import Kind, read_molecules, read_sets
from flowpool.lab.options import Columns

_TABLES = (".csv", ".tsv")


@dataclass(frozen=True)
class Source:
    """Says which graphs, with which folds.

    Attributes:
        dataset: a name that ``flowpool data`` lists, or a path: a CSV or TSV file of molecules, a Parquet file of sets, or
            a TU dataset as a zip file or folder.
        data: folder to look into, as in `load_dataset`.
        table: the columns of a reader's own table; and ``table.split``, how folds are drawn, for any dataset.
    """

    dataset: str = "MUTAG"
    data: str | None = None
    table: Columns = Columns()

    @property
    def path(self) -> Path:
        return Path(self.dataset)

    @property
    def name(self) -> str:
        """What the dataset is called in tables and in the name of a folder."""
        return self.path.stem if self.is_file else self.dataset

    @property
    def is_file(self) -> bool:
        path = self.path
        return path.suffix in (*_TABLES, ".parquet", ".zip") or (path.is_dir() and holds(path, path.name))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table that hold splits."""
        return (
            ()
            if self.table.split is None or self.table.split in get_args(Drawing)
            else tuple(self.table.split.split(","))
        )

    def checked(self, targets: bool = True) -> Source:
        """The same, after a look at which options belong together; without ``targets`` none is needed."""
        suffix = self.path.suffix
        given = [name for name in ("smiles", "nodes", "masses", "target") if getattr(self.table, name) is not None]
        wanted = {".csv": ["smiles", "target"], ".tsv": ["smiles", "target"], ".parquet": ["nodes", "target"]}.get(
            suffix, []
        )
        needed = wanted if targets else [name for name in wanted if name != "target"]
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"{self.dataset}: say which column it is with --{missing[0]} COLUMN.")
        allowed = [*wanted, "masses"] if suffix == ".parquet" else wanted
        if strange := [name for name in given if name not in allowed]:
            owners = {"smiles": "a CSV file", "target": "a file of one's own"}
            whose = owners.get(strange[0], "a Parquet file")
            raise ValueError(f"--{strange[0]} is an option for {whose}; {self.dataset} is none.")
        if self.columns and not wanted:
            raise ValueError(
                f"--split {self.table.split}: {self.dataset} has no columns; pass {', '.join(get_args(Drawing))}, or leave it out."
            )
        return self

    def load(self, kind: Kind | None = None) -> GraphDataset:
        """The graphs, loaded once per process; ``kind`` where the targets do not say whether they are classes."""
        return _loaded(replace(self, table=replace(self.table, split=self.table.split if self.columns else None)), kind)

    def folds(self, kind: Kind | None, repeat: int) -> tuple[Fold, ...]:
        """The folds of a repeat. Those that were published or come with a file are the same in every repeat."""
        return _folds(self, kind, repeat)[0]

    def notes(self, kind: Kind | None) -> tuple[str, ...]:
        """What a reader has to know of the graphs and of the folds."""
        return (*self.load(kind).notes, *_folds(self, kind, 0)[1])

    def origin(self, kind: Kind | None) -> str:
        """Where the folds of the first repeat come from."""
        graphs = self.load(kind)
        if self.table.split is not None and not self.columns:
            return f"drawn with seed 0 ({self.table.split})"
        if self.columns:
            return f"named by {self.table.split}"
        if graphs.folds is not None:
            return "drawn with seeds 0 to 4" if self.dataset == "ORBIT5K" else "published by Chen et al. (2020)"
        return "drawn with seed 0" if self.is_file else origin_of_splits(self.dataset, data=self.data)

    def is_redrawn(self, kind: Kind | None) -> bool:
        """Whether another repeat has other folds."""
        return self.table.split in get_args(Drawing) or self.load(kind).folds is None


def load_graphs(name: str, data: str | None = None) -> GraphDataset:
    """The dataset of that name, loaded once per process."""
    return Source(name, data).load()


@lru_cache(maxsize=4)
def _loaded(source: Source, kind: Kind | None) -> GraphDataset:
    path, table = source.path, source.table
    targets = table.target.split(",") if table.target else []
    if path.suffix in _TABLES:
        return read_molecules(path, table.smiles or "", targets, splits=source.columns, kind=kind)
    if path.suffix == ".parquet":
        return read_sets(path, table.nodes or "", targets, masses=table.masses, splits=source.columns, kind=kind)
    if source.is_file:
        return load_dataset(path.resolve().stem, path)
    if "/" in source.dataset or "\\" in source.dataset:
        reason = f"holds no {path.name}_A.txt" if path.is_dir() else "does not exist"
        raise DatasetNotFoundError(
            f"{source.dataset} {reason}; pass a .csv, .tsv or .parquet file, or a TU dataset as a zip file or folder."
        )
    return load_dataset(source.dataset, source.data)


@lru_cache(maxsize=64)
def _folds(source: Source, kind: Kind | None, repeat: int) -> tuple[tuple[Fold, ...], tuple[str, ...]]:
    graphs = source.load(kind)
    drawing = next((how for how in get_args(Drawing) if how == source.table.split), None)
    if drawing is not None:
        folds = draw_folds(graphs, drawing, repeat)
    elif graphs.folds is not None:
        folds = graphs.folds
    elif repeat == 0 and not source.is_file:
        folds = load_splits(source.dataset, graphs, data=source.data)
    else:
        folds = draw_folds(graphs, "folds", repeat)
    return kept_apart(graphs, folds)
