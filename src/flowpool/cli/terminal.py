"""What the sub-commands share: how they talk to the terminal, and options that mean the same everywhere."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from flowpool.lab import names

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table


_WIDTH_WITHOUT_TERMINAL = 140  # a table in a file is not folded to the width of a terminal that is not there
MOST_SEED = 2**32 - 1  # what NumPy takes, and with it scikit-learn
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ENDLESS = 10_000  # columns in which every table has room


@contextmanager
def plain_errors() -> Iterator[None]:
    """Mistakes in what the user gave end the program with one sentence and exit code 2."""
    try:
        yield
    except BrokenPipeError:  # the reader of our output has enough, as with ``| head``; typer ends quietly
        raise
    except ModuleNotFoundError as error:
        fail(
            f"The package {(error.name or str(error)).partition('.')[0]} is missing; install it with pip install 'flowpool[lab]'.",
            2,
        )
    except (ValueError, OSError) as error:
        if getattr(error, "errno", None) in _FULL:  # no mistake of the user; said at the end of the program
            raise
        fail(str(error), 2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # how torch says the same
            raise
        fail("There is not enough memory for this; use fewer points or fewer features.", 2)


def fail(sentence: str, code: int) -> NoReturn:
    """Ends the program with an error message."""
    typer.secho(f"Error: {sentence}", fg=typer.colors.RED, err=True, color=False if no_color() else None)
    raise typer.Exit(code) from None


def note(sentence: str) -> None:
    """Something to know that is not the result; it goes to standard error."""
    typer.echo(sentence, err=True)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, allow_nan=False))


def no_color() -> bool:
    return bool(os.environ.get("NO_COLOR"))


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    fixed = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH_WITHOUT_TERMINAL
    return Console(stderr=stderr, width=fixed, soft_wrap=False)


def make_table(*heads: str, words: int = 1, title: str | None = None, caption: str | None = None) -> Table:
    """A table without rows yet, whose first columns are words and whose others are numbers."""
    from rich.table import Table

    table = Table(title=title, caption=caption, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < words else "right")
    return table


def show(table: Table) -> None:
    """Prints a table; where its columns have no room beside each other, every row as a paragraph."""
    from rich.table import Table

    where = console()
    # Printed by themselves: a table folds its title and caption to the width of its columns.
    title, caption, table.title, table.caption = table.title, table.caption, None, None
    if title:
        where.print(title, style="italic", highlight=False)
    if where.measure(table, options=where.options.update(width=_ENDLESS)).minimum <= where.width:
        where.print(table)
    else:
        for row in zip(*(column.cells for column in table.columns), strict=True):
            part = Table.grid(padding=(0, 2, 0, 0))
            part.add_column(style="bold", no_wrap=True)
            part.add_column(overflow="fold")
            for column, cell in zip(table.columns, row, strict=True):
                if cell:
                    part.add_row(column.header, cell)
            where.print(part)
            where.print()
    if caption:
        where.print(caption, style="dim italic", highlight=False)


def progress() -> Progress:
    """A bar on standard error; silent where that is no terminal. A task has a field ``doing``."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    where = console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[doing]}"),
        console=where,
        disable=not where.is_terminal,
    )


def num_cores() -> int:
    """Cores that this process may use, where the system tells, else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def complete_dataset(incomplete: str) -> list[str]:
    return [name for name in names.DATASETS if name.startswith(incomplete)]


def complete_figure(incomplete: str) -> list[str]:
    return [name for name in names.FIGURES if name.startswith(incomplete)]


def complete_pools(incomplete: str) -> list[str]:
    """Completes the last entry of a list that is separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    chosen = before.split(",")
    return [before + comma + name for name in (*names.POOLS, "all") if name.startswith(last) and name not in chosen]


DataOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder with datasets in TU format, zipped or not; default: the environment variable FLOWPOOL_DATA."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PointsOption = Annotated[int, typer.Option(help="Points M per graph.")]
