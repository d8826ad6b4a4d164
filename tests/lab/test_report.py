"""The page: complete by itself, and nothing in it is taken for markup."""

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from lab.samples import FLOW, SORT, fold_result

from flowpool.lab.comparison import PAPER_TABLE, compare
from flowpool.lab.metrics import METRICS
from flowpool.lab.report import Conclusion, conclude, describe, html_report, verdict
from flowpool.lab.results import Candidate, Failure, Result, Store

CONFIGURATION = {
    "dataset": "<b>MUTAG</b>",
    "protocol": "paper",
    "metric": "accuracy",
    "as_in_paper": False,
    "origin": "<i>drawn</i>",
    "num_folds": 4,
    "notes": ["Row 3 & row 4 are <left> out."],
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
        self.fetched += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "data")]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


def concluded(results: Sequence[Result], metric: str = "accuracy", **more: Any) -> Conclusion:
    pools = list(dict.fromkeys(result.pool for result in results))
    given: dict[str, Any] = {"published": PAPER_TABLE} | more
    rows = compare(results, pools, pools[0], metric=METRICS[metric], **given)
    configuration = CONFIGURATION | {"metric": metric}
    failures = list(more.get("failures", []))
    return Conclusion(rows, pools[0], METRICS[metric], configuration, "4 folds", [], Path("r/report.html"), failures)


WARNED = [replace(SORT[0], warnings=["1 < 2 & <script>"]), *SORT[1:]]


def report() -> str:
    return html_report(concluded(FLOW + WARNED))


def test_the_page_fetches_nothing_and_has_each_picture_for_light_and_dark_pages() -> None:
    page = Page(report())
    assert len(page.fetched) == 2 * 4
    for source in page.fetched:
        head, _, body = source.partition(",")
        assert head == "data:image/svg+xml;base64"
        # Our own output, written a moment ago.
        root = ElementTree.fromstring(base64.b64decode(body))  # noqa: S314
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"url\(|@import|<script|<link", report())


def test_the_plot_of_differences_comes_first_then_the_table() -> None:
    heads = re.findall("<h2>(.*?)</h2>", report())
    assert heads == [
        "Differences to flow", "Table", "Every fold", "Learning curves", "Score and time", "Warnings", "Configuration",
    ]  # fmt: skip


def test_the_table_has_our_numbers_and_the_published_ones() -> None:
    cells = [cell.strip() for cell in Page(report()).cells]
    assert cells[:9] == ["pool", "accuracy %", "published", "minus flow", "p", "folds", "ms/epoch", "width", "weights"]
    assert cells[9:18] == ["flow", "50.00 ± 22.36", "82.48 ± 7.39", "", "", "4", "1000.0", "40", "10"]
    assert cells[18:22] == ["sort", "25.00 ± 11.18", "73.30 ± 7.88", "-25.00 (9.13)"]


def test_what_cannot_be_told_apart_is_said_in_plain_words() -> None:
    assert verdict(concluded(FLOW + SORT, published={})) == (
        "On these folds flow cannot be told from sort (95 % intervals)."
    )
    worse = [fold_result("sum", fold, result.score - 0.1 - 0.001 * fold) for fold, result in enumerate(FLOW)]
    assert verdict(concluded(FLOW + worse, published={})).startswith("On these folds flow is better than sum (95")
    assert verdict(concluded(FLOW + worse, "rmse", published={})).startswith(
        "On these folds flow is worse than sum (95"
    )
    assert verdict(concluded(FLOW)).startswith("There is nothing to compare")


def test_settings_that_were_chosen_are_told_with_how_often() -> None:
    settings = [{"layers": 3}, {"layers": 3}, {"layers": 5}, {"layers": 3}]
    chosen = [
        replace(result, candidates=[Candidate(setting, 0.5)] * 2, chosen=Candidate(setting, 0.5))
        for result, setting in zip(FLOW, settings, strict=True)
    ]
    assert "<li>flow: layers 3, in 3 of 4 folds</li>" in html_report(concluded([*chosen, *SORT]))


def test_names_and_warnings_are_text_not_markup() -> None:
    page = Page(report())
    assert not {"b", "i", "script", "left"} & set(page.tags)
    assert "sort, 1 folds, for example: 1 &lt; 2 &amp; &lt;script&gt;" in report()
    assert "Row 3 &amp; row 4 are &lt;left&gt; out." in report()


def test_failures_stand_in_the_page_with_their_trace() -> None:
    failure = Failure("sort", 0, 4, "ArithmeticError: x < 0", "Traceback: line 1")
    page = html_report(concluded(FLOW + SORT, failures=[failure]))
    assert "sort, repeat 0, fold 4: ArithmeticError: x &lt; 0" in page and "Traceback: line 1" in page
    assert "4, 1 failed" in page


def test_a_folder_is_concluded_and_its_report_stands_in_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "r", CONFIGURATION | {"dataset": "MINE", "metric": "rmse"})
    for result in FLOW + SORT:
        store.save(result)
    found = conclude(store, store.tasks())
    assert [row.pool for row in found.rows] == ["sort", "flow"]  # errors: the smaller is the better
    assert found.path.read_text() == html_report(found)
    data = json.loads(json.dumps(found.as_data(), allow_nan=False))
    assert data["metric"] == {"name": "rmse", "lower_is_better": True}
    assert data["folds"] == "4 folds, <i>drawn</i>"
    assert data["pools"][0]["score"] == {
        "mean": pytest.approx(0.25),
        "deviation": pytest.approx(0.1118, 1e-3),
        "count": 4,
    }


def test_the_description_names_what_matters() -> None:
    text = describe(CONFIGURATION)
    for part in ("paper protocol", "sgc (raw)", "d=8", "M=5", "BatchNorm: output", "300 epochs", "epsilon 0.3"):
        assert part in text
