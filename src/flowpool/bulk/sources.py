"""Where rows come from: Parquet files, or a table in memory; both cut into the same parts at every start."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa
from pyarrow import parquet

_MOST_ROWS = 16384  # of a part: what is lost when a run is killed, and what one write costs, are both small
_MOST_BYTES = 2**26  # of the rows of a part, read or pooled, unless one row is larger
_AT_ONCE = 2048  # rows that are in memory at a time
_BUFFER = 2**20  # bytes of a file that are read ahead, of each column


class Part(NamedTuple):
    """Some rows that follow each other in one file; the unit of work."""

    number: int
    file: int
    start: int
    stop: int


@dataclass(frozen=True)
class Source(ABC):
    """Rows of one or more files.

    Attributes:
        name: what it is called in messages.
        rows_per_part: how the files are cut.
    """

    name: str
    rows_per_part: int

    @property
    @abstractmethod
    def schema(self) -> pa.Schema: ...

    @property
    @abstractmethod
    def row_counts(self) -> tuple[int, ...]:
        """Rows of each file."""

    @property
    @abstractmethod
    def fingerprint(self) -> list[dict[str, Any]]:
        """What tells these rows from others, for each file."""

    @abstractmethod
    def batches(self, file: int, start: int, stop: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Rows of one file in their order, in batches of any size."""

    @property
    def num_rows(self) -> int:
        return sum(self.row_counts)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All rows, cut."""
        step = self.rows_per_part
        ranges = [
            (file, start, min(start + step, count))
            for file, count in enumerate(self.row_counts)
            for start in range(0, count, step)
        ]
        return tuple(Part(number, *found) for number, found in enumerate(ranges))

    def cut_for(self, size: int) -> Self:
        """The same rows in smaller parts, if each is pooled to so many bytes that a part of the result would be large."""
        return replace(self, rows_per_part=min(self.rows_per_part, max(1, _MOST_BYTES // size)))

    def column(self, name: str) -> Iterator[pa.RecordBatch]:
        """One column of all rows."""
        for file, count in enumerate(self.row_counts):
            yield from self.batches(file, 0, count, [name])

    def read(self, parts: Sequence[Part]) -> Iterator[tuple[Part, pa.RecordBatch]]:
        """The rows of some parts, in batches of which none belongs to two. Parts that follow each other are read in one go."""
        for run in runs(parts):
            waiting, position = list(reversed(run)), run[0].start
            for batch in self.batches(run[0].file, run[0].start, run[-1].stop):
                while len(batch):
                    here = min(len(batch), waiting[-1].stop - position)
                    yield waiting[-1], batch.slice(0, here)
                    batch, position = batch.slice(here), position + here
                    if position == waiting[-1].stop:
                        waiting.pop()


def runs(parts: Sequence[Part], longest: int | None = None) -> list[list[Part]]:
    """The parts in groups that follow each other in one file."""
    found: list[list[Part]] = []
    for part in parts:
        last = found[-1] if found else []
        if last and last[-1].file == part.file and last[-1].stop == part.start and len(last) != longest:
            last.append(part)
        else:
            found.append([part])
    return found


@dataclass(frozen=True)
class ParquetSource(Source):
    """Parquet files with the same columns; ``root`` is the one file, or the folder that they are in."""

    root: Path
    files: tuple[Path, ...]

    @staticmethod
    def of(path: Path) -> ParquetSource:
        """A file, or all files of a folder; raises ValueError unless they can be read as one table."""
        files = parquet_files(path) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"The folder {path} holds no Parquet files.")
        opened = [_open(file) for file in files]
        first = opened[0].schema_arrow
        for file, other in zip(files, opened, strict=True):
            if not other.schema_arrow.equals(first):
                raise ValueError(
                    f"{file} has other columns than {files[0]}: {_difference(first, other.schema_arrow)}. "
                    "All files of a folder must have the same ones."
                )
        rows = sum(file.metadata.num_rows for file in opened)
        size = max(1, sum(_size_in_memory(file.metadata) for file in opened) // max(1, rows))
        return ParquetSource(str(path), max(1, min(_MOST_ROWS, _MOST_BYTES // size)), path, tuple(files))

    @cached_property
    def schema(self) -> pa.Schema:
        return _open(self.files[0]).schema_arrow

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        return tuple(_open(file).metadata.num_rows for file in self.files)

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        return [
            {"file": file.relative_to(self.root).as_posix(), "bytes": file.stat().st_size, "footer": _footer_hash(file)}
            for file in self.files
        ]

    def batches(self, file: int, start: int, stop: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        opened = _open(self.files[file])
        groups, begin, end = [], None, 0
        for group in range(opened.metadata.num_row_groups):
            first, end = end, end + opened.metadata.row_group(group).num_rows
            if first < stop and end > start:
                groups.append(group)
                begin = first if begin is None else begin
        position = begin or 0
        batches = opened.iter_batches(min(_AT_ONCE, self.rows_per_part), groups, columns)
        while position < stop:
            with _named(self.files[file]):
                batch = next(batches)
            begin, end = max(0, start - position), min(len(batch), stop - position)
            position += len(batch)
            if begin < end:
                yield batch.slice(begin, end - begin)


@dataclass(frozen=True)
class TableSource(Source):
    """A table in memory."""

    table: pa.Table

    @property
    def schema(self) -> pa.Schema:
        return self.table.schema

    @property
    def row_counts(self) -> tuple[int, ...]:
        return (self.table.num_rows,)

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        digest = hashlib.sha256()
        for batch in self.table.to_batches():
            digest.update(batch.serialize())
        return [{"dataset": self.name, "rows": self.table.num_rows, "content": digest.hexdigest()}]

    def batches(self, file: int, start: int, stop: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        rows = self.table.slice(start, stop - start)
        yield from (rows if columns is None else rows.select(columns)).to_batches(max_chunksize=_AT_ONCE)


def parquet_files(folder: Path) -> list[Path]:
    """The Parquet files in a folder and below it, in a fixed order, without hidden and half-written ones."""
    found = (path.relative_to(folder) for path in folder.rglob("*.parquet"))
    return [folder / path for path in sorted(found) if not any(name.startswith((".", "_")) for name in path.parts)]


def _open(path: Path) -> parquet.ParquetFile:
    with _named(path):
        return parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Says which file it is that cannot be read."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # missing, forbidden: named by the system itself
            raise
        reason = (str(error).strip().splitlines() or ["it is damaged"])[0]
        raise ValueError(f"{path} cannot be read as Parquet: {reason.rstrip('.')}.") from None


def _size_in_memory(metadata: parquet.FileMetaData) -> int:
    """About how many bytes the rows of a file take; repeated numbers take next to none in the file itself."""
    return sum(
        max(column.total_uncompressed_size, 8 * column.num_values)
        for group in map(metadata.row_group, range(metadata.num_row_groups))
        for column in map(group.column, range(group.num_columns))
    )


def _footer_hash(path: Path) -> str:
    """Of what a Parquet file says at its end: where everything lies, and the extremes of every column."""
    with path.open("rb") as file:
        file.seek(-8, 2)
        size = int.from_bytes(file.read(4), "little")
        file.seek(-8 - size, 2)
        return hashlib.sha256(file.read(size)).hexdigest()


def _difference(first: pa.Schema, other: pa.Schema) -> str:
    for name in dict.fromkeys([*first.names, *other.names]):
        here, there = (str(schema.field(name).type) if name in schema.names else "missing" for schema in (first, other))
        if here != there:
            return f"{name!r} is {there} there and {here} here"
    return "their order differs"
