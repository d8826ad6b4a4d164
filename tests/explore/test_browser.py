"""The page in a real browser, asked to do what a person does."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from explore.test_runs import write_run

from flowpool.explore import compare, graphs, play
from flowpool.explore.server import Explorer, make_explorer
from flowpool.lab.datasets.source import Source
from flowpool.lab.options import Columns

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'flowpool[dev]' brings it")
Page, expect = sync_api.Page, sync_api.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: install it (Debian: apt-get install chromium) and run again"
)

VIEWS = {
    "play": "#play-plane .point",
    "graphs": "#graphs-graph .atom",
    "compare": "#pool-mean .point",
    "runs": "#runs-rows tr",
}
PATIENCE = 120_000  # milliseconds; kernels may have to be compiled first


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explorer]:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "deep" / "one run", report="<h1>A report</h1><script>document.title = 'ran'</script>")
    made = make_explorer(None, folder)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Two names of this machine: one that the server may answer to, and one of a stranger.
    options = ["--no-sandbox", "--no-proxy-server", "--host-resolver-rules=MAP stranger.test 127.0.0.1"]
    with sync_api.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=options)
        yield launched
        launched.close()


class Watched:
    """A page, with everything that it asked for and complained about."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.requests: list[Any] = []
        self.complaints: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: self.requests.append(request))
        page.on("console", lambda said: self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, explorer: Explorer, view: str) -> None:
        self.page.goto(f"{explorer.url}#/{view}")
        self.page.locator(VIEWS[view]).first.wait_for()

    def asked(self, name: str) -> dict[str, Any]:
        """The newest question of that name."""
        return json.loads([r.post_data for r in self.requests if r.url.endswith(f"/api/{name}")][-1])

    def value(self, name: str) -> str:
        return str(self.page.inner_text(f"#play-readout [data-value={name}]"))

    def points(self) -> list[str]:
        return list(
            self.page.eval_on_selector_all("#play-plane .point", "all => all.map(e => e.getAttribute('transform'))")
        )

    def settle(self) -> None:
        """Waits until the last question is answered and drawn."""
        self.page.locator("main[aria-busy=false]").wait_for()


@pytest.fixture
def watched(browser: Any, request: pytest.FixtureRequest) -> Iterator[Watched]:
    scheme, width, height = getattr(request, "param", ("light", 1280, 900))
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
    yield Watched(context.new_page())
    context.close()


def short(value: float) -> str:
    """As the page writes numbers."""
    return f"{value:.1e}".replace("e-0", "e-") if value < 1e-3 else f"{value:.3g}"


def centre(page: Any, selector: str, number: int) -> tuple[float, float]:
    box = page.locator(selector).nth(number).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_points_and_numbers_follow_a_dragged_node(watched: Watched, explorer: Explorer) -> None:
    page = watched.page
    watched.open(explorer, "play")
    watched.settle()
    points, before = watched.points(), watched.asked("play")["nodes"][20]
    x, y = centre(page, "#play-plane .node .dot", 20)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 60, y - 40, steps=5)
    page.wait_for_function(
        "before => document.querySelector('.point').getAttribute('transform') !== before", arg=points[0]
    )
    page.mouse.move(x + 120, y - 80, steps=5)  # still dragging: the points have followed already
    page.mouse.up()
    watched.settle()
    asked = watched.asked("play")
    after = asked["nodes"][20]
    assert after[0] > before[0] and after[1] > before[1]
    assert (after[0] - before[0]) == pytest.approx(1.5 * (after[1] - before[1]))  # 120 to the right, 80 up
    moved = centre(page, "#play-plane .node .dot", 20)
    assert moved == pytest.approx((x + 120, y - 80), abs=1)
    given = play.answer(asked)
    assert watched.value("lost") == short(given["lost"])
    assert watched.value("divergence") == short(given["divergence"])
    assert watched.value("status") == given["status"]
    assert watched.complaints == []


