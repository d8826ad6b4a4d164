"""The sub-commands in the order of ``flowpool --help``.

Whatever is slow to import is imported by the command that needs it, so that ``--help``, ``--version`` and the
completion of a shell answer at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from flowpool import __version__
from flowpool.cli.bench import bench
from flowpool.cli.compile import compile
from flowpool.cli.data import data
from flowpool.cli.doctor import doctor
from flowpool.cli.evaluate import evaluate
from flowpool.cli.explore import explore
from flowpool.cli.figures import figures
from flowpool.cli.kept import kept
from flowpool.cli.pool import pool

EXIT_CODES = (
    "Exit codes: 0, all done; 1, something failed on the way (a fold, a check, a full disk); "
    "2, a mistake in what was given, or a missing package; 130, interrupted."
)


def _examples(*commands: str) -> str:
    """Text for the end of a help page; a blank line keeps each command on its own line."""
    return "\n\n".join(["Examples:", *commands])


app = typer.Typer(
    help="Pooling of graphs and sets with Wasserstein gradient flows.",
    epilog=_examples("flowpool evaluate MUTAG --pools flow,sum", "flowpool pool MUTAG table.parquet", EXIT_CODES),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"flowpool {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None: ...


app.command(
    rich_help_panel="Compare and measure",
    epilog=_examples(
        "flowpool evaluate MUTAG --pools flow,sort,sum,mean",
        "flowpool evaluate PROTEINS --backbone gin --protocol errica --jobs 4",
        "flowpool evaluate MUTAG --pools all --json > table.json",
    ),
)(evaluate)
app.command(
    rich_help_panel="Compare and measure",
    epilog=_examples("flowpool kept MUTAG ENZYMES --points 8", "flowpool kept --count 50 --json"),
)(kept)
app.command(
    rich_help_panel="Compare and measure", epilog=_examples("flowpool bench --no-large", "flowpool bench --json")
)(bench)
app.command(
    rich_help_panel="Compare and measure",
    epilog=_examples("flowpool explore", "flowpool explore --no-open --port 8080"),
)(explore)
app.command(
    rich_help_panel="Compare and measure", epilog=_examples("flowpool figures", "flowpool figures flow circle --out f")
)(figures)
app.command(
    rich_help_panel="Data",
    epilog=_examples(
        "flowpool pool MUTAG table.parquet",
        "flowpool pool path/to/ENZYMES.zip table.npz --points 8",
        "flowpool pool molecules/ pooled/ --nodes x --masses w",
    ),
)(pool)
app.command(rich_help_panel="Data", epilog=_examples("flowpool data", "flowpool data --data folder --json"))(data)
app.command(
    rich_help_panel="This machine", epilog=_examples("flowpool doctor", "flowpool doctor --json > doctor.json")
)(doctor)
app.command(rich_help_panel="This machine")(compile)
