"""The flow of one graph: what the law (:mod:`flowpool.core.law`) asks for, done on its vectors.

A request that needs an evaluation begins with :func:`depart`, which says where to, and ends with :func:`conclude`, which
measures what came of it; in between :func:`flowpool.kernels.divergence.evaluate` takes the gradient at ``there``.
"""

from __future__ import annotations

import math

from flowpool.core import law
from flowpool.core.constants import FLAT, ROUGH
from flowpool.core.law import (
    DISTANCE,
    EXPLICIT,
    FINISH,
    IMPLICIT,
    LOOK,
    MEASURE_LEFT,
    NEWTON,
    STAGE,
    START,
    TIGHTEN,
    TRY,
)
from flowpool.kernels.divergence import carry_potentials, note_drift
from flowpool.kernels.hessian import shifted_factor
from flowpool.kernels.machine.jit import kernel, shared
from flowpool.kernels.machine.lanes import WIDTH, load, multiply, splat, store
from flowpool.kernels.machine.linear import padded
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.machine.vectors import combine, copy, fill, inner_product, norm
from flowpool.kernels.systems import (
    is_exact,
    scale_points,
    smallest_curvature,
    solve_newton,
    solve_shifted,
)

for _part in law.LAW:
    shared(_part)


@shared
def needs_evaluation(request):  # type: ignore[no-untyped-def]
    """Whether the gradient at ``there`` is part of what is asked for."""
    return request <= TIGHTEN or request in (TRY, STAGE, FINISH)


@shared
def has_equal_masses(graph):  # type: ignore[no-untyped-def]
    """Whether all points have the same mass."""
    equal = True
    for i in range(1, graph.count):
        equal = equal and graph.point_masses[0, i] == graph.point_masses[0, 0]
    return equal


@kernel
def move_to(source, target, graph):  # type: ignore[no-untyped-def]
    """Copies everything that is known about some points."""
    stay_apart()
    numbers, short = graph.count * padded(graph.dimension), padded(graph.count)
    copy(source.points, target.points, numbers)
    copy(source.gradient, target.gradient, numbers)
    copy(source.pulled, target.pulled, numbers)
    copy(source.potential, target.potential, short)
    copy(source.self_potential, target.self_potential, short)
    copy(source.rows, target.rows, short)


@kernel
def fill_velocity(graph, result):  # type: ignore[no-untyped-def]
    """``v_i = -G_i / (2 a_i)`` at ``here``."""
    stay_apart()
    for i in range(graph.count):
        for c in range(0, padded(graph.dimension), WIDTH):
            store(result, i, c, multiply(splat(-0.5 / graph.point_masses[0, i]), load(graph.here.gradient, i, c)))


@kernel
def depart(request, state, graph):  # type: ignore[no-untyped-def]
    """Sets ``there.points``, and potentials that are nearly theirs."""
    stay_apart()
    here, there = graph.here, graph.there
    numbers = graph.count * padded(graph.dimension)
    if request == START:
        return
    if request == TIGHTEN:
        move_to(here, there, graph)
        return
    if request == EXPLICIT:
        fill_velocity(graph, graph.velocity)
        combine(here.points, state.stride, graph.velocity, there.points, numbers)
        combine(there.points, state.bend, graph.swerve, there.points, numbers)
    elif request == TRY:
        combine(here.points, -1.0, graph.newton, there.points, numbers)
    elif request == STAGE:
        combine(here.points, state.step, graph.first, there.points, numbers)
    else:  # FINISH
        combine(graph.first, 0.5, graph.solution, graph.first, numbers)
        combine(here.points, state.step, graph.first, there.points, numbers)
    carry_potentials(graph)


