"""What pyproject.toml cannot say: the description, whose links lead to the repository that the package is built from.

The environment variable ``FLOWPOOL_URL`` names that repository, as the workflow does. Without it the description has no
pictures and no links to files, since nobody could follow them.
"""

import os
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
PICTURE = re.compile(r'<img src="(?![a-z]+:)([^"]+)"[^>]*>')
LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:)([^)#\s]+)(#[\w-]*)?\)")


def description(text: str, url: str | None) -> str:
    """The README for readers who are elsewhere."""
    if url:
        text = PICTURE.sub(lambda found: found[0].replace(found[1], f"{url}/raw/HEAD/{found[1]}"), text)
        return LINK.sub(lambda found: f"[{found[1]}]({url}/blob/HEAD/{found[2]}{found[3] or ''})", text)
    text = re.sub(r"<p align.*?</p>\n*", "", text, flags=re.DOTALL)
    return LINK.sub(r"\1", text)


def addresses(url: str | None) -> dict[str, str]:
    if not url:
        return {}
    files = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    places = {name: f"{url}/blob/HEAD/{path}" for name, path in files.items()}
    return {"Source": url, "Issues": f"{url}/issues", **places}


if __name__ == "__main__":
    URL = os.environ.get("FLOWPOOL_URL", "").rstrip("/") or None
    setup(
        long_description=description((HERE / "README.md").read_text(encoding="utf-8"), URL),
        long_description_content_type="text/markdown",
        project_urls=addresses(URL),
    )
