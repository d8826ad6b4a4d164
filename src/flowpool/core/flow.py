r"""The Wasserstein gradient flow from X^(0) to X* (sections 5 and 6 of the paper, eq. 13), for a batch of clouds.

In the metric of the masses the flow is :math:`\dot x_i = -\nabla_{x_i} S_\varepsilon / (2 a_i)`; for the squared
Euclidean cost this is the difference of two barycentric maps, and a step of length one jumps to it. Which step comes next is
said by :mod:`flowpool.core.law`, cloud by cloud; :func:`follow` does what it asks for, for all clouds that are asked for the
same at once. :func:`descend` is Algorithm 1 of the paper as it stands, with a fixed step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from flowpool.core import law
from flowpool.core.constants import FLAT, ROUGH, SINGULAR, TIGHTEST
from flowpool.core.divergence import Drift, Energy, Evaluation
from flowpool.core.hessian import Curvature, curvature, hessian_product
from flowpool.core.law import (
    DISTANCE,
    DONE,
    EXPLICIT,
    FINISH,
    HESSIAN,
    IMPLICIT,
    LOOK,
    MEASURE_LEFT,
    NEWTON,
    STAGE,
    START,
    TIGHTEN,
    TRY,
)
from flowpool.core.records import Record, blank, mix, put, sent, take
from flowpool.core.systems import System, shifted_model
from flowpool.core.updates import UpdateStep, checked


class Flowed(NamedTuple):
    """End of the flow for a batch of clouds.

    Attributes:
        points: X*, ``(B, M, D)``.
        potential: f of the transport to the nodes, ``(B, M)``; a warm start for whoever needs the plan again.
        self_potential: h of the transport of X* to itself, ``(B, M)``; zeros when the energy is not debiased.
        residual: length of the Newton step left at X*, in units of R, ``(B,)``.
        steps: ``(B,)`` int64.
        singular: it has ended, and the Hessian at X* has flat directions: the minimiser is not isolated, ``(B,)`` bool.
    """

    points: Tensor
    potential: Tensor
    self_potential: Tensor
    residual: Tensor
    steps: Tensor
    singular: Tensor


class _State(SimpleNamespace):
    """The fields of :data:`flowpool.core.law.STATE`."""


# What is asked of a cloud is an evaluation of the gradient at X', or a linear system with the Hessian; a STAGE is both.
_EVALUATE = (EXPLICIT, TIGHTEN, TRY, STAGE, FINISH)
_SOLVE = (IMPLICIT, NEWTON, MEASURE_LEFT, DISTANCE)
_MEASURED = {
    START: ("size", "error", "extent", "speed", "swerve"),
    EXPLICIT: ("size", "error", "extent", "speed", "swerve"),
    TIGHTEN: ("size", "error", "extent"),
    TRY: ("reached", "error"),
    STAGE: (),
    FINISH: ("reached", "error", "ahead", "behind"),
}


def follow(energy: Energy, start: Tensor, tolerance: float, max_steps: int, step_size: float | None = None) -> Flowed:
    """The stationary points that the flow from ``start`` leads to.

    The clouds go side by side: all that want an evaluation get it at once, then all that want a linear system. The others
    are computed along for nothing, which is cheaper than to pick and choose, until a quarter of them have ended.

    Args:
        energy: B clouds.
        start: X^(0), ``(B, M, D)``.
        tolerance: on the Newton step, in units of R.
        max_steps: of all kinds together.
        step_size: fixed length of the explicit steps; ``None`` chooses them by their error.
    """
    states = [_State() for _ in range(len(start))]
    requests = {cloud: law.begin(state, step_size or 0.0) for cloud, state in enumerate(states)}
    equal = (energy.point_masses == energy.point_masses[:, :1]).all(-1).tolist()
    way = _Way.begin(energy, start, states)
    ends = way.ends

    def advance(clouds: Iterable[int]) -> None:
        """Asks the law what is next, and makes X' the new X of the clouds that have arrived."""
        arrived = set()
        for cloud in clouds:
            state, going = states[cloud], requests[cloud] in (EXPLICIT, TIGHTEN)
            while (request := law.advance(state, start.shape[1], equal[cloud], tolerance, max_steps)) in (
                HESSIAN,
                LOOK,
            ):
                going = going or state.arrived
                if request == LOOK:  # whereas HESSIAN is done when a system is to be solved
                    state.flattest = min(state.flattest, way.flattest(cloud))
            requests[cloud] = request
            if going or state.arrived:
                arrived.add(cloud)
        way.arrive(arrived)

    advance(list(requests))
    while active := {cloud: request for cloud, request in requests.items() if request != DONE}:
        if 4 * len(active) <= 3 * len(way.clouds) and len(way.clouds) > 2:
            ends = put(ends, way.index, way.ends)
            way = way.select(active)
        moving = {cloud: request for cloud, request in active.items() if request in _EVALUATE}
        staged = {cloud: request for cloud, request in moving.items() if request == STAGE}
        if moving:
            way.evaluate(moving)
            advance(moving.keys() - staged.keys())
        solving = {cloud: requests[cloud] for cloud in active if requests[cloud] in _SOLVE} | staged
        if solving:
            way.solve(solving)
            advance(solving)
    residual = sent([state.residual for state in states], start.device, start.dtype)
    steps = sent([state.steps for state in states], start.device)
    singular = sent([state.singular for state in states], start.device)
    return Flowed(*put(ends, way.index, way.ends), residual, steps, singular)


