"""The door: who is let in, what is refused, and that nothing breaks it."""

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from explore.clouds import crescent, question

from flowpool.explore import play, server, waiting
from flowpool.explore.server import ADDRESS, MOST_BYTES, Explorer, make_explorer

PAGE = Path(server.__file__).parent / "page"


def fail(body: dict[str, Any]) -> dict[str, Any]:
    if body.get("kind") == "missing":
        raise ModuleNotFoundError("No module named 'ot'", name="ot")
    if body.get("kind") == "value":
        raise ValueError("three is too many.")
    raise RuntimeError("secret details")


@pytest.fixture
def explorer() -> Iterator[Explorer]:
    made = Explorer({"echo": lambda body: body, "fail": fail}, lambda name: f"<p>{name}</p>".encode())
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


class Given(dict[str, Any]):
    status: int
    headers: http.client.HTTPMessage
    content: bytes


def call(
    explorer: Explorer, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> Given:
    connection = http.client.HTTPConnection(ADDRESS, explorer.server_port, timeout=20)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    given = Given(json.loads(content) if response.headers.get_content_type() == "application/json" else {})
    given.status, given.headers, given.content = response.status, response.headers, content
    return given


def post(explorer: Explorer, name: str, value: Any, **headers: str) -> Given:
    kind = {"Content-Type": "application/json"} | {key.replace("_", "-"): text for key, text in headers.items()}
    return call(explorer, "POST", f"/{explorer.token}/api/{name}", json.dumps(value).encode(), kind)


def test_it_listens_on_the_loopback_address_alone(explorer: Explorer) -> None:
    assert explorer.server_address[0] == "127.0.0.1"
    assert explorer.url == f"http://127.0.0.1:{explorer.server_port}/{explorer.token}/"
    assert len(explorer.token) >= 32


def test_every_start_has_a_token_of_its_own(explorer: Explorer) -> None:
    with Explorer({}, lambda name: b"") as other:
        assert other.token != explorer.token


def test_the_page_and_its_files_are_served(explorer: Explorer) -> None:
    index = call(explorer, "GET", f"/{explorer.token}/")
    assert index.status == 200 and index.content == (PAGE / "index.html").read_bytes()
    for name in re.findall(r'(?:src|href)="([\w.]+)"', index.content.decode()):
        assert call(explorer, "GET", f"/{explorer.token}/{name}").status == 200, name
    script = call(explorer, "GET", f"/{explorer.token}/main.js")
    assert script.headers["Content-Type"] == "text/javascript; charset=utf-8"


def test_the_policy_lets_nothing_in_from_outside(explorer: Explorer) -> None:
    headers = call(explorer, "GET", f"/{explorer.token}/").headers
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


def test_the_page_names_no_other_host() -> None:
    for file in PAGE.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")  # a name, which nobody fetches
        assert not re.search(r"https?:|//\w+\.\w|@import|url\(", text), file.name
        assert not re.search(r"\son\w+=|style=|javascript:|innerHTML|eval\(", text), file.name


@pytest.mark.parametrize("path", ["/", "/wrong/", "/{token}x/", "//", "/wrong/api/echo", "/%00/", "/é/"])
def test_without_the_token_there_is_nothing(explorer: Explorer, path: str) -> None:
    path = path.format(token=explorer.token)
    for method in ("GET", "POST"):
        with socket.create_connection((ADDRESS, explorer.server_port), timeout=20) as raw:
            head = f"{method} {path} HTTP/1.1\r\nHost: {ADDRESS}:{explorer.server_port}\r\nContent-Length: 0\r\n\r\n"
            raw.sendall(head.encode())
            answer = raw.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 403 "), (method, answer[:200])
        assert b"flowpool explore printed" in answer
        assert explorer.token.encode() not in answer


@pytest.mark.parametrize(
    "host",
    ["evil.test", "evil.test:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1:{port}.evil.test", "0.0.0.0:{port}", ""],
)
def test_a_foreign_host_header_is_refused(explorer: Explorer, host: str) -> None:
    named = {"Host": host.format(port=explorer.server_port)}
    assert call(explorer, "GET", f"/{explorer.token}/", headers=named).status == 403
    assert post(explorer, "echo", {}, **named).status == 403


def test_two_host_headers_or_none_are_refused(explorer: Explorer) -> None:
    own = f"Host: {ADDRESS}:{explorer.server_port}\r\n"
    for hosts in ("", own + own, own + "Host: evil.test\r\n"):
        with socket.create_connection((ADDRESS, explorer.server_port), timeout=20) as raw:
            raw.sendall(f"GET /{explorer.token}/ HTTP/1.1\r\n{hosts}\r\n".encode())
            assert raw.makefile("rb").read().startswith(b"HTTP/1.1 403 ")


def test_localhost_is_a_name_of_this_machine(explorer: Explorer) -> None:
    named = {"Host": f"localhost:{explorer.server_port}"}
    assert call(explorer, "GET", f"/{explorer.token}/", headers=named).status == 200


def test_pages_of_other_sites_are_not_answered(explorer: Explorer) -> None:
    assert post(explorer, "echo", {}, Origin="http://evil.test").status == 403
    assert post(explorer, "echo", {}, Origin="null").status == 403
    assert post(explorer, "echo", {}, Origin=f"http://{ADDRESS}:{explorer.server_port}").status == 200
    assert post(explorer, "echo", {}, Content_Type="text/plain").status == 415  # what a form may send unasked


def test_questions_are_answered(explorer: Explorer) -> None:
    given = post(explorer, "echo", {"a": [1, 2.5, "ä"]})
    assert given.status == 200 and given == {"a": [1, 2.5, "ä"]}


def test_a_long_body_is_not_read(explorer: Explorer) -> None:
    given = post(explorer, "echo", {"a": "x" * MOST_BYTES})
    assert given.status == 413 and given["error"] == f"A request may have at most {MOST_BYTES} bytes."
    assert post(explorer, "echo", {"a": "x" * (MOST_BYTES - 20)}).status == 200


@pytest.mark.parametrize(
    ("length", "status"), [("9" * 5000, 413), ("-1", 411), ("1e3", 411), ("", 411), ("٣", 411), ("+5", 411)]
)
def test_strange_lengths_are_refused(explorer: Explorer, length: str, status: int) -> None:
    with socket.create_connection((ADDRESS, explorer.server_port), timeout=20) as raw:
        head = f"POST /{explorer.token}/api/echo HTTP/1.1\r\nHost: {ADDRESS}:{explorer.server_port}\r\n"
        raw.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode())
        assert raw.makefile("rb").read().startswith(f"HTTP/1.1 {status} ".encode())


