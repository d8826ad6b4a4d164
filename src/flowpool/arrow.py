"""FlowPool on Arrow tables: one graph per row in, the same row with its M points out.

The nodes of a graph stand in one cell, as a list of vectors. In memory such a column is what :func:`flowpool.flow_pool`
takes: all numbers one after the other, and offsets. They are handed over as they are, without a copy and without a loop
over graphs. A row that cannot be pooled keeps its place, and its status says why. What one call does to a table, Ray Data
(``map_batches`` with ``batch_format="pyarrow"``) and Spark (``mapInArrow``) do to a table of any size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

import flowpool
from flowpool import references
from flowpool.pooling import flow_pool
from flowpool.status import Status

try:
    import pyarrow as pa
    import pyarrow.types as kinds
except ImportError as missing:
    raise ImportError("flowpool.arrow needs pyarrow: pip install 'flowpool[arrow]'.") from missing

__all__ = ["STATUSES", "pool_arrow", "pooled_reference"]

NULL, WRONG_WIDTH, BAD_MASSES = "NULL", "WRONG_WIDTH", "BAD_MASSES"

# What the column ``status`` may hold, and what it means.
STATUSES = {status.name: status.advice for status in sorted(Status)} | {
    NULL: "The row, or a node, a number or a mass in it, is null; its points are NaN.",
    WRONG_WIDTH: "A node of the graph has another number of features than the reference; its points are NaN.",
    BAD_MASSES: "The masses of the graph are not one finite number >= 0 per node, or all zero; its points are NaN.",
}
_CODES = {name: code for code, name in enumerate(STATUSES)}
_FINE = -1  # nothing is known against the row

_METADATA = b"flowpool"
_NUM_POINTS = 5
# Bound the memory of one call; no graph feels which others it is pooled with.
_GRAPHS_AT_ONCE = 4096
_NUMBERS_AT_ONCE = 2**21  # of pooled points

Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def pool_arrow(
    table: Rows,
    nodes: str = "x",
    masses: str | None = None,
    num_points: int | None = None,
    reference: Tensor | np.ndarray | None = None,
    *,
    seed: int = 0,
    point_masses: Sequence[float] | None = None,
    cost: str = "sqeuclidean",
    epsilon: float = 0.1,
    relative: bool = True,
    debias: bool = True,
    tolerance: float = 1e-5,
    max_steps: int = 1000,
    step_size: float | None = None,
    engine: Literal["auto", "compiled", "torch"] = "auto",
    divergence: bool = False,
) -> Rows:
    """The table with the nodes of each row replaced by their pooled points.

    Args:
        table: a table or a record batch; the same comes back.
        nodes: column of the node features: lists of lists of numbers, of which the inner ones all have D entries. Numbers
            of 32 or 64 bits with a fraction are read where they are; others are converted first.
        masses: column of node masses b, a list with one number per node; ``None``: equal.
        num_points: M; as many as the reference has, or else 5.
        reference: X^(0), ``(M, D)``; ``None`` draws it with the seed. Tables that are to be compared need the same one.
        seed: of the drawn reference.
        point_masses, cost, epsilon, relative, debias, tolerance, max_steps, step_size, engine: as in
            :func:`flowpool.flow_pool`; the cost by its name.
        divergence: also say what pooling lost, S_eps(X*, Y); its time grows with the square of the number of nodes.

    Returns:
        All other columns as they were, then ``points`` (M lists of D numbers), ``status`` (a key of :data:`STATUSES`),
        ``residual``, and ``divergence`` if it was asked for. Points are zeros where there are no nodes and NaN where the
        row could not be pooled. The schema's metadata holds ``flowpool``: JSON of the reference and all settings.
    """
    if not isinstance(table, pa.Table | pa.RecordBatch):
        raise TypeError(f"table is a {type(table).__name__}; pass a pyarrow Table or RecordBatch.")
    names = [*_RESULTS, "divergence"] if divergence else list(_RESULTS)
    check_columns(table.schema, nodes, masses, names)
    start = _reference(table, nodes, num_points, reference, seed)
    if not isinstance(cost, str):
        raise TypeError(f"cost is a {type(cost).__name__}; pass the name of a cost, which the table can remember.")
    shares = None if point_masses is None else [float(share) for share in point_masses]
    options: dict[str, Any] = {
        "cost": cost,
        "epsilon": epsilon,
        "relative": relative,
        "debias": debias,
        "tolerance": tolerance,
        "max_steps": max_steps,
        "step_size": step_size,
        "engine": engine,
    }
    about = {
        "version": flowpool.__version__,
        "nodes": nodes,
        "masses": masses,
        "num_points": len(start),
        "reference": start.tolist(),
        "point_masses": shares,
        **options,
    }
    parts = [
        _pool_rows(part, nodes, masses, start, shares, options, divergence) for part in _parts(table, start.numel())
    ]
    kept = table.drop_columns([name for name in (nodes, masses) if name is not None])
    for place, name in enumerate(names):
        column = pa.chunked_array([part[place] for part in parts])
        kept = kept.append_column(name, column if isinstance(table, pa.Table) else _joined(column))
    return kept.replace_schema_metadata({**(table.schema.metadata or {}), _METADATA: json.dumps(about).encode()})


def pooled_reference(schema: pa.Schema) -> Tensor:
    """The reference ``(M, D)`` of a table that :func:`pool_arrow` made, to pool another one in the same way."""
    try:
        return torch.tensor(json.loads(schema.metadata[_METADATA])["reference"], dtype=torch.float64)
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            "The table does not say from which reference it was pooled; pool_arrow did not make it."
        ) from None


def node_width(table: pa.Table | pa.RecordBatch, nodes: str) -> int | None:
    """D: what the type of the column says, else how many features most nodes have; ``None`` if there are no nodes."""
    check_columns(table.schema, nodes, None, [])
    entries = table.schema.field(nodes).type.value_type
    if kinds.is_fixed_size_list(entries):
        return int(entries.list_size)
    counts = np.zeros(1, np.int64)
    for part in _parts(table, 1):
        ragged = vectors_of(part.column(nodes))
        found = np.bincount(np.diff(ragged.places[ragged.ptr[0] : ragged.ptr[-1] + 1]), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return int(counts[1:].argmax()) + 1 if counts[1:].any() else None


def finite_nodes(rows: pa.RecordBatch, nodes: str, width: int) -> Tensor:
    """The nodes of all rows that are whole and of that width, without those that are not finite, ``(n, width)``."""
    ragged = vectors_of(rows.column(nodes))
    values = ragged.rows(~(ragged.null | ragged.any(np.diff(ragged.places) != width)), width)
    return values[values.isfinite().all(1)]


_RESULTS = ("points", "status", "residual")


class Ragged(NamedTuple):
    """B lists of vectors, or of numbers, as they lie in memory.

    Attributes:
        ptr: row b owns the entries ``ptr[b]:ptr[b + 1]``, ``(B + 1,)``.
        places: entry n owns the numbers ``places[n]:places[n + 1]``, ``(N + 1,)``.
        numbers: all of them, shared with Arrow.
        null: rows in which something is null, ``(B,)`` bool.
    """

    ptr: np.ndarray
    places: np.ndarray
    numbers: Tensor
    null: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.ptr)  # (B,)

    def any(self, flags: np.ndarray) -> np.ndarray:
        """Rows in which an entry has its flag ``(N,)`` set, ``(B,)`` bool."""
        return _any_between(flags, self.ptr)

    def rows(self, good: np.ndarray, width: int) -> Tensor:
        """The entries of the good rows, all of the same width, ``(n, width)``: in place, unless there are gaps."""
        first, last = self.ptr[0], self.ptr[-1]
        wanted = np.repeat(good, self.sizes)  # (n,), entries
        if wanted.all():
            rows = self.numbers[self.places[first] : self.places[last]].view(-1, width)
        else:
            begins = torch.from_numpy(self.places[first:last][wanted].astype(np.int64))
            rows = self.numbers[begins.unsqueeze(-1) + torch.arange(width)]
        return rows.to(_precision(self.numbers.dtype))


def _pool_rows(
    rows: pa.RecordBatch,
    nodes: str,
    masses: str | None,
    reference: Tensor,
    point_masses: list[float] | None,
    options: dict[str, Any],
    divergence: bool,
) -> list[pa.Array]:
    """Points, status, residual and divergence of some rows."""
    num_points, width = reference.shape
    ragged = vectors_of(rows.column(nodes))
    code = np.where(ragged.null, _CODES[NULL], _FINE)
    code = _judged(code, ragged.any(np.diff(ragged.places) != width), WRONG_WIDTH)
    weights = None
    if masses is not None:
        weights = scalars_of(rows.column(masses))
        code = _judged(code, weights.null, NULL)
        code = _judged(code, _bad_masses(weights, ragged.sizes, _precision(ragged.numbers.dtype)), BAD_MASSES)
    good = code == _FINE
    values = ragged.rows(good, width)
    shares = None if point_masses is None else torch.tensor(point_masses, dtype=values.dtype)
    pooled = flow_pool(
        values,
        ptr=torch.from_numpy(_offsets(np.where(good, ragged.sizes, 0))),
        reference=reference.to(values.dtype),
        masses=None if weights is None else weights.rows(good, 1).squeeze(-1).to(values.dtype),
        point_masses=shares,
        gradient="none",
        on_failure="ignore",  # every row has its status
        **options,
    )
    spoiled = torch.from_numpy(~good)
    points = pooled.points.masked_fill(spoiled[:, None, None], torch.nan)
    code = np.where(good, pooled.status.numpy(), code).astype(np.int8)
    status = pa.DictionaryArray.from_arrays(pa.array(code), pa.array(list(STATUSES))).dictionary_decode()
    measures = [pooled.residual, pooled.divergence] if divergence else [pooled.residual]
    flat = pa.array(points.flatten().numpy())
    vectors = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, width), num_points)
    return [vectors, status, *(pa.array(values.masked_fill(spoiled, torch.nan).numpy()) for values in measures)]


def _judged(code: np.ndarray, wrong: np.ndarray, name: str) -> np.ndarray:
    """The codes, with a reason for the rows that are wrong and had none."""
    return np.where((code == _FINE) & wrong, _CODES[name], code)


def _bad_masses(weights: Ragged, sizes: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Rows whose masses are not one number >= 0 per node with a positive total, ``(B,)`` bool."""
    values = weights.numbers.to(dtype).numpy()  # in which a tiny mass may be zero
    wrong = ~(np.isfinite(values) & (values >= 0))
    weightless = ~_any_between(values > 0, weights.places[weights.ptr]) & (sizes > 0)
    bad: np.ndarray = (weights.sizes != sizes) | _any_between(wrong, weights.places[weights.ptr]) | weightless
    return bad


