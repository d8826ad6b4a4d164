"""How alike the pooled points of a graph are, next to its nodes.

    python benchmarks/smoothing.py [--datasets MUTAG PROTEINS] [--count 200] [--epochs 15] [--out smoothing.csv]

Mesquita, Souza and Kaski ("Rethinking pooling in graph neural networks", NeurIPS 2020) found the clusters of learned
pools to be nearly the same vector, which is why random clusters did as well. Here it is measured, per graph, for the
two-layer GIN of the bench and M = 5 points (of flow: the points of a coarse graph), before and after a short training:

    cosine     mean cosine between two points of a graph, next to that between two of its nodes
    distance   mean distance between two points of a graph, in units of that between two of its nodes; a point counts
               as a pair with itself, so that a cloud and the same cloud with every point doubled are as wide

Sums over clusters are divided by the mass of their cluster, or their length would be the size of the graph; cosines do
not change by that. A distance of 0 is a graph whose points all are its mean, 1 is one whose points lie as far apart as
its nodes do. Graphs whose nodes are all equal are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from flowpool.lab.datasets import Fold, GraphDataset, draw_folds, load_dataset
from flowpool.lab.kept import readings
from flowpool.lab.leakproof import batches, divide, subset
from flowpool.lab.model import GraphModel, build_model
from flowpool.lab.options import Schedule, Shape
from flowpool.lab.paper.exhibit import write_table
from flowpool.lab.pools import PointPool
from flowpool.lab.pools.base import graph_sizes
from flowpool.lab.training import train

POOLS = ("flow", "diff", "mincut")
SHAPE = Shape("gin", channels=8, num_points=5)
SEED = 0


class Likeness(NamedTuple):
    """Means over the graphs."""

    dataset: str
    pool: str
    epochs: int
    graphs: int
    point_cosine: float
    node_cosine: float
    distance: float
    nearly_equal: float  # share of graphs whose points are a tenth as far apart as the nodes, or less
    seconds: float


def pair_means(cloud: Tensor) -> tuple[float, float]:
    """Mean cosine over the pairs of different rows of ``(K, D)``, and mean distance over all pairs."""
    directions = normalize(cloud, dim=1)
    cosines = (directions.sum(0).square().sum() - directions.square().sum()) / (len(cloud) * (len(cloud) - 1))
    return float(cosines), float(torch.cdist(cloud, cloud).mean())


@torch.no_grad()
def likeness(model: GraphModel, dataset: GraphDataset) -> list[tuple[float, float, float]]:
    """Cosine of the points, cosine of the nodes, and relative distance, of each graph that has different nodes."""
    model.eval()
    pool = model.pool
    if not isinstance(pool, PointPool):
        raise TypeError(f"{type(pool).__name__} gives no points.")
    found = []
    for part in batches(dataset, torch.arange(len(dataset)).split(32)):
        nodes = model.node_norm(model.backbone(part.x, part.edge_index))
        cloud = readings("", pool, nodes, part.edge_index, part.batch)[-1].points  # the means, where there are any
        for own, points in zip(nodes.split(graph_sizes(part.batch, len(part.y)).tolist()), cloud, strict=True):
            if len(own) < 2 or bool(torch.isclose(own, own[:1]).all()):
                continue
            point_cosine, point_distance = pair_means(points.double())
            node_cosine, node_distance = pair_means(own.double())
            found.append((point_cosine, node_cosine, point_distance / node_distance))
    return found


def measured(dataset: GraphDataset, fold: Fold, pool: str, epochs: int) -> Iterable[Likeness]:
    """Before training, and after it."""
    model = build_model(pool, SHAPE, dataset.num_features, dataset.num_classes, SEED)
    for length in (0, epochs):
        began = time.perf_counter()
        if length:
            practice, _ = divide(dataset, fold)
            train(model, practice, Schedule(max_epochs=length, patience=length), SEED)
        values = np.array(likeness(model, dataset))
        point_cosine, node_cosine, distance = values.mean(0).tolist()
        near, spent = float((values[:, 2] < 0.1).mean()), time.perf_counter() - began
        yield Likeness(dataset.name, pool, length, len(values), point_cosine, node_cosine, distance, near, spent)


def show(rows: Sequence[Likeness]) -> None:
    table = Table(
        "dataset", "epochs", "pool", "graphs", "cosine points", "cosine nodes", "distance", "below 0.1", "seconds"
    )
    for row in rows:
        numbers = (f"{x:.3f}" for x in (row.point_cosine, row.node_cosine, row.distance))
        more = (f"{row.nearly_equal:.0%}", f"{row.seconds:.1f}")
        table.add_row(row.dataset, str(row.epochs), row.pool, str(row.graphs), *numbers, *more)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["MUTAG", "PROTEINS"])
    parser.add_argument("--count", type=int, default=200, help="graphs per dataset, drawn with a fixed seed")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--data", help="folder with the datasets; default: FLOWPOOL_DATA")
    parser.add_argument("--out", type=Path, help="CSV file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Likeness] = []
    for name in options.datasets:
        dataset = load_dataset(name, options.data)
        if options.count < len(dataset):
            drawn = np.random.default_rng(SEED).permutation(len(dataset))[: options.count]
            dataset = subset(dataset, np.sort(drawn))
        fold = draw_folds(dataset, "folds", SEED)[0]
        found = [row for pool in POOLS for row in measured(dataset, fold, pool, options.epochs)]
        rows += sorted(found, key=lambda row: row.epochs)
    show(rows)
    if options.out:
        write_table({name: [getattr(row, name) for row in rows] for name in Likeness._fields}, options.out)


if __name__ == "__main__":
    main()
