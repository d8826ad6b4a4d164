r"""Linear systems with the Hessian at ``here``: implicit steps, Newton steps, and the adjoint of section 8.2.

The model of the Hessian is a dense block for the leading coordinates and ``2 Q`` for each of the others. It is exact for
coordinates outside the hull of the nodes once the points lie in it, and close for coordinates along which the nodes vary
by little against epsilon. Where it is exact its factor gives the solution; elsewhere it preconditions conjugate gradients.

Where the minimiser is not isolated (twin nodes, more points than nodes), the Hessian has eigenvalues h that are zero up to
rounding. One rule covers that: solutions carry the Tikhonov filter ``h / (h^2 + d^2)``, which is the inverse for ``h >> d`` and
leaves flatter directions alone. :data:`~flowpool.core.constants.FLAT` is the d of Newton steps, the ridge that of gradients.
"""

from __future__ import annotations

import math

from flowpool.core.constants import (
    ADJOINT,
    FLAT,
    INVERSIONS,
    LEAST_RIDGE,
    LEAST_SHIFT,
    MET,
    MOST_CG,
    OUTSIDE,
    PRECISE,
    ROUGH,
    SINGULAR,
)
from flowpool.kernels.hessian import shifted_factor, solve_factored
from flowpool.kernels.machine.jit import kernel
from flowpool.kernels.machine.lanes import WIDTH, fma, load, multiply, splat, store, total
from flowpool.kernels.machine.linear import factorise, padded, smallest_eigenvalue, smallest_pivot, substitute_rows
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.machine.vectors import combine, copy, fill, inner_product, norm
from flowpool.kernels.response import hessian_product


@kernel
def scale_points(one, factor, graph, result):  # type: ignore[no-untyped-def]
    """``result_i = factor a_i one_i``."""
    stay_apart()
    for i in range(graph.count):
        for c in range(0, padded(graph.dimension), WIDTH):
            store(result, i, c, multiply(splat(factor * graph.point_masses[0, i]), load(one, i, c)))


@kernel
def weighted_square(rows, graph):  # type: ignore[no-untyped-def]
    """``sum_i 2 a_i |w_i|^2``."""
    stay_apart()
    result = splat(0.0)
    for i in range(graph.count):
        for c in range(0, padded(graph.dimension), WIDTH):
            value = load(rows, i, c)
            result = fma(multiply(splat(2.0 * graph.point_masses[0, i]), value), value, result)
    return total(result)


@kernel
def is_exact(graph, epsilon):  # type: ignore[no-untyped-def]
    """Whether the model is the Hessian."""
    stay_apart()
    if graph.lead < graph.hull:
        return False
    for i in range(graph.count):
        square = 0.0
        for e in range(graph.hull, graph.dimension):
            square += graph.here.points[i, e] * graph.here.points[i, e]
        if square > (OUTSIDE * epsilon) ** 2:
            return False
    return True


@kernel
def factorise_others(graph, shift):  # type: ignore[no-untyped-def]
    """Whether the shifted model of the coordinates that do not lead could be factorised, in ``graph.small``."""
    stay_apart()
    count = graph.count
    for i in range(count):
        for k in range(0, padded(count), WIDTH):
            store(graph.small, i, k, multiply(splat(2.0), load(graph.kept_self_plan, i, k)))
        graph.small[i, i] += (shift + MET) * 2.0 * graph.point_masses[0, i]
    return factorise(graph.small, count, graph.inverse)


@kernel
def solve_model(graph, factor, pivots, right, solution):  # type: ignore[no-untyped-def]
    """Fills ``solution``, ``(M, Q)``, for the model of the Hessian, whose factors are at hand."""
    stay_apart()
    copy(right, solution, graph.count * padded(graph.dimension))
    if graph.lead < graph.dimension:
        substitute_rows(graph.small, graph.count, graph.inverse, solution, padded(graph.dimension))
    solve_factored(graph, factor, pivots, right, solution)


@kernel
def conjugate_gradients(  # type: ignore[no-untyped-def]
    graph, epsilon, shift, precision, longest, guessed, least, factor, pivots
):
    """Smallest curvature met, relative to ``diag(2 a)``, in solving ``(H + shift diag(2 a)) solution = right``.

    If it is below ``least``, the iteration ended there, and the solution is of no use.

    Args:
        precision: relative size of the rest, in the metric of the model, at which to stop.
        longest: length of the solution at which to stop.
        guessed: whether the solution is a guess already.
        factor, pivots: of the model in the leading coordinates; that of the others is in ``graph.small``.
    """
    stay_apart()
    rest, search, image, ready, solution = graph.rest, graph.search, graph.image, graph.ready, graph.solution
    numbers = graph.count * padded(graph.dimension)
    copy(graph.right, rest, numbers)
    solve_model(graph, factor, pivots, rest, ready)
    strength = inner_product(rest, ready, numbers)
    goal = precision * precision * strength
    if guessed:
        hessian_product(graph, solution, epsilon, shift, image)
        combine(rest, -1.0, image, rest, numbers)
        solve_model(graph, factor, pivots, rest, ready)
        strength = inner_product(rest, ready, numbers)
    else:
        fill(solution, 0.0, numbers)
    copy(ready, search, numbers)
    flattest = math.inf
    for _ in range(MOST_CG):
        if not strength > goal:
            break
        hessian_product(graph, search, epsilon, shift, image)
        curvature = inner_product(search, image, numbers)
        weight = weighted_square(search, graph)
        if not curvature > least * weight:
            return curvature / weight if curvature <= 0.0 or curvature > 0.0 else -math.inf
        flattest = min(flattest, curvature / weight)
        step = strength / curvature
        combine(solution, step, search, solution, numbers)
        if inner_product(solution, solution, numbers) > longest * longest:
            break
        combine(rest, -step, image, rest, numbers)
        solve_model(graph, factor, pivots, rest, ready)
        following = inner_product(rest, ready, numbers)
        combine(ready, following / strength, search, search, numbers)
        strength = following
    return flattest if strength < math.inf else -math.inf


