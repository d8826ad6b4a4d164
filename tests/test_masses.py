"""Masses of nodes, against what they are by definition."""

import networkx
import pytest
import torch
from helpers import central_difference
from torch_geometric.utils import to_undirected

from flowpool import FlowPool, FlowReadout
from flowpool.masses import Attention, degree, pagerank

GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(11, 2, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.tensor([0] * 6 + [1] * 5)


def test_degree_counts_the_neighbours_and_the_node_itself():
    edges = to_undirected(torch.tensor([[0, 0, 0], [1, 2, 3]]))  # a star, and a lone node
    assert degree(edges, num_nodes=5).tolist() == [4, 2, 2, 2, 1]
    assert degree(edges, torch.tensor([0, 0, 0, 0, 1])).tolist() == [4, 2, 2, 2, 1]


@pytest.fixture
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("damping", [0.85, 0.5, 0.0])
def test_pagerank_is_that_of_every_graph_alone(damping):
    """Directed graphs with dead ends, parallel edges left out, their nodes shuffled in the batch."""
    graphs = [networkx.gnp_random_graph(size, 0.3, seed=size, directed=True) for size in (1, 4, 9, 12)]
    assert any(out == 0 for _, out in graphs[2].out_degree()) or any(out == 0 for _, out in graphs[1].out_degree())
    sizes = torch.tensor([len(graph) for graph in graphs])
    first = sizes.cumsum(0) - sizes
    edges = torch.tensor(
        [[a + int(f), b + int(f)] for graph, f in zip(graphs, first, strict=True) for a, b in graph.edges]
    )
    batch = torch.arange(4).repeat_interleave(sizes)
    place = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    shuffled = torch.empty_like(batch)
    shuffled[place] = batch
    found = pagerank(place[edges.T], shuffled, damping=damping)[place]
    for graph, one in enumerate(graphs):
        own = found[batch == graph]
        expected = networkx.pagerank(one, alpha=damping, tol=1e-14, max_iter=10000) if damping else {}
        values = [expected.get(node, 1 / len(one)) for node in one]
        assert torch.allclose(own, torch.tensor(values, dtype=torch.float64), atol=1e-11)
        assert float(own.sum()) == pytest.approx(1, abs=1e-12)


def test_pagerank_of_no_nodes_and_of_nodes_without_edges():
    nothing = torch.empty(2, 0, dtype=torch.long)
    assert pagerank(nothing, torch.empty(0, dtype=torch.long)).shape == (0,)
    assert torch.allclose(pagerank(nothing, torch.tensor([0, 0, 2])), torch.tensor([0.5, 0.5, 1.0]))


def test_wrong_edges_are_named():
    with pytest.raises(
        ValueError, match=r"1 edges name nodes that are not there \(first: edge 1, 0 to 4\); the nodes are 0 to 2"
    ):
        degree(torch.tensor([[0, 0], [1, 4]]), num_nodes=3)
    with pytest.raises(ValueError, match="edge 1, from graph 0 to graph 1"):
        pagerank(torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match="damping is 1"):
        pagerank(torch.tensor([[0], [1]]), torch.tensor([0, 0]), damping=1.0)
    with pytest.raises(ValueError, match=r"expected \(2, num_edges\)"):
        degree(torch.zeros(3, 2, dtype=torch.long), num_nodes=3)
    with pytest.raises(ValueError, match="number of nodes is not known; pass batch, or num_nodes"):
        pagerank(torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match="batch is int; pass an integer tensor"):
        degree(torch.tensor([[0], [1]]), 2)
    with pytest.raises(TypeError, match="damping is 'high'; pass a number"):
        pagerank(torch.tensor([[0], [1]]), num_nodes=2, damping="high")


def test_attention_is_a_softmax_in_each_graph_with_mean_one():
    attention = Attention(2).double()
    assert torch.equal(attention(NODES, BATCH), torch.ones(11).double())
    torch.nn.init.normal_(attention.score.weight, generator=GENERATOR)
    scores = NODES @ attention.score.weight.detach()[0]
    expected = torch.cat([6 * scores[:6].softmax(0), 5 * scores[6:].softmax(0)])
    assert torch.allclose(attention(NODES, BATCH, 4), expected)
    order = torch.randperm(11, generator=GENERATOR)
    assert torch.allclose(attention(NODES[order], BATCH[order]), expected[order])
    assert torch.allclose(attention(NODES[:6]), expected[:6])
    attention.reset_parameters()
    assert torch.equal(attention(NODES, BATCH), torch.ones(11).double())


def test_pooling_forgets_the_total_of_the_masses_and_the_size_is_kept():
    layer = FlowPool(2, 3, size="append", tolerance=1e-11)
    attention = Attention(2).double()
    torch.nn.init.normal_(attention.score.weight, generator=torch.Generator().manual_seed(4))
    masses = attention(NODES, BATCH)
    weighted = layer(NODES, BATCH, masses=masses)
    assert torch.allclose(weighted[:, -1], torch.tensor([6.0, 5.0]).double())
    assert torch.allclose(weighted[:, :-1], layer(NODES, BATCH, masses=3 * masses)[:, :-1], atol=1e-9)
    # The mean of the points is the weighted mean of the nodes.
    mean = (masses[:6, None] * NODES[:6]).sum(0) / 6
    assert torch.allclose(weighted[0, :-1].view(3, 2).mean(0), mean, atol=1e-9)


@pytest.mark.parametrize("engine", ["torch", "compiled"])
def test_attention_gets_exact_gradients_through_pooling(engine):
    layer = FlowPool(2, 3, epsilon=0.3, tolerance=1e-12, engine=engine).double()
    attention = Attention(2).double()
    torch.nn.init.normal_(attention.score.weight, generator=torch.Generator().manual_seed(4))
    weights = torch.randn(2, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weight = attention.score.weight

    def loss():
        return (layer(NODES, BATCH, masses=attention(NODES, BATCH)) * weights).sum()

    def at(value):
        with torch.no_grad():
            weight.copy_(value)
            return loss()

    (found,) = torch.autograd.grad(loss(), weight)
    for direction in torch.eye(2, dtype=torch.float64).unsqueeze(1):
        start = weight.detach().clone()
        slope = central_difference(at, start, direction)
        at(start)
        assert float((found * direction).sum()) == pytest.approx(float(slope), rel=1e-6)


@pytest.mark.parametrize("masses", [degree, pagerank])
def test_hubs_pull_the_points_towards_them(masses):
    """One point is the weighted mean, here of a star whose hub is at one and whose leaves are at zero."""
    edges = to_undirected(torch.tensor([[0, 0, 0, 0, 0], [1, 2, 3, 4, 5]]))
    x = torch.zeros(6, 1).index_fill(0, torch.tensor([0]), 1.0)
    weights = masses(edges, BATCH[:6])
    assert torch.allclose(weights, masses(edges, num_nodes=6))
    point = FlowPool(1, 1)(x, BATCH[:6], masses=weights)
    assert float(point) == pytest.approx(float(weights[0] / weights.sum()), rel=1e-5)
    assert float(point) > 1 / 3


@pytest.mark.parametrize("layer", [FlowPool(2, 3), FlowReadout(2, 3)])
def test_attention_leaves_a_broken_graph_to_the_pool(layer):
    layer.double().eval()
    attention = Attention(2).double()
    torch.nn.init.normal_(attention.score.weight, generator=torch.Generator().manual_seed(4))
    nodes = NODES.clone()
    nodes[8, 1] = torch.nan
    with pytest.warns(RuntimeWarning, match="NONFINITE_INPUT"):
        rows = layer(nodes, BATCH, masses=attention(nodes, BATCH))
    assert rows[1].isnan().all()
    assert torch.equal(rows[0], layer(NODES, BATCH, masses=attention(NODES, BATCH))[0])
    (found,) = torch.autograd.grad(rows[0].sum(), attention.score.weight)
    rows = layer(NODES[:6], masses=attention(NODES[:6]))
    (expected,) = torch.autograd.grad(rows.sum(), attention.score.weight)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
