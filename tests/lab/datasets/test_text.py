"""Tables out of text: values, lines in errors, and agreement of the fast with the slow reader."""

import random

import numpy as np
import pytest

from flowpool.lab.datasets import text
from flowpool.lab.datasets.errors import DatasetFormatError
from flowpool.lab.datasets.text import read_decimals, read_integers


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"1, 2\n3,4\n", [[1, 2], [3, 4]]),
        (b"1, 2\r\n3,4\r\n", [[1, 2], [3, 4]]),
        (b"  -1 ,\t+2\n003,4\n\n \n", [[-1, 2], [3, 4]]),
        (b"9223372036854775807,-9223372036854775808", [[2**63 - 1, -(2**63)]]),
        (b"", []),
    ],
)
def test_integers(data: bytes, expected: list[list[int]]) -> None:
    table = read_integers("f", data, 2)
    assert table.dtype == np.int64
    assert table.shape == (len(expected), 2)
    assert table.tolist() == expected


@pytest.mark.parametrize(
    ("data", "line", "problem"),
    [
        (b"1,2\n\n3,4\n", 2, "empty"),
        (b"\n1,2\n", 1, "empty"),
        (b"1,2\n3\n", 2, "1 entries, where 2"),
        (b"1,2\n3,4,5\n", 2, "3 entries, where 2"),
        (b"1,2\n3,4\n5,\n", 3, "'' is no whole number"),
        (b"1,2\n3,4.0\n", 2, "'4.0' is no whole number"),
        (b"1,2\n3,1e3\n", 2, "no whole number"),
        (b"1,2\n3,4_0\n", 2, "no whole number"),
        (b"1,2\n3,- 4\n", 2, "no whole number"),
        (b"1,2\n3,\xd9\xa3\n", 2, "no whole number"),
        (b"1,2\n3,4\0\n", 2, "no whole number"),
        (b"1,2\r3,4\n", 1, "3 entries"),
        (b"1,2\n3,9223372036854775808\n", 2, "does not fit in 64 bits"),
        (b"1,2\n3," + b"9" * 10000 + b"\n", 2, "does not fit in 64 bits"),
        (b"\xef\xbb\xbf1,2\n", 1, "no whole number"),
    ],
)
def test_malformed_integers_name_file_and_line(data: bytes, line: int, problem: str) -> None:
    with pytest.raises(DatasetFormatError, match=problem) as caught:
        read_integers("SET_A.txt", data, 2)
    assert (caught.value.file, caught.value.line) == ("SET_A.txt", line)
    assert str(caught.value).startswith(f"SET_A.txt, line {line}: ")
    assert len(str(caught.value)) < 200


def test_decimals() -> None:
    table = read_decimals("f", b" 11.5, -.25,1.\n1e3,2E-1,+7\n")
    assert table.tolist() == [[11.5, -0.25, 1.0], [1000.0, 0.2, 7.0]]


@pytest.mark.parametrize("entry", [b"nan", b"inf", b"-Infinity", b"0x1p3", b"1e", b".", b"1e999", b"1e39", b""])
def test_malformed_and_infinite_decimals_name_the_line(entry: bytes) -> None:
    with pytest.raises(DatasetFormatError) as caught:
        read_decimals("f", b"1,2\n3,4\n5," + entry + b"\n6,7\n")
    assert caught.value.line == 3


def outcome(kind: str, data: bytes) -> object:
    try:
        table = read_integers("f", data, 2) if kind == "integers" else read_decimals("f", data)
    except DatasetFormatError as error:
        return error.line
    return table.tolist()


@pytest.mark.parametrize("kind", ["integers", "decimals"])
def test_fast_and_slow_reader_agree(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    randomness = random.Random(0)  # noqa: S311
    alphabet = [
        b"1",
        b"23",
        b"0",
        b",",
        b",",
        b"\n",
        b"\n",
        b" ",
        b"-",
        b"+",
        b".",
        b"e",
        b"\r",
        b"\t",
        b"\r\n",
    ]
    texts = [b"1,2\n3,4"] + [
        b"".join(randomness.choices(alphabet, k=randomness.randint(0, 5)))
        + b"\n".join(
            b"%d,%d" % (randomness.randint(-9, 99), randomness.randint(0, 9)) for _ in range(randomness.randint(0, 3))
        )
        + b"".join(randomness.choices(alphabet, k=randomness.randint(0, 6)))
        for _ in range(4000)
    ]
    fast = [outcome(kind, data) for data in texts]
    monkeypatch.setattr(text, "_read_fast", lambda body, dtype: None)
    slow = [outcome(kind, data) for data in texts]
    assert fast == slow
    accepted = sum(isinstance(result, list) for result in fast)
    assert 200 < accepted < 3800  # both kinds of text were among them
