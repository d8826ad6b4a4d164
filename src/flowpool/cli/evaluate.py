"""``flowpool evaluate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from flowpool.cli.declared import show_all, with_options
from flowpool.cli.terminal import (
    MOST_SEED,
    DataOption,
    JsonOption,
    complete_dataset,
    complete_pools,
    fail,
    make_table,
    note,
    num_cores,
    plain_errors,
    print_json,
    progress,
    show,
)
from flowpool.lab.names import Metric, Preset, Protocol
from flowpool.lab.options import GROUPS, Columns

if TYPE_CHECKING:
    from flowpool.lab.configuration import Configuration
    from flowpool.lab.report import Conclusion
    from flowpool.lab.results import Failure, Result, Store, Task
    from flowpool.lab.workers import Workers

CAPTION = "± deviation over folds; difference with its Nadeau-Bengio corrected standard error; p not adjusted"


@with_options(*GROUPS)
def evaluate(
    dataset: Annotated[
        str,
        typer.Argument(
            help="Name of a dataset, see flowpool data; or a file: molecules (.csv), sets (.parquet), graphs (TU format).",
            autocompletion=complete_dataset,
        ),
    ] = "MUTAG",
    pools: Annotated[
        str, typer.Option(help="Pools to compare, separated by commas, or all.", autocompletion=complete_pools)
    ] = "flow,sort,sum,mean",
    protocol: Annotated[
        Protocol, typer.Option(help="One setting per fold; a grid and three final runs; or only a kernel machine.")
    ] = "paper",
    preset: Annotated[
        Preset, typer.Option(help="Model and training: the paper's, a strong one, or a strong one for molecules.")
    ] = "plain",
    metric: Annotated[
        Metric | None, typer.Option(help="What is compared.", show_default="accuracy; for numbers: rmse")
    ] = None,
    folds: Annotated[
        int | None, typer.Option(help="The first so many folds of each repeat.", show_default="all")
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often the folds are run, each time on new splits.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of weights, references and order.", min=0, max=MOST_SEED)] = 0,
    on: Annotated[
        Literal["local", "ray"], typer.Option(help="Compute on this machine, or on a Ray cluster.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster, or auto.", show_default="a new one on this machine")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "--jobs", help="Tasks at a time.", show_default="one per core")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.", show_default="runs/DATASET-BACKBONE-...")
    ] = None,
    finished: Annotated[
        Path | None, typer.Option("--show", help="Print the results of a folder again; nothing is computed.")
    ] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
    help_all: Annotated[
        bool,
        typer.Option("--help-all", help="Show every option: model, training, flow.", is_eager=True, callback=show_all),
    ] = False,
    **given: Any,
) -> None:
    """Compare pools fairly: the same folds, model, seeds and stopping rule for each, for classes and for numbers.

    Every finished fold is saved. If the command is killed, run it again: it continues where it stopped. Folds are published
    ones where there are any (Errica et al., 2020; Chen et al., 2020), else packaged ones, else drawn.
    """
    if finished is not None:
        with plain_errors():
            from flowpool.lab.results import Store

            store = Store.open(finished)
            for remark in store.configuration["notes"]:
                note(remark)
            _tell(_concluded(store, store.tasks()), as_json, len(store.tasks()))
        return
    with plain_errors():
        from flowpool.lab.configuration import folder_name
        from flowpool.lab.evaluate import chosen_pools, make_tasks, methods_of, origin_of_folds
        from flowpool.lab.evaluate import evaluate as computed
        from flowpool.lab.results import Store

        computers = _workers(on, address, workers)
        configuration = _configuration(dataset, data, protocol, preset, metric, seed, given)
        tasks = make_tasks(configuration, chosen_pools(pools, methods_of(configuration)), repeats, folds)
        identity = configuration.identity()
        store = Store(out or Path("runs") / folder_name(identity), identity)
        done = len(store.load_all(tasks))
        note(f"{configuration.source.name}: {origin_of_folds(identity, tasks)}.")
        for remark in identity["notes"]:
            note(remark)
    measured = configuration.measure
    ends = computed(configuration, tasks, store, computers)
    _run(configuration.source.name, ends, len(tasks), done, store.folder, measured.number, computers.doing)
    with plain_errors():
        concluded = _concluded(store, tasks)
        _tell(concluded, as_json, len(tasks))


def _workers(on: str, address: str | None, number: int | None) -> Workers:
    if on == "ray":
        from flowpool.lab.on_ray import RayWorkers

        return RayWorkers(address, number)
    if address is not None:
        raise ValueError(f"--address {address} needs --on ray.")
    from flowpool.lab.workers import LocalWorkers

    return LocalWorkers(num_cores() if number is None else number)


def _configuration(
    dataset: str,
    data: Path | None,
    protocol: Protocol,
    preset: str,
    metric: str | None,
    seed: int,
    given: dict[str, Any],
) -> Configuration:
    from flowpool.lab.configuration import Configuration
    from flowpool.lab.datasets import Source
    from flowpool.lab.datasets.catalog import data_folder

    chosen = {name: value for name, value in given.items() if value is not None}
    columns = Columns(**{field.name: chosen.pop(field.name) for field in fields(Columns) if field.name in chosen})
    # Absolute, since workers may have other folders and other variables.
    folder = data_folder(data)
    path = Path(dataset)
    place = str(path.resolve()) if path.exists() and Source(dataset).is_file else dataset
    source = Source(place, None if folder is None else str(folder.resolve()), columns)
    for name, convert in (("channels", int), ("layers", int), ("learning_rates", float)):
        if name in chosen:
            chosen[name] = _listed(chosen[name], convert, name.rstrip("s") if name == "learning_rates" else name)
    return Configuration.made(source, protocol, preset, metric, seed, chosen)


def _listed(text: str, convert: Callable[[str], Any], option: str) -> tuple[Any, ...]:
    """The values of a list that is separated by commas."""
    try:
        return tuple(convert(part) for part in text.split(","))
    except ValueError:
        flag = option.replace("_", "-")
        raise ValueError(f"--{flag} is {text!r}; pass numbers separated by commas.") from None


def _run(
    name: str,
    ends: Iterator[Result | Failure],
    total: int,
    done: int,
    folder: Path,
    number: Callable[[float], str],
    doing: Callable[[], str],
) -> None:
    """Shows folds as they come; an end that comes too early ends the program, and says how to go on."""
    if done:
        note(f"{done} of {total} folds are in {folder} already.")
    try:
        with progress() as bar:
            task = bar.add_task(name, total=total, completed=done, doing=doing())
            for end in ends:
                score = getattr(end, "score", None)  # a failure has none
                last = f"{end.pool}: {'failed' if score is None else number(score)}"
                running = doing()
                bar.update(task, advance=1, doing=f"{last}; running: {running}" if running else last)
    except KeyboardInterrupt:
        note(f"Stopped. Finished folds are in {folder}; the same command continues from there.")
        raise typer.Exit(130) from None
    except OSError as error:
        fail(f"{str(error).rstrip('.')}. Finished folds are in {folder}.", 1)
    except BrokenProcessPool:
        fail(
            f"A worker process died, perhaps because it ran out of memory. Finished folds are in {folder}; the same "
            "command continues from there; try fewer --workers.",
            1,
        )


def _concluded(store: Store, tasks: Sequence[Task]) -> Conclusion:
    from flowpool.lab.report import conclude

    if not store.load_all(tasks):
        failures = store.load_failures(tasks)
        if not failures:
            raise ValueError(f"No fold of {store.folder} is finished yet.")
        fail(f"Every fold failed; the first with {failures[0].reason}.", 1)
    return conclude(store, tasks)


def _tell(concluded: Conclusion, as_json: bool, total: int) -> None:
    """Prints the result, and ends the program if folds failed."""
    from flowpool.lab.comparison import table

    if as_json:
        print_json(concluded.as_data())
    else:
        heads, cells = table(concluded.rows, concluded.reference, concluded.metric)
        shown = make_table(*heads, title=concluded.title, caption=CAPTION)
        for line in cells:
            shown.add_row(*line)
        show(shown)
        for sentence in concluded.notes():
            typer.echo(sentence)
    for row in concluded.rows:
        if warned := [result for result in row.results if result.warnings]:
            note(f"{row.pool} warned in {len(warned)} folds, for example: {warned[0].warnings[0]}")
    note(f"Report: {concluded.path}")
    if concluded.failures:
        _end_with_failures(concluded.failures, total)


def _end_with_failures(failures: Sequence[Failure], total: int) -> NoReturn:
    first = failures[0]
    fail(
        f"{len(failures)} of {total} folds failed and are not part of the numbers; the first, {first.pool} in fold "
        f"{first.fold} of repeat {first.repeat}, with {first.reason} The same command tries them again.",
        1,
    )
