"""``flowpool bench``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowpool.cli.terminal import DataOption, JsonOption, console, note, plain_errors, print_json, progress

if TYPE_CHECKING:
    from rich.table import Table

    from flowpool.lab.speed.bench import Measurement


def bench(
    out: Annotated[Path, typer.Option(help="Folder for bench.csv and bench.png.")] = Path("runs/bench"),
    large: Annotated[bool, typer.Option(help="Also one graph of 100,000 and one of 1,000,000 nodes.")] = True,
    ott_steps: Annotated[int, typer.Option(help="Steps of the paper's scheme on OTT, where OTT is installed.")] = 100,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time FlowPool beside other pools: every ratio is measured in this one run."""
    with plain_errors():
        from flowpool.lab.speed import run_bench, write_bench

        rows: list[Measurement] = []
        try:
            with progress() as bar:
                task = bar.add_task("bench", total=None, doing="")
                for row in run_bench(None if data is None else str(data), large, ott_steps):
                    rows.append(row)
                    bar.update(task, advance=1, doing=f"{row.case}, {row.method}")
        finally:  # what was measured before an interruption is not lost
            if rows:
                paths = write_bench(rows, out)
                if as_json:
                    print_json([asdict(row) for row in rows])
                else:
                    console().print(_table(rows))
                note(f"Table and plot: {', '.join(map(str, paths))}")


def _table(rows: list[Measurement]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("case")
    table.add_column("method")
    for head in ("epsilon", "forward ms", "backward ms", "/ GMT", "stationary", "peak MB"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row.case,
            row.method,
            _number(row.epsilon, "g"),
            f"{row.forward:.2f}",
            f"{row.backward:.2f}",
            _number(row.ratio, ".2f"),
            _number(row.converged, ".1%"),
            _number(row.megabytes, ".0f"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
