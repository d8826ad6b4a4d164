"""Order, frames and their gradients by kernels against the torch modules that specify them."""

import numpy as np
import pytest
import torch

from flowpool.core.frame import make_frame
from flowpool.core.measures import make_clouds
from flowpool.costs import Mahalanobis, SquaredEuclidean, bind
from flowpool.kernels import batch as engine
from flowpool.kernels.cloud import make_room
from flowpool.kernels.frame import arrange, find_frame, leave_frame, place_start
from flowpool.kernels.machine.jit import entry
from flowpool.kernels.machine.rows import rows_of
from flowpool.kernels.records import EMPTY, FACTS, KIND, RADIUS, UNIT, Given, Gradients, Kept

SIZES = [7, 0, 1, 30, 4, 5, 12]  # the fifth is one point, the sixth is broken
GRAPHS, FEATURES, COUNT = len(SIZES), 5, 3


def problem(dtype):
    generator = torch.Generator().manual_seed(0)
    batch = torch.arange(GRAPHS).repeat_interleave(torch.tensor(SIZES))
    nodes = torch.randn(len(batch), FEATURES, generator=generator, dtype=torch.float64) * (1 + batch[:, None]) + 3
    nodes[batch == 4] = nodes[batch == 4][0]
    nodes[(batch == 5).nonzero()[2], 1] = torch.inf
    masses = torch.rand(len(batch), generator=generator, dtype=torch.float64) + 0.1
    shuffled = torch.randperm(len(batch), generator=generator)
    return nodes[shuffled].to(dtype), batch[shuffled], masses[shuffled].to(dtype)


def geometry(weighted):
    if not weighted:
        return bind(SquaredEuclidean(), torch.float64, torch.device("cpu"))
    cost = Mahalanobis(FEATURES)
    with torch.no_grad():
        cost.weight.copy_(torch.linspace(-1, 1, FEATURES))
    return bind(cost, torch.float64, torch.device("cpu"))


@entry
def enter(given, kept, starts):  # type: ignore[no-untyped-def]
    """Order, frame, X^(0) and epsilon of every graph."""
    room = make_room(len(given.nodes), given.nodes.shape[1])
    for which in range(len(given.epsilon)):
        arrange(given, kept, which, room)
        find_frame(given, kept, which)
        place_start(given, kept, which, rows_of(starts[which]))


@entry
def leave(given, kept, points, pull, to_share, cotangent, moment, to_radius, gradients):  # type: ignore[no-untyped-def]
    """The gradients of every graph."""
    room = make_room(len(given.nodes), given.nodes.shape[1])
    for which in range(len(given.epsilon)):
        if kept.facts[which, KIND] < EMPTY:
            room.moment[:] = moment[which]
            leave_frame(
                given, kept, which, rows_of(points[which]), rows_of(pull[which]), rows_of(to_share[which]), cotangent, room,
                to_radius[which], gradients,
            )  # fmt: skip


def memory(given):
    """Room for what is kept; every node is its own distinct node."""
    graphs, (number, features), count = len(given.epsilon), given.nodes.shape, len(given.reference)
    distinct = np.concatenate([np.arange(size) for size in np.diff(given.ptr)])
    return Kept(
        np.zeros(number, np.int64), distinct, np.zeros(number), np.zeros((number, features)), np.zeros((1, 8)),
        np.zeros((graphs, 3, features)), np.zeros((graphs, FACTS)), np.zeros((graphs, count, features + 2)),
    )  # fmt: skip


def entered(nodes, batch, ptr, masses, weights, reference, epsilon, relative):
    count, features = reference.shape
    shares = np.full(count, 1 / count)
    order = engine.arrange(batch, ptr)
    given = Given(nodes, masses, order, ptr, weights, reference, shares, epsilon, relative, 1e-10)
    kept, starts = memory(given), np.zeros((len(epsilon), count, 8))
    enter(given, kept, starts)
    return given, kept, starts[:, :, :features]


def test_the_order_is_that_of_the_specification():
    nodes, batch, masses = problem(torch.float64)
    nodes[batch == 5] = 0  # infinite features have no order
    clouds, order = make_clouds(nodes, batch, None, masses)
    given = (batch.numpy(), clouds.ptr.numpy(), masses.numpy(), np.ones(FEATURES), np.ones((COUNT, FEATURES)))
    _, kept, _ = entered(nodes.numpy(), *given, np.ones(GRAPHS), True)
    assert np.array_equal(kept.order, order.numpy())
    np.testing.assert_allclose(kept.masses, clouds.masses, rtol=1e-15)


def test_equal_keys_keep_their_order_and_long_graphs_are_sorted():
    nodes = torch.randint(40, (3000, 1), generator=torch.Generator().manual_seed(0)).double()
    batch, ptr = np.zeros(3000, np.int64), np.array([0, 3000])
    _, kept, _ = entered(nodes.numpy(), batch, ptr, np.empty(0), np.ones(1), np.ones((1, 1)), np.ones(1), True)
    assert np.array_equal(kept.order, (nodes[:, 0] * np.cos(1.0)).argsort(stable=True).numpy())


