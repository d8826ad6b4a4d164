"""What became of each graph, as a code with one sentence of advice."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """Outcome of pooling one graph.

    ``OK`` is stationary to the tolerance. So is ``SINGULAR``, except in valleys where nothing is left to be gained: there
    its residual is above the tolerance. ``EMPTY`` has nothing to pool. The others say that the row cannot be trusted as
    the minimiser.
    """

    OK = 0
    EMPTY = 1
    NONFINITE_INPUT = 2
    MAX_STEPS = 3
    SINGULAR = 4
    NONFINITE = 5

    @property
    def converged(self) -> bool:
        return self in (Status.OK, Status.EMPTY, Status.SINGULAR)

    @property
    def advice(self) -> str:
        return _ADVICE[self]


_ADVICE = {
    Status.OK: "The pooled points are stationary to the tolerance.",
    Status.EMPTY: "The graph has no nodes; its row is zeros.",
    Status.NONFINITE_INPUT: "The graph has NaN or infinite features, so its row is NaN; "
    "check the layer before the pool.",
    Status.MAX_STEPS: "The flow was not stationary within max_steps; raise max_steps, or epsilon if it is below 0.03. "
    "Where the cost bends sharply, as |x - y|^p with p < 2 does at x = y, a costs.Euclidean(p, radius) is smooth.",
    Status.SINGULAR: "Stationary, but the minimiser is not isolated, so its gradient is the minimum-norm one. Possible causes: "
    "twin nodes, more points than nodes, merged points (fewer points or a larger epsilon help), or a cost that ignores some "
    "directions (cosine, a Mahalanobis cost of low rank); Pooled.cause says which.",
    Status.NONFINITE: "The numbers overflowed inside the solver; rescale the features or raise epsilon.",
}
