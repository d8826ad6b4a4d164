"""How Sphinx builds the site: ``make docs``. Nothing is fetched, neither while building nor when a page is opened."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

os.environ.setdefault(
    "JAX_PLATFORMS", "cpu"
)  # an example that looks for other devices would print what it did not find

import gallery_source  # noqa: E402
import reference_pages  # noqa: E402

import flowpool  # noqa: E402

project = "flowpool"
author = "the flowpool developers"
version = release = flowpool.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "_ext", "gallery/**/*.ipynb", "gallery/**/*.py"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_mock_imports = reference_pages.absent()
autodoc_typehints = "description"  # types stand with the arguments, so that a signature is short
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
add_module_names = False

html_theme = "furo"
html_title = "flowpool"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#005a9c", "color-brand-content": "#005a9c"},
    "dark_css_variables": {"color-brand-primary": "#6cb8f0", "color-brand-content": "#6cb8f0"},
}
# One file with all that formulas need, fonts included.
mathjax_path = "mathjax/tex-svg.js"
copybutton_exclude = ".linenos, .gp, .go"

reference_pages.write(HERE / "reference")
EXAMPLES = gallery_source.collect(HERE.parent / "examples", HERE / "_build" / "examples")
sphinx_gallery_conf = {
    "examples_dirs": str(EXAMPLES),
    "gallery_dirs": "gallery",
    "filename_pattern": gallery_source.pattern(EXAMPLES),
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("matplotlib", "gallery_source"),
    "default_thumb_file": str(HERE / "_static" / "script.png"),
    "abort_on_example_error": True,
    "only_warn_on_example_error": False,
    "write_computation_times": False,  # that page would load scripts from other hosts
    "min_reported_time": 3600,
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "remove_config_comments": True,
    "plot_gallery": "True",
}


def copy_formulas(app: object, error: Exception | None) -> None:
    """Puts MathJax beside the pages."""
    found = importlib.util.find_spec("sphinx-mathjax-offline")
    if error is None and found is not None and found.origin is not None:
        source = Path(found.origin).parent / "static" / "mathjax" / "tex-svg.js"
        target = Path(app.outdir) / "_static" / "mathjax"  # type: ignore[attr-defined]
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def skip(app: object, what: str, name: str, *rest: object) -> bool | None:
    """Methods that scikit-learn adds to every estimator are not ours to describe, and torch calls ``extra_repr`` itself."""
    return True if name == "extra_repr" or name.startswith("set_") and name.endswith("_request") else None


def setup(app: object) -> None:
    app.connect("autodoc-skip-member", skip)  # type: ignore[attr-defined]
    app.connect("build-finished", copy_formulas)  # type: ignore[attr-defined]
