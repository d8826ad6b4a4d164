r"""Second derivatives of the energy in X (sections 8 and 8.2 of the paper, eqs. 25 and 35), and what is solved with them.

With :math:`J_{ij} = \partial_1 C(x_i, y_j)`, :math:`u_{ik} = \partial_1 C(x_i, x_k)` and
:math:`S = \operatorname{diag}(a) - P A^\top`:

.. math::
    H = \operatorname{blockdiag}(K_i) - [Q_{ik} \partial_1 \partial_2 C(x_i, x_k)]_{ik} + \tfrac1\varepsilon \bigl(
        B B^\top + t S^{-1} t^\top - v (\operatorname{diag}(a) + Q)^{-1} v^\top
        - \operatorname{blockdiag}(\beta_i) + [Q_{ik} u_{ik} u_{ki}^\top]_{ik} \bigr)

where :math:`K_i = \sum_j P_{ij} \partial_1^2 C(x_i, y_j) - \sum_k Q_{ik} \partial_1^2 C(x_i, x_k)`,
:math:`B_{(ie),j} = \sqrt{b_j} A_{ij} J_{ij,e}`, :math:`t_{(ie),m} = \sum_j P_{ij} ([i=m] - A_{mj}) J_{ij,e}`,
:math:`v_{(ie),k} = [i=k] \sum_l Q_{il} u_{il,e} + Q_{ik} u_{ik,e}` and
:math:`\beta_i = \sum_j P_{ij} J_{ij} J_{ij}^\top - \sum_k Q_{ik} u_{ik} u_{ik}^\top`.
Without debiasing all terms with Q fall away. For :math:`C = |x - y|^2` the first two are :math:`2 Q \otimes I`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowpool.core.divergence import Energy, Evaluation, signed
from flowpool.core.sinkhorn import factor


@torch.no_grad()
def dense_hessian(energy: Energy, here: Evaluation) -> Tensor:
    """The Hessian at ``here.points``, ``(B, M D, M D)``."""
    points, own = here.points, energy.own
    batch, num_points, dim = points.shape
    size, others = num_points * dim, energy.nodes.shape[1]
    pulls = signed(here.transport.plan)  # (B, M, W)
    slopes, bends, across = energy.geometry.slopes(points, energy.columns(points), pulls, own)
    to_nodes = slopes[..., :others]
    weighted = (here.plan.unsqueeze(2) * to_nodes).reshape(batch, size, others)
    wide = (here.conditional.unsqueeze(2) * to_nodes).reshape(batch, size, others)
    mean = weighted @ here.conditional.mT  # (B, MD, M), minus t
    _own(mean, num_points).sub_(weighted.view(batch, num_points, dim, -1).sum(-1))
    response = torch.cholesky_solve(mean.mT, factor(here.plan, here.conditional))
    matrix = weighted @ wide.mT + mean @ response
    blocks = -(pulls.unsqueeze(2) * slopes) @ slopes.mT  # (B, M, D, D), minus beta
    if own:
        plan, apart = here.self_plan, slopes[..., others:]  # (B, M, M), (B, M, D, M)
        held = plan.unsqueeze(2) * apart
        own_mean = held.reshape(batch, size, num_points).clone(memory_format=torch.contiguous_format)
        _own(own_mean, num_points).add_(held.sum(-1))
        system = plan.clone()
        system.diagonal(dim1=-2, dim2=-1).add_(energy.point_masses)
        matrix -= own_mean @ torch.cholesky_solve(own_mean.mT, torch.linalg.cholesky_ex(system)[0])
        pairs = held.unsqueeze(-1) * apart.permute(0, 3, 1, 2).unsqueeze(2)  # (B, M, D, M, D)
        matrix += pairs.reshape(batch, size, size)
    matrix /= energy.epsilon[:, None, None]
    blocks = blocks / energy.epsilon[:, None, None, None] + bends
    matrix.view(batch, num_points, dim, num_points, dim).diagonal(dim1=1, dim2=3).add_(blocks.permute(0, 2, 3, 1))
    if own:
        matrix += across.reshape(batch, size, size)
    return matrix


def _own(rows: Tensor, num_points: int) -> Tensor:
    """Of ``(B, M D, M)`` the view ``(B, M, D)`` of the entries that belong to the same point."""
    return rows.view(rows.shape[0], num_points, -1, num_points).diagonal(dim1=1, dim2=3).mT


def differentiable_gradient(energy: Energy, here: Evaluation) -> tuple[Tensor, Tensor]:
    """The gradient as a function of points that autograd knows: for products with a Hessian that is never formed."""
    with torch.enable_grad():
        points = here.points.detach().requires_grad_()
        return energy.gradient(points, here), points
