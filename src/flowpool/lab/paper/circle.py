r"""The paper's illustrative example (section 9.1): a cloud whose pooled points are driven onto the unit circle.

.. math:: \min_Y | X(Y)^{\circ 2} 1_2 - 1_{12} |_2^2, \qquad Y \in R^{20 \times 2}, \; X \in R^{12 \times 2}

by Adam at 0.01, once through the implicit derivative of FlowPool and once through a flow of a few steps that is
unrolled. Epsilon is absolute, as in the paper; the energy is the debiased S_eps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from flowpool import flow_pool, references
from flowpool.lab.paper import style
from flowpool.lab.paper.exhibit import Exhibit, Progress, Table
from flowpool.pooling import Pooled

NUM_POINTS, NUM_NODES = 12, 20
EPSILON = 0.1
RATE = 0.01  # of Adam
CLOSE = 3e-4  # largest distance of X to the circle at which the search ends
UNROLLED_STEPS = 10
UNROLLED_LENGTH = 0.25
_FRAMES = 45


@dataclass(frozen=True)
class Descent:
    """A minimisation over Y.

    Attributes:
        nodes: Y before every step of Adam and at the end, ``(T, N, 2)``.
        points: the pooled points that the loss saw, ``(T, M, 2)``.
        loss: ``(T,)``.
    """

    nodes: Tensor
    points: Tensor
    loss: Tensor


def start(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Y, standard normal, and the reference X^(0) of the same law."""
    generator = torch.Generator().manual_seed(seed)
    nodes = torch.randn(NUM_NODES, 2, generator=generator, dtype=torch.float64)
    return nodes, math.sqrt(2) * references.normal(2, NUM_POINTS, seed=1).double()


def pool(nodes: Tensor, reference: Tensor, unrolled_steps: int | None = None) -> Pooled:
    """FlowPool of one cloud, differentiated implicitly, or a flow of so many steps, unrolled."""
    if unrolled_steps is None:
        return flow_pool(nodes, reference=reference, epsilon=EPSILON, relative=False)
    return flow_pool(
        nodes, reference=reference, epsilon=EPSILON, relative=False, gradient="unrolled", max_steps=unrolled_steps,
        step_size=UNROLLED_LENGTH,
    )  # fmt: skip


def objective(points: Tensor) -> Tensor:
    """``|X^2 1 - 1|^2`` of ``(..., M, 2)``."""
    return (points.square().sum(-1) - 1).square().sum(-1)


def distances(points: Tensor) -> Tensor:
    """Distance of each point to the unit circle."""
    lengths: Tensor = points.norm(dim=-1)
    return (lengths - 1).abs()


def minimise(
    initial: Tensor,
    reference: Tensor,
    max_steps: int,
    unrolled_steps: int | None = None,
    progress: Progress = lambda _: None,
) -> Descent:
    """Adam from ``initial (N, 2)`` until the pooled points are within ``CLOSE`` of the circle, or ``max_steps``."""
    nodes = initial.clone().requires_grad_()
    adam = torch.optim.Adam([nodes], lr=RATE)
    seen_nodes, seen_points, losses = [], [], []
    for step in range(max_steps):
        points = pool(nodes, reference, unrolled_steps).points[0]
        loss = objective(points)
        seen_nodes.append(nodes.detach().clone())
        seen_points.append(points.detach())
        losses.append(loss.detach())
        worst = float(distances(points.detach()).max())
        # The distance falls by a power of ten in about 150 steps, from about 1.
        progress(min(0.99, max(step / max_steps, math.log(max(worst, CLOSE)) / math.log(CLOSE))))
        if worst < CLOSE:
            break
        adam.zero_grad()
        loss.backward()
        adam.step()
    return Descent(torch.stack(seen_nodes), torch.stack(seen_points), torch.stack(losses))


@dataclass(frozen=True)
class Circle:
    """Both minimisations, the true X* at the end of the unrolled one, and the error of its first gradient.

    Attributes:
        implicit, unrolled: see :class:`Descent`.
        unrolled_end: X* of the last Y of the unrolled descent, ``(M, 2)``.
        gradient_steps: numbers of unrolled steps.
        gradient_error: relative error of the first gradient in Y with so many steps, against the implicit one.
    """

    implicit: Descent
    unrolled: Descent
    unrolled_end: Tensor
    gradient_steps: tuple[int, ...]
    gradient_error: list[float]


def first_gradient(nodes: Tensor, reference: Tensor, unrolled_steps: int | None) -> Tensor:
    """Gradient of the loss in Y, ``(N, 2)``."""
    nodes = nodes.clone().requires_grad_()
    objective(pool(nodes, reference, unrolled_steps).points[0]).backward()
    if nodes.grad is None:
        raise RuntimeError("No gradient reached the nodes.")
    return nodes.grad


def compute(max_steps: int = 1500, progress: Progress = lambda _: None) -> Circle:
    nodes, reference = start()
    implicit = minimise(nodes, reference, max_steps, progress=lambda share: progress(0.4 * share))
    steps = len(implicit.loss)
    unrolled = minimise(nodes, reference, steps, UNROLLED_STEPS, lambda share: progress(0.4 + 0.5 * share))
    end = pool(unrolled.nodes[-1], reference).points[0]
    exact = first_gradient(nodes, reference, None)
    lengths = (5, 10, 20, 40, 80, 160)
    errors = [float((first_gradient(nodes, reference, k) - exact).norm() / exact.norm()) for k in lengths]
    return Circle(implicit, unrolled, end, lengths, errors)


