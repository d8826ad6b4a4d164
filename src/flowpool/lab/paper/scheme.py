r"""The paper's scheme by other people's code: OTT-JAX for the transports, jaxopt for the implicit gradient.

Algorithm 1 with gradient descent, where the gradient is that of section 7.1, :math:`[\partial_X C]^\top P`, with plans from
OTT's Sinkhorn, and the backward pass of section 8.2 by jaxopt's ``solve_normal_cg(ridge=lambda)`` on the condition that it
vanishes. An oracle for :func:`flowpool.algorithm_1`, and a row of ``flowpool bench``.
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
        recorded: iterations through which its plan is differentiated in the backward pass.
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
    import jax.numpy as jnp
    from jaxopt import implicit_diff, linear_solve
    from ott.geometry.pointcloud import PointCloud
    from ott.problems.linear.linear_problem import LinearProblem
    from ott.solvers.linear.acceleration import Momentum
    from ott.solvers.linear.sinkhorn import Sinkhorn

    jax.config.update("jax_enable_x64", True)
    settings: dict[str, Any] = {"threshold": scheme.threshold, "max_iterations": scheme.max_iterations}
    # A cloud meets itself by averaged updates of both potentials, as in OTT's own divergence: in turn they converge slowly.
    averaged = {"parallel_dual_updates": True, "momentum": Momentum(start=0, value=0.5)}
    epsilon, soft = scheme.epsilon, jax.nn.logsumexp

    def plan(cost: Any, solved: Any, masses: Any, own: bool) -> Any:
        """The plan that OTT found, as the end of recorded iterations that began there: so it follows the cost."""
        to_points, to_nodes = jnp.log(jnp.full(cost.shape[0], 1 / cost.shape[0])), jnp.log(masses)

        def update(potentials: Any, _: None) -> Any:
            f, g = potentials
            first = epsilon * (to_points - soft((g[None] - cost) / epsilon, axis=1))
            second = epsilon * (to_nodes - soft(((f if own else first)[:, None] - cost) / epsilon, axis=0))
            return ((f + first) / 2, (g + second) / 2) if own else (first, second), None

        start = jax.lax.stop_gradient((solved.f, solved.g))
        (f, g), _ = jax.lax.scan(update, start, length=scheme.recorded)
        return jnp.exp((f[:, None] + g[None] - cost) / epsilon)

    def pull(points: Any, nodes: Any, masses: Any, own: bool, recorded: bool) -> Any:
        """Gradient of ``<P, C(X, Y)>`` in X; P is differentiable if it is recorded."""
        geometry = PointCloud(points, nodes, epsilon=epsilon)
        solved = Sinkhorn(**settings, **(averaged if own else {}))(LinearProblem(geometry, b=masses))
        coupling = plan(geometry.cost_matrix, solved, masses, own) if recorded else solved.matrix
        return jax.vjp(lambda x: PointCloud(x, nodes).cost_matrix, points)[1](coupling)[0]

    def gradient(points: Any, nodes: Any, masses: Any, recorded: bool = True) -> Any:
        found = pull(points, nodes, masses, False, recorded)
        equal = jnp.full(len(points), 1 / len(points))
        return found - pull(points, points, equal, True, recorded) if scheme.debias else found

    solve = partial(linear_solve.solve_normal_cg, ridge=scheme.ridge, tol=1e-12, maxiter=scheme.conjugate)

    @implicit_diff.custom_root(gradient, solve=solve)
    def flow(start: Any, nodes: Any, masses: Any) -> Any:
        def move(_: int, here: Any) -> Any:
            return here - scheme.step_size * gradient(here, nodes, masses, False)

        return jax.lax.fori_loop(0, scheme.max_steps, move, start)

    result: Callable[[Any, Any, Any], Any] = flow
    return result
