"""``flowpool evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowpool.cli.terminal import (
    DataOption,
    JsonOption,
    complete_dataset,
    complete_pools,
    console,
    fail,
    listed,
    note,
    num_cores,
    plain_errors,
    print_json,
    progress,
)
from flowpool.lab.names import Backbone, Norm, Propagation, Protocol, Size

if TYPE_CHECKING:
    from rich.table import Table

    from flowpool.lab.comparison import Row

_MODEL, _TRAINING, _RUN = "Model", "Training", "Running"


def evaluate(
    dataset: Annotated[
        str,
        typer.Argument(help="Name of the dataset, or SHAPES; see flowpool data.", autocompletion=complete_dataset),
    ] = "MUTAG",
    pools: Annotated[
        str, typer.Option(help="Pools to compare, separated by commas, or all.", autocompletion=complete_pools)
    ] = "flow,sort,sum,mean",
    protocol: Annotated[Protocol, typer.Option(help="One setting per fold, or a grid and three final runs.")] = "paper",
    repeats: Annotated[int, typer.Option(help="How often the ten folds are run, each time on new splits.")] = 1,
    backbone: Annotated[Backbone, typer.Option(help="What stands before the pool.", rich_help_panel=_MODEL)] = "sgc",
    propagation: Annotated[
        Propagation | None,
        typer.Option(help="How sgc propagates.", show_default="normalised", rich_help_panel=_MODEL),
    ] = None,
    size: Annotated[
        Size,
        typer.Option(help="Hand the number of nodes to the head, for every pool.", rich_help_panel=_MODEL),
    ] = "none",
    norm: Annotated[Norm, typer.Option(help="BatchNorm before or after every pool.", rich_help_panel=_MODEL)] = "none",
    channels: Annotated[
        str | None,
        typer.Option(
            help="Node features d that the pool sees.", show_default="8; errica: 32,64", rich_help_panel=_MODEL
        ),
    ] = None,
    points: Annotated[
        int, typer.Option(help="Points M per graph, for pools that have them.", rich_help_panel=_MODEL)
    ] = 5,
    learning_rate: Annotated[
        str | None, typer.Option(help="Of Adam.", show_default="0.01; errica: 0.01,0.001", rich_help_panel=_TRAINING)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Graphs per training step.", rich_help_panel=_TRAINING)] = 32,
    max_epochs: Annotated[int, typer.Option(help="Longest training, in epochs.", rich_help_panel=_TRAINING)] = 300,
    patience: Annotated[
        int, typer.Option(help="Epochs without a better validation value before the end.", rich_help_panel=_TRAINING)
    ] = 20,
    seed: Annotated[int, typer.Option(help="Seed of weights, references and order.", rich_help_panel=_TRAINING)] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Processes.", show_default="one per core", rich_help_panel=_RUN)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results.", show_default="runs/DATASET-BACKBONE-...", rich_help_panel=_RUN),
    ] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare pools fairly: the same folds, model, seeds and stopping rule for each.

    Every fold is kept as it comes. Killed and started again, the same command goes on where it was.
    """
    with plain_errors():
        from flowpool.lab import evaluate as lab
        from flowpool.lab.model import Shape
        from flowpool.lab.results import Store
        from flowpool.lab.training import Schedule

        workers = jobs if jobs is not None else num_cores()
        if workers < 1:
            raise ValueError(f"--jobs is {workers}; at least 1 is needed.")
        default = lab.GRIDS[protocol]
        configuration = lab.Configuration(
            dataset,
            None if data is None else str(data),
            protocol,
            lab.Grid(
                listed(channels, int, "channels") or default.channels,
                listed(learning_rate, float, "learning-rate") or default.learning_rates,
                default.stop_on,
            ),
            propagation or ("normalised" if backbone == "sgc" else None),
            Shape(backbone, num_points=points, size=size, norm=norm),
            Schedule(batch_size=batch_size, max_epochs=max_epochs, patience=patience),
            seed,
        )
        chosen = lab.chosen_pools(pools)
        tasks = lab.make_tasks(configuration, chosen, repeats)
        identity = configuration.identity()
        folder = out or Path("runs") / lab.folder_name(identity)
        store = Store(folder, identity)
        done = len(store.load_all(tasks))
    from concurrent.futures.process import BrokenProcessPool

    if done:
        note(f"{done} of {len(tasks)} folds are in {folder} already.")
    try:
        with progress() as bar:
            task = bar.add_task(dataset, total=len(tasks), completed=done, doing="")
            for result in lab.evaluate(configuration, tasks, store, jobs=workers):
                bar.update(task, advance=1, doing=f"{result.pool}: {100 * result.accuracy:.1f} %")
    except KeyboardInterrupt:
        note(f"Stopped. Finished folds are in {folder}; the same command goes on from there.")
        raise typer.Exit(130) from None
    except OSError as error:
        fail(f"{error}. Finished folds are in {folder}.", 1)
    except BrokenProcessPool:
        fail(
            f"A worker process died, perhaps for want of memory. Finished folds are in {folder}; the same "
            "command goes on from there, with fewer --jobs if you like.",
            1,
        )
    with plain_errors():
        from flowpool.lab.report import conclude, describe

        concluded = conclude(configuration, store.load_all(tasks), chosen, folder)
        if as_json:
            print_json(concluded.as_data())
        else:
            console().print(_table(concluded.rows, concluded.reference, f"{dataset}: {describe(identity)}"))
        for row in concluded.rows:
            if warned := [result for result in row.results if result.warnings]:
                note(f"{row.pool} warned in {len(warned)} folds, for example: {warned[0].warnings[0]}")
        note(f"Report: {concluded.path}")


def _table(rows: list[Row], reference: str, title: str) -> Table:
    from rich.table import Table

    from flowpool.lab.comparison import percent, points

    has_paper = any(row.paper is not None for row in rows)
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("pool")
    for head in ["accuracy %", *(["paper"] if has_paper else []), f"minus {reference}", "p", "folds", "ms/epoch"]:
        table.add_column(head, justify="right")
    for row in rows:
        found = row.difference
        cells = [row.pool, percent(row.accuracy)]
        if has_paper:
            cells.append(percent(row.paper) if row.paper else "")
        cells += [points(found), f"{found.p_value:.2f}"] if found else ["", ""]
        table.add_row(*cells, str(row.accuracy.count), f"{1000 * row.seconds_per_epoch:.1f}")
    table.caption = "± deviation over folds; difference in points (Nadeau-Bengio corrected standard error)"
    table.caption_justify = "left"
    return table
