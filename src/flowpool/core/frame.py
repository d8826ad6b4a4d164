"""Every graph in a frame of its own, so that the solver meets no large offsets and no extreme scales.

Where the cost allows it (it commutes with moving and scaling both clouds), a graph is moved to mean zero and scaled to
variance one. A cost that only weighs the features is taken into the frame, by an own unit for each of them, so that
the solver meets the squared Euclidean cost. The way there and back is made of ordinary differentiable tensors, so that
the dependence of the frame on the nodes, on their masses and on the weights of the features needs no further thought.

With an absolute reference and epsilon no pooled point depends on the frame: it is a choice of coordinates, and its mean and
unit are constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowpool.core.measures import Clouds
from flowpool.costs import Geometry, SquaredEuclidean

_FAR = 1e100  # distance in units of the spread that only a node without mass can have
_POINTLESS = 1e-13  # spread of a cloud, relative to its largest entry, below which it is one point


@dataclass(frozen=True)
class Frame:
    """The batch as the solver sees it, and the way back.

    Attributes:
        clouds: the graphs in their frames.
        mean: where the origin of the frame lies outside, ``(B, D)``.
        scale: how long its unit is outside, ``(B, 1)``, or for each feature, ``(B, D)``.
        cost_unit: how much its unit of cost is outside, ``(B,)``.
        curvature_unit: and how much that of curvature, ``(B,)``; one for the squared Euclidean cost.
        geometry: the cost in the frame.
        epsilon: in the frame, ``(B,)``.
        start: X^(0) in the frame, ``(B, M, D)``; an absolute one depends on the graph.
        empty: graphs without nodes, ``(B,)`` bool.
        broken: graphs with non-finite features, ``(B,)`` bool.
        solvable: graphs that need the flow: neither of these, and with at least two distinct nodes, ``(B,)`` bool.
    """

    clouds: Clouds
    mean: Tensor
    scale: Tensor
    cost_unit: Tensor
    curvature_unit: Tensor
    geometry: Geometry
    epsilon: Tensor
    start: Tensor
    empty: Tensor
    broken: Tensor
    solvable: Tensor

    def outside(self, points: Tensor) -> Tensor:
        """Points of the frame ``(B, M, D)`` in the coordinates of the caller; NaN for broken graphs.

        A graph that is one point is pooled to copies of it, an empty one to zeros: both sit at their frame's origin.
        """
        placed = self.mean.unsqueeze(1) + self.scale.unsqueeze(1) * points
        return torch.where(self.broken[:, None, None], torch.nan, placed)


def make_frame(
    clouds: Clouds, geometry: Geometry, epsilon: Tensor, reference: Tensor, relative: bool, plain: bool = False
) -> Frame:
    """The frame of each graph.

    Args:
        clouds: the graphs as given.
        geometry: the cost.
        epsilon: in units of the mean cost to the mean if relative, ``(B,)``.
        reference: in units of R around the mean if relative, ``(M, D)``.
        plain: leave the coordinates as they are given, whatever the cost allows.
    """
    degree = None if plain else geometry.cost.degree
    empty = clouds.sizes == 0
    broken = clouds.sum((~clouds.nodes.detach().isfinite()).any(-1).to(clouds.masses.dtype)) > 0
    # Broken graphs leave the computation here; zeros keep their NaN out of everything that is shared.
    nodes = torch.where(broken[clouds.batch, None], 0.0, clouds.nodes)
    clouds = clouds.moved(nodes)

    mean = clouds.mean()
    centred = nodes - mean[clouds.batch]
    # A node without mass has no say in what its graph is.
    heavy = clouds.masses.detach() > 0
    spread = _largest(clouds, centred)
    single = (spread <= _POINTLESS * _largest(clouds, nodes)) | (clouds.sum(heavy.to(nodes.dtype)) <= 1) | broken
    radius, single = _radius(clouds, centred, spread, single)  # (B,), R

    weights = geometry.feature_weights
    if degree is None:
        framed, origin, unit = clouds, torch.zeros_like(mean), torch.ones_like(radius)
        scale = unit.unsqueeze(-1)
    else:
        unit, per_feature = radius, torch.ones_like(radius).unsqueeze(-1)
        if weights is not None:
            weighted = centred * weights
            unit, single = _radius(clouds, weighted, _largest(clouds, weighted), single)
            per_feature, geometry = 1 / weights, Geometry(SquaredEuclidean())
        origin = mean
        if not relative:  # all points of a graph that is one point sit at its mean, however that moves
            origin, unit = torch.where(single.unsqueeze(-1), mean, mean.detach()), unit.detach()
            centred = nodes - origin[clouds.batch]
        scale = unit.unsqueeze(-1) * per_feature
        framed = clouds.moved(centred / scale[clouds.batch])
    centre, size = (mean - origin) / scale, radius.unsqueeze(-1) / scale  # of the graph in its frame

    if relative:
        start = centre.unsqueeze(1) + size.unsqueeze(1) * reference
        if plain or not geometry.is_squared_euclidean:  # whose mean cost to the mean is one in the frame
            mean_cost = clouds.sum(clouds.masses * geometry.pairwise(centre[clouds.batch], framed.nodes))
            single = single | ~(mean_cost > 0)
            epsilon = epsilon * torch.where(single, 1.0, mean_cost)
    else:
        start = (reference - origin.unsqueeze(1)) / scale.unsqueeze(1)
        epsilon = epsilon / unit.pow(degree or 0.0)
    if degree is None:
        # Without a frame the origin says nothing of the graph; only a graph that is one point needs to be told where.
        origin = torch.where(single.unsqueeze(-1), mean, 0.0)
    cost_unit = unit.detach().pow(degree or 0.0)
    curvature_unit = cost_unit if degree is None else unit.detach().pow(degree - 2)
    return Frame(framed, origin, scale, cost_unit, curvature_unit, geometry, epsilon, start, empty, broken, ~single)


def _radius(clouds: Clouds, centred: Tensor, spread: Tensor, single: Tensor) -> tuple[Tensor, Tensor]:
    """R of each centred cloud whose largest entry is ``spread``, ``(B,)``, and which clouds are one point."""
    unit = torch.where(spread > 0, spread, 1.0)  # squares of the features themselves could overflow
    # A node without mass may be far away: its square may overflow, and zero times that is not zero.
    near = centred / unit[clouds.batch, None]
    near = torch.where(near.detach().abs() <= _FAR, near, near.detach().clamp(-_FAR, _FAR))
    variance = clouds.sum(clouds.masses * near.square().sum(-1))
    single = single | ~(variance > 0)
    return unit * torch.where(single, 1.0, variance).sqrt(), single


def _largest(clouds: Clouds, values: Tensor) -> Tensor:
    """Largest absolute entry of the nodes with mass of each cloud, ``(B,)``; zero for an empty one."""
    rows = torch.where(clouds.masses.detach() > 0, values.detach().abs().amax(-1), 0.0)
    return rows.new_zeros(clouds.num_graphs).scatter_reduce(0, clouds.batch, rows, "amax")
