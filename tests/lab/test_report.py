"""The page: complete by itself, and nothing in it is taken for markup."""

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

from lab.samples import FLOW, SORT

from flowpool.lab.comparison import compare
from flowpool.lab.report import describe, html_report

CONFIGURATION = {
    "dataset": "<b>MUTAG</b>",
    "protocol": "paper",
    "backbone": "sgc",
    "propagation": "raw",
    "channels": [8],
    "layers": [2],
    "jumping": False,
    "num_points": 5,
    "size": "none",
    "norm": "output",
    "padding": "none",
    "flow": {"epsilon": 0.3},
    "max_epochs": 300,
    "seed": 0,
}


class Page(HTMLParser):
    """Collects cells, and everything that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "data")]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


def report() -> str:
    warned = [replace(SORT[0], warnings=["1 < 2 & <script>"]), *SORT[1:]]
    rows = compare(FLOW + warned, ["flow", "sort"], "flow", as_in_paper=True)
    return html_report(rows, "flow", CONFIGURATION, "10 folds, <i>drawn</i>")


def test_the_page_fetches_nothing_and_its_pictures_are_svg() -> None:
    page = Page(report())
    assert len(page.fetched) == 4
    for source in page.fetched:
        head, _, body = source.partition(",")
        assert head == "data:image/svg+xml;base64"
        # Our own output, written a moment ago.
        root = ElementTree.fromstring(base64.b64decode(body))  # noqa: S314
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"url\(|@import|<script|<link", report())


def test_the_table_has_our_numbers_and_the_papers() -> None:
    cells = [cell.strip() for cell in Page(report()).cells]
    assert cells[:7] == ["pool", "accuracy (%)", "paper", "minus flow", "p", "folds", "weights"]
    assert cells[7:14] == ["flow", "50.00 ± 22.36", "82.48 ± 7.39", "", "", "4", "10"]
    assert cells[14:18] == ["sort", "25.00 ± 11.18", "73.30 ± 7.88", "-25.00 (9.13)"]


def test_names_and_warnings_are_text_not_markup() -> None:
    page = Page(report())
    assert not {"b", "i", "script"} & set(page.tags)
    assert "sort, 1 folds, for example: 1 &lt; 2 &amp; &lt;script&gt;" in report()


def test_the_description_names_what_matters() -> None:
    text = describe(CONFIGURATION)
    for part in ("paper protocol", "sgc (raw)", "d=8", "M=5", "BatchNorm: output", "300 epochs"):
        assert part in text