def draw(record: Circle) -> Figure:
    figure, axes = style.canvas(3, width=11.0, height=3.9)
    before, after, curves = axes[0]
    for panel, step, title in (
        (before, 0, "before"),
        (after, -1, f"after {len(record.implicit.loss) - 1} steps of Adam"),
    ):
        _draw_state(panel, record.implicit, step)
        panel.set_title(title)
    after.legend(loc="upper right")
    curves.plot(distances(record.implicit.points).amax(-1), color=style.RED, label="X, largest; implicit")
    curves.plot(
        distances(record.unrolled.points).amax(-1),
        color=style.PURPLE,
        ls="-.",
        label=f"X, largest; {UNROLLED_STEPS} steps unrolled",
    )
    curves.plot(distances(record.implicit.nodes).mean(-1), color=style.BLUE, ls="--", label="Y, mean; implicit")
    curves.axhline(1e-3, color=style.GREY, lw=0.9)
    curves.set_yscale("log")
    curves.set_xlabel("step of Adam")
    curves.set_ylabel("distance to the unit circle")
    curves.set_title("on the way")
    curves.legend(loc="lower left")
    return figure


def _draw_state(axes: Axes, descent: Descent, step: int) -> None:
    angle = torch.linspace(0, 2 * math.pi, 200)
    axes.plot(angle.cos(), angle.sin(), color=style.GREY, lw=1.0)
    style.scatter(axes, descent.nodes[step], s=26, color=style.SKY, edgecolor=style.BLUE, label="nodes Y", zorder=2)
    style.scatter(axes, descent.points[step], s=30, marker="D", color=style.RED, label="pooled X", zorder=3)
    axes.set_aspect("equal")
    axes.set_xlim(-2.5, 2.5)
    axes.set_ylim(-2.5, 2.5)
    axes.grid(False)


def animate(record: Circle) -> list[Image.Image]:
    descent = record.implicit
    moved = descent.nodes.diff(dim=0).norm(dim=-1).mean(1).cumsum(0)
    goals = torch.linspace(0, float(moved[-1]) * 0.999, _FRAMES - 2, dtype=moved.dtype)
    figure, axes = style.canvas(width=3.9, height=4.0)
    frames = []
    for step in [0, *(torch.searchsorted(moved, goals) + 1).tolist(), len(moved)]:
        axes[0, 0].clear()
        _draw_state(axes[0, 0], descent, step)
        axes[0, 0].set_axis_off()
        axes[0, 0].set_title(f"Adam step {step}, loss {float(descent.loss[step]):.2e}")
        frames.append(style.snapshot(figure))
    return frames


def make(progress: Progress) -> Exhibit:
    record = compute(progress=progress)
    final = record.implicit
    numbers = {
        "adam_steps": float(len(final.loss) - 1),
        "loss": float(final.loss[-1]),
        "points_largest": float(distances(final.points[-1]).max()),
        "nodes_mean_before": float(distances(final.nodes[0]).mean()),
        "nodes_mean": float(distances(final.nodes[-1]).mean()),
        "nodes_largest": float(distances(final.nodes[-1]).max()),
        "unrolled_points_largest": float(distances(record.unrolled.points[-1]).max()),
        "unrolled_true_largest": float(distances(record.unrolled_end).max()),
    }
    errors = ", ".join(
        f"{error:.1g} ({steps})" for steps, error in zip(record.gradient_steps, record.gradient_error, strict=True)
    )
    caption = (
        f"Pooled points driven onto the unit circle (Y {NUM_NODES}x2, X {NUM_POINTS}x2, S_eps with absolute epsilon "
        f"{EPSILON}, Adam at {RATE}, implicit gradient, the same reference in every step). After "
        f"{numbers['adam_steps']:.0f} steps the largest distance of X to the circle is {numbers['points_largest']:.1e} "
        f"and the mean distance of Y {numbers['nodes_mean']:.3f} (largest {numbers['nodes_largest']:.3f}; before: mean "
        f"{numbers['nodes_mean_before']:.3f}). Y comes close to the circle, not onto it: the loss asks for its pooled "
        "points only, and those lie between nodes. The jumps on the way are changes of basin: X(Y) is smooth only "
        "within one. "
        f"Through {UNROLLED_STEPS} unrolled steps (length {UNROLLED_LENGTH}) the same number of Adam steps leaves the "
        f"points that the loss saw within {numbers['unrolled_points_largest']:.1e} of the circle, but the true X* of "
        f"that Y within {numbers['unrolled_true_largest']:.1e}. Relative error of the first unrolled gradient by "
        "number of "
        f"steps: {errors}."
    )
    course = {
        "step": list(range(len(final.loss))),
        "loss_implicit": final.loss.tolist(),
        "points_largest_implicit": distances(final.points).amax(-1).tolist(),
        "nodes_mean_implicit": distances(final.nodes).mean(-1).tolist(),
    }
    ended = {
        "step": list(range(len(record.unrolled.loss))),
        "loss_unrolled": record.unrolled.loss.tolist(),
        "points_largest_unrolled": distances(record.unrolled.points).amax(-1).tolist(),
        "nodes_mean_unrolled": distances(record.unrolled.nodes).mean(-1).tolist(),
    }
    places = {
        "cloud": ["X"] * NUM_POINTS + ["Y"] * NUM_NODES,
        "x": [*final.points[-1, :, 0].tolist(), *final.nodes[-1, :, 0].tolist()],
        "y": [*final.points[-1, :, 1].tolist(), *final.nodes[-1, :, 1].tolist()],
    }
    gradients: Table = {"unrolled_steps": list(record.gradient_steps), "relative_error": record.gradient_error}
    tables: dict[str, Table] = {"implicit": course, "unrolled": ended, "end": places, "gradients": gradients}
    return Exhibit(draw(record), caption, numbers, tables, animate(record))
