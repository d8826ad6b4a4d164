"""The torch engine: for any device, any cost, and recorded steps. What the paper says, for padded batches of graphs.

Graphs are taken into their frames (:mod:`flowpool.core.frame`) and solved side by side, padded with nodes of mass zero to the
size of the largest. Groups of similar size bound the memory: the largest tensors of a group have at most
:data:`~flowpool.core.measures.GROUP` numbers, unless it is one graph. A graph's result is the same in any company, but for
rounding.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import Tensor

from flowpool.core import flow, updates
from flowpool.core.constants import FARAWAY, RIDGE, TIGHTEST
from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.flow import Flowed
from flowpool.core.frame import Frame, make_frame
from flowpool.core.implicit import implicit
from flowpool.core.measures import Clouds, sorted_clouds
from flowpool.core.solved import Solved
from flowpool.costs import Geometry, SquaredEuclidean
from flowpool.engines.interface import Gradients, Problem, Solution
from flowpool.status import Status

_UNROLLED_STEP = 0.25

# The threads that torch computes with do not survive a fork, and a child that hands them work waits for ever. So a forked
# child computes with one, as the workers of torch's own DataLoader do.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def framed(problem: Problem) -> tuple[Frame, Tensor]:
    """The frames of the graphs, connected to the problem's tensors, and the order of the nodes."""
    precision = problem.reference.dtype
    masses = None if problem.masses is None else problem.masses.to(precision)
    clouds, order = sorted_clouds(problem.nodes.to(precision), masses, problem.ptr, problem.batch)
    literal = problem.options.update_step is not None
    return make_frame(clouds, problem.geometry, problem.epsilon, problem.reference, problem.relative, literal), order


def energy_of(frame: Frame, graphs: Tensor, point_masses: Tensor, debias: bool) -> Energy:
    """What some graphs, ``(K,)``, descend, connected to the tensors of the frame."""
    nodes, masses = frame.clouds.padded(graphs)
    shares = point_masses.expand(len(graphs), -1)
    return Energy(frame.geometry, nodes, masses, shares, frame.epsilon[graphs], debias)


def solve(problem: Problem) -> Solution:
    """The pooled points of a batch; with ``gradient="unrolled"`` their autograd history goes through every step."""
    frame, order = framed(problem)
    count, (num_points, dim) = problem.num_graphs, problem.reference.shape
    none, kinds = frame.epsilon.detach().new_zeros(count), 1 + problem.options.debias
    ended = Flowed(
        frame.start.new_zeros(count, num_points, dim), none.new_zeros(count, kinds, num_points), none, none.long(), none.bool()
    )  # fmt: skip
    for graphs in frame.clouds.groups(frame.solvable.nonzero().squeeze(-1), num_points * dim):
        found = _descended(problem, frame, graphs)
        ended = Flowed(*(value.index_copy(0, graphs, one) for value, one in zip(ended, found, strict=True)))
    points, tolerance = frame.outside(ended.points).to(problem.nodes.dtype), problem.options.tolerance
    status = torch.where(ended.residual <= tolerance, Status.OK.value, Status.MAX_STEPS.value)
    status = torch.where(ended.singular, Status.SINGULAR.value, status)
    status = torch.where(frame.empty, Status.EMPTY.value, status)
    finite = points.detach().flatten(1).isfinite().all(1) & ~ended.residual.isnan()
    status = torch.where(finite, status, Status.NONFINITE.value)
    status = torch.where(frame.broken, Status.NONFINITE_INPUT.value, status).to(torch.int8)
    residual = torch.where(frame.broken, torch.nan, ended.residual)
    kept = (ended.points, ended.potential, order, frame.clouds.nodes, frame.clouds.masses, frame.epsilon)
    state = (*kept, frame.cost_unit, frame.solvable)
    return Solution(points, residual, ended.steps, status, tuple(value.detach() for value in state))


def _descended(problem: Problem, frame: Frame, graphs: Tensor) -> Flowed:
    """The end of some graphs, ``(K,)``, by the flow or by Algorithm 1."""
    options, start = problem.options, frame.start[graphs]
    energy = energy_of(frame, graphs, problem.point_masses, options.debias)
    if options.gradient != "unrolled" and options.update_step is None:
        if frame.geometry.is_squared_euclidean:
            start = _near(start, problem.point_masses)
        return flow.follow(energy, start.detach(), options.tolerance, options.max_steps, options.step_size)
    step_size = _UNROLLED_STEP if options.step_size is None else options.step_size
    update_step = None if options.update_step is None else updates.resolve(options.update_step)
    # Steps of an absolute length are those of the caller's coordinates, which hardly matter to a relative one.
    unit = None if problem.relative else frame.curvature_unit[graphs]
    points, steps = flow.descend(energy, start, step_size, options.max_steps, options.tolerance, update_step, unit)
    return judge(energy, points, options.tolerance)._replace(points=points, steps=steps)


