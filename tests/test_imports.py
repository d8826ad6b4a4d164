"""Imports point one way, as docs/architecture.md says; those inside functions count, too."""

from __future__ import annotations

import ast
from pathlib import Path

import flowpool

PACKAGE = Path(flowpool.__file__).parent
FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
ROOT = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__", "jax", "arrow", "tgp"}
# What each part may import of the others; whoever is not named may import everything.
MAY = {
    "core": {"costs"},
    "kernels": {"core", "status"},
    "engines": {"core", "kernels", "costs", "options", "status"},
    "step": {"core", "kernels", "engines", *ROOT},
    "nn": {"core", "engines", "step", *ROOT},
    "root": {"core", "engines", "kernels", *ROOT},
    "doors": {"core", "engines", "step", "nn", *ROOT},
    "lab": FOLDERS - {"cli", "explore"} | ROOT | {"arrow", "jax", "tgp"},
    "explore": FOLDERS - {"cli"} | ROOT,
}
HEAVY = {
    "core": {"torch_geometric", "numba", "sklearn", "jax"},
    "kernels": {"torch", "torch_geometric"},
    "root": {"torch_geometric"},
}


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    if first.removesuffix(".py") in ("sklearn", "jax", "arrow", "tgp"):
        return "doors"
    if first == "masses.py":  # of nodes in graphs, for the layers
        return "nn"
    return first if first in FOLDERS else "root"


def imported(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "flowpool":
            found |= {f"flowpool.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def files() -> list[Path]:
    return [
        path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__main__.py" and path != PACKAGE / "__init__.py"
    ]


def test_no_part_imports_one_above_it() -> None:
    wrong = []
    for path in files():
        part = part_of(path)
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in imported(path):
            if part in MAY and name.startswith("flowpool."):
                target = name.split(".")[1]
                known = target in FOLDERS or (PACKAGE / f"{target}.py").is_file()  # else a public name of the root
                if known and target not in MAY[part] | {own, part}:
                    wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


def test_parts_know_only_the_libraries_that_they_need() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in files()
        for name in imported(path)
        if name.split(".")[0] in HEAVY.get(part_of(path), set())
    ]
    assert not wrong


def test_engines_do_not_know_each_other() -> None:
    engines = PACKAGE / "engines"
    assert "flowpool.engines.torch_engine" not in imported(engines / "compiled.py")
    assert not {name for name in imported(engines / "torch_engine.py") if "compiled" in name or "kernels" in name}
