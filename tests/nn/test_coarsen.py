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
    exact = {"tolerance": 1e-10, "ridge": 1e-18, "engine": "torch"}
    return FlowCoarsen(in_channels, num_points, **(exact | options))


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
    torch.testing.assert_close(other.x, coarse.x, rtol=0, atol=1e-10)
    torch.testing.assert_close(other.adjacency, coarse.adjacency, rtol=0, atol=1e-10)
    torch.testing.assert_close(other.assignment, coarse.assignment[order], rtol=0, atol=1e-10)
    values = torch.randn(12, 5, generator=GENERATOR, dtype=torch.float64)
    torch.testing.assert_close(other.lift(values), coarse.lift(values)[order], rtol=0, atol=1e-10)


def test_company_in_the_batch_does_not_matter():
    coarse = layer()(X, EDGES, WEIGHTS, BATCH)
    for graph, first, edges in ((0, 0, slice(0, 11)), (1, 5, slice(11, 12)), (3, 6, slice(0, 0))):
        alone = layer()(X[graph == BATCH], EDGES[:, edges] - first, WEIGHTS[edges])
        torch.testing.assert_close(alone.x, coarse.x.view(4, 3, 2)[graph], rtol=0, atol=1e-10)
        torch.testing.assert_close(alone.assignment, coarse.assignment[graph == BATCH], rtol=0, atol=1e-10)
        torch.testing.assert_close(alone.adjacency[0], coarse.adjacency[graph], rtol=0, atol=1e-10)


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


