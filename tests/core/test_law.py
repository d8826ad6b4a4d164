"""The law of the flow as numbers, and both engines under it, step by step."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import mutag_clouds

from flowpool import flow_pool
from flowpool.core import law
from flowpool.core.constants import (
    ERROR_EXPLICIT,
    FIRST_STEP,
    FLAT,
    GAMMA,
    LEAST_STEP,
    LONGEST_EXPLICIT,
    MOST_EXPLICIT,
    MOST_STEP,
    NEAR,
    SHORTEST,
    SINGULAR,
    SLIGHT,
    SLOW,
)
from flowpool.core.law import (
    DISTANCE,
    DONE,
    EXPLICIT,
    FINISH,
    HESSIAN,
    IMPLICIT,
    LOOK,
    MAX_STEPS,
    MEASURE_LEFT,
    NEWTON,
    NONFINITE,
    OK,
    STAGE,
    START,
    STATE,
    TIGHTEN,
    TRY,
    advance,
    begin,
)

NAMES = [
    "START",
    "EXPLICIT",
    "TIGHTEN",
    "HESSIAN",
    "IMPLICIT",
    "NEWTON",
    "TRY",
    "MEASURE_LEFT",
    "STAGE",
    "FINISH",
    "DISTANCE",
    "LOOK",
    "DONE",
]


class Flow:
    """A flow of M points under the law, whose measurements are dictated."""

    def __init__(self, num_points=4, tolerance=1e-5, max_steps=100, step_size=0.0, equal=True):
        self.given = num_points, equal, tolerance, max_steps
        self.state = SimpleNamespace(**dict.fromkeys(STATE.names, 0))
        self.request = begin(self.state, step_size)
        self.measured(size=1.0, error=0.0, extent=1.0, swerve=0.0, speed=1.0, gain=1.0)

    def measured(self, **values):
        vars(self.state).update(values)

    def then(self, **values):
        """What comes next after these measurements."""
        self.measured(**values)
        self.request = advance(self.state, *self.given)
        return self.request


def sliding(step=1.0, **options):
    """A flow whose first implicit step, of some length, has just been proposed."""
    flow = Flow(**options)
    assert flow.request == START
    while flow.then(swerve=0.0) == EXPLICIT:
        pass
    assert flow.request == HESSIAN
    flow.state.step = step
    assert flow.then() == IMPLICIT
    flow.measured(definite=True, length=1.0, along=-1.0)
    return flow


def capped():
    """A flow that has used up its steps, and has just been asked for its last Newton step."""
    flow = Flow(max_steps=4)
    while flow.then(swerve=0.0) == EXPLICIT:
        pass
    assert flow.state.steps == 4 and flow.then() == NEWTON
    return flow


def jumping(**options):
    """A flow whose Newton step has just been found."""
    flow = sliding(step=SLOW, **options)
    flow.measured(length=1e-3 / (GAMMA * SLOW), along=-10.0)
    assert flow.then() == NEWTON
    flow.measured(definite=True, flattest=1.0, length=1e-3)
    return flow


def test_it_begins_with_explicit_steps_that_double_until_they_would_be_unstable():
    flow = Flow()
    lengths = []
    while flow.then(swerve=0.0) == EXPLICIT:
        lengths.append(flow.state.step)
    assert lengths == pytest.approx([FIRST_STEP, 0.2, 0.4, 0.8, LONGEST_EXPLICIT])
    assert flow.state.steps == len(lengths)
    assert flow.state.step == 2 * LONGEST_EXPLICIT  # an implicit step may be as long as was wished for


def test_explicit_steps_are_exact_where_the_map_goes_on_as_it_did():
    """For ``x' = n - x`` with an n that grows by a constant speed in time."""
    slope, level = 0.7, 0.3

    def exactly(time):
        return level + slope * (time - 1) + (2.0 - level + slope) * math.exp(-time)

    flow, time, point, before = Flow(), 0.0, exactly(0.0), 0.0
    while flow.then(swerve=0.0) == EXPLICIT:
        target = level + slope * time
        point += flow.state.stride * (target - point) + flow.state.bend * (target - before)
        time, before = time + flow.state.step, target
        if flow.state.steps == 1:  # the first knows of no change
            point = exactly(time)
        assert point == pytest.approx(exactly(time), rel=1e-12)


