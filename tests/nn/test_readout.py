"""The recommended readout: each part against its definition, and the places where a block like this breaks."""

import copy
import inspect
import io

import pytest
import torch
from helpers import central_difference
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation, MultiAggregation

from flowpool import FlowCoarsen, FlowPool, Status, costs, flow_pool, references, transport_pool
from flowpool.nn.readout import FlowReadout

GENERATOR = torch.Generator().manual_seed(0)
NODES = 3 + 2 * torch.randn(15, 2, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.tensor([0] * 6 + [1] * 5 + [2] * 4)
MASSES = torch.rand(15, generator=GENERATOR, dtype=torch.float64) + 0.3
COARSEN = FlowCoarsen(3, 2)
ROUNDING = {"rtol": 1e-11, "atol": 1e-13}


def normalised(values):
    """BatchNorm by hand."""
    return (values - values.mean(0)) / (values.var(0, unbiased=False) + 1e-5).sqrt()


def make(size="append", **options):
    return FlowReadout(2, 3, size=size, **options).double()


def expected_columns(readout, nodes, size, masses=None):
    """The rows before the last normalisation, from the functional form."""
    weights = torch.ones(15, dtype=torch.float64) if masses is None else masses
    given = {"reference": readout.reference, "epsilon": 0.2, "masses": masses, "relative": False}
    received = transport_pool(nodes, BATCH, **given)
    for_means, for_deviations = readout.shape_map.unbind(1)  # (K, M, D)
    moved = received.points - readout.reference
    means = moved if size is None else moved - moved.mean(1, keepdim=True)
    shape = torch.einsum("kmd,bmd->bk", for_means, means)
    shape = shape + torch.einsum("kmd,bmd->bk", for_deviations, received.deviations)
    if size is None:
        return shape
    members = [graph == BATCH for graph in range(3)]
    sums = torch.stack([weights[own] @ nodes[own] for own in members])
    numbers = torch.stack([weights[own].sum() for own in members])[:, None]
    return torch.cat([sums, numbers, shape], 1)


@pytest.mark.parametrize("size", [None, "append"])
def test_every_kind_is_what_its_parts_give(size):
    readout = make(size)
    for masses in (None, MASSES):
        expected = expected_columns(readout, normalised(NODES), size, masses)
        found = readout(NODES, BATCH, masses=masses)
        assert found.shape == (3, readout.out_channels)
        assert torch.allclose(found, readout.output_norm.weight * normalised(expected), atol=1e-6)


def test_the_order_of_nodes_and_the_way_to_name_graphs_do_not_matter():
    readout = make().eval()
    expected = readout(NODES, BATCH)
    order = torch.randperm(15, generator=GENERATOR)
    assert torch.allclose(readout(NODES[order], BATCH[order]), expected, atol=1e-7)
    assert torch.allclose(readout(NODES, ptr=torch.tensor([0, 6, 11, 15])), expected, atol=1e-12)
    # In evaluation a graph does not feel the others, and empty graphs keep their row.
    alone = readout(NODES[BATCH == 1])
    assert torch.allclose(alone[0], expected[1], atol=1e-7)
    more = readout(NODES, BATCH, dim_size=5)
    assert more.shape[0] == 5 and torch.allclose(more[:3], expected, atol=1e-12)
    assert more.isfinite().all()


def test_one_graph_and_one_node_and_none_in_training():
    readout = make()
    before = copy.deepcopy(readout.output_norm.state_dict())
    out = readout(NODES[:6])
    assert out.shape == (1, readout.out_channels) and out.isfinite().all()
    after = readout.output_norm.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)  # one row has no statistics to learn from
    assert readout(NODES[:0], BATCH[:0], dim_size=2).isfinite().all()
    assert readout(NODES[:0], BATCH[:0], dim_size=0).shape == (0, readout.out_channels)


@pytest.mark.parametrize("size", [None, "append"])
def test_gradients_agree_with_finite_differences(size):
    readout = make(size).eval()  # in training, tiny graphs make BatchNorm hide what is tested
    nodes = NODES.clone().requires_grad_()
    weights = torch.randn(3, readout.out_channels, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaves = [nodes, *readout.parameters()]

    def loss():
        return (readout(nodes, BATCH) * weights).sum()

    for leaf, gradient in zip(leaves, torch.autograd.grad(loss(), leaves), strict=True):
        start = leaf.detach().clone()
        direction = torch.randn(start.shape, generator=GENERATOR, dtype=torch.float64)

        def along(value, leaf=leaf):
            with torch.no_grad():
                leaf.copy_(value)
                return loss()

        slope = central_difference(along, start, direction)
        along(start)
        assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-5, abs=1e-7)


