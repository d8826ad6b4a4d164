"""The door: a web server for one person on this machine.

It listens on the loopback address alone and answers only those who know its token, which is part of every address. A
page of another site that the browser has open cannot know it; should it guess the port, or point its own name at this
machine, the checks of the token and of the Host header stop it. The page loads nothing from outside, and the
Content-Security-Policy holds it to that.
"""

from __future__ import annotations

import json
import secrets
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from flowpool.explore.waiting import Computing, GivenUp, once, waited_for

if TYPE_CHECKING:
    from flowpool.lab.datasets.source import Source

ADDRESS = "127.0.0.1"
MOST_BYTES = 64 * 1024  # of a request; 200 nodes need a quarter of it
PATIENCE = 30  # seconds without a byte after which a connection is closed

Answer = Callable[[dict[str, Any]], dict[str, Any]]

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report is one file with its styles and pictures inside. It runs nothing and belongs to no site, not even to ours.
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; frame-ancestors 'none'"


class Explorer(ThreadingHTTPServer):
    """The server.

    Args:
        answers: what computes the answer of each ``POST /TOKEN/api/NAME``.
        report: gives the page of a run, for ``GET /TOKEN/report/NAME``.
        port: 0 takes any free one.
    """

    daemon_threads = True  # a page that is still open keeps a connection, which must not keep the program

    def __init__(self, answers: Mapping[str, Answer], report: Callable[[str], bytes], port: int = 0) -> None:
        self.answers = answers
        self.report = report
        self.computing = Computing()
        super().__init__((ADDRESS, port), _Handler)
        self.token = secrets.token_urlsafe(24)
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        folder = files("flowpool.explore") / "page"
        self.page = {file.name: file.read_bytes() for file in folder.iterdir() if Path(file.name).suffix in _TYPES}

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def warm_up(self) -> None:
        """Loads, or compiles, what the first question will need."""
        corners = [[0.0, 0.0, 1.0], [1.0, 0.0, 1.0], [0.0, 1.0, 2.0]]
        with suppress(GivenUp):
            for debias in (True, False):
                body = {"nodes": corners, "points": 2, "epsilon": 0.1, "seed": 0, "debias": debias, "measured": True}
                self.compute("play", body)

    def compute(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.computing(self.answers[name], body)
        return answer

    def server_close(self) -> None:
        super().server_close()
        self.computing.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # a page that was closed is no error
            super().handle_error(request, client_address)


def make_explorer(data: str | None, runs: Path, port: int = 0, own: Source | None = None) -> Explorer:
    """The server with all views; it answers once ``serve_forever`` is called.

    Args:
        data: folder with datasets, as everywhere in the lab.
        runs: folder with the results of evaluations.
        port: 0 takes any free one.
        own: a file of the reader's own, to be shown in *Graphs*.
    """
    answers = {
        "play": _later("play", "answer"),
        "compare": _later("compare", "answer"),
        "datasets": _later("graphs", "list_all", data, own),
        "graph": _later("graphs", "answer", data, own),
        "runs": _later("runs", "list_all", runs),
        "run": _later("runs", "answer", runs),
    }
    return Explorer(answers, _later("runs", "report", runs), port)


def _later(module: str, function: str, *given: Any) -> Callable[..., Any]:
    """A view, imported when it is first asked: the address is printed, and the page is there, before torch is."""

    def call(asked: Any) -> Any:
        with once("Loading PyTorch and flowpool."):  # no time at all from the second time on
            view = import_module(f"flowpool.explore.{module}")
            torch = import_module("torch")
        torch.set_num_threads(1)  # clouds this small make threads wait for one another
        return getattr(view, function)(*given, asked)

    return call


class _Refused(Exception):
    """A request that gets no answer, and why."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: Explorer
    protocol_version = "HTTP/1.1"  # one connection for a whole drag
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave together
    timeout = PATIENCE

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    def _guarded(self, work: Callable[[list[str]], None]) -> None:
        """Lets in whoever may come in, and turns whatever goes wrong into one sentence."""
        try:
            work(self._checked_path())
        except _Refused as refused:
            self.close_connection = True  # what was not read must not be taken for the next request
            self._send_error(refused.status, str(refused))
        except GivenUp as error:
            self._send_error(HTTPStatus.GATEWAY_TIMEOUT, str(error))
        except ModuleNotFoundError as error:
            sentence = f"The package {error.name} is missing; pip install 'flowpool[lab]' brings it."
            self._send_error(HTTPStatus.NOT_IMPLEMENTED, sentence)
        except (ValueError, OSError) as error:
            self._send_error(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            sentence = f"The computation failed ({type(error).__name__}); the terminal of flowpool explore says where."
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, sentence)

    def _checked_path(self) -> list[str]:
        """The parts of the path behind the token."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            raise _Refused(HTTPStatus.FORBIDDEN, "This server answers only under its own address on this machine.")
        origin = self.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in self.server.hosts:
            raise _Refused(HTTPStatus.FORBIDDEN, "This server answers only its own page.")
        _, token, *rest = f"{self.path}/".split("/", 2)
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            raise _Refused(
                HTTPStatus.FORBIDDEN,
                "The address lacks the right token. Use the address that flowpool explore printed; it changes every time.",
            )
        lengths = self.headers.get_all("Content-Length", ["0"])
        if len(lengths) > 1 or (self.command == "GET" and (lengths != ["0"] or "Transfer-Encoding" in self.headers)):
            raise _Refused(HTTPStatus.BAD_REQUEST, "A GET has no body, and a POST says its length once.")
        return rest[0].removesuffix("/").split("/", 1)

    def _get(self, path: list[str]) -> None:
        match path:
            case ["report", name]:
                content = self.server.report(unquote(name))
                self._send(HTTPStatus.OK, _TYPES[".html"], content, _REPORT_POLICY)
            case [name] if (name or "index.html") in self.server.page:
                name = name or "index.html"
                self._send(HTTPStatus.OK, _TYPES[Path(name).suffix], self.server.page[name])
            case _:
                raise _Refused(HTTPStatus.NOT_FOUND, "There is nothing at this address.")

    def _post(self, path: list[str]) -> None:
        from flowpool.explore.fields import decode

        match path:
            case ["api", "waiting"]:
                self._body()
                self._send_json(HTTPStatus.OK, {"waiting": waited_for()})
            case ["api", name] if name in self.server.answers:
                self._send_json(HTTPStatus.OK, self.server.compute(name, decode(self._body())))
            case _:
                raise _Refused(HTTPStatus.NOT_FOUND, "There is nothing at this address.")

    def _body(self) -> bytes:
        if self.headers.get_content_type() != "application/json":
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "A request must be of the type application/json.")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "A request must say its length.")
        if len(length) > 9 or int(length) > MOST_BYTES:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A request may have at most {MOST_BYTES} bytes.")
        try:
            return self.rfile.read(int(length))
        except TimeoutError:
            raise _Refused(HTTPStatus.REQUEST_TIMEOUT, "The request did not come to its end.") from None

    def _send_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value, allow_nan=False).encode())

    def _send_error(self, status: HTTPStatus, sentence: str) -> None:
        """To a person who opened an address as plain text, to the page as JSON."""
        if self.command == "GET":
            self._send(status, "text/plain; charset=utf-8", sentence.encode())
        else:
            self._send_json(status, {"error": sentence})

    def _send(self, status: HTTPStatus, kind: str, content: bytes, policy: str = _PAGE_POLICY) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")  # it would carry the token
        self.send_header("X-Content-Type-Options", "nosniff")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        return "flowpool"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is for the address and for what went wrong."""
