"""FlowPool as an aggregation of PyTorch Geometric."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch_geometric.nn.aggr
from helpers import central_difference
from torch import Tensor, nn
from torch_geometric import experimental_mode
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation, MultiAggregation
from torch_geometric.nn.resolver import aggregation_resolver
from torch_geometric.nn.to_fixed_size_transformer import to_fixed_size

from flowpool import FlowCoarsen, FlowReadout, Status, costs, flow_pool
from flowpool.nn.pool import FlowPool
from flowpool.nn.register import register_with_pyg

INDEX = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2])
PTR = torch.tensor([0, 5, 6, 12])


def features(num_nodes: int = 12, width: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(num_nodes, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture
def layer() -> FlowPool:
    return FlowPool(2, 3, epsilon=0.3)


# What PyG expects of an aggregation


def test_the_output_is_the_points_of_the_functional_form_in_a_row(layer: FlowPool) -> None:
    x = features()
    expected = flow_pool(x, INDEX, reference=layer.reference.double(), epsilon=0.3).points
    out = layer(x, INDEX)
    assert isinstance(layer, Aggregation)
    assert torch.equal(out.view(3, 3, 2), expected)
    assert out.shape == (3, layer.out_channels) == (3, 6)


def test_index_and_ptr_and_both_and_dim_0_are_the_same(layer: FlowPool) -> None:
    x = features()
    expected = layer(x, INDEX)
    assert torch.equal(layer(x, ptr=PTR), expected)
    assert torch.equal(layer(x, INDEX, PTR), expected)
    assert torch.equal(layer(x, INDEX, dim=0), expected)


def test_gaps_and_trailing_graphs_are_rows_of_zeros(layer: FlowPool) -> None:
    x = features()
    expected = layer(x, INDEX)
    out = layer(x, 2 * INDEX, dim_size=7)  # graphs 1, 3, 5 and 6 have no nodes
    assert torch.equal(out[[0, 2, 4]], expected)
    assert torch.equal(out[[1, 3, 5, 6]], torch.zeros(4, 6, dtype=torch.float64))
    assert layer.report.graphs(Status.EMPTY) == [1, 3, 5, 6]


@pytest.mark.parametrize("dim", [1, -1])
def test_other_dimensions_are_refused(layer: FlowPool, dim: int) -> None:
    with pytest.raises(ValueError, match=rf"dim is {dim}.*\(num_nodes, 2\)"):
        layer(features(), INDEX, dim=dim)


def test_max_num_elements_refuses_to_drop_nodes(layer: FlowPool) -> None:
    x = features()
    assert torch.equal(layer(x, INDEX, max_num_elements=6), layer(x, INDEX))
    for where in ({"index": INDEX}, {"ptr": PTR}):
        with pytest.raises(ValueError, match="has 6 nodes; max_num_elements is 5"):
            layer(x, max_num_elements=5, **where)


def test_with_dynamic_shapes_disabled_the_number_of_graphs_must_be_given(layer: FlowPool) -> None:
    x = features()
    with experimental_mode("disable_dynamic_shapes"):
        for call in (layer, layer.forward):
            with pytest.raises(ValueError, match="'dim_size' needs to be set"):
                call(x, INDEX)
        assert layer(x, INDEX, dim_size=3).shape == (3, 6)


def test_repr_is_one_line_with_the_settings_that_matter() -> None:
    assert repr(FlowPool(8, 5)) == "FlowPool(8, num_points=5, epsilon=0.1, cost=SquaredEuclidean, size=None)"
    other = FlowPool(8, 5, epsilon=0.25, cost="cosine", size="scale")
    assert repr(other) == "FlowPool(8, num_points=5, epsilon=0.25, cost=Cosine, size='scale')"


def test_torchscript_is_refused(layer: FlowPool) -> None:
    with pytest.raises(TypeError, match="does not support TorchScript"):
        torch.jit.script(nn.Sequential(layer))


@pytest.mark.filterwarnings("ignore")  # torch's own, on the way to our sentence
@pytest.mark.parametrize("make", [FlowPool, FlowReadout])
def test_tracing_is_refused_before_and_after_a_call(make: Any) -> None:
    layer = make(2, 3)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace .* not supported; use torch\.compile or torch\.export"):
        torch.jit.trace(layer, (features().float(), INDEX))
    layer(features().float(), INDEX)
    for traced in (layer, nn.Sequential(layer), lambda x, index: flow_pool(x, index, reference=torch.eye(2)).points):
        given = (features().float(),) if isinstance(traced, nn.Sequential) else (features().float(), INDEX)
        with pytest.raises(TypeError, match=r"torch\.jit\.trace .*; use torch\.compile or torch\.export"):
            torch.jit.trace(traced, given)


@pytest.mark.parametrize("make", [FlowPool, FlowReadout])
def test_what_users_of_the_global_pools_write_is_told_what_to_write_here(make: Any) -> None:
    layer, x = make(2, 3), features().float()
    assert layer(x, INDEX, dim_size=4).shape[0] == 4
    with pytest.raises(TypeError, match="ptr is 4; pass the number of graphs by name: dim_size=4"):
        layer(x, INDEX, 4)
    with pytest.raises(TypeError, match="pass it second, or index=batch"):
        layer(x, batch=INDEX)


# Arguments


def test_layers_and_the_function_have_the_same_options_and_defaults() -> None:
    function = inspect.signature(flow_pool).parameters
    for layer in (FlowPool, FlowCoarsen):
        found = inspect.signature(layer).parameters
        assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())
        options = {name for name, p in function.items() if p.default is not p.empty} & found.keys() - {"point_masses"}
        assert options == {
            "cost", "epsilon", "relative", "debias", "gradient", "tolerance", "max_steps", "step_size", "update_step", "ridge",
            "engine", "on_failure",
        }  # fmt: skip
        for name in options:
            assert found[name].default == function[name].default, (layer, name)
        assert found["num_points"].default == 8
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilom'"):
        FlowPool(2, 3, epsilom=0.2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "add"}, "Unknown size 'add'; pass None, 'append' or 'scale'"),
        ({"on_failure": "log"}, "Unknown on_failure 'log'"),
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
        ({"reference": "kmeans"}, "Unknown reference 'kmeans'"),
        ({"reference": torch.eye(2)}, "reference has 2 points, but num_points is 3"),
        ({"reference": torch.eye(3)}, r"shape \(3, 3\); expected \(num_points, 2\)"),
        ({"reference": torch.zeros(3, 2)}, "Rows 0 and 1 of the reference are equal"),
        ({"reference": nn.Parameter(torch.randn(3, 2))}, "requires a gradient"),
        ({"cost": "manhattan"}, "Unknown cost 'manhattan'"),
        ({"gradient": "exact"}, "Unknown gradient 'exact'"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"engine": "cuda"}, "Unknown engine 'cuda'"),
        ({"max_steps": 0}, "max_steps is 0; pass a whole number that is at least 1"),
        ({"step_size": 1.5}, r"step_size is 1.5; pass a value in \(0, 1\]"),
        ({"ridge": -1.0}, "ridge is -1.0; pass a value >= 0"),
        ({"point_masses": torch.ones(2)}, r"expected a tensor of shape \(3,\), one mass per point"),
        ({"point_masses": torch.ones(3, requires_grad=True)}, "point_masses requires a gradient"),
    ],
)
def test_wrong_options_are_refused_when_the_layer_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlowPool(2, 3, **options)


def test_options_of_the_wrong_kind_are_refused() -> None:
    for options, message in (
        ({"relative": "yes"}, "relative is 'yes'; pass True or False"),
        ({"debias": 1}, "debias is 1; pass True or False"),
        ({"learn_epsilon": 0.1}, "learn_epsilon is 0.1; pass True or False"),
        ({"epsilon": True}, "epsilon is True; pass a number"),
        ({"tolerance": "small"}, "tolerance is 'small'; pass a number"),
        ({"max_steps": 10.0}, "max_steps is 10.0; pass a whole number"),
    ):
        with pytest.raises(TypeError, match=message):
            FlowPool(2, 3, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((2, 0), ValueError, "num_points is 0; pass a whole number that is at least 1"),
        ((-2, 3), ValueError, "in_channels is -2; pass a whole number that is at least 1"),
        ((8, 5.0), TypeError, "num_points is 5.0; pass a whole number"),
        ((8, True), TypeError, "num_points is True; pass a whole number"),
        ((None, 3), TypeError, "in_channels is None; pass a whole number"),
    ],
)
def test_numbers_of_points_and_features_that_are_none(sizes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        FlowPool(*sizes)
    assert FlowPool(np.int64(2), np.int32(3)).out_channels == 6  # type: ignore[arg-type]


def test_wrong_features_are_refused_with_what_was_found_and_expected(layer: FlowPool) -> None:
    with pytest.raises(ValueError, match=r"shape \(12, 5\); expected \(num_nodes, 2\)"):
        layer(features(width=5), INDEX)
    with pytest.raises(ValueError, match=r"shape \(2, 6, 2\)"):
        layer(features().view(2, 6, 2), torch.zeros(6, dtype=torch.long))
    for dtype in (torch.long, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=r"\.float\(\)"):
            layer(features().to(dtype), INDEX)


@pytest.mark.parametrize(
    ("index", "dim_size"), [(INDEX - 1, None), (INDEX, 2), (INDEX[:-1], None), (INDEX.double(), None)]
)
def test_wrong_indices_are_value_errors(layer: FlowPool, index: Tensor, dim_size: int | None) -> None:
    with pytest.raises(ValueError, match=r"^index(\[\d+\])? (is|has)"):
        layer(features(), index, dim_size=dim_size)


# Masses


def test_masses_weigh_the_nodes() -> None:
    x, masses = features(), features(seed=3)[:, 0].abs()
    out = FlowPool(2, 1)(x, INDEX, masses=masses)
    for graph in range(3):
        here = graph == INDEX
        mean = (masses[here, None] * x[here]).sum(0) / masses[here].sum()
        torch.testing.assert_close(out[graph], mean, rtol=0, atol=1e-9)


@pytest.mark.parametrize("where", [{"index": INDEX}, {"ptr": PTR}, {"index": INDEX, "ptr": PTR}], ids="-".join)
def test_append_adds_the_number_of_nodes_or_their_mass(where: dict[str, Tensor]) -> None:
    x, masses = features(), features(seed=3)[:, 0].abs()
    plain, append = FlowPool(2, 3), FlowPool(2, 3, size="append")
    assert append.out_channels == 7
    out = append(x, **where)
    assert torch.equal(out[:, :-1], plain(x, **where))
    assert out[:, -1].tolist() == [5, 1, 6]
    total = append(x, masses=masses, **where)[:, -1]
    torch.testing.assert_close(total, torch.stack([part.sum() for part in masses.split([5, 1, 6])]))


def test_scale_multiplies_the_points_and_keeps_empty_graphs_at_zero() -> None:
    x = features()
    plain, scale = FlowPool(2, 3), FlowPool(2, 3, size="scale")
    sizes = torch.tensor([[5.0], [1.0], [6.0], [0.0]], dtype=torch.float64)
    assert scale.out_channels == plain.out_channels
    assert torch.equal(scale(x, INDEX, dim_size=4), plain(x, INDEX, dim_size=4) * sizes)


def test_nodes_are_counted_exactly_in_half_precision() -> None:
    x = features(512, dtype=torch.float32).bfloat16()  # bfloat16 itself cannot count beyond 256
    assert float(FlowPool(2, 1, size="append")(x)[0, -1]) == 512


def test_masses_must_have_the_dtype_of_the_features(layer: FlowPool) -> None:
    with pytest.raises(TypeError, match="masses is torch.float32, x is torch.float64"):
        layer(features(), INDEX, masses=torch.ones(12))
    with pytest.raises(TypeError, match="masses is a list"):
        layer(features(), INDEX, masses=[1.0] * 12)


# Precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("convert", [False, True], ids=["layer as it is", "layer converted"])
def test_narrow_dtypes_are_computed_wide_and_returned_as_they_came(dtype: torch.dtype, convert: bool) -> None:
    layer = FlowPool(2, 3)
    if convert:
        layer.to(dtype)
    x = features().to(dtype)
    out = layer(x, INDEX)
    exact = layer(x.double(), INDEX)
    assert out.dtype == dtype
    error = (out.double() - exact).abs() / exact.abs().amax()
    assert float(error.max()) <= 2 * torch.finfo(dtype).eps


def test_the_reference_is_not_rounded_to_the_features() -> None:
    layer = FlowPool(1, 48, on_failure="ignore")
    assert len(layer.reference.bfloat16().unique()) < 48  # rounded, some of its points would be one
    layer(features(20, 1, dtype=torch.bfloat16))


def test_float64_features_are_not_rounded_to_the_reference() -> None:
    layer = FlowPool(2, 3)
    assert layer.reference.dtype == torch.float32
    x = features()
    shift = torch.tensor([2.0**-40, 0.0], dtype=torch.float64)  # far below the resolution of float32
    moved = layer(x + shift, INDEX) - layer(x, INDEX)
    torch.testing.assert_close(moved, shift.repeat(3, 3), rtol=0, atol=2.0**-47)


class MatrixCost(costs.Cost):
    """A quadratic cost whose matrix product autocast would round to bfloat16."""

    degree = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.eye_(self.linear.weight)
        self.linear.weight.data[0, 1] = 0.25

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x - y).square().sum(-1)


def product_cost(x: Tensor, y: Tensor) -> Tensor:
    """A squared distance in expanded form: rounded to bfloat16, its matrix product would not be symmetric."""
    metric = torch.tensor([[1.0, 0.3], [0.3, 0.7]], dtype=x.dtype)
    return (x @ metric * x).sum(-1) + (y @ metric * y).sum(-1) - 2 * (x @ metric * y).sum(-1)


@pytest.mark.parametrize("cost", ["sqeuclidean", MatrixCost(), product_cost])
def test_autocast_changes_nothing_inside(cost: Any) -> None:
    layer, linear = FlowPool(2, 3, cost=cost), nn.Linear(2, 2)
    x = features(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = linear(x)
        out = layer(narrow, INDEX)
        wide = layer(x, INDEX)
        weighed = layer(narrow, INDEX, masses=torch.ones(12))
    assert narrow.dtype == out.dtype == torch.bfloat16
    assert torch.equal(out, layer(narrow, INDEX))
    assert torch.equal(weighed, out)
    assert torch.equal(wide, layer(x, INDEX))


# Gradients


@pytest.mark.parametrize("size", [None, "append", "scale"])
def test_gradients_equal_finite_differences(size: Any) -> None:
    layer = FlowPool(2, 3, tolerance=1e-12, size=size)
    x, masses = features(), features(seed=3)[:, 0].abs() + 0.5
    cotangent = features(3, layer.out_channels, seed=4)

    def loss(x: Tensor, masses: Tensor) -> Tensor:
        return (layer(x, INDEX, masses=masses) * cotangent).sum()

    leaves = (x.requires_grad_(), masses.requires_grad_())
    by_x, by_masses = torch.autograd.grad(loss(*leaves), leaves)
    along_x, along_masses = features(seed=5), features(seed=6)[:, 0]
    with torch.no_grad():
        expected = central_difference(
            lambda t: loss(x + t * along_x, masses + t * along_masses),
            torch.zeros(()).double(),
            torch.ones(()).double(),
        )
    found = (by_x * along_x).sum() + (by_masses * along_masses).sum()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_the_report_says_which_graphs_settled_in_a_valley() -> None:
    """Three distinct nodes leave the places of eight points open; forty nodes do not."""
    generator = torch.Generator().manual_seed(0)
    few, many = torch.randn(3, 4, generator=generator), torch.randn(40, 4, generator=generator)
    x, index = torch.cat([few, few, many]), torch.tensor([0] * 3 + [1] * 3 + [2] * 40)
    pool = FlowPool(4, 8)
    pooled = pool.pooled(x, index)
    pool(x, index)
    settled = (pooled.status == Status.SINGULAR.value) & (pooled.residual > 1e-5)
    assert settled.tolist() == [True, True, False]
    assert torch.equal(pooled.settled, settled) and torch.equal(pool.report.settled, settled)
    assert bool(pool.report.converged.all()) and "2 SINGULAR (2 settled in a valley)" in str(pool.report)
    assert not bool(FlowPool(4, 8, tolerance=1.0).pooled(x, index).settled.any())


def test_empty_graphs_and_twin_nodes_have_finite_gradients(layer: FlowPool) -> None:
    x = features()[[0, 0, 1, 1, 2, 3, 4, 4, 4, 4, 4, 4]].requires_grad_()
    layer(x, 2 * INDEX, dim_size=6).square().sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    torch.testing.assert_close(x.grad[0], x.grad[1])
    torch.testing.assert_close(x.grad[6], x.grad[11])
    assert float(x.grad.abs().min()) > 0


def test_accumulated_gradients_of_two_halves_are_those_of_the_whole() -> None:
    linear, layer = nn.Linear(2, 2).double(), FlowPool(2, 3)
    x, index = features(24), torch.cat([INDEX, INDEX + 3])
    (layer(linear(x), index).square().sum(1).mean()).backward()
    whole = linear.weight.grad.clone()
    linear.zero_grad()
    for half in (slice(12), slice(12, 24)):
        (layer(linear(x[half]), INDEX).square().sum(1).mean() / 2).backward()
    torch.testing.assert_close(linear.weight.grad, whole, rtol=1e-12, atol=1e-14)


def test_gradient_none_and_inference_give_the_same_bits_without_a_graph() -> None:
    x = features().requires_grad_()
    expected = FlowPool(2, 3)(x, INDEX)
    assert expected.requires_grad
    found = FlowPool(2, 3, gradient="none")(x, INDEX)
    assert not found.requires_grad
    assert torch.equal(found, expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = FlowPool(2, 3)(x, INDEX)
        assert not found.requires_grad
        assert torch.equal(found, expected)


def test_parameters_of_a_cost_are_trained() -> None:
    layer = FlowPool(2, 3, cost=costs.Mahalanobis(2), tolerance=1e-12).double()
    assert [name for name, _ in layer.named_parameters()] == ["cost.weight"]
    x, cotangent, along = features(), features(3, 6, seed=4), features(1, seed=5)[0]

    def loss() -> Tensor:
        return (layer(x, INDEX) * cotangent).sum()

    weight = layer.cost.weight
    (found,) = torch.autograd.grad(loss(), weight)

    def at(value: Tensor) -> Tensor:
        with torch.no_grad():
            weight.copy_(value)
            return loss()

    expected = central_difference(at, weight.detach().clone(), along)
    torch.testing.assert_close((found * along).sum(), expected, rtol=1e-6, atol=1e-8)
    assert abs(float(expected)) > 1e-3


def test_a_learned_epsilon_has_the_exact_gradient_in_its_logarithm() -> None:
    layer = FlowPool(2, 3, epsilon=0.3, learn_epsilon=True, tolerance=1e-12).double()
    assert [name for name, _ in layer.named_parameters()] == ["log_epsilon"]
    x, cotangent = features(), features(3, 6, seed=4)
    fixed = FlowPool(2, 3, epsilon=0.3, tolerance=1e-12)
    torch.testing.assert_close(layer(x, INDEX), fixed(x, INDEX), rtol=0, atol=1e-7)

    def at(value: Tensor) -> Tensor:
        with torch.no_grad():
            layer.log_epsilon.copy_(value)
            return (layer(x, INDEX) * cotangent).sum()

    start = layer.log_epsilon.detach().clone()
    (found,) = torch.autograd.grad((layer(x, INDEX) * cotangent).sum(), layer.log_epsilon)
    expected = central_difference(at, start, torch.ones(()).double())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    assert abs(float(expected)) > 1e-3
    at(start + 1)
    assert float(layer.epsilon.detach()) == pytest.approx(0.3 * math.e, rel=1e-6)
    other = FlowPool(2, 3, learn_epsilon=True).double()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.epsilon, layer.epsilon)
    layer.reset_parameters()
    assert float(layer.epsilon.detach()) == pytest.approx(0.3)
    assert "epsilon=0.3" in repr(layer)


def test_point_masses_are_those_of_the_functional_form_and_travel_with_the_layer() -> None:
    masses = torch.tensor([3.0, 1.0, 2.0])
    layer = FlowPool(2, 3, point_masses=masses).double()
    x = features()
    expected = flow_pool(x, INDEX, reference=layer.reference, point_masses=masses.double()).points
    torch.testing.assert_close(layer(x, INDEX).view(3, 3, 2), expected, rtol=0, atol=1e-6)
    plan = layer.pooled(x, INDEX).plan(0)
    torch.testing.assert_close(plan.sum(1), masses.double() / 6, rtol=0, atol=1e-6)
    assert list(layer.state_dict()) == ["reference", "point_masses"]
    assert FlowPool(2, 3).point_masses is None


# The reference


def test_the_reference_is_drawn_from_the_seed_and_leaves_the_random_state_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    layers = [FlowPool(2, 3), FlowPool(2, 3), FlowPool(2, 3, seed=1)]
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(layers[0].reference, layers[1].reference)
    assert not torch.equal(layers[0].reference, layers[2].reference)


def test_a_given_reference_is_copied() -> None:
    given = features(3)
    expected = given.clone()
    layer = FlowPool(2, 3, reference=given)
    given.zero_()
    assert torch.equal(layer.reference, expected)
    layer.fit_reference(clusters())
    assert not torch.equal(layer.reference, expected)
    layer.reset_parameters()
    assert torch.equal(layer.reference, expected)


@pytest.mark.parametrize("reference", ["normal", torch.randn(3, 2)])
def test_reset_returns_to_the_reference_of_the_start_and_resets_the_cost(reference: Any) -> None:
    layer = FlowPool(2, 3, reference=reference, cost=MatrixCost()).double()
    parent = MultiAggregation([layer, "mean"])
    start = copy.deepcopy(layer.state_dict())
    layer.fit_reference(features())
    layer.cost.linear.weight.data.zero_()
    for _ in range(2):
        parent.reset_parameters()
        for name, value in layer.state_dict().items():
            assert torch.equal(value, start[name]), name
    assert layer.reference.dtype == torch.float64


CORNERS = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 20.0]], dtype=torch.float64)


def clusters() -> Tensor:
    """Four nodes around each of three corners, whose means are the corners exactly."""
    offsets = torch.tensor([[0.5, 0.0], [-0.5, 0.0], [0.0, 0.5], [0.0, -0.5]], dtype=torch.float64)
    return (CORNERS[:, None] + offsets).flatten(0, 1)


def sources() -> dict[str, Any]:
    nodes = clusters()
    graphs = [Data(x=nodes[start : start + 4]) for start in (0, 4, 8)]
    return {
        "tensor": nodes,
        "batch": Batch.from_data_list(graphs),
        "loader": DataLoader(graphs, batch_size=2),
        "generator": (graph.x for graph in graphs),
    }


@pytest.mark.parametrize("source", ["tensor", "batch", "loader", "generator"])
@pytest.mark.parametrize("relative", [True, False])
def test_fit_reference_finds_the_clusters_in_the_units_of_the_layer(source: str, relative: bool) -> None:
    layer = FlowPool(2, 3, relative=relative).double()
    layer.fit_reference(sources()[source])
    centres = layer.reference
    if relative:  # back from a mean of zero and variances that sum to one
        nodes = clusters()
        centres = nodes.mean(0) + (nodes - nodes.mean(0)).square().sum(1).mean().sqrt() * centres
    nearest = torch.cdist(CORNERS, centres).argmin(1)
    torch.testing.assert_close(centres[nearest], CORNERS, rtol=0, atol=1e-9)


def test_a_fitted_reference_is_saved_and_used() -> None:
    layer = FlowPool(2, 3)
    x = features()
    drawn = layer(x, INDEX)
    layer.fit_reference(clusters())
    fitted = layer(x, INDEX)
    assert not torch.equal(fitted, drawn)
    other = FlowPool(2, 3)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, INDEX), fitted)


def test_fit_reference_runs_a_network_without_gradients() -> None:
    linear, layer = nn.Linear(2, 2).double(), FlowPool(2, 3)
    seen = []

    def encode(x: Tensor) -> Tensor:
        seen.append(linear(x).requires_grad)
        return linear(x)

    layer.fit_reference(encode(x) for x in clusters().split(6))
    assert seen == [False, False]


def test_fit_reference_refuses_what_it_cannot_use() -> None:
    layer = FlowPool(2, 3)
    before = layer.reference.clone()
    with pytest.raises(ValueError, match="iterable is empty"):
        layer.fit_reference([])
    with pytest.raises(ValueError, match=r"shape \(4, 3\); expected \(num_nodes, 2\)"):
        layer.fit_reference(Data(x=torch.rand(4, 3)))
    with pytest.raises(TypeError, match="is a str"):
        layer.fit_reference(["MUTAG"])
    with pytest.raises(ValueError, match="only 2 distinct rows"):
        layer.fit_reference(torch.eye(2).repeat(5, 1))
    assert torch.equal(layer.reference, before)


# Report and failures


def test_the_report_says_how_each_graph_went() -> None:
    layer = FlowPool(2, 3, on_failure="ignore")
    with pytest.raises(RuntimeError, match="There is no report yet"):
        _ = layer.report
    x = features().requires_grad_()
    with torch.no_grad():
        x[5] = torch.nan
    out = layer(x, INDEX, dim_size=4)
    record = flow_pool(x, INDEX, reference=layer.reference.double(), dim_size=4)
    report = layer.report
    assert report.status.tolist() == [Status.OK, Status.NONFINITE_INPUT, Status.OK, Status.EMPTY]
    assert report.converged.tolist() == [True, False, True, True]
    assert torch.equal(report.steps, record.steps) and torch.equal(report.residual[[0, 2]], record.residual[[0, 2]])
    assert report.graphs(Status.OK) == [0, 2]
    assert str(report).startswith("4 graphs: 2 OK, 1 EMPTY, 1 NONFINITE_INPUT; at most ")
    assert report.backward.residual is None
    out[0].sum().backward()
    assert report.backward.residual is not None and report.backward.residual.shape == (4,)


def test_the_report_of_no_graphs(layer: FlowPool) -> None:
    layer(features(0), torch.empty(0, dtype=torch.long))
    assert str(layer.report) == "no graphs"


def test_the_report_holds_neither_the_batch_nor_its_autograd_graph(layer: FlowPool) -> None:
    x = features().requires_grad_()
    alive = weakref.ref(x)
    layer(x, INDEX)
    del x
    gc.collect()
    assert alive() is None
    report = layer.report
    for name in ("status", "converged", "residual", "steps"):
        value = getattr(report, name)
        assert value.shape == (3,) and value.grad_fn is None, name
        assert value.untyped_storage().nbytes() == 3 * value.element_size(), name
    assert not any(isinstance(value, Tensor) for value in vars(report.backward).values())


def test_every_thread_has_its_own_results_and_report(layer: FlowPool) -> None:
    sizes = [1, 2, 3, 4]
    inputs = [torch.cat([features(), features(size, seed=size)]) for size in sizes]
    indices = [torch.cat([INDEX, torch.arange(3, 3 + size)]) for size in sizes]
    expected = [layer(x, index) for x, index in zip(inputs, indices, strict=True)]
    mine = layer.report
    found: dict[int, tuple[list[Tensor], int]] = {}

    def work(number: int) -> None:
        results = [layer(inputs[number], indices[number]) for _ in range(2)]
        found[number] = (results, layer.report.status.numel())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, size in enumerate(sizes):
        results, num_graphs = found[number]
        assert all(torch.equal(result, expected[number]) for result in results)
        assert num_graphs == 3 + size
    assert layer.report is mine


def broken() -> Tensor:
    """Features whose graph 1 is NaN; graph 0 and 2 need more than one step."""
    x = features()
    x[5] = torch.nan
    return x


def test_warnings_are_given_once_for_each_kind() -> None:
    layer = FlowPool(2, 3, max_steps=1)
    with pytest.warns(RuntimeWarning) as caught:
        layer(features(), INDEX)
    assert [str(warning.message).split(" Shown")[0] for warning in caught] == [
        f"2 of 3 graphs are MAX_STEPS (graph 0, 2). {Status.MAX_STEPS.advice}"
    ]
    with pytest.warns(RuntimeWarning) as caught:
        layer(broken(), INDEX)
    assert [str(warning.message).split(" Shown")[0] for warning in caught] == [
        f"1 of 3 graphs are NONFINITE_INPUT (graph 1). {Status.NONFINITE_INPUT.advice}"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(broken(), INDEX)
    with pytest.warns(RuntimeWarning):
        copy.deepcopy(layer)(features(), INDEX)


def test_warnings_point_at_the_line_that_called() -> None:
    model = nn.Sequential(FlowPool(2, 3, max_steps=1))
    for call in (lambda: model(features()), lambda: FlowReadout(2, 3)(broken(), INDEX)):
        with pytest.warns(RuntimeWarning) as caught:
            call()
        assert caught[0].filename == __file__
        assert caught[0].lineno == call.__code__.co_firstlineno


def test_the_report_is_typed(tmp_path: Path) -> None:
    """What a strict type checker sees in a program of a user."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from flowpool import FlowCoarsen, FlowPool, FlowReadout\n"
        "pool, readout, coarsen = FlowPool(8, 5, epsilon=0.2), FlowReadout(8, 5), FlowCoarsen(8, 4)\n"
        "a: torch.Tensor = pool.report.residual\n"
        "b: torch.Tensor = readout.report.status\n"
        "c: torch.Tensor = coarsen(torch.ones(2, 8), torch.ones(2, 0)).adjacency\n"
        "d: torch.Tensor = pool(torch.ones(2, 8))\n"
        "reveal_type(pool.report)\n"
        "FlowPool(8, 5, epsilom=0.2)\n"
    )
    options = ["--strict", "--no-incremental", "--cache-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(program)], capture_output=True, text=True, timeout=250, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(str(program))]
    assert 'Revealed type is "flowpool.nn.report.Report"' in lines[0], done.stdout + done.stderr
    assert 'Unexpected keyword argument "epsilom"' in lines[1]
    assert len(lines) <= 3, done.stdout  # the third is a note on where FlowPool is defined


def test_raise_names_the_graphs_and_keeps_the_report() -> None:
    layer = FlowPool(2, 3, max_steps=1, on_failure="raise")
    with pytest.raises(ArithmeticError) as caught:
        layer(broken(), INDEX)
    assert str(caught.value) == (
        f"1 of 3 graphs are NONFINITE_INPUT (graph 1). {Status.NONFINITE_INPUT.advice}\n"
        f"2 of 3 graphs are MAX_STEPS (graph 0, 2). {Status.MAX_STEPS.advice}"
    )
    assert layer.report.converged.tolist() == [False] * 3


def test_many_failed_graphs_are_not_all_named() -> None:
    with pytest.raises(ArithmeticError, match=r"7 of 7 graphs are NONFINITE_INPUT \(graph 0, 1, 2, 3, 4, \.\.\.\)"):
        FlowPool(2, 3, on_failure="raise")(torch.full((7, 2), torch.nan), torch.arange(7))


def test_ignore_and_expected_statuses_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FlowPool(2, 3, max_steps=1, on_failure="ignore")(broken(), INDEX)
        FlowPool(2, 3, on_failure="raise")(features(), INDEX, dim_size=5)


def test_the_full_record_has_plans_and_divergence(layer: FlowPool) -> None:
    x, masses = features(), features(seed=3)[:, 0].abs()
    record = layer.pooled(x, INDEX, masses=masses)
    assert torch.equal(record.points.flatten(1), layer(x, INDEX, masses=masses))
    plan = record.plan(2)
    torch.testing.assert_close(plan.sum(0), masses[6:] / masses[6:].sum(), rtol=0, atol=1e-6)
    torch.testing.assert_close(plan.sum(1), torch.full((3,), 1 / 3, dtype=torch.float64), rtol=0, atol=1e-6)
    assert float(record.divergence[0]) > 0


# Saving and copying


def test_copies_give_the_same_bits_and_start_with_a_blank_report(layer: FlowPool) -> None:
    layer.fit_reference(clusters())
    x = features()
    expected = layer(x, INDEX)
    twin = copy.deepcopy(layer)
    with pytest.raises(RuntimeError, match="There is no report yet"):
        _ = twin.report
    assert layer.report.status.numel() == 3
    assert torch.equal(twin(x, INDEX), expected)
    twin.reference.zero_()
    assert torch.equal(layer(x, INDEX), expected)


def test_the_state_is_the_reference_and_a_version_and_strict_loading_is_strict(layer: FlowPool) -> None:
    state = layer.state_dict()
    assert list(state) == ["reference"]
    assert state._metadata[""]["version"] == 1
    with pytest.raises(RuntimeError, match="Missing key.*reference"):
        layer.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key.*points"):
        layer.load_state_dict({**state, "points": torch.ones(1)})
    with pytest.raises(RuntimeError, match="size mismatch for reference"):
        FlowPool(2, 4).load_state_dict(state)
    state._metadata[""]["version"] = 2
    with pytest.raises(RuntimeError, match="reference is of version 2, this flowpool knows 1"):
        layer.load_state_dict(state)


def test_safetensors_round_trip(tmp_path: Path) -> None:
    model = nn.ModuleDict({"pool": FlowPool(2, 3, reference=features(3), cost=MatrixCost())})
    with torch.no_grad():
        model["pool"].cost.linear.weight.add_(0.5)
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    other = nn.ModuleDict({"pool": FlowPool(2, 3, reference=features(3, seed=9), cost=MatrixCost())})
    assert safetensors.torch.load_model(other, str(tmp_path / "model.safetensors")) == (set(), [])
    assert torch.equal(other["pool"](features(), INDEX), model["pool"](features(), INDEX))


# Inside other parts of PyG


class Neighbours(MessagePassing):
    """Pools the features of the neighbours of each node."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


def test_as_the_aggregation_of_message_passing(layer: FlowPool) -> None:
    x = features(6)
    edge_index = torch.tensor([[1, 2, 3, 4, 0, 5, 2], [0, 0, 0, 0, 3, 3, 4]])  # from, to; nodes 1, 2, 5 receive nothing
    out = Neighbours(aggr=layer)(x, edge_index)
    assert torch.equal(out[0], layer(x[[1, 2, 3, 4]])[0])
    torch.testing.assert_close(out[3], layer(x[[0, 5]])[0])
    assert torch.equal(out[4].view(3, 2), x[2].expand(3, 2))
    assert torch.equal(out[[1, 2, 5]], torch.zeros(3, 6, dtype=torch.float64))


def test_concatenated_with_other_aggregations(layer: FlowPool) -> None:
    x = features()
    out = MultiAggregation([layer, "mean", "max"], mode="cat")(x, INDEX)
    assert out.shape == (3, 10)
    assert torch.equal(out[:, :6], layer(x, INDEX))
    torch.testing.assert_close(out[0, 6:8], x[:5].mean(0))


def test_projected_with_other_aggregations(layer: FlowPool) -> None:
    x = features()
    widths = [layer.out_channels, 2]
    multi = MultiAggregation([layer, "mean"], mode="proj", mode_kwargs={"in_channels": widths, "out_channels": 5})
    multi.double()
    mean = aggregation_resolver("mean")(x, INDEX)
    torch.testing.assert_close(multi(x, INDEX), multi.lin(torch.cat([layer(x, INDEX), mean], 1)))


class Model(nn.Module):
    def __init__(self, pool: FlowPool) -> None:
        super().__init__()
        self.linear, self.pool = nn.Linear(2, 2).double(), pool

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return self.pool(self.linear(x), batch)


def test_to_fixed_size_gives_every_batch_the_same_number_of_graphs(layer: FlowPool) -> None:
    model = Model(layer)
    fixed = to_fixed_size(model, batch_size=5)
    x = features()
    assert torch.equal(fixed(x, INDEX)[:3], model(x, INDEX))
    assert torch.equal(fixed(x, INDEX)[3:], torch.zeros(2, 6, dtype=torch.float64))


def test_registered_the_name_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_geometric.graphgym.register import pooling_dict

    for name in ("FlowPool", "FlowReadout"):
        monkeypatch.delattr(torch_geometric.nn.aggr, name, raising=False)
    monkeypatch.delitem(pooling_dict, "flowpool", raising=False)
    with pytest.raises(ValueError, match="Could not resolve 'flowpool'"):
        aggregation_resolver("flowpool", 2, 3)
    try:
        for _ in range(2):
            register_with_pyg(num_points=3)
        x = features()
        expected = FlowPool(2, 3)(x, INDEX)
        kwargs = {"in_channels": 2, "num_points": 3}
        assert torch.equal(aggregation_resolver("flowpool", **kwargs)(x, INDEX), expected)
        assert torch.equal(pooling_dict["flowpool"](x, INDEX), expected)
        assert isinstance(Neighbours(aggr="flow_pool", aggr_kwargs=kwargs).aggr_module, FlowPool)
        assert isinstance(aggregation_resolver("flowreadout", **kwargs), FlowReadout)
    finally:
        del torch_geometric.nn.aggr.FlowPool, torch_geometric.nn.aggr.FlowReadout, pooling_dict["flowpool"]


def test_errors_of_a_cost_reach_its_author_as_they_are() -> None:
    """Graph ids have another name here than in functions; no other error is touched."""

    class Picky(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            raise ValueError("this batch is too large", 42)

    with pytest.raises(ValueError) as caught:
        FlowPool(2, 3, cost=Picky())(features(), INDEX)
    assert caught.value.args == ("this batch is too large", 42)
