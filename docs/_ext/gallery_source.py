"""The examples as sphinx-gallery wants them: with a title, and with the pictures that they save.

``examples/gallery`` has scripts that were written for the gallery; they come first. The others, in ``examples``, get the first
sentence of their docstring as a title.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

from sphinx_gallery.scrapers import figure_rst

_ON_SEVERAL_PROCESSES = "train_with_lightning"  # shown, not run
# What stands for a script that was not run, for want of a library.
_THUMBNAILS = {
    "chemprop_esol": "molecule.png",
    "jax_beside_ott": "flow.png",
    "train_with_jax": "circle.png",
    "train_with_lightning": "mutag.png",
}
_HEADER = """Gallery
=======

Short scripts, each with a picture. All of them ran when this site was built.
"""
_MORE = """More examples
-------------

Complete scripts, from training a network to reading a report. Those whose framework was not installed when the site was built are
shown without their output.
"""


def collect(source: Path, target: Path) -> Path:
    """Copies the examples to where the gallery is made from, and returns that folder."""
    shutil.rmtree(target, ignore_errors=True)
    more = target / "more"
    more.mkdir(parents=True)
    (target / "GALLERY_HEADER.rst").write_text(_HEADER, encoding="utf-8")
    (more / "GALLERY_HEADER.rst").write_text(_MORE, encoding="utf-8")
    for script in sorted((source / "gallery").glob("plot_*.py")):
        shutil.copy(script, target)
    for script in sorted(source.glob("*.py")):
        text = titled(script.read_text(encoding="utf-8"))
        if script.stem in _THUMBNAILS and not _is_run(script):
            text += f"# sphinx_gallery_thumbnail_path = 'figures/{_THUMBNAILS[script.stem]}'\n"
        (more / script.name).write_text(text, encoding="utf-8")
    return target


def titled(text: str) -> str:
    """The script with a title in its docstring: the first sentence up to a colon, if there is one."""
    docstring = ast.get_docstring(ast.parse(text)) or "An example."
    first, _, rest = docstring.partition("\n\n")
    first = " ".join(first.split())
    title = re.split(r"[:.]( |$)", first)[0]
    title = title if len(title) < 70 else title.split(",")[0]
    body = "\n\n".join(part for part in (first if first.rstrip(".") != title else "", rest) if part)
    body = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"``\1``", body).replace("\\", "\\\\")
    end = ast.parse(text).body[0].end_lineno or 0
    code = "\n".join(text.splitlines()[end:])
    return f'"""\n{title}\n{"=" * len(title)}\n\n{body}\n"""\n{code}\n'


def pattern(examples: Path) -> str:
    """A regular expression of the scripts that are run."""
    run = [path for path in sorted(examples.rglob("*.py")) if _is_run(path)]
    return "|".join(re.escape(f"{path.parent.name}/{path.name}") for path in run)


def _is_run(path: Path) -> bool:
    """Whether its libraries are here and one process is enough."""
    if path.stem == _ON_SEVERAL_PROCESSES:
        return False
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        if any(importlib.util.find_spec(name.split(".")[0]) is None for name in names):
            return False
    return True


def _get_sg_image_scraper() -> Any:
    return saved_pictures


def saved_pictures(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Moves the pictures that a script has saved beside itself to its page."""
    moved = []
    for picture in sorted(Path(block_vars["src_file"]).parent.glob("*.png")):
        place = next(block_vars["image_path_iterator"])
        shutil.move(str(picture), place)
        moved.append(place)
    return str(figure_rst(moved, gallery_conf["src_dir"])) if moved else ""
