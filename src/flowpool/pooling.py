"""FlowPool as a function: node features in, M points per graph out (sections 5 to 8 of the paper).

:func:`flow_pool` checks its input, brings every graph into a frame of its own (mean zero, variance one), lets an
engine find the stationary points there, and maps them back. Mean, scale and epsilon are ordinary differentiable
tensors; only the map from the framed cloud to its pooled points has a derivative of its own, from the optimality
condition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowpool import batching, costs, references, sinkhorn
from flowpool.batching import Problem
from flowpool.costs import Cost, CostFunction, Geometry
from flowpool.flow import Flowed
from flowpool.measures import Clouds, check_features, make_clouds, require_like
from flowpool.status import Status

_POINTLESS = 1e-13  # spread of a cloud, relative to its largest entry, below which it is one point
_UNROLLED_STEP = 0.25


@dataclass(frozen=True)
class Options:
    """How the points are found and differentiated; the arguments of the same names of :func:`flow_pool`."""

    debias: bool = True
    gradient: Literal["implicit", "unrolled", "none"] = "implicit"
    tolerance: float = 1e-5
    max_steps: int = 1000
    step_size: float | None = None
    ridge: float = 1e-18
    engine: Literal["auto", "compiled", "torch"] = "auto"

    def __post_init__(self) -> None:
        if self.gradient not in ("implicit", "unrolled", "none"):
            raise ValueError(f"Unknown gradient {self.gradient!r}; pass 'implicit', 'unrolled' or 'none'.")
        if self.engine not in ("auto", "compiled", "torch"):
            raise ValueError(f"Unknown engine {self.engine!r}; pass 'auto', 'compiled' or 'torch'.")
        if not self.tolerance > 0 or not math.isfinite(self.tolerance):
            raise ValueError(f"tolerance is {self.tolerance}; pass a small positive number, like 1e-5.")
        if self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; pass at least 1.")
        if self.step_size is not None and not 0 < self.step_size <= 1:
            raise ValueError(
                f"step_size is {self.step_size}; pass a value in (0, 1], or None to let the error choose it."
            )
        if not self.ridge >= 0 or not math.isfinite(self.ridge):
            raise ValueError(f"ridge is {self.ridge}; pass a value >= 0.")


class BackwardReport:
    """Quality of the last backward pass, per graph.

    Attributes:
        residual: of the linear solve, ``(B,)``; ``None`` before the first backward pass.
        damped: whether the Hessian was singular, so that the minimum-norm gradient was taken, ``(B,)`` bool.
    """

    def __init__(self) -> None:
        self.residual: Tensor | None = None
        self.damped: Tensor | None = None


@dataclass(frozen=True)
class Pooled:
    """Pooled points of a batch of B graphs, and how well they were found.

    Attributes:
        points: X*, ``(B, M, D)``; zeros for an empty graph, NaN for one with non-finite features.
        residual: length of the Newton step left at X*, relative to the graph's scale R, ``(B,)``.
        steps: ``(B,)``.
        status: :class:`Status` codes, ``(B,)`` int8.
        backward: filled by the backward pass.
    """

    points: Tensor
    residual: Tensor
    steps: Tensor
    status: Tensor
    backward: BackwardReport
    _frame: _Frame = field(repr=False)
    _solution: _Solution | None = field(repr=False)

    @property
    def converged(self) -> Tensor:
        """Stationary to the tolerance, or empty, ``(B,)`` bool."""
        good = torch.tensor([s.value for s in Status if s.converged], device=self.status.device)
        return torch.isin(self.status, good)

    @cached_property
    def divergence(self) -> Tensor:
        """S_eps(X*, Y), what pooling lost, ``(B,)``; computed when first asked for.

        It includes the transport of each node cloud to itself, whose cost grows with the square of its size. Zero for
        graphs without nodes or with one distinct node, NaN where the points are.
        """
        frame = self._frame
        result = torch.where(frame.bad, torch.nan, torch.zeros_like(frame.scale))
        if self._solution is None:
            return result
        return result.index_copy(0, frame.solvable, self._solution.divergence() * frame.cost_unit)

    def plan(self, graph: int) -> Tensor:
        """The optimal coupling of one graph, ``(M, N_g)``: how much of each node went to each point."""
        frame = self._frame
        num_graphs = self.points.shape[0]
        if not -num_graphs <= graph < num_graphs:
            raise IndexError(f"graph {graph} of a batch of {num_graphs}.")
        graph %= num_graphs
        _, masses = frame.clouds.cloud(graph)
        place = (frame.solvable == graph).nonzero()
        if self._solution is None or place.numel() == 0:
            # One distinct node, or none: every point takes its share of everything.
            value = torch.nan if bool(frame.bad[graph]) else 1.0
            return value * frame.point_masses[:, None] * masses
        return self._solution.plan(int(place))


class _Frame(NamedTuple):
    """The batch as the solver sees it, and the way back."""

    clouds: Clouds  # framed, all graphs
    point_masses: Tensor  # (M,)
    mean: Tensor  # (B, D)
    scale: Tensor  # (B,)
    epsilon: Tensor  # (B,)
    start: Tensor  # (B, M, D)
    empty: Tensor  # (B,) bool
    bad: Tensor  # (B,) bool, non-finite features
    solvable: Tensor  # (K,) int64, graphs that need the flow
    cost_unit: Tensor  # (K,), what one unit of cost in the frame is outside


@dataclass(frozen=True)
class _Solution:
    """What the plans and the divergence of the solvable graphs are computed from."""

    problem: Problem
    ended: Flowed

    def plan(self, place: int) -> Tensor:
        nodes, masses = (x.unsqueeze(0) for x in self.problem.clouds.cloud(place))
        cost = self.problem.geometry.matrix(self.ended.points[place : place + 1], nodes)
        epsilon, a = self.problem.epsilon[place : place + 1], self.problem.point_masses.unsqueeze(0)
        return sinkhorn.solve(cost, a, masses, epsilon, self.ended.potential[place : place + 1]).plan[0]

    @torch.no_grad()
    def divergence(self) -> Tensor:
        result = torch.zeros_like(self.problem.epsilon)
        for bucket in batching.buckets(replace(self.problem, debias=True)):
            energy, points = bucket.energy, self.ended.points[bucket.graphs]
            here = energy.evaluate_from(points, self.ended.potential[bucket.graphs], None)
            own = energy.geometry.matrix(energy.nodes, energy.nodes)
            nodes = sinkhorn.solve_self(own, energy.masses, energy.epsilon)
            value = energy.value(points, here) - nodes.value(energy.masses) / 2
            result = result.index_copy(0, bucket.graphs, value)
        return result


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
    ridge: float = 1e-18,
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
            ``(..., M, N)``. Parameters of a module get exact gradients.
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
        engine: ``"torch"`` (any device, any cost), ``"compiled"`` (CPU, squared Euclidean cost), ``"auto"``.

    Returns:
        :class:`Pooled`. Nothing is raised for numerical trouble in one graph: its status says so and the others are
        not touched.
    """
    options = Options(debias, gradient, tolerance, max_steps, step_size, ridge, engine)
    check_features(nodes)
    references.check(reference, nodes.shape[1])
    require_like(reference, nodes, "reference")
    ground = costs.resolve(cost)
    precision = torch.float32 if nodes.device.type == "mps" else torch.float64
    if isinstance(masses, Tensor):
        require_like(masses, nodes, "masses")
        masses = masses.to(precision)
    if debias:
        _check_symmetry(ground, reference)
    with torch.set_grad_enabled(torch.is_grad_enabled() and gradient != "none"):
        clouds = make_clouds(nodes.to(precision), batch, ptr, masses, dim_size)
        weights = _checked_point_masses(point_masses, reference).to(precision)
        geometry = costs.bind(ground, precision, nodes.device)
        level = _checked_epsilon(epsilon, clouds, precision)
        frame = _make_frame(clouds, geometry, weights, level, reference.to(precision), relative)
        return _pool(frame, geometry, options, nodes.dtype)