@torch.no_grad()
def judge(energy: Energy, points: Tensor, tolerance: float) -> Flowed:
    """How far from stationary some points ``(B, M, D)`` are, without moving them."""
    here = energy.evaluate(points.detach())
    left, flat = flow.distance(energy, here)
    residual = torch.where(here.gradient.isfinite().all(-1).all(-1), left, torch.nan)  # it has left for infinity
    potential, steps = here.transport.potential.transpose(0, 1), torch.zeros_like(residual, dtype=torch.long)
    return Flowed(here.points, potential, residual, steps, flat & (residual <= tolerance))


def _near(start: Tensor, point_masses: Tensor) -> Tensor:
    """The start ``(B, M, D)``, moved to the nodes where it is far away (:data:`~flowpool.core.constants.FARAWAY`)."""
    middle = (point_masses.unsqueeze(-1) * start).sum(1, keepdim=True)
    away = middle.square().sum(-1, keepdim=True) > FARAWAY**2
    return torch.where(away, start - middle, start)


def adjoint(problem: Problem, solution: Solution, cotangent: Tensor, wanted: set[str]) -> Gradients:
    """Gradients of ``<cotangent, points>``: implicit in the frames, by autograd through the frames."""
    inside, potential = solution.state[:2]
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_(name in wanted) for name, value in problem.tensors().items()}
        traced = problem.having(leaves)
        frame, _ = framed(traced)
        outside = frame.outside(inside)
        fixed = frame.start  # along flat directions the points are where they began, or, if that is absolute, ...
        if not problem.relative:  # ... nothing that happens to the frame moves them
            fixed = (outside.detach() - frame.mean.unsqueeze(1)) / frame.scale.unsqueeze(1)
        total = torch.where(frame.broken[:, None, None], 0.0, cotangent * outside).sum()
    seed = (cotangent * frame.scale.detach().unsqueeze(1)).nan_to_num(0.0)
    ridge = RIDGE if problem.options.ridge is None else problem.options.ridge
    absolute = not problem.relative and problem.options.ridge is not None
    weights = problem.geometry.feature_weights if absolute else None
    residual = torch.zeros_like(solution.residual)
    damped = torch.zeros_like(residual, dtype=torch.bool)
    for graphs in frame.clouds.groups(frame.solvable.nonzero().squeeze(-1), problem.reference.numel()):
        with torch.enable_grad():
            energy = energy_of(frame, graphs, traced.point_masses, problem.options.debias)
        here = energy.evaluate(inside[graphs], potential[graphs].transpose(0, 1), TIGHTEST)
        level = torch.full_like(energy.epsilon.detach(), ridge)
        if absolute:
            level = level / (frame.curvature_unit[graphs] * energy.scales.stiffness.mean(-1)).square()
        number, found = implicit(energy, here, seed[graphs], level, weights)
        with torch.enable_grad():
            total = total + number + (found.left * fixed[graphs]).sum()
        residual[graphs], damped[graphs] = found.residual, found.damped
    names = sorted(wanted)
    gradients = torch.autograd.grad(total, [leaves[name] for name in names], materialize_grads=True)
    return Gradients(dict(zip(names, gradients, strict=True)), residual, damped)


def plan(problem: Problem, solution: Solution, graph: int) -> Tensor:
    """The optimal coupling of a graph, ``(M, N_g)``."""
    return _solved(problem, solution).plan(graph)


def divergence(problem: Problem, solution: Solution) -> Tensor:
    """S_eps(X*, Y), ``(B,)``."""
    return _solved(problem, solution).divergence()


def at_end(problem: Problem, solution: Solution, graph: int) -> tuple[Energy, Evaluation] | None:
    """The energy of a graph at its pooled points; ``None`` if it needed no flow."""
    return _solved(problem, solution).at_end(graph)


def _solved(problem: Problem, solution: Solution) -> Solved:
    points, potential, order, nodes, masses, epsilon, cost_unit, solvable = solution.state
    weighing = problem.geometry.feature_weights is not None and problem.options.update_step is None
    geometry = Geometry(SquaredEuclidean()) if weighing else problem.geometry
    clouds, debias = Clouds.from_ptr(nodes, masses, problem.ptr), problem.options.debias
    return Solved(
        clouds, order, geometry, problem.point_masses, epsilon, debias, cost_unit, solvable, points, potential
    )
