"""What a device would be asked for: operations and waits of the torch form, whole graphs, and kernels that fail."""

import logging
import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn.aggr import GraphMultisetTransformer

from flowpool import FlowReadout, transport_pool
from flowpool.kernels.errors import KernelError
from flowpool.step import receive as step

GENERATOR = torch.Generator().manual_seed(0)
INDEX = torch.arange(6).repeat_interleave(torch.tensor([7, 3, 9, 5, 4, 8]))
NODES = torch.randn(len(INDEX), 4, generator=GENERATOR)
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="the default backend of torch.compile needs a C++ compiler, and there is none",
)


class Counting(TorchDispatchMode):
    """Counts operations that are more than another view of the same numbers."""

    def __init__(self):
        super().__init__()
        self.counted = 0

    def __torch_dispatch__(self, operation, _types, arguments=(), options=None):
        self.counted += not operation.is_view
        return operation(*arguments, **(options or {}))


def operations(layer):
    """Of a forward and a backward pass."""
    nodes = NODES.clone().requires_grad_()
    with Counting() as mode:
        layer(nodes, INDEX, dim_size=6).square().sum().backward()
    return mode.counted


def test_the_lean_form_takes_few_operations(monkeypatch):
    """As on a device: nobody looks at values, so that a few steps of Newton's method must do."""
    for module in ("flowpool.step.in_torch", "flowpool.step.receive", "flowpool.nn.readout", "flowpool.step.pool"):
        monkeypatch.setattr(f"{module}.may_look", lambda values: False, raising=False)
    monkeypatch.setattr(
        "flowpool.step.pool.looked_at", lambda *given: (torch.tensor([0, 7, 10, 19, 24, 28, 36]), INDEX)
    )
    found, beside = operations(FlowReadout(4, 3, engine="torch")), operations(GraphMultisetTransformer(4, k=3))
    print(f"operations: FlowReadout {found}, GraphMultisetTransformer {beside}")
    assert found < 900


def values(engine, **options):
    leaf, reference = NODES.double().requires_grad_(), torch.eye(3, 4).double().requires_grad_()
    found = transport_pool(leaf, INDEX, reference=reference, engine=engine, dim_size=6, **options)
    total = found.points.square().sum() + found.deviations.sum()
    return [found.masses, found.points, *torch.autograd.grad(total, (leaf, reference))]


@needs_compiler
@pytest.mark.parametrize("engine", ["compiled", "torch"])
def test_the_default_backend_of_torch_compile_gives_the_same(engine):
    torch.compiler.reset()
    readout = FlowReadout(4, 3, engine=engine)
    expected = readout.eval()(NODES, INDEX, dim_size=6)
    traced = torch.compile(lambda x: readout(x, INDEX, dim_size=6), fullgraph=True, dynamic=True)
    leaf = NODES.clone().requires_grad_()
    found = traced(leaf)
    assert torch.allclose(found, expected, atol=1e-5)
    found.square().sum().backward()
    other = NODES.clone().requires_grad_()
    readout(other, INDEX, dim_size=6).square().sum().backward()
    assert torch.allclose(leaf.grad, other.grad, atol=1e-4 * float(other.grad.abs().max()))


@pytest.mark.parametrize("broken", ["survey", "receive", "adjoint"])
def test_where_a_kernel_fails_torch_takes_over(broken, monkeypatch, caplog):
    from flowpool.step import receive_kernels as kernels

    def fail(*given):
        raise KernelError(f"{broken} could not be compiled: no reason")

    monkeypatch.setattr(step, "_broken", [])
    monkeypatch.setattr(kernels, broken, fail)
    expected = values("torch")
    with caplog.at_level(logging.WARNING, "flowpool"):
        for found, wanted in zip(values("auto"), expected, strict=True):
            assert torch.allclose(found, wanted, atol=1e-10)
    assert step._broken
    with pytest.raises(ValueError, match=f"The compiled engine cannot be used: {broken} could not be compiled"):
        values("compiled")


def test_a_first_call_inside_torch_compile_without_kernels(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(step, "_broken", ["numba cannot be used"])
    readout = FlowReadout(4, 3).eval()
    traced = torch.compile(lambda x: readout(x, INDEX, dim_size=6), fullgraph=True, backend="aot_eager")
    assert torch.allclose(traced(NODES), readout(NODES, INDEX, dim_size=6), atol=1e-5)


def test_the_operators_keep_their_promises():
    leaf, status = NODES.double(), torch.zeros(6, dtype=torch.int8)
    ptr = torch.tensor([0, 7, 10, 19, 24, 28, 36])
    table = torch.stack([torch.zeros(4), *torch.ones(4, 4)]).double()
    points = torch.eye(3, 4).double()
    given = (
        leaf,
        None,
        points,
        torch.full((3,), 1 / 3).double(),
        torch.full((6,), 0.5).double(),
        table,
        INDEX,
        ptr,
        INDEX,
    )
    checks = ("test_schema", "test_faketensor")
    operators = torch.ops.flowpool
    torch.library.opcheck(operators.survey_by_kernels, (leaf, None, INDEX, ptr, 1e150), test_utils=checks)
    order, status, statistics = step.survey_by_kernels(leaf, None, INDEX, ptr, 1e150)
    given = (*given[:-1], order, status, 8)
    rows, found, portions, _, _ = step.receive_by_kernels(*given)
    torch.library.opcheck(operators.receive_by_kernels, given, test_utils=checks[:1])
    back = (*given, False, found, portions, torch.ones_like(rows), torch.ones(6, 3).double())
    torch.library.opcheck(operators.adjoint_by_kernels, back, test_utils=checks)
    total = torch.ones(8).double()
    less = (leaf, leaf, None, INDEX, status, table, total, statistics)
    torch.library.opcheck(operators.less_by_kernels, less, test_utils=checks)


def test_a_huge_feature_is_named_and_spoils_no_statistics():
    nodes = NODES.clone()
    nodes[8, 1] = 1e20
    readout = FlowReadout(4, 3, on_failure="ignore")
    rows = readout(nodes, INDEX)
    assert str(readout.report).startswith("6 graphs: 5 OK, 1 NONFINITE")
    assert rows[1].isnan().all() and rows[[0, 2, 3, 4, 5]].isfinite().all()
    assert float(readout.node_norm.running_var.max()) < 10


@pytest.mark.parametrize("engine", ["compiled", "torch"])
def test_shares_are_right_or_their_error_is_told(engine):
    """Skewed masses and small epsilon, by which shares were once off by per cents without a word."""
    generator = torch.Generator().manual_seed(15)
    nodes = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    masses = torch.rand(30, generator=generator, dtype=torch.float64)
    reference = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    for epsilon in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        found = transport_pool(nodes, reference=reference, masses=masses, epsilon=epsilon, engine=engine)
        off = float((found.masses * 2 - 1).abs().max())
        assert off < 1e-9 or int(found.status) and float(found.residual) == pytest.approx(off, rel=1e-6)
        assert epsilon < (1e-4 if engine == "compiled" else 1e-3) or int(found.status) == 0
