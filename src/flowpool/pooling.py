"""FlowPool as a function: node features in, M points per graph out (sections 5 to 8 of the paper).

:func:`flow_pool` checks its input, brings every graph into its frame, lets an engine find the stationary points there,
and maps them back. With the torch engine only the map from the framed cloud to its stationary points has a derivative
of its own, from the optimality condition, and everything around it is left to autograd. The compiled engine does all of
it, and its derivative, in kernels.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from flowpool import costs, references
from flowpool.core.constants import RIDGE
from flowpool.core.flow import Flowed
from flowpool.core.frame import make_frame
from flowpool.core.measures import Clouds, arrange, check_features, make_clouds, require_like
from flowpool.costs import Cost, CostFunction, Geometry
from flowpool.engines import choice as engines
from flowpool.engines import compiled as kernels
from flowpool.engines import operators as ops
from flowpool.engines import torch_engine as batching
from flowpool.engines.compiled import Ended, Given
from flowpool.engines.torch_engine import Problem
from flowpool.options import Options
from flowpool.results import BackwardReport, Pooled, Solution
from flowpool.status import Status

__all__ = ["BackwardReport", "Options", "Pooled", "flow_pool"]

Value = TypeVar("Value")
_UNROLLED_STEP = 0.25
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
    ridge: float = RIDGE,
    engine: Literal["auto", "compiled", "torch"] = "auto",
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
        ridge: lambda of the Tikhonov term in the backward pass, relative to the square of the Hessian's scale.
        engine: ``"torch"`` (any device, any cost), ``"compiled"`` (CPU, squared Euclidean or diagonal Mahalanobis cost),
            ``"auto"``.

    Returns:
        :class:`Pooled`. Nothing is raised for numerical trouble in one graph: its status says so and the others are
        not touched.
    """
    options = Options(debias, gradient, tolerance, max_steps, step_size, ridge, engine)
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
                **asdict(options),
            )
    check_features(nodes)
    references.check_shape(reference, nodes.shape[1])
    require_like(reference, nodes, "reference")
    if not torch.compiler.is_compiling():
        references.check_values(reference)
    ground = costs.resolve(cost)
    if isinstance(masses, Tensor):
        require_like(masses, nodes, "masses")
    if debias:
        _check_symmetry(ground, reference)
    precision = torch.float32 if nodes.device.type == "mps" else torch.float64
    with torch.set_grad_enabled(torch.is_grad_enabled() and gradient != "none"):
        geometry = costs.bind(ground, precision, nodes.device)
        weights = _checked_point_masses(point_masses, reference).to(precision)
        inputs = _Inputs(
            nodes, batch, ptr, reference.to(precision).contiguous(), masses, weights, dim_size, epsilon, relative
        )
        if engines.use_kernels(engine, nodes, geometry, weights, debias, gradient, step_size):
            return _pool_compiled(inputs, geometry, options)
        return _pool_torch(inputs, geometry, options)


class _Inputs(NamedTuple):
    """The arguments of the same names of :func:`flow_pool`, as far as they have been checked."""

    nodes: Tensor
    batch: Tensor | None
    ptr: Tensor | None
    reference: Tensor  # in the solver's precision
    masses: Tensor | None
    point_masses: Tensor  # normalised, in the solver's precision
    dim_size: int | None
    epsilon: float | Tensor
    relative: bool


