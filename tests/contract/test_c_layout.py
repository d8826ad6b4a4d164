"""Section C of the contract: dtype, layout, aliasing, rows 20 to 25."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from contract.support import Pool, cloud, index_of, radius, start, weighting
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.estimator_checks import check_transformer_preserve_dtypes
from torch import Tensor

from flowpool import Status

NOT_REAL = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@pytest.mark.parametrize("dtype", NOT_REAL)
def test_row_20_features_that_are_not_real_numbers_are_refused(pool: Pool, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"\.float\(\)"):
        pool(torch.ones(4, 2, dtype=dtype), reference=start(3, 2, torch.float32))


def test_row_20_a_numpy_array_is_refused(function: Pool) -> None:
    with pytest.raises(TypeError, match="ndarray"):
        function(np.ones((4, 2)), reference=start(3, 2))


def _layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values as ``x`` in other places and orders of memory."""
    padded = torch.full((x.shape[0] + 3, x.shape[1] + 2), 7.0, dtype=x.dtype)
    padded[2:-1, 1:-1] = x
    wide = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
    wide[:, ::2] = x
    array = x.numpy().copy()
    array.flags.writeable = False
    mirrored = np.ascontiguousarray(x.numpy()[::-1])[::-1]  # negative strides, which torch refuses to share
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once per process that it cannot protect the array
        read_only = torch.from_numpy(array)
    negated = torch.complex(torch.zeros_like(x), -x).conj().imag  # minus sign kept as a flag on the view
    assert negated.is_neg()
    return {
        "transposed": x.T.contiguous().T,
        "sliced with offset": padded[2:-1, 1:-1],
        "every second column": wide[:, ::2],
        "read-only": read_only,
        "negative stride": torch.from_numpy(mirrored.copy()),
        "lazily negated": negated,
    }


@pytest.mark.parametrize(
    "name",
    ["transposed", "sliced with offset", "every second column", "read-only", "negative stride", "lazily negated"],
)
def test_row_21_the_layout_of_the_features_does_not_matter(pool: Pool, name: str) -> None:
    x, batch = cloud(9, 2, seed=3), index_of([5, 4])
    contiguous = x.clone().requires_grad_()
    expected = pool(contiguous, batch).points
    seed = weighting(expected)
    (expected_gradient,) = torch.autograd.grad((seed * expected).sum(), contiguous)
    given = _layouts(x)[name]
    assert torch.equal(given, x)
    leaf = given.requires_grad_()
    pooled = pool(leaf, batch)
    assert torch.equal(pooled.points, expected)
    (gradient,) = torch.autograd.grad((seed * pooled.points).sum(), leaf)
    assert torch.equal(gradient, expected_gradient)


def test_row_21_expanded_features_and_gradients(pool: Pool) -> None:
    """Stride zero: all nodes share one row, or all columns one value."""
    for view in (cloud(1, 2).expand(5, 2), cloud(5, 1).expand(5, 2)):
        assert 0 in view.stride()
        leaf, copy = view.detach().requires_grad_(), view.clone().requires_grad_()
        pooled, expected = pool(leaf), pool(copy)
        assert torch.equal(pooled.points, expected.points)
        # sum() sends back an expanded gradient, the other side a contiguous one.
        (gradient,) = torch.autograd.grad(pooled.points.sum(), leaf)
        (other,) = torch.autograd.grad(expected.points, copy, torch.ones_like(expected.points).contiguous())
        assert torch.equal(gradient, other)


def test_row_21_strided_batch_masses_offsets_and_reference(pool: Pool) -> None:
    x, batch, masses = cloud(9, 2, seed=3), index_of([5, 4]), cloud(9, 1, seed=5).abs().squeeze(1)
    expected = pool(x, batch, masses=masses).points
    spaced = torch.stack([batch, batch + 9], 1)[:, 0]
    stretched = torch.stack([masses, -masses], 1)[:, 0]
    turned = start(3, 2).T.contiguous().T
    assert torch.equal(pool(x, spaced, masses=stretched, reference=turned).points, expected)
    offsets = torch.tensor([[0, 7], [5, 7], [9, 7]])[:, 0]
    assert torch.equal(pool(x, ptr=offsets, masses=stretched).points, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e2])
