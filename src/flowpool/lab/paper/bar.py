"""The figures with a progress bar, for the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from flowpool.lab.paper import FIGURES, Written, make_figures


def make_figures_with_bar(names: Sequence[str], out: str | Path, console: Console) -> list[Written]:
    """:func:`flowpool.lab.paper.make_figures`, with a line per experiment while it runs; silent where there is no terminal."""
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks = {name: bar.add_task(name, total=1.0, start=False) for name in names or FIGURES if name in FIGURES}

        def show(name: str, share: float) -> None:
            if share == 0:
                bar.start_task(tasks[name])
            bar.update(tasks[name], completed=share)

        return make_figures(names, out, show)
