"""The command ``flowpool``: one thin file per sub-command. The work is done in :mod:`flowpool.lab`."""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130  # the exit code after Ctrl-C


def main() -> None:
    """The console script. It can be imported and run where the packages of the command are missing, and says so."""
    try:
        from flowpool.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print("The command flowpool needs packages of the extra lab: pip install 'flowpool[lab]'.", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        app(prog_name="flowpool")
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:
            # Whatever counts is written; to take torch apart would keep an impatient user waiting for seconds.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_INTERRUPTED)
        raise
