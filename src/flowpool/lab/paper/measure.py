"""A graph of seven nodes and its probability measure in the plane (section 4 of the paper).

The features are noise, averaged twice over the neighbours as by the paper's SGC layer, so that the measure holds
something of the edges. What it does not hold is the numbering of the nodes; both are measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flowpool.core import sinkhorn
from flowpool.core.measures import make_clouds
from flowpool.lab.datasets.record import smooth
from flowpool.lab.paper import style
from flowpool.lab.paper.exhibit import Exhibit, Progress

EDGES = ((0, 1), (1, 2), (2, 3), (3, 0), (2, 4), (4, 5), (4, 6))
PLACES = ((0.0, 0.6), (0.9, 1.5), (1.8, 0.6), (0.9, -0.4), (3.9, 0.6), (4.9, 1.4), (4.9, -0.3))  # for drawing only
# Side and offset of each label, clear of the edges.
LABELS = (
    ("right", -12, 0),
    ("center", 0, 18),
    ("left", 2, -17),
    ("center", 0, -18),
    ("right", 2, 16),
    ("left", 12, 0),
    ("left", 12, 0),
)


@dataclass(frozen=True)
class GraphMeasure:
    """The measure of the graph and how far changes of the graph move it.

    Attributes:
        nodes: Y, ``(7, 2)``.
        masses: b, ``(7,)``.
        renumbered: W_2 between the measures of the graph and of the same graph with its nodes renumbered.
        cut: the same for the graph without its last edge.
    """

    nodes: Tensor
    masses: Tensor
    renumbered: float
    cut: float


def compute(seed: int = 3) -> GraphMeasure:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(7, 2, generator=generator, dtype=torch.float64)
    edges = torch.tensor(EDGES).T
    both = torch.cat([edges, edges.flip(0)], 1)  # (2, E)
    nodes = smooth(noise, both)
    clouds, _ = make_clouds(nodes)
    order = torch.randperm(7, generator=generator)
    place = order.argsort()
    renumbered = smooth(noise[order], place[both])
    without = smooth(noise, both[:, ~torch.isin(torch.arange(both.shape[1]), torch.tensor([6, 13]))])
    return GraphMeasure(
        nodes,
        clouds.masses,
        float(sinkhorn.wasserstein(nodes, renumbered)),
        float(sinkhorn.wasserstein(nodes, without)),
    )


def draw(record: GraphMeasure) -> Figure:
    figure, axes = style.canvas(2, width=9.0, height=3.9)
    _draw_graph(axes[0, 0], record.nodes.numpy())
    _draw_measure(axes[0, 1], record)
    return figure


def _draw_graph(axes: Axes, nodes: np.ndarray) -> None:
    style.plane(axes, "graph G, each node with its representation")
    places = np.array(PLACES)
    for first, second in EDGES:
        axes.plot(*places[[first, second]].T, color=style.GREY, zorder=1)
    style.scatter(axes, places, s=330, color=style.SKY, edgecolor=style.BLACK, zorder=2)
    for number, (place, (first, second), (side, right, up)) in enumerate(zip(places, nodes, LABELS, strict=True), 1):
        axes.text(place[0], place[1], str(number), ha="center", va="center", zorder=3)
        axes.annotate(
            f"[{first:.2f}; {second:.2f}]", place, xytext=(right, up), textcoords="offset points", ha=side, va="center",
            fontsize=8,
        )  # fmt: skip
    axes.set_xlim(-1.4, 6.4)
    axes.set_axis_off()


def _draw_measure(axes: Axes, record: GraphMeasure) -> None:
    style.plane(axes, r"its measure $\nu=\Sigma_j\,b_j\,\delta_{y_j}$ with $b_j=1/7$")
    nodes = record.nodes.numpy()
    areas = 1500 * record.masses.numpy()
    style.scatter(axes, nodes, s=areas, color=style.BLUE, alpha=0.55, label=r"$\delta_{y_j}$, area = mass $b_j$")
    style.scatter(
        axes, (record.masses.numpy() @ nodes)[None], marker="+", s=90, color=style.RED, label=r"mean $b^\top Y$"
    )
    for number, place in enumerate(nodes, 1):
        axes.annotate(str(number), place, xytext=(9, 6), textcoords="offset points", fontsize=8)
    axes.margins(0.15)
    axes.set_xlabel("feature 1")
    axes.set_ylabel("feature 2")
    axes.legend(loc="best")


def make(progress: Progress) -> Exhibit:
    record = compute()
    progress(0.5)
    total = float(record.masses.sum())
    caption = (
        f"A graph of 7 nodes as the measure of its node representations: 7 atoms of mass 1/7, total mass {total:.6f}. "
        f"Renumbering the nodes moves the measure by W2 = {record.renumbered:.1e}; cutting one edge (5-7) moves it by "
        f"W2 = {record.cut:.3f}, because the representations come from a layer that averages over neighbours."
    )
    table = {
        "node": list(range(1, 8)),
        "feature_1": record.nodes[:, 0].tolist(),
        "feature_2": record.nodes[:, 1].tolist(),
        "mass": record.masses.tolist(),
    }
    numbers = {"total_mass": total, "w2_renumbered": record.renumbered, "w2_edge_cut": record.cut}
    return Exhibit(draw(record), caption, numbers, {"": table})