def test_a_bent_way_is_taken_in_short_steps_up_to_a_number():
    flow = Flow(max_steps=1000)
    count = 0
    while flow.then(swerve=1e3) == EXPLICIT:
        count += 1
        assert flow.state.step == (FIRST_STEP if count == 1 else SHORTEST)
    assert count == MOST_EXPLICIT and flow.request == HESSIAN


def test_the_error_of_an_explicit_step_chooses_the_next():
    flow = Flow()
    flow.then()
    flow.then(swerve=0.5, extent=2.0)
    assert flow.state.step == pytest.approx(math.sqrt(2 * FIRST_STEP * ERROR_EXPLICIT * 2.0 / 0.5))


def test_steps_of_a_fixed_length_go_on_until_the_flow_crawls():
    flow = Flow(step_size=0.25)
    for _ in range(70):
        assert flow.then(speed=2e-3) == EXPLICIT
        assert flow.state.step == 0.25 and flow.state.bend == 0.0
    assert flow.then(speed=0.9e-3) == HESSIAN


def test_inner_problems_follow_the_gradient():
    flow = Flow()
    flow.then(size=1e-4)
    assert flow.request == EXPLICIT and flow.state.inner == pytest.approx(1e-6)
    flow = Flow(max_steps=1)
    assert flow.then(size=1.0) == EXPLICIT
    # The Hessian needs more than the race left, unless it is there already.
    assert flow.then(size=1e-3, error=1e-6) == TIGHTEN
    assert flow.state.inner == pytest.approx(1e-8)
    assert flow.then(error=1e-8) == HESSIAN


@pytest.mark.parametrize("size", [math.nan, math.inf])
def test_overflow_ends_the_flow_at_once(size):
    flow = Flow()
    assert flow.then(size=size) == DONE
    assert flow.state.status == NONFINITE and math.isnan(flow.state.residual)
    flow = sliding()
    assert [flow.then(), flow.then(length=1e-3)] == [STAGE, FINISH]
    assert flow.then(ahead=0.0, behind=-1.0, reached=size) == DONE
    assert flow.state.status == NONFINITE


def test_an_implicit_step_that_is_not_definite_is_shortened_and_counts():
    flow = sliding(step=1.0)
    steps, shift = flow.state.steps, flow.state.shift
    assert shift == pytest.approx(1 / GAMMA)
    assert flow.then(definite=False) == IMPLICIT
    assert flow.state.step == pytest.approx(0.3) and flow.state.shift == pytest.approx(shift / 0.3)
    assert flow.state.steps == steps + 1
    while flow.then(definite=False) == IMPLICIT:
        pass
    assert flow.state.step == LEAST_STEP and flow.request == NEWTON  # the last that may be done


def test_an_implicit_step_grows_and_shrinks_with_its_error():
    for error, factor in ((0.0, 5.0), (0.04, 4.0), (1.0, 0.8), (0.64, 1.0)):
        flow = sliding(step=1.0)
        assert flow.then() == STAGE
        assert flow.then(length=2 * error * 0.01) == FINISH
        assert flow.then(ahead=-1.0, behind=-1.0, reached=0.5, error=0.0) == HESSIAN
        assert flow.state.arrived and flow.state.size == 0.5
        assert flow.state.step == pytest.approx(factor)
    flow = sliding(step=1.0)
    flow.then()
    assert flow.then(length=2 * 4.0 * 0.01) == IMPLICIT  # too large an error: not taken, and shorter
    assert flow.state.step == pytest.approx(0.4) and not flow.state.arrived
    flow = sliding(step=0.9 * MOST_STEP)
    flow.state.tried = True
    flow.then()
    flow.then(length=0.0)
    flow.then(ahead=-1.0, behind=-1.0, reached=0.5)
    assert flow.state.step == MOST_STEP


