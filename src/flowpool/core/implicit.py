r"""Gradients through the optimality condition (section 8.2 of the paper, eqs. 32 to 42).

At X* the gradient of the energy vanishes, so with :math:`H = \nabla_X^2 S` the Jacobian of the pooled points solves
:math:`H J = -\partial_Y \nabla_X S`. A vector-Jacobian product needs one linear solve, whatever the number of steps
that led to X*, and serves nodes, masses, epsilon and the parameters of the cost alike:

.. math:: (H H + \lambda I)\, w = H v, \qquad v^\top J_\theta = -w^\top \partial_\theta \nabla_X S
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.systems import Adjoint, adjoint


def implicit(
    energy: Energy, here: Evaluation, cotangent: Tensor, ridge: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Adjoint]:
    r"""A number, :math:`-\langle w, \nabla_X S\rangle`, whose derivative in every tensor of the energy is that of
    :math:`\langle v, X^*\rangle`, and the linear solve behind it.

    Args:
        energy: the clouds; autograd goes on to whatever its tensors were made of.
        here: the evaluation at X*, with tightly solved inner problems.
        cotangent: v, ``(B, M, D)``.
        ridge, weights: see :func:`flowpool.core.systems.adjoint`.
    """
    found = adjoint(energy, here, cotangent, ridge, weights)
    with torch.enable_grad():
        return -(found.solution * energy.gradient(here.points, here)).sum(), found