@kernel
def solve_shifted(graph, epsilon, shift, exact, factor, pivots):  # type: ignore[no-untyped-def]
    """Whether ``H + shift diag(2 a)`` is definite, as far as was seen; ``solution`` is then roughly that of ``right``.

    Args:
        exact: nothing but the model is needed.
        factor, pivots: of the leading block, shifted.
    """
    stay_apart()
    if graph.lead < graph.dimension and not factorise_others(graph, shift):
        return False
    if exact:
        solve_model(graph, factor, pivots, graph.right, graph.solution)
        return True
    return conjugate_gradients(graph, epsilon, shift, ROUGH, math.inf, False, 0.0, factor, pivots) > 0.0


@kernel
def damped(graph, epsilon, precision, longest, guessed, exact):  # type: ignore[no-untyped-def]
    """Smallest curvature of H that was met, in solving ``(H + d diag(2 a)) solution = right`` with ``d = FLAT``.

    The factor of the leading block is in ``graph.newton_factor``.
    """
    stay_apart()
    factor, pivots = graph.newton_factor, graph.newton_pivots
    if exact:
        solve_model(graph, factor, pivots, graph.right, graph.solution)
        return math.inf
    return conjugate_gradients(graph, epsilon, FLAT, precision, longest, guessed, 0.0, factor, pivots) - FLAT


@kernel
def flattest_pivot(graph, pivots, shift):  # type: ignore[no-untyped-def]
    """Smallest curvature of H that shows in the factor of its leading block, which is shifted."""
    stay_apart()
    return smallest_pivot(pivots, graph.count * graph.lead) * graph.count / 2.0 - shift


@kernel
def smallest_curvature(graph, factor, pivots, shift, outside):  # type: ignore[no-untyped-def]
    """Smallest curvature of H by its model, whose factors with a shift are at hand.

    Args:
        factor, pivots: in the leading coordinates.
        outside: there are others, in which the Hessian is like ``2 Q``; that factor is in ``graph.small``.
    """
    stay_apart()
    right, solution = graph.flat_right, graph.flat_solution
    found = smallest_eigenvalue(factor, graph.count * graph.lead, pivots, INVERSIONS, right, solution)
    if outside:
        found = min(found, smallest_eigenvalue(graph.small, graph.count, graph.inverse, INVERSIONS, right, solution))
    return found * graph.count / 2.0 - shift


@kernel
def solve_newton(graph, epsilon, precision, longest, guessed, factored):  # type: ignore[no-untyped-def]
    r"""Smallest curvature of H that was met, below ``-FLAT`` if it is not definite; ``solution`` is filtered ``H^-1 right``.

    With ``t = (H + D)^-1``, ``D = d diag(2 a)``, and ``y = t r - t D t r``, the filter is
    ``y + 2 t D y - 2 t D t D y`` up to ``(2 d / h)^2``, and smaller than it should be for flatter directions.
    Where the model is not the Hessian, ``t r`` alone is as good as what is asked of conjugate gradients.

    Args:
        factored: the factor of the leading block is at hand.
    """
    stay_apart()
    numbers = graph.count * padded(graph.dimension)
    if not factored and not shifted_factor(graph, FLAT, graph.newton_factor, graph.newton_pivots):
        return -math.inf
    if graph.lead < graph.dimension and not factorise_others(graph, FLAT):
        return -math.inf
    exact = is_exact(graph, epsilon)
    flattest = min(
        flattest_pivot(graph, graph.newton_pivots, FLAT), damped(graph, epsilon, precision, longest, guessed, exact)
    )
    if not exact:
        return flattest
    filtered = graph.other
    copy(graph.solution, filtered, numbers)
    for power in range(3):
        scale_points(graph.solution if power != 1 else filtered, 2.0 * FLAT, graph, graph.right)
        solve_model(graph, graph.newton_factor, graph.newton_pivots, graph.right, graph.solution)
        combine(filtered, -1.0 if power == 0 else 2.0 if power == 1 else -2.0, graph.solution, filtered, numbers)
    copy(filtered, graph.solution, numbers)
    return flattest


