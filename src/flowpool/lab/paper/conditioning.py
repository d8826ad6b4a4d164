r"""Condition numbers of the gradient function against epsilon (section 8 of the paper).

.. math::
    \kappa_x = \frac{\sigma_{max}(\nabla_X^2 L)\, |X|}{|\nabla_X L|}, \qquad
    \kappa_y = \frac{\sigma_{max}(\partial_Y \nabla_X L)\, |Y|}{|\nabla_X L|}

As epsilon grows the plan tends to :math:`a b^\top`, so with :math:`\bar y` the mean of the nodes the two tend to
:math:`|X| / |X - \bar y|` and :math:`\sqrt{M / N}\, |Y| / |X - \bar y|`: one in expectation for clouds of one law, and
not exactly one for any single pair.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flowpool.core.divergence import Energy, Evaluation, make_energy
from flowpool.core.hessian import dense_hessian
from flowpool.lab.paper import style
from flowpool.lab.paper.exhibit import Exhibit, Progress

# Sizes without a common divisor: otherwise the unregularised plan may fall apart into pieces that exchange no mass,
# and at small epsilon the potentials of the pieces are undetermined to within rounding.
NUM_POINTS, NUM_NODES = 11, 20
_TIGHT = 2e-14  # marginal error of the plans; derivatives divide it by epsilon


@dataclass(frozen=True)
class Conditioning:
    """Condition numbers of E levels of epsilon and K pairs of clouds.

    Attributes:
        epsilon: ``(E,)``.
        points: kappa_x of L_eps, ``(E, K)``.
        nodes: kappa_y of L_eps, ``(E, K)``.
        debiased_points: kappa_x of S_eps, ``(E, K)``.
        debiased_nodes: kappa_y of S_eps, ``(E, K)``.
        limit_points: kappa_x of L_eps for infinite epsilon, ``(K,)``.
        limit_nodes: kappa_y of L_eps for infinite epsilon, ``(K,)``.
    """

    epsilon: Tensor
    points: Tensor
    nodes: Tensor
    debiased_points: Tensor
    debiased_nodes: Tensor
    limit_points: Tensor
    limit_nodes: Tensor


def norm(value: Tensor) -> Tensor:
    """Frobenius norm of each of a batch of matrices."""
    return value.square().sum((-1, -2)).sqrt()


def node_jacobian(energy: Energy, solved: Evaluation) -> Tensor:
    """Derivative of the gradient in X with respect to the nodes, ``(B, M D, N D)``."""
    with torch.enable_grad():
        nodes = energy.nodes.detach().requires_grad_()
        gradient = replace(energy, nodes=nodes).gradient(solved.points, solved)
    batch, num_points, dim = solved.points.shape
    size = num_points * dim
    basis = torch.eye(size, dtype=nodes.dtype).view(size, 1, num_points, dim).expand(size, batch, num_points, dim)
    (rows,) = torch.autograd.grad(gradient, nodes, basis, is_grads_batched=True)
    return rows.transpose(0, 1).reshape(batch, size, -1)


def condition_numbers(points: Tensor, nodes: Tensor, epsilon: float | Tensor, debias: bool) -> tuple[Tensor, Tensor]:
    """kappa_x and kappa_y of a batch of clouds ``(B, M, D)`` and ``(B, N, D)``, each ``(B,)``."""
    energy = make_energy(points, nodes, epsilon, debias=debias)
    solved = energy.evaluate(points, tolerance=_TIGHT)
    matrix = dense_hessian(energy, solved)
    length = norm(solved.gradient)
    kappa_x = torch.linalg.matrix_norm(matrix, 2) * norm(points) / length
    kappa_y = torch.linalg.matrix_norm(node_jacobian(energy, solved), 2) * norm(nodes) / length
    return kappa_x, kappa_y


def limits(points: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """kappa_x and kappa_y of L_eps as epsilon tends to infinity, each ``(B,)``."""
    apart = norm(points - nodes.mean(1, keepdim=True))
    return norm(points) / apart, (points.shape[1] / nodes.shape[1]) ** 0.5 * norm(nodes) / apart


def clouds(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pairs of standard normal clouds in the plane, ``(count, M, 2)`` and ``(count, N, 2)``."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, NUM_POINTS, 2, generator=generator, dtype=torch.float64)
    return points, torch.randn(count, NUM_NODES, 2, generator=generator, dtype=torch.float64)


def compute(num_clouds: int = 70, num_levels: int = 33, progress: Progress = lambda _: None) -> Conditioning:
    points, nodes = clouds(num_clouds)
    epsilon = torch.logspace(-3, 1, num_levels, dtype=torch.float64)
    found: dict[bool, list[tuple[Tensor, Tensor]]] = {False: [], True: []}
    for place, level in enumerate(epsilon.tolist(), 1):
        for debias, rows in found.items():
            rows.append(condition_numbers(points, nodes, level, debias))
        progress(place / num_levels)
    plain, debiased = ([torch.stack(kappa) for kappa in zip(*rows, strict=True)] for rows in found.values())
    return Conditioning(epsilon, plain[0], plain[1], debiased[0], debiased[1], *limits(points, nodes))


def draw(record: Conditioning) -> Figure:
    figure, axes = style.canvas(2, height=3.6)
    _panel(axes[0, 0], record.epsilon, record.points, record.debiased_points, r"$\kappa_x$")
    _panel(axes[0, 1], record.epsilon, record.nodes, record.debiased_nodes, r"$\kappa_y$")
    axes[0, 0].legend(loc="upper right")
    return figure


def _panel(axes: Axes, epsilon: Tensor, values: Tensor, debiased: Tensor, name: str) -> None:
    mean, deviation = values.mean(1), values.std(1)
    # On a logarithmic axis the band cannot reach below zero; it ends at the smallest value seen.
    low = torch.maximum(mean - deviation, values.amin(1))
    axes.fill_between(
        epsilon, low, mean + deviation, color=style.SKY, alpha=0.45, lw=0, label=r"$L_\varepsilon$, standard deviation"
    )
    axes.plot(epsilon, mean, color=style.BLACK, label=r"$L_\varepsilon$, mean")
    axes.plot(epsilon, values.median(1).values, color=style.BLUE, ls="--", label=r"$L_\varepsilon$, median")
    axes.plot(epsilon, debiased.median(1).values, color=style.RED, ls=":", label=r"$S_\varepsilon$, median")
    axes.axhline(1, color=style.GREY, lw=0.9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(r"entropic regularisation $\varepsilon$")
    axes.set_ylabel(name)
    axes.set_title(f"{name} of {values.shape[1]} random clouds")


def make(progress: Progress) -> Exhibit:
    record = compute(progress=progress)
    numbers: dict[str, float] = {}
    for name, values, debiased, limit in (
        ("kappa_x", record.points, record.debiased_points, record.limit_points),
        ("kappa_y", record.nodes, record.debiased_nodes, record.limit_nodes),
    ):
        mean = values.mean(1)
        numbers |= {
            f"{name}_first": float(mean[0]),
            f"{name}_first_median": float(values[0].median()),
            f"{name}_peak": float(mean.max()),
            f"{name}_peak_deviation": float(values[mean.argmax()].std()),
            f"{name}_peak_epsilon": float(record.epsilon[mean.argmax()]),
            f"{name}_last": float(mean[-1]),
            f"{name}_last_deviation": float(values[-1].std()),
            f"{name}_limit": float(limit.mean()),
            f"{name}_limit_deviation": float(limit.std()),
            f"{name}_debiased_last": float(debiased[-1].mean()),
        }
    table = {
        "epsilon": record.epsilon.tolist(),
        **{
            f"{key}_{measure}": values.tolist()
            for key, kappa in (
                ("kappa_x", record.points),
                ("kappa_y", record.nodes),
                ("kappa_x_debiased", record.debiased_points),
                ("kappa_y_debiased", record.debiased_nodes),
            )
            for measure, values in (("mean", kappa.mean(1)), ("std", kappa.std(1)), ("median", kappa.median(1).values))
        },
    }
    return Exhibit(draw(record), _caption(numbers, record.points.shape[1]), numbers, {"": table})


def _caption(n: dict[str, float], count: int) -> str:
    return (
        f"Condition numbers of the gradient of L_eps for {count} random clouds (X {NUM_POINTS}x2, Y {NUM_NODES}x2, "
        f"standard normal), epsilon absolute. Means fall from {n['kappa_x_peak']:.1f} +- "
        f"{n['kappa_x_peak_deviation']:.0f} "
        f"(kappa_x, at epsilon {n['kappa_x_peak_epsilon']:.2g}) and {n['kappa_y_peak']:.1f} +- "
        f"{n['kappa_y_peak_deviation']:.0f} (kappa_y, at {n['kappa_y_peak_epsilon']:.2g}) to {n['kappa_x_last']:.2f} "
        "+- "
        f"{n['kappa_x_last_deviation']:.2f} and {n['kappa_y_last']:.2f} +- {n['kappa_y_last_deviation']:.2f} at "
        "epsilon 10; "
        f"in the limit they are |X|/|X - mean(Y)| = {n['kappa_x_limit']:.2f} +- {n['kappa_x_limit_deviation']:.2f} and "
        f"sqrt(M/N) |Y|/|X - mean(Y)| = {n['kappa_y_limit']:.2f} +- {n['kappa_y_limit_deviation']:.2f}, as the paper "
        "says. "
        f"Two things it does not say: below the peak most clouds are well conditioned again (median kappa_x "
        f"{n['kappa_x_first_median']:.1f} at epsilon 0.001), since a plan at a vertex does not move at all until it "
        "jumps; "
        f"and with debiasing the numbers do not tend to 1 (mean kappa_x of S_eps at epsilon 10: "
        f"{n['kappa_x_debiased_last']:.1f}), since its gradient tends to the difference of the means, which is small."
    )
