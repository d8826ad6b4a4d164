"""Order, frames and their gradients by kernels against the torch modules that specify them."""

import numpy as np
import pytest
import torch

from flowpool.core.frame import make_frame
from flowpool.core.measures import make_clouds
from flowpool.costs import Mahalanobis, SquaredEuclidean, bind
from flowpool.kernels import batch as engine
from flowpool.kernels.frame import enter_frames, leave_frames

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_order_is_that_of_the_specification(dtype):
    nodes, batch, masses = problem(dtype)
    nodes[batch == 5] = 0  # infinite features have no order
    clouds, order = make_clouds(nodes.double(), batch, None, masses.double())
    found = engine.arrange(nodes.numpy(), batch.numpy(), clouds.ptr.numpy())
    assert np.array_equal(found, order.numpy())


def test_equal_keys_keep_their_order_and_long_graphs_are_sorted():
    nodes = torch.randint(40, (3000, 1), generator=torch.Generator().manual_seed(0)).double()
    order = engine.arrange(nodes.numpy(), np.zeros(3000, np.int64), np.array([0, 3000]))
    assert np.array_equal(order, (nodes[:, 0] * np.cos(1.0)).argsort(stable=True).numpy())


def test_offsets_that_do_not_count_the_nodes_are_refused():
    with pytest.raises(ValueError, match="does not count the graphs of 3 nodes"):
        engine.arrange(np.zeros((3, 1)), np.array([0, 0, 1]), np.array([0, 1, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_frames_and_their_gradients_are_those_of_the_specification(dtype, weighted, relative):
    nodes, batch, masses = problem(dtype)
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    reference, epsilon = random(COUNT, FEATURES), random(GRAPHS).abs()
    rows, b = (value.double().clone().requires_grad_() for value in (nodes, masses))
    level, space = epsilon.clone().requires_grad_(), geometry(weighted)
    weights = space.feature_weights
    clouds, order = make_clouds(rows, batch, None, b)
    frame = make_frame(clouds, space, level, reference, relative)

    ptr, places = clouds.ptr.numpy(), order.numpy()
    given = nodes.numpy()[places]
    made = engine.make_batch(given, engine.share(masses.numpy(), places, ptr), ptr)
    features = np.ones(FEATURES) if weights is None else weights.detach().numpy()
    frames = engine.Frames.of(engine.frame(made, features))
    start, inside = engine.begin(frames, reference.numpy(), np.full(COUNT, 1 / COUNT), epsilon.numpy(), relative)
    solvable = frame.solvable.numpy()
    assert np.array_equal(frames.kind == 0, solvable)
    assert frames.kind.tolist() == [0, 2, 1, 0, 1, 3, 0]
    np.testing.assert_allclose(made.masses, clouds.masses.detach(), rtol=1e-15)
    np.testing.assert_allclose(frames.mean, frame.mean.detach(), rtol=1e-14, atol=1e-15)
    scale = frame.scale.detach().expand(-1, FEATURES).numpy()
    np.testing.assert_allclose(frames.scale[solvable], scale[solvable], rtol=2e-15)
    np.testing.assert_allclose(start[solvable], frame.start.detach()[solvable], rtol=1e-14, atol=1e-14)
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
    begun = engine._begun(left.numpy(), start if relative else points.numpy(), frames.radius, relative)
    inputs = (rows, b, level, *space.tensors.values())
    expected = torch.autograd.grad(loss, inputs)

    chosen = np.flatnonzero(frames.kind < 2)
    framed = np.zeros((len(batch), FEATURES))
    enter_frames(given, ptr, chosen, frames.mean, frames.scale, framed)
    found, shares, by_graph = np.zeros_like(given), np.zeros(len(batch)), np.zeros((GRAPHS, FEATURES))
    leave_frames(
        framed, made.masses, ptr, places, chosen, frames.kind, frames.scale, frames.share, features, points.numpy(),
        cotangent.numpy(), relative, to_nodes.numpy(), to_masses.numpy(), *begun, np.empty((6, FEATURES)), found, shares, by_graph,
    )  # fmt: skip
    precision = {torch.float32: 2e-7, torch.float64: 1e-13}[dtype]
    np.testing.assert_allclose(found, expected[0], rtol=precision, atol=1e-13 * float(expected[0].abs().max()))
    back = engine.unshare(shares, masses.numpy(), places, ptr)
    np.testing.assert_allclose(back, expected[1], rtol=precision, atol=1e-12 * float(expected[1].abs().max()))
    unit = 1.0 if relative else frames.unit**2
    np.testing.assert_allclose((to_epsilon.numpy() / unit)[solvable], expected[2][solvable], rtol=1e-13)
    if weights is not None:
        np.testing.assert_allclose(features * by_graph.sum(0), expected[3], rtol=1e-12, atol=1e-12)
