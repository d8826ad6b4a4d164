"""Fingerprints of what decides a result: graphs, splits, and the code itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import flowpool
from flowpool.lab.datasets import Fold, GraphDataset

# Parts of the package that show or move results, and decide none.
_SHOWING = (
    "__main__.py",
    "cli",
    "explore",
    "lab/between.py",
    "bulk",
    "lab/comparison.py",
    "lab/compile.py",
    "lab/doctor.py",
    "lab/paper",
    "lab/frozen/published.py",
    "lab/frozen/summary.py",
    "lab/kept.py",
    "lab/plots.py",
    "lab/report.py",
    "lab/paper/grid.py",
    "lab/speed",
)
_PACKAGES = ("flowpool", "torch", "numpy", "numba", "torch_geometric", "scikit-learn", "POT")


@cache
def of_sources(folder: Path = Path(flowpool.__file__).parent) -> str:
    """Of the package's own code, as far as it decides numbers: folds computed by other code are not mixed with ours."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if not any(name == part or name.startswith(f"{part}/") for part in _SHOWING):
            digest.update(f"{name};{path.stat().st_size};".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def of_packages() -> dict[str, str]:
    """Versions of what the numbers come from."""
    return {name: _version(name) for name in _PACKAGES}


def of_graphs(dataset: GraphDataset) -> str:
    digest = hashlib.sha256()
    masses = () if dataset.masses is None else (dataset.masses,)
    for part in (dataset.features, dataset.node_ptr, dataset.edge_index, dataset.edge_ptr, dataset.labels, *masses):
        digest.update(f"{part.dtype}{tuple(part.shape)};".encode())
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def of_folds(folds: Sequence[Fold]) -> str:
    return hashlib.sha256(repr([[part.tolist() for part in fold] for fold in folds]).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources, or an extra that is not installed
        return "not installed"
