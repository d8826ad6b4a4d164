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

from flowpool.core.measures import Clouds, check_features
from flowpool.nn.pool import FlowPool, initial_reference
from flowpool.step.pool import Received, precise_clouds, receive

By = Literal["step", "flow", "free"]
Structure = Literal["points", "deviations", "displacement", "moments"]
Mass = Literal["append", "scale"]
_Block = tuple[Tensor, Tensor]  # rows (B, K, D), and how many nodes each stands for (B, K)


class FlowReadout(nn.Module):
    r"""BatchNorm of the nodes, pooled points, size, BatchNorm of all that, ``(B, out_channels)``.

    Args:
        in_channels: D.
        num_points: M.
        by: how the nodes are brought to M points. ``"step"``: one step towards each graph from a reference that is
            learned, every point receiving 1/M of the graph (:func:`flowpool.transport_pool`); it tells shapes apart
            best, and costs least. ``"flow"``: the whole flow (:class:`flowpool.FlowPool`); its points are nearest to
            the nodes, so it is for keeping a graph's distribution. ``"free"``: as ``"step"``, but each point receives
            whatever is near it; it helps when what a graph is composed of matters more than its shape. M more columns
            then tell the share of each point, or with any ``mass`` its count, share times size.
        structure: coordinates of the points. ``"points"``: as they are. ``"deviations"``: the mean of the graph, and
            how each point differs from it (unless ``"free"``, the last one follows from the others and is left out); it
            helps when graphs differ more in place than in shape, because each is normalised on its own.
            ``"displacement"``: how far each point went from the reference, with ``"flow"`` after the mean of the graph
            and from where the reference was placed there, :math:`x_i - (\bar y + R x^{(0)}_i)`. ``"moments"``: the
            displacement, and the variance of each feature within what each point received; not with ``"flow"``.
        mass: ``"append"`` adds the size as a column, ``"scale"`` multiplies all columns by it, ``None`` leaves it out.
            It is the number of nodes, or the total of their masses when these are given. With ``"free"``, ``"scale"``
            multiplies each point by its own count, which keeps the mean of next to nothing from being loud.
        epsilon: entropic regularisation in units of the variance: of all nodes, or with ``"flow"`` of each graph.
        reference: where learning starts, in units of the standard deviation of one feature: drawn points lie well
            inside the nodes, where none of them is lost. With ``"flow"`` as in :class:`flowpool.FlowPool`.
        seed: of the drawn reference.

    A batch that is too small for statistics of its own (one graph, or one node) is normalised as in evaluation.
    """

    def __init__(
        self,
        in_channels: int,
        num_points: int,
        *,
        by: By = "step",
        structure: Structure = "moments",
        mass: Mass | None = "append",
        epsilon: float = 0.1,
        reference: Literal["normal"] | Tensor = "normal",
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_choice("by", by, get_args(By))
        _check_choice("structure", structure, get_args(Structure))
        if mass is not None:
            _check_choice("mass", mass, get_args(Mass))
        if by == "flow" and structure == "moments":
            raise ValueError(
                "The flow has no moments; pass structure='points', 'deviations' or 'displacement' with it."
            )
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise ValueError(f"epsilon is {epsilon}; it must be finite and > 0 (0.1 is a good start).")
        self.in_channels, self.num_points = in_channels, num_points
        self.by, self.structure, self.mass, self.epsilon = by, structure, mass, epsilon
        self.node_norm = nn.BatchNorm1d(in_channels)
        if by == "flow":
            self.pool = FlowPool(in_channels, num_points, epsilon=epsilon, reference=reference, seed=seed)
        else:
            self._initial = initial_reference(reference, num_points, in_channels, seed)
            self.reference = nn.Parameter(self._initial.clone())
        self.output_norm = nn.BatchNorm1d(self.out_channels)

    @property
    def out_channels(self) -> int:
        """Columns of the output."""
        has_mean = (self.by, self.structure) in (("flow", "displacement"), ("free", "deviations"))  # on top of M rows
        rows = 2 * self.num_points if self.structure == "moments" else self.num_points + has_mean
        sizes = self.num_points if self.by == "free" else int(self.mass == "append")
        return rows * self.in_channels + sizes

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Everything as it was made, without statistics."""
        self.node_norm.reset_parameters()
        self.output_norm.reset_parameters()
        if self.by == "flow":
            self.pool.reset_parameters()
        else:
            self.reference.copy_(self._initial)

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
        clouds, order = precise_clouds(nodes, index, ptr, masses, dim_size)
        weights = torch.ones_like(clouds.masses) if masses is None else masses.to(clouds.masses.dtype)[order]
        size = clouds.sum(weights).unsqueeze(-1)  # (B, 1)
        received = self._received(nodes, index, ptr, masses, clouds)
        counts = received.masses * size  # (B, M), how many nodes each point stands for
        blocks = self._structured(received, clouds, size, counts)
        rows = [values * count.unsqueeze(-1) if self.mass == "scale" else values for values, count in blocks]
        columns = [torch.cat(rows, 1).flatten(1)]
        if self.by == "free":
            columns.append(received.masses if self.mass is None else counts)
        elif self.mass == "append":
            columns.append(size)
        return _normalised(self.output_norm, torch.cat(columns, 1).to(nodes.dtype))

    def _received(
        self, nodes: Tensor, index: Tensor | None, ptr: Tensor | None, masses: Tensor | None, clouds: Clouds
    ) -> Received:
        """What the points stand for; variances of zero where the flow took them to the nodes themselves."""
        if self.by == "flow":
            flat = self.pool(nodes, index, ptr, dim_size=clouds.num_graphs, masses=masses)
            points = flat.view(clouds.num_graphs, self.num_points, self.in_channels)
            return Received(points.new_full(points.shape[:2], 1 / self.num_points), points, torch.zeros_like(points))
        level = self.epsilon * self.in_channels  # normalised nodes have variance one in each feature
        return receive(clouds, self.reference, level, free=self.by == "free")

    def _structured(self, received: Received, clouds: Clouds, size: Tensor, counts: Tensor) -> list[_Block]:
        """The coordinates asked for, row by row, each with the number of nodes that it stands for."""
        points = received.points
        if self.structure == "points":
            return [(points, counts)]
        whole = clouds.mean().unsqueeze(1), size  # the graph as one row
        deviations = points - whole[0]
        if self.structure == "deviations":
            # Deviations of points with equal masses sum to zero.
            return [whole, (deviations, counts) if self.by == "free" else (deviations[:, :-1], counts[:, :-1])]
        if self.by == "flow":
            return [whole, (deviations - _radius(clouds)[:, None, None] * self.pool.reference.to(points.dtype), counts)]
        moved = points - self.reference, counts
        return [moved] if self.structure == "displacement" else [moved, (received.variances, counts)]

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, num_points={self.num_points}, by={self.by!r}, structure={self.structure!r}, "
            f"mass={self.mass!r}"
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"Unknown {name} {value!r}; pass {', '.join(choices)}.")


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
