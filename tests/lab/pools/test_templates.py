"""Distances to templates, against a single node (closed form) and against POT called directly."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch

from flowpool.lab.pools.tfgw import TFGWPool
from flowpool.lab.pools.tw import TWPool

NO_EDGES = torch.empty(2, 0, dtype=torch.long)


def test_tw_of_a_single_node_is_the_mean_squared_distance_to_the_template() -> None:
    torch.manual_seed(0)
    pool, x = TWPool(3, 4), torch.randn(1, 3)
    expected = ((pool.templates.tplt_features - x) ** 2).sum(2).mean(1)
    torch.testing.assert_close(pool(x, NO_EDGES, torch.zeros(1, dtype=torch.long), 1).vector[0], expected)


@pytest.mark.filterwarnings("error::UserWarning")
def test_tw_is_optimal_for_graphs_of_two_hundred_nodes() -> None:
    torch.manual_seed(0)
    pool, x = TWPool(3, 6).double(), torch.randn(200, 3, dtype=torch.float64)
    vector = pool(x, NO_EDGES, torch.zeros(200, dtype=torch.long), 1).vector[0].detach().numpy()
    for value, template in zip(vector, pool.templates.tplt_features.detach().numpy(), strict=True):
        cost = ((x.numpy()[:, None] - template) ** 2).sum(2)
        plan, log = ot.lp.emd(np.full(200, 1 / 200), np.full(6, 1 / 6), cost, log=True)
        np.testing.assert_allclose(value, (plan * cost).sum(), rtol=1e-9)
        # Potentials that are feasible and reach the same value prove that no plan is cheaper.
        assert (log["u"][:, None] + log["v"] <= cost + 1e-9).all()
        np.testing.assert_allclose(log["u"].mean() + log["v"].mean(), value, rtol=1e-9)


def test_tfgw_of_a_single_node_is_the_balance_of_features_and_structure() -> None:
    """One node admits one plan: (1 - alpha) mean squared distance + alpha mean squared template adjacency."""
    torch.manual_seed(0)
    pool, x = TFGWPool(3, 4), torch.randn(1, 3)
    alpha = pool.layer.alpha0.sigmoid()
    features = ((pool.layer.tplt_features - x) ** 2).sum(2).mean(1)
    structure = (pool.layer.tplt_adjacencies**2).mean((1, 2))
    expected = (1 - alpha) * features + alpha * structure
    torch.testing.assert_close(pool(x, NO_EDGES, torch.zeros(1, dtype=torch.long), 1).vector[0], expected)
