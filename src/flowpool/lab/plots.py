"""The four pictures of a report. Colours are told apart by people who are colour-blind (Okabe and Ito)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import cycle, islice, product
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from flowpool.lab.comparison import Drawn, Row

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_Dashes = str | tuple[int, tuple[int, ...]]  # as Matplotlib takes them
_DASHES: tuple[_Dashes, ...] = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
_WIDTH = 7.2  # inches


class Style(NamedTuple):
    """How a pool looks in every picture."""

    colour: str
    dashes: _Dashes


def styles(pools: Sequence[str]) -> dict[str, Style]:
    """One look per pool; colours repeat with other dashes."""
    looks = islice(cycle(product(_DASHES, _COLOURS)), len(pools))
    return {pool: Style(colour, dashes) for pool, (dashes, colour) in zip(pools, looks, strict=True)}


def accuracy_plot(rows: Sequence[Drawn]) -> Figure:
    """Box of the folds of each pool, each fold a dot, the mean a diamond."""
    looks = styles([row.pool for row in rows])

    def draw(axes: Axes) -> None:
        # Dots of equal accuracy would hide each other; a fixed seed keeps the picture the same.
        jitter = np.random.default_rng(0)
        for place, row in enumerate(rows):
            values = np.array([100 * result.accuracy for result in row.results])
            colour = looks[row.pool].colour
            axes.boxplot(
                [values],
                positions=[place],
                orientation="horizontal",
                widths=0.55,
                showfliers=False,
                boxprops={"color": colour},
                whiskerprops={"color": colour},
                capprops={"color": colour},
                medianprops={"color": colour, "linewidth": 2},
            )
            axes.plot(values, place + jitter.uniform(-0.18, 0.18, len(values)), ".", color=colour, alpha=0.45)
            axes.plot(values.mean(), place, "D", color="white", markeredgecolor=colour, markersize=7, zorder=3)
            if row.paper is not None:
                axes.plot(100 * row.paper.mean, place, "*", color="black", markersize=12, zorder=4)
        if any(row.paper is not None for row in rows):
            axes.plot([], [], "*", color="black", markersize=10, linestyle="none", label="mean in the paper")
        axes.plot([], [], "D", color="white", markeredgecolor="grey", linestyle="none", label="mean here")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.0 + 0.5 / (1 + 0.5 * len(rows))), ncols=2, frameon=False)
        axes.set_xlabel("test accuracy of a fold (%)")
        _name_rows(axes, [row.pool for row in rows])

    return _figure(draw, 1.2 + 0.5 * len(rows))


def difference_plot(rows: Sequence[Drawn], reference: str) -> Figure | None:
    """Differences to the reference pool with 95 % intervals; None if there are none."""
    looks = styles([row.pool for row in rows])
    compared = [(row.pool, row.difference) for row in rows if row.difference is not None]
    if not compared:
        return None

    def draw(axes: Axes) -> None:
        axes.axvline(0, color="grey", linewidth=1)
        for place, (pool, found) in enumerate(compared):
            low, mean, high = 100 * found.low, 100 * found.mean, 100 * found.high
            colour = looks[pool].colour
            axes.plot([low, high], [place, place], color=colour, linewidth=2)
            axes.plot([mean], [place], "o", color=colour, markersize=8)
            axes.annotate(f"{mean:+.1f}", (mean, place), (0, 8), textcoords="offset points", ha="center", fontsize=9)
        axes.set_xlabel(f"accuracy minus that of {reference} (points), 95 % interval")
        _name_rows(axes, [pool for pool, _ in compared])

    return _figure(draw, 1.1 + 0.5 * len(compared))


def learning_plot(rows: Sequence[Row]) -> Figure:
    """Median training and validation loss over the folds, for as long as half of them are being trained."""
    looks = styles([row.pool for row in rows])
    figure = Figure(figsize=(_WIDTH, 3.4), layout="constrained")
    columns = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(columns, ("train_loss", "validation_loss"), strict=True):
        for row in rows:
            curves = [getattr(run.curve, name) for result in row.results for run in result.runs]
            look = looks[row.pool]
            median = typical_curve(curves)
            axes.plot(range(1, len(median) + 1), median, look.dashes, color=look.colour, label=row.pool)
        axes.set_xlabel("epoch")
        axes.set_title(name.replace("_", " "), fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    columns[0].set_ylabel("loss, median over folds")
    figure.legend(*columns[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def typical_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Median at each epoch over the curves that got so far, up to where half of the curves have ended."""
    shared = int(np.median([len(curve) for curve in curves]))
    return [float(np.median([curve[epoch] for curve in curves if len(curve) > epoch])) for epoch in range(shared)]


def time_plot(rows: Sequence[Row]) -> Figure:
    """Median time of an epoch of each pool, training and validation together, on a logarithmic scale."""
    looks = styles([row.pool for row in rows])

    def draw(axes: Axes) -> None:
        for place, row in enumerate(rows):
            milliseconds = 1000 * row.seconds_per_epoch
            axes.plot([milliseconds], [place], "o", color=looks[row.pool].colour, markersize=9)
            axes.annotate(
                f"{milliseconds:.3g}", (milliseconds, place), (10, 0), textcoords="offset points", va="center"
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.15)
        axes.set_xlabel("time of an epoch (ms), median over folds")
        _name_rows(axes, [row.pool for row in rows])

    return _figure(draw, 0.9 + 0.35 * len(rows))


def as_svg(figure: Figure) -> bytes:
    """The picture as SVG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _figure(draw: Callable[[Axes], None], height: float) -> Figure:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)  # first row on top
