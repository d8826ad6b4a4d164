"""``flowpool explore`` from start to end, as a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner

from flowpool.cli.app import app

# A shell hands its background jobs an interrupt that is ignored.
START = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = [sys.executable, "-c", f"{START}; from flowpool.cli.app import app; app()", "explore"]


@contextmanager
def running(*options: str, **changes: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | changes
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_first_line_is_the_address_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    with running("--no-open", "--runs", str(tmp_path)) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=60) as response:  # noqa: S310, a local address
            assert b"<title>flowpool explore</title>" in response.read()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)  # a computation that is under way is waited for
    assert process.returncode == 0, errors
    assert rest == "" and "Traceback" not in errors and "terminate" not in errors


def test_the_browser_is_asked_to_open_the_address(tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > "{tmp_path}/opened"\n')
    browser.chmod(0o755)
    with running("--runs", str(tmp_path), BROWSER=f"{browser} %s") as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(url, timeout=60):  # noqa: S310, a local address
            pass
        assert (tmp_path / "opened").read_text() == url


def test_mistakes_end_it_with_one_sentence() -> None:
    result = CliRunner().invoke(app, ["explore", "--no-open", "--data", "/nowhere/at/all"], env={"COLUMNS": "140"})
    assert result.exit_code == 2
    assert "The folder /nowhere/at/all, given as --data, does not exist." in result.output
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["explore", "--no-open", "--port", str(port)], env={"COLUMNS": "140"})
    assert result.exit_code == 2
    assert f"Port {port} cannot be used: Address already in use." in result.output
