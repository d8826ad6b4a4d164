"""``flowpool pool``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowpool.cli.terminal import (
    MOST_SEED,
    DataOption,
    PointsOption,
    complete_dataset,
    fail,
    note,
    plain_errors,
    progress,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from flowpool.bulk.sources import Source
    from flowpool.lab.datasets import GraphDataset
    from flowpool.lab.options import Columns


def pool(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="A Parquet file, a folder of them, molecules (.csv), or a dataset: its name, zip file or folder.",
            autocompletion=complete_dataset,
        ),
    ],
    output: Annotated[Path, typer.Argument(help="A file .parquet or .npz, or a folder for a table of many parts.")],
    nodes: Annotated[str, typer.Option(help="Column with the node features, a list of vectors per row.")] = "x",
    masses: Annotated[str | None, typer.Option(help="Column with node masses.", show_default="equal masses")] = None,
    smiles: Annotated[str | None, typer.Option(help="Column of a CSV file with molecules as SMILES.")] = None,
    target: Annotated[str | None, typer.Option(help="Columns of a CSV file to be kept beside the points: A,B.")] = None,
    points: PointsOption = 5,
    epsilon: Annotated[float, typer.Option(help="Regularisation, relative to each graph's variance.")] = 0.1,
    reference: Annotated[
        str,
        typer.Option(
            help="Where the flow starts: normal, kmeans (of 50,000 nodes), or a file (.npy, or a table pooled earlier)."
        ),
    ] = "normal",
    seed: Annotated[int, typer.Option(help="Seed of the reference.", min=0, max=MOST_SEED)] = 0,
    divergence: Annotated[bool, typer.Option("--divergence", help="Add a column that says what pooling lost.")] = False,
    on: Annotated[
        Literal["local", "ray"], typer.Option(help="Where to compute: on this machine, or on a Ray cluster.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster, or auto.", show_default="a new one on this machine")
    ] = None,
    data: DataOption = None,
) -> None:
    """Pool the nodes of every row or graph to a table of fixed width.

    Rows that cannot be pooled keep their place, with a status. If the command is killed, run it again: it continues where
    it stopped.
    """
    with plain_errors():
        from flowpool.arrow import STATUSES
        from flowpool.bulk.job import Settings, make_job
        from flowpool.bulk.store import check_npz
        from flowpool.lab.options import Columns
        from flowpool.status import Status

        if address is not None and on != "ray":
            raise ValueError(f"--address {address} needs --on ray.")
        rows, masses = _open(source, output, data, masses, Columns(smiles=smiles, target=target))
        if output.suffix == ".npz":
            check_npz(rows.schema, [nodes, masses or nodes])
        settings = Settings(nodes, masses, points, epsilon, divergence, reference, seed)
        job, store = make_job(rows, settings, output)
        rows = job.source
        parts = store.missing(rows.parts)
        if done := rows.num_rows - sum(part.stop - part.start for part in parts):
            note(f"{done} of {rows.num_rows} graphs are in {store.folder} already.")
        if on == "ray":
            from flowpool.bulk.on_ray import cluster
    try:
        with store.alone(), progress() as bar:
            task = bar.add_task(rows.name, total=rows.num_rows, completed=done, doing="")
            if on == "local" or not parts:
                for count in job.run(parts, store):
                    bar.advance(task, count)
            else:
                from flowpool.bulk import on_ray

                with cluster(address):
                    for count in on_ray.run(job, parts, store):
                        bar.advance(task, count)
            counts = store.statuses(rows.parts)
            store.finish(rows.parts, job.empty())
    except KeyboardInterrupt:
        note(f"Stopped. Finished parts are in {store.folder}; the same command continues from there.")
        raise typer.Exit(130) from None
    except (OSError, ValueError) as error:
        reason = str(error).rstrip(".")  # the system's own have none
        kept = len(store.missing(rows.parts)) < len(rows.parts)
        fail(f"{reason}." + f" Finished parts are in {store.folder}; the same command continues from there." * kept, 1)
    typer.echo(f"{output}: {rows.num_rows} graphs, {points} points with {job.reference.shape[1]} features each.")
    for name, advice in STATUSES.items():
        if counts[name] and not (name in Status.__members__ and Status[name].converged):
            note(f"{counts[name]} {'graph is' if counts[name] == 1 else 'graphs are'} {name}. {advice}")


def _open(
    source: str, output: Path, data: Path | None, masses: str | None, columns: Columns
) -> tuple[Source, str | None]:
    """The rows, and the column with their masses."""
    from flowpool.bulk.sources import ParquetSource, TableSource, parquet_files

    path = Path(source)
    if path.suffix == ".parquet" or (path.is_dir() and parquet_files(path)):
        if not path.exists():
            raise ValueError(f"{path} does not exist.")
        if columns.smiles or columns.target:
            raise ValueError(f"--smiles and --target are options for a CSV file; {path} has columns that are all kept.")
        if output.resolve().is_relative_to(path.resolve()):
            raise ValueError(f"The output {output} is the input {path}, or lies inside it; put it elsewhere.")
        return ParquetSource.of(path), masses
    from flowpool.lab import datasets

    dataset = datasets.Source(source, None if data is None else str(data), columns).checked(targets=False).load()
    for remark in dataset.notes:
        note(remark)
    if dataset.masses is not None:
        masses = masses or "masses"
    return TableSource(dataset.name, 1024, _as_table(dataset, (columns.target or "label").split(","))), masses


def _as_table(dataset: GraphDataset, targets: list[str]) -> pa.Table:
    """One row per graph: what it is, what is known of it, and its nodes."""
    import pyarrow as pa

    starts = dataset.node_ptr.numpy()
    vectors = pa.FixedSizeListArray.from_arrays(dataset.features.numpy().ravel(), dataset.num_features)
    labels = dataset.labels.reshape(len(dataset), -1).T.numpy()  # (T, B)
    columns = {
        "graph": pa.array(range(len(dataset)), pa.int64()),
        **({"place": dataset.places} if dataset.places else {}),
        **dict(zip(targets, labels, strict=False)),  # molecules may come without any
        "num_nodes": dataset.node_ptr.diff().numpy(),
        "x": pa.LargeListArray.from_arrays(starts, vectors),
    }
    if dataset.masses is not None:
        columns["masses"] = pa.LargeListArray.from_arrays(starts, dataset.masses.numpy())
    return pa.table(columns)
