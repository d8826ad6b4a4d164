"""What a caller may choose about how points are found and differentiated: declared, checked and documented once.

:class:`Options` is what the solver is told. :class:`LayerOptions` adds what every layer around the solver takes, and
:class:`FlowOptions` is its spelling for type checkers: a layer ends its signature with ``**options: Unpack[FlowOptions]``,
and :func:`takes_options` gives it back the names, the defaults, the documentation, and the refusal of misspelt names.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from textwrap import indent
from typing import Any, Literal, TypedDict, TypeVar, get_args

from flowpool.core import updates
from flowpool.core.updates import UpdateStep
from flowpool.costs import CostFunction
from flowpool.inputs import check_choice, check_flag, check_number, checked_count

Gradient = Literal["implicit", "unrolled", "none"]
Engine = Literal["auto", "compiled", "torch"]
OnFailure = Literal["ignore", "warn", "raise"]
Size = Literal["append", "scale"]
GRADIENTS, ENGINES, ON_FAILURE, SIZES = map(get_args, (Gradient, Engine, OnFailure, Size))

_LINE = "    **options: those of :class:`flowpool.options.FlowOptions`."
_Layer = TypeVar("_Layer")


class FlowOptions(TypedDict, total=False):
    """epsilon: entropic regularisation, a number > 0.
    relative: epsilon in units of each graph's mean cost to its mean (for the squared Euclidean cost the sum of the
        variances, R^2), and the reference in units of R around its mean: pooling then commutes with moving and scaling
        the features. Otherwise both are absolute, as in the paper.
    cost: ground cost: a name, a :class:`flowpool.costs.Cost`, an ``nn.Module``, or any callable from ``(..., M, 1, D)``
        and ``(..., 1, N, D)`` to ``(..., M, N)``. A module becomes a submodule, and its parameters are trained.
    debias: descend S_eps; otherwise L_eps alone, as in section 8 of the paper.
    gradient: ``"implicit"``: one linear solve, memory independent of the steps. ``"unrolled"``: through the recorded
        steps of Algorithm 1 (section 8.1). ``"none"``: no gradient.
    tolerance: stop when the Newton step is shorter than this, relative to R.
    max_steps: cap on the steps of all kinds.
    step_size: fixed step of Algorithm 1 for the explicit part of the flow; None chooses it by its error. A step of one
        jumps to the barycentric map. Unrolling uses 0.25 unless it is given.
    update_step: runs Algorithm 1 exactly as printed instead, in the given coordinates: ``max_steps`` times
        ``X <- update_step(X, gradient, step_size)``, where ``step_size`` is the tau of the paper. ``"gradient"``,
        ``"momentum"``, ``"adam"``, or a function, see :mod:`flowpool.core.updates`.
    ridge: lambda of the Tikhonov term in the backward pass, ``(A + lambda I) J = B`` in section 8.2 of the paper: relative to
        the square of the Hessian's scale, or absolute where ``relative=False``. None: practically zero.
    engine: ``"torch"`` (any device, any cost), ``"compiled"`` (squared Euclidean or diagonal Mahalanobis cost),
        ``"auto"``. They give the same answers.
    on_failure: for graphs that were not pooled to the tolerance: ``"ignore"``, ``"warn"`` (once for each kind of status,
        in the life of the layer), or ``"raise"`` an ArithmeticError. The report of the layer has them all.
    """

    epsilon: float
    relative: bool
    cost: str | CostFunction
    debias: bool
    gradient: Gradient
    tolerance: float
    max_steps: int
    step_size: float | None
    update_step: str | UpdateStep | None
    ridge: float | None
    engine: Engine
    on_failure: OnFailure


@dataclass(frozen=True)
class Options:
    """How the points are found and differentiated; the arguments of the same names of :func:`flowpool.flow_pool`."""

    debias: bool = True
    gradient: Gradient = "implicit"
    tolerance: float = 1e-5
    max_steps: int = 1000
    step_size: float | None = None
    update_step: str | UpdateStep | None = None
    ridge: float | None = None
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        check_flag("debias", self.debias)
        check_choice("gradient", self.gradient, GRADIENTS)
        check_choice("engine", self.engine, ENGINES)
        check_number("tolerance", self.tolerance)
        if not self.tolerance > 0 or not math.isfinite(self.tolerance):
            raise ValueError(f"tolerance is {self.tolerance}; pass a small positive number, like 1e-5.")
        checked_count("max_steps", self.max_steps)
        if self.step_size is not None:
            check_number("step_size", self.step_size)
            if self.update_step is not None and not 0 < self.step_size < math.inf:
                raise ValueError(f"step_size is {self.step_size}; pass the tau of Algorithm 1, a value > 0.")
            if self.update_step is None and not 0 < self.step_size <= 1:
                raise ValueError(
                    f"step_size is {self.step_size}; pass a value in (0, 1], or None to let the error choose it."
                )
        if self.update_step is not None:
            updates.resolve(self.update_step)
            if self.step_size is None:
                raise ValueError("update_step needs a step_size, the tau of Algorithm 1.")
        if self.ridge is not None:
            check_number("ridge", self.ridge)
            if not self.ridge >= 0 or not math.isfinite(self.ridge):
                raise ValueError(f"ridge is {self.ridge}; pass a value >= 0.")


@dataclass(frozen=True)
class LayerOptions(Options):
    """:class:`Options`, and what only layers need: the problem, and what to do about failures."""

    epsilon: float = 0.1
    relative: bool = True
    cost: str | CostFunction = "sqeuclidean"
    on_failure: OnFailure = "warn"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("epsilon", self.epsilon)
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ValueError(f"epsilon is {self.epsilon}; it must be finite and > 0 (0.1 is a good start).")
        check_flag("relative", self.relative)
        check_choice("on_failure", self.on_failure, ON_FAILURE)

    @property
    def solver(self) -> Options:
        """The part that the solver is told."""
        return Options(**{field.name: getattr(self, field.name) for field in fields(Options)})


def check_size(size: Any) -> None:
    """Raises unless ``size``, how a layer hands over the size that a measure forgets, is one of the known ways."""
    check_choice("size", size, (None, *SIZES))


def takes_options(layer: type[_Layer]) -> type[_Layer]:
    """Class decorator for ``__init__(self, ..., **options: Unpack[FlowOptions])``.

    The signature then shows every option with its default, the line ``**options`` of the docstring becomes their
    documentation, and a name that is not among them is refused with the nearest one that is.
    """
    make: Callable[..., None] = layer.__init__
    signature = inspect.signature(make)
    named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    options = {field.name: field for field in fields(LayerOptions)}
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=options[name].default, annotation=options[name].type
        )
        for name in FlowOptions.__annotations__
    ]
    known = [p.name for p in [*named[1:], *shared]]

    @wraps(make)
    def checked(self: Any, *arguments: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                near = get_close_matches(name, known, 1, 0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}."
                raise TypeError(f"{layer.__name__} got an unexpected keyword argument {name!r}; {hint}")
        make(self, *arguments, **options)

    checked.__signature__ = signature.replace(parameters=[*named, *shared])  # type: ignore[attr-defined]
    layer.__init__ = checked  # type: ignore[method-assign]
    if layer.__doc__ and FlowOptions.__doc__:  # python -OO leaves neither
        meaning = indent(inspect.cleandoc(FlowOptions.__doc__), "    ")
        layer.__doc__ = inspect.cleandoc(layer.__doc__).replace(_LINE, meaning)
    return layer
