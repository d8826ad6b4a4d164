"""An evaluation as a page: one HTML file with its pictures and tables inside, which opens without a network."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from flowpool.bulk.files import write_atomically
from flowpool.lab import plots
from flowpool.lab.comparison import PAPER_TABLE, Row, compare, reference_pool, table
from flowpool.lab.evaluate import origin_of_folds
from flowpool.lab.frozen.published import published, sources
from flowpool.lab.metrics import METRICS, Metric
from flowpool.lab.pools import FlowSettings
from flowpool.lab.results import Failure, Store, Task
from flowpool.lab.statistics import Summary

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #5a5a5a; --paper: #fff; --line: #ddd; --ours: #eef5fb }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --soft: #a5a5a5; --paper: #16181b; --line: #3a3d42; --ours: #1d2b38 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 58rem;
       margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.lead { color: var(--soft); margin-top: 0 } .verdict { font-size: 1.05rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
th { border-bottom: 2px solid var(--soft); font-weight: 600 }
tr.reference { background: var(--ours) }
img { width: 100%; height: auto } figcaption, .note { color: var(--soft); font-size: .9rem }
figure { margin: 1rem 0 } summary { cursor: pointer }
pre { background: var(--ours); padding: .8rem; overflow-x: auto; font-size: .85rem }
"""


@dataclass(frozen=True)
class Conclusion:
    """What an evaluation ends with.

    Attributes:
        rows: one per pool, see `flowpool.lab.comparison.compare`.
        reference: the pool that the others are compared with.
        metric: what is compared.
        configuration: ``Configuration.identity()``.
        folds: which ones, and where they come from.
        sources: of published numbers that are shown.
        path: the report that was written.
        failures: folds that raised.
    """

    rows: list[Row]
    reference: str
    metric: Metric
    configuration: dict[str, Any]
    folds: str
    sources: list[str]
    path: Path
    failures: list[Failure]

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "configuration": self.configuration,
            "metric": {"name": self.metric.name, "lower_is_better": self.metric.lower_is_better},
            "folds": self.folds,
            "reference": self.reference,
            "pools": [row.as_data() for row in self.rows],
            "sources": self.sources,
            "failures": [asdict(failure) for failure in self.failures],
            "report": str(self.path),
        }

    @property
    def title(self) -> str:
        return f"{self.configuration['dataset']}: {describe(self.configuration)}; {self.folds}"

    def notes(self) -> list[str]:
        """What has to be said beside the table, apart from what the data came with."""
        return [verdict(self), *self.sources]


def conclude(store: Store, tasks: Sequence[Task]) -> Conclusion:
    """Compares what the store has of these tasks, at least one result, and writes ``report.html`` beside it."""
    identity, pools = store.configuration, list(dict.fromkeys(task.pool for task in tasks))
    reference, metric = reference_pool(pools), METRICS[identity["metric"]]
    failures, dataset = store.load_failures(tasks), identity["dataset"]
    shown: dict[str, Summary] = {}
    if identity["as_in_paper"]:
        shown = PAPER_TABLE
    elif identity["protocol"] == "frozen":
        known = {pool: published(pool, dataset) for pool in pools}
        shown = {pool: Summary(value / 100, 0.0, 0) for pool, value in known.items() if value is not None}
    results = store.load_all(tasks)
    rows = compare(results, pools, reference, metric=metric, published=shown, failures=failures)
    notes = sources(pools, dataset) if identity["protocol"] == "frozen" else []
    folds = origin_of_folds(identity, [result.task for result in results])
    path = store.folder / "report.html"
    concluded = Conclusion(rows, reference, metric, identity, folds, notes, path, failures)
    write_atomically(path, html_report(concluded).encode())
    return concluded


def html_report(concluded: Conclusion) -> str:
    """The page."""
    rows, reference, metric = concluded.rows, concluded.reference, concluded.metric
    name = escape(str(concluded.configuration["dataset"]))
    star = " Star: published." if any(row.published for row in rows) else ""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Pooling on {name}</title><style>{STYLE}</style></head><body>",
        f"<h1>Pooling on {name}</h1><p class='lead'>{escape(describe(concluded.configuration))}; "
        f"{escape(concluded.folds)}</p><p class='verdict'>{escape(verdict(concluded))}</p>",
        _section(
            f"Differences to {reference}",
            lambda: plots.difference_plot(rows, reference, metric),
            "Fold by fold, on the same graphs, with 95 % intervals by the standard error of Nadeau and Bengio, which accounts "
            "for folds that share training graphs. A hollow dot: the interval holds zero, and no difference is shown.",
        ),
        _table(concluded),
        "".join(
            f"<p class='note'>{escape(note)}</p>" for note in (*concluded.sources, *concluded.configuration["notes"])
        ),
        _failures(concluded.failures),
        _section("Every fold", lambda: plots.score_plot(rows, metric), f"A dot is a fold, a diamond the mean.{star}"),
        _section(
            "Learning curves",
            lambda: plots.learning_plot(rows),
            "Median over folds, up to the epoch at which half of the folds have stopped.",
        ),
        _section("Score and time", lambda: plots.time_plot(rows, metric), "On this machine, one thread."),
        _chosen(rows),
        _warnings(rows),
        f"<h2>Configuration</h2><details><summary>everything that decides these numbers</summary>"
        f"<pre>{escape(json.dumps(concluded.configuration, indent=1))}</pre></details></body></html>",
    ]
    return "\n".join(filter(None, parts)) + "\n"


