"""Runs the grid of docs/reproduction.md and writes its table there; killed and started again, it goes on.

python benchmarks/reproduction.py                                   # everything, about two hours on one core
python benchmarks/reproduction.py --cells none-normalised-none,mass-normalised-none --repeats 3
python benchmarks/reproduction.py --list
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from flowpool.lab.paper import grid as reproduction
from flowpool.lab.results import Failure

PAGE = Path(__file__).parents[1] / "docs" / "reproduction.md"
BEGIN, END = "<!-- grid: written by benchmarks/reproduction.py -->", "<!-- end of grid -->"


def main(
    cells: Annotated[str | None, typer.Option(help="Names of cells, separated by commas.", show_default="all")] = None,
    repeats: Annotated[str, typer.Option(help="Numbers of repeats, separated by commas.")] = "3,4,5,6,7",
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the folds.")] = Path("runs/reproduction"),
    write: Annotated[bool, typer.Option(help="Write the table into docs/reproduction.md.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Show the names of the cells and end.")] = False,
) -> None:
    """Run the cells and print their table."""
    grid = reproduction.cells()
    if names:
        typer.echo("\n".join(cell.name for cell in grid))
        return
    chosen = [cell for cell in grid if cells is None or cell.name in cells.split(",")]
    if not chosen:
        raise typer.BadParameter(f"no cell is called {cells}; --list shows the names.")
    numbers = [int(number) for number in repeats.split(",")]
    began = time.perf_counter()
    for cell in chosen:
        for end in reproduction.run_cell(cell, numbers, out, jobs):
            how = end.reason if isinstance(end, Failure) else f"{100 * end.score:.1f} %"
            typer.echo(f"{cell.name}: {end.pool}, repeat {end.repeat}, fold {end.fold}: {how}", err=True)
    table = reproduction.table(chosen, numbers, out)
    typer.echo(table)
    typer.echo(f"{time.perf_counter() - began:.0f} s", err=True)
    if write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
