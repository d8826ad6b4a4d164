"""The table of a frozen evaluation and its page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from flowpool.lab import plots
from flowpool.lab.comparison import check_same_folds, difference_of, percent, points
from flowpool.lab.evaluate import origin_of_folds
from flowpool.bulk.files import write_atomically
from flowpool.lab.frozen.protocol import Frozen, FrozenResult
from flowpool.lab.frozen.published import published, sources
from flowpool.lab.report import STYLE, section
from flowpool.lab.statistics import Difference, Summary, summarise

REFERENCE = "flow-vectorizer"  # what `FlowVectorizer` gives by default


@dataclass(frozen=True)
class FrozenRow:
    """One method.

    Attributes:
        pool: its name.
        results: its folds, by repeat and fold.
        accuracy: over these.
        difference: this method minus the reference over their common folds; None for the reference itself.
        published: what its authors had on this dataset, in per cent, where they had something.
        seconds: for choosing and fitting in one fold, median.
        seconds_per_thousand: for predicting, per 1,000 graphs, median.
    """

    pool: str
    results: list[FrozenResult]
    accuracy: Summary
    difference: Difference | None
    published: float | None
    seconds: float
    seconds_per_thousand: float

    @property
    def width(self) -> int:
        """Numbers per graph, median over folds, which may have chosen different rounds."""
        return int(np.median([result.width for result in self.results]))

    @property
    def paper(self) -> Summary | None:
        """For pictures, which mark it: a published mean, without a deviation over folds that would be comparable."""
        return None if self.published is None else Summary(self.published / 100, 0.0, 0)

    def as_data(self) -> dict[str, Any]:
        """Plain data, accuracies as shares."""
        return {
            "pool": self.pool,
            "accuracy": asdict(self.accuracy),
            "difference": None if self.difference is None else asdict(self.difference),
            "published_percent": self.published,
            "seconds_per_fold": self.seconds,
            "seconds_per_thousand_graphs": self.seconds_per_thousand,
            "numbers_per_graph": self.width,
        }


@dataclass(frozen=True)
class Conclusion:
    """What a frozen evaluation ends with: its rows, what they are compared with, and the report that was written.

    ``folds`` says which ones they are, and where they come from.
    """

    rows: list[FrozenRow]
    reference: str
    configuration: dict[str, Any]
    folds: str
    sources: list[str]
    path: Path

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "configuration": self.configuration,
            "folds": self.folds,
            "reference": self.reference,
            "pools": [row.as_data() for row in self.rows],
            "sources": self.sources,
            "report": str(self.path),
        }


def compare(results: Sequence[FrozenResult], methods: Sequence[str], reference: str, dataset: str) -> list[FrozenRow]:
    """One row per method that has results, in the order of ``methods``."""
    by_method = {name: sorted((r for r in results if r.pool == name), key=lambda r: r.task) for name in methods}
    check_same_folds([result for found in by_method.values() for result in found])
    return [
        FrozenRow(
            name,
            found,
            summarise([result.accuracy for result in found]),
            None if name == reference else difference_of(found, by_method.get(reference, [])),
            published(name, dataset),
            float(np.median([result.seconds for result in found])),
            float(np.median([result.seconds_per_thousand for result in found])),
        )
        for name, found in by_method.items()
        if found
    ]


def conclude(configuration: Frozen, results: list[FrozenResult], methods: Sequence[str], folder: Path) -> Conclusion:
    """Compares the results and writes ``report.html`` into the folder."""
    reference = REFERENCE if REFERENCE in methods else methods[0]
    rows = compare(results, methods, reference, configuration.dataset)
    identity = configuration.identity()
    folds = origin_of_folds(configuration, [result.task for result in results])
    found = sources([row.pool for row in rows], configuration.dataset)
    path = folder / "report.html"
    write_atomically(path, html_report(rows, reference, identity, folds, found).encode())
    return Conclusion(rows, reference, identity, folds, found, path)


def describe(configuration: dict[str, Any]) -> str:
    """The configuration in one line."""
    rounds = " or ".join(map(str, configuration["rounds"]))
    return (
        f"frozen protocol, support vector machine, M={configuration['num_points']}, {rounds} rounds of averaging, "
        f"seed {configuration['seed']}"
    )


def cells(row: FrozenRow) -> list[str]:
    """A line of the table: method, accuracy, published, difference, p, folds, seconds per 1,000 graphs, numbers."""
    found = row.difference
    return [
        row.pool,
        percent(row.accuracy),
        "" if row.published is None else f"{row.published:.1f}",
        *([points(found), f"{found.p_value:.2f}"] if found else ["", ""]),
        str(row.accuracy.count),
        f"{row.seconds_per_thousand:.2g}",
        str(row.width or ""),
    ]


def heads(reference: str) -> list[str]:
    return ["method", "accuracy %", "published", f"minus {reference}", "p", "folds", "s/1,000 graphs", "numbers"]


def html_report(
    rows: Sequence[FrozenRow], reference: str, configuration: dict[str, Any], folds: str, notes: Sequence[str]
) -> str:
    """The page: table, pictures, and what was chosen."""
    name = escape(str(configuration["dataset"]))
    lines = ["<table><tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads(reference)) + "</tr>"]
    for row in rows:
        mark = " class='reference'" if row.pool == reference else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>")
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Frozen features on {name}</title><style>{STYLE}</style></head><body>",
        f"<h1>Frozen features on {name}</h1><p class='lead'>{escape(describe(configuration))}; {escape(folds)}</p>",
        *lines,
        "</table><p class='note'>Mean and standard deviation over folds; difference in points with its corrected "
        "standard error; p of no difference, two-sided, not adjusted for several comparisons. Published numbers are from "
        f"other folds and other grids. {escape(' '.join(notes))}</p>",
        section("Accuracy", plots.accuracy_plot(rows), "Every dot is a fold. Star: published mean."),
        section(
            f"Differences to {reference}",
            plots.difference_plot(rows, reference),
            "Fold by fold, on the same graphs, with the standard error of Nadeau and Bengio. An interval that holds zero "
            "shows no difference.",
        ),
        "<h2>What was chosen most often</h2><ul>",
        *(f"<li>{escape(row.pool)}: {escape(_favourite(row))}</li>" for row in rows),
        "</ul>",
        *(f"<p class='note'>{escape(row.pool)} warned: {escape(text)}</p>" for row in rows if (text := _warning(row))),
        f"<h2>Configuration</h2><pre>{escape(json.dumps(configuration, indent=1))}</pre></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _favourite(row: FrozenRow) -> str:
    chosen = Counter((r.chosen.rounds, r.chosen.view, r.chosen.kernel, r.chosen.size > 0) for r in row.results)
    (rounds, view, kernel, sized), count = chosen.most_common(1)[0]
    size = "with" if sized else "without"
    return f"{rounds} rounds, {view}, {kernel} kernel, {size} the size, in {count} of {len(row.results)} folds"


def _warning(row: FrozenRow) -> str:
    return next((text for result in row.results for text in result.warnings), "")