def test_sliders_change_what_is_computed(watched: Watched, explorer: Explorer) -> None:
    page = watched.page
    watched.open(explorer, "play")
    expect(page.locator("#play-plane .point")).to_have_count(8)
    page.focus("#points")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#play-plane .point")).to_have_count(9)
    page.focus("#epsilon")
    page.keyboard.press("End")
    expect(page.locator("output[for=epsilon]")).to_have_text("10")
    page.focus("#seed")
    page.keyboard.press("Home")
    page.uncheck("#debias")
    watched.settle()
    asked = watched.asked("play")
    assert (asked["points"], asked["epsilon"], asked["seed"], asked["debias"]) == (9, 10.0, 0, False)
    assert watched.value("lost") == short(play.answer(asked)["lost"])
    page.uncheck("#show-plan")
    page.uncheck("#show-path")
    watched.settle()
    assert page.locator("#play-plane .plan line").count() == page.locator("#play-plane .paths polyline").count() == 0


def test_the_flow_is_animated_from_the_reference_to_the_end(watched: Watched, explorer: Explorer) -> None:
    page = watched.page
    watched.open(explorer, "play")
    watched.settle()
    end = watched.points()
    page.click("#play-animate")
    expect(page.locator("#play-readout [data-value=status]")).to_have_text("on the way")
    expect(page.locator("#play-animate")).to_have_text("❚❚ Pause")
    page.click("#play-animate")  # pause: the film stands still, and shows the numbers of its frame
    paused = watched.points()
    assert paused != end
    page.wait_for_timeout(200)
    assert watched.points() == paused
    given = play.answer(watched.asked("play"))
    assert watched.value("lost") in {short(value) for value in given["path_lost"]}
    page.fill("#play-step", "0")
    starts = page.eval_on_selector_all(
        "#play-plane .paths circle", "all => all.map(e => [e.cx.baseVal.value, e.cy.baseVal.value])"
    )
    now = [tuple(map(float, re.findall(r"[-\d.]+", place))) for place in watched.points()]
    assert now == [pytest.approx(tuple(start), abs=0.01) for start in starts]
    assert watched.value("divergence") == short(given["path_divergence"][0])
    page.click("#play-animate")
    expect(page.locator("#play-step-value")).to_have_text("end", timeout=PATIENCE)
    assert watched.points() == end
    assert watched.complaints == []


def test_nodes_are_added_removed_and_weighed(watched: Watched, explorer: Explorer) -> None:
    page = watched.page
    watched.open(explorer, "play")
    nodes = page.locator("#play-plane .node")
    expect(nodes).to_have_count(40)
    box = page.locator("#play-plane").bounding_box()
    page.mouse.dblclick(box["x"] + 30, box["y"] + 30)
    expect(nodes).to_have_count(41)
    page.fill("#node-mass", "5")
    watched.settle()
    assert watched.asked("play")["nodes"][40][2] == 5
    page.click("#node-remove")
    expect(nodes).to_have_count(40)
    page.click("#node-add")
    expect(nodes).to_have_count(41)
    page.select_option("#shape", "Ring")
    expect(nodes).to_have_count(40)


def test_text_with_nan_is_refused_and_the_cloud_stays(watched: Watched, explorer: Explorer) -> None:
    page = watched.page
    watched.open(explorer, "play")
    page.click("summary")
    for text, sentence in (
        ("0 0\nNaN 1", "Line 2: “NaN” is not a finite number"),
        ("0 0\n\n1 inf", "Line 3: “inf” is not a finite number"),
        ("1 2 3 4", "Line 1 has 4 numbers; write x y, or x y mass."),
        ("1 2 -3", "Line 1: the mass is -3; masses must not be negative."),
        ("0 1\n" * 201, "The text has 201 nodes; the page takes at most 200."),
    ):
        page.fill("#text", text)
        page.click("#text-apply")
        expect(page.locator("#notice")).to_contain_text(sentence)
    expect(page.locator("#play-plane .node")).to_have_count(40)
    page.fill("#text", "-1 0\n1, 0, 3\n\n")
    page.click("#text-apply")
    expect(page.locator("#play-plane .node")).to_have_count(2)
    expect(page.locator("#notice")).to_be_hidden()
    watched.settle()
    assert watched.asked("play")["nodes"] == [[-1, 0, 1], [1, 0, 3]]
    page.fill("#node-x", "")
    expect(page.locator("#notice")).to_contain_text("x of node 1 must be a number.")
    page.fill("#node-x", "4")
    expect(page.locator("#notice")).to_be_hidden()


