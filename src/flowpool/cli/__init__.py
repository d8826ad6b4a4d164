"""The command ``flowpool``: one thin file per sub-command. The work is done in :mod:`flowpool.lab`."""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130  # the exit code after Ctrl-C


def main() -> None:
    """The console script. It can be run where the packages of the command are missing, and says so."""
    if sys.stderr is None:  # closed by the caller, who does not want to hear of anything
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open until the end
    if sys.stdout is None:
        print("Error: The standard output is closed; send it to a file, or to /dev/null.", file=sys.stderr)
        raise SystemExit(1)
    try:
        from flowpool.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print("The command flowpool needs packages of the extra cli: pip install 'flowpool[cli]'.", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        app(prog_name="flowpool")
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:
            # Whatever counts is written; to take torch apart would keep an impatient user waiting for seconds.
            sys.stderr.flush()
            os._exit(_INTERRUPTED)
        raise
    except OSError as error:  # a full device, perhaps behind the standard output
        print(f"Error: {error.filename or 'The output'} cannot be written: {error.strerror}.", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries again as it ends
        raise SystemExit(1) from None