def test_a_get_with_a_body_and_two_lengths_are_refused(explorer: Explorer) -> None:
    """What is not read would be taken for the next request."""
    hidden = f"GET /{explorer.token}/main.js HTTP/1.1\r\nHost: {ADDRESS}:{explorer.server_port}\r\n\r\n"
    for method, path, lengths in (
        ("GET", "", [len(hidden)]),
        ("GET", "", [0, 0]),
        ("GET", "", ["0\r\nTransfer-Encoding: chunked"]),
        ("POST", "api/echo", [2, 2]),
        ("POST", "api/echo", [2, 2 + len(hidden)]),
    ):
        head = f"{method} /{explorer.token}/{path} HTTP/1.1\r\nHost: {ADDRESS}:{explorer.server_port}\r\n"
        head += "Content-Type: application/json\r\n" + "".join(f"Content-Length: {length}\r\n" for length in lengths)
        with socket.create_connection((ADDRESS, explorer.server_port), timeout=20) as raw:
            raw.sendall(f"{head}\r\n{'{}' if method == 'POST' else ''}{hidden}".encode())
            answer = raw.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1, (method, lengths)


def test_a_slow_answer_ends_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LIMIT", 0.3)
    entered, over = threading.Event(), threading.Event()

    def slow(body: dict[str, Any]) -> dict[str, Any]:
        entered.set()
        over.wait(20)
        return body

    with Explorer({"slow": slow, "echo": lambda body: body}, lambda name: b"") as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        given: list[Given] = []
        asking = threading.Thread(target=lambda: given.append(post(made, "slow", {})))
        asking.start()
        assert entered.wait(20)
        assert post(made, "echo", {"a": 1}) == {"a": 1}  # while the other is under way
        asking.join(20)
        assert given[0].status == 504 and "took longer than 0.3 seconds and was given up" in given[0]["error"]
        assert post(made, "echo", {"a": 2}) == {"a": 2}
        over.set()
        made.shutdown()


def test_what_happens_once_is_said_and_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LIMIT", 0.1)
    entered, go = threading.Event(), threading.Event()

    def reading(body: dict[str, Any]) -> dict[str, Any]:
        with waiting.once("Reading a large dataset."):
            entered.set()
            go.wait(20)
        return body

    with Explorer({"read": reading}, lambda name: b"") as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        given: list[Given] = []
        asking = threading.Thread(target=lambda: given.append(post(made, "read", {"a": 1})))
        asking.start()
        assert entered.wait(20)
        assert post(made, "waiting", {}) == {"waiting": "Reading a large dataset."}
        asking.join(0.5)
        assert asking.is_alive()  # five limits later
        go.set()
        asking.join(20)
        assert given[0] == {"a": 1} and post(made, "waiting", {}) == {"waiting": ""}
        made.shutdown()


