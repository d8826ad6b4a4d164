"""Files from the web into the user's cache: verified TLS only, checked before they are kept."""

from __future__ import annotations

import http.client
import os
import ssl
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

_CHUNK = 2**16
_TIMEOUT = 60.0  # seconds without a byte


class DownloadError(OSError):
    """A download did not come through."""


def cache_folder() -> Path:
    """The folder for this user's downloaded datasets, where the platform keeps such things."""
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        base = Path(local) if local else Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not base.is_absolute():  # the XDG rules say to ignore relative paths
            base = Path.home() / ".cache"
    return base / "flowpool" / "datasets"


def open_https(url: str) -> BinaryIO:
    """The body of ``url``; the server's certificate is verified and nothing but https is spoken."""
    return cast(BinaryIO, https_opener().open(url, timeout=_TIMEOUT))


def https_opener() -> urllib.request.OpenerDirector:
    """An opener that knows https alone, so that a redirect to http or file finds no handler."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def fetch(url: str, target: Path, check: Callable[[Path], None], *, max_bytes: int) -> None:
    """Downloads ``url`` to ``target``, which appears at once and complete, or not at all.

    Args:
        url: what to download.
        target: where it goes; its folder is made.
        check: gets the path of the complete download and raises if it is not to be kept.
        max_bytes: a longer download is broken off.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because os.replace cannot cross file systems.
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as folder:
        part = Path(folder) / target.name
        with part.open("wb") as file:
            for chunk in _chunks(url, max_bytes):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        check(part)
        os.replace(part, target)


def _chunks(url: str, max_bytes: int) -> Iterator[bytes]:
    received = 0
    try:
        with open_https(url) as source:
            while received <= max_bytes and (chunk := source.read(_CHUNK)):
                received += len(chunk)
                yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise DownloadError(f"{url} cannot be downloaded: {error}") from error
    if received > max_bytes:
        raise DownloadError(f"{url} sends more than {max_bytes:,} bytes.")
