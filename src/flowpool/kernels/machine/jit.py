"""How the kernels are compiled, and where the compiled code is kept.

Only the entry points are cached on disk; they contain everything they call. Numba notices a change of the file an entry
point stands in, but not of the others, so the folder carries a digest of all of them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.extending import register_jitable

# Of the floating-point liberties only those that keep the meaning of NaN and infinity.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz"}}


class _Part(JITCodeLibrary):
    """Code that is only ever linked into an entry point, which is optimised and made machine code as a whole.

    Numba on its own does both for every function with all that it calls, again and again.
    """

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0  # there is no machine code

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, environment: object) -> None:
        """There is nowhere to put Python objects, and nothing that would use them."""


class _PartCompiler(CompilerBase):
    """Numba's own compiler, with the result in a :class:`_Part`."""

    def define_pipelines(self) -> list[Any]:
        self.state.library = _Part(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        pipeline.passes = [entry for entry in pipeline.passes if entry[0].__name__ not in _NEEDLESS]
        return [pipeline]


# Passes for what no part uses: closures, context managers, arrays as a whole, lists, branches on types, generated code.
_NEEDLESS = {
    "DeadBranchPrune",
    "FindLiterallyCalls",
    "GenericRewrites",
    "InlineClosureLikes",
    "InlineInlinables",
    "InlineOverloads",
    "LiteralUnroll",
    "MakeFunctionToJitFunction",
    "NopythonRewrites",
    "RewriteDynamicRaises",
    "RewriteSemanticConstants",
    "WithLifting",
}


_PART: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _PartCompiler}


def kernel(function: Callable[..., Any]) -> Any:
    """A function that kernels call, compiled once for each set of types. It can neither print nor raise.

    Numba on its own compiles it again for each constant that it is called with.
    """
    dispatcher = njit(**_PART, **_OPTIONS)(function)
    resolve = dispatcher.get_call_template

    def of_types(arguments: Any, keywords: Any) -> Any:
        return resolve([types.unliteral(kind) for kind in arguments], keywords)

    dispatcher.get_call_template = of_types
    return dispatcher


# A plain function in Python, a kernel in kernels.
shared = register_jitable(**_PART, **_OPTIONS)


def entry(function: Callable[..., Any]) -> Any:
    """A kernel that is called from Python: it runs without the interpreter's lock and is kept on disk."""
    dispatcher = njit(nogil=True, **_OPTIONS)(function)
    if _FOLDER is not None:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(_FOLDER)
        try:
            dispatcher.enable_caching()
        finally:
            numba.config.CACHE_DIR = before
    return dispatcher


def announce(dispatcher: Any) -> None:
    """Says once that compilation is about to start, if there is nothing on disk for this entry point."""
    name = dispatcher.py_func.__name__
    if name in _announced:
        return
    _announced.add(name)
    if _FOLDER is None or not any(_FOLDER.rglob(f"*.{name}-*.nbi")):
        where = (
            "for this process only: no private cache folder could be made" if _FOLDER is None else f"kept in {_FOLDER}"
        )
        logging.getLogger("flowpool").warning("Compiling %s; this takes some seconds, once (%s).", name, where)


def _cache_folder() -> Path | None:
    """A folder that belongs to this user alone, or ``None`` where there cannot be one."""
    package = Path(__file__).parents[2]
    folders = (package / "core", package / "kernels", package / "step")
    sources = [*sorted(path for folder in folders for path in folder.rglob("*.py")), package / "status.py"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    digest.update(f"{numba.__version__} {sys.version}".encode())
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
_announced: set[str] = set()
