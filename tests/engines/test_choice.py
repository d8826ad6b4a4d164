import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import mutag_clouds

import flowpool
from flowpool import flow_pool
from flowpool.engines import choice
from flowpool.kernels.errors import KernelError

GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(11, 2, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.tensor([0] * 6 + [1] * 5)
REFERENCE = torch.randn(3, 2, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1.0, 0.3, 0.1])
def test_engines_agree_on_mutag(level):  # benchmarks/engines.py looks at all 188, and at NCI1
    features, batch = mutag_clouds(width=8, count=24)
    reference = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.randn(24, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = {}
    for engine in ("torch", "compiled"):
        nodes = features.clone().requires_grad_()
        epsilon = torch.full((24,), level, dtype=torch.float64, requires_grad=True)
        pooled = flow_pool(nodes, batch, reference=reference, epsilon=epsilon, engine=engine, tolerance=1e-10)
        gradients = torch.autograd.grad((pooled.points * weights).sum(), (nodes, epsilon))
        found[engine] = (pooled, *gradients)
    one, other = found["torch"], found["compiled"]
    gap = (one[0].points - other[0].points).abs().amax((1, 2))
    isolated = ~(one[0].backward.damped | other[0].backward.damped)
    assert int(isolated.sum()) >= 23
    assert gap[isolated].max() < 1e-9
    own = isolated[batch]
    assert (one[1] - other[1])[own].norm() < 1e-7 * one[1][own].norm()
    assert (one[2] - other[2])[isolated].norm() < 1e-7 * one[2][isolated].norm()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1.0, 0.3])
def test_engines_end_in_the_same_minima_after_nearly_as_many_steps(level):
    """Twelve kinds of nodes and eight points: when each engine had its own rough solutions, some graphs parted ways."""
    generator = torch.Generator().manual_seed(1)
    kinds = torch.randn(40, 12, 5, generator=generator, dtype=torch.float64).relu()
    kinds = kinds @ torch.randn(5, 20, generator=generator, dtype=torch.float64)
    kinds = kinds + 0.1 * torch.randn(40, 12, 20, generator=generator, dtype=torch.float64)
    chosen = torch.randint(12, (40, 24), generator=generator)
    nodes = kinds[torch.arange(40)[:, None], chosen].flatten(0, 1)
    batch = torch.arange(40).repeat_interleave(24)
    reference = torch.randn(8, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = (
        flow_pool(nodes, batch, reference=reference, epsilon=level, engine=engine, tolerance=1e-10)
        for engine in ("torch", "compiled")
    )
    # A graph may cross a plain with gradients of 1e-7 in thirty steps, where rounding grows to any size.
    assert int(((one.points - other.points).abs().amax((1, 2)) < 1e-8).sum()) >= 39
    # Kernels know an implicit step to one digit, torch knows it exactly: here and there that is a step more or less.
    assert float((one.steps - other.steps).abs().sum()) <= 0.05 * float(other.steps.sum())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cost": "cosine"}, "squared Euclidean cost"),
        ({"debias": False}, "debias=False"),
        ({"step_size": 0.1}, "step_size is given"),
        ({"point_masses": torch.ones(3, dtype=torch.float64, requires_grad=True)}, "no gradient in point_masses"),
        ({"gradient": "unrolled"}, "unrolled"),
    ],
)
def test_compiled_engine_says_what_it_cannot_do(options, reason):
    with pytest.raises(ValueError, match=reason):
        flow_pool(NODES, BATCH, reference=REFERENCE, engine="compiled", **options)


@pytest.fixture
def fresh(monkeypatch):
    """A process that has neither said nor learned anything about its engines."""
    monkeypatch.setattr(choice, "_said", set())
    monkeypatch.setattr(choice, "_broken", [])


def pooled_twice(caplog):
    """Points by ``engine="auto"``, and what was said while pooling twice."""
    with caplog.at_level(logging.WARNING, "flowpool"):
        for _ in range(2):
            found = flow_pool(NODES, BATCH, reference=REFERENCE, tolerance=1e-10)
    return found.points, [record.message for record in caplog.records]


def test_without_kernels_torch_takes_over_and_says_so_once(fresh, monkeypatch, caplog):
    expected = flow_pool(NODES, BATCH, reference=REFERENCE, engine="torch", tolerance=1e-10)
    monkeypatch.setattr(choice, "missing_kernels", lambda: "numba cannot be used (ImportError: too old)")
    found, said = pooled_twice(caplog)
    assert torch.equal(found, expected.points)
    assert len(said) == 1 and said[0].startswith("numba cannot be used (ImportError: too old): pooling with the torch")
    with pytest.raises(ValueError, match="compiled engine cannot be used: numba cannot be used.*too old"):
        flow_pool(NODES, BATCH, reference=REFERENCE, engine="compiled")