def test_an_empty_cloud_and_masses_of_zero_are_explained(watched: Watched, explorer: Explorer) -> None:
    page = watched.page
    watched.open(explorer, "play")
    page.click("summary")
    page.fill("#text", "")
    page.click("#text-apply")
    expect(page.locator("#play-readout [data-value=status]")).to_have_text("EMPTY")
    page.fill("#text", "0 0 0\n1 1 0")
    page.click("#text-apply")
    expect(page.locator("#notice")).to_contain_text("The masses of all nodes are zero")


def test_everything_can_be_done_with_the_keyboard(watched: Watched, explorer: Explorer) -> None:
    page = watched.page
    watched.open(explorer, "play")
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('node')"):
            break
    label = page.locator("#play-plane .node.selected")
    expect(label).to_be_focused()
    before = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert before.startswith("Node 1 of 40 at ") and before.endswith("mass 1")
    page.keyboard.press("Shift+ArrowRight")
    watched.settle()
    x = watched.asked("play")["nodes"][0][0]
    page.keyboard.press("ArrowLeft")
    watched.settle()
    assert watched.asked("play")["nodes"][0][0] < x
    page.keyboard.press("+")
    watched.settle()
    assert watched.asked("play")["nodes"][0][2] == 1.25
    page.keyboard.press("PageDown")
    expect(label).to_have_attribute("aria-label", re.compile("^Node 2 of 40"))
    expect(label).to_be_focused()
    page.keyboard.press("Delete")
    expect(label).to_have_attribute("aria-label", re.compile("^Node 2 of 39"))
    expect(label).to_be_focused()
    page.keyboard.press("PageUp")
    page.keyboard.press("PageUp")  # around the corner
    expect(label).to_have_attribute("aria-label", re.compile("^Node 39 of 39"))
    page.focus("nav a >> nth=2")
    page.keyboard.press("Enter")
    expect(page.locator("#compare")).to_be_visible()
    expect(page.locator("#play")).to_be_hidden()


def test_six_pools_are_compared_and_follow_a_drag(watched: Watched, explorer: Explorer) -> None:
    page = watched.page
    watched.open(explorer, "compare")
    watched.settle()

    def losses() -> dict[str, str]:
        return {name: page.inner_text(f"#pool-{name} b") for name in compare.POOLS}

    def expected() -> dict[str, str]:
        return {pool["name"]: f"{pool['lost']:.3f}" for pool in compare.answer(watched.asked("compare"))["pools"]}

    first = losses()
    assert first == expected() and first["mean"] == "1.000"
    best = min(first, key=lambda name: float(first[name]))
    assert page.locator(".best").get_attribute("id") == f"pool-{best}"
    x, y = centre(page, "#pool-sort .node .dot", 5)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 50, y + 60, steps=4)
    page.mouse.up()
    watched.settle()
    assert losses() == expected() != first


def test_a_point_shows_its_atoms(watched: Watched, explorer: Explorer) -> None:
    page = watched.page
    watched.open(explorer, "graphs")
    watched.settle()
    given = graphs.answer(None, None, watched.asked("graph"))
    expect(page.locator("#graphs-graph .atom")).to_have_count(19)
    assert page.locator(".faint").count() == 0
    page.locator("#graphs-plane .point").nth(0).click()
    members = page.inner_text("#graphs-members")
    most = max(range(19), key=lambda node: given["shares"][node][0])
    assert members.startswith("Point 1 holds ")
    assert f"{round(100 * given['shares'][most][0])} % of node {most} {given['names'][most]}" in members
    bright = {node for node in range(19) if given["shares"][node][0] >= 0.1}
    assert page.locator("#graphs-graph .atom:not(.faint)").count() == len(bright)
    page.locator("#graphs-legend button").nth(0).click()  # the same point again: all are shown
    assert page.locator("#graphs-graph .faint").count() == 0
    page.click("#graphs-after")
    expect(page.locator("#graphs-about")).to_contain_text("MUTAG, graph 54 of 0 to 187")
    page.fill("#graphs-number", "188")
    page.keyboard.press("Tab")
    expect(page.locator("#notice")).to_contain_text("graph is 188; expected a whole number from 0 to 187")
    page.select_option("#graphs-dataset", "SHAPES")
    expect(page.locator("#graphs-about")).to_contain_text("SHAPES, graph 0 of 0 to 499")
    expect(page.locator("#notice")).to_be_hidden()


