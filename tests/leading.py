"""The few directions in which the nodes of a graph vary most.

Along all others the nodes hardly matter to the plans. This is what the kernels should find, in plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowpool.core.constants import LEADING, MOST_LEADING, hull_tolerance


class Directions(NamedTuple):
    """The leading directions of a batch of clouds."""

    basis: Tensor  # (B, K, D), orthonormal; a cloud that needs fewer has rows of zeros for the others
    spanned: Tensor  # (B,) bool, whether they are all directions of the hull of the nodes


@torch.no_grad()
def leading_directions(
    nodes: Tensor,
    masses: Tensor,
    epsilon: Tensor,
    num_points: int,
    resolution: float = 0.0,
    features: int | None = None,
) -> Directions:
    """The directions in which each cloud varies most.

    All directions of a hull that has at most :data:`~flowpool.core.constants.MOST_LEADING` / M; else as many, and no more than
    leave a variance of :data:`~flowpool.core.constants.LEADING` epsilon. They are those of Gram-Schmidt on the nodes, the
    farthest from the hull so far first.

    Args:
        nodes: about their mean, ``(B, N, D)``.
        masses: ``(B, N)``; a node without mass has no say.
        epsilon: ``(B,)``.
        num_points: number of points, M.
        resolution: see :func:`hull_tolerance`.
        features: how many of the D features are no padding; ``None``: all.
    """
    batch, num_nodes, dim = nodes.shape
    most = min(max(1, MOST_LEADING // num_points), num_nodes, features or dim)
    rest = torch.where((masses > 0).unsqueeze(-1), nodes, 0.0)  # what is left of the nodes outside the hull so far
    square = rest.square().sum(-1)  # (B, N)
    nothing = hull_tolerance(resolution) ** 2 * square.amax(-1)  # (B,)
    basis = nodes.new_zeros(batch, most, dim)
    needed = torch.ones(batch, most, dtype=torch.bool, device=nodes.device)
    for k in range(most):
        if k > 0:
            needed[:, k] = (masses * square).sum(-1) > LEADING * epsilon
        farthest = square.argmax(-1)[:, None, None].expand(-1, 1, dim)
        candidate = rest.gather(1, farthest)  # (B, 1, D)
        for _ in range(2):  # twice is enough to be orthogonal to rounding
            candidate = candidate - candidate @ basis.transpose(-1, -2) @ basis
        length = candidate.square().sum((-1, -2))
        unit = torch.where((length > nothing)[:, None, None], candidate / length.sqrt()[:, None, None], 0.0)
        basis[:, k] = unit.squeeze(1)
        rest = rest - (rest @ unit.transpose(-1, -2)) * unit
        square = rest.square().sum(-1)
    spanned = square.amax(-1) <= nothing
    return Directions(torch.where((needed | spanned[:, None]).unsqueeze(-1), basis, 0.0), spanned)
