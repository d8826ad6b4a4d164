"""Coarse graphs against dense matrices, written graph by graph."""

import copy

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck
from torch_geometric.nn import DenseGCNConv, GCNConv

from flowpool import FlowPool, costs, flow_pool
from flowpool.nn.coarsen import FlowCoarsen

GENERATOR = torch.Generator().manual_seed(0)
SIZES = [5, 1, 0, 4]  # three graphs with nodes, the last without edges, and an empty one
X = torch.randn(10, 2, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.tensor([0] * 5 + [1] + [3] * 4)
EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 2, 5], [1, 0, 2, 1, 3, 2, 4, 3, 0, 4, 2, 5]])
WEIGHTS = torch.rand(12, generator=GENERATOR, dtype=torch.float64) + 0.5
SETTINGS = {
    "defaults": {},
    "absolute": {"relative": False, "epsilon": 0.3},
    "compiled": {"engine": "compiled"},
    "power": {"cost": costs.Euclidean(1.5), "epsilon": 0.3},
    "mahalanobis": {"cost": costs.Mahalanobis(2), "epsilon": 0.3},
}


def layer(num_points=3, in_channels=2, **options):
    return FlowCoarsen(in_channels, num_points, **({"tolerance": 1e-10, "engine": "torch"} | options))


def dense_adjacency(edges, weights, num_nodes):
    adjacency = np.zeros((num_nodes, num_nodes))
    np.add.at(adjacency, tuple(edges.numpy()), weights.numpy())
    return adjacency


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_points_and_shares_are_those_of_the_functional_form(options):
    coarsen = layer(**options)
    coarse = coarsen(X, EDGES, WEIGHTS, BATCH)
    settings = {"tolerance": 1e-10, "engine": "torch"} | options
    pooled = flow_pool(X, BATCH, reference=coarsen.pool.reference.double(), **settings)
    assert torch.equal(coarse.x, pooled.points.flatten(0, 1))
    for graph in range(4):
        own = graph == BATCH
        # b_j = 1 / N_g
        expected = pooled.plan(graph).T * int(own.sum())
        torch.testing.assert_close(coarse.assignment[own], expected, rtol=0, atol=1e-8)


def test_adjacency_against_dense_matrices():
    coarse = layer()(X, EDGES, WEIGHTS, BATCH)
    adjacency, shares = dense_adjacency(EDGES, WEIGHTS, 10), coarse.assignment.numpy()
    for graph in range(4):
        own = (graph == BATCH).numpy()
        expected = shares[own].T @ adjacency[np.ix_(own, own)] @ shares[own]
        np.testing.assert_allclose(coarse.adjacency[graph].numpy(), expected, atol=1e-13)