@dataclass
class _Way:
    """Some clouds on their way. ``here`` and ``there`` are X and X' of the law, and X' lasts until the next evaluation."""

    clouds: list[int]  # which they are
    states: list[_State]  # of all
    energy: Energy
    here: Evaluation
    there: Evaluation
    drift: Drift
    first: Tensor  # v while the points race in, then k1
    second: Tensor  # n - n_before, then k12
    newton: Tensor  # w
    before: Tensor  # n
    system: System | None = None  # with the Hessian at X
    part: _Way | None = None  # the clouds that a system was last solved for, if these are not all
    looked: dict[int, float] = field(default_factory=dict)  # the smallest curvature that shows in the Hessian

    @staticmethod
    def begin(energy: Energy, start: Tensor, states: list[_State]) -> _Way:
        """At X^(0), which is measured."""
        here, clouds, zero = energy.evaluate(start), list(range(len(start))), torch.zeros_like(start)
        drift = blank(energy.drift(here, here), len(start))
        way = _Way(clouds, states, energy, here, here, drift, zero, zero, zero, zero)
        way._measure(dict.fromkeys(clouds, START))
        return way

    @property
    def index(self) -> Tensor:
        return sent(self.clouds, self.first.device)

    @property
    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """X and both potentials."""
        return self.here.points, self.here.xy.potential, self.here.self_potential

    def select(self, wanted: Collection[int]) -> _Way:
        """Some of the clouds, and never one without another: a batch of one may be rounded differently."""
        idle = [cloud for cloud in self.clouds if cloud not in wanted][: max(0, 2 - len(wanted))]
        clouds = [cloud for cloud in self.clouds if cloud in wanted or cloud in idle]
        index = sent([self.clouds.index(cloud) for cloud in clouds], self.first.device)
        state = (self.here, self.there, self.drift, self.first, self.second, self.newton, self.before)
        here, there, drift, first, second, newton, before = take(state, index)
        energy = self.energy.select(index)
        return _Way(clouds, self.states, energy, here, there, drift, first, second, newton, before)

    def arrive(self, clouds: Collection[int]) -> None:
        """Makes X' the new X of some clouds."""
        if clouds:
            self.here, self.system = self._where(clouds, self.there, self.here), None

    def _where(self, clouds: Collection[int], new: Record, old: Record) -> Record:
        chosen = [cloud in clouds for cloud in self.clouds]
        return new if all(chosen) else mix(sent(chosen, self.first.device), new, old)

    def _columns(self, rows: Iterable[tuple[float, ...]]) -> tuple[Tensor, ...]:
        """The numbers of each cloud, one tensor ``(B, 1, 1)`` for each of them."""
        columns = [list(column) for column in zip(*rows, strict=True)]
        return sent(columns, self.first.device, self.first.dtype).view(len(columns), -1, 1, 1).unbind()

    def _read(self, columns: dict[str, Tensor]) -> dict[int, dict[str, float]]:
        """Numbers ``(B,)`` by cloud and name; the host waits for the device once."""
        rows = torch.stack([column.to(self.first.dtype) for column in columns.values()], -1).tolist()
        return {cloud: dict(zip(columns, row, strict=True)) for cloud, row in zip(self.clouds, rows, strict=True)}

    def evaluate(self, asked: dict[int, int]) -> None:
        """Evaluates the gradient at X', which is X for clouds that are not asked."""
        first, second, newton, inner = self._columns(
            _move(asked.get(cloud, DONE), self.states[cloud]) for cloud in self.clouds
        )
        target = torch.addcmul(self.here.points, first, self.first)
        target = torch.addcmul(torch.addcmul(target, second, self.second), newton, self.newton)
        self.there = self.energy.evaluate(target, self.here, inner, self.drift)
        self._measure(asked)
        gone = {cloud for cloud, request in asked.items() if request != TIGHTEN}
        if gone:
            self.drift = self._where(gone, self.energy.drift(self.here, self.there), self.drift)

    def _measure(self, asked: dict[int, int]) -> None:
        """Writes on the states what is found at X'."""
        points, gradient, scales = self.there.points, self.there.gradient, self.energy.scales
        extent = (_norm(points - scales.centre) / scales.radius).clamp_min(0.1 * math.sqrt(points.shape[1]))
        columns = {"size": _norm(gradient) / scales.pull, "error": self.there.error, "extent": extent}
        racing = {cloud for cloud, request in asked.items() if request in (START, EXPLICIT)}
        if racing:
            velocity = -gradient / scales.stiffness.unsqueeze(-1)
            ahead = velocity + points
            swerve = ahead - self.before
            columns |= {"speed": _norm(velocity) / scales.radius, "swerve": _norm(swerve) / scales.radius}
        if FINISH in asked.values():
            step = self.first.add(self.second, alpha=0.5)
            columns |= {"ahead": _inner(gradient, step), "behind": _inner(self.here.gradient, step)}
        numbers = self._read(columns)
        for cloud, request in asked.items():
            found = numbers[cloud] | {"reached": numbers[cloud]["size"]}
            vars(self.states[cloud]).update({name: found[name] for name in _MEASURED[request]})
        if racing:
            raced = self._where(racing, (velocity, swerve, ahead), (self.first, self.second, self.before))
            self.first, self.second, self.before = raced

    def solve(self, asked: dict[int, int]) -> None:
        """Solves linear systems with the Hessian at X, and writes on the states what the solutions are like."""
        self.part = None
        if 4 * len(asked) <= 3 * len(self.clouds) and len(self.clouds) > 2:
            self.part = part = self.select(asked)
            part.solve(asked)
            vectors, solved = (self.first, self.second, self.newton), (part.first, part.second, part.newton)
            places = sent([self.clouds.index(cloud) for cloud in part.clouds], self.first.device)
            self.first, self.second, self.newton = put(vectors, places, solved)
            return
        if self.system is None:
            self.system = System(curvature(self.energy, self.here), hessian_product(self.energy, self.here))
            self.looked.clear()
        known, scales = self.system.curvature, self.energy.scales
        kinds = [asked.get(cloud, DONE) for cloud in self.clouds]
        own, other, along, shift, precision, longest = self._columns(map(_equation, kinds, self._clocks()))
        groups = ((STAGE, MEASURE_LEFT), (IMPLICIT, STAGE), (NEWTON, MEASURE_LEFT))
        elsewhere, roughly, newton = sent(
            [[kind in group for kind in kinds] for group in groups], shift.device
        ).unbind()
        there = torch.where(elsewhere[:, None, None], self.there.gradient, 0.0)  # it may have failed for the others
        right = torch.addcmul(own * self.here.gradient, other, there)
        right = torch.addcmul(right, along, scales.stiffness.unsqueeze(-1) * self.first)
        trusted = known.exact | (roughly & known.spanned)
        filtered = newton if NEWTON in kinds or MEASURE_LEFT in kinds else None
        limits = (precision.view(-1), longest.view(-1) * scales.radius, self._guess(kinds))
        for iterate in (False, True):  # mostly the model of the Hessian will do
            found = self.system.solve(right, shift.view(-1), trusted, filtered, iterate, *limits)
            slope = _inner(found.solution, right) / (scales.pull * scales.radius)
            columns = {"length": _norm(found.solution) / scales.radius, "slope": slope, "flattest": found.flattest}
            numbers = self._read(columns | {"trusted": trusted})
            if all(numbers[cloud]["trusted"] for cloud in asked):
                break
        for cloud, request in asked.items():
            self._conclude(cloud, request, numbers[cloud])
        solution = found.solution.nan_to_num(0.0, 0.0, 0.0)
        for name, kinds_of in (("first", (IMPLICIT,)), ("second", (STAGE,)), ("newton", (NEWTON, MEASURE_LEFT))):
            own_clouds = {cloud for cloud, request in asked.items() if request in kinds_of}
            if own_clouds:
                setattr(self, name, self._where(own_clouds, solution, getattr(self, name)))

    def _conclude(self, cloud: int, request: int, numbers: dict[str, float]) -> None:
        """Writes on a state what the solution of a linear system is like."""
        state = self.states[cloud]
        state.length = numbers["length"]
        if request == IMPLICIT:
            state.along = -numbers["slope"] / state.shift
        if request in (IMPLICIT, DISTANCE):
            state.definite = numbers["flattest"] > 0 and numbers["length"] < math.inf
        if request in (NEWTON, MEASURE_LEFT):
            state.gain = numbers["slope"] / 2
        if request == NEWTON:
            state.flattest, state.definite = numbers["flattest"] - FLAT, numbers["flattest"] > 0

    def flattest(self, cloud: int) -> float:
        """The smallest curvature that shows in the Hessian with which a system was last solved."""
        part = self.part or self
        assert part.system is not None  # noqa: S101 - a Newton step comes before
        if not part.looked:
            part.looked.update(zip(part.clouds, _flattest(part.system.curvature).tolist(), strict=True))
        return part.looked[cloud]

    def _clocks(self) -> list[_State]:
        return [self.states[cloud] for cloud in self.clouds]

    def _guess(self, kinds: list[int]) -> Tensor | None:
        guessed = [kind == NEWTON and state.guessed for kind, state in zip(kinds, self._clocks(), strict=True)]
        if not any(guessed):
            return None
        return torch.where(sent(guessed, self.first.device)[:, None, None], self.newton, 0.0)


