"""The TU reader: known datasets, hand-made ones, malformed ones, and a fuzz over a small valid one."""

import dataclasses
import importlib.util
import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from flowpool.lab.datasets.errors import ArchiveError, DatasetFormatError
from flowpool.lab.datasets.record import GraphDataset
from flowpool.lab.datasets.tu import MAX_DEGREE, parse, read_content, read_tu, to_dataset

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("FLOWPOOL_DATA") or ROOT.parent / "shared" / "data")
GRAKEL = importlib.util.find_spec("grakel")
MUTAG = Path(GRAKEL.submodule_search_locations[0]) / "tests" / "data" / "MUTAG"  # type: ignore

# graphs, mean nodes, mean edges, classes with counts, least and most nodes, node labels, attributes, isolated
STATISTICS = {
    "MUTAG": (188, 17.93, 19.79, {"-1": 63, "1": 125}, 10, 28, 7, 0, 0),
    "PTC_MR": (344, 14.29, 14.69, {"-1": 192, "1": 152}, 2, 64, 18, 0, 0),
    "PROTEINS": (1113, 39.06, 72.82, {"1": 663, "2": 450}, 4, 620, 3, 1, 5),
    "ENZYMES": (600, 32.63, 62.14, {str(c): 100 for c in range(1, 7)}, 2, 126, 3, 18, 106),
    "NCI1": (4110, 29.87, 32.30, {"0": 2053, "1": 2057}, 3, 111, 37, 0, 428),
    "DD": (1178, 284.32, 715.66, {"1": 691, "2": 487}, 30, 5748, 82, 0, 0),
    "IMDB-BINARY": (1000, 19.77, 96.53, {"0": 500, "1": 500}, 12, 136, 0, 0, 0),
    "Mutagenicity": (4337, 30.32, 30.77, {"0": 2401, "1": 1936}, 4, 417, 14, 0, 2401),
}
PLACES = {"MUTAG": MUTAG} | {
    name: DATA / "tu" / f"{name}.zip" for name in STATISTICS if (DATA / "tu" / f"{name}.zip").is_file()
}


@pytest.mark.parametrize("name", PLACES)
def test_published_statistics(name: str) -> None:
    graphs, mean_nodes, mean_edges, classes, least, most, labels, attributes, isolated = STATISTICS[name]
    dataset = read_tu(PLACES[name], name)
    sizes = dataset.node_ptr.diff()
    assert len(dataset) == graphs
    assert round(len(dataset.features) / graphs, 2) == mean_nodes
    assert round(dataset.edge_index.shape[1] / 2 / graphs, 2) == mean_edges
    counts = torch.bincount(dataset.labels).tolist()
    assert dict(zip(dataset.class_names, counts, strict=True)) == classes
    assert (int(sizes.min()), int(sizes.max())) == (least, most)
    everything = dataset.batch(range(graphs))
    degree = torch.bincount(everything.edge_index[0], minlength=len(dataset.features))
    assert int((degree == 0).sum()) == isolated
    if labels:
        assert dataset.num_features == labels + attributes
        assert torch.equal(dataset.features[:, :labels].sum(dim=1), torch.ones(len(degree)))
    else:  # IMDB-BINARY: one-hot degrees
        assert torch.equal(dataset.features.argmax(dim=1), degree.clamp(max=MAX_DEGREE))
    # No edge leaves its graph, is a loop, or stands twice; each has its reverse.
    first, second = everything.edge_index
    assert torch.equal(everything.batch[first], everything.batch[second])
    assert bool((first != second).all())
    keys = first * len(degree) + second
    assert len(keys.unique()) == len(keys)
    assert torch.equal((second * len(degree) + first).sort().values, keys.sort().values)