def test_graphs_of_equal_nodes_have_finite_gradients():
    nodes = torch.cat([torch.ones(4, 2).double(), NODES]).requires_grad_()
    batch = torch.cat([torch.zeros(4).long(), BATCH + 1])
    out = make()(nodes, batch)
    out.square().mul(torch.arange(1.0, 4 * out.shape[1] + 1).view(4, -1)).sum().backward()
    assert out.isfinite().all() and nodes.grad.isfinite().all()


def test_state_dict_brings_everything_along():
    readout = make(seed=1)
    for _ in range(3):
        readout(NODES, BATCH)
    with torch.no_grad():
        for parameter in readout.parameters():
            parameter.add_(0.1)
    file = io.BytesIO()
    torch.save(readout.state_dict(), file)
    file.seek(0)
    other = make(seed=2)
    assert not torch.allclose(other.eval()(NODES, BATCH), readout.eval()(NODES, BATCH))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(NODES, BATCH), readout(NODES, BATCH))
    readout.train().reset_parameters()
    fresh = make(seed=1)
    assert all(
        torch.allclose(a, b, rtol=1e-7)  # a tenth in double precision, and in single
        for a, b in zip(readout.state_dict().values(), fresh.state_dict().values(), strict=True)
    )


def test_single_precision_is_close_to_double():
    readout = FlowReadout(2, 3)
    out = readout(NODES.float(), BATCH)
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), make()(NODES, BATCH), atol=1e-3)


def test_the_whole_readout_is_one_graph_for_torch_compile():
    readout = make()
    other = copy.deepcopy(readout)
    traced = torch.compile(lambda x, index: readout(x, index, dim_size=3), fullgraph=True, backend="eager")
    assert torch.allclose(traced(NODES, BATCH), other(NODES, BATCH, dim_size=3), atol=1e-10)
    for name, value in other.state_dict().items():
        assert torch.allclose(readout.state_dict()[name], value, rtol=1e-10), name
    readout.eval()
    assert torch.equal(traced(NODES, BATCH), readout(NODES, BATCH, dim_size=3))


def test_the_reference_may_be_given():
    reference = references.kmeans(NODES, 3)
    readout = make(reference=reference)
    learned = [name for name, _ in readout.named_parameters() if "norm" not in name]
    assert torch.equal(readout.reference, reference) and learned == ["reference", "shape_map"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "layer"}, "Unknown norm 'layer'; pass 'batch' or None"),
        ({"engine": "cuda"}, "Unknown engine 'cuda'; pass 'auto', 'compiled' or 'torch'"),
        ({"on_failure": "hide"}, "Unknown on_failure 'hide'; pass 'ignore', 'warn' or 'raise'"),
        ({"size": "scale"}, "Unknown size 'scale'; pass 'append' or None"),
        ({"reference": "kmeans"}, "Unknown reference 'kmeans'"),
        ({"reference": torch.eye(2)}, "reference has 2 points, but num_points is 3"),
        ({"epsilon": 0.0}, "epsilon is 0"),
        (
            {"cost": "cosine"},
            r"One step knows the squared Euclidean .* cost, not Cosine\(\); use flow_pool or FlowPool",
        ),
        ({"cost": costs.Mahalanobis(2, rank=1)}, "One step knows the squared Euclidean and the diagonal Mahalanobis"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        FlowReadout(2, 3, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((NODES[:, :1], BATCH), {}, ValueError, r"x has shape \(15, 1\); expected \(num_nodes, 2\)"),
        ((NODES.tolist(), BATCH), {}, TypeError, "x is a list"),
        ((NODES.long(), BATCH), {}, TypeError, r"x has dtype torch.int64; .* pass x.float\(\)"),
        ((NODES, BATCH - 1), {}, ValueError, r"^index\[0\] is -1; graph ids must be at least 0"),
        ((NODES, BATCH[:3]), {}, ValueError, r"^index has shape \(3,\)"),
        ((NODES, BATCH, torch.tensor([0, 5, 11, 15])), {}, ValueError, "^index and ptr disagree"),
        ((NODES, BATCH), {"dim": 1}, ValueError, "dim is 1"),
        ((NODES, BATCH), {"max_num_elements": 5}, ValueError, "A graph has 6 nodes; max_num_elements is 5"),
        ((NODES, BATCH), {"masses": MASSES.float()}, TypeError, "masses is torch.float32, x is torch.float64"),
        ((NODES, BATCH), {"masses": -MASSES}, ValueError, "15 masses are negative"),
    ],
)
def test_wrong_input_is_named_in_the_words_of_the_layer(arguments, options, error, message):
    with pytest.raises(error, match=message):
        make()(*arguments, **options)


