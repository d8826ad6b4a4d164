"""Pooled points of the MUTAG molecules, and where the atoms of one of them flow.

The representation is the paper's: atom types, averaged over two hops by an SGC layer (here without weights), pooled to
M = 5 points from one reference for all molecules.
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx  # type: ignore[import-untyped]
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from torch import Tensor

from flowpool import flow_pool, references
from flowpool.core import sinkhorn
from flowpool.lab.datasets import GraphDataset, load_dataset
from flowpool.lab.datasets.record import smooth
from flowpool.lab.datasets.tu import ATOMS
from flowpool.lab.paper import style
from flowpool.lab.paper.exhibit import Exhibit, Progress

NUM_POINTS = 5
MOLECULE = 53  # two rings with a nitro group and two chlorine atoms
_MARKERS = ("o", "^", "s", "D", "v")


@dataclass(frozen=True)
class Pools:
    """MUTAG pooled.

    Attributes:
        points: X* of every molecule, ``(B, M, D)``.
        labels: ``(B,)``.
        converged: ``(B,)`` bool.
        lost: W_2^2(X*, Y) / R^2 of every molecule, ``(B,)``.
        lost_by_choice: the same for M atoms chosen at random instead of X*, mean of a few draws, ``(B,)``.
        plan: coupling of the one molecule, ``(M, N)``.
        nodes: its atoms' representations, ``(N, D)``.
        atoms: its atom types, ``(N,)``.
        edges: its bonds, ``(2, E)``.
    """

    points: Tensor
    labels: Tensor
    converged: Tensor
    lost: Tensor
    lost_by_choice: Tensor
    plan: Tensor
    nodes: Tensor
    atoms: Tensor
    edges: Tensor


def representations(dataset: GraphDataset) -> list[Tensor]:
    """Atom types averaged over two hops, one ``(N, D)`` per molecule."""
    return [smooth(graph.x.double(), graph.edge_index) for graph in dataset]


def lost_share(points: Tensor, nodes: Tensor) -> float:
    """``W_2^2(X, Y) / R^2``: what the M points miss of the cloud, in units of its variance."""
    variance = (nodes - nodes.mean(0)).square().sum(-1).mean()
    return float(sinkhorn.wasserstein(points, nodes).square() / variance)


def compute(num_graphs: int | None = None, molecule: int = MOLECULE, progress: Progress = lambda _: None) -> Pools:
    dataset = load_dataset("MUTAG")
    clouds = representations(dataset)[:num_graphs]
    nodes = torch.cat(clouds)
    sizes = torch.tensor([len(cloud) for cloud in clouds])
    reference = references.kmeans(nodes, NUM_POINTS, seed=0)
    progress(0.1)
    pooled = flow_pool(nodes, torch.arange(len(clouds)).repeat_interleave(sizes), reference=reference, gradient="none")
    progress(0.7)
    generator = torch.Generator().manual_seed(0)
    lost = [lost_share(points, cloud) for points, cloud in zip(pooled.points, clouds, strict=True)]
    chosen = [
        sum(lost_share(cloud[torch.randperm(len(cloud), generator=generator)[:NUM_POINTS]], cloud) for _ in range(5))
        / 5
        for cloud in clouds
    ]
    progress(0.9)
    graph = dataset[molecule]
    return Pools(
        pooled.points, dataset.labels[: len(clouds)], pooled.converged, torch.tensor(lost), torch.tensor(chosen),
        pooled.plan(molecule), clouds[molecule], graph.x.argmax(1), graph.edge_index,
    )  # fmt: skip


def principal_axes(points: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean ``(D,)``, the two leading directions ``(D, 2)`` and their share of the variance."""
    mean = points.mean(0)
    _, values, directions = torch.linalg.svd(points - mean, full_matrices=False)
    share = values[:2].square().sum() / values.square().sum()
    return mean, directions[:2].T, float(share)


def draw(record: Pools, dataset_classes: tuple[str, ...]) -> Figure:
    figure, axes = style.canvas(3, width=12.0, height=4.2)
    mean, directions, share = principal_axes(record.points.flatten(0, 1))
    _draw_classes(axes[0, 0], record, (record.points - mean) @ directions, share, dataset_classes)
    _draw_molecule(axes[0, 1], record)
    _draw_flow(axes[0, 2], record, mean, directions)
    return figure


def _draw_classes(axes: Axes, record: Pools, places: Tensor, share: float, classes: tuple[str, ...]) -> None:
    for label, (colour, marker) in enumerate(((style.BLUE, "o"), (style.ORANGE, "^"))):
        chosen = places[record.labels == label].flatten(0, 1)
        style.scatter(
            axes, chosen, s=12, alpha=0.45, lw=0, color=colour, marker=marker, label=f"class {classes[label]}"
        )
    axes.set_title(f"{NUM_POINTS} pooled points of {len(places)} molecules")
    _name_axes(axes)
    axes.set_xlabel(f"principal axis 1 (both: {share:.0%} of the variance)")
    axes.legend(loc="best", markerscale=1.8)


