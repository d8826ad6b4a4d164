"""``flowpool doctor``."""

from __future__ import annotations

import typer

from flowpool.cli.terminal import JsonOption, note, plain_errors, print_json


def doctor(as_json: JsonOption = False) -> None:
    """Check what is installed, and whether pooling is right here.

    Pooled points are checked against an independent solution. The exit code is 1 if a check fails. With a bug
    report, send this output and a small input that shows the bug.
    """
    with plain_errors():
        from flowpool.lab.doctor import examine

        found = examine(lambda check: note(f"{check.name} ..."))
        if as_json:
            print_json(found.as_data())
        else:
            packages = {name: value or "not installed" for name, value in found.packages.items()}
            for name, value in {**found.system, **packages, **found.variables}.items():
                typer.echo(f"{name:<18}{value}")
            typer.echo("")
            for check in found.checks:
                typer.echo(f"{check.verdict:<8}{check.name}: {check.detail}")
            typer.echo("")
            if found.is_healthy:
                typer.echo("All is well. With a bug report, send this output and a small input that shows the bug.")
            else:
                typer.echo("Something is wrong here. Please report it with this output.")
    if not found.is_healthy:
        raise typer.Exit(1)
