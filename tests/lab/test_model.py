"""The model around the pools: what it adds to each of them, by hand."""

import pytest
import torch
from torch import Tensor

from flowpool.lab.datasets import GraphBatch, load_dataset
from flowpool.lab.model import GraphModel, build_model, derived_seed
from flowpool.lab.names import Norm, Size
from flowpool.lab.options import Shape


def mutag_batch() -> GraphBatch:
    return load_dataset("MUTAG").batch([3, 50, 120, 7])


def model_of(pool: str, size: Size = "none", norm: Norm = "none", seed: int = 0) -> GraphModel:
    return build_model(pool, Shape(size=size, norm=norm), 7, 2, seed)


def outputs(model: GraphModel, batch: GraphBatch) -> Tensor:
    return model(batch.x, batch.edge_index, batch.batch, 4).outputs


def pooled(model: GraphModel, batch: GraphBatch) -> Tensor:
    nodes = model.node_norm(model.backbone(batch.x, batch.edge_index))
    return model.pool(nodes, batch.edge_index, batch.batch, 4).vector


def normalised(values: Tensor) -> Tensor:
    return (values - values.mean(0)) / (values.var(0, unbiased=False) + 1e-5).sqrt()


@pytest.mark.parametrize("pool", ["mean", "sum", "sort"])
@pytest.mark.parametrize("size", ["none", "append", "scale"])
def test_size_reaches_the_head_as_asked(pool: str, size: Size) -> None:
    batch, model = mutag_batch(), model_of(pool, size)
    model.fit(batch)
    sizes = torch.bincount(batch.batch).float()[:, None]
    vector = pooled(model, batch)
    expected = {
        "none": vector,
        "append": torch.cat([vector, sizes / sizes.mean()], 1),
        "scale": vector * sizes,
    }[size]
    torch.testing.assert_close(outputs(model, batch), expected @ model.head.weight.T + model.head.bias)


@pytest.mark.parametrize("norm", ["none", "nodes", "output", "both"])
def test_norm_stands_where_it_was_asked_for(norm: Norm) -> None:
    batch, model = mutag_batch(), model_of("mean", "append", norm)
    model.train()
    nodes = model.backbone(batch.x, batch.edge_index)
    if norm in ("nodes", "both"):
        nodes = normalised(nodes)
    sizes = torch.bincount(batch.batch).float()
    means = torch.zeros(4, 8).index_add(0, batch.batch, nodes) / sizes[:, None]
    vector = torch.cat([means, sizes[:, None]], 1)  # not fitted: the mean size is 1
    if norm in ("output", "both"):
        vector = normalised(vector)
    expected = vector @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(outputs(model, batch), expected, rtol=1e-4, atol=1e-4)


def test_the_backbone_starts_equal_for_every_pool_and_differs_between_seeds() -> None:
    first, other = model_of("sum", seed=4), model_of("gmt", seed=4)
    for one, two in zip(first.backbone.parameters(), other.backbone.parameters(), strict=True):
        assert torch.equal(one, two)
    again, different = model_of("gmt", seed=4), model_of("gmt", seed=5)
    for name, weight in other.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(other.head.weight, different.head.weight)
    assert not torch.equal(other.backbone.linear.weight, different.backbone.linear.weight)  # type: ignore[union-attr]


def test_building_leaves_the_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    model_of("gmt")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_fit_shows_the_pool_what_it_sees_in_training() -> None:
    batch, model = mutag_batch(), model_of("mean", norm="nodes")
    seen: list[Tensor] = []
    model.pool.fit = lambda x, batch: seen.append(x)  # type: ignore[method-assign, assignment]
    model.fit(batch)
    torch.testing.assert_close(seen[0], normalised(model.backbone(batch.x, batch.edge_index)), rtol=1e-4, atol=1e-5)
    assert float(model.mean_size) == len(batch.batch) / 4


def strong_model(pool: str) -> GraphModel:
    shape = Shape("gin", channels=4, layers=3, norm="none", jumping=True, hidden=5, dropout=0.5, standardise=True)
    return build_model(pool, shape, 7, 2, 0)


