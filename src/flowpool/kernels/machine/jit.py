"""How the kernels are compiled, and where the compiled code is kept.

Only the entry points are cached on disk; they contain everything they call. Numba notices a change of the file an entry
point stands in, but not of the others, so the folder carries a digest of all (:func:`sources`). A cached file is used only if its
checksum stands beside it: what is damaged is thrown away and compiled again, and where nothing can be written the kernels
are compiled for the process alone.

Two switches of the environment, for tests:

* ``FLOWPOOL_CHECKED=1``: every access of every kernel is checked, and fails with an IndexError outside of its array.
* ``FLOWPOOL_PLAIN=1``: Numba compiles as it always does, without :mod:`flowpool.kernels.machine.quick`.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from pickle import PickleError
from typing import Any

import numba
from numba import njit
from numba.core import event
from numba.core.errors import NumbaError
from numba.extending import register_jitable

from flowpool.kernels.errors import KernelError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

CHECKED = os.environ.get("FLOWPOOL_CHECKED") == "1"
TRIED = ("0.68.1",)  # versions of Numba whose internals the quick way has been tried with
QUICK = numba.__version__ in TRIED and not CHECKED and os.environ.get("FLOWPOOL_PLAIN") != "1"

if QUICK:
    from flowpool.kernels.machine import quick

# Of the floating-point liberties only those that keep the meaning of NaN and infinity.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz"}, "boundscheck": CHECKED}
_log = logging.getLogger("flowpool")
_announced = False
_lock = threading.RLock()  # Numba compiles one thing at a time, and so do we
DURATION = "some minutes" if CHECKED else "half a minute" if QUICK else "a minute"
SILENCE = 5.0  # seconds after which something is said of a compilation that still goes on


def kernel(function: Callable[..., Any]) -> Any:
    """A function that kernels call. Compiled the quick way it can neither print nor raise."""
    return quick.by_types(njit(**quick.PART, **_OPTIONS)(function)) if QUICK else njit(**_OPTIONS)(function)


# A plain function in Python, a kernel in kernels.
shared = register_jitable(**(quick.PART if QUICK else {}), **_OPTIONS)


def allocating(function: Callable[..., Any]) -> Any:
    """A function that kernels call and that may make arrays."""
    return quick.by_types(njit(**_OPTIONS)(function)) if QUICK else njit(**_OPTIONS)(function)


def _announce() -> None:
    """Says once that kernels are being compiled."""
    global _announced
    if not _announced:
        _announced = True
        where = f"kept in {_FOLDER}" if _FOLDER else "for this process only: there is no private cache folder"
        _log.warning("Compiling kernels; this takes up to %s, once (%s).", DURATION, where)


class _Watch(event.Listener):
    """Keeps the garbage collector off while an entry point is compiled, and logs every few seconds how far that is.

    Compiling makes millions of objects that live until its end; looking through them takes a seventh of the time. Numba
    compiles one thing at a time, and so sends no two events at once.
    """

    def __init__(self) -> None:
        self.entries: set[Any] = set()  # dispatchers of entry points
        self.current: Any = None  # the one that is compiled
        self.functions, self.collects, self.said = 0, False, 0.0

    def on_start(self, event: Any) -> None:
        if self.current is None and event.data["dispatcher"] in self.entries:
            self.current, self.collects, self.said = event.data["dispatcher"], gc.isenabled(), time.monotonic()
            gc.disable()
        if self.current is not None:
            self.functions += 1
            if time.monotonic() > self.said + SILENCE:
                self.said = time.monotonic()
                _log.warning("Still compiling kernels: %d functions so far.", self.functions)

    def on_end(self, event: Any) -> None:
        if event.data["dispatcher"] is self.current:
            self.restore()

    def restore(self) -> None:
        """Leaves the collector as it was found."""
        if self.current is not None and self.collects:
            gc.enable()
        self.current = None


_watch = _Watch()
event.register("numba:compile", _watch)


def is_compiling() -> bool:
    """Whether an entry point is being compiled, for those who wait."""
    return _watch.current is not None


class entry:  # noqa: N801 - a decorator
    """A kernel that is called from Python: it runs without the interpreter's lock and is kept on disk."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        self._dispatcher: Any = None
        self._uncached = False

    def __call__(self, *arguments: Any) -> Any:
        if self._dispatcher is not None:
            return self._call(self._dispatcher, arguments)
        with _lock, self._alone():
            # Other processes wait, and find on the disk what this one has compiled.
            return self._call(self._dispatcher or self._prepare(), arguments)

    def _call(self, dispatcher: Any, arguments: tuple[Any, ...]) -> Any:
        known = len(dispatcher.overloads)
        try:
            result = dispatcher(*arguments)
        except NumbaError as error:
            raise KernelError(f"{self.name} could not be compiled: {error}") from error
        except Exception as error:
            if self._uncached or self._is_own(dispatcher, arguments, error):
                raise
            return self._without_disk(dispatcher, error)(*arguments)
        if len(dispatcher.overloads) > known:
            self._vouch()
        return result

    @staticmethod
    def _is_own(dispatcher: Any, arguments: tuple[Any, ...], error: Exception) -> bool:
        """Whether an error is one of the kernel itself, which runs once it is compiled, and not one of the cache."""
        if isinstance(error, (OSError, PickleError)):
            return False
        return tuple(map(dispatcher.typeof_pyval, arguments)) in dispatcher.overloads

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Meanwhile no other process looks at the files of this kernel, or writes them."""
        if _FOLDER is None or fcntl is None:
            yield
            return
        with ExitStack() as stack:
            with suppress(OSError):
                file = stack.enter_context((_FOLDER / f"{self.name}.lock").open("w"))
                fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    def _prepare(self) -> Any:
        """The dispatcher, as the first call of a process needs it."""
        dispatcher = self._compiler()
        if not self._trusted_files():
            _announce()
        if _FOLDER is not None:
            before = numba.config.CACHE_DIR
            numba.config.CACHE_DIR = str(_FOLDER)
            try:
                dispatcher.enable_caching()
            finally:
                numba.config.CACHE_DIR = before
        self._dispatcher = dispatcher
        return dispatcher

    def _without_disk(self, failed: Any, error: Exception) -> Any:
        """The kernel compiled for this process alone, after a cache that could be neither read nor written."""
        with _lock:
            if self._dispatcher is failed:
                _log.warning("The cache of %s cannot be used (%s): compiling for this process only.", self.name, error)
                self._dispatcher = self._compiler()
                self._uncached = True
            return self

    def _compiler(self) -> Any:
        dispatcher = njit(nogil=True, **_OPTIONS)(self.function)
        _watch.entries.add(dispatcher)
        return dispatcher

    def _files(self) -> list[Path]:
        return [] if _FOLDER is None else list(_FOLDER.rglob(f"*.{self.name}-*.nb?"))

    def _trusted_files(self) -> list[Path]:
        """The cached files that are as they were written; others are removed."""
        files = self._files()
        if all(_seal(path).is_file() and _seal(path).read_text() == _digest(path) for path in files):
            return files
        for path in files:
            with suppress(OSError):
                path.unlink()
            with suppress(OSError):
                _seal(path).unlink()
        return []

    def _vouch(self) -> None:
        with suppress(OSError):
            for path in self._files():
                draft = path.with_name(f"{path.name}.{os.getpid()}")
                draft.write_text(_digest(path))
                os.replace(draft, _seal(path))


def _seal(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"


def sources() -> list[Path]:
    """The files that compiled code is made of: no kernel imports from another."""
    package = Path(__file__).parents[2]
    shared = [package / "core" / "constants.py", package / "core" / "law.py", package / "status.py"]
    return [*shared, *sorted((package / "kernels").rglob("*.py")), *sorted((package / "step").glob("*_kernels.py"))]


def _cache_folder() -> Path | None:
    """A folder that belongs to this user alone, or ``None`` where there cannot be one."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources()))
    digest.update(f"{numba.__version__} {sys.version} {CHECKED} {QUICK}".encode())
    root = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if os.name == "nt" else None)
    try:
        base = (Path(root) if root else Path.home() / ".cache") / "flowpool"
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name == "posix":
            # Compiled code is run without a look at it, so nobody else may be able to write it.
            found = base.stat()
            if found.st_uid != os.getuid():
                return None
            if stat.S_IMODE(found.st_mode) != 0o700:
                base.chmod(0o700)
        folder = base / f"kernels-{digest.hexdigest()[:16]}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):
        return None


_FOLDER = _cache_folder()


def _forget() -> None:
    """In a forked child the lock may be held by a thread that does not exist there, and that will not end what it began."""
    global _lock
    _lock = threading.RLock()
    _watch.restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