def test_a_long_step_that_ends_uphill_has_jumped_over_the_minimum():
    for step, ahead, taken in ((2.0, 0.3, False), (2.0, 0.1, True), (0.5, 0.3, True)):
        flow = sliding(step=step)
        flow.then()
        flow.then(length=1e-3 / step)
        after = flow.then(ahead=ahead, behind=-1.0, reached=0.5, error=0.0)
        assert after == (HESSIAN if taken else IMPLICIT) and flow.state.arrived == taken
        if not taken:
            assert flow.state.step == pytest.approx(0.3 * step)


def slide_on(flow, size):
    """An implicit step without error that leaves a gradient of some size; then whatever follows the next first stage."""
    if flow.request != STAGE:
        assert flow.then() == STAGE
    assert flow.then(length=0.0) == FINISH
    assert flow.then(ahead=-1.0, behind=-1.0, reached=size, error=0.0) == HESSIAN
    assert flow.then() == IMPLICIT
    return flow.then(length=1e-3 / (GAMMA * flow.state.step), along=-10.0)


def test_a_step_that_replaces_a_refused_one_does_not_grow():
    flow = sliding(step=2.0)
    flow.then()
    flow.then(length=1e-3)
    assert flow.then(ahead=1.0, behind=-1.0, reached=0.5, error=0.0) == IMPLICIT  # uphill
    flow.state.tried = True
    slide_on(flow, 0.5)
    assert flow.state.step == pytest.approx(0.6)
    flow.state.tried = True
    slide_on(flow, 0.25)
    assert flow.state.step == pytest.approx(3.0)  # and the next grows again


def test_a_refused_newton_step_waits_until_the_gradient_has_halved_or_for_a_step_or_two():
    for sizes, requests in (
        ([0.49], [NEWTON]),
        ([0.51, 0.99], [STAGE, NEWTON]),
        ([0.9, 1.1, 1.9], [STAGE, STAGE, NEWTON]),
        ([0.9, 0.2], [STAGE, NEWTON]),
    ):
        flow = jumping()
        assert flow.then(length=1e-2) == TRY and flow.state.size == 1.0
        assert flow.then(reached=0.9) == STAGE  # refused
        assert [slide_on(flow, size) for size in sizes] == requests
    flow = jumping()
    assert flow.then(length=1e-2) == TRY and flow.then(reached=0.9) == STAGE
    flow.then(length=0.0)
    flow.then(ahead=-1.0, behind=-1.0, reached=0.9, error=0.0)
    flow.then()
    assert flow.then(length=0.9e-5 / (GAMMA * flow.state.step), along=-10.0) == NEWTON  # may be the end


def test_newton_is_tried_when_the_flow_is_slow_and_the_step_is_short():
    near = NEAR * math.sqrt(4)
    for step, length, next_one in (
        (SLOW, 0.9 * near, NEWTON),
        (SLOW, 1.1 * near, STAGE),
        (0.9 * SLOW, 0.9 * near, STAGE),
        (0.01, 0.9e-5, NEWTON),  # shorter than the tolerance: a try, however fast the flow
    ):
        flow = sliding(step=step, equal=False)
        assert flow.then(length=length / (GAMMA * step)) == next_one
    flow = sliding(step=SLOW)
    flow.state.tried = True
    assert flow.then(length=1e-9) == STAGE


@pytest.mark.parametrize("seed", range(20))
def test_what_is_known_before_a_newton_step_bounds_its_length_from_below(seed):
    rng = np.random.default_rng(seed)
    num_points, size, step = 3, 6, 10 ** rng.uniform(-1, 3)
    basis = np.linalg.qr(rng.standard_normal((size, size)))[0]
    hessian = basis @ np.diag(2 / num_points * 10 ** rng.uniform(-4, 1, size)) @ basis.T
    gradient = rng.standard_normal(size)
    shift = 1 / (GAMMA * step)
    first = -shift * np.linalg.solve(hessian + shift * 2 / num_points * np.eye(size), gradient)
    state = SimpleNamespace(step=step, length=float(np.linalg.norm(first)), along=float(first @ gradient))
    newton = float(np.linalg.norm(np.linalg.solve(hessian, gradient)))
    plain = law._newton_at_least(state, False, num_points)
    better = law._newton_at_least(state, True, num_points)
    assert 0.999 * plain <= better <= newton


