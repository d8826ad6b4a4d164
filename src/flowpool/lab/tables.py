"""A dataset pooled to a table: one row per graph, the same columns for every graph, for any tool that reads tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowpool import Status, flow_pool, references
from flowpool.lab.datasets import GraphDataset
from flowpool.lab.files import fill_atomically

FORMATS = (".parquet", ".npz")
_GRAPHS_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class PooledTable:
    """B graphs as M points with D features each, and how well they were found.

    Attributes:
        points: ``(B, M, D)``, in the precision of the features.
        labels: class numbers, ``(B,)``.
        sizes: nodes, ``(B,)``.
        status: names of :class:`flowpool.Status`, ``(B,)``.
        residual: relative Newton step that is left, ``(B,)``.
        steps: ``(B,)``.
        reference: X^(0), ``(M, D)``.
        about: how the table was made, plain data.
    """

    points: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray
    status: np.ndarray
    residual: np.ndarray
    steps: np.ndarray
    reference: np.ndarray
    about: dict[str, str | int | float]

    @property
    def num_unconverged(self) -> int:
        return sum(not Status[name].converged for name in self.status)


def pool_dataset(
    dataset: GraphDataset,
    num_points: int,
    *,
    epsilon: float,
    seed: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> PooledTable:
    """The node features of each graph, pooled by `flow_pool` from one normal reference.

    Args:
        dataset: the graphs; their edges play no part.
        num_points: M.
        epsilon: relative entropic regularisation.
        seed: of the reference.
        on_progress: called with the number of graphs that were just done.
    """
    reference = references.normal(num_points, dataset.num_features, seed)
    found = []
    for start in range(0, len(dataset), _GRAPHS_AT_ONCE):
        part = dataset.batch(torch.arange(start, min(start + _GRAPHS_AT_ONCE, len(dataset))))
        count = len(part.y)
        with torch.no_grad():
            pooled = flow_pool(
                part.x, part.batch, reference=reference, dim_size=count, epsilon=epsilon, gradient="none"
            )
        found.append((pooled.points, pooled.status, pooled.residual, pooled.steps))
        on_progress(count)
    points, status, residual, steps = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
    return PooledTable(
        points,
        dataset.labels.numpy(),
        dataset.node_ptr.diff().numpy(),
        np.array([Status(int(code)).name for code in status]),
        residual,
        steps,
        reference.numpy(),
        {"dataset": dataset.name, "num_points": num_points, "epsilon": epsilon, "seed": seed},
    )


def check_output(path: Path) -> None:
    """Raises ValueError unless the name says a format that can be written, and its folder is there."""
    if path.suffix not in FORMATS:
        raise ValueError(f"The name of the output, {path}, must end with {' or '.join(FORMATS)}.")
    if not path.parent.is_dir():
        raise ValueError(f"The folder {path.parent} does not exist; make it first.")


def write_table(table: PooledTable, path: Path) -> None:
    """Writes the table, complete or not at all.

    Parquet has the columns ``graph``, ``label``, ``num_nodes``, ``status``, ``residual``, ``steps`` and
    ``point_I_feature_J``; its metadata holds ``flowpool``, JSON of how it was made and the reference. The arrays of an
    npz file have the same names, with ``points`` ``(B, M, D)`` and ``reference`` ``(M, D)``.
    """
    check_output(path)
    columns = {
        "graph": np.arange(len(table.labels)),
        "label": table.labels,
        "num_nodes": table.sizes,
        "status": table.status,
        "residual": table.residual,
        "steps": table.steps,
    }
    if path.suffix == ".npz":
        about = np.array(json.dumps(table.about))
        arrays: dict[str, Any] = columns | {"points": table.points, "reference": table.reference, "about": about}
        fill_atomically(path, lambda part: np.savez_compressed(part, **arrays))
        return
    import pyarrow
    from pyarrow import parquet

    num_points, num_features = table.reference.shape
    columns |= {
        f"point_{point}_feature_{feature}": table.points[:, point, feature]
        for point in range(num_points)
        for feature in range(num_features)
    }
    metadata = json.dumps(table.about | {"reference": table.reference.tolist()})
    arrow = pyarrow.table(columns).replace_schema_metadata({"flowpool": metadata})
    fill_atomically(path, lambda part: parquet.write_table(arrow, part))
