"""The readout that we recommend: from node features to one vector per graph that a linear head can use.

Normalisation of the nodes, pooling, a choice of coordinates for the points, the size that a measure forgets, and
normalisation of the result, so that columns as different as a coordinate and a count meet the head on one scale.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from flowpool import references
from flowpool.layer import FlowPool
from flowpool.measures import Clouds, check_features, make_clouds
from flowpool.relaxed import relaxed_pool

Structure = Literal["points", "deviations", "displacement"]
Mass = Literal["append", "scale"]


class FlowReadout(nn.Module):
    r"""BatchNorm of the nodes, pooled points, size, BatchNorm of all that, ``(B, out_channels)``.

    Args:
        in_channels: D.
        num_points: M.
        structure: coordinates of the points :math:`X^*`. ``"points"``: as they are. ``"deviations"``: the mean of the
            graph, and how each point differs from it (the last one follows from the others and is left out); it helps
            when graphs differ more in place than in shape, because each is normalised on its own.
            ``"displacement"``: the mean, and how far the flow carried each point from where the reference was placed,
            :math:`x_i - (\bar y + R x^{(0)}_i)`; it helps when the spread R of the nodes matters too.
        mass: ``"append"`` adds the size as a column, ``"scale"`` multiplies all columns by it, ``None`` leaves it out.
            It is the number of nodes, or the total of their masses when these are given.
        free: the reference is learned and its points receive as much of the graph as is near them
            (:func:`flowpool.relaxed.relaxed_pool`); ``"points"`` are then the means of what was received,
            ``"deviations"`` all M of them minus the mean of the graph, ``"displacement"`` they minus the reference.
            The output gets M more columns: the share of each point, or with any ``mass`` its count, share times size.
            ``"scale"`` multiplies each point by its own count, which keeps the mean of next to nothing from being
            loud. It helps when what a graph is composed of matters more than its shape.
        epsilon: entropic regularisation in units of the variance: of the graph, or with ``free`` of all nodes.
        reference: as in :class:`flowpool.FlowPool`, in units of the standard deviation; where learning starts if
            ``free``.
        seed: of the drawn reference.

    A batch that is too small for statistics of its own (one graph, or one node) is normalised as in evaluation.
    """

    def __init__(
        self,
        in_channels: int,
        num_points: int,
        *,
        structure: Structure = "points",
        mass: Mass | None = "append",
        free: bool = False,
        epsilon: float = 0.1,
        reference: Literal["normal"] | Tensor = "normal",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if structure not in get_args(Structure):
            raise ValueError(f"Unknown structure {structure!r}; pass {', '.join(get_args(Structure))}.")
        if mass is not None and mass not in get_args(Mass):
            raise ValueError(f"Unknown mass {mass!r}; pass None, 'append' or 'scale'.")
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise ValueError(f"epsilon is {epsilon}; it must be finite and > 0 (0.1 is a good start).")
        self.in_channels, self.num_points = in_channels, num_points
        self.structure, self.mass, self.free, self.epsilon = structure, mass, free, epsilon
        self.node_norm = nn.BatchNorm1d(in_channels)
        self.pool = None if free else FlowPool(in_channels, num_points, epsilon=epsilon, reference=reference, seed=seed)
        if free:
            self._initial = _prototypes(reference, num_points, in_channels, seed)
            self.prototypes = nn.Parameter(self._initial.clone())
        self.output_norm = nn.BatchNorm1d(self.out_channels)

    @property
    def out_channels(self) -> int:
        """Columns of the output."""
        has_mean = self.structure == ("deviations" if self.free else "displacement")  # on top of M rows
        sizes = self.num_points if self.free else int(self.mass == "append")
        return (self.num_points + has_mean) * self.in_channels + sizes

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Everything as it was made, without statistics."""
        self.node_norm.reset_parameters()
        self.output_norm.reset_parameters()
        if self.pool is None:
            self.prototypes.copy_(self._initial)
        else:
            self.pool.reset_parameters()

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        masses: Tensor | None = None,
    ) -> Tensor:
        """One vector per graph, ``(B, out_channels)``.

        Args:
            x: node features, ``(N, D)``.
            index: graph of each node, ``(N,)``, in any order.
            ptr: or the offsets of nodes that are sorted by graph, ``(B + 1,)``. With both, they must agree.
            dim_size: B.
            masses: of the nodes, ``(N,)``, not negative; None: all equal.
        """
        check_features(x)
        nodes = _normalised(self.node_norm, x)
        clouds, order = make_clouds(nodes, index, ptr, masses, dim_size)
        weights = torch.ones_like(clouds.masses) if masses is None else masses[order]
        size = clouds.sum(weights).unsqueeze(-1)  # (B, 1)
        if self.pool is None:
            shares, points = relaxed_pool(
                nodes,
                index,
                ptr,
                points=self.prototypes,
                epsilon=self.epsilon * self.in_channels,  # normalised nodes have variance one in each feature
                masses=masses,
                dim_size=clouds.num_graphs,
            )
            received = shares if self.mass is None else shares * size  # (B, M)
            sizes = [received]
        else:
            flat = self.pool(nodes, index, ptr, dim_size=clouds.num_graphs, masses=masses)
            points = flat.view(clouds.num_graphs, self.num_points, self.in_channels)
            received = size.expand(-1, self.num_points)  # (B, M), every point stands for the whole graph
            sizes = [size] if self.mass == "append" else []
        rows = self._structured(points, clouds)  # (B, M or M + 1, D)
        if self.mass == "scale":
            rows = rows * torch.cat([size, received], 1)[:, -rows.shape[1] :].unsqueeze(-1)
        return _normalised(self.output_norm, torch.cat([rows.flatten(1), *sizes], 1))

    def _structured(self, points: Tensor, clouds: Clouds) -> Tensor:
        """The points ``(B, M, D)`` in the coordinates asked for, ``(B, M or M + 1, D)``; an extra row is the first."""
        if self.structure == "points":
            return points
        mean = clouds.mean().unsqueeze(1)  # (B, 1, D)
        if self.structure == "deviations":
            rows = torch.cat([mean, points - mean], 1)
            return rows if self.free else rows[:, :-1]  # points of equal mass deviate by zero on average
        if self.pool is None:
            return points - self.prototypes
        placed = mean + _radius(clouds)[:, None, None] * self.pool.reference.to(points.dtype)
        return torch.cat([mean, points - placed], 1)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, num_points={self.num_points}, structure={self.structure!r}, mass={self.mass!r}, "
            f"free={self.free}"
        )


