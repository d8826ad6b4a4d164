"""What must not change the pooled points, as a table of numbers (section 7 of the paper).

Each row changes the input and compares the answer with the one that theory demands. The last rows are controls: changes
that must be felt, or the zeros above them would prove nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flowpool import flow_pool, references
from flowpool.lab.paper import style
from flowpool.lab.paper.exhibit import Exhibit, Progress, Table

NUM_POINTS, NUM_FEATURES = 5, 4
SIZES = (3, 8, 9, 17, 24, 40)  # nodes of each graph
TOLERANCE = 1e-9  # of the flow: what is asked about equality must be finer than what is asked about X*
_FLOOR = 1e-17  # where a difference of exactly zero is drawn


@dataclass(frozen=True)
class Change:
    """One change of the input.

    Attributes:
        name: what was changed.
        expected: what theory says about the answer.
        points: largest difference from it over all graphs, in units of the graph's R.
        gradient: the same for the gradient of ``sum(W * X*)`` in Y with fixed random W, relative to its largest entry.
        control: whether the answer has to change.
    """

    name: str
    expected: str
    points: float
    gradient: float
    control: bool = False


@dataclass(frozen=True)
class Batch:
    """Graphs side by side: ``nodes (N, D)``, ``batch (N,)``, ``masses (N,)``, ``weights (B, M, D)`` of the loss."""

    nodes: Tensor
    batch: Tensor
    masses: Tensor
    weights: Tensor


def graphs(seed: int = 0) -> Batch:
    """Random graphs of different sizes, places and scales."""
    generator = torch.Generator().manual_seed(seed)
    clouds = [
        (1 + graph) * torch.randn(size, NUM_FEATURES, generator=generator, dtype=torch.float64) + 10 * graph
        for graph, size in enumerate(SIZES)
    ]
    batch = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    weights = torch.randn(len(SIZES), NUM_POINTS, NUM_FEATURES, generator=generator, dtype=torch.float64)
    return Batch(torch.cat(clouds), batch, torch.ones(sum(SIZES), dtype=torch.float64), weights)


def pool(data: Batch, reference: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """X*, ``(B, M, D)``, and the gradient of ``sum(weights * X*)`` in the nodes, ``(N, D)``."""
    start = references.normal(NUM_FEATURES, NUM_POINTS, seed=2).double() if reference is None else reference
    nodes = data.nodes.clone().requires_grad_()
    points = flow_pool(
        nodes, data.batch, reference=start, masses=data.masses, tolerance=TOLERANCE, dim_size=len(data.weights)
    ).points
    (gradient,) = torch.autograd.grad((data.weights * points).sum(), nodes)
    return points.detach(), gradient


def compute(seed: int = 0, progress: Progress = lambda _: None) -> list[Change]:
    data = graphs(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    points, gradient = pool(data)
    num_nodes, num_graphs = len(data.nodes), len(SIZES)
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    means = (
        torch.zeros(num_graphs, NUM_FEATURES, dtype=torch.float64).index_add(0, data.batch, data.nodes) / sizes[:, None]
    )
    squares = (data.nodes - means[data.batch]).square().sum(-1)
    radius = (torch.zeros(num_graphs, dtype=torch.float64).index_add(0, data.batch, squares) / sizes).sqrt()
    changes: list[Change] = []

    def note(
        name: str,
        expected: str,
        found: Tensor,
        wanted: Tensor,
        slope: Tensor,
        wanted_slope: Tensor,
        control: bool = False,
    ) -> None:
        apart = float(((found - wanted).abs().amax((-1, -2)) / radius).max())
        changes.append(
            Change(name, expected, apart, float((slope - wanted_slope).abs().max() / gradient.abs().max()), control)
        )
        progress(len(changes) / 9)

    # Nodes keep their graph, and their order changes.
    order = torch.cat([torch.randperm(size, generator=generator) + first for size, first in _spans()])
    found, slope = pool(_take(data, order))
    note("nodes of each graph permuted", "same X*", found, points, slope, gradient[order])

    order = torch.randperm(num_nodes, generator=generator)
    found, slope = pool(_take(data, order))
    note("all nodes of the batch shuffled", "same X*", found, points, slope, gradient[order])

    places = torch.randperm(num_graphs, generator=generator)
    moved = Batch(data.nodes, places[data.batch], data.masses, data.weights[places.argsort()])
    order = moved.batch.argsort(stable=True)
    found, slope = pool(_take(moved, order))
    note("graphs permuted", "rows permuted", found[places], points, slope, gradient[order])

    alone = [
        pool(_take(Batch(data.nodes, data.batch * 0, data.masses, data.weights[graph : graph + 1]), index))
        for graph, index in enumerate(_members(data))
    ]
    note(
        "each graph alone",
        "same X*",
        torch.cat([p for p, _ in alone]),
        points,
        torch.cat([s for _, s in alone]),
        gradient,
    )

    extra = torch.randn(num_graphs, NUM_FEATURES, generator=generator, dtype=torch.float64)
    padded = Batch(
        torch.cat([data.nodes, extra]), torch.cat([data.batch, torch.arange(num_graphs)]),
        torch.cat([data.masses, torch.zeros(num_graphs, dtype=torch.float64)]), data.weights,
    )  # fmt: skip
    found, slope = pool(padded)
    note("one node without mass added to each", "same X*", found, points, slope[:num_nodes], gradient)

    twice = Batch(data.nodes.repeat(2, 1), data.batch.repeat(2), data.masses.repeat(2), data.weights)
    found, slope = pool(twice)
    note("every node doubled", "same X*", found, points, slope[:num_nodes] + slope[num_nodes:], gradient)

    found, slope = pool(Batch(3 * data.nodes + 7, data.batch, data.masses, data.weights))
    note("features times 3 plus 7", "X* times 3 plus 7", found, 3 * points + 7, slope, gradient)

    found, slope = pool(
        Batch(
            data.nodes + 1e-3 * radius[data.batch, None] * (torch.arange(num_nodes) % 3 == 0)[:, None],
            data.batch,
            data.masses,
            data.weights,
        )
    )
    note("control: every third node moved by 0.001 R", "another X*", found, points, slope, gradient, True)

    found, slope = pool(data, references.normal(NUM_FEATURES, NUM_POINTS, seed=3).double())
    note("control: another reference", "another X*", found, points, slope, gradient, True)
    return changes


def _spans() -> list[tuple[int, int]]:
    firsts = torch.tensor((0, *SIZES)).cumsum(0).tolist()
    return list(zip(SIZES, firsts[:-1], strict=True))


def _members(data: Batch) -> list[Tensor]:
    return [(data.batch == graph).nonzero().flatten() for graph in range(len(SIZES))]


def _take(data: Batch, order: Tensor) -> Batch:
    return Batch(data.nodes[order], data.batch[order], data.masses[order], data.weights)


def draw(changes: list[Change]) -> Figure:
    figure, axes = style.canvas(width=9.0, height=4.4)
    panel = axes[0, 0]
    rows = list(range(len(changes)))[::-1]
    for values, colour, marker, shift, name in (
        ([c.points for c in changes], style.BLUE, "o", 0.2, "pooled points $X^*$, in units of R"),
        ([c.gradient for c in changes], style.ORANGE, "D", -0.2, "gradient in Y, relative"),
    ):
        shown = [max(value, _FLOOR) for value in values]
        panel.scatter(shown, [row + shift for row in rows], color=colour, marker=marker, s=34, label=name, zorder=3)
        for value, place, row in zip(values, shown, rows, strict=True):
            text = "0" if value == 0 else f"{value:.0e}"
            panel.annotate(
                text, (place, row + shift), xytext=(7, 0), textcoords="offset points", va="center", fontsize=7
            )
    panel.axvline(torch.finfo(torch.float64).eps, color=style.GREY, lw=0.9, ls="--")
    panel.text(torch.finfo(torch.float64).eps * 1.3, len(changes) - 0.45, "rounding", fontsize=7, color=style.GREY)
    panel.set_xscale("log")
    panel.set_xlim(_FLOOR / 3, 30)
    panel.set_ylim(-0.6, len(changes) - 0.2)
    panel.set_yticks(rows, [f"{change.name}\n({change.expected})" for change in changes], fontsize=7.5)
    panel.set_xlabel("largest difference from what is expected (exact zero drawn at the left edge)")
    panel.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
    return figure


def make(progress: Progress) -> Exhibit:
    changes = compute(progress=progress)
    kept = [change for change in changes if not change.control]
    felt = [change for change in changes if change.control]
    numbers = {
        "points_largest": max(change.points for change in kept),
        "gradient_largest": max(change.gradient for change in kept),
        "control_smallest": min(change.points for change in felt),
    }
    rows = "\n".join(f"| {c.name} | {c.expected} | {c.points:.1e} | {c.gradient:.1e} |" for c in changes)
    caption = (
        f"Changes of the input that must not change the answer, on {len(SIZES)} random graphs of {min(SIZES)} to "
        f"{max(SIZES)} "
        f"nodes (M = {NUM_POINTS}, D = {NUM_FEATURES}, relative epsilon 0.1, flow stopped at a Newton step of "
        f"{TOLERANCE:g} R). "
        f"Largest difference: {numbers['points_largest']:.1e} R in X*, {numbers['gradient_largest']:.1e} in the "
        "gradient. The "
        f"controls, which must be felt, move X* by at least {numbers['control_smallest']:.1e} R.\n\n"
        f"| change | expected | X*, in R | gradient, relative |\n|---|---|---|---|\n{rows}"
    )
    table: Table = {
        "change": [change.name for change in changes],
        "expected": [change.expected for change in changes],
        "points_difference": [change.points for change in changes],
        "gradient_difference": [change.gradient for change in changes],
    }
    return Exhibit(draw(changes), caption, numbers, {"": table})
