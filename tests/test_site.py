"""The documentation site: it builds without a warning, its links lead somewhere, and no page asks another host for anything."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import flowpool

ROOT = Path(__file__).parents[1]
NEEDED = ("sphinx", "furo", "myst_parser", "sphinx_gallery", "sphinx_design", "sphinx_copybutton")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{MISSING} not installed: pip install -c constraints.txt '.[docs]'"
)

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NO_BROWSER = "no Chromium, or no Playwright: install your system's chromium and pip install playwright"
OUTSIDE = re.compile(r"\s*(?:[a-z]+:)?//", re.IGNORECASE)
LOADED = {
    "img": "src",
    "script": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "object": "data",
}


class Page(HTMLParser):
    """What a page loads, where it leads, and the places that can be led to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag in LOADED and LOADED[tag] in given:
            self.loads.append(given[LOADED[tag]])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; its examples are not run here, since ``make docs`` does that."""
    folder = tmp_path_factory.mktemp("site")
    sources = folder / "project"
    for name in ("docs", "examples"):
        ignored = shutil.ignore_patterns("_build", "__pycache__", "gallery" if name == "docs" else "")
        shutil.copytree(ROOT / name, sources / name, ignore=ignored)
    shutil.copy(ROOT / "CHANGELOG.md", sources)
    (sources / "src").symlink_to(Path(flowpool.__file__).parents[1])
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-D", "plot_gallery=0"]
    done = subprocess.run(
        [*command, str(sources / "docs"), str(folder / "html")],
        capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "MPLBACKEND": "Agg"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    assert len(found) > 20
    return found


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    outside = [f"{path.name}: {load}" for path, page in pages.items() for load in page.loads if OUTSIDE.match(load)]
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        found = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", text)
        outside += [f"{sheet.name}: {load}" for load in found if OUTSIDE.match(load)]
    assert not outside


def test_inner_links_and_files_exist(pages: dict[Path, Page]) -> None:
    broken, followed = [], 0
    for path, page in pages.items():
        for link in [*page.loads, *page.links]:
            if re.match(r"[a-z]+:", link) or OUTSIDE.match(link):
                continue
            address, place = urldefrag(link)
            target = (path.parent / unquote(address.split("?")[0])).resolve() if address else path
            followed += 1
            if not target.exists() or (place and target in pages and unquote(place) not in pages[target].places):
                broken.append(f"{path.name}: {link}")
    assert not broken
    assert followed > 500


def test_every_public_name_has_its_place_in_the_reference(site: Path, pages: dict[Path, Page]) -> None:
    places = {place for path, page in pages.items() if path.parent.name == "reference" for place in page.places}
    modules = {"costs", "masses", "references"}
    expected = {f"flowpool.{name}" for name in flowpool.__all__ if name not in modules}
    expected |= {f"module-flowpool.{name}" for name in modules}
    # The modules for other libraries too, whether their libraries are installed or not.
    expected |= {
        "flowpool.sklearn.FlowVectorizer",
        "flowpool.jax.flow_pool",
        "flowpool.arrow.pool_arrow",
        "flowpool.tgp.FlowPooling",
    }
    assert expected <= places


def test_no_markup_is_left_over(pages: dict[Path, Page]) -> None:
    """A role of the other markup language, say ``:math:`` in a Markdown page, would be shown as it was written."""
    role = re.compile(r":[a-z:]+:<code")
    assert not [path.name for path in pages if role.search(path.read_text(encoding="utf-8"))]


@pytest.mark.skipif(CHROMIUM is None or importlib.util.find_spec("playwright") is None, reason=NO_BROWSER)
def test_pages_open_without_a_request_or_an_error_and_formulas_are_drawn(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    outside: list[str] = []
    errors: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        view = browser.new_page()
        view.on("request", lambda request: outside.append(request.url) if "://" in request.url[:8] else None)
        view.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        view.on("pageerror", lambda error: errors.append(str(error)))
        for name in ("index.html", "gallery/index.html", "numerics.html", "reference/functions.html"):
            view.goto((site / name).as_uri())
            if name in ("numerics.html", "reference/functions.html"):
                view.wait_for_selector("mjx-container svg", timeout=20_000)
        browser.close()
    assert not [url for url in outside if not url.startswith("file:")]
    assert not errors