def test_row_22_half_precision_is_computed_in_more_and_returned_as_given(
    pool: Pool, dtype: torch.dtype, scale: float
) -> None:
    x, batch = (scale * cloud(18, 3, seed=7)).to(dtype).requires_grad_(), index_of([7, 11])
    reference = start(4, 3, dtype)
    pooled = pool(x, batch, reference=reference)
    assert pooled.points.dtype == dtype
    exact = pool(x.detach().double(), batch, reference=reference.double()).points
    size = x.detach().double().abs().max()
    assert float((pooled.points.detach().double() - exact).abs().max()) <= 2 * torch.finfo(dtype).eps * float(size)
    (gradient,) = torch.autograd.grad(pooled.points.float().sum(), x)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_row_22_autocast_changes_nothing(pool: Pool, dtype: torch.dtype, lower: torch.dtype) -> None:
    x, batch = cloud(9, 2, seed=7, dtype=dtype).requires_grad_(), index_of([5, 4])
    expected = pool(x, batch).points
    seed = weighting(expected)
    (expected_gradient,) = torch.autograd.grad((seed * expected).sum(), x)
    with torch.autocast("cpu", dtype=lower):
        points = pool(x, batch).points
        (inside,) = torch.autograd.grad((seed * points).sum(), x, retain_graph=True)
    (outside,) = torch.autograd.grad((seed * points).sum(), x)
    assert points.dtype == dtype
    assert torch.equal(points, expected)
    assert torch.equal(inside, expected_gradient)
    assert torch.equal(outside, expected_gradient)


@pytest.mark.parametrize("seed", range(6))
def test_row_23_single_and_double_precision_agree(pool: Pool, seed: int) -> None:
    single, batch = cloud(17, 3, seed, torch.float32), index_of([4, 8, 5])
    reference = start(4, 3, torch.float32, seed)
    narrow, wide = single.clone().requires_grad_(), single.double().requires_grad_()
    low, high = pool(narrow, batch, reference=reference), pool(wide, batch, reference=reference.double())
    assert low.points.dtype == torch.float32
    assert high.points.dtype == torch.float64
    assert float((low.points.double() - high.points).abs().max()) <= 1e-4 * radius(single)
    cotangent = weighting(high.points)
    (low_gradient,) = torch.autograd.grad((cotangent.float() * low.points).sum(), narrow)
    (high_gradient,) = torch.autograd.grad((cotangent * high.points).sum(), wide)
    assert low_gradient.dtype == torch.float32
    assert float((low_gradient.double() - high_gradient).norm()) <= 1e-4 * float(high_gradient.norm())


def test_row_23_double_precision_is_kept_throughout(pool: Pool) -> None:
    """A change of the nodes that float32 cannot represent reaches the pooled points."""
    x = cloud(5, 2, seed=1)
    change = 1e-10 * cloud(5, 2, seed=2)
    assert torch.equal((x + change).float(), x.float())
    moved = pool(x + change, tolerance=1e-12).points - pool(x, tolerance=1e-12).points
    torch.testing.assert_close(moved.mean(1)[0], change.mean(0), rtol=1e-3, atol=0)


