"""What the page sends: exact values come through, and what is wrong is named."""

import json

import pytest
import torch

from flowpool.explore import fields


def test_a_cloud_is_places_and_normalised_masses() -> None:
    nodes, masses = fields.cloud({"nodes": [[1, 2.5, 1], [0, 0, 3]]})
    assert nodes.tolist() == [[1.0, 2.5], [0.0, 0.0]]
    assert masses.tolist() == [0.25, 0.75]


def test_no_nodes_are_a_cloud_too() -> None:
    nodes, masses = fields.cloud({"nodes": []})
    assert nodes.shape == (0, 2) and masses.shape == (0,)


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        (3, "nodes is 3"),
        ([[0, 0]], r"nodes\[0\] is \[0, 0\]; expected \[x, y, mass\]"),
        ([[0, 0, 1], ["a", 0, 1]], 'x of node 2 is "a"; expected a number'),
        ([[0, None, 1]], "y of node 1 is null"),
        ([[0, True, 1]], "y of node 1 is true"),
        ([[0, 0, -1]], "mass of node 1 is -1; expected a number from 0"),
        ([[2e6, 0, 1]], "x of node 1 is 2000000.0; expected a number from -1e\\+06 to 1e\\+06"),
        ([[0, 0, 0], [1, 1, 0]], "masses of all nodes are zero"),
        ([[0, 0, 1]] * 201, "nodes is a list of 201; expected a list of at most 200"),
    ],
)
def test_a_bad_cloud_is_refused_in_one_sentence(nodes: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fields.cloud({"nodes": nodes})


@pytest.mark.parametrize("spelled", ["NaN", "Infinity", "-Infinity"])
def test_no_number_that_is_not_finite_is_read(spelled: str) -> None:
    with pytest.raises(ValueError, match=f"The request holds {spelled}"):
        fields.decode(f'{{"nodes": [[{spelled}, 0, 1]]}}'.encode())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not JSON"),
        (b"\xff{}", "not JSON"),
        (b"[1]", r"The request is \[1\]; expected a JSON object"),
        (b"[" * 60_000, "nested too deeply"),
    ],
)
def test_what_is_no_object_is_refused(content: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fields.decode(content)


def test_a_number_too_large_for_a_float_is_refused() -> None:
    body = fields.decode(json.dumps({"nodes": [[10**400, 0, 1]]}).encode())
    with pytest.raises(ValueError, match="x of node 1 is a long number"):
        fields.cloud(body)


def test_fields_are_neither_missing_nor_unknown() -> None:
    fields.require({"a": 1}, ("a",))
    with pytest.raises(ValueError, match="'b' is missing"):
        fields.require({"a": 1}, ("a", "b"))
    with pytest.raises(ValueError, match="Unknown field 'c'; known are a"):
        fields.require({"a": 1, "c": 2}, ("a",))


@pytest.mark.parametrize("value", [True, 1.0, "1", 0, 17, None])
def test_only_whole_numbers_in_range_are_whole(value: object) -> None:
    with pytest.raises(ValueError, match="points is .*; expected a whole number from 1 to 16"):
        fields.whole({"points": value}, "points", 1, 16)


def test_finite_keeps_numbers_and_drops_the_rest() -> None:
    assert fields.finite(0.5) == 0.5
    assert fields.finite(float(torch.tensor(torch.nan))) is None
