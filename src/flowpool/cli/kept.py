"""``flowpool kept``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flowpool.cli.terminal import (
    MOST_SEED,
    DataOption,
    JsonOption,
    PointsOption,
    complete_dataset,
    make_table,
    note,
    plain_errors,
    print_json,
    progress,
    show,
)

if TYPE_CHECKING:
    from flowpool.lab.datasets import GraphDataset


_LOST = (
    "mean, median: what was lost, W_2^2 / R^2; 0 keeps the nodes as they are, 1 loses as much as their mean does. "
    "nearest: share of the graphs on which no pool lost less. divergence_*: the same for S_eps / R^2."
)
_KEPT = (
    "correlation, error (mean, relative): of distances between pooled graphs with exact W_2. neighbours: share of the five "
    "nearest graphs kept. accuracy: of a support vector machine on these distances."
)


def kept(
    datasets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of datasets; see flowpool data.", autocompletion=complete_dataset, show_default="MUTAG"
        ),
    ] = None,
    features: Annotated[
        Literal["linear", "propagated"], typer.Option(help="Node features after a random linear layer, or without one.")
    ] = "linear",
    count: Annotated[
        int | None, typer.Option(help="Number of graphs of each dataset, drawn with the seed.", show_default="all")
    ] = None,
    points: PointsOption = 5,
    between: Annotated[
        bool,
        typer.Option(
            "--between", help="What is kept of the distances between graphs, against the number of points, 2 to 16."
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Seed of weights, references and choice of graphs.", min=0, max=MOST_SEED)
    ] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the table and the plot.")] = Path("runs/kept"),
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how much of the nodes pooled points keep.

    In exact Wasserstein distances from nodes to pooled points, for every pool that gives points.
    """
    with plain_errors():
        from flowpool.lab.datasets import load_graphs
        from flowpool.lab.kept import cloud_pools, kept_plot, kept_table, write_csv
        from flowpool.lab.paper import style

        chosen = [load_graphs(name, None if data is None else str(data)) for name in datasets or ["MUTAG"]]
        if between:
            _between(chosen, count, seed, out, as_json)
            return
        rows = []
        with progress() as bar:
            for dataset in chosen:
                total = len(dataset) if count is None else min(count, len(dataset))
                task = bar.add_task(dataset.name, total=total, doing="")
                rows += kept_table(
                    dataset,
                    cloud_pools(),
                    features=features,
                    num_points=points,
                    count=count,
                    seed=seed,
                    on_progress=lambda done, task=task: bar.update(task, advance=done),  # type: ignore[misc]
                )
        out.mkdir(parents=True, exist_ok=True)
        write_csv(rows, out / "kept.csv")
        style.save(kept_plot(rows), out / "kept")
        if as_json:
            print_json([row.as_row() for row in rows])
        else:
            _print_table([row.as_row() for row in rows], _LOST)
        note(f"Table and plot: {out}")


def _between(graphs: Sequence[GraphDataset], count: int | None, seed: int, out: Path, as_json: bool) -> None:
    from flowpool.lab.between import METHODS, POINTS, between_plot, between_table, write_csv
    from flowpool.lab.paper import style

    rows = []
    with progress() as bar:
        for dataset in graphs:
            task = bar.add_task(dataset.name, total=1 + len(METHODS) * len(POINTS), doing="")
            rows += between_table(
                dataset,
                count=count,
                seed=seed,
                on_progress=lambda done, task=task: bar.update(task, advance=done),  # type: ignore[misc]
            )
    out.mkdir(parents=True, exist_ok=True)
    write_csv(rows, out / "between.csv")
    style.save(between_plot(rows), out / "between")
    lines = [asdict(row) for row in rows]
    if as_json:
        print_json(lines)
    else:
        _print_table(lines, _KEPT)
    note(f"Table and plot: {out}")


def _print_table(lines: Sequence[dict[str, Any]], caption: str) -> None:
    table = make_table(*lines[0], words=3, caption=caption)
    for line in lines:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in line.values()))
    show(table)
