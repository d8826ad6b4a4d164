"""The view *Runs*: evaluations that ``flowpool evaluate`` has left in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowpool.explore import fields
from flowpool.lab.comparison import Row, compare, reference_pool
from flowpool.lab.metrics import METRICS
from flowpool.lab.report import describe
from flowpool.lab.results import CONFIGURATION, ResultError, Store

REPORT = "report.html"


def list_all(folder: Path, body: fields.Body) -> dict[str, Any]:
    """Names of the runs, the newest first."""
    fields.require(body, ())
    return {"folder": str(folder), "runs": found(folder)}


def answer(folder: Path, body: fields.Body) -> dict[str, Any]:
    """The table of one run, with the accuracy of every fold."""
    fields.require(body, ("run",))
    place = folder_of(folder, fields.text(body, "run"))
    try:
        store = Store.open(place)
        dataset, metric = store.configuration["dataset"], METRICS[store.configuration["metric"]]
        results = store.load_all(store.tasks())
    except ResultError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"The results in {place} cannot be read ({type(error).__name__}: {error}).") from None
    if not results:
        raise ValueError(f"No fold of {place} is finished yet.")
    pools = list(dict.fromkeys(result.pool for result in results))
    reference = reference_pool(pools)
    rows = compare(results, pools, reference, metric=metric)
    return {
        "dataset": dataset,
        "metric": {"title": metric.title, "percent": metric.percent, "lower_is_better": metric.lower_is_better},
        "about": describe(store.configuration),
        "reference": reference,
        "rows": [_shown(row) for row in rows],
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


def _shown(row: Row) -> dict[str, Any]:
    shown = {
        "pool": row.pool,
        "folds": [result.score for result in row.results],
        "mean": row.score.mean,
        "deviation": row.score.deviation,
    }
    if row.difference is None:
        return shown
    found = row.difference
    return shown | {"difference": found.mean, "error": found.error, "p": fields.finite(found.p_value)}
