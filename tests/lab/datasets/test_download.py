"""Downloads: complete and checked or not there at all; TLS only. No test touches the network."""

import io
import ssl
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from urllib.response import addinfourl

import pytest

from flowpool.lab.datasets import download
from flowpool.lab.datasets.download import DownloadError, cache_folder, fetch, https_opener


def accept(path: Path) -> None:
    pass


def test_a_checked_download_appears_under_its_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "open_https", lambda url: io.BytesIO(url.encode() * 10**5))
    seen = []
    target = tmp_path / "new" / "SET.zip"
    fetch("https://host/SET.zip", target, lambda path: seen.append(path.read_bytes()), max_bytes=10**7)
    assert seen == [target.read_bytes()] == [b"https://host/SET.zip" * 10**5]
    assert list(target.parent.iterdir()) == [target]


class Breaking(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        raise ConnectionResetError("connection reset")


def refuse_connection(url: str) -> io.BytesIO:
    raise urllib.error.URLError("no route")


@pytest.mark.parametrize(
    ("open_url", "message"),
    [
        (lambda url: io.BytesIO(bytes(1001)), "more than 1,000 bytes"),
        (lambda url: Breaking(), "connection reset"),
        (refuse_connection, "no route"),
    ],
)
def test_a_failed_download_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_url: object, message: str
) -> None:
    monkeypatch.setattr(download, "open_https", open_url)
    target = tmp_path / "SET.zip"
    target.write_bytes(b"old")
    with pytest.raises(DownloadError, match=message):
        fetch("https://host/SET.zip", target, accept, max_bytes=1000)
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == b"old"


def test_a_download_that_fails_its_check_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "open_https", lambda url: io.BytesIO(b"evil"))

    def check(path: Path) -> None:
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        fetch("https://host/SET.zip", tmp_path / "SET.zip", check, max_bytes=1000)
    assert list(tmp_path.iterdir()) == []


def test_certificates_and_host_names_are_verified() -> None:
    contexts = [
        handler._context  # type: ignore[attr-defined]
        for handler in https_opener().handlers
        if isinstance(handler, urllib.request.HTTPSHandler)
    ]
    assert len(contexts) == 1
    assert contexts[0].verify_mode == ssl.CERT_REQUIRED
    assert contexts[0].check_hostname


@pytest.mark.parametrize("url", ["http://localhost/x", "file:///etc/hostname", "ftp://localhost/x", "data:,x"])
def test_nothing_but_https_is_spoken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    with pytest.raises(urllib.error.URLError, match="unknown url type"):
        https_opener().open(url)


def test_a_redirect_from_https_to_http_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Redirecting(urllib.request.BaseHandler):
        handler_order = 1  # before the real one

        def https_open(self, request: urllib.request.Request) -> addinfourl:
            headers = Message()
            headers["Location"] = "http://localhost/x"
            response = addinfourl(io.BytesIO(), headers, request.full_url, 302)
            response.msg = "Found"  # type: ignore[attr-defined]
            return response

    for variable in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    opener = https_opener()
    opener.add_handler(Redirecting())
    with pytest.raises(urllib.error.URLError, match="unknown url type: http"):
        opener.open("https://host/x")


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/caches"}, "/caches/flowpool/datasets"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/flowpool/datasets"),
        ("linux", {}, "/home/me/.cache/flowpool/datasets"),
        ("darwin", {"XDG_CACHE_HOME": "/caches"}, "/home/me/Library/Caches/flowpool/datasets"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/flowpool/datasets"),
        ("win32", {}, "/home/me/AppData/Local/flowpool/datasets"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(
    platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)
