"""The recommended readout: each part against its definition, and the places where a block like this breaks."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from helpers import central_difference

from flowpool import flow_pool, references
from flowpool.nn.readout import FlowReadout
from flowpool.step.pool import transport_pool

GENERATOR = torch.Generator().manual_seed(0)
NODES = 3 + 2 * torch.randn(15, 2, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.tensor([0] * 6 + [1] * 5 + [2] * 4)
MASSES = torch.rand(15, generator=GENERATOR, dtype=torch.float64) + 0.3
SIZES = torch.tensor([[6.0], [5.0], [4.0]], dtype=torch.float64)
EVERY_KIND = [
    (structure, mass, by)
    for structure in ("points", "deviations", "displacement", "moments")
    for mass in (None, "append", "scale")
    for by in ("step", "flow", "free")
    if (structure, by) != ("moments", "flow")
]
EVERY_WAY = ["step", "flow", "free"]


def normalised(values):
    """BatchNorm by hand."""
    return (values - values.mean(0)) / (values.var(0, unbiased=False) + 1e-5).sqrt()


def make(structure="points", mass="append", by="flow", **options):
    return FlowReadout(2, 3, structure=structure, mass=mass, by=by, **options).double()


def expected_columns(readout, nodes, structure, mass, by, masses=None):
    """The vector before the last normalisation, from the functional forms."""
    weights = torch.ones(15, dtype=torch.float64) if masses is None else masses
    size = torch.zeros(3, 1, dtype=torch.float64).index_add(0, BATCH, weights[:, None])
    share = weights / size[BATCH, 0]
    mean = torch.zeros(3, 2, dtype=torch.float64).index_add(0, BATCH, share[:, None] * nodes)
    spread = torch.zeros(3, dtype=torch.float64).index_add(0, BATCH, share * (nodes - mean[BATCH]).square().sum(-1))
    if by == "flow":
        points, counts = flow_pool(nodes, BATCH, reference=readout.pool.reference, masses=masses).points, size / 3
        start = mean[:, None] + spread.sqrt()[:, None, None] * readout.pool.reference
        moved = torch.cat([mean[:, None], points - start], 1)
    else:
        given = {"points": readout.reference, "epsilon": 0.2, "masses": masses}
        shares, points, variances = transport_pool(nodes, BATCH, free=by == "free", **given)
        counts, moved = shares * size, points - readout.reference
    deviations = torch.cat([mean[:, None], points - mean[:, None]], 1)
    rows = {"points": points, "deviations": deviations, "displacement": moved}
    if structure == "moments":
        rows["moments"] = torch.cat([moved, variances], 1)
    rows = rows[structure]
    if mass == "scale":
        counts = counts.expand(3, 3)
        own = [size, counts] if len(rows[0]) == 4 else [counts, counts][: len(rows[0]) // 3]
        rows = rows * torch.cat(own, 1).unsqueeze(-1)
    if structure == "deviations" and by != "free":
        rows = rows[:, :3]
    extra = [] if mass != "append" else [size]
    if by == "free":
        extra = [counts if mass else shares]
    return torch.cat([rows.flatten(1), *extra], 1)


@pytest.mark.parametrize(("structure", "mass", "by"), EVERY_KIND)
def test_every_kind_is_what_its_parts_give(structure, mass, by):
    readout = make(structure, mass, by)
    for masses in (None, MASSES):
        expected = expected_columns(readout, normalised(NODES), structure, mass, by, masses)
        found = readout(NODES, BATCH, masses=masses)
        assert found.shape == (3, readout.out_channels)
        assert torch.allclose(found, normalised(expected), atol=1e-6)


@pytest.mark.parametrize("by", EVERY_WAY)
def test_the_order_of_nodes_and_the_way_to_name_graphs_do_not_matter(by):
    readout = make("deviations", by=by).eval()
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


@pytest.mark.parametrize("by", EVERY_WAY)
def test_one_graph_and_one_node_and_none_in_training(by):
    readout = make(by=by)
    before = copy.deepcopy(readout.output_norm.state_dict())
    out = readout(NODES[:6])
    assert out.shape == (1, readout.out_channels) and out.isfinite().all()
    after = readout.output_norm.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)  # one row has no statistics to learn from
    single = readout(NODES[:1], BATCH[:1])
    point = readout.node_norm.eval()(NODES[:1])[0]
    rows = single[0, :6].view(3, 2) * (1 + 1e-5) ** 0.5
    if by == "flow":
        assert torch.allclose(rows, point.expand(3, 2), atol=1e-9)
    assert readout(NODES[:0], BATCH[:0], dim_size=2).isfinite().all()
    assert readout(NODES[:0], BATCH[:0], dim_size=0).shape == (0, readout.out_channels)


@pytest.mark.parametrize(("structure", "mass", "by"), EVERY_KIND)
def test_gradients_agree_with_finite_differences(structure, mass, by):
    readout = make(structure, mass, by).eval()  # in training, tiny graphs make BatchNorm hide what is tested
    if by == "flow":
        readout.pool.options = replace(readout.pool.options, tolerance=1e-11)
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
    out = make("displacement")(nodes, batch)
    out.square().mul(torch.arange(1.0, 4 * out.shape[1] + 1).view(4, -1)).sum().backward()
    assert out.isfinite().all() and nodes.grad.isfinite().all()


@pytest.mark.parametrize("by", EVERY_WAY)
def test_state_dict_brings_everything_along(by):
    readout = make("displacement", by=by, seed=1)
    for _ in range(3):
        readout(NODES, BATCH)
    with torch.no_grad():
        for parameter in readout.parameters():
            parameter.add_(0.1)
    file = io.BytesIO()
    torch.save(readout.state_dict(), file)
    file.seek(0)
    other = make("displacement", by=by, seed=2)
    assert not torch.allclose(other.eval()(NODES, BATCH), readout.eval()(NODES, BATCH))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(NODES, BATCH), readout(NODES, BATCH))
    readout.train().reset_parameters()
    fresh = make("displacement", by=by, seed=1)
    assert all(
        torch.equal(a, b) for a, b in zip(readout.state_dict().values(), fresh.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("by", EVERY_WAY)
def test_single_precision_is_close_to_double(by):
    readout = FlowReadout(2, 3, structure="points", by=by)
    out = readout(NODES.float(), BATCH)
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), make(by=by)(NODES, BATCH), atol=1e-3)


@pytest.mark.parametrize("by", EVERY_WAY)
def test_the_whole_readout_is_one_graph_for_torch_compile(by):
    readout = make("displacement", by=by)
    traced = torch.compile(lambda x, index: readout(x, index, dim_size=3), fullgraph=True, backend="eager")
    assert torch.equal(traced(NODES, BATCH), readout(NODES, BATCH, dim_size=3))


@pytest.mark.parametrize("by", EVERY_WAY)
def test_the_reference_may_be_given(by):
    reference = references.kmeans(NODES, 3)
    readout = make(reference=reference, by=by)
    learned = [name for name, _ in readout.named_parameters() if "norm" not in name]
    assert torch.equal(readout.pool.reference if by == "flow" else readout.reference, reference)
    assert learned == ([] if by == "flow" else ["reference"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "steps"}, "Unknown by 'steps'; pass step, flow, free"),
        ({"structure": "shape"}, "Unknown structure 'shape'"),
        ({"mass": "size"}, "Unknown mass 'size'"),
        ({"by": "flow"}, "The flow has no moments"),
        ({"reference": "kmeans"}, "Unknown reference 'kmeans'"),
        ({"reference": torch.eye(2)}, "reference has 2 points, but num_points is 3"),
        ({"epsilon": 0.0}, "epsilon is 0"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        FlowReadout(2, 3, **options)