def _prototypes(reference: Literal["normal"] | Tensor, num_points: int, in_channels: int, seed: int) -> Tensor:
    """The reference among nodes of variance one in each feature, ``(M, D)``."""
    if isinstance(reference, str):
        if reference != "normal":
            raise ValueError(f"Unknown reference {reference!r}; pass 'normal' or a tensor (num_points, in_channels).")
        reference = references.normal(num_points, in_channels, seed)
    references.check(reference, in_channels)
    if reference.shape[0] != num_points:
        raise ValueError(f"reference has {reference.shape[0]} points, but num_points is {num_points}.")
    return math.sqrt(in_channels) * reference.detach()


def _radius(clouds: Clouds) -> Tensor:
    """R of each graph, the square root of the sum of its variances, ``(B,)``."""
    centred = clouds.nodes - clouds.mean()[clouds.batch]
    variance = clouds.sum(clouds.masses * centred.square().sum(-1))
    # The inner where keeps the root away from zero, or its infinite slope would turn the gradient into NaN.
    return torch.where(variance > 0, torch.where(variance > 0, variance, 1.0).sqrt(), 0.0)


def _normalised(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """The rows ``(N, D)`` after BatchNorm; by its running statistics where there are fewer than two rows."""
    if norm.training and len(x) < 2:
        return batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
    result: Tensor = norm(x)
    return result