@kernel
def conclude(request, state, graph, epsilon):  # type: ignore[no-untyped-def]
    """Solves the linear systems of a request and measures what the law wants to know."""
    stay_apart()
    here, there = graph.here, graph.there
    numbers = graph.count * padded(graph.dimension)
    if needs_evaluation(request) and request not in (START, TIGHTEN):
        note_drift(graph, state.error < math.inf)
    if request <= TIGHTEN:
        move_to(there, here, graph)
        state.size = norm(here.gradient, numbers)
        state.extent = extent(graph, numbers)
        if request == START:
            fill(graph.velocity, 0.0, numbers)
            fill(graph.moved, 0.0, numbers)
            fill(graph.drift, 0.0, padded(graph.count))
            fill(graph.self_drift, 0.0, padded(graph.count))
        if request != TIGHTEN:
            fill_velocity(graph, graph.solution)
            state.speed = norm(graph.solution, numbers)
            combine(graph.solution, -1.0, graph.velocity, graph.swerve, numbers)
            combine(graph.swerve, 1.0, graph.moved, graph.swerve, numbers)
            state.swerve = norm(graph.swerve, numbers)
    elif request == IMPLICIT:
        state.definite = shifted_factor(graph, state.shift, graph.slide_factor, graph.slide_pivots)
        if state.definite:
            fill(graph.right, 0.0, numbers)
            combine(graph.right, -state.shift, here.gradient, graph.right, numbers)
            state.definite = slide_system(state, graph, epsilon)
        if state.definite:
            copy(graph.solution, graph.first, numbers)
            state.length = norm(graph.first, numbers)
            state.along = inner_product(graph.first, here.gradient, numbers)
    elif request == NEWTON:
        copy(here.gradient, graph.right, numbers)
        copy(graph.newton, graph.solution, numbers)
        state.flattest = solve_newton(graph, epsilon, state.precision, state.longest, state.guessed, False)
        state.definite = state.flattest > -FLAT
        measure_newton(state, graph, here.gradient, numbers)
    elif request == TRY:
        state.reached = norm(there.gradient, numbers)
    elif request == MEASURE_LEFT:
        copy(there.gradient, graph.right, numbers)
        solve_newton(graph, epsilon, ROUGH, math.inf, False, True)
        measure_newton(state, graph, there.gradient, numbers)
    elif request == LOOK:
        outside = graph.lead < graph.dimension
        found = smallest_curvature(graph, graph.newton_factor, graph.newton_pivots, FLAT, outside)
        state.flattest = min(state.flattest, found)
    elif request == STAGE:
        # k1 + k2 is small, and is found instead of k2: its system has (G(x) + G(x + step k1)) on the right.
        scale_points(graph.first, -4.0 * state.shift, graph, graph.right)
        combine(graph.right, -state.shift, here.gradient, graph.right, numbers)
        combine(graph.right, -state.shift, there.gradient, graph.right, numbers)
        slide_system(state, graph, epsilon)
        state.length = norm(graph.solution, numbers)
    elif request == FINISH:
        state.ahead = inner_product(there.gradient, graph.first, numbers)
        state.behind = inner_product(here.gradient, graph.first, numbers)
        state.reached = norm(there.gradient, numbers)
    elif request == DISTANCE:
        copy(here.gradient, graph.right, numbers)
        factor, pivots = graph.newton_factor, graph.newton_pivots
        state.definite = shifted_factor(graph, state.shift, factor, pivots)
        if state.definite:
            state.definite = solve_shifted(graph, epsilon, state.shift, is_exact(graph, epsilon), factor, pivots)
        state.length = norm(graph.solution, numbers)


@shared
def measure_newton(state, graph, gradient, numbers):  # type: ignore[no-untyped-def]
    """Keeps the solution as the Newton step; its length, and what it would gain."""
    copy(graph.solution, graph.newton, numbers)
    state.length = norm(graph.newton, numbers)
    state.gain = 0.5 * inner_product(graph.newton, gradient, numbers)


@shared
def slide_system(state, graph, epsilon):  # type: ignore[no-untyped-def]
    """Whether the system of an implicit step could be solved. For its stages the model in the hull is enough."""
    whole = graph.lead == graph.hull
    return solve_shifted(graph, epsilon, state.shift, whole, graph.slide_factor, graph.slide_pivots)


@shared
def extent(graph, numbers):  # type: ignore[no-untyped-def]
    """Size of X, never less than a tenth of R per point."""
    return math.sqrt(max(inner_product(graph.here.points, graph.here.points, numbers), 0.01 * graph.count))
