"""The command as a process: quick to answer, quiet when nobody listens, and clear where something is missing."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import flowpool
from flowpool.lab import names
from flowpool.lab.datasets import BAGS, KNOWN
from flowpool.lab.datasets.catalog import MADE
from flowpool.lab.datasets.molecules import MOLECULES
from flowpool.lab.paper import FIGURES
from flowpool.lab.pools import POOLS, Pool, pool_class

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(flowpool.__file__).parents[1]), "COLUMNS": "80"}


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=ENVIRONMENT | environment
    )


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flowpool", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT | environment,
    )


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """What becomes of ``flowpool LINE``, with the redirections that stand in the line."""
    whole = f'exec "{sys.executable}" -m flowpool {line}'
    return subprocess.run(["sh", "-c", whole], capture_output=True, text=True, check=False, env=ENVIRONMENT)


WATCH = """
import sys
sys.argv = ["flowpool", *{arguments!r}]
from flowpool.cli import main
try:
    main()
except SystemExit:
    pass
print()
print(sorted({{"torch", "numba", "sklearn", "matplotlib", "torch_geometric", "ot", "scipy", "numpy"}} & set(sys.modules)))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["evaluate", "--help"], ["pool", "--help"]])
def test_help_imports_nothing_slow(arguments: list[str]) -> None:
    done = python(WATCH.format(arguments=arguments))
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "flowpool" in done.stdout.splitlines()[0] + done.stdout.splitlines()[1]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("flowpool evaluate PRO", {"PROTEINS"}),
        ("flowpool evaluate Mu", {"Mutagenicity"}),
        ("flowpool evaluate MUTAG --pools sum,flow-a", {"sum,flow-attention"}),
        ("flowpool figures c", {"conditioning", "coupling", "circle"}),
        ("flowpool kept EN", {"ENZYMES"}),
        ("flowpool d", {"data", "doctor"}),
    ],
)
def test_completion_knows_the_values_and_imports_nothing_slow(typed: str, expected: set[str]) -> None:
    words = typed.split()
    done = python(
        WATCH.format(arguments=[]),
        _FLOWPOOL_COMPLETE="complete_bash",
        COMP_WORDS=typed,
        COMP_CWORD=str(len(words) - 1),
        _TYPER_COMPLETE_TESTING="1",
    )
    *found, _, imported = done.stdout.splitlines()
    assert set(found) == expected
    assert imported == "[]"


def test_names_are_those_of_what_they_name() -> None:
    assert set(names.DATASETS) == {*KNOWN, *MOLECULES, *BAGS, *MADE}
    assert list(names.FIGURES) == list(FIGURES)
    assert list(names.POOLS) == list(POOLS)
    assert all(issubclass(pool_class(name), Pool) for name in names.POOLS)


def test_the_version_is_that_of_the_package() -> None:
    assert command("--version").stdout == f"flowpool {flowpool.__version__}\n"


def test_without_the_extra_one_sentence_names_it() -> None:
    program = (
        "import sys; sys.modules['typer'] = None\n"  # what an import of a missing package meets
        "sys.argv = ['flowpool', '--help']\n"
        "from flowpool.cli import main; main()"
    )
    done = python(program)
    assert done.returncode == 2
    assert done.stderr == "The command flowpool needs packages of the extra cli: pip install 'flowpool[cli]'.\n"