def _move(request: int, state: _State) -> tuple[float, float, float, float]:
    """X' - X along ``first``, ``second`` and ``newton``, and the marginal error that is asked for there."""
    if request == EXPLICIT:
        return state.stride, state.bend, 0.0, state.inner
    if request == TRY:
        return 0.0, 0.0, -state.stretch, state.inner
    if request == STAGE:
        return state.step, 0.0, 0.0, state.inner
    if request == FINISH:
        return state.step, 0.5 * state.step, 0.0, state.inner
    return 0.0, 0.0, 0.0, state.inner if request == TIGHTEN else math.inf


def _equation(request: int, state: _State) -> tuple[float, float, float, float, float, float]:
    """Factors of G(X), G(X') and ``2 a first`` on the right, the shift, and how precise and how long a solution is wanted."""
    if request == IMPLICIT:
        return -state.shift, 0.0, 0.0, state.shift, ROUGH, math.inf
    if request == STAGE:  # k1 + k2 is small, and is found instead of k2
        return -state.shift, -state.shift, -2.0 * state.shift, state.shift, ROUGH, math.inf
    if request == DISTANCE:
        return 1.0, 0.0, 0.0, state.shift, ROUGH, math.inf
    if request == NEWTON:
        return 1.0, 0.0, 0.0, FLAT, state.precision, state.longest
    return 0.0, float(request == MEASURE_LEFT), 0.0, FLAT, ROUGH, math.inf


