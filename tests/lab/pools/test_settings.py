"""The settings of the flow reach the layer, and mean what they say."""

import pytest
import torch

from flowpool import flow_pool, references
from flowpool.lab.pools import POOLS, FlowSettings
from flowpool.lab.pools.flow import FlowPool

GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(14, 3, generator=GENERATOR)
BATCH = torch.tensor([0] * 5 + [1] * 9)
EDGES = torch.empty(2, 0, dtype=torch.long)


def built(settings: FlowSettings, seed: int = 1) -> FlowPool:
    pool = POOLS["flow"](3, 4, seed=seed, flow=settings)
    assert isinstance(pool, FlowPool)
    pool.fit(NODES, BATCH)
    return pool


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (FlowSettings(), {}),
        (FlowSettings(epsilon=0.5), {"epsilon": 0.5}),
        (FlowSettings(epsilon=0.5, relative=False), {"epsilon": 0.5, "relative": False}),
        (FlowSettings(debias=False, epsilon=1.0), {"debias": False, "epsilon": 1.0}),
        (FlowSettings(steps=1, step_size=0.5), {"max_steps": 1, "step_size": 0.5}),
        (
            FlowSettings(relative=False, steps=2, step_size=2.0, update_step="adam"),
            {"relative": False, "max_steps": 2, "step_size": 2.0, "update_step": "adam"},
        ),
    ],
)
def test_points_are_those_of_the_function_with_the_same_options(
    settings: FlowSettings, options: dict[str, float | bool]
) -> None:
    pool = built(settings)
    expected = flow_pool(NODES, BATCH, reference=pool.layer.reference, **options)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning) if settings.steps else torch.no_grad():
        torch.testing.assert_close(pool(NODES, EDGES, BATCH, 2).vector, expected.points.flatten(1))


def test_ridge_and_gradient_reach_the_layer() -> None:
    options = built(FlowSettings(ridge=1e-3, gradient="unrolled")).layer.options
    assert (options.ridge, options.gradient) == (1e-3, "unrolled")


def test_an_absolute_reference_is_standard_normal() -> None:
    relative, absolute = (
        POOLS["flow"](16, 1000, flow=FlowSettings(relative=kind)).layer.reference  # type: ignore[union-attr]
        for kind in (True, False)
    )
    assert torch.equal(absolute, relative * 4)
    assert float(absolute.var()) == pytest.approx(1, abs=0.05)


def test_one_seed_gives_all_folds_one_reference() -> None:
    shared = [built(FlowSettings(reference_seed=7), seed).layer.reference for seed in (1, 2)]
    own = [built(FlowSettings(), seed).layer.reference for seed in (1, 2)]
    assert torch.equal(*shared)
    assert torch.equal(shared[0], references.normal(3, 4, 7))
    assert not torch.equal(*own)


def test_k_means_centres_are_those_of_the_nodes() -> None:
    pool = built(FlowSettings(reference="kmeans", reference_seed=3))
    torch.testing.assert_close(pool.layer.reference, references.kmeans(NODES, 4, 3))


def test_what_is_changed_is_told() -> None:
    assert FlowSettings().changed() == {}
    assert FlowSettings(epsilon=0.2, steps=100).changed() == {"epsilon": 0.2, "steps": 100}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"reference": "mean"}, "Unknown reference 'mean'; pass normal, kmeans"),
        ({"gradient": "none"}, "Unknown gradient 'none'"),
        ({"steps": 0}, "0 steps"),
        ({"step_size": 1.5}, "step size is 1.5"),
        ({"update_step": "newton", "step_size": 1.0}, "Unknown update step 'newton'; pass gradient, momentum, adam"),
        ({"update_step": "adam"}, "An update step needs a step size"),
        ({"ridge": -1.0}, "ridge is -1.0"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlowSettings(**change)  # type: ignore[arg-type]
