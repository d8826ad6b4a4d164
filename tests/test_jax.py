"""The JAX door: the bits of torch, exact gradients, and what jit, grad and vmap make of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import flowpool  # noqa: E402
from flowpool.jax import flow_pool, transport_pool  # noqa: E402

IDS = np.array([0, 2, 0, 0, 2, 2, 0, 2, 0])  # graph 1 has no nodes
GRAPHS, POINTS, WIDTH = 3, 2, 3


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)  # for all threads: callbacks run in those of XLA
    yield
    jax.config.update("jax_enable_x64", before)


def nodes(dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((len(IDS), WIDTH)).astype(dtype)


def start(dtype: Any = np.float64) -> np.ndarray:
    return flowpool.references.normal(WIDTH, POINTS).numpy().astype(dtype)


MASSES = np.linspace(0.5, 2.0, len(IDS))
COTANGENT = np.random.default_rng(5).standard_normal((GRAPHS, POINTS, WIDTH))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("jit", [False, True])
def test_flow_pool_has_the_bits_of_torch(dtype: Any, jit: bool) -> None:
    def pool(x: Any, masses: Any) -> Any:
        return flow_pool(x, IDS, start(dtype), num_segments=GRAPHS, masses=masses)

    found = (jax.jit(pool) if jit else pool)(nodes(dtype), MASSES.astype(dtype))
    expected = flowpool.flow_pool(
        torch.from_numpy(nodes(dtype)),
        torch.from_numpy(IDS),
        reference=torch.from_numpy(start(dtype)),
        masses=torch.from_numpy(MASSES.astype(dtype)),
        dim_size=GRAPHS,
    )
    assert found.points.dtype == dtype
    assert np.array_equal(found.points, expected.points.numpy())
    assert found.status.tolist() == expected.status.tolist() == [0, 1, 0]
    assert found.steps.tolist() == expected.steps.tolist()
    np.testing.assert_allclose(found.residual, expected.residual.numpy(), rtol=1e-6)


@pytest.mark.parametrize("levels", [[0.1, 0.2, 0.3], 0.2], ids=["one epsilon per graph", "one for all"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_have_the_bits_of_torch(dtype: Any, levels: Any) -> None:
    cotangent, levels = COTANGENT.astype(dtype), np.array(levels, dtype)

    def loss(x: Any, masses: Any, epsilon: Any) -> Any:
        pooled = flow_pool(x, IDS, start(dtype), num_segments=GRAPHS, masses=masses, epsilon=epsilon)
        return (pooled.points * cotangent).sum()

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(nodes(dtype), MASSES.astype(dtype), levels)
    leaves = [torch.from_numpy(value).requires_grad_() for value in (nodes(dtype), MASSES.astype(dtype), levels)]
    pooled = flowpool.flow_pool(
        leaves[0], torch.from_numpy(IDS), reference=torch.from_numpy(start(dtype)), masses=leaves[1], epsilon=leaves[2],
        dim_size=GRAPHS,
    )  # fmt: skip
    (pooled.points * torch.from_numpy(cotangent)).sum().backward()
    for mine, leaf in zip(found, leaves, strict=True):
        assert mine.dtype == dtype
        assert leaf.grad is not None and float(leaf.grad.abs().max()) > 0
        assert np.array_equal(mine, leaf.grad.numpy())


def test_one_epsilon_for_many_graphs_has_the_gradient_of_torch() -> None:
    """Single precision adds up differently from double: two hundred terms show it."""
    random = np.random.default_rng(0)
    x, ids = random.standard_normal((1000, WIDTH)).astype(np.float32), np.arange(1000) % 200

    def loss(epsilon: Any) -> Any:
        return flow_pool(x, ids, start(np.float32), num_segments=200, epsilon=epsilon).points.sum()

    levels = np.array([0.1, 0.4], np.float32)
    found = jax.vmap(jax.grad(loss))(levels)
    for level, gradient in zip(levels, found, strict=True):
        leaf = torch.tensor(level).requires_grad_()
        reference = torch.from_numpy(start(np.float32))
        flowpool.flow_pool(
            torch.from_numpy(x), torch.from_numpy(ids), reference=reference, epsilon=leaf
        ).points.sum().backward()
        assert leaf.grad is not None
        assert float(jax.grad(loss)(level)) == float(gradient) == float(leaf.grad)


def test_gradients_are_those_of_finite_differences() -> None:
    def loss(x: Any, masses: Any, epsilon: Any) -> Any:
        pooled = flow_pool(x, IDS, start(), num_segments=GRAPHS, masses=masses, epsilon=epsilon, tolerance=1e-11)
        return (pooled.points * COTANGENT).sum()

    inputs = (jnp.asarray(nodes()), jnp.asarray(MASSES), jnp.asarray(0.2))
    directions = [np.random.default_rng(place).standard_normal(value.shape) for place, value in enumerate(inputs)]
    gradients = jax.grad(loss, argnums=(0, 1, 2))(*inputs)
    for place in range(3):
        step = 1e-5 * directions[place]
        ahead, behind = (
            loss(*(v + sign * step if k == place else v for k, v in enumerate(inputs))) for sign in (1, -1)
        )
        assert float((gradients[place] * directions[place]).sum()) == pytest.approx(
            float(ahead - behind) / 2e-5, rel=1e-5
        )


@pytest.mark.parametrize("free", [False, True])
def test_transport_pool_and_its_gradients_have_the_bits_of_torch(free: bool) -> None:
    def run(x: Any, reference: Any, epsilon: Any, masses: Any) -> Any:
        return transport_pool(x, IDS, reference, num_segments=GRAPHS, epsilon=epsilon, free=free, masses=masses)

    def loss(*inputs: Any) -> Any:
        received = run(*inputs)
        return (received.points * COTANGENT).sum() + received.variances.sum() + (received.masses**2).sum()

    inputs = (nodes(), start(), np.array(0.7), MASSES)
    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*inputs)
    leaves = [torch.from_numpy(value.copy()).requires_grad_() for value in inputs]
    received = flowpool.transport_pool(
        leaves[0], torch.from_numpy(IDS), reference=leaves[1], epsilon=leaves[2], free=free, masses=leaves[3], dim_size=GRAPHS
    )  # fmt: skip
    for mine, theirs in zip(run(*inputs), received[:3], strict=True):
        assert np.array_equal(mine, theirs.detach().numpy())
    total = (
        (received.points * torch.from_numpy(COTANGENT)).sum()
        + received.variances.sum()
        + received.masses.square().sum()
    )
    total.backward()
    for mine, leaf in zip(found, leaves, strict=True):
        assert np.array_equal(mine, leaf.grad.numpy())


def test_vmap_gives_what_single_calls_give() -> None:
    many = np.stack([nodes(seed=seed) for seed in range(6)]).reshape(2, 3, len(IDS), WIDTH)

    def loss(x: Any) -> Any:
        return (flow_pool(x, IDS, start(), num_segments=GRAPHS).points * COTANGENT).sum()

    values = jax.vmap(jax.vmap(loss))(many)
    gradients = jax.jit(jax.vmap(jax.vmap(jax.grad(loss))))(many)
    for row in range(2):
        for place in range(3):
            assert float(values[row, place]) == pytest.approx(float(loss(many[row, place])), rel=1e-12)
            assert np.array_equal(gradients[row, place], jax.grad(loss)(many[row, place]))


def test_vmap_over_references_epsilons_and_ids() -> None:
    references = np.stack([start(), start() + 0.5])
    ids = np.stack([IDS, IDS[::-1]])
    levels = np.array([0.1, 0.4])

    def pool(reference: Any, ids: Any, epsilon: Any) -> Any:
        return flow_pool(nodes(), ids, reference, num_segments=GRAPHS, epsilon=epsilon).points

    found = jax.vmap(pool)(references, ids, levels)
    for place in range(2):
        assert np.array_equal(found[place], pool(references[place], ids[place], jnp.asarray(levels[place])))
    gradient = jax.vmap(jax.grad(lambda epsilon: pool(start(), IDS, epsilon).sum()))(levels)
    single = jax.grad(lambda epsilon: pool(start(), IDS, epsilon).sum())
    assert np.array_equal(gradient, [single(level) for level in levels])


def test_vmap_of_transport_pool_gives_each_its_own_gradient() -> None:
    many = np.stack([nodes(seed=seed) for seed in range(2)])

    def loss(x: Any, reference: Any) -> Any:
        return transport_pool(x, IDS, reference, num_segments=GRAPHS, epsilon=0.5).variances.sum()

    gradients = jax.vmap(jax.grad(loss, argnums=1), in_axes=(0, None))(many, start())
    for place in range(2):
        assert np.array_equal(gradients[place], jax.grad(loss, argnums=1)(many[place], start()))


def test_a_backward_pass_finds_its_forward_pass_or_pools_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def watched(x: torch.Tensor, *given: Any, **options: Any) -> Any:
        calls.append(x.requires_grad)
        return original(x, *given, **options)

    original = flowpool.flow_pool
    monkeypatch.setattr(flowpool, "flow_pool", watched)
    pool = partial(flow_pool, segment_ids=IDS, reference=start(), num_segments=GRAPHS)
    many = [nodes(seed=seed) for seed in range(6)]
    pullbacks = [jax.vjp(lambda x: pool(x).points, x)[1] for x in many]
    assert calls == [True] * 6
    gradients = [pullback(jnp.asarray(COTANGENT))[0] for pullback in reversed(pullbacks)]
    assert calls == [True] * 8  # four were still known
    again = pullbacks[-1](jnp.asarray(COTANGENT))[0]
    assert np.array_equal(again, gradients[0])
    for x, gradient in zip(reversed(many), gradients, strict=True):
        leaf = torch.from_numpy(x).requires_grad_()
        points = original(leaf, torch.from_numpy(IDS), reference=torch.from_numpy(start()), dim_size=GRAPHS).points
        (points * torch.from_numpy(COTANGENT)).sum().backward()
        assert np.array_equal(gradient, leaf.grad.numpy())
    del calls[:]
    pool(many[0])
    assert calls == [False]  # without a gradient nothing is kept


def test_padding_is_left_out() -> None:
    padded = np.concatenate([nodes(), np.full((4, WIDTH), np.nan)])
    ids, masses = np.concatenate([IDS, [GRAPHS, GRAPHS, -1, 99]]), np.concatenate([MASSES, [1.0] * 4])

    def pool(x: Any, ids: Any, masses: Any) -> Any:
        return flow_pool(x, ids, start(), num_segments=GRAPHS, masses=masses).points

    assert np.array_equal(pool(padded, ids, masses), pool(nodes(), IDS, MASSES))
    assert np.array_equal(
        jax.vmap(pool, in_axes=(0, None, None))(padded[None], ids, masses)[0], pool(nodes(), IDS, MASSES)
    )
    gradient = jax.grad(lambda x: (pool(x, ids, masses) * COTANGENT).sum())(padded)
    assert (gradient[len(IDS) :] == 0).all()
    assert np.array_equal(gradient[: len(IDS)], jax.grad(lambda x: (pool(x, IDS, MASSES) * COTANGENT).sum())(nodes()))


def test_half_precision_is_pooled_in_single() -> None:
    x = jnp.asarray(nodes(), jnp.bfloat16)
    found = flow_pool(x, IDS, start(), num_segments=GRAPHS).points
    single = flow_pool(x.astype(jnp.float32), IDS, start(np.float32), num_segments=GRAPHS).points
    assert found.dtype == jnp.bfloat16
    assert np.array_equal(found, single.astype(jnp.bfloat16))
    assert jax.grad(lambda x: flow_pool(x, IDS, start(), num_segments=GRAPHS).points.sum())(x).dtype == jnp.bfloat16


def test_large_inputs_do_not_lock_up() -> None:
    """Arrays that XLA hands over without a copy are the ones that wait for each other."""
    x = np.random.default_rng(0).standard_normal((200_000, 4))
    ids = np.arange(len(x)) % 4000

    @jax.jit
    def loss(x: Any) -> Any:
        received = transport_pool(jnp.tanh(x), ids, np.eye(4), num_segments=4000, epsilon=0.5)
        return (received.points**2).sum()

    value, gradient = jax.value_and_grad(loss)(x)
    assert np.isfinite(value) and np.isfinite(gradient).all() and float(jnp.abs(gradient).max()) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros(3)}, r"x is float64\(3,\); expected real numbers"),
        ({"x": np.zeros((9, 3), int)}, "x is int64"),
        ({"segment_ids": IDS[1:]}, r"segment_ids is int64\(8,\); expected integers, \(9,\)"),
        ({"segment_ids": IDS * 1.0}, "segment_ids is float64"),
        ({"reference": np.zeros((2, 4))}, r"reference is float64\(2, 4\); expected real numbers of shape \(2, 3\)"),
        ({"reference": np.zeros(3)}, r"reference has shape \(3,\)"),
        ({"masses": MASSES[1:]}, r"masses is float64\(8,\); expected real numbers of shape \(9,\)"),
        ({"point_masses": np.ones(3)}, r"point_masses is float64\(3,\)"),
        ({"num_segments": -1}, "num_segments is -1"),
        ({"num_segments": 3.0}, "num_segments is 3.0; pass the number of graphs"),
        ({"x": np.zeros((9, 0)), "reference": np.zeros((2, 0))}, "with at least one feature"),
        ({"cost": "manhattan"}, "Unknown cost 'manhattan'"),
        ({"epsilon": -1.0}, "epsilon is -1"),
        ({"engine": "gpu"}, "Unknown engine 'gpu'"),
        ({"epsilon": np.full(2, 0.1)}, r"epsilon is float64\(2,\); expected real numbers of shape \(3,\)"),
    ],
)
def test_mistakes_are_told_when_the_function_is_traced(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"x": nodes(), "segment_ids": IDS, "reference": start(), "num_segments": GRAPHS} | change
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: flow_pool(**given))


def test_the_number_of_graphs_cannot_be_traced() -> None:
    with pytest.raises(ValueError, match="known when the function is traced"):
        jax.jit(lambda count: flow_pool(nodes(), IDS, start(), num_segments=count).points)(GRAPHS)


def test_wrong_values_are_told_when_it_runs() -> None:
    with pytest.raises(Exception, match="Rows 0 and 1 of the reference are equal"):
        flow_pool(nodes(), IDS, np.zeros((2, WIDTH)), num_segments=GRAPHS)
