"""A folder of pooled parts, and the one file that they can be joined to."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from filelock import FileLock, Timeout
from pyarrow import parquet
from torch import Tensor

from flowpool.bulk.files import fill_atomically, write_atomically
from flowpool.bulk.sources import Part

_RECORD = "_flowpool.json"  # readers of a folder of Parquet files skip names that begin like this


class Store:
    """Where parts are kept: each appears whole, under its number, or not at all.

    Args:
        output: a folder; or a file, ``.parquet`` or ``.npz``, whose parts are kept in a folder beside it until they are
            joined.
        identity: what was asked for, plain data. Parts of something else are refused, with a sentence.
    """

    def __init__(self, output: Path, identity: dict[str, Any]) -> None:
        self.output, self.identity = output, identity
        self.is_file = output.suffix in (".parquet", ".npz")
        self.folder = output.with_name(f"{output.name}.parts") if self.is_file else output
        self._refuse_others()

    @property
    def reference(self) -> Tensor | None:
        """The reference that the parts here were pooled from, ``(M, D)``; ``None`` if nothing was begun."""
        record = self._record()
        return None if record is None else torch.tensor(record["reference"], dtype=torch.float64)

    def begin(self, reference: Tensor) -> None:
        """Makes the folder, with a record of what its parts are."""
        record = {"asked": self.identity, "reference": reference.double().tolist()}
        with _told(self.folder):
            self.folder.mkdir(exist_ok=True)
            write_atomically(self.folder / _RECORD, json.dumps(record, indent=1).encode())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other runs out meanwhile: the one that ends first would take the parts away. Ends with the process, too."""
        path = self.folder.with_name(f".{self.folder.name}.lock")
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"Another run is writing to {self.output}; wait for it, or name another output.") from None
        try:
            yield
        finally:
            lock.release()
            path.unlink(missing_ok=True)

    def path(self, part: Part) -> Path:
        return self.folder / f"part-{part.number:06}.parquet"

    def missing(self, parts: Sequence[Part]) -> list[Part]:
        """The parts that are still to be pooled."""
        there = {path.name for path in self.folder.glob("part-*.parquet")}
        return [part for part in parts if self.path(part).name not in there]

    def save(self, part: Part, table: pa.Table) -> None:
        with _told(self.path(part)):
            fill_atomically(self.path(part), lambda path: parquet.write_table(table, path, compression="zstd"))

    def statuses(self, parts: Sequence[Part]) -> Counter[str]:
        """How many rows have which status."""
        counts: Counter[str] = Counter()
        for part in parts:
            status = parquet.read_table(self.path(part), columns=["status"])["status"]
            counts.update({pair["values"]: pair["counts"] for pair in status.value_counts().to_pylist()})
        return counts

    def finish(self, parts: Sequence[Part], empty: pa.Table) -> None:
        """Joins the parts, if the output is to be one file, and removes their folder.

        Args:
            parts: all of them, in order.
            empty: a table without rows that has the columns of the result.
        """
        if not self.is_file:
            if not parts:
                self.save(Part(0, 0, 0, 0), empty)
            return
        paths = [self.path(part) for part in parts]
        write = _write_npz if self.output.suffix == ".npz" else _write_parquet
        with _told(self.output):
            fill_atomically(self.output, lambda path: write(path, paths, empty))
        shutil.rmtree(self.folder)

    def _refuse_others(self) -> None:
        parent = self.output.parent
        if not parent.is_dir():
            raise ValueError(f"The folder {parent} does not exist; make it first.")
        if self.is_file and self.output.is_dir():
            raise ValueError(
                f"{self.output} is a folder; name a file, or a folder without the ending {self.output.suffix}."
            )
        if not self.is_file and (self.output.is_file() or self.output.suffix and not self.output.is_dir()):
            raise ValueError(
                f"The output {self.output} must end with .parquet or .npz, or be a folder, without an ending."
            )
        if not self.folder.exists():
            return
        record = self._record()
        if record is None:
            if any(not path.name.startswith(".") for path in self.folder.iterdir()):
                raise ValueError(f"{self.folder} holds other files; name a new or an empty folder.")
            return
        if record["asked"] != self.identity:
            raise ValueError(
                f"{self.folder} holds parts of another run: {_difference(record['asked'], self.identity)}. "
                "Give the same input and options, or name another output."
            )

    def _record(self) -> dict[str, Any] | None:
        path = self.folder / _RECORD
        if not path.is_file():
            return None
        try:
            record: dict[str, Any] = json.loads(path.read_bytes())
            if isinstance(record["asked"], dict) and isinstance(record["reference"], list):
                return record
        except (ValueError, KeyError, TypeError):
            pass
        raise ValueError(f"{path} is not a record of flowpool pool; name another output.")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Says in words what the system says by number, and where: a full disk, a folder that is not ours."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(f"{path} cannot be written: {os.strerror(error.errno)}.") from None


def check_npz(schema: pa.Schema, left_out: Sequence[str]) -> None:
    """Raises ValueError unless all other columns of the input can be arrays of an npz file."""
    for field in schema:
        if field.name not in left_out and not _is_plain(field.type):
            raise ValueError(
                f"Column {field.name!r} is of type {field.type}, but an .npz file holds numbers and text; "
                "write a .parquet file or a folder."
            )


def _is_plain(kind: pa.DataType) -> bool:
    types = pa.types
    checks = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
    return any(check(kind) for check in checks)


def _write_parquet(path: Path, parts: Sequence[Path], empty: pa.Table) -> None:
    with parquet.ParquetWriter(path, empty.schema, compression="zstd") as writer:
        for part in parts:
            writer.write_table(parquet.read_table(part))


def _write_npz(path: Path, parts: Sequence[Path], empty: pa.Table) -> None:
    table = pa.concat_tables([empty, *map(parquet.read_table, parts)])
    about = json.loads(table.schema.metadata[b"flowpool"])
    reference = np.array(about.pop("reference"))
    arrays: dict[str, Any] = {name: _plain_array(table[name]) for name in table.column_names if name != "points"}
    points = pa.concat_arrays(table["points"].chunks) if table["points"].num_chunks else empty["points"]
    flat = points.flatten().flatten().to_numpy()
    np.savez_compressed(
        path,
        points=flat.reshape(-1, *reference.shape),
        reference=reference,
        about=np.array(json.dumps(about)),
        **arrays,
    )


def _plain_array(column: pa.ChunkedArray) -> np.ndarray:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return np.array([text or "" for text in column.to_pylist()], dtype=str)
    values: np.ndarray = column.to_numpy()
    return values


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    for name in dict.fromkeys([*there, *here]):
        if there.get(name) != here.get(name):
            if name == "input":
                return "its input is not the one given now"
            return f"{name} is {there.get(name)!r} there and {here.get(name)!r} here"
    return "nothing differs"