def test_offsets_that_do_not_count_the_nodes_are_refused():
    with pytest.raises(ValueError, match="does not count the graphs of 3 nodes"):
        engine.arrange(np.array([0, 0, 1]), np.array([0, 1, 3]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_frames_and_their_gradients_are_those_of_the_specification(weighted, relative):
    nodes, batch, masses = problem(torch.float64)
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    reference, epsilon = random(COUNT, FEATURES), random(GRAPHS).abs()
    rows, b = (value.double().clone().requires_grad_() for value in (nodes, masses))
    level, space = epsilon.clone().requires_grad_(), geometry(weighted)
    weights = space.feature_weights
    clouds, _ = make_clouds(rows, batch, None, b)
    frame = make_frame(clouds, space, level, reference, relative)

    ptr = clouds.ptr.numpy()
    features = np.ones(FEATURES) if weights is None else weights.detach().numpy()
    given, kept, start = entered(
        nodes.numpy(), batch.numpy(), ptr, masses.numpy(), features, reference.numpy(), epsilon.numpy(), relative
    )
    solvable, kind, unit = frame.solvable.numpy(), kept.facts[:, KIND], kept.facts[:, UNIT]
    assert np.array_equal(kind == 0, solvable)
    assert kind.tolist() == [0, 2, 1, 0, 1, 3, 0]
    np.testing.assert_allclose(kept.masses, clouds.masses.detach(), rtol=1e-15)
    np.testing.assert_allclose(kept.frame[:, 0], frame.mean.detach(), rtol=1e-14, atol=1e-15)
    scale = frame.scale.detach().expand(-1, FEATURES).numpy()
    np.testing.assert_allclose(kept.frame[solvable, 1], scale[solvable], rtol=2e-15)
    np.testing.assert_allclose(start[solvable], frame.start.detach()[solvable], rtol=1e-14, atol=1e-14)
    inside = epsilon.numpy() / (1.0 if relative else unit**2)
    np.testing.assert_allclose(inside[solvable], frame.epsilon.detach()[solvable], rtol=1e-14)

    # Any loss of what leaves the frame, and of what the solver meets in it.
    own = frame.solvable[clouds.batch]
    points = torch.where(frame.solvable[:, None, None], random(GRAPHS, COUNT, FEATURES), 0.0)
    cotangent = random(GRAPHS, COUNT, FEATURES)
    to_nodes = torch.where(own[:, None], random(len(batch), FEATURES), 0.0)
    to_masses, to_epsilon = torch.where(own, random(len(batch)), 0.0), torch.where(frame.solvable, random(GRAPHS), 0.0)
    loss = (frame.outside(points) * cotangent).nan_to_num(0.0).sum() + (frame.clouds.nodes * to_nodes).sum()
    loss = loss + (frame.clouds.masses * to_masses).sum() + (frame.epsilon * to_epsilon).sum()
    # Along flat directions points are where they began, or, if that is absolute, stay where they are outside.
    left = torch.where(frame.solvable[:, None, None], random(GRAPHS, COUNT, FEATURES), 0.0)
    stays = frame.outside(points).detach().nan_to_num(0.0) - frame.mean.unsqueeze(1)
    loss = loss + ((frame.start if relative else stays / frame.scale.unsqueeze(1)) * left).sum()
    inputs = (rows, b, level, *space.tensors.values())
    expected = torch.autograd.grad(loss, inputs)

    places_of = [slice(ptr[g], ptr[g + 1]) for g in range(GRAPHS)]
    pull, to_share, ends = np.zeros((GRAPHS, FEATURES, 32)), np.zeros((GRAPHS, 1, 32)), np.zeros((GRAPHS, COUNT, 8))
    for g, own_places in enumerate(places_of):
        size = SIZES[g]
        pull[g, :, :size] = to_nodes[own_places].numpy().T / kept.masses[own_places]
        to_share[g, 0, :size] = to_masses[own_places]
    ends[:, :, :FEATURES] = points
    moment = (left.numpy() * (start if relative else points.numpy())).sum(1)
    to_radius = moment.sum(1) / kept.facts[:, RADIUS] ** 2 if relative else np.zeros(GRAPHS)
    found = Gradients(
        np.zeros(nodes.shape), np.zeros(len(batch)), np.zeros(GRAPHS), np.zeros((GRAPHS, FEATURES)), np.zeros(GRAPHS),
        np.zeros(GRAPHS, np.bool_),
    )  # fmt: skip
    leave(given, kept, ends, pull, to_share, cotangent.numpy(), moment, to_radius, found)
    np.testing.assert_allclose(found.nodes, expected[0], rtol=1e-13, atol=1e-13 * float(expected[0].abs().max()))
    np.testing.assert_allclose(found.masses, expected[1], rtol=1e-13, atol=1e-12 * float(expected[1].abs().max()))
    if weights is not None:
        np.testing.assert_allclose(features * found.weights.sum(0), expected[3], rtol=1e-12, atol=1e-12)
