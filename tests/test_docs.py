"""Every Python snippet of the README and the documentation runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run_in_order(page):
    namespace = {}
    for snippet in SNIPPET.findall(page.read_text(encoding="utf-8")):
        exec(compile(snippet, str(page), "exec"), namespace)  # noqa: S102 - our own documentation


def test_the_readme_has_snippets():
    assert len(SNIPPET.findall((ROOT / "README.md").read_text(encoding="utf-8"))) >= 3