def _pool(frame: _Frame, geometry: Geometry, options: Options, dtype: torch.dtype) -> Pooled:
    """Solves the graphs that need it and puts all rows together."""
    num_graphs, num_points = frame.start.shape[:2]
    blank = torch.zeros_like(frame.scale)
    residual, steps = torch.where(frame.bad, torch.nan, blank), blank.long()
    status = torch.where(frame.bad, Status.NONFINITE_INPUT.value, torch.where(frame.empty, Status.EMPTY.value, 0))
    report = BackwardReport()
    # A graph with one distinct node is pooled to copies of it; an empty one has mean zero.
    rows = torch.where(frame.bad[:, None], torch.nan, frame.mean)
    points = rows.unsqueeze(1).expand(num_graphs, num_points, rows.shape[1])
    solution = None
    if frame.solvable.numel():
        chosen = frame.solvable
        problem = Problem(
            frame.clouds.select(chosen),
            frame.start[chosen],
            frame.point_masses,
            frame.epsilon[chosen],
            geometry,
            options.debias,
        )
        ended = _stationary(problem, options, report, chosen, num_graphs)
        outside = frame.mean[chosen, None] + frame.scale[chosen, None, None] * ended.points
        points = points.index_copy(0, chosen, outside)
        residual = residual.index_copy(0, chosen, ended.residual)
        steps = steps.index_copy(0, chosen, ended.steps)
        status = status.index_copy(0, chosen, _status_of(ended, options.tolerance))
        solution = _Solution(_detached(problem), Flowed(*(x.detach() for x in ended)))
    points = points.to(dtype)
    finite = points.detach().flatten(1).isfinite().all(1)
    status = torch.where(finite | frame.bad, status, Status.NONFINITE.value)
    frame = frame._replace(clouds=_detached_clouds(frame.clouds))
    return Pooled(points, residual, steps, status.to(torch.int8), report, frame, solution)


