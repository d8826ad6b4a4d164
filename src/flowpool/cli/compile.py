"""``flowpool compile``."""

from __future__ import annotations

import time

import typer

from flowpool.cli.terminal import plain_errors, progress


def compile() -> None:  # noqa: A001 - the name of the sub-command
    """Compile the kernels now, so that no program waits for them."""
    with plain_errors():
        from flowpool.lab.compile import compile_kernels, num_calls

        began = time.perf_counter()
        total = num_calls()
        with progress() as bar:
            task = bar.add_task("compile", total=total, doing="")
            for done, name in enumerate(compile_kernels()):
                bar.update(task, completed=done, doing=name)
            bar.update(task, completed=total, doing="")
    typer.echo(f"The kernels are compiled; it took {time.perf_counter() - began:.0f} s.")
