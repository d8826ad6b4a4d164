"""What is found out about a cost that we did not write before it is used: by trying it on the reference.

A cost that hides tensors which require a gradient, has a kink, or is not symmetric would give wrong points or wrong gradients
without a word. Each is refused here in one sentence.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flowpool.costs import Geometry

_STEPS = (1e-2, 1e-4)  # distances from x, in units of the spread of the reference, at which C(x, .) is looked at
_KINK, _SHARP = 0.5, 0.02  # ratio of the slopes there: one for a kink, 0.1 for |x - y|^1.5, 0.01 for a smooth cost


def tried(geometry: Geometry, reference: Tensor, debias: bool, implicit: bool) -> Geometry:
    """The geometry of a cost that can be used, with what the trial has shown.

    Args:
        geometry: a cost that is not known.
        reference: in the precision of the solver, ``(M, D)``.
        debias: the points are also transported to themselves, which needs a symmetric cost.
        implicit: gradients flow to the declared parameters of the cost alone.
    """
    own = reference.detach()
    with torch.enable_grad():
        matrix = geometry.detached().matrix(own.unsqueeze(0), own.unsqueeze(0))[0]  # (M, M)
    if implicit and matrix.requires_grad:
        raise ValueError(
            "The cost uses tensors that require a gradient but are not its own parameters, so that they would get none: "
            "make it an nn.Module that has them as parameters, or detach them."
        )
    with torch.no_grad():
        matrix = matrix.detach()
        size = matrix.abs().amax()
        if debias:
            _check_symmetry(matrix, size)
        _check_kink(geometry, own, size)
        return replace(geometry, constant=_is_constant(geometry, torch.cat([own, own + _way(own)]), size))


def bends_sharply(geometry: Geometry, x: Tensor) -> bool:
    """Whether C(., y) curves without bound where x = y, seen at some points ``(M, D)``; so does ``|x - y|^p`` for p < 2."""
    far, near = _slopes(geometry, x)
    return bool(near > _SHARP * far)


def _check_symmetry(matrix: Tensor, size: Tensor) -> None:
    gap = (matrix - matrix.T).abs()
    if bool((gap > 1e-4 * size).any()):
        first, second = divmod(int(gap.argmax()), matrix.shape[0])
        raise ValueError(
            f"The cost is not symmetric: C(x{first}, x{second}) = {float(matrix[first, second]):g}, but "
            f"C(x{second}, x{first}) = {float(matrix[second, first]):g}. The divergence needs a symmetric cost; "
            "pass debias=False to use this one."
        )


def _check_kink(geometry: Geometry, x: Tensor, size: Tensor) -> None:
    """Raises if the slope of C(., y) jumps where x = y."""
    far, near = _slopes(geometry, x)
    if bool(near > _KINK * far) and bool(near * _STEPS[1] > 1e-10 * size):
        raise ValueError(
            f"The cost {geometry.cost} has a kink where x = y: its slope jumps there, as that of |x - y| does. Minimisers "
            "sit on kinks, where no gradient vanishes, so that no flow ends. Round it off: costs.Euclidean(1, radius=0.1) or "
            "costs.Manhattan(radius=0.1), with the radius in units of the features."
        )


def _slopes(geometry: Geometry, x: Tensor) -> tuple[Tensor, Tensor]:
    """By how much the slope of C(., x) changes within each of the distances from x, the largest of all points."""
    along, middle = _way(x), geometry.pairwise(x, x)  # (D,), (M,)
    bends = [geometry.pairwise(x + h * along, x) + geometry.pairwise(x - h * along, x) - 2 * middle for h in _STEPS]
    far, near = (bend.abs().amax() / h for bend, h in zip(bends, _STEPS, strict=True))
    return far, near


def _way(x: Tensor) -> Tensor:
    """A direction with a part in every feature, ``(D,)``, as long as the points ``(M, D)`` are apart."""
    spread = (x - x.mean(0)).square().mean().sqrt()
    along = torch.linspace(1.0, 2.0, x.shape[1]).to(x)
    return along / along.square().mean().sqrt() * torch.where(spread > 0, spread, 1.0)


def _is_constant(geometry: Geometry, x: Tensor, size: Tensor) -> bool:
    own = geometry.pairwise(x, x)
    return bool(own.amax() - own.amin() <= 1e-9 * size)