def test_a_compilation_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("flowpool.kernels.machine.jit")
    assert waiting.waited_for() == ""
    monkeypatch.setattr(jit._watch, "current", object())
    assert waiting.waited_for() == waiting.COMPILING
    monkeypatch.delattr(jit, "is_compiling")  # as while it is being loaded
    assert waiting.waited_for() == ""


def test_chunks_are_refused(explorer: Explorer) -> None:
    assert post(explorer, "echo", {}, Transfer_Encoding="chunked").status == 411


def test_bad_json_gets_one_sentence(explorer: Explorer) -> None:
    kind = {"Content-Type": "application/json"}
    path = f"/{explorer.token}/api/echo"
    for content, sentence in (
        (b"{", "not JSON"),
        (b'{"a": NaN}', "holds NaN"),
        (b"[" * 9000, "nested too deeply"),
        (b'{"a": ' + 5000 * b"9" + b"}", "a number of 5000 digits"),
    ):
        given = call(explorer, "POST", path, content, kind)
        assert given.status == 400 and sentence in given["error"]


@pytest.mark.parametrize(
    "name", ["../fields.py", "..%2ffields.py", "nothing.js", "page/index.html", "index.html/x", "api/echo"]
)
def test_only_files_of_the_page_are_served(explorer: Explorer, name: str) -> None:
    assert call(explorer, "GET", f"/{explorer.token}/{name}").status == 404


def test_a_report_runs_nothing(explorer: Explorer) -> None:
    given = call(explorer, "GET", f"/{explorer.token}/report/deep%2Fa%20run")
    assert given.content == b"<p>deep/a run</p>"
    policy = given.headers["Content-Security-Policy"]
    assert "sandbox;" in policy and "default-src 'none'" in policy and "script" not in policy


def test_what_fails_is_said_and_the_server_lives_on(explorer: Explorer, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = post(explorer, "fail", {"kind": "value"})
    assert wrong.status == 400 and wrong["error"] == "three is too many."
    missing = post(explorer, "fail", {"kind": "missing"})
    assert missing.status == 501 and "The package ot is missing; pip install 'flowpool[lab]'" in missing["error"]
    broken = post(explorer, "fail", {})
    assert broken.status == 500 and "secret" not in broken["error"] and "RuntimeError" in broken["error"]
    assert "secret details" in capfd.readouterr().err
    assert post(explorer, "echo", {"a": 1}) == {"a": 1}


def test_other_methods_are_unknown(explorer: Explorer) -> None:
    for method in ("PUT", "DELETE", "OPTIONS", "HEAD"):
        assert call(explorer, method, f"/{explorer.token}/").status == 501


def test_one_connection_serves_a_whole_drag(explorer: Explorer) -> None:
    connection = http.client.HTTPConnection(ADDRESS, explorer.server_port, timeout=20)
    ports = set()
    for number in range(5):
        body = json.dumps({"n": number})
        connection.request("POST", f"/{explorer.token}/api/echo", body, {"Content-Type": "application/json"})
        assert json.loads(connection.getresponse().read()) == {"n": number}
        ports.add(connection.sock.getsockname()[1])
    connection.close()
    assert len(ports) == 1


def test_a_page_that_goes_away_makes_no_noise(explorer: Explorer, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection((ADDRESS, explorer.server_port), timeout=20) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # close with a reset
        raw.sendall(f"POST /{explorer.token}/api/echo HTTP/1.1\r\nContent-Length: 10\r\n".encode())
    assert post(explorer, "echo", {}).status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_falls_silent_is_let_go_without_noise(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server._Handler, "timeout", 0.2)
    with socket.create_connection((ADDRESS, explorer.server_port), timeout=20) as raw:
        head = f"POST /{explorer.token}/api/echo HTTP/1.1\r\nHost: {ADDRESS}:{explorer.server_port}\r\n"
        raw.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{{".encode())
        assert raw.makefile("rb").read().startswith(b"HTTP/1.1 408 ")  # and the connection is closed
    assert post(explorer, "echo", {}).status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_taken_port_is_an_error(explorer: Explorer) -> None:
    with pytest.raises(OSError, match="[Aa]ddress already in use"):
        Explorer({}, lambda name: b"", explorer.server_port)


def test_the_real_views_are_behind_it(tmp_path: Path) -> None:
    with make_explorer(None, tmp_path) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        assert post(made, "play", question(crescent())) == play.answer(question(crescent()))
        assert post(made, "runs", {}) == {"folder": str(tmp_path), "runs": []}
        assert "MUTAG" in post(made, "datasets", {})["datasets"]
        assert "unknown field" in post(made, "datasets", {"x": 1})["error"].lower()
        assert "'nodes' is missing" in post(made, "compare", {})["error"]
        assert call(made, "GET", f"/{made.token}/report/none").status == 400
        made.shutdown()