def test_a_pasted_table_is_drawn(watched: Watched, explorer: Explorer) -> None:
    page = watched.page
    watched.open(explorer, "graphs")
    watched.settle()
    page.select_option("#graphs-dataset", graphs.PASTED)
    page.fill("#graphs-table", "carbon 6 4\noxygen 8 2\nhydrogen 1 1\n\na 0\nb 1")
    page.click("#graphs-apply")
    expect(page.locator("#notice")).to_contain_text("Line 5 has 1 numbers, where the lines before have 2")
    page.fill("#graphs-table", "carbon 6 4\noxygen 8 2\nhydrogen 1 1\n\na 0 1\nb 1 0")
    page.click("#graphs-apply")
    expect(page.locator("#graphs-about")).to_contain_text("pasted table, graph 0 of 0 to 1: 3 nodes, 0 edges.")
    expect(page.locator("#graphs-graph .atom text").nth(2)).to_have_text("hydrogen")
    expect(page.locator("#notice")).to_be_hidden()
    page.click("#graphs-after")
    expect(page.locator("#graphs-graph .atom")).to_have_count(2)
    assert watched.complaints == ["Failed to load resource: the server responded with a status of 400 (Bad Request)"]


def test_a_file_of_the_reader_s_own_is_shown_first(watched: Watched, tmp_path: Path) -> None:
    pytest.importorskip("rdkit")
    (tmp_path / "mine.csv").write_text("smiles,name\nCCO,ethanol\nc1ccccc1,benzene\n")
    own = Source(str(tmp_path / "mine.csv"), None, Columns(smiles="smiles", target="name")).checked(targets=False)
    with make_explorer(None, tmp_path, own=own) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        watched.open(made, "graphs")
        expect(watched.page.locator("#graphs-about")).to_contain_text(
            "mine, graph 0 of 0 to 1: 3 nodes, 2 edges, class ethanol."
        )
        watched.page.goto(f"{made.url}#/runs")
        expect(watched.page.locator("#runs-none")).to_contain_text("flowpool evaluate MUTAG")
        made.shutdown()


