"""The command ``flowpool``. It reads options and prints; the work is done in :mod:`flowpool.lab`.

Whatever is slow to import is imported by the command that needs it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from flowpool.cli.explore import explore

if TYPE_CHECKING:
    from rich.progress import Progress

    from flowpool.lab.comparison import Row
    from flowpool.lab.evaluate import Configuration
    from flowpool.lab.speed.bench import Measurement

app = typer.Typer(
    help="Pooling of graph representations with Wasserstein gradient flows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Value = TypeVar("Value")
DataOption = Annotated[
    Path | None, typer.Option(help="Folder with datasets in TU format (zip or unpacked); default: FLOWPOOL_DATA.")
]


@contextmanager
def plain_errors() -> Iterator[None]:
    """Mistakes in what the user gave end the program with one sentence and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None


@app.command()
def evaluate(
    dataset: Annotated[str, typer.Argument(help="Name of the dataset, or SHAPES; see flowpool data.")] = "MUTAG",
    pools: Annotated[str, typer.Option(help="Pools to compare, separated by commas, or all.")] = "flow,sort,sum,mean",
    backbone: Annotated[
        Literal["sgc", "gin", "blind", "linear"], typer.Option(help="What stands before the pool.")
    ] = "sgc",
    propagation: Annotated[
        Literal["normalised", "raw"] | None, typer.Option(help="How sgc propagates.", show_default="normalised")
    ] = None,
    size: Annotated[
        Literal["none", "append", "scale"], typer.Option(help="Hand the number of nodes to the head, for every pool.")
    ] = "none",
    norm: Annotated[
        Literal["none", "nodes", "output", "both"], typer.Option(help="BatchNorm before or after every pool.")
    ] = "none",
    protocol: Annotated[
        Literal["paper", "errica"], typer.Option(help="One setting per fold, or a grid and three final runs.")
    ] = "paper",
    repeats: Annotated[int, typer.Option(help="Ten folds so many times, each time split anew.")] = 1,
    channels: Annotated[
        str | None, typer.Option(help="Node features d that the pool sees.", show_default="8; errica: 32,64")
    ] = None,
    learning_rate: Annotated[str | None, typer.Option(help="Of Adam.", show_default="0.01; errica: 0.01,0.001")] = None,
    points: Annotated[int, typer.Option(help="Points M per graph, for pools that have them.")] = 5,
    batch_size: Annotated[int, typer.Option(help="Graphs per training step.")] = 32,
    max_epochs: Annotated[int, typer.Option(help="Train at most so long.")] = 300,
    patience: Annotated[int, typer.Option(help="Epochs without a better validation value before the end.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of weights, references and order.")] = 0,
    jobs: Annotated[int | None, typer.Option(help="Processes.", show_default="one per core")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.", show_default="runs/DATASET-BACKBONE-...")
    ] = None,
    data: DataOption = None,
) -> None:
    """Compare pools fairly: the same folds, model, seeds and stopping rule for each.

    Every fold is kept as it comes. Killed and started again, the same command goes on where it was.
    """
    with plain_errors():
        from flowpool.lab.evaluate import ERRICA_GRID, PAPER_GRID, Configuration, Grid, make_tasks
        from flowpool.lab.evaluate import evaluate as compute
        from flowpool.lab.model import Shape
        from flowpool.lab.pools import POOLS
        from flowpool.lab.results import Store
        from flowpool.lab.training import Schedule

        workers = jobs if jobs is not None else _num_cores()
        if workers < 1:
            raise ValueError(f"--jobs is {workers}; at least 1 is needed.")
        default = PAPER_GRID if protocol == "paper" else ERRICA_GRID
        grid = Grid(
            _listed(channels, int, "channels") or default.channels,
            _listed(learning_rate, float, "learning-rate") or default.learning_rates,
            default.stop_on,
        )
        configuration = Configuration(
            dataset,
            None if data is None else str(data),
            protocol,
            grid,
            propagation or ("normalised" if backbone == "sgc" else None),
            Shape(backbone, num_points=points, size=size, norm=norm),
            Schedule(batch_size=batch_size, max_epochs=max_epochs, patience=patience),
            seed,
        )
        names = tuple(POOLS) if pools == "all" else tuple(name.strip() for name in pools.split(","))
        tasks = make_tasks(configuration, names, repeats)
        identity = configuration.identity()
        folder = out or Path("runs") / _folder_name(identity)
        store = Store(folder, identity)
        done = len(store.load_all(tasks))
    from concurrent.futures.process import BrokenProcessPool

    if done:
        typer.echo(f"{done} of {len(tasks)} folds are in {folder} already.")
    try:
        with _progress() as progress:
            bar = progress.add_task(dataset, total=len(tasks), completed=done, doing="")
            for result in compute(configuration, tasks, store, jobs=workers):
                text = f"{result.pool}: {100 * result.accuracy:.1f} %"
                progress.update(bar, advance=1, doing=text)
    except KeyboardInterrupt:
        typer.echo(f"Stopped. Finished folds are in {folder}; the same command goes on from there.", err=True)
        raise typer.Exit(130) from None
    except OSError as error:
        typer.secho(f"Error: {error}. Finished folds are in {folder}.", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except BrokenProcessPool:
        typer.secho(
            f"Error: a worker process died, perhaps for want of memory. Finished folds are in {folder}; the same "
            "command goes on from there, with fewer --jobs if you like.",
            fg=typer.colors.RED,
            err=True,
        )
        raise typer.Exit(1) from None
    with plain_errors():
        _conclude(configuration, identity, store.load_all(tasks), names, folder)


@app.command()
def data(data: DataOption = None) -> None:
    """List the known datasets: where they are, and whether they are the known ones."""
    with plain_errors():
        from rich.table import Table

        from flowpool.lab.datasets import list_datasets

        table = Table("dataset", "found in", "checksum", "what it is", box=None, header_style="bold")
        for entry in list_datasets(data):
            place = f"{entry.found.source}: {entry.found.path}" if entry.found else "-"
            table.add_row(entry.name, place, (entry.sha256 or "-")[:12], entry.note)
        _console().print(table)
        typer.echo("SHAPES, point clouds that mean and covariance cannot tell apart, is made when it is needed.")


@app.command()
def pool(
    source: Annotated[str, typer.Argument(metavar="INPUT", help="A dataset: its name, zip file or folder.")],
    output: Annotated[Path, typer.Argument(help="The table: a file name that ends with .parquet or .npz.")],
    points: Annotated[int, typer.Option(help="Points M per graph.")] = 5,
    epsilon: Annotated[float, typer.Option(help="Regularisation, relative to each graph's variance.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the reference.")] = 0,
    data: DataOption = None,
) -> None:
    """Pool the node features of every graph of a dataset to a table with one row per graph."""
    with plain_errors():
        from flowpool.lab.evaluate import load_graphs
        from flowpool.lab.tables import check_format, pool_dataset, write_table

        check_format(output)
        if not output.parent.is_dir():
            raise ValueError(f"{output.parent} is no folder; make it first.")
        path = Path(source)
        given = path.exists() and (path.suffix == ".zip" or path.is_dir())
        dataset = load_graphs(path.resolve().stem, str(path)) if given else load_graphs(source, data and str(data))
        with _progress() as progress:
            bar = progress.add_task(dataset.name, total=len(dataset), doing="")
            table = pool_dataset(
                dataset,
                points,
                epsilon=epsilon,
                seed=seed,
                on_progress=lambda count: progress.advance(bar, count),
            )
        write_table(table, output)
    graphs, _, features = table.points.shape
    typer.echo(f"{output}: {graphs} graphs, {points} points with {features} features each.")
    if table.num_unconverged:
        typer.echo(f"{table.num_unconverged} graphs are not pooled to the tolerance; see the column status.", err=True)


@app.command()
def kept(
    datasets: Annotated[list[str] | None, typer.Argument(help="Names of datasets; see flowpool data.")] = None,
    features: Annotated[
        Literal["linear", "propagated"], typer.Option(help="Node features behind a random linear layer, or without it.")
    ] = "linear",
    count: Annotated[
        int | None, typer.Option(help="Graphs of each dataset, drawn with the seed; default: all.")
    ] = None,
    points: Annotated[int, typer.Option(help="Points M per graph.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of weights, references and choice of graphs.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the table and the plot.")] = Path("runs/kept"),
    data: DataOption = None,
) -> None:
    """Measure what pooling keeps: exact Wasserstein distance between nodes and pooled points, for every pool of points."""
    with plain_errors():
        from rich.table import Table

        from flowpool.lab.evaluate import load_graphs
        from flowpool.lab.figures import style
        from flowpool.lab.kept import cloud_pools, kept_plot, kept_table, write_csv

        chosen = [load_graphs(name, None if data is None else str(data)) for name in datasets or ["MUTAG"]]
        rows = []
        with _progress() as progress:
            for dataset in chosen:
                total = len(dataset) if count is None else min(count, len(dataset))
                bar = progress.add_task(dataset.name, total=total, doing="")
                rows += kept_table(
                    dataset,
                    cloud_pools(),
                    features=features,
                    num_points=points,
                    count=count,
                    seed=seed,
                    on_progress=lambda done, bar=bar: progress.update(bar, advance=done),  # type: ignore[misc]
                )
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for place, head in enumerate(rows[0].as_row()):
            table.add_column(head, justify="left" if place < 2 else "right")
        for row in rows:
            table.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.as_row().values()))
        _console().print(table)
        out.mkdir(parents=True, exist_ok=True)
        write_csv(rows, out / "kept.csv")
        style.save(kept_plot(rows), out / "kept")
        typer.echo(f"Table and plot: {out}")


