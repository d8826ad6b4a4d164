r"""The Wasserstein gradient flow from X^(0) to X* (sections 5 and 6 of the paper, eq. 13), for a batch of clouds.

In the metric of the masses the flow is :math:`\dot x_i = -\nabla_{x_i} S_\varepsilon / (2 a_i)`; for the squared
Euclidean cost this is the difference of two barycentric maps, and a step of length one jumps to it. Which step comes next is
said by :mod:`flowpool.core.law`, cloud by cloud; :func:`follow` does what it asks for, for all clouds that are asked for the
same at once. :func:`descend` is Algorithm 1 of the paper as it stands, with a fixed step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from flowpool.core import law
from flowpool.core.constants import FLAT, LEAST_SHIFT, ROUGH, SINGULAR, TIGHTEST
from flowpool.core.divergence import Energy, Evaluation, Scales
from flowpool.core.hessian import Curvature, curvature, hessian_product
from flowpool.core.law import (
    CURVE,
    DISTANCE,
    FINISHED,
    LAND,
    LOOK,
    NEWTON,
    RACE,
    REST,
    SLIDE,
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


class _Clock(SimpleNamespace):
    """The fields of :data:`flowpool.core.law.CLOCK`."""


_EVALUATE = (RACE, TIGHTEN, TRY, STAGE, LAND)
# What X' is made of: X, and these vectors with factors that depend on the request and the clock.
_VECTORS = ("velocity", "swerve", "newton", "first", "solution")
_FACTORS: dict[int, Callable[[_Clock], tuple[float, ...]]] = {
    TIGHTEN: lambda clock: (0.0, 0.0, 0.0, 0.0, 0.0),
    RACE: lambda clock: (clock.stride, clock.bend, 0.0, 0.0, 0.0),
    TRY: lambda clock: (0.0, 0.0, -clock.stretch, 0.0, 0.0),
    STAGE: lambda clock: (0.0, 0.0, 0.0, clock.step, 0.0),
    LAND: lambda clock: (0.0, 0.0, 0.0, clock.step, 0.5 * clock.step),
}


def follow(
    energy: Energy,
    start: Tensor,
    tolerance: float,
    max_steps: int,
    step_size: float | None = None,
    keep_pairs: bool = True,
) -> Flowed:
    """The stationary points that the flow from ``start`` leads to.

    Args:
        energy: B clouds.
        start: X^(0), ``(B, M, D)``.
        tolerance: on the Newton step, in units of R.
        max_steps: of all kinds together.
        step_size: fixed length of the explicit steps; ``None`` chooses them by their error.
        keep_pairs: never compute one cloud alone, since a batch of one rounds differently from a batch of more.
    """
    way = _Way(energy, start, keep_pairs)
    clocks = [_Clock() for _ in range(len(start))]
    requests = {cloud: law.begin(clock, step_size or 0.0) for cloud, clock in enumerate(clocks)}
    equal = (energy.point_masses == energy.point_masses[:, :1]).all(-1).tolist()
    while requests:
        now = _most_wanted(requests)
        way.perform(now, clocks)
        for cloud in now:
            requests[cloud] = law.advance(clocks[cloud], start.shape[1], equal[cloud], tolerance, max_steps)
        way.arrive([cloud for cloud in now if clocks[cloud].arrived])
        requests = {cloud: request for cloud, request in requests.items() if request != FINISHED}
    here = way.here
    residual = sent([clock.residual for clock in clocks], start.device, start.dtype)
    steps = sent([clock.steps for clock in clocks], start.device)
    singular = sent([clock.singular for clock in clocks], start.device)
    return Flowed(here.points, here.xy.potential, here.self_potential, residual, steps, singular)


def _most_wanted(requests: dict[int, int]) -> dict[int, int]:
    """The requests that can be done together and that most clouds wait for.

    The others wait until they are more: what is done costs as much for many clouds as for one, and none feels the others.
    """
    kinds: dict[int, dict[int, int]] = {}
    for cloud, request in requests.items():
        kinds.setdefault(TRY if request in _EVALUATE else request, {})[cloud] = request
    return max(kinds.values(), key=len)


class _Way:
    """The vectors of a batch of clouds on their way; ``here`` and ``there`` are X and X' of the law."""

    def __init__(self, energy: Energy, start: Tensor, keep_pairs: bool) -> None:
        self.energy, self.keep_pairs = energy, keep_pairs
        self.unit: Scales = energy.scales
        # What makes 2 / M of the typical curvature of each cloud, (B,): one for the squared Euclidean cost.
        self.per_curvature = 2 / self.unit.stiffness.sum(-1)
        self.here: Evaluation = energy.evaluate(start)
        self.there = self.here
        self.drift = blank(energy.drift(self.here, self.here), len(start))
        self.vectors = {name: torch.zeros_like(start) for name in (*_VECTORS, "before")}
        self.curvature: Curvature | None = None
        self._part: tuple[tuple[int, ...], Tensor, Energy] | None = None
        self._moves = [0] * len(start)  # how often each cloud has moved, or its curvature was looked at
        self._last: tuple[tuple[tuple[int, int], ...], Evaluation, System] | None = None
        self._measured: list[tuple[list[int], dict[str, Tensor]]] = []  # what is still to be written on clocks

    def perform(self, requests: dict[int, int], clocks: list[_Clock]) -> None:
        """Does what the clouds are asked for, and writes what was measured on their clocks."""
        asked: dict[int, list[int]] = {}
        for cloud, request in requests.items():
            asked.setdefault(request, []).append(cloud)
        moving = [cloud for request in _EVALUATE for cloud in asked.get(request, ())]
        if moving:
            self._evaluate(sorted(moving), requests, clocks)
        for request, clouds in asked.items():
            if request == CURVE:
                self._curve(clouds)
            elif request in (START, RACE, TIGHTEN):
                self._measure_here(clouds, request)
            elif request in (SLIDE, STAGE, DISTANCE):
                self._solve_shifted(clouds, clocks, request)
            elif request in (NEWTON, REST):
                self._solve_newton(clouds, clocks, request)
            elif request == LOOK:
                self._look(clouds, clocks)
            if request in (TRY, LAND):
                self._measure_there(clouds)
        self._write(clocks)

    def arrive(self, clouds: list[int]) -> None:
        """Makes X' the new X."""
        if self._is_all(clouds):
            self.here = self.there
        elif clouds:
            arriving = set(clouds)
            chosen = [cloud in arriving for cloud in range(len(self.here.points))]
            self.here = mix(sent(chosen, self.here.points.device), self.there, self.here)
        self._note(clouds)

    def _note(self, clouds: list[int]) -> None:
        for cloud in clouds:
            self._moves[cloud] += 1

    def _is_all(self, clouds: list[int]) -> bool:
        return len(clouds) == len(self.here.points)

    def _index(self, clouds: list[int]) -> Tensor:
        """Where some clouds are; a lone one stands twice if it must not be computed alone."""
        if self._part is not None and self._part[0] == tuple(clouds):
            return self._part[1]
        chosen = clouds * 2 if self.keep_pairs and len(clouds) == 1 else clouds
        return sent(chosen, self.here.points.device)

    def _select(self, clouds: list[int]) -> tuple[Tensor, Energy]:
        """Places and energy of some clouds; the last choice is kept, for it is often the next."""
        key = tuple(clouds)
        if self._part is None or self._part[0] != key:
            index = self._index(clouds)
            self._part = key, index, self.energy if self._is_all(clouds) else self.energy.select(index)
        return self._part[1:]

    def _take(self, record: Record, clouds: list[int], index: Tensor) -> Record:
        return record if self._is_all(clouds) else take(record, index)

    def _put(self, record: Record, clouds: list[int], index: Tensor, entries: Record) -> Record:
        return entries if self._is_all(clouds) else put(record, index, entries)

    def _evaluate(self, clouds: list[int], requests: dict[int, int], clocks: list[_Clock]) -> None:
        index, energy = self._select(clouds)
        order = clouds * 2 if len(index) > len(clouds) else clouds
        here = self._take(self.here, clouds, index)
        racing = [cloud for cloud in clouds if requests[cloud] == RACE]
        if racing:
            places = self._index(racing)
            now = -self.here.gradient[places] / self.unit.stiffness[places].unsqueeze(-1)
            self._set("velocity", racing, places, now)
            self._set("before", racing, places, now + self.here.points[places])
        rows = [(*_FACTORS[requests[cloud]](clocks[cloud]), clocks[cloud].inner) for cloud in order]
        factors = sent(rows, index.device, here.points.dtype)
        landing = [cloud for cloud in clouds if requests[cloud] == LAND]
        target = here.points
        for column, name in enumerate(_VECTORS):
            if any(row[column] for row in rows):
                target = target + factors[:, column, None, None] * self.vectors[name][index]
        if landing:
            places = self._index(landing)
            self._set("first", landing, places, (self.vectors["first"] + self.vectors["solution"] / 2)[places])
        drift = self._take(self.drift, clouds, index)
        found = energy.evaluate(target, here, factors[:, -1], drift)
        self.there = self._put(self.there, clouds, index, found)
        went, shown = [requests[cloud] != TIGHTEN for cloud in order], energy.drift(here, found)
        shown = shown if all(went) else mix(sent(went, index.device), shown, drift)
        self.drift = self._put(self.drift, clouds, index, shown)

    def _measure_here(self, clouds: list[int], request: int) -> None:
        """After an evaluation that moves X for certain. That of X^(0) was made at once for all."""
        self.arrive(clouds)
        index = self._index(clouds)
        points, gradient, radius = self.here.points[index], self.here.gradient[index], self.unit.radius[index]
        least = 0.01 * points.shape[1] * radius.square()
        extent = (points - self.unit.centre[index]).square().sum((-1, -2)).clamp_min(least).sqrt() / radius
        measured = {"size": self._size(gradient, index), "extent": extent, "error": self.here.error[index]}
        if request != TIGHTEN:
            now = -gradient / self.unit.stiffness[index].unsqueeze(-1)
            swerve = now + points - self.vectors["before"][index]
            self._set("swerve", clouds, index, swerve)
            measured |= {"speed": _norm(now) / radius, "swerve": _norm(swerve) / radius}
        self._measured.append((clouds, measured))

    def _measure_there(self, clouds: list[int]) -> None:
        index = self._index(clouds)
        first = self.vectors["first"][index]
        there, here = self.there.gradient[index], self.here.gradient[index]
        ahead, behind = ((gradient * first).sum((-1, -2)) for gradient in (there, here))
        measured = {"reached": self._size(there, index), "ahead": ahead, "behind": behind}
        self._measured.append((clouds, measured | {"error": self.there.error[index]}))

    def _curve(self, clouds: list[int]) -> None:
        if self.curvature is None:
            _, self._part = self.energy.leading, None  # found once for all clouds, and then known of every part
        index, energy = self._select(clouds)
        found = curvature(energy, self._take(self.here, clouds, index))
        whole = blank(found, len(self.here.points)) if self.curvature is None else self.curvature
        self.curvature = self._put(whole, clouds, index, found)
        self._note(clouds)

    def _system(self, clouds: list[int]) -> tuple[Tensor, Evaluation, System]:
        """What linear systems with the Hessian at X need; the last is kept, for the next request is often for the same."""
        index, energy = self._select(clouds)
        key = tuple((cloud, self._moves[cloud]) for cloud in clouds)
        if self._last is None or self._last[0] != key:
            here = self._take(self.here, clouds, index)
            known: Curvature = self._take(self.curvature, clouds, index)  # type: ignore[assignment]
            system = System(known, hessian_product(energy, here))
            self._last = key, here, system
        return index, *self._last[1:]

    def _solve_shifted(self, clouds: list[int], clocks: list[_Clock], request: int) -> None:
        index, here, system = self._system(clouds)
        shift = self._read(clouds, clocks, "shift", index)
        wide, first = shift[:, None, None], self.vectors["first"][index]
        if request == SLIDE:
            right = -wide * here.gradient
        elif request == STAGE:
            # k1 + k2 is small, and is found instead of k2: its system has (G(x) + G(x + step k1)) on the right.
            right = -wide * (here.gradient + self.there.gradient[index])
            right = right - 2 * wide * self.unit.stiffness[index].unsqueeze(-1) * first
        else:
            right = here.gradient
        solution, definite = system.shifted(right, shift, roughly=request != DISTANCE)
        radius = self.unit.radius[index]
        self._set("first" if request == SLIDE else "solution", clouds, index, solution)
        along = self._slope(solution, here.gradient, index)
        self._measured.append((clouds, {"length": _norm(solution) / radius, "along": along, "definite": definite}))

    def _solve_newton(self, clouds: list[int], clocks: list[_Clock], request: int) -> None:
        index, here, system = self._system(clouds)
        radius = self.unit.radius[index]
        if request == NEWTON:
            guessed = [clocks[cloud].guessed for cloud in clouds] * (1 if len(index) == len(clouds) else 2)
            keep = sent(guessed, index.device)[:, None, None]
            guess = torch.where(keep, self.vectors["newton"][index], 0.0) if any(guessed) else None
            precision = self._read(clouds, clocks, "precision", index)
            longest = self._read(clouds, clocks, "longest", index) * radius
            found = system.newton(here.gradient, precision, longest, guess)
        else:
            found = system.newton(self.there.gradient[index], ROUGH, None, None)
        self._set("newton", clouds, index, found.solution)
        gradient = here.gradient if request == NEWTON else self.there.gradient[index]
        gain = self._slope(found.solution, gradient, index) / 2
        measured = {"length": _norm(found.solution) / radius, "gain": gain}
        if request == NEWTON:
            measured |= {"flattest": found.flattest, "definite": found.flattest > -FLAT}
        self._measured.append((clouds, measured))

    def _look(self, clouds: list[int], clocks: list[_Clock]) -> None:
        index = self._index(clouds)
        found = _flattest(self._take(self.curvature, clouds, index))  # type: ignore[arg-type]
        met = self._read(clouds, clocks, "flattest", index)
        self._measured.append((clouds, {"flattest": torch.minimum(found, met)}))

    def _slope(self, direction: Tensor, gradient: Tensor, index: Tensor) -> Tensor:
        inner = (direction * gradient).sum((-1, -2))
        return inner * self.per_curvature[index] / self.unit.radius[index].square()

    def _size(self, gradient: Tensor, index: Tensor) -> Tensor:
        return _norm(gradient) * self.per_curvature[index] / self.unit.radius[index]

    def _set(self, name: str, clouds: list[int], index: Tensor, values: Tensor) -> None:
        self.vectors[name] = self._put(self.vectors[name], clouds, index, values)

    def _read(self, clouds: list[int], clocks: list[_Clock], name: str, index: Tensor) -> Tensor:
        values = [getattr(clocks[cloud], name) for cloud in clouds]
        return sent(values * (len(index) // len(values)), index.device, self.here.points.dtype)

    def _write(self, clocks: list[_Clock]) -> None:
        """Puts what was measured on the clocks; the host waits for the device once."""
        if not self._measured:
            return
        numbers = iter(torch.cat([value for _, measured in self._measured for value in measured.values()]).tolist())
        for clouds, measured in self._measured:
            for name, value in measured.items():
                for cloud, number in zip(clouds, list(islice(numbers, len(value))), strict=False):
                    setattr(clocks[cloud], name, number)
        self._measured.clear()


def _norm(value: Tensor) -> Tensor:
    return value.square().sum((-1, -2)).sqrt()


def _flattest(curvature: Curvature) -> Tensor:
    """The smallest curvature that shows in the model of the Hessian, ``(B,)``; factors with hardly a shift show it best."""
    return shifted_model(curvature, curvature.unit.new_full(curvature.unit.shape[:1], LEAST_SHIFT)).smallest_curvature()


@torch.no_grad()
def distance(energy: Energy, here: Evaluation) -> tuple[Tensor, Tensor]:
    """How far some points are from stationary, and whether there are flat directions, both ``(B,)``.

    The first is the length of the filtered Newton step in units of R, and infinite where H is not definite.
    """
    system = System(curvature(energy, here), hessian_product(energy, here))
    found = system.newton(here.gradient, 1e-6, None, None)
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
