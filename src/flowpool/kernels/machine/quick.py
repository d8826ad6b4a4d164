"""A quicker way to compile, which leans on Numba's internals.

Numba on its own optimises every function with all that it calls, again and again. Here the functions that kernels call are
left as they are until they are linked into an entry point, which is optimised once, as a whole. The answers are those of
the plain way, which is taken with versions of Numba that this has not been tried with
(:data:`flowpool.kernels.machine.jit.TRIED`).
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder


class _Part(JITCodeLibrary):
    """Code that is only ever linked into an entry point, which is optimised and made machine code as a whole."""

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


PART: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _PartCompiler}


def by_types(dispatcher: Any) -> Any:
    """Compiled once for each set of types; Numba on its own compiles again for each constant that is passed on."""
    resolve = dispatcher.get_call_template

    def of_types(arguments: Any, keywords: Any) -> Any:
        return resolve([types.unliteral(kind) for kind in arguments], keywords)

    dispatcher.get_call_template = of_types
    return dispatcher
