"""An evaluation as a page: one HTML file with its tables and pictures inside, which opens without a network."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from flowpool.lab import plots
from flowpool.lab.comparison import Row, compare, count, percent, points, reference_pool
from flowpool.lab.evaluate import Configuration, origin_of_folds
from flowpool.bulk.files import write_atomically
from flowpool.lab.pools import FlowSettings
from flowpool.lab.results import Failure, Store, Task

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 54rem; margin: 2rem auto;
       padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.lead { color: #555; margin-top: 0 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
th { border-bottom: 2px solid #444; font-weight: 600 }
tr.reference { background: #f0f6fb }
img { width: 100%; height: auto } figcaption, .note { color: #555; font-size: .9rem }
figure { margin: 1rem 0 } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .85rem }
"""


def _flow(settings: Mapping[str, Any]) -> str:
    """The settings of the flow, as far as they are changed."""
    changed = FlowSettings(**settings).changed()
    return "".join(f", {name.replace('_', ' ')} {value}" for name, value in changed.items())


@dataclass(frozen=True)
class Conclusion:
    """What an evaluation ends with.

    Attributes:
        rows: one per pool, see `flowpool.lab.comparison.compare`.
        reference: the pool that the others are compared with.
        configuration: ``Configuration.identity()``.
        folds: which ones, and where they come from.
        path: the report that was written.
        failures: folds that raised.
    """

    rows: list[Row]
    reference: str
    configuration: dict[str, Any]
    folds: str
    path: Path
    failures: list[Failure]

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "configuration": self.configuration,
            "folds": self.folds,
            "reference": self.reference,
            "pools": [row.as_data() for row in self.rows],
            "failures": [asdict(failure) for failure in self.failures],
            "report": str(self.path),
        }


def conclude(configuration: Configuration, store: Store, tasks: Sequence[Task]) -> Conclusion:
    """Compares what the store has of these tasks, at least one result, and writes ``report.html`` beside it."""
    pools = list(dict.fromkeys(task.pool for task in tasks))
    reference, identity = reference_pool(pools), configuration.identity()
    failures = store.load_failures(tasks)
    rows = compare(store.load_all(tasks), pools, reference, as_in_paper=configuration.is_as_in_paper, failures=failures)
    path, folds = store.folder / "report.html", origin_of_folds(configuration, tasks)
    write_atomically(path, html_report(rows, reference, identity, folds, failures).encode())
    return Conclusion(rows, reference, identity, folds, path, failures)


def html_report(
    rows: Sequence[Row],
    reference: str,
    configuration: Mapping[str, Any],
    folds: str,
    failures: Sequence[Failure] = (),
) -> str:
    """The page.

    Args:
        rows: at least one, see `flowpool.lab.comparison.compare`.
        reference: the pool that the others are compared with.
        configuration: plain data, shown as it is; ``Configuration.identity()``.
        folds: which ones, and where they come from.
        failures: folds that raised.
    """
    pictures = [
        ("Accuracy", plots.accuracy_plot(rows), "Every dot is a fold. Box: middle half of the folds; line: median."),
        (
            f"Differences to {reference}",
            plots.difference_plot(rows, reference),
            "Fold by fold, on the same graphs. Intervals use the standard error of Nadeau and Bengio, which accounts "
            "for folds that share training graphs. An interval that holds zero shows no difference.",
        ),
        (
            "Learning curves",
            plots.learning_plot(rows),
            "Median over folds, up to the epoch at which half of the folds have stopped.",
        ),
        ("Time", plots.time_plot(rows), "One pass over the training and validation graphs, on this machine."),
    ]
    name = escape(str(configuration["dataset"]))
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Pooling on {name}</title><style>{STYLE}</style></head><body>",
        f"<h1>Pooling on {name}</h1><p class='lead'>{escape(describe(configuration))}; {escape(folds)}</p>",
        f"<p>{escape(verdict(rows, reference, configuration))}</p>",
        _table(rows, reference),
        _failures(failures),
        *(section(*picture) for picture in pictures),
        _warnings(rows),
        "<h2>Configuration</h2>",
        f"<pre>{escape(json.dumps(configuration, indent=1))}</pre></body></html>",
    ]
    return "\n".join(parts) + "\n"


