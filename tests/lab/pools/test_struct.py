from __future__ import annotations

import torch

from flowpool.lab.pools.struct import NUM_ITERATIONS, StructPool, masked_attention, within_hops

PATH = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])  # six nodes in a row
EDGES = torch.cat([PATH, PATH.flip(0)], dim=1)
BATCH = torch.tensor([0] * 6 + [1])  # and a single node


def build() -> tuple[StructPool, torch.Tensor]:
    torch.manual_seed(0)
    pool = StructPool(3, 4).double()
    with torch.no_grad():
        pool.compatibility.add_(torch.randn(4, 4, dtype=torch.float64))
    return pool, torch.randn(7, 3, dtype=torch.float64)


def test_rows_of_the_assignment_sum_to_one() -> None:
    pool, x = build()
    assignment = pool.assignment(x, EDGES, BATCH, 2)
    expected = torch.tensor([[1.0] * 6, [1.0] + [0.0] * 5], dtype=torch.float64)
    torch.testing.assert_close(assignment.sum(2), expected, rtol=0, atol=1e-12)
    assert bool((assignment >= 0).all())


def test_without_pairwise_energy_it_is_a_softmax_of_the_unary_scores() -> None:
    pool, x = build()
    with torch.no_grad():
        pool.compatibility.zero_()
    softmax = pool.unary(x, EDGES).softmax(1)
    torch.testing.assert_close(pool.assignment(x, EDGES, BATCH, 2)[0], softmax[:6])
    points = pool.points(x, EDGES, BATCH, 2).points
    torch.testing.assert_close(points[0], softmax[:6].T @ x[:6])


def test_a_node_without_relatives_keeps_its_unary_assignment() -> None:
    pool, x = build()
    torch.testing.assert_close(pool.assignment(x, EDGES, BATCH, 2)[1, 0], pool.unary(x, EDGES)[6].softmax(0))


def test_mean_field_update_node_by_node() -> None:
    pool, x = build()
    unary = pool.unary(x, EDGES)[:6]
    marginals = unary.softmax(1)
    for _ in range(NUM_ITERATIONS):
        rows = []
        for node in range(6):
            related = [other for other in range(6) if other != node and abs(other - node) <= 3]
            weights = torch.stack([x[node] @ x[other] / 3**0.5 for other in related]).softmax(0)
            message = sum(weight * marginals[other] for weight, other in zip(weights, related, strict=True))
            energy = [sum(message[m] * pool.compatibility[m, label] for m in range(4)) for label in range(4)]
            rows.append((unary[node] - torch.stack(energy)).softmax(0))
        marginals = torch.stack(rows)
    torch.testing.assert_close(pool.assignment(x, EDGES, BATCH, 2)[0], marginals)


def test_initial_compatibility_draws_neighbours_together() -> None:
    """Two linked nodes lean to the same cluster; each is drawn further into it by the other."""
    pool = StructPool(2, 2).double()
    with torch.no_grad():
        pool.unary.lin.weight.copy_(torch.eye(2))
    x = torch.tensor([[1.0, 0.0], [0.0, 0.2]], dtype=torch.float64)  # the convolution gives both (0.5, 0.1)
    edges, batch = torch.tensor([[0, 1], [1, 0]]), torch.zeros(2, dtype=torch.long)
    share = torch.tensor(0.4, dtype=torch.float64).sigmoid()
    for _ in range(NUM_ITERATIONS):
        share = (0.4 + 2 * share - 1).sigmoid()  # scores grow by the other node's shares, difference 2 p - 1
    assignment = pool.assignment(x, edges, batch, 1)[0]
    torch.testing.assert_close(assignment[:, 0], share.expand(2))
    assert share.item() > torch.tensor(0.4).sigmoid().item()


def test_hops_on_a_path() -> None:
    adjacency = torch.zeros(1, 6, 6)
    adjacency[0, EDGES[0], EDGES[1]] = 1
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    for hops in (1, 2, 3):
        assert torch.equal(within_hops(adjacency, hops)[0], (distance > 0) & (distance <= hops))


def test_attention_without_relatives_is_zero() -> None:
    attention = masked_attention(torch.randn(1, 3, 2), torch.tensor([[[False, True, False]] * 3]))
    assert attention[0].tolist() == [[0.0, 1.0, 0.0]] * 3
    assert masked_attention(torch.randn(1, 3, 2), torch.zeros(1, 3, 3, dtype=torch.bool)).abs().sum() == 0
