"""Why the minimiser of a graph is not isolated, or was not reached: what is looked at once somebody asks."""

from __future__ import annotations

import torch
from torch import Tensor

from flowpool import trial
from flowpool.core.constants import SINGULAR
from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.hessian import dense_hessian

_MERGED = 1e-2  # distance of two points, in units of R, at which the divergence hardly tells them from one


def why_singular(energy: Energy, here: Evaluation) -> str:
    """In one sentence, for a batch of one cloud at stationary points."""
    values, vectors = torch.linalg.eigh(dense_hessian(energy, here)[0])
    flattest = vectors[:, values.abs().argmin()].view_as(here.points)
    if float(_frozen_curvature(energy, here, flattest)) <= SINGULAR * float(energy.scales.stiffness.mean()):
        return f"The cost {energy.geometry.cost} is blind in some directions, in which nothing pulls the points."
    distances = torch.cdist(here.points, here.points)[0]
    distances.fill_diagonal_(torch.inf)
    num_points = here.points.shape[1]
    distinct = len(energy.nodes[0, energy.masses[0] > 0].unique(dim=0))
    if distinct < num_points:
        return f"There are {num_points} points, but {distinct} distinct nodes."
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


def _frozen_curvature(energy: Energy, here: Evaluation, direction: Tensor) -> Tensor:
    """``d^T H d`` of the cost to the nodes alone, under the plan as it is: what the cost itself has of curvature."""
    with torch.enable_grad():
        points = here.points.detach().requires_grad_()
        gradient = energy.geometry.opened(points, energy.nodes)[1](here.xy.plan)
        product = torch.autograd.grad(gradient, points, direction, allow_unused=True)[0]
    return torch.zeros(()) if product is None else (product * direction).sum()
