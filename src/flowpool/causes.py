"""Why the minimiser of a graph is not isolated, or was not reached: what is looked at once somebody asks."""

from __future__ import annotations

import torch
from torch import Tensor

from flowpool import trial
from flowpool.core.constants import SINGULAR
from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.hessian import dense_hessian

_LEFT = 1e-3  # distance from the hull of the nodes, in units of R, at which a point has left it
_SOME, _ALL = 0.1, 0.9  # parts of a direction of length one: one that counts, and as good as all of it
_MERGED = 1e-2  # distance of two points, in units of R, at which the divergence hardly tells them from one


def why_singular(energy: Energy, here: Evaluation) -> str:
    """In one sentence, for a batch of one cloud at stationary points."""
    values, vectors = torch.linalg.eigh(dense_hessian(energy, here)[0])
    flattest = vectors[:, values.abs().argmin()].view_as(here.points)
    if float(_frozen_curvature(energy, here, flattest)) <= SINGULAR * float(energy.scales.stiffness.mean()):
        moved = flattest[0].norm(dim=-1) > _SOME
        away = torch.cdist(here.points, energy.nodes[:, energy.masses[0] > 0])[0, moved].amin(-1)
        if float(away.max()) <= _MERGED * float(energy.scales.radius):
            return f"Points sit on nodes, where the cost {energy.geometry.cost} is flat."
        return f"The cost {energy.geometry.cost} is blind in some directions, in which nothing pulls the points."
    distances = torch.cdist(here.points, here.points)[0]
    distances.fill_diagonal_(torch.inf)
    num_points = here.points.shape[1]
    distinct = len(energy.nodes[0, energy.masses[0] > 0].unique(dim=0))
    if distinct < num_points:
        return f"There are {num_points} points, but {distinct} distinct nodes."
    points, hull = here.points - energy.scales.centre, _hull(energy)
    if _off(points, hull) > _LEFT * float(energy.scales.radius) and _off(flattest, hull) > _ALL:
        return (
            f"The nodes span {len(hull)} of {hull.shape[1]} dimensions, and points have left these to a side that nothing "
            f"decides, as they may with the cost {energy.geometry.cost}."
        )
    if float(distances.min()) <= _MERGED * float(energy.scales.radius):
        first, second = sorted(divmod(int(distances.argmin()), num_points))
        return f"Points {first} and {second} have merged; a smaller epsilon or fewer points keep them apart."
    return (
        "The nodes leave some directions of the points open, as twins do; a larger epsilon or fewer points settle them."
    )


def why_unfinished(energy: Energy, here: Evaluation) -> str:
    """In one sentence, for a batch of one cloud at points where the flow was cut off."""
    if trial.bends_sharply(energy.geometry, here.points[0]):
        return (
            f"The cost {energy.geometry.cost} curves without bound where x = y, and points sit there; "
            "costs.Euclidean(p, radius=0.1) is smooth."
        )
    return "The flow was cut off by max_steps."


def _hull(energy: Energy) -> Tensor:
    """Orthonormal directions that the nodes of one cloud span around their mean, ``(K, D)``."""
    nodes = (energy.nodes - energy.scales.centre)[0, energy.masses[0] > 0]
    _, sizes, axes = torch.linalg.svd(nodes, full_matrices=False)
    spanned: Tensor = axes[sizes > _LEFT**2 * sizes[0]]
    return spanned


def _off(points: Tensor, hull: Tensor) -> float:
    """Length of what is not along the hull."""
    return float((points - points @ hull.T @ hull).norm())


def _frozen_curvature(energy: Energy, here: Evaluation, direction: Tensor) -> Tensor:
    """``d^T H d`` of the cost to the nodes alone, under the plan as it is: what the cost itself has of curvature."""
    with torch.enable_grad():
        points = here.points.detach().requires_grad_()
        gradient = energy.geometry.opened(points, energy.nodes)[1](here.plan)
        product = torch.autograd.grad(gradient, points, direction, allow_unused=True)[0]
    return torch.zeros(()) if product is None else (product * direction).sum()
