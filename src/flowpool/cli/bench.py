"""``flowpool bench``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowpool.cli.terminal import DataOption, JsonOption, make_table, note, plain_errors, print_json, progress, show

if TYPE_CHECKING:
    from rich.table import Table

    from flowpool.lab.speed import Measurement, TrainedRow


def bench(
    out: Annotated[Path, typer.Option(help="Folder for bench.csv, bench.png, trained.csv and device.csv.")] = Path(
        "runs/bench"
    ),
    large: Annotated[bool, typer.Option(help="Also measure one graph of 100,000 and one of 1,000,000 nodes.")] = True,
    ott_steps: Annotated[int, typer.Option(help="Steps of the paper's scheme with OTT, if OTT is installed.")] = 100,
    trained: Annotated[
        str | None,
        typer.Option(
            help="Measure only on features of trained networks, and epochs of training: for these datasets, or 'all'."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Measure only what layers ask of this device (cuda, mps, cpu): operations, waits, time."),
    ] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time FlowPool beside other pools, all in one run."""
    with plain_errors():
        from flowpool.lab.speed import processor, run_bench, run_trained, write_bench, write_rows
        from flowpool.lab.speed.trained import DATASETS

        folder = None if data is None else str(data)
        if device is not None:
            _on_device(device, folder, out, as_json)
            return
        names = DATASETS if trained in (None, "all") else trained.split(",")
        rows: list[Measurement] = []
        epochs: list[TrainedRow] = []
        try:
            with progress() as bar:
                task = bar.add_task("bench", total=None, doing="")
                for row in run_bench(folder, large, ott_steps) if trained is None else ():
                    rows.append(row)
                    bar.update(task, advance=1, doing=f"{row.case}, {row.method}")
                for epoch in run_trained(names, folder):
                    epochs.append(epoch)
                    bar.update(task, advance=1, doing=f"{epoch.case}, {epoch.method}")
        finally:  # what was measured before an interruption is not lost
            paths = write_bench(rows, out) if rows else []
            paths += [write_rows(epochs, out / "trained.csv")] if epochs else []
            if as_json and paths:
                print_json([*map(asdict, rows), *map(asdict, epochs)])
            else:
                for table in [*([_table(rows)] if rows else []), *([_trained_table(epochs)] if epochs else [])]:
                    show(table)
            if paths:
                note(f"{processor()}. Written: {', '.join(map(str, paths))}")


def _on_device(device: str, folder: str | None, out: Path, as_json: bool) -> None:
    from flowpool.lab.speed import device_name, run_on_device, write_rows

    rows = []
    with progress() as bar:
        task = bar.add_task("bench", total=None, doing="")
        for row in run_on_device(device, folder):
            rows.append(row)
            bar.update(task, advance=1, doing=f"{row.case}, {row.method}")
    path = write_rows(rows, out / "device.csv")
    if as_json:
        print_json(list(map(asdict, rows)))
        return
    table = make_table("case", "method", "pass", "operations", "waits", "copies", "ms", "both / GMT", words=3)
    for row in rows:
        counts = map(str, (row.operations, row.waits, row.copies))
        table.add_row(row.case, row.method, row.which, *counts, f"{row.milliseconds:.2f}", _number(row.ratio, ".2f"))
    show(table)
    note(f"{device_name(device)}. Written: {path}")


def _table(rows: list[Measurement]) -> Table:
    heads = ("epsilon", "forward ms", "backward ms", "/ GMT", "stationary", "peak MB")
    table = make_table("case", "method", *heads, words=2)
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


def _trained_table(rows: list[TrainedRow]) -> Table:
    heads = ("threads", "median ms", "worst ms", "/ GMT", "median / GMT", "epoch s", "stationary")
    more = ("singular", "settled", "slow graphs", "their steps")
    table = make_table("trained features", "method", *heads, *more, words=2)
    for row in rows:
        shares = (row.stationary, row.singular, row.settled, row.slow, row.slow_steps)
        table.add_row(
            row.case,
            row.method,
            str(row.threads),
            f"{row.median:.2f}",
            f"{row.worst:.2f}",
            f"{row.ratio:.2f}",
            f"{row.median_ratio:.2f}",
            f"{row.epoch:.2f}",
            *(_number(share, ".1%") for share in shares),
        )
    return table
