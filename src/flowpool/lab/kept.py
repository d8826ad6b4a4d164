r"""What pooling kept: how far the pooled cloud is from the node cloud, for every pool that gives a cloud.

.. math:: W_2^2(X, Y) / R^2 \quad \text{and} \quad S_\varepsilon(X, Y) / R^2, \qquad
          R^2 = \tfrac1N \sum_j |y_j - \bar y|^2, \quad \varepsilon = 0.1 R^2

Zero: the points are the nodes. One: as much was lost as by the mean alone, whose :math:`W_2^2` is :math:`R^2` exactly.
W_2 is computed without regularisation by a solver that shares nothing with FlowPool; the divergence is what FlowPool
itself makes small.

What is fair is not obvious, since most methods do not set out to keep the cloud, and some hand over numbers that are
not in the units of the nodes. So a method is read as it stands, all rows that it filled with equal mass, as the
classifier gets them; and where a kinder reading exists, it is shown as well:

- MinCutPool and StructPool hand over sums over clusters. Read as ``(means)``, each sum is divided by the mass
  of its cluster, and the point weighs as much as its cluster does. No classifier gets that, but it is the most that
  can be said for their assignments.
- TopKPool and SAGPool multiply nodes by their score. Read as ``(nodes)``, the chosen nodes are taken as they were.
- HaarPool's rows are coefficients of the features in a basis of the graph, whose first one is the mean times
  :math:`\sqrt N`; no reading makes them places among the nodes, and a large distance is no reproach.
- OTKE hands over kernel features; shown are the barycentres of the nodes that its plan sends to each point.
- DiffPool's rows are features that a network of its own has learned, and it is left out.

No pool is trained, so learned assignments and scores are random ones. WEGL's centres are fitted to the very graphs
that it is then measured on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.utils import to_dense_batch

from flowpool.core import sinkhorn
from flowpool.lab.backbones import build_backbone, prepare
from flowpool.lab.datasets import GraphDataset, require_equal_masses
from flowpool.lab.leakproof import batches, subset
from flowpool.lab.model import derived_seed
from flowpool.lab.options import MOST_POINTS, check_count
from flowpool.lab.paper import style
from flowpool.lab.paper.exhibit import write_table
from flowpool.lab.pools import POOLS, PointPool
from flowpool.lab.pools.base import graph_sizes
from flowpool.lab.pools.mincut import MinCutPool
from flowpool.lab.pools.sag import SAGPool
from flowpool.lab.pools.struct import StructPool
from flowpool.lab.pools.topk import TopKPool

Features = Literal["linear", "propagated"]
Floats = NDArray[np.float64]

EPSILON = 0.1  # of the divergence, in units of R^2: FlowPool's default
_GRAPHS_AT_ONCE = 32
_TIE = 1e-9  # in units of R^2: distances closer than this are equal
_PANELS_ABREAST = 2
_LEAST_DRAWN = 1e-3  # the axis is logarithmic, and graphs that were kept as they are lie at zero
_ONE_POINT = 1e-12  # R^2 over the largest squared feature below which all nodes of a graph are equal


@dataclass(frozen=True, eq=False)
class Kept:
    """What one pool, in one reading, kept of the graphs of one dataset.

    Attributes:
        dataset: name of the dataset.
        features: what was pooled, see `kept_table`.
        pool: name of the pool, with the reading in parentheses where it is not the output as it stands.
        wasserstein: W_2^2 / R^2 of each graph, ``(B,)``.
        divergence: S_eps / R^2 of each graph, ``(B,)``.
        nearest: share of the graphs on which no other row of the table has a smaller W_2; ties count for all.
        divergence_nearest: the same for the divergence.
    """

    dataset: str
    features: Features
    pool: str
    wasserstein: Floats
    divergence: Floats
    nearest: float
    divergence_nearest: float

    def as_row(self) -> dict[str, str | int | float]:
        """The summary, as one row of a table."""
        return {
            "dataset": self.dataset,
            "features": self.features,
            "pool": self.pool,
            "graphs": len(self.wasserstein),
            "mean": float(self.wasserstein.mean()),
            "median": float(np.median(self.wasserstein)),
            "nearest": self.nearest,
            "divergence_mean": float(self.divergence.mean()),
            "divergence_median": float(np.median(self.divergence)),
            "divergence_nearest": self.divergence_nearest,
        }


class Reading(NamedTuple):
    """The output of a pool as measures, one per graph."""

    label: str
    points: Tensor  # (B, M, D)
    masses: Tensor  # (B, M), rows sum to one; zero where there is no point


def cloud_pools() -> list[str]:
    """Names of the pools that give clouds."""
    return [name for name, build in POOLS.items() if isinstance(build(1, 1), PointPool)]


@torch.no_grad()
def kept_table(
    dataset: GraphDataset,
    pools: Sequence[str] | None = None,
    *,
    features: Features = "linear",
    num_points: int = 5,
    channels: int = 8,
    count: int | None = None,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[Kept]:
    """What each pool kept, one row per reading, the smallest median of W_2 first.

    Args:
        dataset: as it was loaded.
        pools: names of `POOLS` that give clouds; None: all of these.
        features: ``"linear"``: features propagated as in SGC, then a random linear layer to ``channels``, which is
            what pools see before training. ``"propagated"``: without the layer, as wide as the dataset is.
        num_points: number of points, M.
        channels: d of the linear layer.
        count: at most so many graphs, drawn with the seed; None: all.
        seed: of the sample, of the layer and of the pools.
        on_progress: called with the number of graphs that were just done.

    Graphs whose nodes are all equal have no scale to measure by and are left out.
    """
    names = cloud_pools() if pools is None else list(pools)
    _check(names, features, num_points, channels, count)
    require_equal_masses(dataset)
    if count is not None and count < len(dataset):
        drawn = np.random.default_rng(seed).permutation(len(dataset))[:count]
        dataset = subset(dataset, np.sort(drawn))
    graphs = prepare(dataset, "sgc", "normalised")
    width = channels if features == "linear" else graphs.num_features
    embed = _embedding(features, graphs.num_features, channels, seed)
    built = {name: _built(name, width, num_points, seed) for name in names}
    everything = graphs.batch(range(len(graphs)))
    for pool in built.values():
        pool.fit(embed(everything.x, everything.edge_index), everything.batch)

    labels: list[str] = []
    found: list[list[tuple[float, float]]] = []  # per graph, per reading
    for part in batches(graphs, torch.arange(len(graphs)).split(_GRAPHS_AT_ONCE)):
        x = embed(part.x, part.edge_index)
        views = [view for name in names for view in readings(name, built[name], x, part.edge_index, part.batch)]
        labels = [view.label for view in views]
        for graph, nodes in enumerate(x.split(graph_sizes(part.batch, len(part.y)).tolist())):
            if _has_spread(nodes):
                found.append(distances(nodes, [(view.points[graph], view.masses[graph]) for view in views]))
        on_progress(len(part.y))
    if not found:
        raise ValueError(f"All nodes of each graph of {dataset.name} are equal: there is nothing to keep.")
    wasserstein, divergence = np.array(found).transpose(2, 1, 0)  # (K, B) each, for K readings
    columns = zip(labels, wasserstein, divergence, _nearest(wasserstein), _nearest(divergence), strict=True)
    rows = [Kept(dataset.name, features, *column) for column in columns]
    return sorted(rows, key=lambda row: float(np.median(row.wasserstein)))


def readings(name: str, pool: PointPool, x: Tensor, edge_index: Tensor, batch: Tensor) -> list[Reading]:
    """What a pool hands over, as it stands, and a kinder reading where there is one; see the top of this module."""
    num_graphs = int(batch[-1]) + 1
    cloud = pool.points(x, edge_index, batch, num_graphs)
    found = [Reading(name, cloud.points, _equal(cloud.mask, x.dtype))]
    cluster_masses = assigned_masses(pool, x, edge_index, batch, num_graphs)
    if cluster_masses is not None:
        means = cloud.points / torch.where(cluster_masses > 0, cluster_masses, 1.0).unsqueeze(-1)
        shares = cluster_masses / cluster_masses.sum(1, keepdim=True)
        found.append(Reading(f"{name} (means)", means, shares))
    if isinstance(pool, TopKPool | SAGPool):
        _, _, _, owner, chosen, _ = pool.layer(x, edge_index, batch=batch)
        nodes, mask = to_dense_batch(x[chosen], owner, max_num_nodes=cloud.mask.shape[1], batch_size=num_graphs)
        found.append(Reading(f"{name} (nodes)", nodes, _equal(mask, x.dtype)))
    return found


def assigned_masses(pool: PointPool, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Tensor | None:
    """How many nodes each cluster of a graph holds, ``(B, M)``; None for pools that are no clusters."""
    if isinstance(pool, StructPool):
        return pool.assignment(x, edge_index, batch, num_graphs).sum(1)
    if not isinstance(pool, MinCutPool):
        return None
    shares: Tensor = pool.assignment(x).softmax(1)  # (N, M)
    return shares.new_zeros(num_graphs, shares.shape[1]).index_add(0, batch, shares)


def write_csv(rows: Sequence[Kept], path: Path) -> Path:
    """Writes the summaries, one line per row."""
    lines = [row.as_row() for row in rows]
    return write_table({name: [line[name] for line in lines] for name in lines[0]}, path)


def kept_plot(rows: Sequence[Kept]) -> Figure:
    """W_2^2 / R^2 of the graphs as boxes, one panel per dataset and kind of features."""
    panels = [list(own) for _, own in groupby(rows, key=lambda row: (row.dataset, row.features))]
    columns = min(len(panels), _PANELS_ABREAST)
    lines = -(-len(panels) // columns)
    tallest = max(len(panel) for panel in panels)
    with style.applied():
        figure, grid = style.canvas(columns, lines, width=4.8 * columns, height=lines * (1.1 + 0.24 * tallest))
        places: list[Axes] = grid.ravel().tolist()
        for axes in places[len(panels) :]:
            axes.remove()
        for axes, panel in zip(places, panels, strict=False):
            for place, row in enumerate(panel):
                _draw_box(axes, place, row)
            axes.axvline(1, color=style.BLACK, ls="--", lw=1.0, zorder=0)
            axes.set_xscale("log")
            axes.set_yticks(range(len(panel)), [row.pool for row in panel])
            axes.set_ylim(len(panel) - 0.4, -0.6)  # first row on top
            axes.grid(visible=False, axis="y")
            axes.set_xlabel("$W_2^2(X, Y) / R^2$; dashed: the mean alone")
            axes.set_title(f"{panel[0].dataset}, {panel[0].features} features")
    return figure


def _draw_box(axes: Axes, place: int, row: Kept) -> None:
    """Median, quartiles and 90 % of the graphs: FlowPool blue, methods as they stand orange, kinder readings hollow."""
    kinder = "(" in row.pool
    colour = style.BLUE if row.pool == "flow" else style.GREEN if kinder else style.ORANGE
    axes.boxplot(
        [np.maximum(row.wasserstein, _LEAST_DRAWN)],
        positions=[place],
        orientation="horizontal",
        widths=0.6,
        whis=(5, 95),
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": "white" if kinder else colour, "edgecolor": colour},
        whiskerprops={"color": colour},
        capprops={"color": colour},
        medianprops={"color": style.BLACK, "linewidth": 1.8},
    )


def _check(names: Sequence[str], features: str, num_points: int, channels: int, count: int | None) -> None:
    able = cloud_pools()
    unable = [name for name in names if name not in able]
    if unable or not names:
        raise ValueError(f"{', '.join(unable) or 'No pool'} gives a cloud of points; these do: {', '.join(able)}.")
    if features not in get_args(Features):
        raise ValueError(f"Unknown features {features!r}; pass {', '.join(get_args(Features))}.")
    check_count(num_points, "points", MOST_POINTS)
    check_count(channels, "channels", MOST_POINTS)
    if count is not None and count < 1:
        raise ValueError(f"{count} graphs are asked for; pass at least 1.")


def _embedding(features: Features, in_channels: int, channels: int, seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    if features == "propagated":
        return lambda x, edge_index: x
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "backbone"))
        return build_backbone("sgc", in_channels, channels)


def _built(name: str, width: int, num_points: int, seed: int) -> PointPool:
    pool = POOLS[name](width, num_points, seed=derived_seed(seed, "pool"))
    if not isinstance(pool, PointPool):
        raise TypeError(f"Pool {name!r} gives no cloud.")
    return pool.eval()


def _equal(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The same mass for every row that is there, ``(B, M)``."""
    return mask / mask.sum(1, keepdim=True).to(dtype)