def _norm(value: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(value, dim=(-1, -2))
    return length


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum((-1, -2))


def _flattest(curvature: Curvature) -> Tensor:
    """The smallest curvature that shows in the model of the Hessian, ``(B,)``, with the shift of Newton steps."""
    return shifted_model(curvature, curvature.unit.new_full(curvature.unit.shape[:1], FLAT)).smallest_curvature()


@torch.no_grad()
def distance(energy: Energy, here: Evaluation) -> tuple[Tensor, Tensor]:
    """How far some points are from stationary, and whether there are flat directions, both ``(B,)``.

    The first is the length of the filtered Newton step in units of R, and infinite where H is not definite.
    """
    system = System(curvature(energy, here), hessian_product(energy, here))
    found = system.newton(here.gradient, 1e-6)
    flattest = torch.minimum(found.flattest, _flattest(system.curvature))
    length = torch.where(flattest > -FLAT, _norm(found.solution) / energy.scales.radius, math.inf)
    return length, flattest <= SINGULAR


def descend(
    energy: Energy,
    start: Tensor,
    step_size: float,
    max_steps: int,
    tolerance: float,
    update_step: UpdateStep | None = None,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 with a fixed step, recorded by autograd: X^(L) and the number of steps of each cloud.

    Args:
        energy: its tensors may require gradients; those flow through every step (section 8.1, eqs. 24 and 25).
        start: X^(0), ``(B, M, D)``.
        step_size: tau.
        max_steps: L.
        tolerance: a cloud whose Newton step is shorter than this, in units of R, has arrived and is left alone.
        update_step: as in the paper, see :mod:`flowpool.core.updates`. Otherwise a step along the velocity
            ``-grad / (2 a)``, in the metric of the masses.
        unit: how much a curvature of one is in the coordinates in which the velocity is meant, ``(B,)``; ``None``: one.
    """
    slowness = 2 * energy.point_masses.unsqueeze(-1)  # (B, M, 1)
    if unit is not None:
        slowness = slowness / unit[:, None, None]
    state = None
    points, here = start, None
    steps = torch.zeros_like(energy.epsilon, dtype=torch.long)
    slow = tolerance * energy.scales.radius  # (B,), a velocity at which it is worth while to look at the Newton step
    going = torch.ones_like(steps, dtype=torch.bool)
    for _ in range(max_steps):
        here = energy.evaluate(points.detach(), here, TIGHTEST)
        speed = _norm(here.gradient / slowness)
        near = going & (speed <= slow)
        if bool(near.any()):
            left, _ = distance(energy, here)
            slow = torch.where(near, 0.9 * speed * tolerance / left, slow)  # velocity and Newton step shrink together
            near = near & (left <= tolerance)
        going = going & ~near & speed.isfinite()
        if not bool(going.any()):
            break
        gradient = energy.gradient(points, here) if torch.is_grad_enabled() else here.gradient
        if update_step is None:
            moved = points - step_size * gradient / slowness
        else:
            moved, state = checked(update_step(points.clone(), gradient, step_size, state), points)
        points = torch.where(going[:, None, None], moved, points)
        steps += going
    return points, steps
