"""Pooling Arrow tables: every layout that a column of ragged features may have, and rows that cannot be pooled."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

pa = pytest.importorskip("pyarrow")

from flowpool import arrow, flow_pool, references  # noqa: E402
from flowpool.arrow import STATUSES, pool_arrow, pooled_reference  # noqa: E402

WIDTH, REFERENCE = 3, references.normal(3, 2, seed=4)


def graphs(count: int = 6, seed: int = 0) -> list[list[list[float]]]:
    """Graphs of 4 to 9 nodes, in numbers that single precision holds."""
    generator = np.random.default_rng(seed)
    return [
        generator.standard_normal((int(generator.integers(4, 10)), WIDTH)).astype(np.float32).tolist()
        for _ in range(count)
    ]


def fixed(number: Any = None) -> Any:
    return pa.list_(pa.list_(number or pa.float32(), WIDTH))


def column(rows: list[Any], kind: Any = None) -> Any:
    return pa.table({"x": pa.array(rows, kind or fixed())})


def points_of(table: Any) -> np.ndarray:
    return np.array(table["points"].to_pylist())


def alone(graph: list[list[float]], dtype: torch.dtype = torch.float32, **options: Any) -> np.ndarray:
    """What flow_pool says of one graph."""
    pooled = flow_pool(torch.tensor(graph, dtype=dtype), reference=REFERENCE.to(dtype), gradient="none", **options)
    return pooled.points[0].numpy()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (fixed(), torch.float32),
        (fixed(pa.float64()), torch.float64),
        (pa.list_(pa.list_(pa.float32())), torch.float32),
        (pa.large_list(pa.large_list(pa.float64())), torch.float64),
        (pa.large_list(pa.list_(pa.float32(), WIDTH)), torch.float32),
    ],
    ids=str,
)
def test_every_layout_gives_the_points_of_each_graph_to_the_bit(kind: Any, dtype: torch.dtype) -> None:
    rows = graphs()
    found = pool_arrow(column(rows, kind), reference=REFERENCE)
    assert found["status"].to_pylist() == ["OK"] * len(rows)
    number = pa.float32() if dtype == torch.float32 else pa.float64()
    assert found.schema.field("points").type == pa.list_(pa.list_(number, WIDTH), 2)
    for graph, points in zip(rows, points_of(found), strict=True):
        assert np.array_equal(points, alone(graph, dtype))


def test_slices_and_chunks_give_the_same_as_a_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = graphs(7)
    whole = points_of(pool_arrow(column(rows), reference=REFERENCE))
    for kind in (fixed(), pa.list_(pa.list_(pa.float32())), pa.large_list(pa.large_list(pa.float32()))):
        table = column(rows, kind)
        chunked = pa.concat_tables([table.slice(0, 2), table.slice(2, 0), table.slice(2, 4), table.slice(6)])
        assert np.array_equal(points_of(pool_arrow(chunked, reference=REFERENCE)), whole)
        assert np.array_equal(points_of(pool_arrow(table.slice(3, 2), reference=REFERENCE)), whole[3:5])
    monkeypatch.setattr(arrow, "_NUMBERS_AT_ONCE", 5 * REFERENCE.numel())
    assert np.array_equal(points_of(pool_arrow(column(rows), reference=REFERENCE)), whole)
    assert pool_arrow(column(rows), reference=REFERENCE)["points"].num_chunks == 2
    monkeypatch.setattr(arrow, "_GRAPHS_AT_ONCE", 3)
    assert np.array_equal(points_of(pool_arrow(column(rows), reference=REFERENCE)), whole)


def test_a_slice_of_the_entries_themselves_is_read_where_it_begins() -> None:
    rows = graphs(2)
    flat = np.array([[7.0] * WIDTH, *rows[0], *rows[1]], np.float32)
    entries = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), WIDTH).slice(1)
    ends = np.array([0, len(rows[0]), len(rows[0]) + len(rows[1])], np.int32)
    found = pool_arrow(pa.table({"x": pa.ListArray.from_arrays(ends, entries)}), reference=REFERENCE)
    assert np.array_equal(points_of(found)[0], alone(rows[0]))
    assert np.array_equal(points_of(found)[1], alone(rows[1]))


def test_graphs_of_equal_size_may_be_a_dense_column() -> None:
    dense = np.random.default_rng(1).standard_normal((4, 6, WIDTH)).astype(np.float32)
    kind = pa.list_(pa.list_(pa.float32(), WIDTH), 6)
    found = points_of(pool_arrow(column(dense.tolist(), kind).slice(1), reference=REFERENCE))
    assert all(np.array_equal(points, alone(graph)) for points, graph in zip(found, dense[1:].tolist(), strict=True))


def test_numbers_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def watched(nodes: torch.Tensor, **given: Any) -> Any:
        seen.extend([nodes, given["masses"]])
        return flow_pool(nodes, **given)

    monkeypatch.setattr(arrow, "flow_pool", watched)
    rows = graphs(4)
    table = pa.table(
        {"x": pa.array(rows, fixed()), "w": pa.array([[1.0] * len(g) for g in rows], pa.list_(pa.float32()))}
    )
    pool_arrow(table.slice(1), masses="w", reference=REFERENCE)
    nodes, masses = seen
    skipped, cells, weights = len(rows[0]), table["x"].chunk(0), table["w"].chunk(0)
    assert nodes.data_ptr() == cells.values.values.buffers()[1].address + 4 * WIDTH * skipped
    assert masses.data_ptr() == weights.values.buffers()[1].address + 4 * skipped


@pytest.mark.parametrize(
    ("number", "precision"),
    [
        (pa.float16(), torch.float32),
        (pa.int8(), torch.float32),
        (pa.uint16(), torch.float32),
        (pa.int64(), torch.float64),
    ],
    ids=str,
)
def test_other_numbers_are_converted_without_loss(number: Any, precision: torch.dtype) -> None:
    rows = [[[3, 1, 0], [1, 4, 0], [2, 0, 9], [5, 5, 5]]]
    typed = [[[np.float16(v) for v in node] for node in rows[0]]] if number == pa.float16() else rows
    found = pool_arrow(column(typed, fixed(number)), reference=REFERENCE)
    assert np.array_equal(points_of(found)[0], alone(rows[0], precision))


@pytest.mark.parametrize("kind", [fixed(), pa.list_(pa.list_(pa.float32()))], ids=str)
def test_bad_rows_keep_their_place_and_leave_the_others_alone(kind: Any) -> None:
    good, other = graphs(2)
    nan = [*good[:-1], [0.0, float("nan"), 0.0]]
    rows = [good, None, nan, [], other, [good[0], None], [good[0], [1.0, None, 2.0]], good]
    found = pool_arrow(column(rows, kind), reference=REFERENCE)
    expected = ["OK", "NULL", "NONFINITE_INPUT", "EMPTY", "OK", "NULL", "NULL", "OK"]
    assert found["status"].to_pylist() == expected
    assert set(expected) < set(STATUSES)
    points, residual = points_of(found), found["residual"].to_numpy()
    for place, graph in ((0, good), (4, other), (7, good)):
        assert np.array_equal(points[place], alone(graph))
    assert (points[3] == 0).all()
    assert np.isnan(points[[1, 2, 5, 6]]).all() and np.isnan(residual[[1, 2, 5, 6]]).all()
    assert (residual[[0, 4, 7]] <= 1e-5).all()


def test_numbers_behind_a_null_row_are_not_read() -> None:
    rows = graphs(3)
    table = column(rows)["x"].chunk(0)
    hidden = pa.ListArray.from_arrays(table.offsets, table.values, mask=pa.array([False, True, False]))
    found = pool_arrow(pa.table({"x": hidden}), reference=REFERENCE)
    assert found["status"].to_pylist() == ["OK", "NULL", "OK"]
    assert np.array_equal(points_of(found)[2], alone(rows[2]))


def test_a_node_of_another_width_spoils_its_row_only() -> None:
    good, other = graphs(2)
    rows = [good, [*other, [1.0, 2.0]], other, [[1.0] * 4, [2.0] * 2]]
    found = pool_arrow(column(rows, pa.list_(pa.list_(pa.float32()))), num_points=2, seed=4)
    assert found["status"].to_pylist() == ["OK", "WRONG_WIDTH", "OK", "WRONG_WIDTH"]
    assert np.array_equal(points_of(found)[2], alone(other))  # most nodes have three features, so the drawn one has


def test_masses_of_each_row_are_those_of_its_nodes() -> None:
    rows = graphs(4)
    weights: list[Any] = [[1.0 + k for k in range(len(graph))] for graph in rows]
    table = pa.table({"x": pa.array(rows, fixed()), "w": pa.array(weights)})
    found = points_of(pool_arrow(table, masses="w", reference=REFERENCE))
    for points, graph, masses in zip(found, rows, weights, strict=True):
        assert np.array_equal(points, alone(graph, masses=torch.tensor(masses)))


def test_bad_masses_spoil_their_row_only() -> None:
    graph = graphs(1)[0]
    ones = [1.0] * len(graph)
    masses = [
        ones,
        ones[1:],
        [-1.0, *ones[1:]],
        [float("inf"), *ones[1:]],
        [0.0] * len(graph),
        None,
        [None, *ones[1:]],
        ones,
    ]
    table = pa.table({"x": pa.array([graph] * 8, fixed()), "w": pa.array(masses, pa.list_(pa.float64()))})
    found = pool_arrow(table, masses="w", reference=REFERENCE)
    assert found["status"].to_pylist() == ["OK", *["BAD_MASSES"] * 4, "NULL", "NULL", "OK"]
    assert np.array_equal(points_of(found)[7], alone(graph, masses=torch.ones(len(graph))))


def test_other_columns_and_metadata_pass_through() -> None:
    table = column(graphs(3)).append_column("name", pa.array(["a", None, "c"])).replace_schema_metadata({"kept": "yes"})
    found = pool_arrow(table, reference=REFERENCE, epsilon=0.2, divergence=True)
    assert found.column_names == ["name", "points", "status", "residual", "divergence"]
    assert found["name"].to_pylist() == ["a", None, "c"]
    about = json.loads(found.schema.metadata[b"flowpool"])
    assert found.schema.metadata[b"kept"] == b"yes"
    assert (about["epsilon"], about["nodes"], about["masses"], about["relative"]) == (0.2, "x", None, True)
    assert torch.equal(pooled_reference(found.schema).float(), REFERENCE)
    for graph, value in zip(graphs(3), found["divergence"].to_pylist(), strict=True):
        pooled = flow_pool(torch.tensor(graph), reference=REFERENCE, epsilon=0.2)
        assert value == pytest.approx(float(pooled.divergence), rel=1e-9)


def test_record_batches_come_back_as_record_batches() -> None:
    batch = column(graphs(3)).to_batches()[0]
    found = pool_arrow(batch, reference=REFERENCE)
    assert isinstance(found, pa.RecordBatch)
    assert found.to_pylist() == pool_arrow(pa.Table.from_batches([batch]), reference=REFERENCE).to_pylist()


def test_no_rows_give_a_table_without_rows() -> None:
    found = pool_arrow(column([]), num_points=4)
    assert found.num_rows == 0
    assert found.schema.field("points").type == pa.list_(pa.list_(pa.float32(), WIDTH), 4)


def test_options_reach_the_solver() -> None:
    graph, shares = graphs(1)[0], [0.25, 0.75]
    options: dict[str, Any] = {"epsilon": 0.3, "relative": False, "debias": False, "cost": "cosine", "max_steps": 7}
    found = pool_arrow(column([graph]), reference=REFERENCE, point_masses=shares, engine="torch", **options)
    expected = alone(graph, point_masses=torch.tensor(shares), engine="torch", **options)
    assert np.array_equal(points_of(found)[0], expected)


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (column(graphs(1)), {"nodes": "y"}, "0 columns 'y'; one is needed. Its columns: 'x'"),
        (pa.table({"x": [[1.0, 2.0]]}), {}, "Column 'x' is of type list<.*double>; it must hold lists of lists"),
        (pa.table({"x": [[["a"]]]}), {}, "must hold lists of lists of numbers"),
        (column(graphs(1)), {"masses": "x"}, "must hold lists of numbers, one per node"),
        (column(graphs(1)), {"reference": np.zeros((2, 4))}, "have 3 features, but the reference has 4"),
        (column(graphs(1)), {"reference": REFERENCE, "num_points": 3}, "reference has 2 points, but num_points is 3"),
        (column(graphs(1)), {"reference": [1, 2]}, r"reference is torch.int64 \(2,\)"),
        (column(graphs(1)), {"reference": np.zeros((2, 3))}, "Rows 0 and 1 of the reference are equal"),
        (column(graphs(1)).append_column("status", pa.array([1])), {}, "column 'status' already"),
        (column([[]], pa.list_(pa.list_(pa.float32()))), {}, "no nodes with features to tell how many"),
        (column([[[], []]], pa.list_(pa.list_(pa.float32()))), {}, "no nodes with features to tell how many"),
        (column([[[], []]], pa.list_(pa.list_(pa.float32(), 0))), {}, "its lists have no entries"),
        (column(graphs(1)), {"reference": np.zeros((2, 0))}, r"reference is torch.float64 \(2, 0\); expected real"),
        (column(graphs(1)), {"epsilon": -1.0}, "epsilon is -1"),
    ],
)
def test_mistakes_are_told_in_one_sentence(table: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool_arrow(table, **options)


def test_only_tables_are_tables() -> None:
    with pytest.raises(TypeError, match="table is a dict; pass a pyarrow Table or RecordBatch"):
        pool_arrow({"x": graphs(1)})  # type: ignore[type-var]


def test_a_cost_is_given_by_name() -> None:
    with pytest.raises(TypeError, match="cost is a function; pass the name"):
        pool_arrow(column(graphs(1)), cost=lambda x, y: (x - y).square().sum(-1))  # type: ignore[arg-type]


def test_a_foreign_table_has_no_reference() -> None:
    with pytest.raises(ValueError, match="does not say from which reference"):
        pooled_reference(column(graphs(1)).schema)
