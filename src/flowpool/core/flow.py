r"""The Wasserstein gradient flow from X^(0) to X* (sections 5 and 6 of the paper, eq. 13), for a batch of clouds.

In the metric of the masses the flow is :math:`\dot x_i = -\nabla_{x_i} S_\varepsilon / (2 a_i)`; for the squared
Euclidean cost this is the difference of two barycentric maps, and a step of length one jumps to it. Which step comes next is
said by :mod:`flowpool.core.law`. :func:`path` is the flow of one cloud, in numbers on the host and free of units: it asks where
it wants to know the gradient, is told, and goes on. :func:`follow` answers all clouds at once, so that a device is waited for
once in a step, whatever the number of clouds. :func:`descend` is Algorithm 1 of the paper as it stands, with a fixed step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowpool.core import law, sinkhorn
from flowpool.core.constants import FIRST_INNER, FLAT, MAX_ITERATIONS, MOST_DENSE, NEARLY, ROUGH, SINGULAR, TIGHTEST
from flowpool.core.divergence import Energy, Evaluation, Scales, signed
from flowpool.core.hessian import differentiable_gradient
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
from flowpool.core.sinkhorn import AT_ONCE
from flowpool.core.systems import Solve, Spectrum, conjugate_gradients, newton_step, spectra
from flowpool.core.updates import UpdateStep, checked

Array = Any  # of numbers on the host


class Flowed(NamedTuple):
    """End of the flow for a batch of clouds.

    Attributes:
        points: X*, ``(B, M, D)``.
        potential: of both transports, ``(B, K, M)``, in units of epsilon; a start for whoever needs the plans again.
        residual: length of the Newton step left at X*, in units of R, ``(B,)``.
        steps: ``(B,)`` int64.
        singular: it has ended, and the Hessian at X* has flat directions: the minimiser is not isolated, ``(B,)`` bool.
    """

    points: Tensor
    potential: Tensor
    residual: Tensor
    steps: Tensor
    singular: Tensor


class Ask(NamedTuple):
    """Where a cloud wants to know the gradient."""

    points: Array  # (M, D), about the mean of the nodes, in units of R
    hessian: bool = False  # and the spectrum of the Hessian
    arrived: bool = True  # the last point asked about is where the cloud is now


class Seen(NamedTuple):
    """What a cloud is told."""

    points: Array  # (M, D)
    gradient: Array  # (M, D), in units of the pull
    error: float
    spectrum: Spectrum | None


class State(SimpleNamespace):
    """The fields of :data:`flowpool.core.law.STATE`."""


def path(
    here: Seen, shares: Array, tolerance: float, max_steps: int, step_size: float | None, dense: bool
) -> Generator[Ask | Solve, Any, tuple[Array, State]]:
    """The flow of one cloud, as a conversation; returns X* and the state of the law.

    Args:
        here: X^(0).
        shares: a, ``(M,)``.
        tolerance: on the Newton step.
        max_steps: of all kinds together.
        step_size: fixed length of the explicit steps; ``None`` chooses them by their error.
        dense: the spectrum of the Hessian is had for the asking; else systems with it are solved for one right-hand side.
    """
    state, weight = State(), 2 * shares[:, None]
    equal, least = bool((shares == shares[0]).all()), 0.1 * math.sqrt(len(shares))
    there = here
    aim = turn = velocity = first = second = newton = np.zeros_like(here.points)
    request = law.begin(state, step_size or 0.0)

    def seen(points: Array, hessian: bool = False) -> Generator[Ask, Seen, Seen]:
        """What is known at some points, asked again until the transports are as exact as the law wants them."""
        found, before = (yield Ask(points, hessian and dense, here is there)), math.inf
        for _ in range(MAX_ITERATIONS // AT_ONCE):
            if not found.error > state.inner or NEARLY > found.error > 0.5 * before:
                break
            before = found.error
            found = yield Ask(points, hessian and dense)
        return found

    def solved(
        right: Array, shift: float, filtered: bool = False, precision: float = ROUGH
    ) -> Generator[Solve, Any, tuple[Array, float]]:
        """Solution of ``H + shift`` or, filtered, of H, and the smallest curvature of H that was met."""
        if here.spectrum is None:
            answer: tuple[Array, float] = yield Solve(here.points, right, shift, precision, here is there)
            return answer
        return here.spectrum.solve(right, shift, filtered), here.spectrum.flattest

    while request != DONE:
        if request in (START, EXPLICIT, TIGHTEN):
            if request == EXPLICIT:
                there = yield from seen(here.points + state.stride * velocity + state.bend * turn)
            elif request == TIGHTEN:
                there = yield from seen(here.points, hessian=True)
            here = there
            state.size, state.error = _norm(here.gradient), here.error
            state.extent = max(_norm(here.points), least)
            if request != TIGHTEN:
                velocity = -here.gradient / weight
                aim, turn = velocity + here.points, velocity + here.points - aim
                state.speed, state.swerve = _norm(velocity), _norm(turn)
        elif request == HESSIAN:
            if dense and here.spectrum is None:
                here = there = yield from seen(here.points, hessian=True)
        elif request == IMPLICIT:
            first, flattest = yield from solved(-state.shift * here.gradient, state.shift)
            state.length, state.along = _norm(first), _inner(first, here.gradient)
            state.definite = flattest + state.shift > 0 and state.length < math.inf
        elif request == NEWTON:
            newton, state.flattest = yield from solved(here.gradient, FLAT, True, state.precision)
            state.length, state.gain = _norm(newton), _inner(newton, here.gradient) / 2
            state.definite = state.flattest + FLAT > 0
        elif request == LOOK:
            pass  # the spectrum has shown it
        elif request == TRY:
            there = yield from seen(here.points - newton, hessian=True)
            state.reached, state.error = _norm(there.gradient), there.error
        elif request == MEASURE_LEFT:
            left, _ = yield from solved(there.gradient, FLAT, filtered=True)
            state.length, state.gain = _norm(left), _inner(left, there.gradient) / 2
        elif request == STAGE:
            there = yield from seen(here.points + state.step * first)
            right = here.gradient + there.gradient + 2 * weight * first  # k1 + k2 is small, and is found instead of k2
            second, _ = yield from solved(-state.shift * right, state.shift)
            state.length = _norm(second)
        elif request == FINISH:
            move = first + second / 2
            there = yield from seen(here.points + state.step * move, hessian=True)
            state.ahead, state.behind = _inner(there.gradient, move), _inner(here.gradient, move)
            state.reached, state.error = _norm(there.gradient), there.error
        elif request == DISTANCE:
            away, flattest = yield from solved(here.gradient, state.shift)
            state.length = _norm(away)
            state.definite = flattest + state.shift > 0 and state.length < math.inf
        request = law.advance(state, len(shares), equal, tolerance, max_steps)
        if state.arrived:
            here = there
    return here.points, state


def _norm(value: Array) -> float:
    return float(np.sqrt((value * value).sum()))


def _inner(one: Array, other: Array) -> float:
    return float((one * other).sum())


def follow(energy: Energy, start: Tensor, tolerance: float, max_steps: int, step_size: float | None = None) -> Flowed:
    """The stationary points that the flow from ``start`` leads to.

    Args:
        energy: B clouds.
        start: X^(0), ``(B, M, D)``.
        tolerance: on the Newton step, in units of R.
        max_steps: of all kinds together.
        step_size: fixed length of the explicit steps; ``None`` chooses them by their error.
    """
    with torch.no_grad(), np.errstate(all="ignore"):
        batch, first = _Batch.begin(energy, start)
        dense = start[0].numel() <= MOST_DENSE
        flows = [
            path(first[cloud], roots**2 / 2, tolerance, max_steps, step_size, dense)
            for cloud, roots in enumerate(batch.roots)
        ]
        asked = {cloud: next(flow) for cloud, flow in enumerate(flows)}
        potential, ends = batch.potential, {}
        while asked:
            if 2 * len(asked) <= len(batch.clouds):
                potential = potential.index_copy(0, _sent(batch.clouds, start), batch.potential)
                batch = batch.select(asked)
            solves = {cloud: one for cloud, one in asked.items() if isinstance(one, Solve)}
            for cloud, answer in (batch.solve(solves) if solves else batch.evaluate(asked)).items():
                try:
                    asked[cloud] = flows[cloud].send(answer)
                except StopIteration as end:
                    ends[cloud] = end.value
                    del asked[cloud]
        potential = potential.index_copy(0, _sent(batch.clouds, start), batch.potential)
        points, states = zip(*(ends[cloud] for cloud in range(len(flows))), strict=True)
        return Flowed(
            energy.scales.outside(_sent(np.stack(points), start)),
            potential,
            _sent([state.residual for state in states], start),
            torch.tensor([state.steps for state in states], device=start.device),
            torch.tensor([state.singular for state in states], device=start.device),
        )


@dataclass
class _Batch:
    """Some clouds on a device, all of which are evaluated at once."""

    clouds: list[int]  # which they are
    energy: Energy
    scales: Scales
    here: Tensor  # g at the points where the clouds are, (B, W), in units of epsilon
    there: Tensor  # and at those asked about last
    potential: Tensor  # f there, (B, K, M)
    points: Array  # and these points, (B, M, D)
    roots: Array  # of 2 a, (B, M)
    masses: tuple[Tensor, Tensor]  # of rows and columns, (K, B, M) and (K, B, W)

    @staticmethod
    def begin(energy: Energy, start: Tensor) -> tuple[_Batch, dict[int, Seen]]:
        """At X^(0)."""
        first, scales = energy.evaluate(start, None, FIRST_INNER), energy.scales
        dual, potential = _dual(energy, first), first.transport.potential.transpose(0, 1)
        inside = ((start - scales.centre) / scales.radius[:, None, None]).cpu().numpy()
        roots = np.sqrt(2 * np.array(energy.point_masses.tolist()))
        masses = energy.problems(first.cost)[1:3]
        batch = _Batch(list(range(len(start))), energy, scales, dual, dual, potential, inside, roots, masses)
        return batch, batch._seen(first, batch.clouds, [])

    def select(self, wanted: Collection[int]) -> _Batch:
        """Some of the clouds."""
        places = [place for place, cloud in enumerate(self.clouds) if cloud in wanted]
        index = _sent(places, self.here)
        clouds, scales = [self.clouds[place] for place in places], Scales(*(x[index] for x in self.scales))
        here, there, potential = self.here[index], self.there[index], self.potential[index]
        energy, points, roots = self.energy.select(index), self.points[places], self.roots[places]
        masses = self.masses[0][:, index], self.masses[1][:, index]
        return _Batch(clouds, energy, scales, here, there, potential, points, roots, masses)

    def evaluate(self, asked: dict[int, Any]) -> dict[int, Seen]:
        """What the clouds want to know; those that have ended are evaluated again where they were."""
        arrived = np.ones((len(self.clouds), 1))
        for place, cloud in enumerate(self.clouds):
            if cloud in asked:
                self.points[place], arrived[place] = asked[cloud].points, asked[cloud].arrived
        sent = _sent(np.concatenate([self.points.reshape(len(arrived), -1), arrived], 1), self.here)
        self.here = torch.where(sent[:, -1:] > 0, self.there, self.here)
        points = self.scales.outside(sent[:, :-1].view(self.points.shape))
        found = _transported(self.energy, points, self.here, *self.masses)
        self.there, self.potential = _dual(self.energy, found), found.transport.potential.transpose(0, 1)
        return self._seen(found, list(asked), [cloud for cloud, one in asked.items() if one.hessian])

    def _seen(self, found: Evaluation, asked: Iterable[int], curved: list[int]) -> dict[int, Seen]:
        """What is found, as numbers by cloud, with the spectra of some of them; the host waits for the device once."""
        places = [self.clouds.index(cloud) for cloud in curved]
        parts = [found.gradient / self.scales.pull[:, None, None], found.error]
        if curved:
            energy, stiffness = self.energy, self.scales.stiffness
            if len(curved) < len(self.clouds):
                index = _sent(places, self.here)
                energy, found, stiffness = energy.select(index), found.select(index), stiffness[index]
            parts += spectra(energy, found, stiffness)
        numbers = torch.cat([part.flatten() for part in parts]).cpu().numpy()
        cuts = np.cumsum([part.numel() for part in parts])[:-1]
        gradient, error, *known = (
            x.reshape(part.shape) for x, part in zip(np.split(numbers, cuts), parts, strict=True)
        )
        roots = np.repeat(self.roots, self.points.shape[-1], -1)  # (B, n)
        spectrum = {
            cloud: Spectrum(values, vectors / roots[place][:, None])
            for cloud, place, values, vectors in zip(curved, places, *known, strict=True)
        }
        at = {cloud: place for place, cloud in enumerate(self.clouds)}
        return {
            cloud: Seen(
                self.points[at[cloud]].copy(), gradient[at[cloud]], float(error[at[cloud]]), spectrum.get(cloud)
            )
            for cloud in asked
        }

    def solve(self, asked: dict[int, Solve]) -> dict[int, tuple[Array, float]]:
        """Solutions of linear systems with Hessians that are never formed."""
        places, systems = [self.clouds.index(cloud) for cloud in asked], list(asked.values())
        index = _sent(places, self.here)
        energy, scales = self.energy.select(index), Scales(*(x[index] for x in self.scales))
        points, right = (
            _sent(np.stack(values), self.here) for values in ([s.points for s in systems], [s.right for s in systems])
        )
        shift, precision, arrived = _sent([[s.shift, s.precision, s.arrived] for s in systems], self.here).double().T
        dual = torch.where(arrived.unsqueeze(-1) > 0, self.there[index], self.here[index])
        found = _transported(energy, scales.outside(points), dual, *(x[:, index] for x in self.masses))
        gradient, variable = differentiable_gradient(energy, found)

        def product(direction: Tensor) -> Tensor:
            return torch.autograd.grad(gradient, variable, direction, retain_graph=True)[0]

        unit = scales.pull[:, None, None]
        moves, flattest = conjugate_gradients(product, unit * right, scales.stiffness, shift, precision)
        rows = torch.cat([(moves / scales.radius[:, None, None]).flatten(1), flattest[:, None]], 1).cpu().numpy()
        return {
            cloud: (row[:-1].reshape(points.shape[1:]), float(row[-1])) for cloud, row in zip(asked, rows, strict=True)
        }


def _transported(energy: Energy, points: Tensor, dual: Tensor, shares: Tensor, columns: Tensor) -> Evaluation:
    """A few Newton iterations on the transports at some points, from g at points nearby."""
    cost, pulled = energy.geometry.opened(points, energy.columns(points), energy.own)
    scaled = cost / energy.epsilon[:, None, None]
    found = sinkhorn.newton(scaled, shares, columns, sinkhorn.opposite(dual, scaled, shares, columns))
    return Evaluation(points, pulled(signed(found.plan)), cost, found)


def _dual(energy: Energy, found: Evaluation) -> Tensor:
    """g of the nodes and of the points themselves, ``(B, W)``, in units of epsilon."""
    dual = sinkhorn.soft_minimum(found.transport.potential, found.cost / energy.epsilon[:, None, None])
    nodes = energy.nodes.shape[1]
    return torch.cat([dual[0, :, :nodes], dual[-1, :, nodes:]], -1)


def _sent(values: Any, like: Tensor) -> Tensor:
    """Numbers that the host knows, on a device, without waiting for what that is doing."""
    array = np.asarray(values)
    given = torch.from_numpy(array if array.dtype == np.int64 else array.astype(np.float64))
    given = given.pin_memory() if like.device.type == "cuda" else given
    return given.to(like.device, torch.long if array.dtype == np.int64 else like.dtype, non_blocking=True)


@torch.no_grad()
def distance(energy: Energy, here: Evaluation) -> tuple[Tensor, Tensor]:
    """How far some points are from stationary, and whether there are flat directions, both ``(B,)``.

    The first is the length of the filtered Newton step in units of R, and infinite where H is not definite.
    """
    length, flattest = newton_step(energy, here)
    return torch.where(flattest > -FLAT, length, torch.inf), flattest <= SINGULAR


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
    points, potential = start, None
    steps = torch.zeros_like(energy.epsilon, dtype=torch.long)
    slow = tolerance * energy.scales.radius  # (B,), a velocity at which it is worth while to look at the Newton step
    going = torch.ones_like(steps, dtype=torch.bool)
    for _ in range(max_steps):
        here = energy.evaluate(points.detach(), potential, TIGHTEST)
        potential = here.transport.potential
        speed = torch.linalg.vector_norm(here.gradient / slowness, dim=(-1, -2))
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
