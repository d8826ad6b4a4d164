"""DiffPool and MinCutPool against their formulas, written graph by graph without padding."""

from __future__ import annotations

import torch
from torch_geometric.nn import GraphSAGE

from flowpool.lab.pools.diff import DiffPool
from flowpool.lab.pools.mincut import MinCutPool

EDGES = torch.tensor([[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]])  # a path of three nodes, a path of two
BATCH = torch.tensor([0, 0, 0, 1, 1])


def adjacency_matrix() -> torch.Tensor:
    adjacency = torch.zeros(5, 5, dtype=torch.float64)
    adjacency[EDGES[0], EDGES[1]] = 1
    return adjacency


def sage(network: GraphSAGE, x: torch.Tensor) -> torch.Tensor:
    """Three layers, each the node itself and the mean of its neighbours, written out."""
    adjacency = adjacency_matrix()[: len(x), : len(x)]
    mean = adjacency / adjacency.sum(1, keepdim=True)
    for number, layer in enumerate(network.convs):
        x = mean @ x @ layer.lin_l.weight.T + layer.lin_l.bias + x @ layer.lin_r.weight.T
        x = x.relu() if number < 2 else x
    return x


def test_diff_rows_are_embedded_nodes_summed_over_soft_clusters() -> None:
    torch.manual_seed(0)
    pool, x = DiffPool(3, 4).double(), torch.randn(5, 3, dtype=torch.float64)
    embedded, assignment = sage(pool.embedding, x), sage(pool.assignment, x).softmax(1)
    expected = torch.stack([assignment[:3].T @ embedded[:3], assignment[3:].T @ embedded[3:]])
    torch.testing.assert_close(pool(x, EDGES, BATCH, 2).vector, expected.flatten(1))


def test_diff_loss_is_missed_links_plus_entropy() -> None:
    torch.manual_seed(0)
    pool, x = DiffPool(3, 4).double(), torch.randn(3, 3, dtype=torch.float64)
    assignment = sage(pool.assignment, x).softmax(1)
    links = (adjacency_matrix()[:3, :3] - assignment @ assignment.T).norm() / 9
    entropy = torch.distributions.Categorical(assignment).entropy().mean()
    torch.testing.assert_close(pool(x, EDGES[:, :4], BATCH[:3], 1).loss, links + entropy)


def test_mincut_assigns_by_a_network_with_one_hidden_layer() -> None:
    torch.manual_seed(0)
    pool, x = MinCutPool(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    first, second = pool.assignment.lins
    scores = (x @ first.weight.T + first.bias).relu() @ second.weight.T + second.bias
    expected = scores[:3].softmax(1).T @ x[:3]
    torch.testing.assert_close(pool(x, EDGES, BATCH, 2).vector[0].view(2, 3), expected)


def test_mincut_loss_is_cut_plus_orthogonality() -> None:
    torch.manual_seed(0)
    pool, x = MinCutPool(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    readout = pool(x, EDGES, BATCH, 2)
    expected = []
    for nodes in (slice(0, 3), slice(3, 5)):
        links = adjacency_matrix()[nodes, nodes]
        assignment = pool.assignment(x[nodes]).softmax(1)
        cut = -torch.trace(assignment.T @ links @ assignment) / torch.trace(
            assignment.T @ torch.diag(links.sum(1)) @ assignment
        )
        gram = assignment.T @ assignment
        target = torch.eye(2, dtype=torch.float64) / 2**0.5
        expected.append(cut + (gram / gram.norm() - target).norm())
    torch.testing.assert_close(readout.loss, torch.stack(expected).mean())
    torch.testing.assert_close(readout.vector[1].view(2, 3), pool.assignment(x[3:]).softmax(1).T @ x[3:])


def test_mincut_of_isolated_nodes_is_a_perfect_cut() -> None:
    pool = MinCutPool(2, 2).double()
    with torch.no_grad():
        for layer in pool.assignment.lins:
            layer.weight.copy_(torch.eye(2) * 10)
            layer.bias.zero_()
    x = torch.eye(2, dtype=torch.float64)  # one node per cluster
    readout = pool(x, torch.empty(2, 0, dtype=torch.long), torch.zeros(2, dtype=torch.long), 1)
    torch.testing.assert_close(readout.loss, torch.tensor(-1.0, dtype=torch.float64))