def test_kernels_that_cannot_be_compiled_are_given_up_and_torch_takes_over(fresh, monkeypatch, caplog):
    from flowpool.kernels import batch as kernels

    def fails(*_):
        raise KernelError("order_nodes could not be compiled: no such instruction")

    expected = flow_pool(NODES, BATCH, reference=REFERENCE, engine="torch", tolerance=1e-10)
    monkeypatch.setattr(kernels, "arrange", fails)
    with pytest.raises(ValueError, match="compiled engine cannot be used: order_nodes could not be compiled"):
        flow_pool(NODES, BATCH, reference=REFERENCE, engine="compiled")
    found, said = pooled_twice(caplog)
    assert torch.equal(found, expected.points)
    assert len(said) == 1 and "order_nodes could not be compiled" in said[0] and "torch engine" in said[0]
    with pytest.raises(ValueError, match="compiled engine cannot be used: order_nodes could not be compiled"):
        flow_pool(NODES, BATCH, reference=REFERENCE, engine="compiled")


BROKEN_NUMBA = """
import logging, sys
said = []
class Keep(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("flowpool").addHandler(Keep())
import torch
from flowpool import flow_pool
x = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
for _ in range(2):
    points = flow_pool(x, reference=x[:3]).points
assert torch.equal(points, flow_pool(x, reference=x[:3], engine="torch").points)
try:
    flow_pool(x, reference=x[:3], engine="compiled")
except ValueError as error:
    print(error)
print(len(said), said[0])
"""


@pytest.mark.parametrize("reason", ["Numba needs NumPy 2.2 or less. Got NumPy 2.4.", None])
def test_a_numba_that_cannot_be_imported_is_no_end(tmp_path, reason):
    """An old Numba beside a new NumPy raises when it is imported; or there is none at all."""
    (tmp_path / "numba").mkdir()
    text = f"raise ImportError({reason!r})" if reason else "raise ModuleNotFoundError(\"No module named 'numba'\")"
    (tmp_path / "numba" / "__init__.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), str(Path(flowpool.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_NUMBA], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    refused, said = done.stdout.strip().splitlines()
    assert (reason or "No module named 'numba'") in refused and "engine='torch'" in refused
    assert said.startswith("1 numba cannot be used") and "pooling with the torch engine" in said


def many_points(kind, num_points=7):
    generator = torch.Generator().manual_seed(4)
    nodes = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    if kind == "twins":
        nodes = nodes.repeat_interleave(3, 0)  # three distinct nodes
    reference = torch.randn(num_points, 12, generator=generator, dtype=torch.float64)
    return nodes, reference, torch.randn(1, num_points, 12, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("ridge", [1e-12, 1e-3])
@pytest.mark.parametrize("kind", ["twins", "few nodes"])
def test_singular_graphs_have_the_same_gradient_in_both_engines(kind, ridge):
    nodes, reference, weights = many_points(kind)
    found = {}
    for engine in ("torch", "compiled"):
        leaf = nodes.clone().requires_grad_()
        level = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        masses = torch.ones(len(nodes), dtype=torch.float64, requires_grad=True)
        pooled = flow_pool(
            leaf, reference=reference, masses=masses, epsilon=level, engine=engine, tolerance=1e-9, ridge=ridge
        )
        found[engine] = pooled, torch.autograd.grad((pooled.points * weights).sum(), (leaf, masses, level))
        assert pooled.converged.all() and pooled.backward.damped.all()
    (one, ours), (other, theirs) = found["torch"], found["compiled"]
    assert torch.equal(one.status, other.status)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(ours[0].abs().max()))


@pytest.mark.parametrize("engine", ["torch", "compiled"])
def test_an_engine_is_not_called_by_the_other(engine, monkeypatch):
    from flowpool.engines import compiled, torch_engine

    def forbidden(*_):
        raise AssertionError("the other engine was called")

    other = torch_engine if engine == "compiled" else compiled
    for name in ("solve", "adjoint"):
        monkeypatch.setattr(other, name, forbidden)
    nodes, reference, weights = many_points("few nodes")
    leaf = nodes.clone().requires_grad_()
    (flow_pool(leaf, reference=reference, engine=engine).points * weights).sum().backward()
    assert leaf.grad.isfinite().all()
