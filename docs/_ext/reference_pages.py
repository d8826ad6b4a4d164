"""The pages of the API reference: one for each group of public names, made from ``flowpool.__all__`` and the modules for other
libraries."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from textwrap import indent

import flowpool

_NODES = """
x = torch.randn(60, 8)  # node features of two graphs
batch = torch.tensor([0] * 25 + [1] * 35)
"""
# By the name of a page: its title, a sentence, an example, and what is on it.
GROUPS = {
    "layers": (
        "Layers",
        "Modules for PyTorch Geometric: readouts give one row per graph, FlowCoarsen a smaller graph.",
        f"""
import torch

from flowpool import FlowCoarsen, FlowPool, FlowReadout
{_NODES}
readout = FlowReadout(in_channels=8, num_points=5)
readout(x, batch).shape  # (2, readout.out_channels)
FlowPool(in_channels=8, num_points=5)(x, batch).shape  # (2, 40)

edge_index = torch.randint(25, (2, 80))
coarse = FlowCoarsen(in_channels=8, num_points=4)(x, edge_index, batch=batch)
coarse.x.shape, coarse.edge_index.shape[0]  # (8, 8), 2
""",
        ["FlowReadout", "FlowPool", "FlowCoarsen", "Coarsened", "register_with_pyg"],
    ),
    "functions": (
        "Functions",
        "Pooling and distances as functions of tensors; they do not need PyTorch Geometric.",
        f"""
import torch

from flowpool import flow_pool, transport_pool
{_NODES}
reference = torch.randn(5, 8)  # where the five points start
pooled = flow_pool(x, batch, reference=reference)
pooled.points.shape, pooled.converged.tolist()  # (2, 5, 8), [True, True]
transport_pool(x, batch, reference=reference).points.shape  # (2, 5, 8)
""",
        ["flow_pool", "transport_pool", "algorithm_1", "sinkhorn_divergence", "wasserstein"],
    ),
    "results": (
        "Results",
        "What the functions return: one entry per graph.",
        f"""
import torch

from flowpool import Status, flow_pool
{_NODES}
pooled = flow_pool(x, batch, reference=torch.randn(5, 8))
for code, residual in zip(pooled.status.tolist(), pooled.residual.tolist()):
    print(Status(code).name, residual)
pooled.plan(1).shape  # (5, 35): how much of each node of graph 1 went to each point
""",
        ["Pooled", "Received", "Status"],
    ),
    "costs": (
        "Ground costs",
        "What it means for a node to be near a point.",
        f"""
import torch

from flowpool import costs, flow_pool
{_NODES}
cost = costs.Mahalanobis(8)  # a weight per feature, learned
flow_pool(x, batch, reference=torch.randn(5, 8), cost=cost).points.square().sum().backward()
cost.weight.grad.shape  # (8,)
""",
        ["costs"],
    ),
    "references": (
        "References",
        "Where the points start: drawn, or fitted to nodes.",
        f"""
import torch

from flowpool import FlowPool, references
{_NODES}
FlowPool(8, 5, reference=references.kmeans(x, num_points=5))
""",
        ["references"],
    ),
    "masses": (
        "Node masses",
        "How much each node counts.",
        f"""
import torch

from flowpool import FlowPool, masses
{_NODES}
edge_index = torch.randint(25, (2, 80))
FlowPool(8, 5)(x, batch, masses=masses.degree(edge_index, num_nodes=60)).shape  # (2, 40)
""",
        ["masses"],
    ),
}
# By the module: the library that it needs, a sentence, an example.
LIBRARIES = {
    "sklearn": (
        "sklearn",
        "Estimators for sets of vectors and for graphs; the guide is :doc:`/vectorizer`.",
        """
import numpy as np

from flowpool.sklearn import FlowVectorizer

sets = [np.random.default_rng(i).normal(size=(10 + i, 3)) for i in range(20)]
FlowVectorizer(num_points=8, random_state=0).fit_transform(sets).shape[0]  # 20
""",
    ),
    "jax": (
        "jax",
        "The same functions for JAX; see :doc:`/libraries`.",
        """
import jax
import jax.numpy as jnp

from flowpool.jax import flow_pool

x = jax.random.normal(jax.random.key(0), (9, 3))
ids = jnp.array([0, 0, 0, 0, 1, 1, 1, 1, 1])
flow_pool(x, ids, x[:2], num_segments=2).points.shape  # (2, 2, 3)
""",
    ),
    "arrow": (
        "pyarrow",
        "Tables with one graph per row; see :doc:`/libraries`.",
        """
import pyarrow as pa

from flowpool.arrow import pool_arrow

table = pa.table({"x": [[[8.0, 2.0], [1.0, 1.0]], [[6.0, 4.0], [1.0, 1.0], [1.0, 1.0]]]})
pool_arrow(table, nodes="x", num_points=2).column_names  # ['points', 'status', 'residual']
""",
    ),
    "tgp": ("tgp", "A pooler for torch-geometric-pool; see :doc:`/libraries`.", ""),
    "chemprop": ("chemprop", "An aggregation for Chemprop 2; see :doc:`/libraries`.", ""),
}
_MEMBERS = "   :members:\n   :show-inheritance:\n"


def write(folder: Path) -> None:
    """Writes the pages; an index links them."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.rst"):
        old.unlink()
    for key, (title, sentence, example, names) in GROUPS.items():
        _page(folder / f"{key}.rst", title, sentence, _code(example), *map(_entry, names))
    for key, (library, sentence, example) in LIBRARIES.items():
        # What a library that is not here would register cannot be looked at.
        missing = "   :exclude-members: forward\n" if library in absent() else ""
        _page(
            folder / f"{key}.rst", f"flowpool.{key}", sentence, _code(example), _of_module(f"flowpool.{key}", missing)
        )
    listed = "".join(f"   {page}\n" for page in [*GROUPS, *LIBRARIES])
    _page(folder / "index.rst", "API reference", "Every public name.", f".. toctree::\n   :maxdepth: 2\n\n{listed}")


def absent() -> list[str]:
    """Libraries that are not installed here; autodoc reads their modules with stand-ins for them."""
    return [library for library, *_ in LIBRARIES.values() if importlib.util.find_spec(library) is None]


def _page(path: Path, title: str, *parts: str) -> None:
    whole = [f"{title}\n{'=' * len(title)}", *filter(None, parts)]
    path.write_text("\n\n".join(whole) + "\n", encoding="utf-8")


def _code(example: str) -> str:
    return example and ".. code-block:: python\n\n" + indent(example.strip("\n"), "   ")


def _entry(name: str) -> str:
    found = getattr(flowpool, name)
    if inspect.ismodule(found):
        return _of_module(found.__name__)
    if inspect.isclass(found):
        return f".. autoclass:: flowpool.{name}\n{_MEMBERS}"
    if callable(found):
        return f".. autofunction:: flowpool.{name}"
    return f".. autodata:: flowpool.{name}"


def _of_module(name: str, more: str = "") -> str:
    return f".. automodule:: {name}\n{_MEMBERS}{more}"
