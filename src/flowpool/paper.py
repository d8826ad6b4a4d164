"""The method exactly as printed: Algorithm 1 from an absolute X^(0) with an absolute epsilon (section 6 of the paper)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from flowpool.core.updates import UpdateStep
from flowpool.costs import CostFunction
from flowpool.pooling import flow_pool
from flowpool.results import Pooled


def algorithm_1(
    nodes: Tensor,
    batch: Tensor | None = None,
    *,
    start: Tensor,
    epsilon: float | Tensor,
    step_size: float,
    max_steps: int = 100,
    update_step: str | UpdateStep = "gradient",
    tolerance: float = 1e-5,
    masses: Tensor | None = None,
    point_masses: Tensor | None = None,
    cost: str | CostFunction = "sqeuclidean",
    debias: bool = True,
    gradient: Literal["implicit", "unrolled", "none"] = "implicit",
    ridge: float | None = None,
    on_failure: Literal["ignore", "warn", "raise"] = "ignore",
) -> Pooled:
    r"""FlowPool as Algorithm 1 has it: :math:`X^{(l+1)} = \mathrm{update\_step}(X^{(l)}, \nabla_X S_\varepsilon, \tau)`.

    It is :func:`flowpool.flow_pool` with ``relative=False`` and an ``update_step``, without frames, without steps of any
    other kind, and differentiated where it ends.

    Args:
        nodes: Y of all graphs, ``(N, D)``.
        batch: graph of each node, ``(N,)``; ``None``: one graph.
        start: X^(0), ``(M, D)``.
        epsilon: in units of the cost.
        step_size: tau.
        max_steps: L.
        update_step: ``"gradient"``, ``"momentum"``, ``"adam"``, or a function, see :mod:`flowpool.core.updates`.
        tolerance: a graph has converged when the Newton step is shorter than this, relative to its radius.
        debias: S_eps, or L_eps alone.
        gradient: ``"implicit"``: the normal equations with the Tikhonov term by conjugate gradients (section 8.2);
            ``"unrolled"``: through the recorded steps (section 8.1).
        ridge: lambda.
        masses, point_masses, cost, on_failure: as for :func:`flowpool.flow_pool`.
    """
    return flow_pool(
        nodes,
        batch,
        reference=start,
        masses=masses,
        point_masses=point_masses,
        cost=cost,
        epsilon=epsilon,
        relative=False,
        debias=debias,
        gradient=gradient,
        tolerance=tolerance,
        max_steps=max_steps,
        step_size=step_size,
        update_step=update_step,
        ridge=ridge,
        on_failure=on_failure,
    )
