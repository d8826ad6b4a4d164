import pytest
import torch
from torch.library import opcheck

from flowpool import FlowPool, flow_pool
from flowpool.engines import operators as ops

GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(14, 2, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.tensor([2] * 3 + [0] * 6 + [2] * 5)
MASSES = torch.rand(14, generator=GENERATOR, dtype=torch.float64) + 0.2
REFERENCE = torch.randn(3, 2, generator=GENERATOR, dtype=torch.float64)


def pool(nodes, masses, batch):
    return flow_pool(nodes, batch, reference=REFERENCE, masses=masses, dim_size=4, epsilon=0.3).points


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_whole_graph_compilation_equals_eager(backend):
    traced = torch.compile(pool, fullgraph=True, backend=backend)
    weights = torch.arange(24.0, dtype=torch.float64).view(4, 3, 2)
    results = []
    for function in (pool, traced):
        nodes, masses = NODES.clone().requires_grad_(), MASSES.clone().requires_grad_()
        points = function(nodes, masses, BATCH)
        results.append((points.detach(), *torch.autograd.grad((points * weights).sum(), (nodes, masses))))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_traced_gradient_needs_no_masses(backend):
    def plain(nodes):
        return flow_pool(nodes, BATCH, reference=REFERENCE, dim_size=4, epsilon=0.3).points

    found = []
    for function in (plain, torch.compile(plain, fullgraph=True, backend=backend)):
        nodes = NODES.clone().requires_grad_()
        found.append(torch.autograd.grad(function(nodes).square().sum(), nodes)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_only_points_have_a_gradient_in_traced_calls_as_in_eager_ones(backend):
    def both(nodes):
        pooled = flow_pool(nodes, BATCH, reference=REFERENCE, dim_size=4, epsilon=0.3)
        return pooled.points, pooled.residual

    for function in (both, torch.compile(both, fullgraph=True, backend=backend)):
        points, residual = function(NODES.clone().requires_grad_())
        assert points.requires_grad and not residual.requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            residual.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_traced_second_derivatives_are_refused(backend):
    traced = torch.compile(pool, fullgraph=True, backend=backend)
    nodes = NODES.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="differentiated twice|double backward"):
        (first,) = torch.autograd.grad(traced(nodes, MASSES, BATCH).square().sum(), nodes, create_graph=True)
        first.square().sum().backward()


def test_bad_indices_are_refused_at_run_time_as_in_eager_mode():
    traced = torch.compile(pool, fullgraph=True, backend="eager")
    traced(NODES, MASSES, BATCH)
    wrong = BATCH.clone()
    wrong[4] = 9
    with pytest.raises(ValueError, match=r"batch\[4\] is 9"):
        traced(NODES, MASSES, wrong)


def test_export_keeps_the_operators():
    class Model(torch.nn.Module):
        def forward(self, nodes, batch):
            return flow_pool(nodes, batch, reference=REFERENCE, dim_size=4, epsilon=0.3).points

    program = torch.export.export(Model(), (NODES, BATCH))
    names = {str(node.target) for node in program.graph.nodes}
    assert any("flowpool.solve" in name for name in names)
    assert torch.allclose(program.module()(NODES, BATCH), Model()(NODES, BATCH))


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("weighted", [False, True])
def test_operators_pass_opcheck(layout, weighted):
    nodes, masses = NODES, MASSES
    if layout == "strided":
        nodes = nodes.T.contiguous().T
        masses = torch.stack([masses, masses], -1)[:, 0]
    ptr = torch.tensor([0, 6, 6, 14, 14])
    opcheck(ops.graphs, (nodes, BATCH, None, masses, 4))
    opcheck(ops.graphs, (nodes[BATCH.argsort(stable=True)], None, ptr, None, 4))
    ptr, graph = ops.graphs(nodes, BATCH, None, None, 4)
    weight = torch.tensor([0.5, 2.0], dtype=torch.float64) if weighted else None
    epsilon = torch.full((4,), 0.3, dtype=torch.float64)
    shares = torch.full((3,), 1 / 3, dtype=torch.float64)
    given = (nodes, masses if weighted else None, graph, ptr, REFERENCE, shares, epsilon, weight, True, 1e-16)
    leaves = [x.clone().requires_grad_() if k in (0, 1, 6, 7) and x is not None else x for k, x in enumerate(given)]
    opcheck(ops.solve, (*leaves, 1e-9, 1000, 1e-12))
    ended = ops.solve(*given, 1e-9, 1000, 1e-12)
    opcheck(ops.adjoint, (*given, 1e-9, 1000, 1e-12, ended, torch.ones(4, 3, 2, dtype=torch.float64)))


def test_the_layer_compiles_as_a_whole_and_takes_other_sizes():
    layer = FlowPool(2, 3, size="append")
    traced = torch.compile(lambda x, index: layer(x, index, dim_size=4), fullgraph=True, backend="eager")
    for size in (14, 9, 23):
        nodes = torch.randn(size, 2, generator=GENERATOR)
        index = torch.randint(4, (size,), generator=GENERATOR)
        assert torch.equal(traced(nodes, index), layer(nodes, index, dim_size=4))