@kernel
def normal_residual(graph, epsilon, penalty, solution, right, result):  # type: ignore[no-untyped-def]
    """Fills ``result`` with ``H right - (H H + penalty) solution``; ``graph.image`` is scratch."""
    stay_apart()
    numbers = graph.count * padded(graph.dimension)
    hessian_product(graph, solution, epsilon, 0.0, graph.image)
    combine(right, -1.0, graph.image, graph.image, numbers)
    hessian_product(graph, graph.image, epsilon, 0.0, result)
    combine(result, -penalty, solution, result, numbers)


@kernel
def solve_adjoint(graph, epsilon, ridge, outside):  # type: ignore[no-untyped-def]
    r"""Residual of ``(H H + lambda) solution = H right``, relative to the right-hand side; and the smallest curvature met.

    Conjugate gradients on the normal equations of the paper, which are definite for any H. They start from the solution of
    ``H w = right``, which is theirs but for ``lambda / h^2`` where H has no flat direction; else from a damped one.

    Args:
        ridge: lambda in units of ``(2 / M)^2``.
        outside: there are directions that do not lead, in which the Hessian is like ``2 Q``.
    """
    stay_apart()
    factor, pivots, numbers = graph.newton_factor, graph.newton_pivots, graph.count * padded(graph.dimension)
    penalty = max(ridge, LEAST_RIDGE) * (2.0 / graph.count) ** 2
    shift = max(LEAST_SHIFT, math.sqrt(ridge))
    # H may be indefinite where the flow was cut off; any definite model will do.
    while not (shifted_factor(graph, shift, factor, pivots) and factorise_others(graph, shift)):
        shift *= 10.0
        if not shift < 1e6:
            fill(graph.solution, math.nan, numbers)
            return math.nan, -math.inf
    copy(graph.right, graph.velocity, numbers)
    curvature = conjugate_gradients(graph, epsilon, 0.0, PRECISE, math.inf, False, SINGULAR, factor, pivots)
    if not curvature > SINGULAR:
        conjugate_gradients(graph, epsilon, shift, ROUGH, math.inf, False, 0.0, factor, pivots)
    # Conjugate gradients with the squared inverse of the model as preconditioner.
    solution, rest, search, ready, image = graph.solution, graph.rest, graph.search, graph.ready, graph.other
    hessian_product(graph, graph.velocity, epsilon, 0.0, rest)
    size = norm(rest, numbers)
    solve_model(graph, factor, pivots, rest, ready)
    goal = ADJOINT * ADJOINT * inner_product(ready, ready, numbers)
    normal_residual(graph, epsilon, penalty, solution, graph.velocity, rest)
    solve_model(graph, factor, pivots, rest, graph.right)
    strength = inner_product(graph.right, graph.right, numbers)
    solve_model(graph, factor, pivots, graph.right, search)
    for _ in range(MOST_CG):
        if not strength > goal:
            break
        hessian_product(graph, search, epsilon, 0.0, graph.image)
        bending = inner_product(graph.image, graph.image, numbers) + penalty * inner_product(search, search, numbers)
        hessian_product(graph, graph.image, epsilon, 0.0, image)
        combine(image, penalty, search, image, numbers)
        step = strength / bending
        combine(solution, step, search, solution, numbers)
        combine(rest, -step, image, rest, numbers)
        solve_model(graph, factor, pivots, rest, graph.right)
        following = inner_product(graph.right, graph.right, numbers)
        solve_model(graph, factor, pivots, graph.right, ready)
        combine(ready, following / strength, search, search, numbers)
        strength = following
    normal_residual(graph, epsilon, penalty, solution, graph.velocity, rest)
    missed = norm(rest, numbers)
    flattest = min(curvature, smallest_curvature(graph, factor, pivots, shift, outside))
    return missed / size if size > 0.0 else missed, flattest


@kernel
def solve_outside(graph, ridge, rows, spare, length):  # type: ignore[no-untyped-def]
    """Replaces rows ``(M, length)`` by the filtered solution with ``2 Q``, the Hessian outside the hull.

    ``(4 Q Q + lambda)^-1 2 Q rows``, whose matrix is definite for any Q. ``spare`` has the size of the rows.
    """
    stay_apart()
    count, plan = graph.count, graph.kept_self_plan
    penalty = max(ridge, LEAST_RIDGE) * (2.0 / count) ** 2
    for i in range(count):
        for c in range(0, length, WIDTH):
            value = splat(0.0)
            for k in range(count):
                value = fma(splat(2.0 * plan[i, k]), load(rows, k, c), value)
            store(spare, i, c, value)
        for k in range(i, count):
            product = 0.0
            for m in range(count):
                product += 4.0 * plan[i, m] * plan[m, k]
            graph.small[i, k] = product
        graph.small[i, i] += penalty
    factorise(graph.small, count, graph.inverse)
    substitute_rows(graph.small, count, graph.inverse, spare, length)
    for i in range(count):
        for c in range(0, length, WIDTH):
            store(rows, i, c, load(spare, i, c))
