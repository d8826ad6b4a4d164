"""The view *Runs*: evaluations that ``flowpool evaluate`` has left in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowpool.explore import fields
from flowpool.lab.comparison import Row, compare, reference_pool
from flowpool.lab.report import describe
from flowpool.lab.results import ResultError, Store, Task

CONFIGURATION, REPORT = "configuration.json", "report.html"


def list_all(folder: Path, body: fields.Body) -> dict[str, Any]:
    """Names of the runs, the newest first."""
    fields.require(body, ())
    return {"folder": str(folder), "runs": found(folder)}


def answer(folder: Path, body: fields.Body) -> dict[str, Any]:
    """The table of one run, with the accuracy of every fold."""
    fields.require(body, ("run",))
    place = folder_of(folder, fields.text(body, "run"))
    try:
        configuration = json.loads((place / CONFIGURATION).read_text(encoding="utf-8"))
        dataset, protocol = configuration["dataset"], configuration["protocol"]
        files = sorted(place.glob("*/repeat-*-fold-*.json"))
        results = Store(place, configuration).load_all(_task(file) for file in files)
    except ResultError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"The results in {place} cannot be read ({type(error).__name__}: {error}).") from None
    if not results:
        raise ValueError(f"No fold of {place} is finished yet.")
    pools = list(dict.fromkeys(result.pool for result in results))
    reference = reference_pool(pools)
    rows = compare(results, pools, reference)
    return {
        "dataset": dataset,
        "about": describe(configuration) if "backbone" in configuration else f"{protocol} protocol",
        "reference": reference,
        "rows": [_shown(row) for row in sorted(rows, key=lambda row: -row.accuracy.mean)],
        "report": _is_inside(folder, place / REPORT),
    }


def report(folder: Path, name: str) -> bytes:
    """The page that the evaluation wrote."""
    page = folder_of(folder, name) / REPORT
    if not _is_inside(folder, page):
        raise ValueError(f"The run {name!r} has no report.")
    return page.read_bytes()


def found(folder: Path) -> list[str]:
    """Folders with results, relative to ``folder``."""
    if not folder.is_dir():
        return []
    files = [file for file in folder.rglob(CONFIGURATION) if _is_inside(folder, file)]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    return [str(file.parent.relative_to(folder)) for file in files]


def folder_of(folder: Path, name: str) -> Path:
    # Only names that we have listed ourselves: the page can ask for no other path.
    if name not in found(folder):
        raise ValueError(f"There is no run {name!r} in {folder}.")
    return folder / name


def _is_inside(folder: Path, file: Path) -> bool:
    """Whether it is a file, and one of this folder: links that lead nowhere or elsewhere are not followed."""
    return file.is_file() and file.resolve().is_relative_to(folder.resolve())


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