def distances(nodes: Tensor, measures: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[float, float]]:
    """W_2^2 / R^2 and S_eps / R^2 between the nodes of a graph ``(N, D)``, of equal mass, and each of the measures.

    Args:
        nodes: not all equal.
        measures: points ``(M, D)`` and their masses ``(M,)``; points of mass zero are not there.
    """
    exact = nodes.double()
    mean = exact.mean(0)
    scale = (exact - mean).square().sum(1).mean().sqrt()  # R
    cloud = (exact - mean) / scale
    node_masses = cloud.new_full((len(cloud),), 1 / len(cloud))
    own = _self_loss(cloud[None], node_masses[None])
    pairs: dict[int, tuple[float, float]] = {}
    present = [(points[masses > 0].double(), masses[masses > 0].double()) for points, masses in measures]
    for size in {len(masses) for _, masses in present}:  # measures of the same size are solved together
        numbers = [number for number, (_, masses) in enumerate(present) if len(masses) == size]
        points = (torch.stack([present[number][0] for number in numbers]) - mean) / scale  # (K, M, D)
        masses = torch.stack([present[number][1] for number in numbers])
        masses = masses / masses.sum(1, keepdim=True)  # to the last digit, or no plan is exact
        cost = _squared_distances(points, cloud[None])  # (K, M, N)
        transport = [
            float(sinkhorn.exact_transport(one, weights, node_masses)[1])
            for one, weights in zip(cost, masses, strict=True)
        ]
        given = cost, masses, node_masses.expand(len(numbers), -1), cost.new_full((len(numbers),), EPSILON)
        between = sinkhorn.value(*given, sinkhorn.solve(*given))
        divergence = between - (_self_loss(points, masses) + own) / 2
        pairs.update(zip(numbers, zip(transport, divergence.tolist(), strict=True), strict=True))
    return [pairs[number] for number in range(len(measures))]


def _nearest(values: Floats) -> list[float]:
    """How often each row of ``(K, B)`` is the least of its column, or as good as that."""
    shares: list[float] = (values <= values.min(0) + _TIE).mean(1).tolist()
    return shares


def _has_spread(nodes: Tensor) -> bool:
    exact = nodes.double()
    variance = (exact - exact.mean(0)).square().sum(1).mean()
    return bool(variance > _ONE_POINT * exact.square().amax())


def _self_loss(clouds: Tensor, masses: Tensor) -> Tensor:
    """L_eps of clouds ``(K, M, D)`` with themselves, ``(K,)``."""
    cost = _squared_distances(clouds, clouds)
    given = cost, masses, masses, cost.new_full((len(cost),), EPSILON)
    return sinkhorn.value(*given, sinkhorn.solve(*given))


def _squared_distances(one: Tensor, other: Tensor) -> Tensor:
    """``(K, M, N)``, from differences: rows that are equal are at zero."""
    return (one[:, :, None] - other[:, None]).square().sum(-1)
