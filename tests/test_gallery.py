"""Every script of the gallery runs and draws a picture, and every example gets a title."""

from __future__ import annotations

import ast
import importlib.util
import runpy
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples" / "gallery").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_draws_a_picture(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    plt = pytest.importorskip("matplotlib.pyplot", reason="pip install 'flowpool[lab]'")
    plt.switch_backend("Agg")
    plt.close("all")
    runpy.run_path(str(script))
    (figure,) = map(plt.figure, plt.get_fignums())
    figure.canvas.draw()
    assert figure.axes and all(axes.has_data() for axes in figure.axes)
    plt.close("all")


@pytest.fixture(scope="module")
def gallery_source() -> ModuleType:
    pytest.importorskip("sphinx_gallery", reason="pip install 'flowpool[docs]'")
    spec = importlib.util.spec_from_file_location("gallery_source", ROOT / "docs" / "_ext" / "gallery_source.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.stem)
def test_an_example_gets_a_title_and_keeps_its_code(script: Path, gallery_source: ModuleType) -> None:
    given = script.read_text(encoding="utf-8")
    made = gallery_source.titled(given)
    title, line = (ast.get_docstring(ast.parse(made)) or "").splitlines()[:2]
    assert 3 < len(title) < 100 and line == "=" * len(title)
    before, after = (ast.dump(ast.Module(ast.parse(text).body[1:], [])) for text in (given, made))
    assert before == after
