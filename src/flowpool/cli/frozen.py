"""``flowpool evaluate --protocol frozen``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flowpool.cli.terminal import (
    CAPTION,
    fail,
    make_table,
    note,
    plain_errors,
    print_json,
    run_folds,
    show,
    tell_failures,
)

if TYPE_CHECKING:
    from rich.table import Table

    from flowpool.lab.frozen.summary import Conclusion

_OF_TRAINING = (
    "preset",
    "backbone",
    "propagation",
    "size",
    "norm",
    "channels",
    "layers",
    "learning_rate",
    "batch_size",
    "max_epochs",
    "patience",
    "padding",
    "epsilon",
    "relative",
    "reference",
    "reference_seed",
    "debias",
    "steps",
    "step_size",
    "update_step",
    "ridge",
    "gradient",
)
_POINTS = 8


def evaluate_frozen(
    context: typer.Context,
    dataset: str,
    pools: str,
    repeats: int,
    folds: int | None,
    points: int | None,
    seed: int,
    workers: int,
    out: Path | None,
    data: Path | None,
    as_json: bool,
) -> None:
    """Compares embeddings and kernels by a support vector machine; arguments as in ``flowpool evaluate``."""
    with plain_errors():
        from flowpool.lab import frozen
        from flowpool.lab.evaluate import folder_name, origin_of_folds

        if given := [name for name in _OF_TRAINING if _is_given(context, name)]:
            option = given[0].replace("_", "-")
            raise ValueError(
                f"--{option} is about training, and nothing is trained in the frozen protocol; leave it out."
            )
        num_points = _POINTS if points is None else points
        configuration = frozen.Frozen(dataset, None if data is None else str(data), num_points, seed=seed)
        chosen = frozen.chosen_methods(pools)
        tasks = frozen.make_tasks(configuration, chosen, repeats, folds)
        identity = configuration.identity()
        folder = out or Path("runs") / folder_name(identity | {"backbone": "frozen"})
        store = frozen.FrozenStore(folder, identity)
        done = len(store.load_all(tasks))
        note(f"{dataset}: {origin_of_folds(configuration, tasks)}.")
    run_folds(dataset, frozen.evaluate(configuration, tasks, store, jobs=workers), len(tasks), done, folder)
    with plain_errors():
        if not store.load_all(tasks):
            fail(f"Every fold failed; the first with {store.load_failures(tasks)[0].reason}.", 1)
        concluded = frozen.conclude(configuration, store.load_all(tasks), chosen, folder)
        if as_json:
            print_json(concluded.as_data())
        else:
            show(_table(concluded, dataset))
            for sentence in concluded.sources:
                typer.echo(sentence)
        for row in concluded.rows:
            if warned := [result for result in row.results if result.warnings]:
                note(f"{row.pool} warned in {len(warned)} folds, for example: {warned[0].warnings[0]}")
        note(f"Report: {concluded.path}")
    if failures := store.load_failures(tasks):
        tell_failures(failures, len(tasks))


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _table(concluded: Conclusion, dataset: str) -> Table:
    from flowpool.lab.frozen.summary import cells, describe, heads

    title = f"{dataset}: {describe(concluded.configuration)}; {concluded.folds}"
    table = make_table(*heads(concluded.reference), title=title, caption=CAPTION)
    for row in concluded.rows:
        table.add_row(*cells(row))
    return table