def test_shares_sum_to_one_and_no_edge_is_lost():
    coarse = layer()(X, EDGES, WEIGHTS, BATCH)
    torch.testing.assert_close(coarse.assignment.sum(1), torch.ones(10, dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool((coarse.assignment >= 0).all())
    torch.testing.assert_close(coarse.adjacency.sum(), WEIGHTS.sum())
    # Every point has the same mass, so the nodes of a graph are shared out equally.
    loads = [coarse.assignment[graph == BATCH].sum(0) for graph in range(4)]
    torch.testing.assert_close(torch.stack(loads), torch.tensor(SIZES).double()[:, None].expand(4, 3) / 3)


def test_sparse_form_says_the_same_as_the_dense_one():
    coarse = layer()(X, EDGES, WEIGHTS, BATCH)
    whole = torch.zeros(12, 12, dtype=torch.float64)
    whole[tuple(coarse.edge_index)] = coarse.edge_weight
    assert torch.equal(whole, torch.block_diag(*coarse.adjacency))
    assert coarse.batch.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    # Two graphs have edges; the loop on the only node of one of them is one.
    assert coarse.batch[coarse.edge_index[0]].bincount(minlength=4).tolist() == [9, 9, 0, 0]


def test_convolutions_of_both_forms_agree():
    coarse = layer()(X, EDGES, None, BATCH)
    sparse = GCNConv(2, 4, add_self_loops=False).double()
    dense = DenseGCNConv(2, 4).double()
    dense.load_state_dict({"lin.weight": sparse.lin.weight, "bias": sparse.bias})
    one = sparse(coarse.x, coarse.edge_index, coarse.edge_weight).view(4, 3, 4)
    other = dense(coarse.x.view(4, 3, 2), coarse.adjacency, add_loop=False)
    # The dense form divides by degrees that it takes to be at least one.
    busy = coarse.adjacency.sum(-1).amin(-1) >= 1
    assert busy.tolist() == [True, False, False, False]
    torch.testing.assert_close(one[busy], other[busy])


def test_one_point_holds_everything():
    coarse = layer(1)(X, EDGES, WEIGHTS, BATCH)
    means = [X[graph == BATCH].mean(0) if size else torch.zeros(2).double() for graph, size in enumerate(SIZES)]
    torch.testing.assert_close(coarse.x, torch.stack(means))
    assert torch.equal(coarse.assignment, torch.ones_like(coarse.assignment))
    totals = torch.zeros(4).double().index_add(0, BATCH[EDGES[0]], WEIGHTS)
    torch.testing.assert_close(coarse.adjacency.flatten(), totals)


def test_as_many_points_as_nodes_give_the_graph_itself():
    nodes = 10 * torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    path = torch.tensor([[0, 1, 2], [1, 2, 3]])
    reference = nodes + 0.1
    coarse = layer(4, reference=reference, relative=False, epsilon=0.5)(nodes, path)
    torch.testing.assert_close(coarse.x, nodes, rtol=0, atol=1e-6)
    torch.testing.assert_close(coarse.assignment, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-9)
    expected = torch.from_numpy(dense_adjacency(path, torch.ones(3), 4))
    torch.testing.assert_close(coarse.adjacency[0], expected, rtol=0, atol=1e-9)


def test_order_of_nodes_and_edges_does_not_matter():
    coarse = layer()(X, EDGES, WEIGHTS, BATCH)
    order, shuffled = torch.randperm(10, generator=GENERATOR), torch.randperm(12, generator=GENERATOR)
    edges = order.argsort()[EDGES][:, shuffled]
    other = layer()(X[order], edges, WEIGHTS[shuffled], BATCH[order])
    assert torch.equal(other.x, coarse.x)
    torch.testing.assert_close(other.adjacency, coarse.adjacency, rtol=0, atol=1e-13)
    assert torch.equal(other.assignment, coarse.assignment[order])
    values = torch.randn(12, 5, generator=GENERATOR, dtype=torch.float64)
    torch.testing.assert_close(other.lift(values), coarse.lift(values)[order], rtol=0, atol=1e-13)


def test_company_in_the_batch_does_not_matter():
    coarse = layer()(X, EDGES, WEIGHTS, BATCH)
    for graph, first, edges in ((0, 0, slice(0, 11)), (1, 5, slice(11, 12)), (3, 6, slice(0, 0))):
        alone = layer()(X[graph == BATCH], EDGES[:, edges] - first, WEIGHTS[edges])
        assert torch.equal(alone.x, coarse.x.view(4, 3, 2)[graph])
        assert torch.equal(alone.assignment, coarse.assignment[graph == BATCH])
        torch.testing.assert_close(alone.adjacency[0], coarse.adjacency[graph], rtol=0, atol=1e-14)


def test_trailing_empty_graphs_are_kept_and_a_batch_may_be_empty():
    coarse = layer()(X, EDGES, WEIGHTS, BATCH, dim_size=6)
    assert coarse.x.shape == (18, 2) and coarse.adjacency.shape == (6, 3, 3)
    assert not coarse.x[12:].any() and not coarse.adjacency[4:].any()
    nothing = layer()(X[:0], EDGES[:, :0], None, BATCH[:0], dim_size=0)
    assert nothing.x.shape == (0, 2) and nothing.adjacency.shape == (0, 3, 3)
    assert nothing.lift(torch.zeros(0, 7).double()).shape == (0, 7)


def test_broken_graph_leaves_the_others_alone():
    broken = X.clone()
    broken[7, 0] = torch.nan
    coarse = layer()(X, EDGES, WEIGHTS, BATCH)
    other = layer(on_failure="ignore")(broken, EDGES, WEIGHTS, BATCH)
    assert bool(other.x[9:].isnan().all()) and bool(other.assignment[6:].isnan().all())
    assert torch.equal(other.x[:9], coarse.x[:9])
    assert torch.equal(other.assignment[:6], coarse.assignment[:6])
    assert torch.equal(other.adjacency[:3], coarse.adjacency[:3])


def test_lift_is_the_assignment_and_keeps_constants():
    coarse = layer()(X, EDGES, WEIGHTS, BATCH)
    constants = torch.randn(4, 5, generator=GENERATOR, dtype=torch.float64)
    lifted = coarse.lift(constants.repeat_interleave(3, 0))
    torch.testing.assert_close(lifted, constants[BATCH], rtol=0, atol=1e-12)
    values = torch.randn(12, 5, generator=GENERATOR, dtype=torch.float64)
    for node in (2, 8):
        expected = coarse.assignment[node] @ values.view(4, 3, 5)[BATCH[node]]
        torch.testing.assert_close(coarse.lift(values)[node], expected)


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_gradcheck_in_nodes_edge_weights_and_cost(options):
    coarsen = copy.deepcopy(layer(**options)).double()
    values = torch.randn(12, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = list(coarsen.parameters())

    def outputs(x, weights, *_):
        coarse = coarsen(x, EDGES, weights, BATCH)
        # The first through S alone, the third through everything, the last through S and X*.
        return coarse.assignment, coarse.x, coarse.edge_weight, coarse.lift(coarse.x * values)

    leaves = [X.clone().requires_grad_(), WEIGHTS.clone().requires_grad_(), *parameters]
    assert gradcheck(outputs, leaves, fast_mode=True)


def test_gradients_in_single_precision_are_those_in_double():
    def gradient(dtype):
        leaf = X.to(dtype).requires_grad_()
        coarse = layer(tolerance=1e-8)(leaf, EDGES, WEIGHTS.to(dtype), BATCH)
        assert {x.dtype for x in (coarse.x, coarse.adjacency, coarse.edge_weight, coarse.assignment)} == {dtype}
        # The points are those of the layer to the last bit, in its own precision.
        assert torch.equal(coarse.x.view(4, 6), FlowPool(2, 3, tolerance=1e-8, engine="torch")(leaf, BATCH))
        (coarse.adjacency[:, 0, 1].sum() + coarse.x[0, 0]).backward()
        return leaf.grad

    torch.testing.assert_close(gradient(torch.float32).double(), gradient(torch.float64), rtol=1e-4, atol=1e-4)


def test_state_carries_the_reference():
    first, second = layer(seed=1), layer(seed=2)
    assert not torch.equal(first(X, EDGES).x, second(X, EDGES).x)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(X, EDGES).x, second(X, EDGES).x)
    second.reset_parameters()
    assert torch.equal(layer(seed=2)(X, EDGES).x, second(X, EDGES).x)


def test_trouble_is_reported_as_by_the_pool():
    hurried = layer(max_steps=1, on_failure="raise")
    with pytest.raises(ArithmeticError, match="2 of 4 graphs are MAX_STEPS"):
        hurried(X, EDGES, None, BATCH)
    assert hurried.report.converged.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((X[:, :1], EDGES), ValueError, r"x has shape \(10, 1\); expected \(num_nodes, 2\)"),
        ((X, EDGES.float()), TypeError, "edge_index is torch.float32"),
        ((X, EDGES[:1]), ValueError, r"edge_index has shape \(1, 12\); expected \(2, num_edges\)"),
        ((X[:5], EDGES), ValueError, "1 edges name nodes that are not there .*edge 11, 5 to 5.*0 to 4"),
        ((X, EDGES - 1), ValueError, "name nodes that are not there .*edge 0, -1 to 0"),
        ((X, EDGES, WEIGHTS[:3]), ValueError, r"edge_weight has shape \(3,\); expected \(12,\)"),
        ((X, EDGES, WEIGHTS.float()), TypeError, "edge_weight is torch.float32, x is torch.float64"),
        ((X, EDGES, WEIGHTS.tolist()), TypeError, "edge_weight is a list"),
        ((X, EDGES, None, BATCH[:3]), ValueError, r"batch has shape \(3,\)"),
        ((X, EDGES, None, BATCH.flip(0)), ValueError, r"edges join different graphs \(first: edge 6, from graph 3 to"),
        ((X, EDGES, None, BATCH, 3), ValueError, r"batch\[6\] is 3; .*below dim_size=3"),
    ],
)
def test_mistakes_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        layer()(*arguments)


def test_lift_names_the_number_of_rows_that_it_needs():
    coarse = layer()(X, EDGES, WEIGHTS, BATCH)
    with pytest.raises(ValueError, match=r"features has shape \(10, 2\); expected \(12, num_features\)"):
        coarse.lift(X)