def _stationary(problem: Problem, options: Options, report: BackwardReport, chosen: Tensor, num_graphs: int) -> Flowed:
    """The end of the flow with ``points`` differentiable in every tensor of the problem."""
    if options.gradient == "unrolled":
        step_size = _UNROLLED_STEP if options.step_size is None else options.step_size
        points, steps = batching.unrolled(problem, step_size, options.max_steps, options.tolerance)
        here = replace(problem, start=points.detach())
        # What is left at the end of the recorded steps: judged there, without moving.
        ended = batching.judge(here)
        return ended._replace(points=points, steps=steps)
    names = [name for name, value in problem.geometry.tensors.items() if value.requires_grad]
    call = _Call(_detached(problem), options, names, report, chosen, num_graphs)
    clouds = problem.clouds
    inputs = (clouds.nodes, clouds.masses, problem.point_masses, problem.epsilon)
    return Flowed(*_Implicit.apply(call, *inputs, *(problem.geometry.tensors[name] for name in names)))


class _Call(NamedTuple):
    """What the autograd function needs besides differentiable tensors."""

    problem: Problem  # without autograd history
    options: Options
    names: list[str]  # of the cost parameters that follow the other inputs
    report: BackwardReport
    chosen: Tensor
    num_graphs: int


class _Implicit(torch.autograd.Function):
    """The stationary points, with the derivative of section 8.2."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        options = call.options
        ended = batching.solve(call.problem, options.tolerance, options.max_steps, options.step_size)
        ctx.call = call
        ctx.save_for_backward(*inputs, *ended)
        ctx.mark_non_differentiable(*ended[1:])
        ctx.set_materialize_grads(False)
        return tuple(ended)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if upstream is None:
            return (None,) * (5 + len(call.names))
        ended = Flowed(*ctx.saved_tensors[4 + len(call.names) :])
        names = ["nodes", "masses", "point_masses", "epsilon", *call.names]
        needed = dict(zip(names, ctx.needs_input_grad[1:], strict=True))
        wanted = {name for name, need in needed.items() if need}
        found = batching.adjoint(call.problem, ended, upstream, call.options.ridge, wanted)
        report, place = call.report, call.chosen
        zeros = upstream.new_zeros(call.num_graphs)
        report.residual = zeros.index_copy(0, place, found.residual)
        report.damped = zeros.bool().index_copy(0, place, found.damped)
        values = {"nodes": found.nodes, "masses": found.masses, "point_masses": found.point_masses}
        values |= {"epsilon": found.epsilon} | found.parameters
        return (None, *(values[name] if needed[name] else None for name in names))


def _status_of(ended: Flowed, tolerance: float) -> Tensor:
    good = torch.where(ended.singular, Status.SINGULAR.value, Status.OK.value)
    status = torch.where(ended.residual <= tolerance, good, Status.MAX_STEPS.value)
    return torch.where(ended.residual.isnan(), Status.NONFINITE.value, status)


def _make_frame(
    clouds: Clouds, geometry: Geometry, point_masses: Tensor, epsilon: Tensor, reference: Tensor, relative: bool
) -> _Frame:
    """Every graph in its own frame: mean zero and variance one where the cost allows it, else as it is."""
    degree = geometry.cost.degree
    empty = clouds.sizes == 0
    broken = (~clouds.nodes.detach().isfinite()).any(-1).to(clouds.nodes.dtype)
    bad = clouds.sum(broken) > 0
    # Non-finite graphs leave the computation here; zeros keep their NaN out of everything that is shared.
    nodes = torch.where(bad[clouds.batch, None], 0.0, clouds.nodes)
    clouds = Clouds(nodes, clouds.masses, clouds.ptr)

    mean = clouds.mean()
    centred = nodes - mean[clouds.batch]
    peak, spread = _largest(clouds, nodes), _largest(clouds, centred)
    single = (spread <= _POINTLESS * peak) | (clouds.sizes <= 1) | empty | bad
    unit = torch.where(spread > 0, spread, 1.0)  # squares of the features themselves could overflow
    variance = clouds.sum(clouds.masses * (centred / unit[clouds.batch, None]).square().sum(-1))
    single = single | ~(variance > 0)
    scale = unit * torch.where(single, 1.0, variance).sqrt()  # (B,), R
    if degree is None:
        framed = Clouds(nodes, clouds.masses, clouds.ptr)
        origin, factor = torch.zeros_like(mean), torch.ones_like(scale)
    else:
        framed = Clouds(centred / scale[clouds.batch, None], clouds.masses, clouds.ptr)
        origin, factor = mean, scale

    if relative:
        # The mean cost to the mean, in the frame; for the squared Euclidean cost it is one by construction.
        level = epsilon
        if not geometry.is_squared_euclidean:
            centre = ((mean - origin) / factor[:, None])[clouds.batch]
            level = epsilon * clouds.sum(clouds.masses * geometry.pairwise(centre, framed.nodes))
            single = single | ~(level > 0)
        start = (mean - origin)[:, None] / factor[:, None, None] + (scale / factor)[:, None, None] * reference
    else:
        level = epsilon / factor.pow(degree or 0.0)
        start = (reference - origin[:, None]) / factor[:, None, None]
    solvable = (~single).nonzero().squeeze(-1)
    cost_unit = factor[solvable].detach().pow(degree or 0.0)
    back_mean = mean if degree is not None else torch.where(single[:, None], mean, torch.zeros_like(mean))
    return _Frame(framed, point_masses, back_mean, factor, level, start.detach(), empty, bad, solvable, cost_unit)


def _largest(clouds: Clouds, values: Tensor) -> Tensor:
    """Largest absolute entry of each cloud, ``(B,)``; zero for an empty one."""
    rows = values.detach().abs().amax(-1)
    return rows.new_zeros(clouds.num_graphs).scatter_reduce(0, clouds.batch, rows, "amax")


def _detached_clouds(clouds: Clouds) -> Clouds:
    return Clouds(clouds.nodes.detach(), clouds.masses.detach(), clouds.ptr)


def _detached(problem: Problem) -> Problem:
    tensors = {name: value.detach() for name, value in problem.geometry.tensors.items()}
    return Problem(
        _detached_clouds(problem.clouds),
        problem.start,
        problem.point_masses.detach(),
        problem.epsilon.detach(),
        Geometry(problem.geometry.cost, tensors),
        problem.debias,
    )


def _checked_epsilon(epsilon: float | Tensor, clouds: Clouds, precision: torch.dtype) -> Tensor:
    value = torch.as_tensor(epsilon)
    if not value.is_floating_point() and not isinstance(epsilon, (int, float)):
        raise TypeError(f"epsilon is {value.dtype}; pass a number or a floating-point tensor.")
    if value.dim() > 1 or value.dim() == 1 and value.numel() != clouds.num_graphs:
        raise ValueError(
            f"epsilon has shape {tuple(value.shape)}; pass one number, or one per graph, ({clouds.num_graphs},)."
        )
    found = value.detach()
    if not bool((found.isfinite() & (found > 0)).all()):
        wrong = found.flatten()[~(found.isfinite() & (found > 0)).flatten()][0]
        raise ValueError(f"epsilon is {float(wrong):g}; it must be finite and > 0 (0.1 is a good start).")
    return value.to(device=clouds.nodes.device, dtype=precision).expand(clouds.num_graphs)


def _checked_point_masses(point_masses: Tensor | None, reference: Tensor) -> Tensor:
    num_points = reference.shape[0]
    if point_masses is None:
        return reference.new_full((num_points,), 1.0, dtype=torch.float64) / num_points
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
