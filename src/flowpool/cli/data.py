"""``flowpool data``."""

from __future__ import annotations

import typer

from flowpool.cli.terminal import DataOption, JsonOption, make_table, plain_errors, print_json, show


def data(data: DataOption = None, as_json: JsonOption = False) -> None:
    """List the known datasets, and where each was found.

    The checksum says whether its graphs are the published ones.
    """
    with plain_errors():
        from flowpool.lab.datasets import list_datasets

        entries = list_datasets(data)
        if as_json:
            print_json([entry.as_data() for entry in entries])
            return
        table = make_table("dataset", "found in", "checksum", "what it is", words=4)
        for entry in entries:
            place = f"{entry.found.source}: {entry.found.path}" if entry.found else "-"
            table.add_row(entry.name, place, (entry.sha256 or "-")[:12], entry.note)
        show(table)
        typer.echo("SHAPES, point clouds that mean and covariance cannot tell apart, is generated when needed.")