def test_a_newton_step_is_accepted_if_the_gradient_falls():
    for length, reached, accepted in (
        (1e-2, 0.34, True),
        (1e-2, 0.36, False),
        (0.9e-3, 0.89, True),
        (0.9e-3, 0.91, False),
        (0.9e-5, 5.0, True),  # shorter than the tolerance: whatever the rounding of the gradient says
        (0.9e-5, math.nan, False),
        (0.9e-5, math.inf, False),
    ):
        flow = jumping()
        assert flow.then(length=length) == TRY
        assert flow.then(reached=reached) == (MEASURE_LEFT if accepted else STAGE)
    flow = jumping()
    assert flow.then(length=1e-2, gain=0.9 * SLIGHT) == TRY
    assert flow.then(reached=0.89) == MEASURE_LEFT  # nothing is at stake
    flow = jumping()
    assert flow.then(length=1.01 * NEAR * 2) == STAGE  # too far to be sure of the basin


def test_it_ends_when_the_newton_step_that_is_left_is_short():
    for flattest, singular in ((1.0, False), (SINGULAR, True), (-1.0, True)):
        flow = jumping()
        steps = flow.state.steps
        flow.then()
        flow.then(reached=1e-4)
        assert flow.then(length=1e-6) == LOOK and flow.state.arrived
        assert flow.then(flattest=flattest) == DONE
        assert (flow.state.status, flow.state.residual, flow.state.singular) == (OK, 1e-6, singular)
        assert not flow.state.arrived and flow.state.steps == steps + 1 and flow.state.size == 1e-4
    flow = jumping()
    flow.then()
    flow.then(reached=1e-4)
    assert flow.then(length=1e-4, flattest=1.0, error=0.0) == HESSIAN
    assert flow.then() == NEWTON and flow.state.guessed  # jump after jump, from what the last one left


def test_it_ends_in_a_valley_when_hardly_anything_is_left_to_be_gained():
    """With M = 4 points a step of 1e-3 R that gains 1e-10 R^2 has a curvature of 4e-4, one of 1e-4 R of 4e-2."""
    enough = 1e-10  # the square of the tolerance
    for length, gain, flattest, ends in (
        (1e-3, 0.9 * enough, SINGULAR, True),
        (1e-3, 0.9 * enough, 1.1 * SINGULAR, False),  # an isolated minimiser is found to the tolerance
        (1e-3, 1.1 * enough, SINGULAR, False),
        (1e-4, 0.9 * enough, SINGULAR, False),  # and so is every point along directions that are not flat
        (0.9e-5, 0.9 * enough, SINGULAR, False),  # short enough to be judged as ever
    ):
        flow = jumping()
        assert flow.then(length=length, gain=gain, flattest=flattest) == (DONE if ends else TRY)
        if ends:
            assert (flow.state.status, flow.state.residual, flow.state.singular) == (OK, length, True)
            assert not flow.state.arrived
        flow = jumping()
        flow.then()
        flow.then(reached=1e-4)
        looks = flow.then(length=length, gain=gain) == LOOK
        assert looks == (ends or length < 1e-5 or flattest > SINGULAR)
        if looks:  # a minimiser that is isolated after all is approached further
            assert (flow.then(flattest=flattest, error=0.0) == DONE) == (ends or length < 1e-5)
        if ends:
            assert (flow.state.status, flow.state.residual, flow.state.singular) == (OK, length, True)
    flow = capped()
    flow.state.singular = True
    flow.then(definite=True, length=0.5, flattest=0.0)
    assert flow.state.status == MAX_STEPS and not flow.state.singular  # it has not ended there


def test_a_step_uphill_is_neither_taken_nor_an_end():
    """The divergence curves down along it, however slightly: at a saddle, not in a valley."""
    flow = jumping()
    assert flow.then(length=1e-3, gain=-1e-12, flattest=0.0) == STAGE
    flow = jumping()
    flow.then()
    flow.then(reached=1e-4)
    assert flow.then(length=1e-3, gain=-1e-12, flattest=0.0) != DONE
    flow = jumping()
    assert flow.then(length=0.9e-5, gain=-1e-12, flattest=0.0) == TRY  # the sign of so little is rounding