# As an aggregation


class Neighbours(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


def test_it_is_an_aggregation_of_pyg():
    readout = make().eval()
    assert isinstance(readout, Aggregation)
    expected = readout(NODES, BATCH)
    assert torch.equal(readout(NODES, BATCH, None, 3, -2, 6), expected)
    with_sum = MultiAggregation(["sum", readout], mode="cat")(NODES, BATCH)
    assert torch.equal(with_sum[:, 2:], expected)
    assert torch.allclose(with_sum[1, :2], NODES[BATCH == 1].sum(0))
    edge_index = torch.tensor([[1, 2, 3, 4, 0, 5], [0, 0, 0, 0, 3, 3]])
    torch.testing.assert_close(Neighbours(aggr=readout)(NODES[:6], edge_index)[0], readout(NODES[1:5])[0], **ROUNDING)
    with pytest.raises(TypeError, match="FlowReadout does not support TorchScript"):
        torch.jit.script(torch.nn.Sequential(readout))
    assert repr(readout) == "FlowReadout(2, num_points=3, shape_channels=64, size='append')"


def test_the_report_says_how_each_graph_went():
    readout = make(on_failure="ignore")
    with pytest.raises(RuntimeError, match="There is no report yet"):
        _ = readout.report
    nodes = NODES.clone()
    nodes[7, 0] = torch.inf
    readout(nodes, BATCH, dim_size=4)
    statuses = [Status.OK, Status.NONFINITE_INPUT, Status.OK, Status.EMPTY]
    assert readout.report.status.tolist() == statuses
    assert readout.report.converged.tolist() == [True, False, True, True]
    assert float(readout.report.residual[[0, 2, 3]].max()) < 1e-5
    assert str(readout.report).startswith("4 graphs: 2 OK, 1 EMPTY, 1 NONFINITE_INPUT; at most ")
    with pytest.raises(ArithmeticError, match=r"1 of 3 graphs are NONFINITE_INPUT \(graph 1\)"):
        make(on_failure="raise")(nodes, BATCH)
    with pytest.warns(RuntimeWarning, match=r"1 of 3 graphs are NONFINITE_INPUT \(graph 1\)"):
        make()(nodes, BATCH)


def test_its_signature_is_what_it_takes():
    assert list(inspect.signature(FlowReadout).parameters) == [
        "in_channels", "num_points", "shape_channels", "size", "norm", "reference", "seed", "epsilon", "cost", "engine",
        "on_failure",
    ]  # fmt: skip
    assert FlowReadout(4).num_points == 8
    with pytest.raises(TypeError, match="unexpected keyword argument 'debias'"):
        FlowReadout(2, 3, debias=False)


def test_it_begins_with_little_more_than_the_sum():
    readout, nodes = make(shape_channels=5), normalised(NODES)
    assert readout.out_channels == 2 + 1 + 5
    assert readout.output_norm.weight.tolist() == pytest.approx([1.0] * 3 + [0.1] * 5)
    rows = readout(NODES, BATCH)
    sums = torch.stack([nodes[graph == BATCH].sum(0) for graph in range(3)])
    sizes = torch.tensor([[6.0], [5.0], [4.0]], dtype=torch.float64)
    assert torch.allclose(rows[:, :3], normalised(torch.cat([sums, sizes], 1)), atol=1e-6)
    assert float(rows[:, 3:].detach().abs().max()) < 0.2
    # Without a sum there is nothing but the shape, and without norms the map itself is small.
    assert make(size=None).output_norm.weight.eq(1).all()
    ratio = make(norm=None).shape_map.abs().max() / make().shape_map.abs().max()
    assert float(ratio) == pytest.approx(0.1)


def test_beside_the_sum_the_shape_does_not_know_where_a_graph_lies():
    readout = make().eval()
    found, moved = readout(NODES, BATCH), readout(NODES + torch.tensor([5.0, -1.0]), BATCH)
    assert torch.allclose(found[:, 3:], moved[:, 3:], atol=1e-9)
    assert not torch.allclose(found[:, :2], moved[:, :2])
    apart = make(size=None).eval()
    assert not torch.allclose(apart(NODES, BATCH), apart(NODES + 5, BATCH))
    with pytest.raises(ValueError, match="shape_channels"):
        make(shape_channels=0)


def test_without_norms_no_graph_affects_another():
    readout = make(norm=None)
    assert [name for name, _ in readout.named_parameters()] == ["reference", "shape_map"] and not list(
        readout.buffers()
    )
    found = readout(NODES, BATCH)
    assert torch.allclose(found, expected_columns(readout, NODES, "append"), atol=1e-12)
    moved = torch.where((BATCH == 1).unsqueeze(-1), 2 * NODES, NODES)
    after = readout(moved, BATCH)
    assert torch.equal(after[[0, 2]], found[[0, 2]]) and not torch.allclose(after[1], found[1])


def test_a_step_takes_weights_of_the_features():
    """A diagonal cost is the plain one of weighted features; what the points receive is told in the features' units."""
    cost = costs.Mahalanobis(2).double()
    with torch.no_grad():
        cost.weight.copy_(torch.tensor([0.5, -0.3]))
    readout = make(cost=cost, size=None, shape_channels=12).eval()
    with torch.no_grad():
        readout.shape_map.copy_(torch.eye(12).view(12, 2, 3, 2))  # tells all that the points receive, as it is
    assert {"cost.weight", "reference"} <= {name for name, _ in readout.named_parameters()}
    scale, nodes = cost.weight.detach().exp(), NODES / (1 + 1e-5) ** 0.5
    given = {"reference": readout.reference * scale, "epsilon": 0.2, "relative": False}
    expected = transport_pool(nodes * scale, BATCH, **given).points / scale - readout.reference
    found = readout(NODES, BATCH)[:, :6].view(3, 3, 2) * (1 + 1e-5) ** 0.5
    assert torch.allclose(found, expected, atol=1e-9)
    found.square().sum().backward()
    assert cost.weight.grad.abs().min() > 1e-6
    readout.reset_parameters()
    assert not cost.weight.any()


# Graphs that cannot count


def trained(readout, nodes, batch, dim_size, rows, masses=None):
    """Rows of a call, gradients in nodes and parameters of a loss on them, and the state afterwards."""
    leaf = nodes.clone().requires_grad_()
    chosen = readout(leaf, batch, dim_size=dim_size, masses=masses)[rows]
    weights = torch.randn(chosen.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    gradients = torch.autograd.grad((chosen * weights).sum(), [leaf, *readout.parameters()])
    return chosen, gradients, list(readout.state_dict().values())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_graph_changes_nothing_for_the_others(value, training):
    """Neither of their rows, nor of any gradient, nor of the statistics: as if it were not there.

    The bits of nodes and their norm are the same. Those of the rows are, up to how a product of matrices of another height rounds.
    """
    readout = make(on_failure="ignore")
    readout(NODES, BATCH)
    readout.train(training)
    other = copy.deepcopy(readout)
    bad = torch.randn(4, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    bad[2, 1] = value
    nodes, batch = torch.cat([NODES[:6], bad, NODES[6:]]), torch.cat([BATCH[:6], torch.ones(4).long(), BATCH[6:] + 1])
    whole = readout(nodes, batch, dim_size=4)
    assert whole[1].isnan().all() and whole[[0, 2, 3]].isfinite().all()
    readout.load_state_dict(other.state_dict())
    rows, gradients, state = trained(readout, nodes, batch, 4, [0, 2, 3])
    expected = trained(other, NODES, BATCH, 3, [0, 1, 2])
    torch.testing.assert_close(rows, expected[0], **ROUNDING)
    mine = gradients[0][[*range(6), *range(10, 19)]]
    assert not gradients[0][6:10].any()
    for found, wanted in zip([mine, *gradients[1:], *state], [*expected[1], *expected[2]], strict=True):
        torch.testing.assert_close(found, wanted, **ROUNDING)


def test_empty_graphs_and_nodes_without_mass_do_not_count():
    first, second = make(), make()
    nodes, masses = torch.cat([NODES, NODES[:2] + 50]), torch.cat([MASSES, torch.zeros(2).double()])
    batch = torch.cat([BATCH, torch.tensor([0, 2])])
    found = trained(first, nodes, 2 * batch, 6, [0, 2, 4], masses)
    expected = trained(second, NODES, BATCH, 3, [0, 1, 2], MASSES)
    assert torch.allclose(found[0], expected[0], atol=1e-10)
    assert torch.allclose(found[1][0][:15], expected[1][0], atol=1e-8)
    for name, state in first.state_dict().items():
        assert torch.allclose(state, second.state_dict()[name], atol=1e-12), name


def test_statistics_are_those_of_batch_norm():
    readout = make()
    for _ in range(3):
        readout(NODES, BATCH)
    norm = torch.nn.BatchNorm1d(2).double()
    for _ in range(3):
        norm(NODES)
    for name, value in norm.state_dict().items():
        assert torch.allclose(readout.node_norm.state_dict()[name].double(), value.double(), rtol=1e-12), name
    readout.node_norm.momentum = norm.momentum = None
    readout(2 * NODES, BATCH)
    norm(2 * NODES)
    assert torch.allclose(readout.node_norm.running_var, norm.running_var, rtol=1e-12)


def test_a_broken_graph_under_torch_compile():
    nodes = NODES.clone()
    nodes[7, 0] = torch.nan
    readout = make(on_failure="ignore")
    other = copy.deepcopy(readout)
    traced = torch.compile(lambda x, index: readout(x, index, dim_size=3), fullgraph=True, backend="eager")
    found, expected = traced(nodes, BATCH), other(nodes, BATCH, dim_size=3)
    assert found[1].isnan().all()
    assert torch.allclose(found, expected, atol=1e-12, equal_nan=True)
    assert torch.allclose(readout.output_norm.running_var, other.output_norm.running_var, rtol=1e-12)


@pytest.mark.parametrize("width", [1e-3, 1e-6, 1e-9, 0.0])
def test_gradients_are_bounded_where_a_point_receives_nodes_without_spread(width):
    """Pairs of nodes that come together, a point for each pair: the gradient of the deviations must not blow up."""
    centres = torch.tensor([[-1.0, 0.0], [1.0, 0.5], [0.0, -2.0]], dtype=torch.float64)
    nodes = torch.cat([centres - width, centres + width, centres + 0.1, centres * 1.2]).requires_grad_()
    readout = FlowReadout(2, 3, reference=centres, epsilon=1e-3).double().eval()
    readout(nodes, torch.tensor([0] * 6 + [1] * 6)).sum().backward()
    assert nodes.grad.isfinite().all() and float(nodes.grad.abs().max()) < 5
    assert readout.reference.grad.isfinite().all() and float(readout.reference.grad.abs().max()) < 1e3


def test_autocast_takes_masses_of_single_precision():
    readout, linear = FlowReadout(2, 3).eval(), torch.nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = linear(NODES.float())
        out = readout(narrow, BATCH, masses=MASSES.float())
    assert narrow.dtype == out.dtype == torch.bfloat16
    expected = readout(narrow.float(), BATCH, masses=MASSES.float())
    assert torch.allclose(out.float(), expected, rtol=2**-7, atol=1e-2)


def test_both_engines_give_the_same():
    one, other = (make(engine=engine)(NODES, BATCH) for engine in ("compiled", "torch"))
    assert torch.allclose(one, other, atol=1e-10)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.vmap])
@pytest.mark.parametrize(
    "pool",
    [
        FlowReadout(3, 2),
        FlowPool(3, 2),
        lambda x: COARSEN(x, torch.empty(2, 0, dtype=torch.long)).x,
        lambda x: flow_pool(x, reference=torch.eye(3)).points,
        lambda x: transport_pool(x, reference=torch.eye(3)).points,
    ],
)
def test_the_transforms_of_torch_func_are_refused_with_a_sentence(pool, transform):
    with pytest.raises(TypeError, match="does not work inside torch.func"):
        transform(lambda x: pool(x).sum())(torch.ones(2, 4, 3) if transform is torch.func.vmap else torch.ones(4, 3))