def test_the_independent_reader_of_pyg_agrees_on_mutag() -> None:
    from torch_geometric.io import read_tu_data

    data, slices, _ = read_tu_data(str(MUTAG), "MUTAG")
    dataset = read_tu(MUTAG)
    assert torch.equal(dataset.features, data.x)
    assert torch.equal(dataset.labels, data.y)
    assert torch.equal(dataset.node_ptr, slices["x"])
    assert torch.equal(dataset.edge_ptr, slices["edge_index"])
    for index in (0, 57, 187):
        start, end = int(slices["edge_index"][index]), int(slices["edge_index"][index + 1])
        assert torch.equal(dataset[index].edge_index, data.edge_index[:, start:end])


# Two graphs: a triangle with a tail, and an edge with an isolated node. Labels and attributes have gaps.
SMALL = {
    "SET_graph_indicator.txt": b"1\n1\n1\n1\n2\n2\n2\n",
    "SET_A.txt": b"1, 2\n2, 1\n2, 3\n3, 2\n1,3\n3,1\n3, 4\n4, 3\n5, 6\n6, 5\n",
    "SET_graph_labels.txt": b"5\n-1\n",
    "SET_node_labels.txt": b"1\n1\n4\n9\n1\n4\n1\n",
    "SET_node_attributes.txt": b" 0.5, -1\n1,2\n3,4\n5,6\n7e-1,8\n9,10\n11,12.25\n",
}


def replaced(**changes: bytes) -> dict[str, bytes]:
    return SMALL | {f"SET_{part}.txt": data for part, data in changes.items()}


def build(files: dict[str, bytes]) -> GraphDataset:
    return to_dataset("SET", parse("SET", files))


def test_a_small_dataset_by_hand() -> None:
    dataset = build(SMALL)
    assert dataset.class_names == ("-1", "5")
    assert dataset.labels.tolist() == [1, 0]
    assert dataset.features.dtype == torch.float32
    assert dataset[0].x.tolist() == [[1, 0, 0, 0.5, -1], [1, 0, 0, 1, 2], [0, 1, 0, 3, 4], [0, 0, 1, 5, 6]]
    assert dataset[0].edge_index.tolist() == [[0, 0, 1, 1, 2, 2, 2, 3], [1, 2, 0, 2, 0, 1, 3, 2]]
    assert dataset[1].x.tolist() == [[1, 0, 0, np.float32(0.7), 8], [0, 1, 0, 9, 10], [1, 0, 0, 11, 12.25]]
    assert dataset[1].edge_index.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    "files",
    [
        {name: data.replace(b"\n", b"\r\n") for name, data in SMALL.items()},
        {name: data.replace(b", ", b",").rstrip() for name, data in SMALL.items()},
        {name: data + b"\n\n" for name, data in SMALL.items()},
        replaced(A=b"4,3\n1,3\n1, 2\n2, 1\n2, 3\n5, 6\n"),  # other order, one direction only
        replaced(A=SMALL["SET_A.txt"] * 2),  # every edge twice
    ],
)
def test_spelling_order_and_repeats_change_nothing(files: dict[str, bytes]) -> None:
    assert parse("SET", files).sha256() == parse("SET", SMALL).sha256()


@pytest.mark.parametrize(
    "files",
    [
        replaced(A=b"1,2\n2,3\n1,4\n3,4\n5,6\n"),
        replaced(graph_indicator=b"1\n1\n1\n1\n2\n2\n2\n2\n", node_labels=b"1\n1\n4\n9\n1\n4\n1\n1\n"),
        replaced(graph_labels=b"5\n-2\n"),
        replaced(node_labels=b"1\n1\n4\n9\n1\n4\n4\n"),
        replaced(node_attributes=SMALL["SET_node_attributes.txt"].replace(b"12.25", b"12.26")),
        {name: data for name, data in SMALL.items() if name != "SET_node_labels.txt"},
    ],
)
def test_every_part_enters_the_checksum(files: dict[str, bytes]) -> None:
    if len(files["SET_graph_indicator.txt"].split()) == 8:
        files["SET_node_attributes.txt"] += b"0,0\n"
    assert parse("SET", files).sha256() != parse("SET", SMALL).sha256()


def test_the_same_numbers_in_another_shape_have_another_checksum() -> None:
    content = parse("SET", SMALL)
    assert content.node_attributes is not None
    reshaped = dataclasses.replace(content, node_attributes=content.node_attributes.reshape(2, 7))
    assert reshaped.sha256() != content.sha256()


