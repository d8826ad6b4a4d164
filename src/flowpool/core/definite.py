"""Positive definite systems, with the same bits wherever a matrix stands in a batch.

The matrix libraries behind PyTorch round by where a matrix lies in memory. Matrices of even size, one behind the other, all begin
at a multiple of 16 bytes and are rounded alike, so a factor of odd size is solved with as a part of one that is even.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factor of each matrix ``(..., n, n)``, of which the lower triangle is read, and whether it exists, ``(...)``."""
    lower, failed = torch.linalg.cholesky_ex(matrix)
    return lower, failed == 0


def solve(lower: Tensor, right: Tensor) -> Tensor:
    """``A^-1 right`` for the factor of A; the right-hand sides are columns, ``(..., n, K)``."""
    if lower.shape[-1] % 2 == 0:
        return torch.cholesky_solve(right, lower)
    # The first unknown of [[1, 0], [1, L]] is zero on the way forward, and feels the others alone on the way back.
    wider = pad(lower, (1, 0, 1, 0), value=1.0)
    return torch.cholesky_solve(pad(right, (0, 0, 1, 0)), wider)[..., 1:, :]