MASSES = torch.rand(10, generator=GENERATOR, dtype=torch.float64) + 0.3
ATTRIBUTES = torch.randn(12, 3, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_node_masses_are_those_of_the_functional_form(options):
    coarsen = layer(**options)
    coarse = coarsen(X, EDGES, WEIGHTS, BATCH, masses=MASSES)
    settings = {"tolerance": 1e-10, "engine": "torch"} | options
    pooled = flow_pool(X, BATCH, reference=coarsen.pool.reference.double(), masses=MASSES, **settings)
    assert torch.equal(coarse.x, pooled.points.flatten(0, 1))
    for graph in range(4):
        own = graph == BATCH
        share = MASSES[own] / MASSES[own].sum()
        torch.testing.assert_close(coarse.assignment[own], pooled.plan(graph).T / share[:, None], rtol=0, atol=1e-8)


def test_a_node_without_mass_hands_its_edges_over():
    masses = MASSES.clone()
    masses[2] = 0
    coarse = layer()(X, EDGES, WEIGHTS, BATCH, masses=masses)
    torch.testing.assert_close(coarse.assignment.sum(1), torch.ones(10, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(coarse.adjacency.sum(), WEIGHTS.sum())


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_edge_features_against_dense_matrices(reduce):
    coarse = layer(edge_attr=reduce)(X, EDGES, WEIGHTS, BATCH, edge_attr=ATTRIBUTES)
    shares, whole = coarse.assignment.numpy(), np.zeros((4, 3, 3, 3))
    for (source, target), weight, attribute in zip(EDGES.T.tolist(), WEIGHTS, ATTRIBUTES, strict=True):
        ends = float(weight) * np.outer(shares[source], shares[target])
        whole[int(BATCH[source])] += ends[..., None] * attribute.numpy()
    if reduce == "mean":
        adjacency = coarse.adjacency.numpy()[..., None]
        whole = np.divide(whole, adjacency, out=np.zeros_like(whole), where=adjacency > 0)
    found = coarse.edge_attr.view(2, 3, 3, 3)  # two graphs have edges
    np.testing.assert_allclose(found.numpy(), whole[:2], atol=1e-12)
    assert not whole[2:].any()
    if reduce == "sum":
        torch.testing.assert_close(coarse.edge_attr.sum(0), (WEIGHTS[:, None] * ATTRIBUTES).sum(0))
    else:  # means of equal features are these features
        same = layer()(X, EDGES, WEIGHTS, BATCH, edge_attr=torch.ones(12, 2).double()).edge_attr
        torch.testing.assert_close(same, torch.ones_like(same))
    assert layer()(X, EDGES, WEIGHTS, BATCH).edge_attr is None


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradcheck_in_masses_and_edge_features(reduce):
    coarsen = layer(edge_attr=reduce)

    def outputs(x, weights, masses, attributes):
        coarse = coarsen(x, EDGES, weights, BATCH, masses=masses, edge_attr=attributes)
        return coarse.edge_attr, coarse.assignment, coarse.edge_weight

    leaves = [value.clone().requires_grad_() for value in (X, WEIGHTS, MASSES, ATTRIBUTES)]
    assert gradcheck(outputs, leaves, fast_mode=True)


def test_a_broken_graph_leaves_shared_gradients_alone():
    def gradients(x, batch, edges, weights, rows):
        torch.manual_seed(0)
        cost, leaf = costs.Mahalanobis(2, rank=2), weights.clone().requires_grad_()
        coarse = layer(cost=cost, on_failure="ignore", epsilon=0.3)(x, edges, leaf, batch, 3)
        (coarse.adjacency[rows].square().sum() + coarse.x.view(3, 3, 2)[rows].sum()).backward()
        return cost.weight.grad, leaf.grad[:11]

    x, batch = torch.cat([X[:5], torch.full((2, 2), torch.nan)]), torch.tensor([0] * 5 + [2] * 2)
    edges = torch.cat([EDGES[:, :11], torch.tensor([[5], [6]])], 1)
    found = gradients(x, batch, edges, torch.cat([WEIGHTS[:11], torch.ones(1)]), [0, 1])
    expected = gradients(X[:5], batch[:5], EDGES[:, :11], WEIGHTS[:11], [0, 1])
    for one, other in zip(found, expected, strict=True):
        assert other.abs().max() > 1e-3
        assert torch.equal(one, other)


def test_autocast_takes_edges_of_single_precision():
    x, linear = X.float(), torch.nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = linear(x)
        given = {"masses": MASSES.float(), "edge_attr": ATTRIBUTES.float()}
        coarse = layer(tolerance=1e-5)(narrow, EDGES, WEIGHTS.float(), BATCH, **given)
        lifted = coarse.lift(torch.ones(12, 1))
    assert coarse.x.dtype == coarse.edge_attr.dtype == coarse.edge_weight.dtype == torch.bfloat16
    wide = layer(tolerance=1e-5)(narrow.float(), EDGES, WEIGHTS.float(), BATCH, **given)
    torch.testing.assert_close(coarse.adjacency.float(), wide.adjacency, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(lifted.float(), torch.ones(10, 1), rtol=0, atol=0.02)


def test_gradient_none_records_nothing():
    x = X.clone().requires_grad_()
    coarse = layer(gradient="none")(x, EDGES, WEIGHTS, BATCH)
    assert not coarse.x.requires_grad and not coarse.assignment.requires_grad
    assert torch.equal(coarse.adjacency, layer()(x, EDGES, WEIGHTS, BATCH).adjacency)


@pytest.mark.parametrize("engine", ["torch", "compiled"])
def test_a_learned_cost_and_both_engines_couple_alike(engine):
    coarse = layer(engine=engine)(X, EDGES, WEIGHTS, BATCH)
    expected = layer(engine="torch")(X, EDGES, WEIGHTS, BATCH)
    torch.testing.assert_close(coarse.assignment, expected.assignment, rtol=0, atol=1e-7)


def test_ten_thousand_graphs_at_once():
    """No step of the coupling, of the edges or of the way back goes from graph to graph."""
    sizes = torch.randint(1, 9, (10_000,), generator=torch.Generator().manual_seed(1))
    batch = torch.arange(10_000).repeat_interleave(sizes)
    x = torch.randn(len(batch), 2, generator=torch.Generator().manual_seed(2)).requires_grad_()
    follows = batch[1:] == batch[:-1]
    path = torch.stack([torch.arange(len(batch) - 1), torch.arange(1, len(batch))])[:, follows]
    coarsen = FlowCoarsen(2, 3, max_steps=5, on_failure="ignore")
    coarse = coarsen(x, path, None, batch, edge_attr=torch.ones(path.shape[1], 2))
    assert coarse.x.shape == (30_000, 2) and coarse.adjacency.shape == (10_000, 3, 3)
    torch.testing.assert_close(coarse.adjacency.sum((1, 2)), (sizes - 1).float(), rtol=1e-5, atol=1e-5)
    lifted = coarse.lift(torch.arange(10_000.0).repeat_interleave(3)[:, None])
    torch.testing.assert_close(lifted[:, 0], batch.float(), rtol=1e-5, atol=1e-5)
    alone = coarsen(x[batch == 4711].detach(), path[:, :0])
    torch.testing.assert_close(coarse.assignment[batch == 4711], alone.assignment)
    (coarse.adjacency.square().sum() + lifted.sum()).backward()
    assert x.grad.isfinite().all()


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
    with pytest.raises(RuntimeError, match="There is no report yet"):
        _ = hurried.report
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
        ((X, EDGES, WEIGHTS[:, None]), ValueError, r"edge_weight has shape \(12, 1\); expected \(12,\)"),
        ((X, EDGES, None, BATCH[:3]), ValueError, r"batch has shape \(3,\)"),
        ((X, EDGES, None, BATCH.flip(0)), ValueError, r"edges join different graphs \(first: edge 6, from graph 3 to"),
        ((X, EDGES, None, BATCH, 3), ValueError, r"batch\[6\] is 3; .*below dim_size=3"),
    ],
)
def test_mistakes_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        layer()(*arguments)


def test_mistakes_of_edge_features_and_masses_and_options_are_named():
    with pytest.raises(ValueError, match=r"edge_attr has shape \(3, 3\); expected \(12, num_edge_features\)"):
        layer()(X, EDGES, edge_attr=ATTRIBUTES[:3])
    with pytest.raises(TypeError, match="masses is torch.float32, x is torch.float64"):
        layer()(X, EDGES, masses=MASSES.float())
    with pytest.raises(ValueError, match="Unknown edge_attr 'max'; pass 'mean' or 'sum'"):
        layer(edge_attr="max")
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilom'"):
        layer(epsilom=0.1)
    with pytest.raises(TypeError, match="num_points is 2.5; pass a whole number"):
        FlowCoarsen(2, 2.5)


def test_lift_names_the_number_of_rows_that_it_needs():
    coarse = layer()(X, EDGES, WEIGHTS, BATCH)
    with pytest.raises(ValueError, match=r"features has shape \(10, 2\); expected \(12, num_features\)"):
        coarse.lift(X)