@pytest.mark.parametrize(
    ("files", "where", "problem"),
    [
        (replaced(graph_indicator=b""), ("graph_indicator", 1), "empty"),
        (
            replaced(graph_indicator=b"0\n1\n1\n1\n2\n2\n2\n"),
            ("graph_indicator", 1),
            "graph 0 at the beginning",
        ),
        (replaced(graph_indicator=b"1\n1\n1\n1\n3\n3\n3\n"), ("graph_indicator", 5), "graph 3 after graph 1"),
        (replaced(graph_indicator=b"1\n1\n2\n1\n2\n2\n2\n"), ("graph_indicator", 4), "graph 1 after graph 2"),
        (
            replaced(graph_indicator=b"1\n1\n1\n-9223372036854775808\n"),
            ("graph_indicator", 4),
            "without gaps",
        ),
        (replaced(graph_labels=b"5\n"), ("graph_labels", 2), "1 lines for 2 graphs"),
        (replaced(graph_labels=b"5\n1\n1\n"), ("graph_labels", 3), "3 lines for 2 graphs"),
        (replaced(graph_labels=b"5\nyes\n"), ("graph_labels", 2), "'yes' is no whole number"),
        (replaced(A=b"1, 2\n0, 2\n"), ("A", 2), "edge 0, 2, but there are nodes 1 to 7"),
        (replaced(A=b"1, 2\n2, 8\n"), ("A", 2), "nodes 1 to 7"),
        (replaced(A=b"1, 2\n3, 4\n4, 5\n"), ("A", 3), "edge 4, 5 joins graphs 1 and 2"),
        (replaced(A=b"1, 2\n1, 9223372036854775807\n"), ("A", 2), "nodes 1 to 7"),
        (replaced(node_labels=b"1\n1\n"), ("node_labels", 3), "2 lines for 7 nodes"),
        (replaced(node_labels=b"1,1\n"), ("node_labels", 1), "2 entries, where 1"),
        (replaced(node_attributes=b"1,2\n" * 8), ("node_attributes", 8), "8 lines for 7 nodes"),
        (replaced(node_attributes=b"1,2\n1\n"), ("node_attributes", 2), "1 entries, where 2"),
        (replaced(node_attributes=b"1,2\nnan,1\n"), ("node_attributes", 2), "finite"),
    ],
)
def test_malformed_files_name_file_and_line(files: dict[str, bytes], where: tuple[str, int], problem: str) -> None:
    with pytest.raises(DatasetFormatError, match=problem) as caught:
        build(files)
    assert (caught.value.file, caught.value.line) == (f"SET_{where[0]}.txt", where[1])


def test_labels_that_would_become_thousands_of_features_are_refused() -> None:
    files = {
        "SET_graph_indicator.txt": b"1\n" * 2000,
        "SET_A.txt": b"1,2\n",
        "SET_graph_labels.txt": b"0\n",
        "SET_node_labels.txt": b"".join(b"%d\n" % (7 * node) for node in range(2000)),
    }
    with pytest.raises(DatasetFormatError, match="2000 different node labels") as caught:
        build(files)
    assert caught.value.line == 1025


def test_nodes_without_features_get_degrees_or_ones() -> None:
    star = MAX_DEGREE + 6
    files = {
        "SET_graph_indicator.txt": b"1\n" * (star + 2),  # the last node is isolated
        "SET_A.txt": b"".join(b"1,%d\n" % (leaf + 2) for leaf in range(star)),
        "SET_graph_labels.txt": b"0\n",
    }
    content = parse("SET", files)
    degrees = to_dataset("SET", content, "degree").features
    assert degrees.shape == (star + 2, MAX_DEGREE + 1)
    assert degrees.argmax(dim=1).tolist() == [MAX_DEGREE] + [1] * star + [0]
    assert torch.equal(to_dataset("SET", content, "constant").features, torch.ones(star + 2, 1))
    with pytest.raises(ValueError, match="'degree' or 'constant'"):
        to_dataset("SET", content, "ones")


