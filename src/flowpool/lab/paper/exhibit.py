"""What an experiment hands over, and how it is written to disk."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from flowpool.lab.paper import style

Progress = Callable[[float], None]  # told the share of an experiment that is done, 0..1
Table = Mapping[str, Sequence[float | int | str]]  # equally long columns by name


@dataclass(frozen=True)
class Exhibit:
    """One experiment, computed and drawn.

    Attributes:
        figure: the picture.
        caption: a few sentences with the measured statement as numbers, Markdown.
        numbers: the same numbers by name.
        tables: the data behind the picture; the key ``""`` is written as ``<name>.csv``, another as
            ``<name>_<key>.csv``.
        frames: of an animation, if there is one.
    """

    figure: Figure
    caption: str
    numbers: Mapping[str, float]
    tables: Mapping[str, Table]
    frames: Sequence[Image.Image] = field(default=())


@dataclass(frozen=True)
class Written:
    """An experiment on disk.

    Attributes:
        name: of the experiment.
        caption: see :class:`Exhibit`.
        numbers: see :class:`Exhibit`.
        files: all that was written.
        seconds: wall time.
        cpu_seconds: processor time of all threads.
    """

    name: str
    caption: str
    numbers: Mapping[str, float]
    files: tuple[Path, ...]
    seconds: float
    cpu_seconds: float


def write(exhibit: Exhibit, name: str, out: Path) -> list[Path]:
    """Writes picture, data, caption and animation into the folder ``out`` and gives the paths."""
    out.mkdir(parents=True, exist_ok=True)
    files = style.save(exhibit.figure, out / name)
    if exhibit.frames:
        files.append(style.save_gif(exhibit.frames, out / f"{name}.gif"))
    for key, table in exhibit.tables.items():
        files.append(write_table(table, out / (f"{name}_{key}.csv" if key else f"{name}.csv")))
    caption = out / f"{name}.md"
    caption.write_text(exhibit.caption + "\n", encoding="utf-8")
    return [*files, caption]


def write_table(table: Table, path: Path) -> Path:
    """Writes columns as CSV with a header; numbers keep ten digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows([_cell(value) for value in row] for row in zip(*table.values(), strict=True))
    return path


def _cell(value: float | int | str) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