def vectors_of(column: pa.Array) -> Ragged:
    ptr, entries = _unpacked(column)
    places, numbers = _unpacked(entries)
    null = _nulls(column) | _any_between(_nulls(entries), ptr) | _any_between(_nulls(numbers), places[ptr])
    return Ragged(ptr, places, _shared(numbers), null)


def scalars_of(column: pa.Array) -> Ragged:
    ptr, numbers = _unpacked(column)
    return Ragged(
        ptr, np.arange(len(numbers) + 1), _shared(numbers), _nulls(column) | _any_between(_nulls(numbers), ptr)
    )


def _unpacked(column: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Where each list begins and ends among the entries of all lists, and these entries."""
    if kinds.is_fixed_size_list(column.type):
        size = column.type.list_size
        return size * np.arange(column.offset, column.offset + len(column) + 1), column.values
    return column.offsets.to_numpy(), column.values


def _shared(numbers: pa.Array) -> Tensor:
    """The numbers as a tensor in the same memory; what stands at nulls is whatever lies there."""
    if len(numbers) == 0:
        return torch.empty(0, dtype=torch.from_numpy(np.empty(0, numbers.type.to_pandas_dtype())).dtype)
    filled = pa.Array.from_buffers(numbers.type, len(numbers), [None, numbers.buffers()[1]], offset=numbers.offset)
    tensor: Tensor = torch.from_dlpack(filled)
    return tensor


def _nulls(array: pa.Array) -> np.ndarray:
    if array.null_count == 0:
        return np.zeros(len(array), bool)
    found: np.ndarray = array.is_null().to_numpy(zero_copy_only=False)
    return found


def _any_between(flags: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Whether a flag ``(K,)`` is set in ``ends[b]:ends[b + 1]``, ``(B,)`` bool."""
    if not flags.any():
        return np.zeros(len(ends) - 1, bool)
    counts = _offsets(flags)
    found: np.ndarray = counts[ends[1:]] > counts[ends[:-1]]
    return found


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _precision(dtype: torch.dtype) -> torch.dtype:
    """The narrower of float32 and float64 that holds all numbers of a dtype."""
    narrow = dtype.itemsize <= (4 if dtype.is_floating_point else 2)
    return torch.float32 if narrow else torch.float64


def _parts(table: pa.Table | pa.RecordBatch, size: int) -> list[pa.RecordBatch]:
    """The rows in batches, at least one, without a copy; ``size`` is how many numbers the result of a row has."""
    whole = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
    parts: list[pa.RecordBatch] = whole.to_batches(max_chunksize=max(1, min(_GRAPHS_AT_ONCE, _NUMBERS_AT_ONCE // size)))
    return parts or [pa.RecordBatch.from_pylist([], whole.schema)]


def _joined(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)


def check_columns(schema: pa.Schema, nodes: str, masses: str | None, results: list[str]) -> None:
    _check_type(schema, nodes, "lists of lists of numbers, one inner list per node", depth=2)
    if masses is not None:
        _check_type(schema, masses, "lists of numbers, one per node", depth=1)
    if taken := sorted(set(results) & set(schema.names) - {nodes, masses}):
        raise ValueError(f"The table has a column {taken[0]!r} already, which is to hold a result; rename it first.")


def _check_type(schema: pa.Schema, name: str, wanted: str, depth: int) -> None:
    if schema.names.count(name) != 1:
        known = ", ".join(map(repr, schema.names)) or "none"
        raise ValueError(
            f"The table has {schema.names.count(name)} columns {name!r}; one is needed. Its columns: {known}."
        )
    found = schema.field(name).type
    inner = found
    for _ in range(depth):
        if not (kinds.is_list(inner) or kinds.is_large_list(inner) or kinds.is_fixed_size_list(inner)):
            raise ValueError(f"Column {name!r} is of type {found}; it must hold {wanted}.")
        if kinds.is_fixed_size_list(inner) and inner.list_size == 0:
            raise ValueError(f"Column {name!r} is of type {found}: its lists have no entries.")
        inner = inner.value_type
    if not (kinds.is_integer(inner) or kinds.is_floating(inner)):
        raise ValueError(f"Column {name!r} is of type {found}; it must hold {wanted}.")


def _reference(
    table: pa.Table | pa.RecordBatch, nodes: str, num_points: int | None, reference: Any, seed: int
) -> Tensor:
    """X^(0), ``(M, D)``, given or drawn, after all checks."""
    if reference is None:
        found = node_width(table, nodes)
        if found is None:
            raise ValueError(
                f"Column {nodes!r} has no nodes with features to tell how many of them there are; pass a reference."
            )
        return references.normal(found, _NUM_POINTS if num_points is None else num_points, seed)
    entries = table.schema.field(nodes).type.value_type
    width = entries.list_size if kinds.is_fixed_size_list(entries) else None
    start = torch.as_tensor(reference)
    if start.dim() != 2 or not start.is_floating_point() or start.shape[1] == 0:
        raise ValueError(
            f"reference is {start.dtype} {tuple(start.shape)}; expected real numbers, (num_points, num_features)."
        )
    if num_points not in (None, len(start)):
        raise ValueError(f"reference has {len(start)} points, but num_points is {num_points}.")
    if width not in (None, start.shape[1]):
        raise ValueError(
            f"The nodes in column {nodes!r} have {width} features, but the reference has {start.shape[1]}; "
            "pass a reference for these nodes."
        )
    references.check(start, start.shape[1])
    return start.detach().cpu()