def test_a_dataset_without_any_edge_is_legal() -> None:
    dataset = build(replaced(A=b""))
    assert dataset.edge_index.shape == (2, 0)
    assert dataset.batch([0, 1]).edge_index.shape == (2, 0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "SET_A.txt").write_bytes(b"1, 2\n")
    with pytest.raises(ArchiveError, match="lacks SET_graph_indicator.txt, SET_graph_labels.txt"):
        read_content(tmp_path, "SET")


TOKENS = (
    b"-1 0 1 2 7 8 99999999999999999999 -9223372036854775808 9223372036854775807 1e3 1e309 0.5 nan inf -inf "
    b"0x1 1_0 NaN + - . , ,, \xff \xd9\xa3 \xef\xbb\xbf \0 # 'x' \\ \x1a"
).split() + [
    b"\n",
    b"\r\n",
    b"\r",
    b" ",
    b"\t",
    b"\x0b",
    b"\x0c",
    b"",
    b"9" * 5000,
    b"1\n" * 300,
    b"\x85",
    b"\x1c",
]


def mutate(files: dict[str, bytes], randomness: random.Random) -> dict[str, bytes]:
    """The files with one to three small damages: bytes, entries, lines, ends, or whole files mixed up."""
    files = dict(files)
    for _ in range(randomness.randint(1, 3)):
        name = randomness.choice(sorted(files))
        data = files[name]
        place, other = sorted(randomness.randint(0, len(data)) for _ in range(2))
        lines = data.split(b"\n")
        line = randomness.randrange(len(lines))
        damage = randomness.randrange(10)
        if damage == 0:
            data = data[:place] + bytes([randomness.randrange(256)]) + data[place + 1 :]
        elif damage == 1:
            data = data[:place] + randomness.choice(TOKENS) + data[place:]
        elif damage == 2:
            data = data[:place] + data[other:]
        elif damage == 3:
            data = data[:place]
        elif damage == 4:
            data = b"\n".join(lines[:line] + lines[line + 1 :])
        elif damage == 5:
            data = b"\n".join([*lines[:line], randomness.choice(lines), *lines[line:]])
        elif damage == 6:
            randomness.shuffle(lines)
            data = b"\n".join(lines)
        elif damage == 7:
            entries = lines[line].split(b",")
            entries[randomness.randrange(len(entries))] = randomness.choice(TOKENS)
            data = b"\n".join([*lines[:line], b",".join(entries), *lines[line + 1 :]])
        elif damage == 8:
            data = randomness.choice([b"", b"\n", data + data, data.replace(b"\n", b"\r\n"), files["SET_A.txt"]])
        else:
            data = data[:place] + randomness.randbytes(randomness.randint(1, 8)) + data[place:]
        files[name] = data
    return files


def fuzz(count: int, seed: int = 0) -> tuple[int, int]:
    """How many of ``count`` mutated datasets were read and how many refused; raises on anything else."""
    randomness = random.Random(seed)  # noqa: S311
    read = refused = 0
    for _ in range(count):
        files = mutate(SMALL, randomness)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                dataset = build(files)
                x, edge_index, batch, y, _ = dataset.batch(range(len(dataset)))
        except DatasetFormatError as error:
            refused += 1
            assert error.file in files
            assert 1 <= error.line <= files[error.file].count(b"\n") + 2
            assert f"{error.file}, line {error.line}: " in str(error)
        else:
            read += 1
            # Whatever was read hangs together.
            assert len(x) == len(batch) == int(dataset.node_ptr[-1])
            assert bool(torch.isfinite(x).all())
            assert torch.equal(batch[edge_index[0]], batch[edge_index[1]])
            assert len(batch.unique()) == len(y) == len(dataset)
            assert int(y.min()) >= 0 and int(y.max()) < dataset.num_classes
    return read, refused


def test_mutated_datasets_are_read_or_refused_with_file_and_line() -> None:
    read, refused = fuzz(500)
    assert read + refused == 500
    assert read > 10 and refused > 250
