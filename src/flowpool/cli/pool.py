"""``flowpool pool``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowpool.cli.terminal import DataOption, PointsOption, complete_dataset, note, plain_errors, progress


def pool(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT", help="A dataset: its name, zip file or folder.", autocompletion=complete_dataset
        ),
    ],
    output: Annotated[Path, typer.Argument(help="The table: a file name that ends with .parquet or .npz.")],
    points: PointsOption = 5,
    epsilon: Annotated[float, typer.Option(help="Regularisation, relative to each graph's variance.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the reference.")] = 0,
    data: DataOption = None,
) -> None:
    """Pool the node features of every graph of a dataset to a table with one row per graph."""
    with plain_errors():
        from flowpool.lab.evaluate import load_graphs
        from flowpool.lab.tables import check_output, pool_dataset, write_table

        check_output(output)
        path = Path(source)
        given = path.exists() and (path.suffix == ".zip" or path.is_dir())
        dataset = load_graphs(path.resolve().stem, str(path)) if given else load_graphs(source, data and str(data))
        with progress() as bar:
            task = bar.add_task(dataset.name, total=len(dataset), doing="")
            table = pool_dataset(
                dataset, points, epsilon=epsilon, seed=seed, on_progress=lambda count: bar.advance(task, count)
            )
        write_table(table, output)
    graphs, _, features = table.points.shape
    typer.echo(f"{output}: {graphs} graphs, {points} points with {features} features each.")
    if table.num_unconverged:
        note(f"{table.num_unconverged} graphs are not pooled to the tolerance; see the column status.")
