"""The pictures of a report, for a light and a dark page. Colours are told apart by people who are colour-blind."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice, product
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from flowpool.lab.comparison import Row
from flowpool.lab.metrics import Metric

# Okabe and Ito; the last one is the colour of text, whichever that is.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "0.5")
_ON_DARK = {"#0072B2": "#4DA3DC", "#D55E00": "#F0803C", "#009E73": "#2EC49A"}
_Dashes = str | tuple[int, tuple[int, ...]]  # as Matplotlib takes them
_DASHES: tuple[_Dashes, ...] = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 4)))
_WIDTH = 7.6  # inches


class Style(NamedTuple):
    """How a pool looks in every picture."""

    colour: str
    dashes: _Dashes


@contextmanager
def shade(dark: bool) -> Iterator[None]:
    """Text and lines for a light or a dark page, on no ground of their own."""
    ink = "#d8d8d8" if dark else "#222222"
    keys = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = dict.fromkeys(keys, ink) | {
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
    }
    with mpl.rc_context({**settings, "axes.grid.axis": "x", "grid.alpha": 0.25, "svg.hashsalt": "flowpool"}):
        yield


def styles(pools: Sequence[str]) -> dict[str, Style]:
    """One look per pool; colours repeat with other dashes."""
    dark = mpl.rcParams["text.color"] == "#d8d8d8"
    looks = islice(cycle(product(_DASHES, _COLOURS)), len(pools))
    return {
        pool: Style(_ON_DARK.get(colour, colour) if dark else colour, dashes)
        for pool, (dashes, colour) in zip(pools, looks, strict=True)
    }


def difference_plot(rows: Sequence[Row], reference: str, metric: Metric) -> Figure | None:
    """Differences to the reference pool with 95 % intervals, one line per pool, the best first; None if there are none."""
    looks = styles(sorted(row.pool for row in rows))
    if all(row.difference is None for row in rows):
        return None
    scale = 100 if metric.percent else 1

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=mpl.rcParams["text.color"], linewidth=1, alpha=0.6)
        for place, row in enumerate(rows):
            found, colour = row.difference, looks[row.pool].colour
            if found is None:
                if row.pool == reference:
                    axes.plot([0], [place], "D", color=colour, markersize=7)
                continue
            low, mean, high = scale * found.low, scale * found.mean, scale * found.high
            clear = found.low > 0 or found.high < 0
            axes.plot([low, high], [place, place], color=colour, linewidth=2.4, alpha=1 if clear else 0.55)
            face = colour if clear else "none"
            axes.plot(
                [mean], [place], "o", markerfacecolor=face, markeredgecolor=colour, markeredgewidth=1.6, markersize=8
            )
        better = "better to the left" if metric.lower_is_better else "better to the right"
        unit = "points" if metric.percent else metric.name
        axes.set_xlabel(f"{metric.name} minus that of {reference} ({unit}); {better}")
        _name_rows(axes, [row.pool for row in rows])

    return _figure(draw, 1.0 + 0.36 * len(rows))


def score_plot(rows: Sequence[Row], metric: Metric) -> Figure:
    """Every fold of each pool a dot, the mean a diamond."""
    looks = styles(sorted(row.pool for row in rows))
    scale = 100 if metric.percent else 1

    def draw(axes: Axes) -> None:
        # Dots of equal score would hide each other; a fixed seed keeps the picture the same.
        jitter = np.random.default_rng(0)
        for place, row in enumerate(rows):
            values = scale * np.array([result.score for result in row.results])
            colour = looks[row.pool].colour
            axes.plot(
                values, place + jitter.uniform(-0.2, 0.2, len(values)), ".", color=colour, alpha=0.6, markersize=7
            )
            axes.plot(values.mean(), place, "D", color=colour, markersize=8, zorder=3)
            if row.published is not None:
                axes.plot(
                    scale * row.published.mean, place, "*", color=mpl.rcParams["text.color"], markersize=11, zorder=4
                )
        axes.set_xlabel(f"{metric.title} of a fold")
        _name_rows(axes, [row.pool for row in rows])

    return _figure(draw, 1.0 + 0.36 * len(rows))


def learning_plot(rows: Sequence[Row]) -> Figure | None:
    """Median training and validation loss over the folds, for as long as half of them are being trained."""
    looks = styles(sorted(row.pool for row in rows))
    curves = {row.pool: [run.curve for r in row.results for run in r.runs if run.curve is not None] for row in rows}
    if not any(curves.values()):
        return None
    figure = Figure(figsize=(_WIDTH, 3.4 + 0.22 * (len(rows) // 4)), layout="constrained")
    columns = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(columns, ("train_loss", "validation_loss"), strict=True):
        for pool, found in curves.items():
            median = typical_curve([getattr(curve, name) for curve in found]) if found else []
            axes.plot(range(1, len(median) + 1), median, looks[pool].dashes, color=looks[pool].colour, label=pool)
        axes.set_xlabel("epoch")
        axes.set_title(name.replace("_", " "), fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    columns[0].set_ylabel("loss, median over folds")
    handles = columns[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", frameon=False, ncols=min(4, len(rows)))
    return figure


def typical_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Median at each epoch over the curves that got so far, up to where half of the curves have ended."""
    shared = int(np.median([len(curve) for curve in curves]))
    return [float(np.median([curve[epoch] for curve in curves if len(curve) > epoch])) for epoch in range(shared)]


def time_plot(rows: Sequence[Row], metric: Metric) -> Figure:
    """Score against the time of an epoch, or of 1,000 predictions where nothing is trained: one dot per pool."""
    looks = styles(sorted(row.pool for row in rows))
    trained = any(row.seconds_per_epoch for row in rows)

    def draw(axes: Axes) -> None:
        for row in rows:
            seconds = row.seconds_per_epoch if trained else row.seconds_per_thousand
            score = (100 if metric.percent else 1) * row.score.mean
            axes.plot([1000 * (seconds or 0.0)], [score], "o", color=looks[row.pool].colour, markersize=8)
            axes.annotate(row.pool, (1000 * (seconds or 0.0), score), (7, 4), textcoords="offset points", fontsize=9)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.2, y=0.15)
        axes.set_xlabel("time of an epoch (ms), median over folds" if trained else "time for 1,000 graphs (ms)")
        axes.set_ylabel(metric.title)
        axes.grid(alpha=0.25, axis="y")

    return _figure(draw, 3.4, spines=("top", "right"))


def as_svg(figure: Figure) -> bytes:
    """The picture as SVG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _figure(draw: Callable[[Axes], None], height: float, spines: Sequence[str] = ("top", "right", "left")) -> Figure:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[list(spines)].set_visible(False)
    return figure


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)  # first row on top
