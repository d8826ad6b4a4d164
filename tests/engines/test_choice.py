import logging

import pytest
import torch
from helpers import mutag_clouds

from flowpool import flow_pool
from flowpool.engines import choice as engines
from flowpool.engines import compiled as kernels
from flowpool.kernels.singular import adjoint_singular

GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(11, 2, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.tensor([0] * 6 + [1] * 5)
REFERENCE = torch.randn(3, 2, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("level", [1.0, 0.3, 0.1])
def test_engines_agree_on_mutag(level):  # benchmarks/engines.py looks at all 188, and at NCI1
    features, batch = mutag_clouds(width=8, count=47)
    reference = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.randn(47, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = {}
    for engine in ("torch", "compiled"):
        nodes = features.clone().requires_grad_()
        epsilon = torch.full((47,), level, dtype=torch.float64, requires_grad=True)
        pooled = flow_pool(nodes, batch, reference=reference, epsilon=epsilon, engine=engine, tolerance=1e-10)
        gradients = torch.autograd.grad((pooled.points * weights).sum(), (nodes, epsilon))
        found[engine] = (pooled, *gradients)
    one, other = found["torch"], found["compiled"]
    gap = (one[0].points - other[0].points).abs().amax((1, 2))
    isolated = ~(one[0].backward.damped | other[0].backward.damped)
    assert int(isolated.sum()) >= 46
    assert gap[isolated].max() < 1e-9
    own = isolated[batch]
    assert (one[1] - other[1])[own].norm() < 1e-7 * one[1][own].norm()
    assert (one[2] - other[2])[isolated].norm() < 1e-7 * one[2][isolated].norm()


@pytest.mark.parametrize("level", [1.0, 0.3])
def test_engines_make_the_same_steps_where_they_solve_roughly(level):
    """Twelve kinds of nodes and eight points: when each engine had its own rough solutions, some graphs parted ways."""
    generator = torch.Generator().manual_seed(1)
    kinds = torch.randn(150, 12, 5, generator=generator, dtype=torch.float64).relu()
    kinds = kinds @ torch.randn(5, 20, generator=generator, dtype=torch.float64)
    kinds = kinds + 0.1 * torch.randn(150, 12, 20, generator=generator, dtype=torch.float64)
    chosen = torch.randint(12, (150, 24), generator=generator)
    nodes = kinds[torch.arange(150)[:, None], chosen].flatten(0, 1)
    batch = torch.arange(150).repeat_interleave(24)
    reference = torch.randn(8, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = (
        flow_pool(nodes, batch, reference=reference, epsilon=level, engine=engine, tolerance=1e-10)
        for engine in ("torch", "compiled")
    )
    # One of them, at level 0.3, crosses a plain with gradients of 1e-7 in thirty steps, where rounding grows to any size.
    assert int(((one.points - other.points).abs().amax((1, 2)) < 1e-8).sum()) >= 149
    assert int((one.steps == other.steps).sum()) >= 147


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cost": "euclidean"}, "squared Euclidean cost"),
        ({"debias": False}, "debias=False"),
        ({"step_size": 0.1}, "step_size is given"),
        ({"point_masses": torch.ones(3, dtype=torch.float64, requires_grad=True)}, "no gradient in point_masses"),
        ({"gradient": "unrolled"}, "unrolled"),
    ],
)
def test_compiled_engine_says_what_it_cannot_do(options, reason):
    with pytest.raises(ValueError, match=reason):
        flow_pool(NODES, BATCH, reference=REFERENCE, engine="compiled", **options)


def test_without_numba_torch_takes_over_and_says_so_once(monkeypatch, caplog):
    expected = flow_pool(NODES, BATCH, reference=REFERENCE, engine="torch", tolerance=1e-10)
    monkeypatch.setattr(engines, "HAS_NUMBA", False)
    monkeypatch.setattr(engines, "_said", set())
    with caplog.at_level(logging.WARNING, "flowpool"):
        for _ in range(2):
            found = flow_pool(NODES, BATCH, reference=REFERENCE, tolerance=1e-10)
    assert torch.equal(found.points, expected.points)
    assert [record.message for record in caplog.records] == [
        "numba is not installed: pooling with the torch engine, which gives the same points more slowly."
    ]
    with pytest.raises(ValueError, match="numba is not installed"):
        flow_pool(NODES, BATCH, reference=REFERENCE, engine="compiled")


@pytest.mark.parametrize("ridge", [1e-18, 1e-3])
def test_the_eigenvectors_of_a_singular_graph_give_the_gradient_of_the_torch_engine(ridge):
    nodes = torch.randn(3, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    wide, batch = nodes.repeat_interleave(3, 0), torch.tensor([0] * 9)  # three distinct nodes for seven points
    reference = torch.randn(7, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weights = torch.randn(1, 7, 12, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    pooled = flow_pool(wide, batch, reference=reference, epsilon=0.5, engine="compiled", tolerance=1e-9)
    problem, ended, solvable, _, _ = pooled._solution
    expected = engines.adjoint(problem, solvable, ended, weights, ridge, {"nodes", "masses", "epsilon"})
    assert bool(expected.damped.all())
    given = (*problem.clouds.cloud(0), *(value[0] for value in ended[:3]), problem.point_masses)
    arrays = [value.numpy() for value in given]
    cotangent = weights[0].numpy()
    for found in (
        adjoint_singular(*arrays, float(problem.epsilon), ridge, cotangent),
        kernels._wide_adjoint(*arrays, float(problem.epsilon), ridge, cotangent),
    ):
        assert found is not None and found.damped
        for name in ("nodes", "masses"):
            value = torch.from_numpy(getattr(found, name))
            torch.testing.assert_close(value, getattr(expected, name), rtol=1e-9, atol=1e-9)
        assert found.epsilon == pytest.approx(float(expected.epsilon), rel=1e-9, abs=1e-9)
