"""``flowpool data``."""

from __future__ import annotations

import typer

from flowpool.cli.terminal import DataOption, JsonOption, console, plain_errors, print_json


def data(data: DataOption = None, as_json: JsonOption = False) -> None:
    """List the known datasets: where each was found, and whether its graphs are the published ones."""
    with plain_errors():
        from flowpool.lab.datasets import list_datasets

        entries = list_datasets(data)
        if as_json:
            print_json([entry.as_data() for entry in entries])
            return
        from rich.table import Table

        table = Table("dataset", "found in", "checksum", "what it is", box=None, header_style="bold")
        for entry in entries:
            place = f"{entry.found.source}: {entry.found.path}" if entry.found else "-"
            table.add_row(entry.name, place, (entry.sha256 or "-")[:12], entry.note)
        console().print(table)
        typer.echo("SHAPES, point clouds that mean and covariance cannot tell apart, is made when it is needed.")
