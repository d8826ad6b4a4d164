"""The view *Runs*: evaluations that ``flowpool evaluate`` has left in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowpool.explore import fields
from flowpool.lab.comparison import Row, compare, reference_pool
from flowpool.lab.report import describe
from flowpool.lab.results import Store, Task

CONFIGURATION, REPORT = "configuration.json", "report.html"


def list_all(folder: Path, body: fields.Body) -> dict[str, Any]:
    """Names of the runs, the newest first."""
    fields.require(body, ())
    return {"folder": str(folder), "runs": found(folder)}


def answer(folder: Path, body: fields.Body) -> dict[str, Any]:
    """The table of one run, with the accuracy of every fold."""
    fields.require(body, ("run",))
    place = folder_of(folder, fields.text(body, "run"))
    configuration = json.loads((place / CONFIGURATION).read_text(encoding="utf-8"))
    store = Store(place, configuration)
    files = sorted(place.glob("*/repeat-*-fold-*.json"))
    results = store.load_all(_task(file) for file in files)
    if not results:
        raise ValueError(f"No fold of {place} is finished yet.")
    pools = list(dict.fromkeys(result.pool for result in results))
    reference = reference_pool(pools)
    rows = compare(results, pools, reference)
    return {
        "dataset": configuration["dataset"],
        "about": describe(configuration) if "backbone" in configuration else f"{configuration['protocol']} protocol",
        "reference": reference,
        "rows": [_shown(row) for row in sorted(rows, key=lambda row: -row.accuracy.mean)],
        "report": (place / REPORT).is_file(),
    }


def report(folder: Path, name: str) -> bytes:
    """The page that the evaluation wrote."""
    return (folder_of(folder, name) / REPORT).read_bytes()


def found(folder: Path) -> list[str]:
    """Folders with results, relative to ``folder``."""
    if not folder.is_dir():
        return []
    files = sorted(folder.rglob(CONFIGURATION), key=lambda file: file.stat().st_mtime, reverse=True)
    return [str(file.parent.relative_to(folder)) for file in files]


def folder_of(folder: Path, name: str) -> Path:
    # Only names that we have listed ourselves: the page can ask for no other path.
    if name not in found(folder):
        raise ValueError(f"There is no run {name!r} in {folder}.")
    return folder / name


def _task(file: Path) -> Task:
    _, repeat, _, fold = file.stem.split("-")
    return Task(file.parent.name, int(repeat), int(fold))


def _shown(row: Row) -> dict[str, Any]:
    shown = {
        "pool": row.pool,
        "folds": [result.accuracy for result in row.results],
        "mean": row.accuracy.mean,
        "deviation": row.accuracy.deviation,
    }
    if row.difference is None:
        return shown
    found = row.difference
    return shown | {"difference": found.mean, "error": found.error, "p": fields.finite(found.p_value)}
