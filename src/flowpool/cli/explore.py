"""``flowpool explore``: the page to play with."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from flowpool.cli.terminal import DataOption, fail, note, plain_errors


def explore(
    file: Annotated[
        Path | None,
        typer.Argument(help="Your own: molecules (.csv, .tsv), sets (.parquet), or a TU dataset (.zip, folder)."),
    ] = None,
    smiles: Annotated[str | None, typer.Option(help="Column of the molecules.")] = None,
    nodes: Annotated[str | None, typer.Option(help="Column of the sets of vectors.")] = None,
    masses: Annotated[str | None, typer.Option(help="Column of the masses of the nodes.")] = None,
    target: Annotated[str | None, typer.Option(help="Column to be shown beside each graph.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder with results of flowpool evaluate.")] = Path("runs"),
    data: DataOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 0,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """Play with pooling in the browser.

    Drag nodes, look at graphs (your own, too), compare pools, read results. The first line printed is the address. Only this
    machine can open it. Ctrl-C stops it.
    """
    with plain_errors():
        from flowpool.explore.server import make_explorer

        own = None
        if file is not None:
            from flowpool.lab.datasets.source import Source
            from flowpool.lab.options import Columns

            columns = Columns(smiles=smiles, nodes=nodes, masses=masses, target=target)
            own = Source(str(file), None, columns).checked(targets=False)
            for sentence in own.load().notes:
                note(sentence)
        elif given := [name for name, value in {"smiles": smiles, "nodes": nodes, "masses": masses}.items() if value]:
            fail(f"--{given[0]} names a column of a file; give the file, too: flowpool explore FILE.", 2)

    if data is not None and not data.exists():
        fail(f"The folder {data}, given as --data, does not exist.", 2)
    try:
        explorer = make_explorer(None if data is None else str(data), runs, port, own)
    except OSError as error:
        fail(
            f"Port {port} cannot be used: {error.strerror}. Pass another --port, or leave it out to take a free one.", 2
        )
    typer.echo(explorer.url)
    typer.echo("Ctrl-C stops it.", err=True)
    threading.Thread(target=explorer.warm_up, daemon=True).start()
    try:
        if open_page and not webbrowser.open(explorer.url):
            typer.echo("No browser was found here; open the address yourself.", err=True)
        explorer.serve_forever()
    except KeyboardInterrupt:
        typer.echo("Stopping as soon as the current computation is done.", err=True)
    finally:
        explorer.server_close()
