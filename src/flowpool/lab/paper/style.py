"""How every picture of the lab looks: one palette, one set of sizes, and the writing of files.

The colours are those of Okabe and Ito, which stay apart for readers with any common colour blindness; where two groups
matter, they differ by marker or line style as well. Pictures are built without pyplot, so that nothing global changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#8A8A8A"
CYCLE = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, BLACK, YELLOW)
LINES = ("-", "--", "-.", ":")

_NEARLY_WHITE = 248
_GIF_COLOURS = 64
_GIF_DPI = 80

_SETTINGS: dict[Any, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.framealpha": 0.9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "svg.hashsalt": "flowpool",  # the same picture gives the same file
}


@contextmanager
def applied() -> Iterator[None]:
    """The lab's look, for the pictures made and saved inside."""
    with matplotlib.rc_context(_SETTINGS):
        yield


def canvas(
    columns: int = 1, rows: int = 1, width: float = 9.0, height: float = 3.4
) -> tuple[Figure, NDArray[np.object_]]:
    """A figure and its ``(rows, columns)`` grid of axes; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def plane(axes: Axes, title: str = "") -> None:
    """Makes the axes a map of the feature plane: equal units, no grid."""
    axes.set_aspect("equal", adjustable="datalim")
    axes.grid(False)
    axes.set_title(title)


def scatter(axes: Axes, places: Tensor | NDArray[np.float64], **look: Any) -> None:
    """Dots at the places ``(K, 2)``; ``look`` as for matplotlib."""
    axes.scatter(places[:, 0], places[:, 1], **look)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes ``stem.png`` and ``stem.svg`` and gives their paths."""
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    figure.savefig(png)
    figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def snapshot(figure: Figure) -> Image.Image:
    """The figure as it stands, one frame of an animation."""
    agg = FigureCanvasAgg(figure)
    figure.set_dpi(_GIF_DPI)
    agg.draw()
    return Image.fromarray(np.asarray(agg.buffer_rgba())).convert("RGB")


def save_gif(frames: Sequence[Image.Image], path: Path, seconds: float = 6.0) -> Path:
    """Writes an endless animation of about the given length, with a pause on its last frame."""
    # All frames share the palette of the last, which holds every colour: unchanged pixels then stay unchanged.
    palette = frames[-1].quantize(_GIF_COLOURS)
    # Shades next to white are drawn white: Pillow mixes them up, and a white picture would be a grey box on a white page.
    colours = np.reshape(palette.getpalette() or [], (-1, 3))
    colours[colours.min(1) >= _NEARLY_WHITE] = 255
    palette.putpalette(colours.ravel().tolist())
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    pace = max(20, round(1000 * seconds / len(frames)))
    durations = [pace] * (len(small) - 1) + [2000]
    small[0].save(path, save_all=True, append_images=small[1:], duration=durations, loop=0, optimize=True)
    return path
