"""The pages of the API reference: one for each group of public names, made from ``flowpool.__all__`` and the doors."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import flowpool

_GROUPS = {
    "layers": (
        "Layers",
        "Modules for PyTorch Geometric.",
        ["FlowReadout", "FlowPool", "FlowCoarsen", "Coarsened", "register_with_pyg"],
    ),
    "functions": (
        "Functions",
        "These do not need PyTorch Geometric.",
        ["flow_pool", "transport_pool", "algorithm_1", "sinkhorn_divergence", "sinkhorn_loss", "wasserstein"],
    ),
    "results": ("Results", "What the functions return.", ["Pooled", "Received", "Status"]),
    "costs": ("Ground costs", "", ["costs"]),
    "references": ("References", "", ["references"]),
    "masses": ("Node masses", "", ["masses"]),
}
_DOORS = {
    "sklearn": "sklearn",
    "jax": "jax",
    "arrow": "pyarrow",
    "tgp": "tgp",
}  # by the library that each of them needs
_MEMBERS = "   :members:\n   :show-inheritance:\n"


def write(folder: Path) -> None:
    """Writes the pages; an index links them."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.rst"):
        old.unlink()
    left = [name for name in flowpool.__all__ if not any(name in names for _, _, names in _GROUPS.values())]
    groups = dict(_GROUPS)
    if left:
        groups["others"] = ("Others", "", left)
    pages = []
    for key, (title, text, names) in groups.items():
        entries = [_entry(name) for name in names if name in flowpool.__all__]
        if entries:
            _page(folder / f"{key}.rst", title, text, entries)
            pages.append(key)
    for door in _DOORS:
        _page(folder / f"{door}.rst", f"flowpool.{door}", "", [_of_module(f"flowpool.{door}")])
    listed = "".join(f"   {page}\n" for page in [*pages, *_DOORS])
    text = "Every public name, with shapes and formulas."
    _page(folder / "index.rst", "API reference", text, [f".. toctree::\n   :maxdepth: 2\n\n{listed}"])


def absent() -> list[str]:
    """Libraries of the doors that are not installed here; autodoc reads the doors with stand-ins for them."""
    return [library for library in _DOORS.values() if importlib.util.find_spec(library) is None]


def _page(path: Path, title: str, text: str, entries: list[str]) -> None:
    path.write_text("\n\n".join([f"{title}\n{'=' * len(title)}", text, *entries]) + "\n", encoding="utf-8")


def _entry(name: str) -> str:
    found = getattr(flowpool, name)
    if inspect.ismodule(found):
        return _of_module(found.__name__)
    if inspect.isclass(found):
        return f".. autoclass:: flowpool.{name}\n{_MEMBERS}"
    if callable(found):
        return f".. autofunction:: flowpool.{name}"
    return f".. autodata:: flowpool.{name}"


def _of_module(name: str) -> str:
    return f".. automodule:: {name}\n{_MEMBERS}"
