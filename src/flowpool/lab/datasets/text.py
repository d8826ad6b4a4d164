"""Tables of numbers out of text, one row per line, errors exact to the line.

Two readers share one grammar. NumPy's reader takes well-formed text at full speed; whatever it does not
take as one row per line goes to the slow reader, which is the specification and names the offending line.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import numpy as np

from flowpool.lab.datasets.errors import DatasetFormatError

_INTEGER = re.compile(rb"[+-]?[0-9]+")
_DECIMAL = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LARGEST = float(np.finfo(np.float32).max)  # features are float32 in the end
_QUOTED = 40  # characters of a bad entry that an error shows


def read_integers(file: str, data: bytes, columns: int) -> np.ndarray:
    """``(R, columns)`` int64, row r from line r + 1 of the text ``data`` of ``file``."""
    return _read(file, data, columns, np.int64, b"0123456789+-, \t\n", _integer)


def read_decimals(file: str, data: bytes) -> np.ndarray:
    """``(R, D)`` float64, all finite as float32; D is what the first line holds."""
    columns = data.split(b"\n", 1)[0].count(b",") + 1
    return _read(file, data, columns, np.float64, b"0123456789+-.eE, \t\n", _decimal)


def _read(
    file: str,
    data: bytes,
    columns: int,
    dtype: type[np.number],
    alphabet: bytes,
    convert: Callable[[bytes], float],
) -> np.ndarray:
    body = data.replace(b"\r\n", b"\n").rstrip(b" \t\n")  # files may end in empty lines
    if not body:
        return np.empty((0, columns), dtype)
    table = None
    # Outside of this alphabet lie spellings that NumPy takes and others do not (nan, inf, lone \r).
    if not body.translate(None, alphabet):
        table = _read_fast(body, dtype)
    if table is None or table.shape != (body.count(b"\n") + 1, columns):  # NumPy skips empty lines
        return _read_slow(file, body, columns, dtype, convert)
    if dtype is np.float64:
        too_large = np.flatnonzero((np.abs(table) > _LARGEST).any(axis=1))
        if too_large.size:
            raise DatasetFormatError(file, int(too_large[0]) + 1, "a number is too large for float32.")
    return table


def _read_fast(body: bytes, dtype: type[np.number]) -> np.ndarray | None:
    try:
        return np.loadtxt(io.BytesIO(body), dtype=dtype, delimiter=",", comments=None, ndmin=2)
    except (ValueError, OverflowError):
        return None


def _read_slow(
    file: str, body: bytes, columns: int, dtype: type[np.number], convert: Callable[[bytes], float]
) -> np.ndarray:
    rows = []
    for number, line in enumerate(body.split(b"\n"), start=1):
        entries = [entry.strip(b" \t") for entry in line.split(b",")]
        if entries == [b""]:
            raise DatasetFormatError(file, number, "the line is empty.")
        if len(entries) != columns:
            problem = f"{len(entries)} entries, where {columns} separated by commas are expected."
            raise DatasetFormatError(file, number, problem)
        try:
            rows.append([convert(entry) for entry in entries])
        except ValueError as error:
            raise DatasetFormatError(file, number, str(error)) from None
    return np.array(rows, dtype)


def _integer(entry: bytes) -> int:
    if not _INTEGER.fullmatch(entry):
        raise ValueError(f"{_quote(entry)} is no whole number.")
    digits = entry.lstrip(b"+-").lstrip(b"0")
    # Length first: Python refuses to convert thousands of digits.
    if len(digits) > 19 or not -(2**63) <= int(entry) < 2**63:
        raise ValueError(f"{_quote(entry)} does not fit in 64 bits.")
    return int(entry)


def _decimal(entry: bytes) -> float:
    if not _DECIMAL.fullmatch(entry):
        raise ValueError(f"{_quote(entry)} is no finite decimal number.")
    value = float(entry)
    if abs(value) > _LARGEST:
        raise ValueError("a number is too large for float32.")
    return value


def _quote(entry: bytes) -> str:
    shown = entry[:_QUOTED].decode("ascii", "backslashreplace")
    return repr(shown + "..." if len(entry) > _QUOTED else shown)