def test_after_a_refused_jump_it_slides_again():
    flow = jumping()
    flow.then()
    flow.then(reached=1e-4)
    flow.then(length=1e-4, flattest=1.0, error=0.0)
    flow.then()
    assert flow.then(definite=True, length=1.0) == IMPLICIT
    flow.measured(definite=True, length=1e-9, along=-1.0)
    assert flow.then() == STAGE  # no second try from the same points


def test_an_indefinite_hessian_is_no_end():
    """A solution that was never begun has no length, which must not read as arrived."""
    flow = jumping()
    assert flow.then(definite=False, length=0.0) == STAGE
    last = capped()
    assert last.state.longest == math.inf
    assert last.then(definite=False, length=0.0) == DISTANCE
    shifts = []
    while last.request == DISTANCE:
        shifts.append(last.state.shift)
        last.then(definite=False, length=0.0)
    assert shifts[0] == FLAT and np.allclose(np.diff(np.log10(shifts)), 1)
    assert last.state.status == MAX_STEPS and last.state.residual == math.inf


def test_the_cap_is_honest():
    flow = capped()
    assert flow.then(definite=True, length=0.5, flattest=1.0) == DONE
    assert (flow.state.status, flow.state.residual) == (MAX_STEPS, 0.5)
    # Close enough, the last step is still taken and judged.
    flow = capped()
    assert flow.then(definite=True, length=0.9e-5, flattest=1.0) == TRY
    assert flow.then(reached=1e-9) == MEASURE_LEFT
    assert [flow.then(length=1e-12), flow.then(flattest=1.0)] == [LOOK, DONE] and flow.state.status == OK
    # One that idles where the minimiser turns out to be isolated was the last all the same.
    flow = capped()
    flow.then(definite=True, length=0.9e-5, flattest=1.0)
    flow.then(reached=1e-9)
    assert [flow.then(length=1e-3, gain=1e-12), flow.then(flattest=1.0)] == [LOOK, DONE]
    assert (flow.state.status, flow.state.residual) == (MAX_STEPS, 1e-3)
    # After an indefinite one, what the shifted system says.
    flow = capped()
    flow.then(definite=False)
    flow.then(definite=False)
    assert flow.then(definite=True, length=0.7) == DONE
    assert (flow.state.status, flow.state.residual) == (MAX_STEPS, 0.7)
    # A large shift makes the step short, which must not read as arrived.
    flow = capped()
    flow.then(definite=False)
    flow.then(definite=False)
    assert flow.then(definite=True, length=1e-9) == DONE
    assert (flow.state.status, flow.state.residual) == (MAX_STEPS, 1e-5)


def test_a_gradient_that_is_rounding_is_followed_no_further():
    flow = sliding()
    flow.state.phase = law._HESSIAN
    assert flow.then(size=1e-16) == NEWTON
    assert flow.then(definite=True, length=3e-5, flattest=1.0) == DONE
    assert flow.state.status == MAX_STEPS and flow.state.residual == 3e-5


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_measured_the_flow_ends(seed):
    rng = np.random.default_rng(seed)
    flow = Flow(max_steps=50, num_points=int(rng.integers(1, 9)), equal=bool(rng.integers(2)))
    numbers = [name for name in STATE.names if STATE[name] == np.float64][-13:-1]
    requests = 0
    while flow.request != DONE:
        values = {name: float(10 ** rng.uniform(-12, 2)) for name in numbers if name != "flattest"}
        values |= {"definite": bool(rng.random() < 0.7), "along": -values["length"], "behind": -1.0}
        flow.then(**values, flattest=float(rng.normal()))
        requests += 1
        assert requests < 8 * 60
    assert flow.state.steps <= 51 and flow.state.status in (OK, MAX_STEPS)


# What may follow what; MEASURE_LEFT and FINISH of the last step may end the flow.
FOLLOWERS = {
    START: {EXPLICIT, TIGHTEN, HESSIAN, DONE},
    EXPLICIT: {EXPLICIT, TIGHTEN, HESSIAN, DONE},
    TIGHTEN: {HESSIAN},
    HESSIAN: {IMPLICIT, NEWTON},
    IMPLICIT: {IMPLICIT, NEWTON, STAGE},
    NEWTON: {TRY, IMPLICIT, STAGE, DISTANCE, DONE},
    TRY: {TRY, MEASURE_LEFT, IMPLICIT, STAGE, DISTANCE},
    MEASURE_LEFT: {TIGHTEN, HESSIAN, LOOK, DONE},
    LOOK: {TIGHTEN, HESSIAN, DONE},
    STAGE: {FINISH, IMPLICIT, NEWTON},
    FINISH: {TIGHTEN, HESSIAN, IMPLICIT, NEWTON, DONE},
    DISTANCE: {DISTANCE, DONE},
}


