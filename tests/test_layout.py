"""The direction of imports: what each part of the package may know, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import flowpool

PACKAGE = Path(flowpool.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


SOURCES = {module_name(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree: ast.AST) -> set[str]:
    """Modules of the package that some code imports, without the name of the package."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "flowpool" or name.startswith("flowpool."):
                inside = name.removeprefix("flowpool").removeprefix(".")
                while inside not in SOURCES and "." in inside:
                    inside = inside.rpartition(".")[0]
                found.add(inside if inside in SOURCES else "__init__")
    return found


def at_import(tree: ast.Module) -> ast.Module:
    """The code that runs when a module is imported: no functions, nothing for the type checker alone."""
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            kept += node.orelse
            continue
        kept.append(node)
    return ast.Module(kept, [])


def folder(module: str) -> str:
    """The part of the package that a module belongs to: its folder, or itself in the root."""
    return module.split(".")[0]


KNOWS = {
    "core": {"core", "costs", "status"},
    "kernels": {"core", "status", "kernels"},
    "engines": {"core", "kernels", "costs", "options", "status", "engines"},
    "step": {"core", "kernels", "engines", "costs", "references", "inputs", "options", "status", "step"},
}


@pytest.mark.parametrize("part", KNOWS)
def test_inner_parts_know_no_outer_ones(part: str) -> None:
    for module, tree in SOURCES.items():
        if folder(module) == part:
            beyond = {name for name in imports(tree) if folder(name) not in KNOWS[part]}
            assert not beyond, f"{module} imports {beyond}"


def test_the_step_knows_of_kernels_only_the_transport_and_of_engines_only_the_choice_and_the_devices() -> None:
    for module, tree in SOURCES.items():
        if folder(module) == "step":
            for name in imports(tree):
                if folder(name) in ("kernels", "engines"):
                    known = ("kernels.transport", "kernels.errors", "engines.choice", "engines.devices")
                    assert name.startswith("kernels.machine") or name in known, f"{module} imports {name}"


def importers(part: str) -> set[str]:
    """Folders and modules of the root that import a part, from outside of it."""
    return {folder(module) for module, tree in SOURCES.items() if part in {folder(name) for name in imports(tree)}} - {
        part
    }


def test_the_layers_are_known_outside_alone() -> None:
    """Masses that attention gives stand with the layers in all but name."""
    inner = {*KNOWS, "pooling", "costs", "references", "inputs", "options", "results", "status"}
    assert not importers("nn") & inner


def test_doors_are_opened_from_outside() -> None:
    inner = {*KNOWS, "nn", "pooling", "costs", "references", "masses", "inputs", "options", "results", "status"}
    for door in ("sklearn", "jax", "arrow", "tgp", "chemprop"):
        assert not importers(door) & inner


def test_nobody_knows_the_lab_but_the_command() -> None:
    assert importers("lab") <= {"cli", "explore"}
    assert importers("cli") <= {"__main__"}


def test_no_module_needs_itself_to_be_imported() -> None:
    graph = {module: imports(at_import(tree)) for module, tree in SOURCES.items()}
    seen: dict[str, bool] = {}  # false while a module is on the way

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert seen.get(module, True), f"cycle: {' -> '.join((*way[way.index(module) :], module))}"
        if module not in seen:
            seen[module] = False
            for name in sorted(graph[module] - {module}):
                visit(name, (*way, module))
            seen[module] = True

    for module in graph:
        visit(module, ())


def uses_operators(tree: ast.AST) -> bool:
    """Whether the code names ``torch.ops`` or ``torch.library``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.ops", "torch.library"):
            return True
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("torch.library", "torch._ops")):
            return True
    return False


def test_operators_are_known_in_their_modules_alone() -> None:
    found = {module for module, tree in SOURCES.items() if uses_operators(tree)}
    assert found <= {"engines.operators", "engines.devices"}
    assert "engines.operators" in found


def test_only_the_machine_of_the_kernels_knows_numba() -> None:
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in ("numba", "llvmlite") for name in names):
                assert module.startswith("kernels.machine") or folder(module) in ("cli", "lab"), module


def test_kernels_are_made_of_the_files_whose_digest_their_cache_carries() -> None:
    """An edit of any other file compiles nothing again."""
    from flowpool.kernels.machine.jit import sources

    known = {module_name(path) for path in sources()}
    assert {"core.law", "kernels.batch", "kernels.machine.jit", "step.receive_kernels"} <= known
    for module in known:
        assert imports(SOURCES[module]) <= known, f"{module} imports {imports(SOURCES[module]) - known}"
    for module, tree in SOURCES.items():
        makes_kernels = "kernels.machine.jit" in imports(tree)
        assert not makes_kernels or module in known or folder(module) in ("cli", "lab"), module


def test_importing_the_package_imports_nothing_heavy() -> None:
    eager = imports(at_import(SOURCES["__init__"]))
    assert not eager, f"flowpool imports {eager} before anyone has asked"
