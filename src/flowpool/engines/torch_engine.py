"""The torch engine: for any device, any cost, and recorded steps.

Graphs are taken into their frames (:mod:`flowpool.core.frame`), and graphs of similar size are solved together. A graph is
padded with nodes of mass zero to a size that depends on the graph alone, and never computed in a batch of one (whose matrix
products round differently); on the CPU all is done by one thread, for which the operations are small enough. So a result is
the same whatever else is in the batch and whatever the number of threads: for the squared Euclidean cost to the bit, since
matrices of odd size, which are rounded by their place in memory, are made even (:mod:`flowpool.core.definite`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowpool.core import flow, updates
from flowpool.core.constants import FARAWAY, RIDGE
from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.flow import Flowed
from flowpool.core.frame import Frame, make_frame
from flowpool.core.implicit import vector_jacobian
from flowpool.core.measures import Clouds, sorted_clouds
from flowpool.core.records import put
from flowpool.core.solved import Solved
from flowpool.core.updates import UpdateStep
from flowpool.costs import Geometry, SquaredEuclidean
from flowpool.engines.interface import Gradients, Problem, Solution
from flowpool.options import Options
from flowpool.status import Status

_ALONE = 4096  # graphs above this size are always computed alone; below, always in company
_BUDGET = 2**22  # entries of the (B, M, N, D) tensors of one bucket
_UNROLLED_STEP = 0.25
_TIGHT = 1e-13  # marginal error of the plans behind a gradient


@dataclass(frozen=True)
class Framed:
    """Everything that defines the pooled points of a batch, in the solver's precision and in the frames of the graphs.

    Attributes:
        clouds: the graphs.
        start: X^(0) of each, ``(B, M, D)``.
        point_masses: a, ``(M,)``.
        epsilon: ``(B,)``.
        geometry: the cost.
        debias: S_eps, or L_eps alone.
        resolution: relative precision that the nodes were given in; finer differences are rounding.
        features: how many of the D features are no padding; ``None``: all.
    """

    clouds: Clouds
    start: Tensor
    point_masses: Tensor
    epsilon: Tensor
    geometry: Geometry
    debias: bool
    resolution: float = torch.finfo(torch.float64).eps
    features: int | None = None

    def detached(self) -> Framed:
        """The same without autograd history."""
        clouds = self.clouds
        return replace(
            self,
            clouds=Clouds(clouds.nodes.detach(), clouds.masses.detach(), clouds.ptr, clouds.batch),
            start=self.start.detach(),
            point_masses=self.point_masses.detach(),
            epsilon=self.epsilon.detach(),
            geometry=self.geometry.detached(),
        )

    def select(self, graphs: Tensor) -> Framed:
        """The problem of some graphs, in the order given, ``(K,)`` int64."""
        return replace(self, clouds=self.clouds.select(graphs), start=self.start[graphs], epsilon=self.epsilon[graphs])


class Bucket(NamedTuple):
    """Some graphs of similar size, as one padded energy."""

    graphs: Tensor  # (K,), which graphs of the batch
    gather: Tensor  # (K, N), which node each entry is; the total number of nodes for padding
    energy: Energy
    fresh: Tensor  # (K,) bool, false for the copy that keeps a lone graph company


def padded_size(size: int) -> int:
    """The number of rows that a graph of ``size`` nodes is padded to: a multiple of 32, and of about a quarter of it.

    Graphs of a few dozen nodes are so cheap that one bucket for all of them is quicker than none of them padded.
    """
    if size > _ALONE:
        return size
    unit = max(32, 1 << max(0, size.bit_length() - 3))
    return -(-size // unit) * unit


def buckets(problem: Framed) -> Iterator[Bucket]:
    """The graphs of a batch in padded groups; every tensor stays connected to the problem's."""
    clouds = problem.clouds
    sizes = clouds.sizes.tolist()
    groups: dict[int, list[int]] = {}
    for graph, size in enumerate(sizes):
        groups.setdefault(padded_size(size), []).append(graph)
    num_points, dim = problem.start.shape[1:]
    nodes = torch.cat([clouds.nodes, clouds.nodes.new_zeros(1, dim)])
    masses = torch.cat([clouds.masses, clouds.masses.new_zeros(1)])
    padding = clouds.nodes.shape[0]
    for width, members in sorted(groups.items()):
        alone = width > _ALONE
        most = 1 if alone else max(2, _BUDGET // (num_points * width * dim))
        for first in range(0, len(members), most):
            chosen = members[first : first + most]
            fresh = [True] * len(chosen)
            if len(chosen) == 1 and not alone:
                chosen, fresh = chosen * 2, [True, False]
            graphs = torch.tensor(chosen, device=nodes.device)
            column = torch.arange(width, device=nodes.device)
            start, size = clouds.ptr[graphs, None], clouds.sizes[graphs, None]
            gather = torch.where(column < size, start + column, padding)  # (K, N)
            energy = Energy(
                problem.geometry,
                nodes[gather],
                masses[gather],
                problem.point_masses.expand(len(chosen), num_points),
                problem.epsilon[graphs],
                problem.debias,
                problem.resolution,
                problem.features,
            )
            yield Bucket(graphs, gather, energy, torch.tensor(fresh, device=nodes.device))


@torch.no_grad()
def solve_framed(problem: Framed, tolerance: float, max_steps: int, step_size: float | None = None) -> Flowed:
    """The stationary points of all graphs, by :func:`flowpool.core.flow.follow`."""
    result = _blank(problem)
    for bucket in buckets(problem):
        start = problem.start[bucket.graphs]
        ended = flow.follow(bucket.energy, start, tolerance, max_steps, step_size)
        result = put(result, bucket.graphs, ended)
    return result


class FramedGradients(NamedTuple):
    """Gradients of ``<cotangent, X*>`` in the tensors of a framed problem, with the quality of the linear solves."""

    nodes: Tensor  # (N, D)
    masses: Tensor  # (N,)
    start: Tensor  # (B, M, D), along flat directions, in which X* stays where the start was
    point_masses: Tensor  # (M,)
    epsilon: Tensor  # (B,)
    parameters: dict[str, Tensor]
    residual: Tensor  # (B,)
    damped: Tensor  # (B,) bool


@torch.no_grad()
def adjoint_framed(
    problem: Framed,
    ended: Flowed,
    cotangent: Tensor,
    ridge: float,
    wanted: set[str],
    unit: Tensor | None = None,
    weights: Tensor | None = None,
) -> FramedGradients:
    """Gradients of ``<cotangent, X*>`` for all graphs, by :func:`flowpool.core.implicit.vector_jacobian`.

    What is not in ``wanted`` costs nothing and comes back as zeros.

    Args:
        ridge: lambda, in units of the square of the Hessian's scale.
        unit: or, if this is how much the frame's unit of curvature is outside, ``(B,)``, as it stands in the paper.
        weights: of the features in the frame, see :meth:`flowpool.core.systems.System.adjoint`.
    """
    clouds, tensors = problem.clouds, problem.geometry.tensors
    nodes = torch.cat([torch.zeros_like(clouds.nodes), clouds.nodes.new_zeros(1, clouds.nodes.shape[1])])
    masses = clouds.masses.new_zeros(clouds.masses.numel() + 1)
    point_masses, epsilon = torch.zeros_like(problem.point_masses), torch.zeros_like(problem.epsilon)
    parameters = {name: torch.zeros_like(tensors[name]) for name in wanted & set(tensors)}
    residual, damped = torch.zeros_like(epsilon), torch.zeros_like(epsilon, dtype=torch.bool)
    start = torch.zeros_like(problem.start)
    for bucket in buckets(problem):
        graphs, fresh, energy = bucket.graphs, bucket.fresh, bucket.energy
        solved = energy.evaluate_from(
            ended.points[graphs], ended.potential[graphs], ended.self_potential[graphs], _TIGHT
        )
        seed = cotangent[graphs] * fresh[:, None, None]
        level = torch.full_like(energy.epsilon, ridge)
        if unit is not None:
            level = level / (unit[graphs] * energy.scales.stiffness.mean(-1)).square()
        found, system = vector_jacobian(energy, solved, seed, level, wanted, weights)
        if found.nodes is not None:
            nodes[bucket.gather[fresh]] = found.nodes[fresh]
        if found.masses is not None:
            masses[bucket.gather[fresh]] = found.masses[fresh]
        if found.point_masses is not None:
            point_masses += found.point_masses.sum(0)
        if found.epsilon is not None:
            epsilon[graphs[fresh]] = found.epsilon[fresh]
        for name, value in found.parameters.items():
            parameters[name] += value
        start[graphs[fresh]] = system.left[fresh]
        residual[graphs[fresh]], damped[graphs[fresh]] = system.residual[fresh], system.damped[fresh]
    return FramedGradients(nodes[:-1], masses[:-1], start, point_masses, epsilon, parameters, residual, damped)


def _recipe(options: Options) -> bool:
    """Whether the steps are those of Algorithm 1 and no others."""
    return options.gradient == "unrolled" or options.update_step is not None


def descended(
    problem: Framed,
    step_size: float,
    max_steps: int,
    tolerance: float,
    update_step: UpdateStep | None = None,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """X^(L) of all graphs by Algorithm 1, every step recorded where grad mode is on, and the number of steps.

    See :func:`flowpool.core.flow.descend`; ``unit`` is ``(B,)``.
    """
    points, steps = problem.start, torch.zeros_like(problem.epsilon, dtype=torch.long)
    for bucket in buckets(problem):
        found, taken = flow.descend(
            bucket.energy,
            problem.start[bucket.graphs],
            step_size,
            max_steps,
            tolerance,
            update_step,
            None if unit is None else unit[bucket.graphs],
        )
        graphs = bucket.graphs[bucket.fresh]
        points = points.index_copy(0, graphs, found[bucket.fresh])
        steps = steps.index_copy(0, graphs, taken[bucket.fresh])
    return points, steps


@torch.no_grad()
def judge(problem: Framed) -> Flowed:
    """How far from stationary the points ``problem.start`` are, without moving them."""
    result = _blank(problem)
    for bucket in buckets(problem):
        here = bucket.energy.evaluate(problem.start[bucket.graphs])
        left, flat = flow.distance(bucket.energy, here)
        residual = torch.where(here.gradient.isfinite().all(-1).all(-1), left, torch.nan)  # it has left for infinity
        steps = torch.zeros_like(residual, dtype=torch.long)
        found = Flowed(here.points, here.xy.potential, here.self_potential, residual, steps, flat)
        result = put(result, bucket.graphs, found)
    return result


def _blank(problem: Framed) -> Flowed:
    num_graphs, num_points, _ = problem.start.shape
    none = problem.start.new_zeros(num_graphs)
    potentials = problem.start.new_zeros(num_graphs, num_points)
    return Flowed(problem.start, potentials, potentials, none, none.long(), none.bool())


def framed(problem: Problem) -> tuple[Framed, Frame, Tensor]:
    """The problem in the frames of its graphs, the frames, and the order of the nodes; connected to the problem's tensors."""
    precision = problem.reference.dtype
    masses = None if problem.masses is None else problem.masses.to(precision)
    clouds, order = sorted_clouds(problem.nodes.to(precision), masses, problem.ptr, problem.batch)
    literal = problem.options.update_step is not None
    frame = make_frame(clouds, problem.geometry, problem.epsilon, problem.reference, problem.relative, literal)
    start = frame.start
    if frame.geometry.is_squared_euclidean and not _recipe(problem.options):  # which begins where it was told to
        start = _near(start, problem.point_masses)
    features, clouds = problem.nodes.shape[1], frame.clouds
    # Matrices of even size have the same bits wherever they lie in memory, and this cost does not feel a feature of zeros.
    if frame.geometry.is_squared_euclidean and features % 2:
        clouds, start = clouds.moved(_widened(clouds.nodes, features + 1)), _widened(start, features + 1)
    inside = Framed(
        clouds, start, problem.point_masses, frame.epsilon, frame.geometry, problem.options.debias, problem.resolution,
        features,
    )  # fmt: skip
    return inside, frame, order


def _widened(values: Tensor, features: int, filling: float = 0.0) -> Tensor:
    """Values of each feature, with more of them."""
    return pad(values, (0, features - values.shape[-1]), value=filling)


def _near(start: Tensor, point_masses: Tensor) -> Tensor:
    """The start ``(B, M, D)``, moved to the nodes where it is far away (:data:`~flowpool.core.constants.FARAWAY`)."""
    middle = (point_masses.detach().unsqueeze(-1) * start.detach()).sum(1, keepdim=True)
    away = middle.square().sum(-1, keepdim=True) > FARAWAY**2
    return torch.where(away, start - middle, start)


def solve(problem: Problem) -> Solution:
    """The pooled points of a batch; with ``gradient="unrolled"`` their autograd history goes through every step."""
    options = problem.options
    with _one_thread(problem.nodes.device):
        inside, frame, order = framed(problem)
        chosen = frame.solvable.nonzero().squeeze(-1)
        part = inside.select(chosen)
        if _recipe(options):
            step_size = _UNROLLED_STEP if options.step_size is None else options.step_size
            update_step = None if options.update_step is None else updates.resolve(options.update_step)
            # Steps of an absolute length are those of the caller's coordinates, which hardly matter to a relative one.
            unit = None if problem.relative else frame.curvature_unit[chosen]
            points, steps = descended(part, step_size, options.max_steps, options.tolerance, update_step, unit)
            # What is left at the end of the recorded steps: judged there, without moving.
            ended = judge(replace(part.detached(), start=points.detach()))._replace(points=points, steps=steps)
            ended = ended._replace(singular=ended.singular & (ended.residual <= options.tolerance))
        else:
            ended = solve_framed(part.detached(), options.tolerance, options.max_steps, options.step_size)
        ended = Flowed(*(_rows(value, chosen, problem.num_graphs) for value in ended))
        ended = ended._replace(points=ended.points[..., : inside.features])
        points = frame.outside(ended.points).to(problem.nodes.dtype)
    with torch.no_grad():
        status = torch.where(ended.residual <= options.tolerance, Status.OK.value, Status.MAX_STEPS.value)
        status = torch.where(ended.singular, Status.SINGULAR.value, status)
        status = torch.where(frame.empty, Status.EMPTY.value, status)
        finite = points.detach().flatten(1).isfinite().all(1) & ~ended.residual.isnan()
        status = torch.where(finite, status, Status.NONFINITE.value)
        status = torch.where(frame.broken, Status.NONFINITE_INPUT.value, status).to(torch.int8)
        residual = torch.where(frame.broken, torch.nan, ended.residual)
    kept = (ended.points.detach(), ended.potential, ended.self_potential, order)
    made = (inside.clouds.nodes, inside.clouds.masses, inside.epsilon, frame.cost_unit, frame.solvable)
    return Solution(points, residual, ended.steps, status, (*kept, *(value.detach() for value in made)))


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
    points, potential, _, order, nodes, masses, epsilon, cost_unit, solvable = solution.state
    clouds = Clouds.from_ptr(nodes[:, : points.shape[-1]], masses, problem.ptr)
    weighing = problem.geometry.feature_weights is not None and problem.options.update_step is None
    geometry = Geometry(SquaredEuclidean()) if weighing else problem.geometry
    debias = problem.options.debias
    return Solved(
        clouds, order, geometry, problem.point_masses, epsilon, debias, cost_unit, solvable, points, potential
    )


def adjoint(problem: Problem, solution: Solution, cotangent: Tensor, wanted: set[str]) -> Gradients:
    """Gradients of ``<cotangent, points>``: implicit in the frames, by autograd through the frames."""
    names = sorted(wanted)
    with _one_thread(problem.nodes.device):
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_(name in wanted) for name, value in problem.tensors().items()}
            inside, frame, _ = framed(problem.having(leaves))
            points = solution.state[0].detach().requires_grad_()
            outside = frame.outside(points).to(problem.nodes.dtype)
            fixed = inside.start  # along flat directions the points are where they began, or, if that is absolute, ...
            if not problem.relative:  # ... nothing that happens to the frame moves them
                fixed = (frame.outside(points.detach()).detach() - frame.mean.unsqueeze(1)) / frame.scale.unsqueeze(1)
        seed = torch.autograd.grad(outside, points, cotangent, retain_graph=True)[0].nan_to_num(0.0)
        width = inside.start.shape[-1]
        chosen = frame.solvable.nonzero().squeeze(-1)
        part, count = inside.detached().select(chosen), problem.num_graphs
        ended = Flowed(*(value[chosen] for value in flowed(solution, inside)))
        # What is wanted outside depends on these inside: a relative epsilon, for one, on the nodes.
        inner = {"nodes": inside.clouds.nodes, "masses": inside.clouds.masses, "epsilon": inside.epsilon}
        inner |= {"point_masses": inside.point_masses, **inside.geometry.tensors}
        needed = {name for name, value in inner.items() if value.requires_grad}
        parameters = [name for name in inside.geometry.tensors if name in needed]
        ridge, unit, weights = RIDGE if problem.options.ridge is None else problem.options.ridge, None, None
        if not problem.relative and problem.options.ridge is not None:
            unit, weights = frame.curvature_unit[chosen], problem.geometry.feature_weights
            weights = None if weights is None else _widened(weights, width, 1.0)
        found = adjoint_framed(part, ended, _widened(seed, width)[chosen], ridge, needed, unit, weights)
        own = frame.solvable[inside.clouds.batch]
        pairs = [
            (outside, cotangent),
            (inside.clouds.nodes, torch.zeros_like(inside.clouds.nodes).masked_scatter(own[:, None], found.nodes)),
            (inside.clouds.masses, torch.zeros_like(inside.clouds.masses).masked_scatter(own, found.masses)),
            (inside.epsilon, _rows(found.epsilon, chosen, count)),
            (inside.point_masses, found.point_masses),
            (fixed, _rows(found.start[..., : fixed.shape[-1]], chosen, count)),
            *((inside.geometry.tensors[name], found.parameters[name]) for name in parameters),
        ]
        pairs = [(value, gradient) for value, gradient in pairs if value.requires_grad]
        gradients = torch.autograd.grad(
            [value for value, _ in pairs], [leaves[name] for name in names], [gradient for _, gradient in pairs],
            allow_unused=True,
        )  # fmt: skip
    by_name = {
        name: torch.zeros_like(leaves[name]) if gradient is None else gradient
        for name, gradient in zip(names, gradients, strict=True)
    }
    return Gradients(by_name, _rows(found.residual, chosen, count), _rows(found.damped, chosen, count))


def flowed(solution: Solution, inside: Framed) -> Flowed:
    """A solution as the end of the flow of a framed problem."""
    points, potential, self_potential = solution.state[:3]
    width, none = inside.start.shape[-1], solution.residual
    return Flowed(_widened(points, width), potential, self_potential, none, solution.steps, none.bool())


def _rows(value: Tensor, chosen: Tensor, count: int) -> Tensor:
    """Rows of some graphs among all graphs, with zeros for the others."""
    return value.new_zeros(count, *value.shape[1:]).index_copy(0, chosen, value)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """What matrix libraries round depends on the number of their threads; with one it cannot."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
