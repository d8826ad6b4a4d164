"""Algorithm 1 and its implicit gradient against code that nobody here wrote."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flowpool import algorithm_1
from flowpool.lab.paper.scheme import Scheme, pooled_by_ott


@pytest.mark.slow  # OTT and jaxopt take most of a minute to be compiled
@pytest.mark.parametrize("debias", [True, False])
def test_paper_mode_is_the_scheme_on_ott_and_jaxopt(debias):
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)  # before anything is traced
    pytest.importorskip("ott")
    pytest.importorskip("jaxopt")
    generator = np.random.default_rng(0)
    nodes, start, cotangent = (generator.normal(size=(count, 2)) for count in (6, 3, 3))
    scheme = Scheme(0.8, 1.0, 40, debias, threshold=1e-12, max_iterations=1000, recorded=200)

    @jax.jit
    def theirs(y, ridge):
        flow = pooled_by_ott(replace(scheme, ridge=ridge))
        points, pull = jax.vjp(lambda y: flow(start, y, np.full(6, 1 / 6)), y)
        return points, pull(cotangent)[0]

    settings = {"epsilon": 0.8, "step_size": 1.0, "max_steps": 40, "tolerance": 1e-15, "debias": debias}
    for ridge in (0.0, 1e-4, 1.0, 1e6):
        leaf = torch.tensor(nodes, requires_grad=True)
        points = algorithm_1(leaf, start=torch.tensor(start), ridge=ridge, **settings).points
        (product,) = torch.autograd.grad(points, leaf, torch.tensor(cotangent).unsqueeze(0))
        for ours, expected in zip((points[0].detach(), product), theirs(nodes, ridge), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6 * float(np.abs(expected).max()))