def test_the_doctor_needs_no_other_extra() -> None:
    extras = ("torch_geometric", "sklearn", "scipy", "ot", "grakel", "pyarrow", "matplotlib", "networkx", "jax")
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({extras!r}))\n"  # what an import of a missing package meets
        "from flowpool.lab import doctor; version = doctor._version\n"
        "doctor._version = lambda name: None if name == 'torch_geometric' else version(name)\n"
        "sys.argv = ['flowpool', 'doctor']\n"
        "from flowpool.cli import main; main()"
    )
    done = python(program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "absent  layers for PyG: PyTorch Geometric is not installed" in done.stdout
    assert "All is well." in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("arguments", ["data", "data --json", "--help", "evaluate --help"])
def test_a_full_device_behind_the_output_is_code_1(arguments: str) -> None:
    done = shell(f"{arguments} >/dev/full")
    assert (done.returncode, done.stderr) == (1, "Error: The output cannot be written: No space left on device.\n")


def test_a_closed_output_is_code_1() -> None:
    done = shell("data >&-")
    assert done.returncode == 1
    assert done.stderr == "Error: The standard output is closed; send it to a file, or to /dev/null.\n"


def test_a_closed_standard_error_is_no_error() -> None:
    done = shell("data --json 2>&-")
    assert done.returncode == 0
    assert json.loads(done.stdout)


@pytest.mark.parametrize("seed", [str(2**32), "9" * 5000, "-1"])
def test_seeds_out_of_range_are_refused(seed: str) -> None:
    for arguments in (["pool", "MUTAG", "out"], ["kept"], ["evaluate"]):
        done = command(*arguments, "--seed", seed)
        assert done.returncode == 2
        assert "Invalid value for '--seed'" in done.stderr and "Traceback" not in done.stderr


def test_a_package_that_a_command_needs_is_named() -> None:
    program = (
        "import sys; sys.modules['torch_geometric'] = None\n"
        "sys.argv = ['flowpool', 'evaluate']\n"
        "from flowpool.cli import main; main()"
    )
    done = python(program)
    assert done.returncode == 2
    assert (
        done.stderr == "Error: The package torch_geometric is missing; install it with pip install 'flowpool[lab]'.\n"
    )


def test_a_reader_that_has_enough_is_no_error() -> None:
    program = (
        "import os, sys, subprocess\n"
        "reader, writer = os.pipe(); os.close(reader)\n"
        "done = subprocess.run([sys.executable, '-m', 'flowpool', 'data'], stdout=writer, stderr=subprocess.PIPE)\n"
        "print(repr(done.stderr))"
    )
    assert python(program).stdout == "b''\n"


def test_tables_fit_the_columns_they_are_given() -> None:
    wide, narrow = (command("data", COLUMNS=columns).stdout.splitlines() for columns in ("200", "60"))
    assert max(map(len, narrow[:-1])) <= 60
    assert len(narrow) > len(wide)


def test_results_go_to_stdout_and_bars_do_not() -> None:
    done = command("data", "--json")
    assert {entry["name"] for entry in json.loads(done.stdout)} >= set(KNOWN)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evaluate", "NO_SUCH_SET"], "Dataset 'NO_SUCH_SET' was not found"),
        (["explore", "--data", "/nowhere"], "The folder /nowhere, given as --data, does not exist."),
    ],
)
def test_no_color_is_respected_on_a_terminal(arguments: list[str], said: str) -> None:
    coloured, plain = (on_a_terminal(arguments, environment) for environment in ({}, {"NO_COLOR": "1"}))
    assert "\x1b[31m" in coloured
    assert "\x1b[3" not in plain
    assert said in plain


def on_a_terminal(arguments: list[str], environment: dict[str, str]) -> str:
    """What a command that fails shows on a terminal of its own."""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, "-m", "flowpool", *arguments], ENVIRONMENT | environment)  # noqa: S606
    shown = b""
    try:
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    return shown.decode()


def test_help_shows_examples_and_exit_codes() -> None:
    shown = command("--help").stdout
    assert len(shown.splitlines()) <= 36  # a screen
    assert "Exit codes: 0, all done" in shown
    for name in ("evaluate", "pool", "kept", "bench", "figures", "data", "doctor", "compile"):
        assert f" {name} " in shown
    assert "Examples:" in command("evaluate", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--help"], ["--install-completion", "how much of the nodes"]),
        (["evaluate", "--help-all"], ["--reference-seed", "--update-step", "flow,sort,sum,mean]"]),
    ],
)
def test_a_narrow_terminal_cuts_nothing_off(arguments: list[str], names: list[str]) -> None:
    shown = command(*arguments, COLUMNS="60").stdout
    assert max(map(len, shown.splitlines())) <= 60
    assert [name for name in names if name not in shown] == []
