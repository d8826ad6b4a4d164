"""Sets of vectors out of text that somebody pasted, as from a spreadsheet."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch
from torch import Tensor

MOST_FEATURES = 100


class Pasted(NamedTuple):
    """One set: its vectors ``(N, D)``, and what each is called."""

    nodes: Tensor
    names: list[str]


def read(text: str) -> list[Pasted]:
    """One node per line, its numbers apart by commas, semicolons, tabs or spaces; an empty line begins the next set.

    A word in front of the numbers names the node. A first line of words alone is a header.
    """
    sets: list[list[tuple[str, list[float]]]] = [[]]
    width = None
    for number, line in enumerate(text.splitlines(), 1):
        entries = [entry for entry in re.split(r"[,;\t ]\s*", line.strip()) if entry]
        if not entries:
            sets.append([])
            continue
        values = [_number(entry) for entry in entries]
        if width is None and all(value is None for value in values):
            continue
        name = entries[0] if values[0] is None else ""
        found = values[1:] if name else values
        if None in found or not found:
            wrong = entries[values.index(None, 1 if name else 0)] if None in found else line.strip()
            raise ValueError(f"Line {number}: {wrong[:20]!r} is not a finite number.")
        width = width or len(found)
        if len(found) != width:
            raise ValueError(f"Line {number} has {len(found)} numbers, where the lines before have {width}.")
        if width > MOST_FEATURES:
            raise ValueError(f"Line {number} has {width} numbers; the page takes up to {MOST_FEATURES}.")
        sets[-1].append((name, [value for value in found if value is not None]))
    kept = [rows for rows in sets if rows]
    if not kept:
        raise ValueError("The table is empty: write one node per line, its numbers apart by commas or spaces.")
    return [
        Pasted(torch.tensor([values for _, values in rows], dtype=torch.float64), [name for name, _ in rows])
        for rows in kept
    ]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