class PooledDistances(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Distances to the pooled points of the table it was fitted on."""

    def __init__(self, pool: Pool | None = None) -> None:
        self.pool = pool

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32", "float16"]
        return tags

    def fit(self, X: Any, y: Any = None) -> PooledDistances:  # noqa: N803
        assert self.pool is not None
        self.points_ = self.pool(torch.from_numpy(X)).points[0].numpy()
        return self

    def transform(self, X: Any) -> Any:  # noqa: N803
        return np.sqrt(np.square(X[:, None] - self.points_).sum(-1))


def test_row_23_estimators_built_on_the_pool_keep_the_dtype(pool: Pool) -> None:
    check_transformer_preserve_dtypes("PooledDistances", PooledDistances(pool))


MIXED = (torch.float32, torch.float16, torch.int64)


@pytest.mark.parametrize("dtype", MIXED)
def test_row_24_masses_have_the_dtype_of_the_nodes(pool: Pool, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="masses"):
        pool(cloud(4, 2), masses=torch.ones(4, dtype=dtype))


@pytest.mark.parametrize("dtype", MIXED)
def test_row_24_the_reference_has_the_dtype_of_the_nodes(function: Pool, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="reference"):
        function(cloud(4, 2), reference=torch.arange(6).view(3, 2).to(dtype))


@pytest.mark.parametrize("dtype", MIXED)
def test_row_24_point_masses_have_the_dtype_of_the_nodes(function: Pool, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="point_masses"):
        function(cloud(4, 2), point_masses=torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("name", ["masses", "reference", "point_masses"])
def test_row_24_devices_are_not_mixed(function: Pool, name: str) -> None:
    """The meta device stands for any other device: it exists on every machine."""
    shape = {"masses": (4,), "reference": (3, 2), "point_masses": (3,)}[name]
    elsewhere = torch.ones(shape, dtype=torch.float64, device="meta")
    with pytest.raises((TypeError, ValueError), match=f"{name}.*meta"):
        function(cloud(4, 2), **{name: elsewhere})


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


@pytest.mark.parametrize("sizes", [[5, 4], [1, 1, 1], [1, 0, 8]])
@pytest.mark.parametrize("num_points", [1, 3])
def test_row_25_inputs_never_change_and_outputs_never_alias(function: Pool, sizes: list[int], num_points: int) -> None:
    total = sum(sizes)
    inputs = {
        "x": cloud(total, 2),
        "batch": index_of(sizes),
        "masses": cloud(total, 1, seed=3).abs().squeeze(1) + 0.1,
        "reference": start(num_points, 2),
        "point_masses": torch.linspace(1.0, 2.0, num_points).double(),
        "epsilon": torch.full((len(sizes),), 0.1).double(),
    }
    before = {name: value.clone() for name, value in inputs.items()}
    for name in ("x", "masses", "epsilon", *(["point_masses"] if function.engine == "torch" else [])):
        inputs[name].requires_grad_()
    pooled = function(**inputs)
    seed = weighting(pooled.points)
    kept = seed.clone()
    divergence, plan = pooled.divergence, pooled.plan(0)
    torch.autograd.backward(pooled.points, seed)
    assert torch.equal(seed, kept)
    for name, value in inputs.items():
        assert torch.equal(value, before[name]), name
    outputs = (pooled.points, pooled.status, pooled.residual, pooled.steps, divergence, plan)
    places = [_storage(value) for value in outputs]
    assert len(set(places)) == len(places)
    assert not set(places) & {_storage(value) for value in inputs.values()}


def test_row_25_overwriting_inputs_and_outputs_afterwards_does_no_harm(function: Pool) -> None:
    x, batch = cloud(9, 2, seed=3), index_of([5, 4])
    pooled, untouched = function(x, batch), function(x.clone(), batch)
    x.zero_()
    batch.zero_()
    pooled.points.zero_()
    assert torch.equal(pooled.plan(1), untouched.plan(1))
    assert torch.equal(pooled.divergence, untouched.divergence)
    pooled.plan(1).zero_()
    assert torch.equal(pooled.plan(1), untouched.plan(1))


def test_row_25_every_row_of_the_result_is_memory_of_its_own(pool: Pool) -> None:
    """A graph with one node is copies of it; writing to one copy must not write to the others."""
    pooled = pool(cloud(1, 2))
    assert int(pooled.status[0]) == Status.OK
    pooled.points[0, 0] = 5.0
    assert not bool((pooled.points[0, 1:] == 5.0).any())
