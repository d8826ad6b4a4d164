"""The view *Compare*: one cloud under several pools, and what each of them lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowpool import transport_pool
from flowpool.core.sinkhorn import exact_transport, wasserstein
from flowpool.explore import fields
from flowpool.explore.play import Question, read


class Found(NamedTuple):
    """What a pool hands over: points ``(M, 2)``, and their masses ``(M,)`` where these are not equal."""

    points: Tensor
    masses: Tensor | None = None


def flow(asked: Question) -> Found:
    return Found(asked.pool().points[0])


def step(asked: Question) -> Found:
    level = asked.epsilon * asked.radius**2
    received = transport_pool(asked.nodes, reference=placed(asked), epsilon=level, relative=False, masses=asked.masses)
    return Found(received.points[0])


def wegl(asked: Question) -> Found:
    """Where exact transport sends the reference."""
    start = placed(asked)
    equal = start.new_full((len(start),), 1 / len(start))
    plan, _ = exact_transport(torch.cdist(start, asked.nodes).square(), equal, asked.masses)
    return Found(len(start) * plan @ asked.nodes)


def kmeans(asked: Question) -> Found:
    """Centres of the clusters, each as heavy as its cluster."""
    from sklearn.cluster import KMeans

    present = asked.masses > 0
    nodes, masses = asked.nodes[present], asked.masses[present]
    count = min(len(asked.reference), len(nodes.unique(dim=0)))  # more centres would be empty
    fitted = KMeans(count, n_init=10, random_state=0).fit(nodes.numpy(), sample_weight=masses.numpy())
    shares = masses.new_zeros(count).index_add(0, torch.from_numpy(fitted.labels_).long(), masses)
    return Found(torch.from_numpy(fitted.cluster_centers_), shares)


def sort(asked: Question) -> Found:
    """The nodes that are largest in the last feature."""
    order = asked.nodes[:, -1].argsort(descending=True, stable=True)
    return Found(asked.nodes[order[: len(asked.reference)]])


def mean(asked: Question) -> Found:
    return Found(asked.mean[None])


POOLS: dict[str, Callable[[Question], Found]] = {
    "flow": flow, "step": step, "wegl": wegl, "k-means": kmeans, "sort": sort, "mean": mean,
}  # fmt: skip


def placed(asked: Question) -> Tensor:
    """X^(0) in the coordinates of the nodes, ``(M, 2)``: flow, step and wegl all begin there."""
    return asked.mean + asked.radius * asked.reference


def answer(body: fields.Body) -> dict[str, Any]:
    """Points of every pool, with W_2 / R for equal masses and, where a pool has them, for its own masses."""
    fields.require(body, ("nodes", "points", "epsilon", "seed", "debias"))
    asked = read(body)
    if len(asked.nodes) == 0 or not asked.radius > 0:
        raise ValueError("All nodes are in one place: every pool keeps it. Compare needs at least two distinct nodes.")
    return {"pools": [{"name": name} | _measured(asked, pool(asked)) for name, pool in POOLS.items()]}


def _measured(asked: Question, found: Found) -> dict[str, Any]:
    measured = {"points": found.points.tolist(), "lost": _lost(asked, found.points, None)}
    if found.masses is not None:
        measured |= {"masses": found.masses.tolist(), "lost_with_masses": _lost(asked, found.points, found.masses)}
    return measured


def _lost(asked: Question, points: Tensor, point_masses: Tensor | None) -> float | None:
    return fields.finite(float(wasserstein(points, asked.nodes, asked.masses, point_masses)) / asked.radius)
