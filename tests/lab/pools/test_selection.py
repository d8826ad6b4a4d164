from __future__ import annotations

import pytest
import torch

from flowpool.lab.pools.sag import SAGPool
from flowpool.lab.pools.topk import TopKPool

EDGES = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])  # a path of four nodes, then a single node
BATCH = torch.tensor([0, 0, 0, 0, 1])


def test_topk_keeps_the_best_projections_times_their_score() -> None:
    pool = TopKPool(2, 2)
    with torch.no_grad():
        pool.layer.select.weight.copy_(torch.tensor([[0.0, 2.0]]))
    x = torch.tensor([[1.0, 0.1], [2.0, -0.3], [3.0, 0.8], [4.0, 0.4], [5.0, -1.0]])
    cloud = pool.points(x, EDGES, BATCH, 2)
    score = x[:, 1].tanh()
    expected = torch.stack([x[2] * score[2], x[3] * score[3]])
    torch.testing.assert_close(cloud.points[0], expected)
    torch.testing.assert_close(cloud.points[1], torch.stack([x[4] * score[4], torch.zeros(2)]))
    assert cloud.mask.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("seed", [0, 1])
def test_sag_scores_see_the_neighbours(seed: int) -> None:
    torch.manual_seed(seed)
    pool, x = SAGPool(2, 2), torch.randn(5, 2)
    adjacency = torch.zeros(5, 5)
    adjacency[EDGES[0], EDGES[1]] = 1
    gnn = pool.layer.gnn
    raw = gnn.lin_rel(adjacency @ x) + gnn.lin_root(x)
    score = (raw[:, 0] * pool.layer.select.weight.sign().squeeze()).tanh()
    best = score[:4].argsort(descending=True)[:2]
    torch.testing.assert_close(pool.points(x, EDGES, BATCH, 2).points[0], x[best] * score[best, None])
