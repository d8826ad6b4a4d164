"""The flow of M points towards a cloud, its energy by step, and the entropic bias (sections 3.3, 5 and 6).

The paths are those of Algorithm 1 with a short fixed step; their end is compared with what ``flow_pool`` gives for the
same reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from flowpool import flow_pool, references
from flowpool.core.divergence import make_energy, sinkhorn_divergence
from flowpool.core.flow import descend
from flowpool.lab.paper import style
from flowpool.lab.paper.exhibit import Exhibit, Progress

NUM_POINTS = 8
EPSILON = 0.1  # of the paths, relative to R^2
BIAS_EPSILON = 0.5  # at which the bias is drawn
STEP = 0.125
LEVELS = (0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
_FRAMES = 45


@dataclass(frozen=True)
class Paths:
    """A flow, and what the pooled points keep of the spread of the cloud.

    Attributes:
        nodes: Y, ``(N, 2)``, of mean zero and variance one.
        steps: X^(0) .. X^(L), ``(L + 1, M, 2)``.
        energy: S_eps(X^(l), Y), ``(L + 1,)``.
        pooled: X* of ``flow_pool``, ``(M, 2)``.
        levels: epsilon of the two rows below, in units of R^2, ``(E,)``.
        biased: X* of L_eps, ``(E, M, 2)``.
        debiased: X* of S_eps, ``(E, M, 2)``.
    """

    nodes: Tensor
    steps: Tensor
    energy: Tensor
    pooled: Tensor
    levels: Tensor
    biased: Tensor
    debiased: Tensor

    @property
    def end_error(self) -> float:
        """Largest distance between the end of Algorithm 1 and ``flow_pool``, in units of R."""
        return float((self.steps[-1] - self.pooled).norm(dim=-1).max())

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        """Radius of X* over radius of Y at each level, for L_eps and for S_eps, each ``(E,)``."""
        return radius(self.biased) / radius(self.nodes), radius(self.debiased) / radius(self.nodes)


def radius(points: Tensor) -> Tensor:
    """Root of the sum of the variances of clouds ``(..., M, D)``."""
    return (points - points.mean(-2, keepdim=True)).square().sum(-1).mean(-1).sqrt()


def crescent(num_nodes: int = 60, seed: int = 0) -> Tensor:
    """A bent band and a small ball, standardised, ``(N, 2)``: a cloud that its mean describes badly."""
    generator = torch.Generator().manual_seed(seed)
    noise = 0.12 * torch.randn(num_nodes, 2, generator=generator, dtype=torch.float64)
    angle = torch.linspace(-0.3, 3.4, num_nodes - num_nodes // 4, dtype=torch.float64)
    band = torch.stack([angle.cos(), angle.sin()], 1)
    ball = torch.tensor([0.0, -0.5], dtype=torch.float64).expand(num_nodes // 4, 2)
    nodes = torch.cat([band, ball]) + noise
    nodes = nodes - nodes.mean(0)
    return nodes / radius(nodes)


def compute(num_steps: int = 600, levels: tuple[float, ...] = LEVELS, progress: Progress = lambda _: None) -> Paths:
    nodes = crescent()
    start = 0.8 * references.normal(2, NUM_POINTS, seed=4).double() + torch.tensor([1.5, 1.0])
    steps = record_steps(nodes, start, num_steps)
    progress(0.5)
    energy = sinkhorn_divergence(steps, nodes.expand(len(steps), -1, -1), EPSILON)
    pooled = flow_pool(nodes, reference=start, epsilon=EPSILON, gradient="none").points[0]
    progress(0.7)
    many = nodes.repeat(len(levels), 1)
    batch = torch.arange(len(levels)).repeat_interleave(len(nodes))
    epsilon = torch.tensor(levels, dtype=torch.float64)
    ends = [
        flow_pool(many, batch, reference=start, epsilon=epsilon, debias=debias, gradient="none").points
        for debias in (False, True)
    ]
    return Paths(nodes, steps, energy, pooled, epsilon, *ends)


def record_steps(nodes: Tensor, start: Tensor, num_steps: int) -> Tensor:
    """The points along Algorithm 1, ``(L + 1, M, D)``."""
    visited = [start]

    def remember(points: Tensor, gradient: Tensor, step: float, _: None) -> tuple[Tensor, None]:
        visited.append((points - step * gradient)[0])
        return visited[-1][None], None

    energy = make_energy(start[None], nodes[None], EPSILON)
    with torch.no_grad():
        descend(energy, start[None], STEP * len(start) / 2, num_steps, tolerance=1e-6, update_step=remember)
    return torch.stack(visited)


def draw(record: Paths) -> Figure:
    figure, axes = style.canvas(2, 2, height=7.0)
    _draw_paths(axes[0, 0], record)
    _draw_energy(axes[0, 1], record)
    _draw_bias(axes[1, 0], record)
    _draw_spread(axes[1, 1], record)
    return figure


def _draw_paths(axes: Axes, record: Paths) -> None:
    style.plane(axes, f"paths of {NUM_POINTS} points, epsilon = {EPSILON} $R^2$")
    _draw_cloud(axes, record.nodes)
    for point in range(NUM_POINTS):
        axes.plot(*record.steps[:, point].T, color=style.RED, lw=1.0, alpha=0.8, label="path" if point == 0 else None)
    style.scatter(axes, record.steps[0], marker="x", s=32, color=style.BLACK, label="reference $X^{(0)}$", zorder=3)
    style.scatter(axes, record.pooled, s=52, color=style.RED, edgecolor=style.BLACK, label="pooled $X^*$", zorder=4)
    axes.legend(loc="upper left")


def _draw_cloud(axes: Axes, nodes: Tensor) -> None:
    style.scatter(axes, nodes, s=14, color=style.SKY, label="nodes $Y$")


def _draw_energy(axes: Axes, record: Paths) -> None:
    axes.plot(record.energy, color=style.BLUE, label=r"$S_\varepsilon(X^{(l)}, Y)$")
    excess = record.energy - record.energy[-1]
    shown = excess > 1e-12
    axes.plot(
        torch.arange(len(excess))[shown], excess[shown], color=style.ORANGE, ls="--", label="above its last value"
    )
    axes.set_yscale("log")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, None)
    axes.set_xlabel(f"step $l$ of length {STEP}")
    axes.set_ylabel("energy, in $R^2$")
    axes.set_title("energy along the flow")
    axes.legend(loc="lower left")


def _draw_bias(axes: Axes, record: Paths) -> None:
    style.plane(axes, f"entropic bias at epsilon = {BIAS_EPSILON} $R^2$")
    level = int((record.levels - BIAS_EPSILON).abs().argmin())
    _draw_cloud(axes, record.nodes)
    style.scatter(
        axes, record.biased[level], s=60, marker="^", color=style.ORANGE, edgecolor=style.BLACK, zorder=4,
        label=r"$X^*$ of $L_\varepsilon$",
    )  # fmt: skip
    style.scatter(
        axes, record.debiased[level], s=52, color=style.RED, edgecolor=style.BLACK, zorder=3,
        label=r"$X^*$ of $S_\varepsilon$",
    )  # fmt: skip
    axes.legend(loc="upper left")


def _draw_spread(axes: Axes, record: Paths) -> None:
    biased, debiased = record.kept
    axes.plot(record.levels, debiased, marker="o", color=style.RED, label=r"debiased, $S_\varepsilon$")
    axes.plot(record.levels, biased, marker="^", ls="--", color=style.ORANGE, label=r"biased, $L_\varepsilon$")
    axes.axhline(1, color=style.GREY, lw=0.9)
    axes.set_xscale("log")
    axes.set_ylim(-0.03, 1.08)
    axes.set_xlabel(r"$\varepsilon$, in $R^2$")
    axes.set_ylabel("radius of $X^*$ / radius of $Y$")
    axes.set_title("what is kept of the spread")
    axes.legend(loc="lower left")


def animate(record: Paths) -> list[Image.Image]:
    """Frames of the moving points, dense where they move fast."""
    moved = (record.steps.diff(dim=0).norm(dim=-1).mean(1)).cumsum(0)
    goals = torch.linspace(0, float(moved[-1]) * 0.999, _FRAMES - 2, dtype=moved.dtype)
    chosen = [0, *(torch.searchsorted(moved, goals) + 1).tolist(), len(moved)]
    figure, axes = style.canvas(width=4.4, height=3.9)
    view = axes[0, 0]
    frames = []
    for step in chosen:
        view.clear()
        view.set_aspect("equal")
        view.set_axis_off()
        _draw_cloud(view, record.nodes)
        for point in range(NUM_POINTS):
            view.plot(*record.steps[: step + 1, point].T, color=style.RED, lw=0.8, alpha=0.6)
        style.scatter(view, record.steps[0], marker="x", s=40, color=style.BLACK)
        style.scatter(view, record.steps[step], s=80, color=style.RED, edgecolor=style.BLACK, zorder=4)
        view.set_xlim(-1.9, 2.7)
        view.set_ylim(-1.9, 2.2)
        view.set_title(f"step {step}: divergence {float(record.energy[step]):.3f}", fontsize=17)
        frames.append(style.snapshot(figure))
    return frames


def make(progress: Progress) -> Exhibit:
    record = compute(progress=progress)
    progress(0.9)
    level = int((record.levels - BIAS_EPSILON).abs().argmin())
    biased, debiased = record.kept
    rises = int((record.energy.diff() > 1e-12).sum())
    numbers = {
        "steps": float(len(record.steps) - 1),
        "energy_first": float(record.energy[0]),
        "energy_last": float(record.energy[-1]),
        "energy_rises": float(rises),
        "end_error": record.end_error,
        "kept_biased": float(biased[level]),
        "kept_debiased": float(debiased[level]),
        "kept_biased_last": float(biased[-1]),
        "kept_debiased_last": float(debiased[-1]),
    }
    caption = (
        f"Flow of {NUM_POINTS} points to {len(record.nodes)} nodes (epsilon = {EPSILON} R^2, Algorithm 1, step "
        f"{STEP}): the "
        f"energy falls from {record.energy[0]:.3f} to {record.energy[-1]:.4f} R^2 in {len(record.steps) - 1} steps and "
        "rises "
        f"in {rises} of them; the end is within {record.end_error:.1e} R of what `flow_pool` gives. Entropic bias: at "
        f"epsilon = {BIAS_EPSILON} R^2 the minimiser of L_eps keeps {biased[level]:.0%} of the radius of the cloud, "
        "that of "
        f"S_eps {debiased[level]:.0%} (biased points also fall onto each other); at epsilon = {record.levels[-1]:g} "
        f"R^2 {biased[-1]:.0%} and {debiased[-1]:.0%}."
    )
    energy = {"step": list(range(len(record.energy))), "energy": record.energy.tolist()}
    places = record.steps.flatten(0, 1)
    paths = {
        "step": [step for step in range(len(record.steps)) for _ in range(NUM_POINTS)],
        "point": list(range(NUM_POINTS)) * len(record.steps),
        "x": places[:, 0].tolist(),
        "y": places[:, 1].tolist(),
    }
    spread = {"epsilon": record.levels.tolist(), "kept_biased": biased.tolist(), "kept_debiased": debiased.tolist()}
    tables = {"energy": energy, "paths": paths, "spread": spread}
    return Exhibit(draw(record), caption, numbers, tables, animate(record))