def _name_axes(axes: Axes) -> None:
    axes.set_xlabel("principal axis 1")
    axes.set_ylabel("principal axis 2")


def _draw_molecule(axes: Axes, record: Pools) -> None:
    graph = networkx.Graph(record.edges.T.tolist())
    layout = networkx.kamada_kawai_layout(graph)
    places = np.array([layout[node] for node in range(len(record.atoms))])
    for first, second in graph.edges:
        axes.plot(*places[[first, second]].T, color=style.GREY, lw=1.4, zorder=1)
    parts = (record.plan / record.plan.sum(0)).T.tolist()  # (N, M)
    for place, shares, atom in zip(places, parts, record.atoms.tolist(), strict=True):
        wedges = {"linewidth": 0, "zorder": 2}
        axes.pie(shares, center=tuple(place), radius=0.085, colors=style.CYCLE[:NUM_POINTS], wedgeprops=wedges)
        name = axes.text(place[0], place[1], ATOMS[atom], ha="center", va="center", fontsize=8, weight="bold", zorder=3)
        name.set_path_effects([withStroke(linewidth=2, foreground="white")])
    axes.set_title(f"molecule {MOLECULE}: the point each atom flows to")
    axes.set_aspect("equal")
    axes.set_xlim(places[:, 0].min() - 0.15, places[:, 0].max() + 0.15)
    axes.set_ylim(places[:, 1].min() - 0.15, places[:, 1].max() + 0.15)
    axes.set_axis_off()


def _draw_flow(axes: Axes, record: Pools, mean: Tensor, directions: Tensor) -> None:
    atoms, points = (record.nodes - mean) @ directions, (record.points[MOLECULE] - mean) @ directions
    for point, colour in enumerate(style.CYCLE[:NUM_POINTS]):
        for atom in range(len(atoms)):
            share = float(record.plan[point, atom] / record.plan[:, atom].sum())
            if share > 0.05:
                axes.plot(
                    *torch.stack([points[point], atoms[atom]]).T, color=colour, lw=1.2, alpha=0.7 * share, zorder=1
                )
    style.scatter(axes, atoms, s=22, color="white", edgecolor=style.BLACK, zorder=2, label="atoms")
    for point, colour in enumerate(style.CYCLE[:NUM_POINTS]):
        style.scatter(
            axes,
            points[point : point + 1],
            s=90,
            color=colour,
            marker=_MARKERS[point],
            edgecolor=style.BLACK,
            zorder=3,
            label=f"point {point + 1}",
        )
    axes.set_title("the same in the plane of the features")
    _name_axes(axes)
    axes.legend(loc="best")


def make(progress: Progress) -> Exhibit:
    record = compute(progress=progress)
    classes = load_dataset("MUTAG").class_names
    numbers = {
        "molecules": float(len(record.points)),
        "converged": float(record.converged.sum()),
        "lost": float(record.lost.mean()),
        "lost_by_choice": float(record.lost_by_choice.mean()),
        "better_for": float((record.lost < record.lost_by_choice).double().mean()),
    }
    caption = (
        f"MUTAG, {numbers['molecules']:.0f} molecules, atom types averaged over two hops, pooled to {NUM_POINTS} "
        "points (relative "
        f"epsilon 0.1, one k-means reference for all; {numbers['converged']:.0f} converged). The pooled points miss "
        f"W2^2 / R^2 = {numbers['lost']:.3f} of the variance of the atoms' representations on average; {NUM_POINTS} "
        "atoms "
        f"chosen at random miss {numbers['lost_by_choice']:.3f}, and more for {numbers['better_for']:.1%} of the "
        "molecules. "
        f"Middle and right: molecule {MOLECULE}, its atoms coloured by the pooled points that their mass goes to."
    )
    coordinates = record.points.flatten(0, 1)
    points = {
        "graph": torch.arange(len(record.points)).repeat_interleave(NUM_POINTS).tolist(),
        "class": [classes[label] for label in record.labels.repeat_interleave(NUM_POINTS).tolist()],
        "point": list(range(1, NUM_POINTS + 1)) * len(record.points),
        **{f"feature_{place}": column.tolist() for place, column in enumerate(coordinates.T, 1)},
    }
    coupling = {
        "atom": list(range(len(record.atoms))),
        "type": [ATOMS[atom] for atom in record.atoms.tolist()],
        **{f"to_point_{point}": row.tolist() for point, row in enumerate(record.plan, 1)},
    }
    lost = {
        "graph": list(range(len(record.lost))),
        "lost": record.lost.tolist(),
        "lost_by_choice": record.lost_by_choice.tolist(),
    }
    return Exhibit(draw(record, classes), caption, numbers, {"points": points, "plan": coupling, "lost": lost})
