"""FlowPool as a function: node features in, M points per graph out (sections 5 to 8 of the paper).

:func:`flow_pool` checks its input once, makes a :class:`~flowpool.engines.interface.Problem` of it and hands that to an engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from flowpool import costs, references, trial
from flowpool.core.measures import check_features, graphs_of, require_like
from flowpool.core.updates import UpdateStep
from flowpool.costs import CostFunction, Geometry
from flowpool.engines import choice, compiled, operators, torch_engine
from flowpool.engines.devices import HOST, carried, precision_on
from flowpool.engines.interface import BackwardReport, Engine, Problem, Solution, pooled_by
from flowpool.failures import act_on_failures
from flowpool.inputs import check_choice, check_plain, checked_epsilon, checked_point_masses
from flowpool.kernels.errors import KernelError
from flowpool.options import ON_FAILURE, Options
from flowpool.results import Pooled
from flowpool.status import Status

__all__ = ["BackwardReport", "Options", "Pooled", "flow_pool"]

Value = TypeVar("Value")
_announced: set[Status] = set()  # of what this process has been warned
_MOST_BYTES = 2**36  # for the result and for the plan of the points with themselves


def flow_pool(
    nodes: Tensor,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    reference: Tensor,
    masses: Tensor | None = None,
    point_masses: Tensor | None = None,
    dim_size: int | None = None,
    cost: str | CostFunction = "sqeuclidean",
    epsilon: float | Tensor = 0.1,
    relative: bool = True,
    debias: bool = True,
    gradient: Literal["implicit", "unrolled", "none"] = "implicit",
    tolerance: float = 1e-5,
    max_steps: int = 1000,
    step_size: float | None = None,
    update_step: str | UpdateStep | None = None,
    ridge: float | None = None,
    engine: Literal["auto", "compiled", "torch"] = "auto",
    on_failure: Literal["ignore", "warn", "raise"] = "warn",
) -> Pooled:
    r"""The M points per graph whose Sinkhorn divergence to the node cloud is least.

    .. math:: X^* = \lim_{t \to \infty} X_t, \quad \dot x_i = -\tfrac1{2 a_i} \nabla_{x_i} S_\varepsilon(X, Y),
              \quad X_0 = X^{(0)}

    Args:
        nodes: Y of all graphs, ``(N, D)``, floating point. Computed in float64, returned in the dtype given.
        batch: graph of each node, ``(N,)``, in any order.
        ptr: or the offsets of nodes sorted by graph, ``(B + 1,)``. With neither, all nodes form one graph.
        reference: X^(0), ``(M, D)``, distinct rows, shared by all graphs. It gives the M rows their meaning.
        masses: b, ``(N,)``, non-negative, normalised per graph; ``None``: equal.
        point_masses: a, ``(M,)``, positive, normalised; ``None``: equal.
        dim_size: B, to keep trailing graphs without nodes.
        cost: a name, a :class:`flowpool.costs.Cost`, or any callable from ``(..., M, 1, D)`` and ``(..., 1, N, D)`` to
            ``(..., M, N)``. Parameters of a module get exact gradients. With a diagonal
            :class:`flowpool.costs.Mahalanobis` cost the flow runs in the metric of the cost.
        epsilon: entropic regularisation, a number, a scalar tensor, or one value per graph ``(B,)``.
        relative: epsilon in units of each graph's mean cost to its mean (for the squared Euclidean cost, the sum of the
            variances R^2), and the reference in units of R around the mean: pooling then commutes with scaling and
            moving the features. Otherwise both are absolute, as in the paper.
        debias: descend S_eps; otherwise L_eps alone, as in section 8 of the paper.
        gradient: ``"implicit"``: one linear solve, memory independent of the steps. ``"unrolled"``: through the
            recorded steps of Algorithm 1 (section 8.1). ``"none"``: no gradient.
        tolerance: stop when the Newton step is shorter than this, relative to R.
        max_steps: cap on the steps of all kinds.
        step_size: fixed step of Algorithm 1 for the explicit part of the flow; ``None`` chooses it by its error. A
            step of one jumps to the barycentric map. Unrolling uses 0.25 unless it is given.
        update_step: runs Algorithm 1 exactly as printed instead, in the given coordinates: ``max_steps`` times
            ``X <- update_step(X, gradient, step_size)``, where ``step_size`` is the tau of the paper. ``"gradient"``,
            ``"momentum"``, ``"adam"``, or a function, see :mod:`flowpool.core.updates`.
        ridge: lambda of the Tikhonov term in the backward pass, ``(A + lambda I) J = B`` in section 8.2 of the paper: relative
            to the square of the Hessian's scale, or absolute where ``relative=False``. ``None``: practically zero.
        engine: ``"torch"`` (any device, any cost), ``"compiled"`` (squared Euclidean or diagonal Mahalanobis cost, on the
            CPU: tensors of another device go there and come back), ``"auto"``.
        on_failure: for graphs that were not pooled to the tolerance: ``"ignore"``, ``"warn"`` (once for each kind of status,
            in the life of the process), or ``"raise"`` an ArithmeticError.

    Returns:
        :class:`Pooled`. Trouble with one graph does not touch the others, and its status says what it is.
    """
    options = Options(debias, gradient, tolerance, max_steps, step_size, update_step, ridge, engine)
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        # Costs without a closed form are differentiated inside the solver, which inference mode would forbid.
        with torch.inference_mode(False), torch.no_grad():
            return flow_pool(
                _outside_inference(nodes),
                batch,
                ptr,
                reference=_outside_inference(reference),
                masses=_outside_inference(masses),
                point_masses=_outside_inference(point_masses),
                dim_size=dim_size,
                cost=cost,
                epsilon=_outside_inference(epsilon),
                relative=relative,
                **vars(options),
                on_failure=on_failure,
            )
    check_choice("on_failure", on_failure, ON_FAILURE)
    check_features(nodes)
    check_plain(nodes)
    references.check_shape(reference, nodes.shape[1])
    if reference.device != nodes.device:
        raise ValueError(f"reference is on {reference.device}, nodes are on {nodes.device}; move one of them.")
    if reference.requires_grad and torch.is_grad_enabled() and gradient == "implicit":
        raise ValueError(
            "reference requires a gradient, but X* hardly depends on it: the flow forgets where it began. Pass "
            "reference.detach(), or gradient='unrolled' to differentiate the steps."
        )
    geometry = costs.geometry_of(costs.resolve(cost))
    costs.check_width(geometry.cost, nodes.shape[1])
    for name, weights in (("masses", masses), ("point_masses", point_masses)):
        if isinstance(weights, Tensor):
            require_like(weights, nodes, name)
    given = _Given(nodes, batch, ptr, reference, masses, point_masses, epsilon, geometry)
    with torch.set_grad_enabled(torch.is_grad_enabled() and gradient != "none"):
        if nodes.device.type == HOST.type or not choice.use_kernels(options, geometry.cost, point_masses, relative):
            pooled = _pool(given, dim_size, relative, options, BackwardReport(nodes.device))
        else:
            pooled = _pool_on_host(given, dim_size, relative, options)
    if not torch.compiler.is_compiling():  # a traced graph has no side effects
        status = pooled.host.status
        act_on_failures(
            status, on_failure, _announced, "Shown once per kind of status; the result has the status of every graph."
        )
    return pooled


class _Given(NamedTuple):
    """What the caller gave, all that can be on a device."""

    nodes: Tensor
    batch: Tensor | None
    ptr: Tensor | None
    reference: Tensor
    masses: Tensor | None
    point_masses: Tensor | None
    epsilon: float | Tensor
    geometry: Geometry

    def to_host(self) -> _Given:
        """The same on the CPU, by one copy."""
        *given, geometry = self
        found = carried([*given, *geometry.tensors.values()], HOST)
        return _Given._make([*found[: len(given)], geometry.having(found[len(given) :])])


def _pool_on_host(given: _Given, dim_size: int | None, relative: bool, options: Options) -> Pooled:
    """:func:`_pool` on the CPU, for tensors on another device."""
    device = given.nodes.device
    choice.say_where(device)
    host = _pool(given.to_host(), dim_size, relative, options, BackwardReport(device))
    residual = host.residual.to(precision_on(device))
    points, residual, steps, status = carried([host.points, residual, host.steps, host.status], device)
    return replace(host, points=points, residual=residual, steps=steps, status=status, _on_host=host)


def _pool(given: _Given, dim_size: int | None, relative: bool, options: Options, report: BackwardReport) -> Pooled:
    """The problem, the engine for it, and the record of what it found."""
    nodes, batch, ptr, reference, masses, point_masses, epsilon, geometry = given
    if not torch.compiler.is_compiling():
        references.check_values(reference)
    precision = precision_on(nodes.device)
    wide = torch.promote_types(nodes.dtype, torch.float32)
    traced = torch.compiler.is_compiling() and not (batch is None and ptr is None)
    if traced and dim_size is not None:
        offsets, graph = operators.traced_graphs(nodes, batch, ptr, masses, dim_size)
    else:
        offsets, graph = graphs_of(nodes.detach(), batch, ptr, masses, dim_size)
    start = reference.to(precision).contiguous()
    _check_size(offsets.shape[0] - 1, *start.shape)
    geometry = geometry.to(precision, nodes.device)
    if not geometry.cost.known:
        implicit = torch.is_grad_enabled() and options.gradient == "implicit"
        geometry = trial.tried(geometry, start, options.debias, implicit)
    problem = Problem(
        nodes.to(wide),
        None if masses is None else masses.to(wide),
        graph,
        offsets,
        start,
        checked_point_masses(point_masses, start.shape[0], start),
        checked_epsilon(epsilon, offsets.shape[0] - 1, start),
        relative,
        geometry,
        torch.finfo(nodes.dtype).eps,
        options,
    )
    solution, engine, name = _solve(problem, report)
    return Pooled(
        solution.points.to(nodes.dtype), solution.residual, solution.steps, solution.status, report,
        f"{name} engine on {nodes.device}", options.tolerance, engine, problem.detached(), solution,
    )  # fmt: skip


def _solve(problem: Problem, report: BackwardReport) -> tuple[Solution, Engine, str]:
    """By the compiled engine where it can serve; if kernels turn out not to compile here, by torch after all."""
    if choice.use_kernels(problem.options, problem.geometry.cost, problem.point_masses, problem.relative):
        if torch.compiler.is_compiling():
            return operators.traced_solve(problem), compiled, "compiled"
        try:
            return pooled_by(compiled, problem, report), compiled, "compiled"
        except KernelError as error:
            choice.give_up_kernels(str(error), problem)
    if problem.options.gradient == "unrolled":
        return torch_engine.solve(problem), torch_engine, "torch"
    return pooled_by(torch_engine, problem, report), torch_engine, "torch"


def _outside_inference(value: Value) -> Value:
    return cast(Value, value.clone()) if isinstance(value, Tensor) else value


def _check_size(num_graphs: int, num_points: int, dim: int) -> None:
    needed = 8 * num_points * max(num_graphs * dim, num_points)
    if needed > _MOST_BYTES:
        raise ValueError(
            f"{num_graphs} graphs with {num_points} points of {dim} features need at least {needed:.1e} bytes of "
            "memory; pool to fewer points, or fewer graphs at a time."
        )
