"""Inputs that once went wrong, each with what is right."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers import central_difference, mutag_clouds

import flowpool
from flowpool import FlowPool, Status, flow_pool, references
from flowpool.costs import Custom, Mahalanobis

ENGINES = pytest.mark.parametrize("engine", ["torch", "compiled"])
FINE = (Status.OK, Status.SINGULAR)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# Memory. Centred nodes have rank N - 1; (N - 1) M = 512 and hulls of low rank were given too little room.
SHAPES = """
import torch
from flowpool import FlowPool
for num_nodes, features, rank, num_points, max_steps in (
    (17, 32, 32, 32, 300), (9, 64, 64, 64, 40), (400, 256, 128, 4, 30), (100, 32, 16, 32, 40), (80, 64, 32, 16, 40),
    (60, 16, 4, 48, 20), (50, 32, 8, 20, 20),
):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_nodes, rank, generator=generator)
    if rank < features:
        x = x @ torch.randn(rank, features, generator=generator) / rank**0.5
    x.requires_grad_()
    pool = FlowPool(features, num_points, max_steps=max_steps, engine="compiled", on_failure="ignore")
    for _ in range(2):
        out = pool(x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
    assert out.isfinite().all() and gradient.isfinite().all()
    if int(pool.report.status[0]) in (0, 4):  # the mean of the points is that of the nodes
        assert torch.allclose(out.view(num_points, features).mean(0), x.mean(0), atol=1e-3)
        assert torch.allclose(gradient, torch.full_like(gradient, num_points / num_nodes), atol=1e-3)
    print(num_nodes, features, rank, num_points, int(pool.report.status[0]))
"""


def test_hulls_of_any_rank_have_room():
    """In a process of its own, because what is written outside of an array ends it."""
    path = str(Path(flowpool.__file__).parents[1])
    # The C library's checks of the heap, which have been in a library of their own since glibc 2.34; elsewhere without effect.
    checks = {"MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0"}
    done = subprocess.run(
        [sys.executable, "-c", SHAPES], capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "PYTHONPATH": path, **checks},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 7
    assert done.stdout.split()[4] == "0"


def test_one_such_graph_in_a_batch_leaves_the_others_alone():
    x = torch.cat([normal(6, 32, seed=1), normal(17, 32), normal(9, 32, seed=2)])
    batch = torch.arange(3).repeat_interleave(torch.tensor([6, 17, 9]))
    reference = references.normal(32, 32).double()
    together = flow_pool(x, batch, reference=reference, engine="compiled", max_steps=60)
    for graph in range(3):
        alone = flow_pool(x[batch == graph], reference=reference, engine="compiled", max_steps=60)
        assert torch.equal(together.points[graph], alone.points[0])


# Gradients of graphs with fewer distinct nodes than points raised LinAlgError although the status was OK.
@pytest.mark.parametrize("seed", range(20))
def test_two_nodes_and_eight_points_have_a_gradient(seed):
    x = normal(2, 16, seed=100 + seed, dtype=torch.float32).requires_grad_()
    pool = FlowPool(16, 8, seed=seed, engine="compiled", on_failure="ignore")
    out = pool(x)
    assert int(pool.report.status[0]) in FINE
    out.sum().backward()
    # The mean of the points moves with that of the nodes, however they lie on them.
    assert torch.allclose(x.grad, torch.full_like(x.grad, 8 / 2), atol=1e-3)
    x.grad = None
    pool(x).square().sum().backward()
    assert x.grad.isfinite().all()


@ENGINES
@pytest.mark.parametrize(("distinct", "num_points", "level"), [(2, 8, 0.1), (3, 8, 0.03), (4, 16, 0.3), (2, 5, 3.0)])
def test_gradients_of_few_distinct_nodes_are_right_along_the_mean_and_scale(engine, distinct, num_points, level):
    kinds = normal(distinct, 6, seed=distinct)
    x = kinds[torch.arange(3 * distinct) % distinct].requires_grad_()
    reference = references.normal(6, num_points, 3).double()
    pooled = flow_pool(x, reference=reference, epsilon=level, engine=engine, tolerance=1e-9)
    assert int(pooled.status[0]) in FINE
    weights = normal(1, num_points, 6, seed=7)
    (found,) = torch.autograd.grad((pooled.points * weights).sum(), x)
    assert found.isfinite().all()
    # Relative epsilon: moving and scaling the nodes moves and scales the points, whatever is flat.
    moved = (weights.sum((0, 1)) * torch.ones(6, dtype=torch.float64)).sum()
    assert float(found.sum()) == pytest.approx(float(moved), rel=1e-4, abs=1e-4)
    centred = x.detach() - x.detach().mean(0)
    scaled = ((pooled.points.detach() - x.detach().mean(0)) * weights).sum()
    assert float((found * centred).sum()) == pytest.approx(float(scaled), rel=1e-3, abs=1e-3)


# An absolute reference far from a graph.
@ENGINES
@pytest.mark.parametrize("offset", [100.0, 1000.0])
def test_a_graph_far_from_an_absolute_reference_is_reached(engine, offset):
    x = torch.cat([normal(20, 3), normal(10, 3, seed=1) + offset]).requires_grad_()
    batch = torch.tensor([0] * 20 + [1] * 10)
    reference = references.normal(3, 4).double()
    pooled = flow_pool(x, batch, reference=reference, relative=False, engine=engine, epsilon=0.3)
    assert pooled.status.tolist() == [Status.OK, Status.OK]
    assert pooled.residual.max() <= 1e-5
    mean = x.detach()[20:].mean(0)
    assert torch.allclose(pooled.points[1].mean(0), mean, rtol=1e-6)
    (found,) = torch.autograd.grad(pooled.points[0].square().sum(), x)
    assert found[:20].abs().max() > 0.01 and torch.equal(found[20:], torch.zeros(10, 3, dtype=torch.float64))
    alone = flow_pool(x[:20], reference=reference, relative=False, engine=engine, epsilon=0.3)
    (expected,) = torch.autograd.grad(alone.points.square().sum(), x)
    assert torch.equal(found, expected)


# Nodes without mass.
@ENGINES
def test_twins_beside_a_node_without_mass_are_one_point(engine):
    x = torch.tensor([[0.1, 0.3], [0.1, 0.3], [5.0, 5.0]], dtype=torch.float64, requires_grad=True)
    masses = torch.tensor([0.3, 0.7, 0.0], dtype=torch.float64, requires_grad=True)
    reference = references.normal(2, 3).double()
    pooled = flow_pool(x, reference=reference, masses=masses, engine=engine)
    assert torch.allclose(pooled.points[0], x.detach()[:1].expand(3, 2))
    pooled.points.sum().backward()
    # The points move with the mean: three points, two features, masses that are normalised.
    assert torch.allclose(x.grad, 3 * masses.detach()[:, None].expand(3, 2))
    expected = 3 * (x.detach().sum(1) - x.detach()[0].sum())
    assert torch.allclose(masses.grad, expected, atol=1e-9)


@ENGINES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("where", [1e7, 1e3, 0.0])
def test_a_node_without_mass_changes_no_gradient(engine, dtype, where):
    x, reference = normal(12, 4, dtype=dtype), references.normal(4, 3).to(dtype)
    weights = normal(1, 3, 4, seed=3, dtype=dtype)

    def gradients(nodes, masses):
        nodes, masses = nodes.clone().requires_grad_(), masses.clone().requires_grad_()
        pooled = flow_pool(nodes, reference=reference, masses=masses, engine=engine, epsilon=0.3, tolerance=1e-8)
        assert int(pooled.status[0]) == Status.OK
        return pooled.points.detach(), *torch.autograd.grad((pooled.points * weights).sum(), (nodes, masses))

    expected = gradients(x, torch.ones(12, dtype=dtype))
    found = gradients(
        torch.cat([x, torch.full((1, 4), where, dtype=dtype)]), torch.tensor([1.0] * 12 + [0.0]).to(dtype)
    )
    tight = 1e-5 if dtype == torch.float32 else 1e-8
    assert torch.allclose(found[0], expected[0], atol=tight)
    assert torch.allclose(found[1][:12], expected[1], atol=tight) and (found[1][12] == 0).all()
    assert torch.allclose(found[2][:12], expected[2], atol=10 * tight) and bool(found[2][12].isfinite())


@ENGINES
def test_the_gradient_in_a_mass_that_is_zero_is_one_sided_and_right(engine):
    x, reference = normal(9, 2), references.normal(2, 3).double()
    weights, masses = normal(1, 3, 2, seed=3), torch.tensor([0.0] + [1.0] * 8, dtype=torch.float64)

    def value(b):
        return (
            flow_pool(x, reference=reference, masses=b, engine=engine, epsilon=0.3, tolerance=1e-11).points * weights
        ).sum()

    leaf = masses.clone().requires_grad_()
    (found,) = torch.autograd.grad(value(leaf), leaf)
    step = 1e-5
    more, most = (value(masses + torch.tensor([k * step] + [0.0] * 8).double()) for k in (1, 2))
    slope = (4 * more - most - 3 * value(masses)) / (2 * step)
    assert float(found[0]) == pytest.approx(float(slope), rel=1e-5)


# Several Python threads that share the helpers, with batches of several graphs and different numbers of threads.
def test_python_threads_share_the_helper_threads():
    x = normal(60, 3)
    batch = torch.arange(6).repeat_interleave(10)
    reference = references.normal(3, 3).double()
    before = torch.get_num_threads()

    def once():
        leaf = x.clone().requires_grad_()
        points = flow_pool(leaf, batch, reference=reference, engine="compiled").points
        (gradient,) = torch.autograd.grad(points.square().sum(), leaf)
        return points.detach(), gradient

    expected = once()
    wrong, errors = [], []

    def work(threads):
        try:
            for turn in range(12):
                torch.set_num_threads(1 + (threads + turn) % 8)
                found = once()
                if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                    wrong.append(threads)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
    finally:
        torch.set_num_threads(before)
    assert not any(worker.is_alive() for worker in workers)
    assert not errors and not wrong


def test_helper_threads_are_never_ended(monkeypatch):
    """A call with more threads than another must not take the pool away from it."""
    from flowpool.kernels.machine import threads

    pools = []

    def work(counter):
        pools.append(threads._helpers())
        while counter[0] >= 0 and counter[0] < 40:
            counter[0] += 1

    for number in (1, 2, 8, 3):
        threads.run(work, 40, number)
        threads.run(work, 40, number, patient=True)
    assert len(set(map(id, pools))) == 1


# A residual is the length of a step that was found, or infinite.
@ENGINES
@pytest.mark.parametrize("max_steps", [1, 2, 3, 5, 8])
def test_a_flow_that_is_cut_off_where_nothing_is_definite_is_not_ok(engine, max_steps):
    """Lattices and symmetric starts have saddles; a cut-off flow must never read as arrived."""
    x = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3)
    reference = 1e-3 * references.normal(3, 6).double()  # all points at the mean: a saddle
    pooled = flow_pool(x, reference=reference, epsilon=0.05, engine=engine, max_steps=max_steps)
    assert int(pooled.status[0]) == Status.MAX_STEPS
    assert float(pooled.residual[0]) > 1e-5
    end = flow_pool(x, reference=reference, epsilon=0.05, engine=engine)
    gap = (pooled.points - end.points).norm() / 3**0.5
    assert gap > 0.1  # it had far to go, indeed
    if bool(pooled.residual.isfinite()):
        assert float(pooled.residual[0]) > 1e-4


# A graph with NaN in it, in a traced or an eager call, leaves the gradients of the others as they are.
@ENGINES
def test_a_broken_graph_leaves_shared_gradients_alone(engine):
    x = normal(15, 2)
    x[7] = torch.nan
    batch = torch.arange(3).repeat_interleave(5)
    level = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    reference = references.normal(2, 3).double()
    pooled = flow_pool(x, batch, reference=reference, epsilon=level, engine=engine)
    (found,) = torch.autograd.grad(pooled.points[[0, 2]].square().sum(), level)
    clean = flow_pool(x[batch != 1], torch.tensor([0] * 5 + [1] * 5), reference=reference, epsilon=level, engine=engine)
    (expected,) = torch.autograd.grad(clean.points.square().sum(), level)
    assert torch.equal(found, expected)


@ENGINES
def test_bits_do_not_depend_on_the_number_of_threads(engine):
    x, reference = normal(240, 5), references.normal(5, 4).double()
    batch = torch.arange(6).repeat_interleave(40)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            leaf = x.clone().requires_grad_()
            points = flow_pool(leaf, batch, reference=reference, engine=engine, max_steps=20).points
            points.square().sum().backward()
            assert torch.get_num_threads() == threads
            found.append((points.detach(), leaf.grad))
    finally:
        torch.set_num_threads(before)
    for points, gradient in found[1:]:
        assert torch.equal(points, found[0][0]) and torch.equal(gradient, found[0][1])


def test_gradients_of_isolated_minimisers_do_not_feel_the_ridge():
    x, reference = normal(14, 4), references.normal(4, 4).double()
    weights = normal(1, 4, 4, seed=2)

    def value(nodes):
        return (
            flow_pool(nodes, reference=reference, epsilon=0.2, tolerance=1e-11, engine="compiled").points * weights
        ).sum()

    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(value(leaf), leaf)
    direction = normal(14, 4, seed=9)
    slope = central_difference(value, x, direction)
    assert float((found * direction).sum()) == pytest.approx(float(slope), rel=1e-6)


def test_a_gradient_in_the_nodes_alone_knows_that_epsilon_is_in_their_units():
    """For costs without a closed form the part through the units of epsilon was left out unless masses were wanted, too."""
    x, reference = normal(4, 2, seed=14), references.normal(2, 2).double()
    weights = normal(1, 2, 2, seed=3)

    def value(nodes):
        general_cost = Custom(lambda a, b: ((a - b) * torch.tensor([1.2, 0.7])).square().sum(-1))
        pooled = flow_pool(nodes, reference=reference, cost=general_cost, tolerance=1e-11, engine="torch")
        return (pooled.points * weights).sum()

    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(value(leaf), leaf)
    direction = normal(4, 2, seed=9)
    slope = central_difference(value, x, direction)
    assert float((found * direction).sum()) == pytest.approx(float(slope), rel=1e-6)


@pytest.mark.parametrize("relative", [True, False])
def test_a_start_that_depends_on_the_graph_is_differentiated_along_flat_directions(relative):
    """Weights of the features stretch the frame, and more points than nodes leave them where the start put them."""
    cost = Mahalanobis(2).double()
    torch.nn.init.uniform_(cost.weight, -0.7, 0.7, generator=torch.Generator().manual_seed(0))
    found = {}
    for engine in ("torch", "compiled"):
        nodes = normal(3, 2, seed=3).requires_grad_()
        pooled = flow_pool(nodes, reference=normal(6, 2), cost=cost, relative=relative, tolerance=1e-11, engine=engine)
        assert bool(pooled.status[0] == Status.SINGULAR)
        found[engine] = torch.autograd.grad((pooled.points * normal(1, 6, 2, seed=1)).sum(), (nodes, cost.weight))
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # as far as both have come along flat directions


@pytest.mark.parametrize("engine", ["compiled", "torch"])
def test_what_is_left_in_a_valley_is_next_to_nothing(engine):
    """Seven points for two nodes: the end is said to be SINGULAR, and going on for long would gain less than 4e-10 R^2.

    The law stops there by the quadratic model of the divergence. Along a valley, which is flatter, a few times as much is left.
    """
    generator = torch.Generator().manual_seed(1)
    nodes = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    reference = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    ended, later = (
        flow_pool(nodes, reference=reference, engine=engine, tolerance=tolerance) for tolerance in (1e-5, 1e-8)
    )
    assert ended.status.tolist() == later.status.tolist() == [Status.SINGULAR]
    assert float(ended.residual) > 1e-5
    assert int(ended.steps) < int(later.steps)
    square = float((nodes - nodes.mean(0)).square().sum(1).mean())
    assert 0 <= float(ended.divergence - later.divergence) <= 4e-10 * square


# Where epsilon is tiny, one step leaves the potentials thousands of epsilon behind, and Newton's method does not find back.
# (The torch engine needs more than a thousand steps here, and says so.)
def test_potentials_that_were_left_far_behind_are_found_again():
    x = (normal(15, 14) + 6.0).requires_grad_()
    reference = 0.1 * normal(16, 14, seed=1)
    pooled = flow_pool(x, reference=reference, relative=False, epsilon=1.3e-3, engine="compiled")
    assert pooled.status.tolist() == [Status.OK]
    assert float(pooled.divergence) >= 0
    assert torch.allclose(pooled.points[0].mean(0), x.detach().mean(0), atol=1e-4)
    (found,) = torch.autograd.grad(pooled.points.sum(), x)
    assert torch.allclose(found, torch.full_like(found, 16 / 15), atol=1e-3)


# A Newton step that leads uphill gains less than nothing, which was taken for the end of a flow along a valley.
@ENGINES
@pytest.mark.parametrize("graph", [35, 51])
def test_a_saddle_is_no_end(engine, graph):
    nodes, batch = mutag_clouds(width=8)
    reference = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pooled = flow_pool(nodes[batch == graph], reference=reference, epsilon=1.0, tolerance=1e-8, engine=engine)
    assert int(pooled.status[0]) in FINE
    assert float(pooled.residual) <= 1e-8


@pytest.mark.parametrize("engine", ["torch", "compiled"])
def test_a_flow_that_starts_where_it_would_end_stays_there(engine):
    """With many points and a tiny epsilon the first transport of the kernels ended with a point in the wrong place."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        nodes = torch.randn(30, 19, generator=generator, dtype=torch.float64)
        nodes = nodes - nodes.mean(0)
        nodes = nodes / nodes.square().sum(1).mean().sqrt()
        start = torch.randn(31, 19, generator=generator, dtype=torch.float64)
        ended = flow_pool(nodes, reference=start, epsilon=8e-5, gradient="none", engine="compiled")
        options = {"relative": False, "epsilon": 8e-5, "max_steps": 1, "gradient": "none", "on_failure": "ignore"}
        again = flow_pool(nodes, reference=ended.points[0], engine=engine, **options)
        assert float((again.points - ended.points).abs().max()) <= 1e-5


def test_a_small_epsilon_needs_no_more_steps_than_another():
    """Products of the Hessian in float32 showed curvatures that were not there, and the flow went on for 1000 steps."""
    torch.manual_seed(0)
    nodes = torch.randn(4, 98)[torch.arange(81) % 4]
    pooled = flow_pool(nodes, reference=references.normal(98, 21), epsilon=2e-5)
    assert int(pooled.steps) < 100 and bool(pooled.converged)
