"""What is written, what is told on the way, and which names are known."""

import csv
import io
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from flowpool.lab.paper import FIGURES, make_figures, measure, style
from flowpool.lab.paper.bar import make_figures_with_bar


def test_picture_data_and_caption_are_written(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    (result,) = make_figures(["measure"], tmp_path / "new", lambda name, share: told.append((name, share)))
    assert {file.name for file in result.files} == {"measure.png", "measure.svg", "measure.csv", "measure.md"}
    folder = tmp_path / "new"
    with Image.open(folder / "measure.png") as picture:
        assert np.asarray(picture).std() > 1  # not blank
    assert ElementTree.parse(folder / "measure.svg").getroot().tag.endswith("svg")  # noqa: S314 - our own file
    with (folder / "measure.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["feature_1"]) for row in rows] == pytest.approx(measure.compute().nodes[:, 0].tolist())
    assert (folder / "measure.md").read_text().strip() == result.caption
    assert told[0] == ("measure", 0.0)
    assert told[-1] == ("measure", 1.0)


def test_unknown_name_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no figure 'square'; the figures are measure, flow"):
        make_figures(["measure", "square"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_reproducible(tmp_path: Path) -> None:
    files = [make_figures(["coupling"], tmp_path / name)[0].files for name in "ab"]
    for first, second in zip(*files, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name


def test_bar_names_the_experiment_on_a_terminal_and_is_silent_elsewhere(tmp_path: Path) -> None:
    shown = {}
    for is_terminal in (True, False):
        console = Console(record=True, width=80, force_terminal=is_terminal, file=io.StringIO())
        make_figures_with_bar(["measure"], tmp_path, console)
        shown[is_terminal] = console.export_text()
    assert "measure" in shown[True] and "100%" in shown[True]
    assert shown[False] == ""


def test_every_experiment_of_the_paper_has_a_name() -> None:
    assert list(FIGURES) == [
        "measure", "flow", "conditioning", "hessian", "coupling", "vanishing", "circle", "invariance", "mutag",
        "sinkformer",
    ]  # fmt: skip


def test_animation_keeps_its_frames(tmp_path: Path) -> None:
    frames = []
    for place in range(4):
        figure, axes = style.canvas(width=2, height=2)
        axes[0, 0].plot([0, place + 1], [0, 1], color=style.RED)
        frames.append(style.snapshot(figure))
    with Image.open(style.save_gif(frames, tmp_path / "moving.gif")) as animation:
        assert animation.n_frames == 4
        assert animation.info["loop"] == 0
        assert animation.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
