"""The view *Graphs*: a graph of a dataset or of the reader's own, and which of its nodes each pooled point stands for."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowpool import Status, flow_pool, references
from flowpool.core.sinkhorn import wasserstein
from flowpool.explore import fields, pasted
from flowpool.explore.layout import layout
from flowpool.explore.waiting import once
from flowpool.lab.datasets import KNOWN, GraphDataset, find_dataset
from flowpool.lab.datasets.catalog import data_folder
from flowpool.lab.datasets.record import smooth
from flowpool.lab.datasets.source import Source
from flowpool.lab.datasets.tu import ATOMS

MOST_NODES = 500  # of a graph that is drawn
MOST_POINTS = 8  # one colour each
MOST_HOPS = 4
SHAPES = "SHAPES"
PASTED = "pasted table"


class Shown(NamedTuple):
    """A graph as it is drawn: ``(N, D)``, ``(2, E)``, ``(N,)``, what it is called, and what is written on each node."""

    x: Tensor
    edge_index: Tensor
    masses: Tensor | None
    label: str
    names: list[str]


def list_all(data: str | None, own: Source | None, body: fields.Body) -> dict[str, Any]:
    """Names of what can be shown, the reader's own file first."""
    fields.require(body, ())
    return {"datasets": list(_offered(data, own)), "own": None if own is None else own.name}


def answer(data: str | None, own: Source | None, body: fields.Body) -> dict[str, Any]:
    """One graph: where its nodes are drawn, its pooled points, their shares of the nodes and the feature plane."""
    fields.require(body, ("dataset", "table", "graph", "points", "epsilon", "seed", "hops"))
    name, text = fields.text(body, "dataset"), fields.text(body, "table")
    offered = _offered(data, own)
    if name not in offered:
        raise ValueError(f"The dataset {name!r} is not on this machine; {', '.join(offered)} are.")
    num_points = fields.whole(body, "points", 1, MOST_POINTS)
    seed = fields.whole(body, "seed", 0, fields.MOST_SEED)
    epsilon = fields.number(body, "epsilon", *fields.EPSILON_RANGE)
    hops = fields.whole(body, "hops", 0, MOST_HOPS)
    source = offered[name]
    if source is None:
        sets = pasted.read(text)
        number, count = fields.whole(body, "graph", 0, len(sets) - 1), len(sets)
        graph = Shown(sets[number].nodes, torch.empty(2, 0, dtype=torch.int64), None, "", sets[number].names)
    else:
        with once(f"Reading {name}."):
            dataset = source.load()
        number, count = fields.whole(body, "graph", 0, len(dataset) - 1), len(dataset)
        graph = _of(dataset, number)
    size = len(graph.x)
    if size > MOST_NODES:
        raise ValueError(f"Graph {number} has {size} nodes; the page draws graphs of up to {MOST_NODES} nodes.")
    nodes = smooth(graph.x.double(), graph.edge_index, hops)
    reference = references.normal(nodes.shape[1], num_points, seed=seed).double()
    pooled = flow_pool(nodes, reference=reference, masses=graph.masses, epsilon=epsilon, gradient="none")
    points, plan, status = pooled.points[0], pooled.plan(0), Status(int(pooled.status[0]))
    masses = nodes.new_ones(size) if graph.masses is None else graph.masses
    masses = masses / masses.sum()
    radius = float((masses @ (nodes - masses @ nodes).square().sum(1)).sqrt())
    flat, share = plane(nodes, points)
    first, second = graph.edge_index
    return {
        "graphs": count,
        "label": graph.label,
        "names": graph.names,
        "places": _places(graph.edge_index.numpy().tobytes(), size) if len(first) else flat[:size].tolist(),
        "edges": graph.edge_index.T[first < second].tolist(),
        "shares": (plan / plan.sum(0).clamp(min=torch.finfo(plan.dtype).tiny)).T.tolist(),  # (N, M), of each node
        "nodes": flat[:size].tolist(),
        "points": flat[size:].tolist(),
        "share": share,
        "divergence": fields.finite(float(pooled.divergence[0]) / radius**2 if radius > 0 else 0.0),
        "lost": float(wasserstein(points, nodes, masses)) / radius if radius > 0 else 0.0,
        "residual": fields.finite(float(pooled.residual[0])),
        "steps": int(pooled.steps[0]),
        "status": status.name,
        "advice": status.advice,
    }


def _offered(data: str | None, own: Source | None) -> dict[str, Source | None]:
    """What can be shown, and where it comes from; a pasted table comes with the question."""
    there = {name: Source(name, data) for name in at_hand(data)}
    return ({} if own is None else {own.name: own}) | there | {PASTED: None}


def _of(dataset: GraphDataset, number: int) -> Shown:
    graph = dataset[number]
    masses = None
    if dataset.masses is not None:
        masses = dataset.masses[int(dataset.node_ptr[number]) : int(dataset.node_ptr[number + 1])].double()
    if isinstance(graph.y, Tensor):
        label = "".join(f", target {value:.4g}" for value in graph.y.tolist())
    else:
        label = f", class {dataset.class_names[graph.y]}"
    return Shown(graph.x, graph.edge_index, masses, label, node_names(dataset.name, graph.x))


def at_hand(data: str | None) -> list[str]:
    """Datasets that can be read without a network: known ones, those in the data folder, and the shapes."""
    names = {name for name in KNOWN if find_dataset(name, data) is not None}
    folder = data_folder(data)
    if folder is not None:
        held = [folder, *_entries(folder), *_entries(folder / "tu")]
        names |= {path.stem for path in held if _is_dataset(path, data)}
    return [*sorted(names, key=str.lower), SHAPES]


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _is_dataset(path: Path, data: str | None) -> bool:
    try:
        return find_dataset(path.stem, data) is not None
    except ValueError:  # its name cannot be that of a dataset
        return False


@lru_cache(maxsize=256)
def _places(edges: bytes, size: int) -> list[list[float]]:
    places: list[list[float]] = layout(np.frombuffer(edges, np.int64).reshape(2, -1), size).round(4).tolist()
    return places


def node_names(dataset: str, features: Tensor) -> list[str]:
    """What is written on each node: its atom where the dataset says which, the place of its one-hot label, or nothing."""
    one_hot = bool(((features == 0) | (features == 1)).all()) and bool((features.sum(1) == 1).all())
    if not one_hot or features.shape[1] == 1:
        return [""] * len(features)
    labels = features.argmax(1).tolist()
    return [ATOMS[label] if dataset == "MUTAG" else str(label) for label in labels]


def plane(nodes: Tensor, points: Tensor) -> tuple[np.ndarray, float]:
    """Nodes and points ``(N + M, 2)`` on the two leading principal axes of the nodes, and the share of the variance."""
    mean = nodes.mean(0)
    _, lengths, axes = torch.linalg.svd(nodes - mean, full_matrices=True)
    axes = axes[:2] if len(axes) > 1 else torch.cat([axes, torch.zeros_like(axes)])
    variances = lengths.square()
    total = float(variances.sum())
    flat: np.ndarray = ((torch.cat([nodes, points]) - mean) @ axes.T).numpy()
    return flat, float(variances[:2].sum()) / total if total > 0 else 1.0