@app.command()
def figures(
    names: Annotated[list[str] | None, typer.Argument(help="Which figures; all unless given.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("figures"),
) -> None:
    """Compute the paper's figures: PNG, SVG, the data as CSV, and a caption each."""
    with plain_errors():
        from flowpool.lab.figures.bar import make_figures_with_bar

        for made in make_figures_with_bar(names or [], out):
            typer.echo(f"{made.name}: {made.caption}\n")


@app.command()
def bench(
    out: Annotated[Path, typer.Option(help="Folder for bench.csv and bench.png.")] = Path("runs/bench"),
    large: Annotated[bool, typer.Option(help="Also one graph of 100,000 and one of 1,000,000 nodes.")] = True,
    ott_steps: Annotated[int, typer.Option(help="Steps of the paper's scheme on OTT, where OTT is installed.")] = 100,
    data: DataOption = None,
) -> None:
    """Time FlowPool beside other pools: every ratio is measured in this one run."""
    with plain_errors():
        from flowpool.lab.speed import run_bench, write_bench

        rows: list[Measurement] = []
        try:
            with _progress() as progress:
                bar = progress.add_task("bench", total=None, doing="")
                for row in run_bench(None if data is None else str(data), large, ott_steps):
                    rows.append(row)
                    progress.update(bar, advance=1, doing=f"{row.case}, {row.method}")
        finally:  # what was measured before an interruption is not lost
            if rows:
                _console().print(_bench_table(rows))
                for path in write_bench(rows, out):
                    typer.echo(str(path))


def _bench_table(rows: list[Measurement]) -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("case")
    table.add_column("method")
    for head in ("epsilon", "forward ms", "backward ms", "/ GMT", "stationary", "peak MB"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row.case,
            row.method,
            _number(row.epsilon, "g"),
            f"{row.forward:.2f}",
            f"{row.backward:.2f}",
            _number(row.ratio, ".2f"),
            _number(row.converged, ".1%"),
            _number(row.megabytes, ".0f"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _conclude(
    configuration: Configuration, identity: dict[str, Any], results: list[Any], names: tuple[str, ...], folder: Path
) -> None:
    """Prints the table and writes the report."""
    from flowpool.lab.comparison import compare, reference_pool
    from flowpool.lab.files import write_atomically
    from flowpool.lab.report import describe, html_report

    reference = reference_pool(names)
    as_in_paper = configuration.dataset == "MUTAG" and configuration.shape.backbone == "sgc"
    rows = compare(results, names, reference, as_in_paper=as_in_paper)
    _console().print(_table(rows, reference, f"{configuration.dataset}: {describe(identity)}"))
    for row in rows:
        if warned := [result for result in row.results if result.warnings]:
            typer.echo(f"{row.pool} warned in {len(warned)} folds, for example: {warned[0].warnings[0]}", err=True)
    report = folder / "report.html"
    write_atomically(report, html_report(rows, reference, identity).encode())
    typer.echo(f"Report: {report}")


def _table(rows: list[Row], reference: str, title: str) -> Any:
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


def _progress() -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[doing]}"),
        console=_console(),
    )


def _console() -> Any:
    from rich.console import Console

    # Into a file or pipe, a table is not folded to the width of a terminal that is not there.
    return Console() if sys.stdout.isatty() else Console(width=140)


def _num_cores() -> int:
    """Cores that this process may use, where the system tells, else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _listed(text: str | None, convert: Callable[[str], Value], option: str) -> tuple[Value, ...]:
    """The values of a list that is separated by commas; empty if there is none."""
    if text is None:
        return ()
    try:
        return tuple(convert(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--{option} is {text!r}; pass numbers that are separated by commas.") from None


def _folder_name(identity: dict[str, Any]) -> str:
    """A name that is different for every configuration."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"{identity['dataset']}-{identity['backbone']}-{digest[:10]}"


app.command()(explore)


if __name__ == "__main__":
    app()
