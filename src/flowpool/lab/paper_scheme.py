r"""The paper's scheme by other people's code: OTT-JAX for the transports, jaxopt for the implicit gradient.

Algorithm 1 with gradient descent, where the gradient is that of section 7.1, :math:`[\partial_X C]^\top P`, with plans from
OTT's Sinkhorn, and the backward pass of section 8.2 by ``solve_normal_cg(ridge=lambda)`` on the condition that it vanishes. An
oracle for :func:`flowpool.algorithm_1`, and a row of ``flowpool bench``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Scheme:
    """Settings of the scheme, by the names of :func:`flowpool.algorithm_1`.

    Attributes:
        threshold, max_iterations: of OTT's Sinkhorn on the way.
        recorded: its iterations in the backward pass.
        conjugate: most iterations of conjugate gradients there.
    """

    epsilon: float
    step_size: float
    max_steps: int
    debias: bool = True
    ridge: Any = 0.0
    threshold: float = 1e-6
    max_iterations: int = 2000
    recorded: int = 200
    conjugate: int = 100


def pooled_by_ott(scheme: Scheme) -> Callable[[Any, Any, Any], Any]:
    """The function ``(start, nodes, masses) -> X^(L)`` of one cloud in JAX, differentiable in nodes and masses.

    Raises ImportError where JAX, OTT or jaxopt is not installed.
    """
    import jax
    from jaxopt import implicit_diff, linear_solve
    from ott.geometry.pointcloud import PointCloud
    from ott.problems.linear.linear_problem import LinearProblem
    from ott.solvers.linear.acceleration import Momentum
    from ott.solvers.linear.sinkhorn import Sinkhorn

    jax.config.update("jax_enable_x64", True)
    settings = {"threshold": scheme.threshold, "max_iterations": scheme.max_iterations}
    # The condition is differentiated once more, which OTT can do through a fixed number of recorded iterations.
    record = {"implicit_diff": None, "threshold": scheme.threshold}
    record |= {"min_iterations": scheme.recorded, "max_iterations": scheme.recorded}
    # A cloud meets itself by averaged updates of both potentials, as in OTT's own divergence: in turn they converge slowly.
    averaged = {"parallel_dual_updates": True, "momentum": Momentum(start=0, value=0.5)}

    def pull(points: Any, nodes: Any, masses: Any, options: dict[str, Any]) -> Any:
        """Gradient of ``<P, C(X, Y)>`` in X, in which P follows when it is differentiated."""
        plan = Sinkhorn(**options)(LinearProblem(PointCloud(points, nodes, epsilon=scheme.epsilon), b=masses)).matrix
        return jax.vjp(lambda x: PointCloud(x, nodes).cost_matrix, points)[1](plan)[0]

    def gradient(points: Any, nodes: Any, masses: Any, options: Any = record) -> Any:
        found = pull(points, nodes, masses, options)
        return found - pull(points, points, None, options | averaged) if scheme.debias else found

    solve = partial(linear_solve.solve_normal_cg, ridge=scheme.ridge, tol=1e-12, maxiter=scheme.conjugate)

    @implicit_diff.custom_root(gradient, solve=solve)
    def flow(start: Any, nodes: Any, masses: Any) -> Any:
        def move(_: int, here: Any) -> Any:
            return here - scheme.step_size * gradient(here, nodes, masses, settings)

        return jax.lax.fori_loop(0, scheme.max_steps, move, start)

    result: Callable[[Any, Any, Any], Any] = flow
    return result