def test_what_is_waited_for_is_said(watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go = threading.Event()
    read = graphs.Source.load

    def slow(source: Source, *given: Any) -> Any:
        go.wait(60)
        return read(source, *given)

    monkeypatch.setattr(graphs.Source, "load", slow)
    with make_explorer(None, tmp_path) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        watched.page.goto(f"{made.url}#/graphs")
        expect(watched.page.locator("#notice")).to_have_text(re.compile("Reading MUTAG\\."), timeout=PATIENCE)
        watched.open(made, "play")  # is answered meanwhile
        assert not go.is_set()
        go.set()
        made.shutdown()


def test_runs_are_listed_and_a_report_runs_no_script(watched: Watched, explorer: Explorer) -> None:
    page = watched.page
    watched.open(explorer, "runs")
    rows = page.locator("#runs-rows tr")
    expect(rows.nth(0)).to_contain_text("80.0 ± 8.2")  # 70, 80, 90 %
    expect(rows.nth(1)).to_contain_text("−10.0")
    assert rows.nth(0).locator("circle").count() == 3
    with page.context.expect_page() as opened:
        page.click("#runs-report")
    report = opened.value
    expect(report.locator("h1")).to_have_text("A report")
    assert report.title() != "ran"
    assert report.evaluate("window.origin") == "null"  # it belongs to no site


def test_no_request_leaves_the_machine(watched: Watched, explorer: Explorer) -> None:
    for view in VIEWS:
        watched.open(explorer, view)
        watched.settle()
    assert len(watched.requests) > 10
    assert [r.url for r in watched.requests if not r.url.startswith(explorer.url)] == []
    assert watched.complaints == []
    tried = watched.page.evaluate(
        """() => new Promise((resolve) => {
            document.addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
            fetch("http://stranger.test/").then(() => resolve("it left"), () => {});
        })"""
    )
    assert tried == "connect-src"


def test_a_wrong_token_and_a_stranger_s_name_are_refused(watched: Watched, explorer: Explorer) -> None:
    page = watched.page
    wrong = page.goto(explorer.url.replace(explorer.token, "x" * len(explorer.token)))
    assert wrong.status == 403
    assert "Use the address that flowpool explore printed" in page.inner_text("body")
    foreign = page.goto(explorer.url.replace("127.0.0.1", "stranger.test"))
    assert foreign.status == 403
    assert "only under its own address" in page.inner_text("body")


def test_a_server_that_ended_is_noticed(watched: Watched, tmp_path: Path) -> None:
    with make_explorer(None, tmp_path) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        watched.open(made, "play")
        watched.settle()
        made.shutdown()
    watched.page.route("**/api/*", lambda route: route.abort("connectionrefused"))
    watched.page.focus("#points")
    watched.page.keyboard.press("ArrowRight")
    expect(watched.page.locator("#notice")).to_contain_text(
        "The server does not answer. Is flowpool explore still running?"
    )


CONTRAST = """() => {
  const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return { rgb: [r, g, b], a }; };
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const { rgb, a } = parse(getComputedStyle(e).backgroundColor);
      if (a === 1) return rgb;
    }
    return [255, 255, 255];
  };
  const found = [];
  const visible = (e) => e.checkVisibility() && e.getClientRects().length > 0;
  for (const e of document.querySelectorAll("body *:not(svg *):not(option)")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || ["INPUT", "SELECT"].includes(e.tagName);
    if (!own || !visible(e) || e.disabled) continue;
    found.push([e.id || e.className || e.tagName, ratio(parse(getComputedStyle(e).color).rgb, ground(e))]);
  }
  for (const text of document.querySelectorAll(".point text")) {
    if (visible(text)) found.push(["number of a point",
      ratio(parse(getComputedStyle(text).fill).rgb, parse(getComputedStyle(text.previousSibling).fill).rgb)]);
  }
  for (const line of document.querySelectorAll(".paths polyline, .energy .curve, .node .dot, .edge")) {
    if (visible(line)) found.push([line.parentNode.getAttribute("class"),
      1.5 * ratio(parse(getComputedStyle(line).stroke).rgb, ground(line))]);
  }
  return found;
}"""  # lines need 3:1, text 4.5:1; the factor puts both on one scale

NAMELESS = """() => [...document.querySelectorAll("input, select, textarea, button, a, svg[role]")]
  .filter((e) => e.checkVisibility())
  .filter((e) => !(e.labels?.length || e.getAttribute("aria-label") || (e.matches("button, a") && e.textContent.trim())))
  .map((e) => e.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize(
    "watched",
    [("light", 1280, 900), ("dark", 1280, 900), ("light", 360, 740), ("dark", 360, 740)],
    ids=["light", "dark", "light-phone", "dark-phone"],
    indirect=True,
)
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_can_be_read(
    watched: Watched, explorer: Explorer, view: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Contrast, labels, width and a picture of every view; FLOWPOOL_SCREENSHOTS names a folder to look at them."""
    page = watched.page
    watched.open(explorer, view)
    watched.settle()
    ratios = page.evaluate(CONTRAST)
    assert len(ratios) > 15
    assert [(name, round(ratio, 2)) for name, ratio in ratios if ratio < 4.5] == []
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    marks = page.locator(f"#{view} .plane .point text").all_text_contents()
    assert all(marks) and len(marks) >= {"play": 8, "graphs": 5, "compare": 41, "runs": 0}[view]  # not by colour alone
    folder = Path(os.environ.get("FLOWPOOL_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{request.node.callspec.id}.png", full_page=True)
    assert watched.complaints == []
