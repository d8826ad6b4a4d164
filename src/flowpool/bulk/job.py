"""A table pooled part by part on this machine; the same work is dealt out to others in :mod:`flowpool.bulk.on_ray`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

from flowpool import __version__, references
from flowpool.arrow import finite_nodes, node_width, pool_arrow, pooled_reference
from flowpool.bulk.sources import Part, Source
from flowpool.bulk.store import Store

_SAMPLE = 50_000  # nodes that k-means sees
_MOST_POINTS = 10_000  # more is a slip of the finger, or would not fit into memory


@dataclass(frozen=True)
class Settings:
    """What is pooled, and how.

    Attributes:
        nodes, masses: columns.
        num_points: number of points, M.
        epsilon: relative entropic regularisation.
        divergence: whether S_eps(X*, Y) is computed too.
        reference: ``"normal"``, ``"kmeans"``, or a file: ``.npy``, or what an earlier run wrote.
        seed: of the reference.
    """

    nodes: str = "x"
    masses: str | None = None
    num_points: int = 5
    epsilon: float = 0.1
    divergence: bool = False
    reference: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_points <= _MOST_POINTS:
            raise ValueError(f"{self.num_points:,} points; pass a number from 1 to {_MOST_POINTS:,}.")


@dataclass(frozen=True)
class Job:
    """The work on each part; can be sent to other processes."""

    source: Source
    settings: Settings
    reference: Tensor

    def pool(self, table: pa.Table) -> pa.Table:
        settings = self.settings
        return pool_arrow(
            table,
            settings.nodes,
            settings.masses,
            reference=self.reference,
            epsilon=settings.epsilon,
            divergence=settings.divergence,
        )

    def empty(self) -> pa.Table:
        """What comes out when nothing goes in: the columns of the result."""
        return self.pool(self.source.schema.empty_table())

    def run(self, parts: Sequence[Part], store: Store) -> Iterator[int]:
        """Pools the parts and keeps each as soon as it is done. Yields numbers of rows as they are pooled."""
        pooled: list[pa.Table] = []
        for part, rows in self.source.read(parts):
            pooled.append(self.pool(pa.Table.from_batches([rows])))
            yield len(rows)
            if sum(map(len, pooled)) == part.stop - part.start:
                # In one piece: whatever batches the rows came in, equal rows make equal files.
                store.save(part, pa.concat_tables(pooled).combine_chunks())
                pooled = []


def make_job(source: Source, settings: Settings, output: Path) -> tuple[Job, Store]:
    """What there is to do, after all checks; goes on with what an earlier run left in the output."""
    identity = {"version": __version__, **asdict(settings), "input": source.fingerprint}
    given = None
    if settings.reference not in ("normal", "kmeans"):
        given = load_reference(Path(settings.reference))
        if len(given) != settings.num_points:
            raise ValueError(f"{settings.reference} has {len(given)} points, but --points is {settings.num_points}.")
        identity["reference"] = given.tolist()
    store = Store(output, identity)
    reference = store.reference
    if reference is None:
        reference = _fresh_reference(source, settings) if given is None else given
    job = Job(source.cut_for(8 * reference.numel()), settings, reference.double())
    job.empty()  # raises if the columns do not fit
    store.begin(reference)
    return job, store


def load_reference(path: Path) -> Tensor:
    """The reference ``(M, D)`` in a ``.npy`` file, or the one that an earlier table was pooled from."""
    if not path.exists():
        raise ValueError(f"The reference {path} does not exist; pass normal, kmeans, or a file.")
    if path.is_dir() or path.suffix == ".parquet":
        files = sorted(path.glob("part-*.parquet")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"The folder {path} holds no parts that flowpool pool wrote.")
        return pooled_reference(parquet.read_schema(files[0]))
    try:
        found: Any = np.load(path)  # refuses pickles
        values = found["reference"] if path.suffix == ".npz" else found
        reference = torch.from_numpy(np.asarray(values, np.float64))
        if reference.numel() == 0:
            raise ValueError
    except (ValueError, KeyError, EOFError, OSError):
        raise ValueError(
            f"{path} holds no reference; pass a .npy file of shape (points, features), or a table pooled earlier."
        ) from None
    references.check(reference, reference.shape[-1] if reference.dim() else 0)
    return reference


def _fresh_reference(source: Source, settings: Settings) -> Tensor:
    width = _width(source, settings.nodes)
    if settings.reference == "normal":
        return references.normal(width, settings.num_points, settings.seed)
    nodes = sample_nodes(source.column(settings.nodes), settings.nodes, width, _SAMPLE, settings.seed)
    return references.kmeans(nodes, settings.num_points, settings.seed)


def _width(source: Source, nodes: str) -> int:
    """D, as the type of the column says it, or as the first rows that have nodes do."""
    width = node_width(source.schema.empty_table(), nodes)
    batches = source.column(nodes)
    while width is None:
        batch = next(batches, None)
        if batch is None:
            raise ValueError(f"Column {nodes!r} of {source.name} has no nodes at all.")
        width = node_width(batch, nodes)
    return width


def sample_nodes(batches: Iterator[pa.RecordBatch], column: str, width: int, count: int, seed: int) -> Tensor:
    """So many nodes, or all if there are fewer, drawn evenly from all rows in one pass, ``(n, width)`` float64."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(0, dtype=torch.float64)
    kept = torch.empty(0, width, dtype=torch.float64)
    for batch in batches:
        nodes = finite_nodes(batch, column, width).double()
        # A node that draws one of the smallest numbers stays: every node has the same chance.
        drawn = torch.cat([drawn, torch.rand(len(nodes), generator=generator, dtype=torch.float64)])
        order = drawn.argsort(stable=True)[:count]
        drawn, kept = drawn[order], torch.cat([kept, nodes])[order]
    return kept
