"""The view *Graphs*: a graph of a dataset, and which of its nodes each pooled point stands for."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowpool import Status, flow_pool, references
from flowpool.core.sinkhorn import wasserstein
from flowpool.explore import fields
from flowpool.explore.layout import layout
from flowpool.lab.datasets import KNOWN, GraphDataset, find_dataset, load_dataset, make_shapes
from flowpool.lab.datasets.catalog import data_folder
from flowpool.lab.paper.measure import smooth
from flowpool.lab.paper.mutag import ATOMS

MOST_NODES = 500  # of a graph that is drawn
MOST_POINTS = 8  # one colour each
MOST_HOPS = 4
SHAPES = "SHAPES"


def list_all(data: str | None, body: fields.Body) -> dict[str, Any]:
    """Names of the datasets that are on this machine."""
    fields.require(body, ())
    return {"datasets": at_hand(data)}


def answer(data: str | None, body: fields.Body) -> dict[str, Any]:
    """One graph: where its nodes are drawn, its pooled points, their shares of the nodes and the feature plane."""
    fields.require(body, ("dataset", "graph", "points", "epsilon", "seed", "hops"))
    name = fields.text(body, "dataset")
    if name not in at_hand(data):
        raise ValueError(f"The dataset {name!r} is not on this machine; {', '.join(at_hand(data))} are.")
    dataset = load(name, data)
    number = fields.whole(body, "graph", 0, len(dataset) - 1)
    num_points = fields.whole(body, "points", 1, MOST_POINTS)
    seed = fields.whole(body, "seed", 0, fields.MOST_SEED)
    epsilon = fields.number(body, "epsilon", *fields.EPSILON_RANGE)
    hops = fields.whole(body, "hops", 0, MOST_HOPS)
    graph = dataset[number]
    size = len(graph.x)
    if size > MOST_NODES:
        raise ValueError(f"Graph {number} has {size} nodes; the page draws graphs of up to {MOST_NODES} nodes.")
    nodes = smooth(graph.x.double(), graph.edge_index, hops)
    reference = references.normal(nodes.shape[1], num_points, seed=seed).double()
    pooled = flow_pool(nodes, reference=reference, epsilon=epsilon, gradient="none")
    points, plan, status = pooled.points[0], pooled.plan(0), Status(int(pooled.status[0]))
    radius = float((nodes - nodes.mean(0)).square().sum(1).mean().sqrt())
    flat, share = plane(nodes, points)
    first, second = graph.edge_index
    return {
        "graphs": len(dataset),
        "class": dataset.class_names[graph.y],
        "names": node_names(name, graph.x),
        "places": _places(name, data, number),
        "edges": graph.edge_index.T[first < second].tolist(),
        "shares": (plan / plan.sum(0)).T.tolist(),  # (N, M), of each node
        "nodes": flat[:size].tolist(),
        "points": flat[size:].tolist(),
        "share": share,
        "divergence": fields.finite(float(pooled.divergence[0]) / radius**2 if radius > 0 else 0.0),
        "lost": float(wasserstein(points, nodes)) / radius if radius > 0 else 0.0,
        "residual": fields.finite(float(pooled.residual[0])),
        "steps": int(pooled.steps[0]),
        "status": status.name,
        "advice": status.advice,
    }


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


@lru_cache(maxsize=4)
def load(name: str, data: str | None) -> GraphDataset:
    return make_shapes() if name == SHAPES else load_dataset(name, data, download=False)


@lru_cache(maxsize=256)
def _places(name: str, data: str | None, number: int) -> list[list[float]]:
    graph = load(name, data)[number]
    places: list[list[float]] = layout(graph.edge_index.numpy(), len(graph.x)).round(4).tolist()
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
