from __future__ import annotations

import numpy as np
import ot
import pytest
import torch

from flowpool.lab.pools.wegl import WEGLPool

NO_EDGES = torch.empty(2, 0, dtype=torch.long)


def fitted(num_points: int = 4) -> tuple[WEGLPool, torch.Tensor]:
    torch.manual_seed(0)
    pool, x = WEGLPool(3, num_points), torch.randn(40, 3)
    pool.fit(x, torch.zeros(40, dtype=torch.long))
    return pool, x


@pytest.mark.parametrize("size", [2, 4, 9])
def test_cloud_is_pots_barycentric_map_of_the_reference(size: int) -> None:
    pool, x = fitted()
    nodes = x[:size].double().numpy()
    transport = ot.da.EMDTransport(norm=None).fit(Xs=pool.reference.double().numpy(), Xt=nodes)
    expected = transport.transform(Xs=pool.reference.double().numpy())
    cloud = pool.points(x[:size], NO_EDGES, torch.zeros(size, dtype=torch.long), 1)
    np.testing.assert_allclose(cloud.points[0].numpy(), expected, atol=1e-6)


def test_reference_is_a_fixed_point_of_k_means() -> None:
    pool, x = fitted()
    nearest = torch.cdist(x, pool.reference).argmin(1)
    means = torch.stack([x[nearest == centre].mean(0) for centre in range(4)])
    torch.testing.assert_close(means, pool.reference, rtol=0, atol=1e-4)


def test_reference_is_embedded_at_the_origin() -> None:
    pool, _ = fitted()
    vector = pool(pool.reference, NO_EDGES, torch.zeros(4, dtype=torch.long), 1).vector
    torch.testing.assert_close(vector, torch.zeros(1, 12), rtol=0, atol=1e-6)


def test_frozen_no_gradient_and_no_parameters() -> None:
    pool, x = fitted()
    readout = pool(x.requires_grad_(), NO_EDGES, torch.zeros(40, dtype=torch.long), 1)
    assert not readout.vector.requires_grad
    assert list(pool.parameters()) == []


def test_reference_travels_with_the_state() -> None:
    pool, x = fitted()
    other = WEGLPool(3, 4)
    other.load_state_dict(pool.state_dict())
    arguments = (x, NO_EDGES, torch.zeros(40, dtype=torch.long), 1)
    assert torch.equal(other(*arguments).vector, pool(*arguments).vector)


def test_use_before_fit_and_too_few_nodes_say_what_to_do() -> None:
    pool = WEGLPool(3, 4)
    with pytest.raises(RuntimeError, match="Call fit"):
        pool(torch.randn(5, 3), NO_EDGES, torch.zeros(5, dtype=torch.long), 1)
    with pytest.raises(ValueError, match="3 training nodes cannot give 4"):
        pool.fit(torch.randn(3, 3), torch.zeros(3, dtype=torch.long))
