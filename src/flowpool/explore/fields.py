"""What the page sends, read with care: every field is checked, and what is wrong is said in one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any, NoReturn

import torch
from torch import Tensor

MOST_NODES = 200
MOST_POINTS = 16
EPSILON_RANGE = (0.01, 10.0)
MOST_SEED = 9999
MOST_DIGITS = 1000  # of a whole number; Python itself refuses more than 4300, in words that are not for the page
FARTHEST = 1e6  # coordinate or mass: nobody draws farther, and squares of these are far from overflow

Body = dict[str, Any]


def decode(content: bytes) -> Body:
    """The JSON object that the bytes spell."""
    try:
        body = json.loads(content, parse_constant=_refuse_constant, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("The request is nested too deeply to be read.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"The request is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ValueError(f"The request is {_kind(body)}; expected a JSON object.")
    return body


def require(body: Body, names: Collection[str]) -> None:
    """Raises unless the body has exactly these fields."""
    if missing := [name for name in names if name not in body]:
        raise ValueError(f"The field {missing[0]!r} is missing.")
    if unknown := [name for name in body if name not in names]:
        raise ValueError(f"Unknown field {unknown[0]!r}; known are {', '.join(names) or 'none'}.")


def number(body: Body, name: str, low: float, high: float) -> float:
    value = body[name]
    if not _is_number(value) or not low <= value <= high:
        raise ValueError(f"{name} is {_kind(value)}; expected a number from {low:g} to {high:g}.")
    return float(value)


def whole(body: Body, name: str, low: int, high: int) -> int:
    value = body[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {_kind(value)}; expected a whole number from {low} to {high}.")
    return value


def flag(body: Body, name: str) -> bool:
    value = body[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {_kind(value)}; expected true or false.")
    return value


def text(body: Body, name: str) -> str:
    value = body[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_kind(value)}; expected a text.")
    return value


def cloud(body: Body, name: str = "nodes") -> tuple[Tensor, Tensor]:
    """Places ``(N, 2)`` and masses ``(N,)`` that sum to one, from a list of triples ``[x, y, mass]``."""
    rows = body[name]
    if not isinstance(rows, list) or len(rows) > MOST_NODES:
        found = f"a list of {len(rows)}" if isinstance(rows, list) else _kind(rows)
        raise ValueError(f"{name} is {found}; expected a list of at most {MOST_NODES} nodes [x, y, mass].")
    for place, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != 3:
            raise ValueError(f"{name}[{place}] is {_kind(row)}; expected [x, y, mass].")
        for entry, value in zip(("x", "y", "mass"), row, strict=True):
            low = 0.0 if entry == "mass" else -FARTHEST
            if not _is_number(value) or not low <= value <= FARTHEST:
                wanted = f"a number from {low:g} to {FARTHEST:g}"
                raise ValueError(f"{entry} of node {place + 1} is {_kind(value)}; expected {wanted}.")
    values = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    total = values[:, 2].sum()
    if rows and not float(total) > 0:
        raise ValueError("The masses of all nodes are zero; give at least one node a positive mass.")
    return values[:, :2].contiguous(), values[:, 2] / total


def finite(value: float) -> float | None:
    """The number, or None in place of NaN and infinities, which JSON cannot say."""
    return value if math.isfinite(value) else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"The request holds {name}; every number must be finite.")


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"The request holds a number of {len(digits)} digits.")
    return int(digits)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    """The value itself if it is short, else what kind of value it is."""
    spelled = json.dumps(value)
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
    return spelled if len(spelled) <= 24 else names.get(type(value), "a long number")
