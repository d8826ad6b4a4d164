"""The sub-commands in the order of ``flowpool --help``.

Whatever is slow to import is imported by the command that needs it, so that ``--help``, ``--version`` and the
completion of a shell answer at once.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from typing import Annotated, Any

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
    "Exit codes: 0, all done; 1, something failed along the way (a fold, a check, a full disk); "
    "2, a mistake in the arguments or the input, or a missing package; 130, interrupted."
)
_ROOM_FOR_PANELS = 80  # columns; in fewer, panels cut the names of options off


def _examples(*commands: str) -> str:
    """Text for the end of a help page; a blank line keeps each command on its own line."""
    return "\n\n".join(["Examples:", *commands])


app = typer.Typer(
    help="Pooling of graphs and sets with Wasserstein gradient flows.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= _ROOM_FOR_PANELS else None,
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


def _add(command: Callable[..., Any], panel: str, *examples: str) -> None:
    # Without a short help of its own, the list of commands in a narrow terminal shows its beginning and three dots.
    first = (inspect.getdoc(command) or "").partition("\n")[0]
    app.command(rich_help_panel=panel, short_help=first, epilog=_examples(*examples) if examples else None)(command)


_COMPARE, _DATA, _MACHINE = "Compare and measure", "Data", "This machine"
_add(
    evaluate,
    _COMPARE,
    "flowpool evaluate MUTAG --pools flow,sort,sum,mean",
    "flowpool evaluate PROTEINS --backbone gin --protocol errica --jobs 4",
    "flowpool evaluate MUTAG --pools all --json > table.json",
)
_add(kept, _COMPARE, "flowpool kept MUTAG ENZYMES --points 8", "flowpool kept --count 50 --json")
_add(bench, _COMPARE, "flowpool bench --no-large", "flowpool bench --json")
_add(explore, _COMPARE, "flowpool explore", "flowpool explore molecules.csv --smiles smiles")
_add(figures, _COMPARE, "flowpool figures", "flowpool figures flow circle --out f")
_add(
    pool,
    _DATA,
    "flowpool pool MUTAG table.parquet",
    "flowpool pool path/to/ENZYMES.zip table.npz --points 8",
    "flowpool pool molecules/ pooled/ --nodes x --masses w",
)
_add(data, _DATA, "flowpool data", "flowpool data --data folder --json")
_add(doctor, _MACHINE, "flowpool doctor", "flowpool doctor --json > doctor.json")
_add(compile, _MACHINE)