def describe(configuration: Mapping[str, Any]) -> str:
    """The configuration in one line."""
    if configuration["protocol"] == "frozen":
        rounds = " or ".join(map(str, configuration["rounds"]))
        return (
            f"frozen protocol, kernel machine, M={configuration['num_points']}, {rounds} rounds of averaging, "
            f"seed {configuration['seed']}"
        )
    propagation = f" ({configuration['propagation']})" if configuration["propagation"] else ""
    channels = " or ".join(map(str, configuration["channels"]))
    one = configuration["backbone"] in ("sgc", "blind", "linear")
    layers = "" if one else f" of {' or '.join(map(str, configuration['layers']))} layers"
    every = ", each of them pooled" if configuration["jumping"] else ""
    changed = FlowSettings(**configuration["flow"]).changed()
    flow = "".join(f", {name.replace('_', ' ')} {value}" for name, value in changed.items())
    return (
        f"{configuration['protocol']} protocol, backbone {configuration['backbone']}{layers}{propagation}{every}, "
        f"d={channels}, M={configuration['num_points']}, size: {configuration['size']}, "
        f"BatchNorm: {configuration['norm']}, padding: {configuration['padding']}, "
        f"at most {configuration['max_epochs']} epochs, seed {configuration['seed']}{flow}"
    )


def verdict(concluded: Conclusion) -> str:
    """What the table says, in a sentence or two."""
    rows, reference, metric = concluded.rows, concluded.reference, concluded.metric
    own = next((row for row in rows if row.pool == reference), None)
    found = {row.pool: row.difference for row in rows if row.difference is not None}
    if own is None or not found:
        return "There is nothing to compare: at least two folds of two pools are needed."
    above = [pool for pool, difference in found.items() if difference.low > 0]
    below = [pool for pool, difference in found.items() if difference.high < 0]
    better, worse = (below, above) if metric.lower_is_better else (above, below)
    equal = [pool for pool in found if pool not in better and pool not in worse]
    parts = []
    if worse:
        parts.append(f"{reference} is better than {_listed(worse)}")
    if better:
        parts.append(f"{reference} is worse than {_listed(better)}")
    if equal:
        others = "any other pool" if len(equal) == len(found) > 2 else _listed(equal)
        parts.append(f"{reference} cannot be told from {others}")
    text = f"On these folds {'; '.join(parts)} (95 % intervals)."
    if own.published is not None and own.published.count:
        away = metric.number(own.score.mean - own.published.mean, sign=True)
        text += f" The paper has {metric.number(own.published.mean)} for {reference}, here it is {away} from that."
    if concluded.configuration.get("padding") == "mass":
        text += " Graphs are padded with mass, through which their size leaks to every pool but the sum, which has it anyway."
    return text


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _table(concluded: Conclusion) -> str:
    heads, cells = table(concluded.rows, concluded.reference, concluded.metric)
    lines = [
        "<h2>Table</h2><div class='wide'><table><tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"
    ]
    for line in cells:
        mark = " class='reference'" if line[0] == concluded.reference else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>")
    lines.append("</table></div><p class='note'>Mean and standard deviation over folds; difference with its corrected ")
    lines.append(
        "standard error; p of no difference, two-sided, not adjusted for several comparisons; width: numbers per "
    )
    lines.append("graph that a pool hands over. ")
    lines.append("Published numbers are from other folds and other grids.</p>" if "published" in heads else "</p>")
    return "\n".join(lines)


def _section(title: str, draw: Callable[[], Figure | None], caption: str) -> str:
    """A picture with a heading and a caption, once for light and once for dark pages; nothing if there is no picture."""
    pictures = []
    for dark in (False, True):
        with plots.shade(dark):
            figure = draw()
            if figure is None:
                return ""
            pictures.append("data:image/svg+xml;base64," + base64.b64encode(plots.as_svg(figure)).decode())
    light, dark_one = pictures
    return (
        f"<h2>{escape(title)}</h2><figure><picture><source media='(prefers-color-scheme: dark)' srcset='{dark_one}'>"
        f"<img alt='{escape(title, quote=True)}' src='{light}'></picture><figcaption>{escape(caption)}</figcaption></figure>"
    )


def _chosen(rows: Sequence[Row]) -> str:
    """The setting that each pool got most often, where there was a choice."""
    lines = []
    for row in rows:
        if all(len(result.candidates) < 2 for result in row.results):
            continue
        texts = Counter(
            ", ".join(
                f"{name.replace('_', ' ')} {value}"
                for name, value in result.chosen.setting.items()
                if value is not None
            )
            for result in row.results
        )
        text, times = texts.most_common(1)[0]
        lines.append(f"<li>{escape(row.pool)}: {escape(text)}, in {times} of {len(row.results)} folds</li>")
    return f"<h2>What was chosen most often</h2><ul>{''.join(lines)}</ul>" if lines else ""


def _failures(failures: Sequence[Failure]) -> str:
    lines = [
        f"<li>{escape(failure.pool)}, repeat {failure.repeat}, fold {failure.fold}: {escape(failure.reason)}"
        f"<details><summary>where</summary><pre>{escape(failure.trace)}</pre></details></li>"
        for failure in failures
    ]
    return f"<h2>Failed folds</h2><ul>{''.join(lines)}</ul>" if lines else ""


def _warnings(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if warned := [result.warnings[0] for result in row.results if result.warnings]:
            lines.append(f"<li>{escape(row.pool)}, {len(warned)} folds, for example: {escape(warned[0])}</li>")
    return f"<h2>Warnings</h2><ul>{''.join(lines)}</ul>" if lines else ""
