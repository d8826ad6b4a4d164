"""``flowpool evaluate``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowpool.cli.frozen import evaluate_frozen
from flowpool.cli.terminal import (
    CAPTION,
    MOST_SEED,
    DataOption,
    JsonOption,
    complete_dataset,
    complete_pools,
    fail,
    listed,
    make_table,
    note,
    num_cores,
    plain_errors,
    print_json,
    run_folds,
    show,
    tell_failures,
)
from flowpool.lab.names import (
    Backbone,
    Gradient,
    Norm,
    Padding,
    Preset,
    Propagation,
    Protocol,
    Reference,
    Size,
    UpdateStep,
)

if TYPE_CHECKING:
    from rich.table import Table

    from flowpool.lab.comparison import Row

_MODEL, _FLOW, _TRAINING, _RUN = "Model", "Settings of the flow", "Training", "Running"


def evaluate(
    context: typer.Context,
    dataset: Annotated[
        str,
        typer.Argument(help="Name of the dataset, or SHAPES; see flowpool data.", autocompletion=complete_dataset),
    ] = "MUTAG",
    pools: Annotated[
        str, typer.Option(help="Pools to compare, separated by commas, or all.", autocompletion=complete_pools)
    ] = "flow,sort,sum,mean",
    protocol: Annotated[
        Protocol,
        typer.Option(
            help="One setting per fold; a grid search and three final runs; or only a support vector machine."
        ),
    ] = "paper",
    preset: Annotated[
        Preset,
        typer.Option(
            help="The paper's model and training; or a strong model: standardised features, three GIN layers that are all "
            "pooled, a head with a hidden layer, dropout, weight decay. Other options override parts of it."
        ),
    ] = "plain",
    repeats: Annotated[int, typer.Option(help="How often the ten folds are run, each time on new splits.")] = 1,
    folds: Annotated[
        int | None, typer.Option(help="Run the first so many folds of each repeat only.", show_default="all")
    ] = None,
    backbone: Annotated[
        Backbone | None,
        typer.Option(help="Network before the pool.", show_default="sgc; strong: gin", rich_help_panel=_MODEL),
    ] = None,
    propagation: Annotated[
        Propagation | None,
        typer.Option(help="How sgc propagates.", show_default="normalised", rich_help_panel=_MODEL),
    ] = None,
    size: Annotated[
        Size | None,
        typer.Option(
            help="Give the number of nodes to the head, for every pool.",
            show_default="none; strong: append",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    norm: Annotated[
        Norm | None,
        typer.Option(
            help="BatchNorm before or after every pool.", show_default="none; strong: both", rich_help_panel=_MODEL
        ),
    ] = None,
    channels: Annotated[
        str | None,
        typer.Option(
            help="Node features d that the pool sees.",
            show_default="8; strong: 32; errica: 32,64",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers of gin.", show_default="2; strong: 3; errica with strong: 2,3,5", rich_help_panel=_MODEL
        ),
    ] = None,
    points: Annotated[
        int | None,
        typer.Option(
            help="Points M per graph, for pools that have them.",
            show_default="5; strong, frozen: 8",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    padding: Annotated[
        Padding,
        typer.Option(
            help="Pad every graph with rows of zeros to the size of the largest: no; with rows of mass zero, which changes "
            "nothing; or with rows that weigh as much as a node.",
            rich_help_panel=_MODEL,
        ),
    ] = "none",
    epsilon: Annotated[float, typer.Option(help="Entropic regularisation.", rich_help_panel=_FLOW)] = 0.1,
    relative: Annotated[
        bool,
        typer.Option(
            "--relative/--absolute",
            help="Epsilon and reference in units of each graph, or as they are, as in the paper.",
            rich_help_panel=_FLOW,
        ),
    ] = True,
    reference: Annotated[Reference, typer.Option(help="Where the flow starts.", rich_help_panel=_FLOW)] = "normal",
    reference_seed: Annotated[
        int | None,
        typer.Option(
            help="Use one reference for all folds, drawn with this seed.",
            min=0,
            max=MOST_SEED,
            show_default="one for each fold",
            rich_help_panel=_FLOW,
        ),
    ] = None,
    debias: Annotated[
        bool,
        typer.Option(help="Descend the Sinkhorn divergence, or only the entropic loss.", rich_help_panel=_FLOW),
    ] = True,
    steps: Annotated[
        int | None, typer.Option(help="Most steps of the flow.", show_default="the layer's", rich_help_panel=_FLOW)
    ] = None,
    step_size: Annotated[
        float | None,
        typer.Option(help="Fixed step of Algorithm 1.", show_default="chosen by its error", rich_help_panel=_FLOW),
    ] = None,
    update_step: Annotated[
        UpdateStep | None,
        typer.Option(
            help="Run Algorithm 1 exactly as printed, with the step size as its tau.",
            show_default="our steps",
            rich_help_panel=_FLOW,
        ),
    ] = None,
    ridge: Annotated[
        float | None,
        typer.Option(help="Lambda of the backward pass.", show_default="the layer's", rich_help_panel=_FLOW),
    ] = None,
    gradient: Annotated[
        Gradient, typer.Option(help="Through the optimality condition, or through the steps.", rich_help_panel=_FLOW)
    ] = "implicit",
    learning_rate: Annotated[
        str | None,
        typer.Option(
            help="Learning rate of Adam.",
            show_default="0.01; errica: 0.01,0.001; strong: 0.002",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Graphs per training step.", rich_help_panel=_TRAINING)] = 32,
    max_epochs: Annotated[
        int | None,
        typer.Option(help="Longest training, in epochs.", show_default="300; strong: 80", rich_help_panel=_TRAINING),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            help="Stop after this many epochs without a better validation value.",
            show_default="20; strong: all",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(help="Seed of weights, references and order.", min=0, max=MOST_SEED, rich_help_panel=_TRAINING),
    ] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Number of processes.", show_default="one per core", rich_help_panel=_RUN)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results.", show_default="runs/DATASET-BACKBONE-...", rich_help_panel=_RUN),
    ] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare pools fairly: the same folds, model and seeds for each.

    Every finished fold is saved. If the command is killed, run it again: it continues where it stopped. Folds are the published
    ones of Errica et al. (2020) if splits/ in the data folder or beside it has them, else packaged ones, else drawn.
    """
    with plain_errors():
        workers = jobs if jobs is not None else num_cores()
        if workers < 1:
            raise ValueError(f"--jobs is {workers}; at least 1 is needed.")
    if protocol == "frozen":
        evaluate_frozen(context, dataset, pools, repeats, folds, points, seed, workers, out, data, as_json)
        return
    with plain_errors():
        from flowpool.lab import evaluate as lab
        from flowpool.lab.pools import FlowSettings
        from flowpool.lab.results import Store

        base = lab.PRESETS[preset]
        default = base.grids[protocol]
        shape = replace(
            base.shape, padding=padding, **_given(backbone=backbone, num_points=points, size=size, norm=norm)
        )
        schedule = replace(base.schedule, batch_size=batch_size, **_given(max_epochs=max_epochs))
        if patience is not None:
            schedule = replace(schedule, patience=patience)
        elif preset == "strong":  # whose learning rate falls until the last epoch
            schedule = replace(schedule, patience=schedule.max_epochs)
        if layers is not None and shape.backbone != "gin":
            raise ValueError(f"--layers is an option of the backbone gin; {shape.backbone} has one layer.")
        configuration = lab.Configuration(
            dataset,
            None if data is None else str(data),
            protocol,
            lab.Grid(
                listed(channels, int, "channels") or default.channels,
                listed(learning_rate, float, "learning-rate") or default.learning_rates,
                default.stop_on,
                listed(layers, int, "layers") or default.layers,
            ),
            propagation or ("normalised" if shape.backbone == "sgc" else None),
            shape,
            schedule,
            seed,
            FlowSettings(
                epsilon, relative, reference, reference_seed, debias, steps, step_size, update_step, ridge, gradient
            ),
        )
        chosen = lab.chosen_pools(pools)
        tasks = lab.make_tasks(configuration, chosen, repeats, folds)
        identity = configuration.identity()
        folder = out or Path("runs") / lab.folder_name(identity)
        store = Store(folder, identity)
        done = len(store.load_all(tasks))
        note(f"{dataset}: {lab.origin_of_folds(configuration, tasks)}.")
    run_folds(dataset, lab.evaluate(configuration, tasks, store, jobs=workers), len(tasks), done, folder)
    with plain_errors():
        from flowpool.lab.report import conclude, describe, verdict

        if not store.load_all(tasks):
            fail(f"Every fold failed; the first with {store.load_failures(tasks)[0].reason}.", 1)
        concluded = conclude(configuration, store, tasks)
        rows, first = concluded.rows, concluded.reference
        if as_json:
            print_json(concluded.as_data())
        else:
            show(_table(rows, first, f"{dataset}: {describe(identity)}; {concluded.folds}"))
            typer.echo(verdict(rows, first, identity))
        for row in rows:
            if warned := [result for result in row.results if result.warnings]:
                note(f"{row.pool} warned in {len(warned)} folds, for example: {warned[0].warnings[0]}")
        note(f"Report: {concluded.path}")
    if concluded.failures:
        tell_failures(concluded.failures, len(tasks))


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _table(rows: list[Row], reference: str, title: str) -> Table:
    from flowpool.lab.comparison import count, percent, points

    has_paper = any(row.paper is not None for row in rows)
    heads = ["accuracy %", *(["paper"] if has_paper else []), f"minus {reference}", "p", "folds", "ms/epoch"]
    table = make_table("pool", *heads, title=title, caption=CAPTION)
    for row in rows:
        found = row.difference
        cells = [row.pool, percent(row.accuracy)]
        if has_paper:
            cells.append(percent(row.paper) if row.paper else "")
        cells += [points(found), f"{found.p_value:.2f}"] if found else ["", ""]
        table.add_row(*cells, count(row), f"{1000 * row.seconds_per_epoch:.1f}")
    return table