def describe(configuration: Mapping[str, Any]) -> str:
    """The configuration in one line."""
    propagation = f" ({configuration['propagation']})" if configuration["propagation"] else ""
    channels = " or ".join(map(str, configuration["channels"]))
    layers = (
        f" of {' or '.join(map(str, configuration['layers']))} layers" if configuration["backbone"] == "gin" else ""
    )
    strong = "strong preset, " if configuration["jumping"] else ""
    return (
        f"{configuration['protocol']} protocol, {strong}backbone {configuration['backbone']}{layers}{propagation}, "
        f"d={channels}, M={configuration['num_points']}, size: {configuration['size']}, "
        f"BatchNorm: {configuration['norm']}, padding: {configuration['padding']}, "
        f"at most {configuration['max_epochs']} epochs, seed {configuration['seed']}{_flow(configuration['flow'])}"
    )


def verdict(rows: Sequence[Row], reference: str, configuration: Mapping[str, Any]) -> str:
    """What the table says, in a sentence or two."""
    others = [row for row in rows if row.difference is not None]
    own = next((row for row in rows if row.pool == reference), None)
    if own is None or not others:
        return "There is nothing to compare: at least two folds of two pools are needed."
    better = [row.pool for row in others if row.difference and row.difference.high < 0]
    worse = [row.pool for row in others if row.difference and row.difference.low > 0]
    equal = [row.pool for row in others if row.pool not in better and row.pool not in worse]
    parts = []
    if better:
        parts.append(f"{reference} is better than {_listed(better)}")
    if worse:
        parts.append(f"{reference} is worse than {_listed(worse)}")
    if equal:
        parts.append(f"{reference} cannot be told from {_listed(equal)}")
    text = f"On these folds {'; '.join(parts)} (95 % intervals)."
    if own.paper is not None:
        away = 100 * (own.accuracy.mean - own.paper.mean)
        text += f" The paper has {100 * own.paper.mean:.2f} % for {reference}, here it is {away:+.1f} points from that."
    if configuration.get("padding") == "mass":
        text += " Graphs are padded with mass, through which their size leaks to every pool but the sum, which has it anyway."
    return text


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _table(rows: Sequence[Row], reference: str) -> str:
    has_paper = any(row.paper is not None for row in rows)
    heads = ["pool", "accuracy (%)", *(["paper"] if has_paper else []), f"minus {reference}", "p", "folds", "weights"]
    lines = ["<table><tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"]
    for row in rows:
        cells = [row.pool, percent(row.accuracy)]
        if has_paper:
            cells.append(percent(row.paper) if row.paper else "")
        found = row.difference
        cells += [points(found), f"{found.p_value:.2f}"] if found else ["", ""]
        cells += [count(row), f"{row.results[0].runs[0].num_parameters:,}"]
        mark = " class='reference'" if row.pool == reference else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    lines.append("</table><p class='note'>Mean and standard deviation over folds; difference in points with its ")
    lines.append("corrected standard error; p of no difference, two-sided, not adjusted for several comparisons.</p>")
    return "\n".join(lines)


def section(title: str, figure: Figure | None, caption: str) -> str:
    """A picture with a heading and a caption; nothing if there is no picture."""
    if figure is None:
        return ""
    picture = base64.b64encode(plots.as_svg(figure)).decode()
    return (
        f"<h2>{escape(title)}</h2><figure><img alt='{escape(title, quote=True)}' "
        f"src='data:image/svg+xml;base64,{picture}'><figcaption>{escape(caption)}</figcaption></figure>"
    )


def _failures(failures: Sequence[Failure]) -> str:
    lines = [
        f"<li>{escape(failure.pool)}, repeat {failure.repeat}, fold {failure.fold}: {escape(failure.reason)}"
        f"<details><summary>where</summary><pre>{escape(failure.trace)}</pre></details></li>"
        for failure in failures
    ]
    return f"<h2>Failed folds</h2><ul>{''.join(lines)}</ul>" if lines else ""


def _warnings(rows: Sequence[Row]) -> str:
    said = [(row.pool, sum(bool(result.warnings) for result in row.results), _first_warning(row)) for row in rows]
    lines = [
        f"<li>{escape(pool)}, {count} folds, for example: {escape(text)}</li>" for pool, count, text in said if count
    ]
    return f"<h2>Warnings</h2><ul>{''.join(lines)}</ul>" if lines else ""


def _first_warning(row: Row) -> str:
    return next((text for result in row.results for text in result.warnings), "")