def clouds(kind):
    """Nodes, batch and reference of some graphs."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "MUTAG":
        return *mutag_clouds(width=8, count=16), normal(5, 8)
    batch = torch.arange(8).repeat_interleave(torch.tensor([5, 9, 14, 30, 7, 11, 6, 40]))
    nodes, count = normal(len(batch), 4), 4
    if kind == "twins":
        nodes = normal(8, 3, 4)[batch, torch.randint(3, batch.shape, generator=generator)]
    if kind == "more points than nodes":
        batch, nodes, count = torch.arange(8).repeat_interleave(3), normal(24, 4), 7
    if kind == "wide":
        nodes, count = normal(len(batch), 4) @ normal(4, 24) + 0.1 * normal(len(batch), 24), 6
    return nodes, batch, normal(count, nodes.shape[1])


KINDS = ("MUTAG", "random", "twins", "more points than nodes", "wide", "unequal point masses")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", [1.0, 0.1])
def test_both_engines_go_the_same_way(kind, level, monkeypatch):
    """The torch engine step by step, the compiled law on the same states, and the compiled engine's answers."""
    from law_kernel import advance_compiled

    nodes, batch, reference = clouds(kind)
    shares = torch.linspace(1.0, 2.0, len(reference), dtype=torch.float64) if kind == "unequal point masses" else None
    options = {"reference": reference, "epsilon": level, "tolerance": 1e-9, "point_masses": shares}
    entries = []

    def recorded(state, *given):
        before = dict(vars(state))
        request = advance(state, *given)
        entries.append((id(state), before, given, request, dict(vars(state))))
        return request

    # First, since kernels may have to be compiled, from the law as it is.
    other = flow_pool(nodes, batch, engine="compiled", **options)
    monkeypatch.setattr(law, "advance", recorded)
    one = flow_pool(nodes, batch, engine="torch", **options)

    last: dict[int, int] = {}
    for state, before, given, request, after in entries:
        assert request in FOLLOWERS[last.get(state, START)], (NAMES[last.get(state, START)], NAMES[request])
        last[state] = request
        if request == DONE:
            last.pop(state)
        found, compiled = advance_compiled(before, *given)
        assert found == request
        for name, value in after.items():
            assert compiled[name] == pytest.approx(value, rel=1e-12, nan_ok=True), (name, NAMES[request])
    assert len(entries) > 8 * 10

    assert torch.equal(one.status, other.status)
    isolated = one.status == 0
    assert bool(isolated.any()) or kind in ("twins", "more points than nodes")
    # The kernels know an implicit step to one digit, the torch engine exactly: its error and its length differ a little.
    differing = (one.steps - other.steps)[isolated].abs().double().sum()
    assert differing <= 0.15 * other.steps[isolated].sum()
    apart = (one.points - other.points).abs().amax((1, 2))
    if kind != "more points than nodes":  # whose valleys are the same for both, but not their floors
        assert apart[isolated].max() < 1e-8 if bool(isolated.any()) else True
        assert apart[~isolated].max() < 1e-3 if not bool(isolated.all()) else True
    assert torch.allclose(one.divergence, other.divergence, atol=1e-9)


def test_both_engines_begin_where_the_reference_is():
    nodes, batch, reference = clouds("random")
    one, other = (
        flow_pool(nodes, batch, reference=reference, max_steps=1, engine=engine, tolerance=1e-12)
        for engine in ("torch", "compiled")
    )
    assert torch.equal(one.steps, other.steps) and torch.equal(one.status, other.status)
    assert torch.allclose(one.points, other.points, atol=1e-12)
    assert torch.allclose(one.residual, other.residual, rtol=0.2)  # roughly solved