def _pool_compiled(inputs: _Inputs, geometry: Geometry, options: Options) -> Pooled:
    """Pooling by kernels from end to end."""
    dtype, resolution = inputs.nodes.dtype, torch.finfo(inputs.nodes.dtype).eps
    wide = torch.promote_types(dtype, torch.float32)
    nodes = inputs.nodes.to(wide)
    masses = inputs.masses.to(wide) if isinstance(inputs.masses, Tensor) else inputs.masses
    ptr, order = arrange(nodes, inputs.batch, inputs.ptr, masses, inputs.dim_size, compiled=True)
    num_graphs = ptr.numel() - 1
    _check_size(num_graphs, *inputs.reference.shape)
    level = _checked_epsilon(inputs.epsilon, num_graphs, inputs.reference)
    features, relative = geometry.feature_weights, inputs.relative
    given = Given(masses, order, ptr, level, features, inputs.point_masses, relative, resolution)
    report = BackwardReport()
    if torch.compiler.is_compiling():
        settings = (inputs.reference, options.tolerance, options.max_steps, options.ridge)
        ended = Ended(*ops.solve(nodes, *given, *settings))
    else:
        call = _KernelCall(given, inputs.reference, options, report)
        ended = Ended(*_Kernels.apply(call, nodes, masses, level, features))
    fixed = given._replace(epsilon=level.detach(), point_masses=inputs.point_masses.detach())
    behind = partial(_solution_behind, ended, fixed, inputs.reference, geometry.detached())
    return Pooled(ended.points.to(dtype), ended.residual, ended.steps, ended.status, report, behind)


@torch.no_grad()
def _solution_behind(ended: Ended, given: Given, reference: Tensor, geometry: Geometry) -> Solution:
    """The graphs in their frames, which the kernels keep to themselves, with the solution that they found there."""
    clouds = Clouds.from_ptr(ended.nodes.to(given.epsilon.dtype), ended.masses, given.ptr)
    frame = make_frame(clouds, geometry, given.epsilon, reference, given.relative)
    problem = Problem(
        frame.clouds, frame.start, given.point_masses, frame.epsilon, frame.geometry, True, given.resolution
    )
    inside, potential, self_potential = ended.inside, ended.potential, ended.self_potential
    flowed = Flowed(inside, potential, self_potential, ended.residual, ended.steps, ended.singular)
    return Solution(problem, flowed, frame.solvable, frame.cost_unit, given.order)


class _KernelCall(NamedTuple):
    """What the autograd function of the compiled engine needs besides differentiable tensors."""

    given: Given
    reference: Tensor
    options: Options
    report: BackwardReport


