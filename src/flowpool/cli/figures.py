"""``flowpool figures``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowpool.cli.terminal import complete_figure, console, plain_errors


def figures(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which figures.", autocompletion=complete_figure, show_default="all")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("figures"),
) -> None:
    """Compute the paper's figures.

    Each as PNG and SVG, with its data as CSV, and a caption.
    """
    with plain_errors():
        from flowpool.lab.paper.bar import make_figures_with_bar

        for made in make_figures_with_bar(names or [], out, console(stderr=True)):
            typer.echo(f"{made.name}: {made.caption}\n")