def test_every_layer_has_a_pool_of_its_own_on_standardised_features() -> None:
    batch, model = mutag_batch(), strong_model("mean")
    model.fit(batch)
    constant = batch.x.std(0) == 0
    x = (batch.x - batch.x.mean(0)) / torch.where(constant, 1.0, batch.x.std(0, correction=0))
    model.eval()
    vectors = []
    for layer in model.backbone.layers:  # type: ignore[union-attr]
        x = layer(x, batch.edge_index)
        vectors.append(torch.zeros(4, 4).index_add(0, batch.batch, x) / torch.bincount(batch.batch)[:, None])
    vector = torch.cat(vectors, 1)  # (4, 3 * 4)
    assert isinstance(model.head, torch.nn.Sequential)
    _, first, _, _, second = model.head
    expected = (vector @ first.weight.T + first.bias).relu() @ second.weight.T + second.bias
    torch.testing.assert_close(outputs(model, batch), expected, rtol=1e-4, atol=1e-5)
    model.train()
    assert not torch.equal(outputs(model, batch), outputs(model, batch))  # dropout


def test_pools_of_different_layers_start_differently_and_are_fitted_to_their_own_layer() -> None:
    batch, model = mutag_batch(), strong_model("flow-step")
    before = [part.reference.detach().clone() for part in model.pool.parts]  # type: ignore[union-attr]
    assert not torch.equal(before[0], before[1])
    model.fit(batch)
    x = (batch.x - model.feature_mean) / model.feature_scale
    layers = model.backbone(x, batch.edge_index).detach().chunk(3, 1)
    for part, nodes in zip(model.pool.parts, layers, strict=True):  # type: ignore[union-attr]
        torch.testing.assert_close(part.epsilon, 0.1 * nodes.var(0, correction=0).sum())


def molecules() -> GraphBatch:
    """Two graphs of two nodes each, with features of edges and two numbers to be predicted."""
    edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    truth = torch.tensor([[1.0, 100.0], [3.0, 500.0]], dtype=torch.float64)
    return GraphBatch(torch.randn(4, 3), edges, torch.tensor([0, 0, 1, 1]), truth, torch.randn(4, 2))


def test_numbers_are_learned_in_units_of_their_deviation_and_told_in_those_of_the_caller() -> None:
    part = molecules()
    model = build_model("sum", Shape("gine", channels=4), 3, 2, 0, edge_channels=2, numbers=True)
    model.fit(part)
    assert model.target_mean.tolist() == [2, 300]
    assert model.target_scale.tolist() == [1, 200]
    outputs = torch.tensor([[0.0, 1.0], [2.0, -1.0]])
    assert model.predictions(outputs).tolist() == [[2, 500], [4, 100]]
    # Wanted are (-1, -1) and (1, 1): squares 1, 4, 1, 4.
    assert float(model.loss(outputs, part.y)) == pytest.approx(2.5)
    assert float(model.loss(outputs, part.y, "sum")) == pytest.approx(5)  # over graphs, of means over targets


def test_a_target_that_does_not_vary_is_not_divided_by_zero() -> None:
    part = molecules()
    model = build_model("sum", Shape("gine", channels=4), 3, 2, 0, edge_channels=2, numbers=True)
    model.fit(part._replace(y=torch.full((2, 2), 7.0, dtype=torch.float64)))
    assert model.target_scale.tolist() == [1, 1]
    assert model.predictions(torch.zeros(1, 2)).tolist() == [[7, 7]]


def test_scores_of_classes_are_told_where_they_are_ranked() -> None:
    model, outputs = model_of("sum"), torch.tensor([[0.1, 0.3], [2.0, -1.0]])
    assert model.predictions(outputs).tolist() == [1, 0]
    assert torch.equal(model.predictions(outputs, ranks=True), outputs)


def test_derived_seeds_differ_and_fit_31_bits() -> None:
    seeds = {derived_seed(a, b, name) for a in range(20) for b in range(20) for name in ("pool", "head")}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derived_seed(1, 11) != derived_seed(11, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": "big"}, "Unknown size"),
        ({"norm": "x"}, "Unknown norm"),
        ({"channels": 0}, "from 1 to"),
        ({"num_points": 2 * 10**9}, "2,000,000,000 points"),
        ({"padding": "x"}, "Unknown padding"),
        ({"layers": 0}, "0 layers"),
    ],
)
def test_wrong_shapes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape(**change)  # type: ignore[arg-type]