class _Kernels(torch.autograd.Function):
    """:mod:`flowpool.engines.compiled` as a function of nodes, masses, epsilon and the weights of the features."""

    @staticmethod
    def forward(ctx: Any, call: _KernelCall, nodes: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        options = call.options
        ended = kernels.solve(nodes, call.given, call.reference, options.tolerance, options.max_steps)
        ctx.call = call
        ctx.save_for_backward(*inputs, *ended)
        ctx.mark_non_differentiable(*ended[1:])
        ctx.set_materialize_grads(False)
        return tuple(ended)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        if upstream is None:
            return (None,) * 5
        call: _KernelCall = ctx.call
        masses, epsilon, weights, *ended = ctx.saved_tensors
        given = call.given._replace(masses=masses, epsilon=epsilon, weights=weights)
        names = ("nodes", "masses", "epsilon", "weights")
        wanted = {name for name, need in zip(names, ctx.needs_input_grad[1:], strict=True) if need}
        found = kernels.adjoint(Ended(*ended), given, upstream, call.options.ridge, wanted)
        call.report.residual, call.report.damped = found.residual, found.damped
        return (None, *(getattr(found, name) if name in wanted else None for name in names))


def _refuse_second_derivatives() -> None:
    # Grad mode is on in a backward pass only under create_graph. Not every input makes the result require a gradient,
    # so that a check of the result alone would let a wrong second derivative through.
    if torch.is_grad_enabled():
        raise RuntimeError("flow_pool cannot be differentiated twice; call backward or grad without create_graph.")


def _pool_torch(inputs: _Inputs, geometry: Geometry, options: Options) -> Pooled:
    """Pooling by torch operations: for any device, any cost, and recorded steps."""
    nodes, reference, precision = inputs.nodes, inputs.reference, inputs.reference.dtype
    masses = inputs.masses.to(precision) if isinstance(inputs.masses, Tensor) else inputs.masses
    clouds, order = make_clouds(nodes.to(precision), inputs.batch, inputs.ptr, masses, inputs.dim_size)
    _check_size(clouds.num_graphs, *reference.shape)
    level = _checked_epsilon(inputs.epsilon, clouds.num_graphs, reference)
    frame = make_frame(clouds, geometry, level, reference, inputs.relative)
    resolution = torch.finfo(nodes.dtype).eps
    problem = Problem(
        frame.clouds, frame.start, inputs.point_masses, frame.epsilon, frame.geometry, options.debias, resolution
    )
    report = BackwardReport()
    ended = _stationary(problem, frame.solvable, options, report)
    points = frame.outside(ended.points).to(nodes.dtype)
    with torch.no_grad():
        status = torch.where(frame.empty, Status.EMPTY.value, _status_of(ended, options.tolerance))
        finite = points.detach().flatten(1).isfinite().all(1)
        status = torch.where(finite, status, Status.NONFINITE.value)
        status = torch.where(frame.broken, Status.NONFINITE_INPUT.value, status).to(torch.int8)
        residual = torch.where(frame.broken, torch.nan, ended.residual)
    flowed = Flowed(*(x.detach() for x in ended))
    behind = partial(Solution, _detached(problem), flowed, frame.solvable, frame.cost_unit, order)
    return Pooled(points, residual, ended.steps, status, report, behind)


def _stationary(problem: Problem, solvable: Tensor, options: Options, report: BackwardReport) -> Flowed:
    """The end of the flow, with ``points`` differentiable in every tensor of the problem; zeros where not solvable."""
    if options.gradient == "unrolled":
        step_size = _UNROLLED_STEP if options.step_size is None else options.step_size
        chosen = solvable.nonzero().squeeze(-1)
        part = problem.select(chosen)
        points, steps = batching.unrolled(part, step_size, options.max_steps, options.tolerance)
        # What is left at the end of the recorded steps: judged there, without moving.
        judged = batching.judge(replace(_detached(part), start=points.detach()))
        return engines.spread(judged._replace(points=points, steps=steps), chosen, problem.start)
    names = [name for name, value in problem.geometry.tensors.items() if value.requires_grad]
    call = _Call(_detached(problem), solvable, options, names, report)
    clouds = problem.clouds
    inputs = (clouds.nodes, clouds.masses, problem.point_masses, problem.epsilon)
    return Flowed(*_Implicit.apply(call, *inputs, *(problem.geometry.tensors[name] for name in names)))


class _Call(NamedTuple):
    """What the autograd function of the torch engine needs besides differentiable tensors."""

    problem: Problem  # without autograd history
    solvable: Tensor
    options: Options
    names: list[str]  # of the cost parameters that follow the other inputs
    report: BackwardReport


class _Implicit(torch.autograd.Function):
    """The stationary points, with the derivative of section 8.2."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        options = call.options
        ended = engines.solve(call.problem, call.solvable, options.tolerance, options.max_steps, options.step_size)
        ctx.call = call
        ctx.save_for_backward(*inputs, *ended)
        ctx.mark_non_differentiable(*ended[1:])
        ctx.set_materialize_grads(False)
        return tuple(ended)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        call: _Call = ctx.call
        if upstream is None:
            return (None,) * (5 + len(call.names))
        ended = Flowed(*ctx.saved_tensors[4 + len(call.names) :])
        names = ["nodes", "masses", "point_masses", "epsilon", *call.names]
        needed = dict(zip(names, ctx.needs_input_grad[1:], strict=True))
        wanted = {name for name, need in needed.items() if need}
        found = engines.adjoint(call.problem, call.solvable, ended, upstream, call.options.ridge, wanted)
        call.report.residual, call.report.damped = found.residual, found.damped
        values = {"nodes": found.nodes, "masses": found.masses, "point_masses": found.point_masses}
        values |= {"epsilon": found.epsilon} | found.parameters
        return (None, *(values[name] if needed[name] else None for name in names))


def _status_of(ended: Flowed, tolerance: float) -> Tensor:
    good = torch.where(ended.singular, Status.SINGULAR.value, Status.OK.value)
    status = torch.where(ended.residual <= tolerance, good, Status.MAX_STEPS.value)
    return torch.where(ended.residual.isnan(), Status.NONFINITE.value, status)


def _detached(problem: Problem) -> Problem:
    clouds = problem.clouds
    return replace(
        problem,
        clouds=Clouds(clouds.nodes.detach(), clouds.masses.detach(), clouds.ptr, clouds.batch),
        point_masses=problem.point_masses.detach(),
        epsilon=problem.epsilon.detach(),
        geometry=problem.geometry.detached(),
    )


def _outside_inference(value: Value) -> Value:
    return cast(Value, value.clone()) if isinstance(value, Tensor) else value


def _check_size(num_graphs: int, num_points: int, dim: int) -> None:
    needed = 8 * num_points * max(num_graphs * dim, num_points)
    if needed > _MOST_BYTES:
        raise ValueError(
            f"{num_graphs} graphs with {num_points} points of {dim} features need at least {needed:.1e} bytes of "
            "memory; pool to fewer points, or fewer graphs at a time."
        )


def _checked_epsilon(epsilon: float | Tensor, num_graphs: int, like: Tensor) -> Tensor:
    """Epsilon of each graph, ``(B,)``, with the dtype and the device of another tensor."""
    if not isinstance(epsilon, Tensor):
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise ValueError(f"epsilon is {epsilon:g}; it must be finite and > 0 (0.1 is a good start).")
        return like.new_full((num_graphs,), epsilon)
    if not epsilon.is_floating_point():
        raise TypeError(f"epsilon is {epsilon.dtype}; pass a number or a floating-point tensor.")
    if epsilon.dim() > 1 or epsilon.dim() == 1 and epsilon.numel() != num_graphs:
        raise ValueError(
            f"epsilon has shape {tuple(epsilon.shape)}; pass one number, or one per graph, ({num_graphs},)."
        )
    if not torch.compiler.is_compiling():
        wrong = ~(epsilon.detach().isfinite() & (epsilon.detach() > 0))
        if bool(wrong.any()):
            value = float(epsilon.detach()[wrong].flatten()[0])
            raise ValueError(f"epsilon is {value:g}; it must be finite and > 0 (0.1 is a good start).")
    return epsilon.to(like).expand(num_graphs)


def _checked_point_masses(point_masses: Tensor | None, reference: Tensor) -> Tensor:
    num_points = reference.shape[0]
    if point_masses is None:
        return reference.new_full((num_points,), 1.0 / num_points, dtype=torch.float64)
    if not isinstance(point_masses, Tensor) or point_masses.shape != (num_points,):
        found = tuple(point_masses.shape) if isinstance(point_masses, Tensor) else type(point_masses).__name__
        raise ValueError(f"point_masses is {found}; expected a tensor of shape ({num_points},), one mass per point.")
    require_like(point_masses, reference, "point_masses")
    wrong = ~(point_masses.detach().isfinite() & (point_masses.detach() > 0))
    if bool(wrong.any()):
        point = int(wrong.nonzero()[0])
        raise ValueError(
            f"{int(wrong.sum())} point masses are not positive numbers (first: point {point}, "
            f"{float(point_masses[point]):g}). Pass values > 0, or fewer points."
        )
    precise = point_masses.double()
    return precise / precise.sum()


def _check_symmetry(cost: Cost, reference: Tensor) -> None:
    """A debiased divergence needs C(x, y) = C(y, x); only costs that we did not write can break that."""
    if not isinstance(cost, costs.Custom) or reference.shape[0] < 2:
        return
    with torch.no_grad():
        geometry = costs.bind(cost, reference.dtype, reference.device)
        matrix = geometry.matrix(reference.unsqueeze(0), reference.unsqueeze(0))[0]
    gap = (matrix - matrix.T).abs()
    if bool((gap > 1e-4 * matrix.abs().amax()).any()):
        first, second = divmod(int(gap.argmax()), matrix.shape[0])
        raise ValueError(
            f"The cost is not symmetric: C(x{first}, x{second}) = {float(matrix[first, second]):g}, but "
            f"C(x{second}, x{first}) = {float(matrix[second, first]):g}. The divergence needs a symmetric cost; "
            "pass debias=False to use this one."
        )
