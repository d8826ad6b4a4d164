r"""What each point of a shared reference receives of a graph: the first step of the flow, seen from where it starts.

The flow forgets its reference: where it ends depends on the graph alone, apart from the choice among local minima. Here
the reference X stays where it is for all graphs, and may be learned. The nodes are sent to it by one entropic transport
(section 3.2 of the paper), and each point tells what it got:

.. math::
    P_{ij} = b_j \, \mathrm{softmax}_i\Bigl(\frac{f_i - C_{ij}}{\varepsilon} + \log a_i\Bigr), \qquad
    \hat x_i = \tfrac1{a_i} \sum_j P_{ij} y_j

With the potential f for which every point receives its share :math:`a_i`, :math:`\hat x` is the barycentric map, the
place where one step of size one of the flow without debiasing puts the points. With free masses f is zero and the
marginal of the points is whatever comes out (semi-relaxed transport): nothing is iterated then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowpool import costs, references
from flowpool.core.measures import Clouds, check_features, make_clouds
from flowpool.costs import Cost, CostFunction, Geometry
from flowpool.engines.choice import say_where
from flowpool.engines.devices import HOST, carried, opaque, precision_on
from flowpool.inputs import check_choice, check_flag, check_like, check_plain, checked_epsilon, checked_point_masses
from flowpool.options import ENGINES, Engine
from flowpool.step.balance import balanced
from flowpool.step.ragged import leaves_device, products_of_rows, sums_of_products, use_kernels

_NOTHING = 1e-30  # share of a graph below which a point is told to have received nothing
_ROUNDING = 1e-14  # of a mean square, below which a variance is not told from that of a single node


class Received(NamedTuple):
    """What went where in each of B graphs.

    Attributes:
        masses: share of the graph that each point received, ``(B, M)``; sums to one, zeros for an empty graph. Times
            the number of nodes it counts them.
        points: mean of what each point received, ``(B, M, D)``; the reference point itself where that is nothing.
        variances: of each feature within what each point received, ``(B, M, D)``; zero where that is nothing.
    """

    masses: Tensor
    points: Tensor
    variances: Tensor

    @property
    def deviations(self) -> Tensor:
        r"""Standard deviations :math:`\sigma`, the square roots of the variances, ``(B, M, D)``.

        The slope of the root is infinite at zero, that of :math:`\sigma` in the nodes is not: what moves a node by one
        moves :math:`\sigma` by at most one. So the gradient is bounded however small a variance is, and where it is
        zero, at the tip of a cone, it is the one of the axis: zero.
        """
        none = ~(self.variances > 0)
        # The inner one keeps the root away from zero, or its infinite slope would turn the gradient into NaN.
        return self.variances.masked_fill(none, 1.0).sqrt().masked_fill(none, 0.0)


def transport_pool(
    nodes: Tensor,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    reference: Tensor,
    masses: Tensor | None = None,
    point_masses: Tensor | None = None,
    dim_size: int | None = None,
    cost: str | CostFunction = "sqeuclidean",
    epsilon: float | Tensor = 0.1,
    relative: bool = True,
    free: bool = False,
    engine: Engine = "auto",
) -> Received:
    """How much of each graph goes to each reference point, and the mean and the variances of that share.

    Without ``free`` the points are where one step of size one of ``flow_pool(..., debias=False)`` puts the reference.
    The mean of the graph is the mean of the points weighted by their masses, and its variance is in the output too:
    that of the points plus the mean of their variances.

    Args:
        nodes: Y of all graphs, ``(N, D)``. Computed in float64, returned in the dtype given.
        batch: graph of each node, ``(N,)``, in any order.
        ptr: or the offsets of nodes sorted by graph, ``(B + 1,)``. With neither, all nodes form one graph.
        reference: X, ``(M, D)``, shared by all graphs. A gradient flows to it.
        masses: b, ``(N,)``, not negative, normalised per graph; ``None``: equal.
        point_masses: a, ``(M,)``, positive, normalised; ``None``: equal. With ``free`` they say how readily each point
            receives.
        dim_size: B, to keep trailing graphs without nodes.
        cost: squared Euclidean, or a diagonal :class:`flowpool.costs.Mahalanobis`, whose weights get a gradient.
        epsilon: entropic regularisation, a number, a scalar tensor, or one value per graph ``(B,)``. A large one sends
            the same mixture to every point, a small one sends each node to one point.
        relative: epsilon in units of each graph's mean cost to its mean (R^2, the sum of its variances), and the
            reference in units of R around its mean. Otherwise both are absolute: the reference then stands at the same
            place for all graphs, which is what tells their places apart.
        free: the points receive whatever is near them, a soft histogram of the nodes over M prototypes; otherwise each
            receives its share of the graph, and the shape of the graph shows in where that lies.
        engine: as in :func:`flowpool.flow_pool`.

    Gradients in nodes, masses, reference, point masses and epsilon are exact, without memory for the iterations; a
    second derivative is refused. A graph with NaN or infinite features has NaN rows, and touches no gradient of others.
    """
    check_features(nodes)
    check_plain(nodes)
    references.check_shape(reference, nodes.shape[1])
    if reference.device != nodes.device:
        raise ValueError(f"reference is on {reference.device}, nodes are on {nodes.device}; move one of them.")
    check_flag("relative", relative)
    check_flag("free", free)
    check_choice("engine", engine, ENGINES)
    given = checked_cost(cost, nodes.shape[1])
    if masses is not None:
        check_like(masses, nodes, "masses", "nodes")
    device, geometry = nodes.device, costs.geometry_of(given)
    tensors: list[Any] = [nodes, batch, ptr, masses, reference, point_masses, epsilon, *geometry.tensors.values()]
    if leaves_device(engine, nodes):
        say_where(device)
        tensors = carried(tensors, HOST)
    received = _received(dim_size, relative, free, engine, geometry.having(tensors[7:]), *tensors[:7])
    return Received(*carried(received, device))


def checked_cost(cost: str | CostFunction, num_features: int) -> Cost:
    """The cost as a module; raises unless it is one that the step knows."""
    given = costs.resolve(cost)
    costs.check_width(given, num_features)
    if not costs.is_weighing(given):
        raise ValueError(
            f"One step knows the squared Euclidean and the diagonal Mahalanobis cost, not {given}; "
            "use flow_pool or FlowPool, which take any cost."
        )
    return given


def _received(
    dim_size: int | None,
    relative: bool,
    free: bool,
    engine: Engine,
    geometry: Geometry,
    nodes: Tensor,
    batch: Tensor | None,
    ptr: Tensor | None,
    masses: Tensor | None,
    reference: Tensor,
    point_masses: Tensor | None,
    epsilon: float | Tensor,
) -> Received:
    """:func:`transport_pool` where the nodes are."""
    clouds, _ = precise_clouds(nodes, batch, ptr, masses, dim_size)
    clouds, broken = without_broken(clouds)
    level = checked_epsilon(epsilon, clouds.num_graphs, clouds.nodes)
    shares = checked_point_masses(point_masses, reference.shape[0], clouds.nodes)
    weights = geometry.to(clouds.nodes.dtype, nodes.device).feature_weights
    step = Step(reference.to(clouds.nodes), shares, level, weights, free, use_kernels(engine, nodes))
    received = receive_relative(clouds, step) if relative else receive(clouds, step)
    if broken is not None:
        masses, *rest = received
        masses = masses.masked_fill(broken[:, None], torch.nan)
        received = Received(masses, *(value.masked_fill(broken[:, None, None], torch.nan) for value in rest))
    return Received(*(value.to(nodes.dtype) for value in received))


class Step(NamedTuple):
    """What is asked of one step, in the precision in which plans are computed."""

    reference: Tensor  # X, (M, D)
    shares: Tensor  # a, (M,), summing to one
    epsilon: Tensor  # (B,)
    weights: Tensor | None  # w, (D,), of the cost |w (x - y)|^2; None: all one
    free: bool
    compiled: bool


def precise_clouds(
    nodes: Tensor,
    batch: Tensor | None,
    ptr: Tensor | None,
    masses: Tensor | None,
    dim_size: int | None,
) -> tuple[Clouds, Tensor]:
    """:func:`flowpool.core.measures.make_clouds` in the precision in which plans are computed."""
    precision = precision_on(nodes.device)
    nodes, masses = nodes.to(precision), None if masses is None else masses.to(precision)
    if not torch.compiler.is_compiling() or dim_size is None:
        return make_clouds(nodes, batch, ptr, masses, dim_size)
    offsets, order = sorted_by_graph(nodes.detach(), batch, ptr, masses, dim_size)
    weights = torch.ones_like(nodes[:, 0]) if masses is None else masses[order]
    clouds = Clouds.from_ptr(nodes[order], weights, offsets)
    return Clouds(clouds.nodes, weights / clouds.sum(weights)[clouds.batch], offsets, clouds.batch), order


@opaque(
    lambda nodes, batch, ptr, masses, num_graphs: (
        nodes.new_empty(num_graphs + 1, dtype=torch.long),
        nodes.new_empty(nodes.shape[0], dtype=torch.long),
    )
)
def sorted_by_graph(
    nodes: Tensor, batch: Tensor | None, ptr: Tensor | None, masses: Tensor | None, num_graphs: int
) -> tuple[Tensor, Tensor]:
    """Offsets of the graphs ``(B + 1,)`` and the order ``(N,)`` of clouds, whose checks ask for values: for traced graphs."""
    clouds, order = make_clouds(nodes, batch, ptr, masses, num_graphs)
    return clouds.ptr.clone(), order.clone()


def without_broken(clouds: Clouds) -> tuple[Clouds, Tensor | None]:
    """The clouds with zeros in place of graphs that have NaN or infinite features, and which these are, ``(B,)`` bool.

    What is shared, like a reference, then gets no NaN from them; whoever hands rows to the caller puts NaN there. None:
    there are none, which is the usual case and known at once unless a graph is being traced.
    """
    finite = clouds.nodes.detach().isfinite()
    if not torch.compiler.is_compiling() and bool(finite.all()):
        return clouds, None
    broken = clouds.sum((~finite).any(-1).to(clouds.masses.dtype)) > 0
    return clouds.moved(clouds.nodes.masked_fill(broken[clouds.batch, None], 0.0)), broken


def receive_relative(clouds: Clouds, step: Step) -> Received:
    """:func:`receive` in the frame of each graph, whose mean is at zero and whose variances sum to one."""
    mean = clouds.mean()
    centred = clouds.nodes - mean[clouds.batch]
    squares = centred * centred
    variance = clouds.sum(clouds.masses * squares.sum(-1))  # (B,), R^2
    apart = variance > 0  # otherwise the graph is one point or none, and every unit is as good
    radius = torch.where(apart, variance, 1.0).sqrt()[:, None]
    unit = torch.ones_like(variance)
    if step.weights is not None:
        weighed = clouds.sum(clouds.masses * (squares * step.weights.square()).sum(-1))
        unit = torch.where(apart, weighed, 1.0) / radius.squeeze(-1).square()
    framed = clouds.moved(centred / radius[clouds.batch])
    received = receive(framed, step._replace(epsilon=step.epsilon * unit))
    points = mean[:, None] + radius[:, None] * received.points
    return Received(received.masses, points, radius[:, None].square() * received.variances)


def receive(clouds: Clouds, step: Step) -> Received:
    """:func:`transport_pool` of finite clouds from :func:`precise_clouds`, in their dtype and coordinates."""
    reference, ptr, compiled = step.reference, clouds.ptr, step.compiled
    mean, deviations = centre(clouds, compiled)
    scores = scores_of(clouds, mean, deviations, reference.unsqueeze(0), step)
    portions = scores.softmax(-1) if step.free else balanced(scores, clouds.masses, step.shares, ptr, compiled)
    plan = clouds.masses.unsqueeze(-1) * portions  # (N, M), P^T

    dim = reference.shape[1]
    # A product and not a square, whose derivative torch would compute as that of a power.
    terms = torch.cat([torch.ones_like(deviations[:, :1]), deviations, deviations * deviations], 1)  # (N, 1 + 2 D)
    received, first, second = sums_of_products(plan, terms, ptr, compiled).split([1, dim, dim], -1)  # (B, M, ...)
    # Next to nothing lies at every point from the start, so that there is a mean where nothing comes.
    total = received + _NOTHING
    shift = (first + _NOTHING * (reference - mean.unsqueeze(1))) / total
    square = second / total
    variances = square - shift * shift
    variances = variances.masked_fill(variances <= _ROUNDING * square, 0.0)
    return Received(received.squeeze(-1), mean.unsqueeze(1) + shift, variances)


def centre(clouds: Clouds, compiled: bool) -> tuple[Tensor, Tensor]:
    """Mean of each graph ``(B, D)``, and how its nodes deviate from it ``(N, D)``.

    Squares of distances are differences of squares, in which offsets would cancel. No result depends on which offset is
    taken off, so this one has no gradient.
    """
    with torch.no_grad():
        mean = sums_of_products(clouds.masses.unsqueeze(-1), clouds.nodes, clouds.ptr, compiled).squeeze(1)
    return mean, clouds.nodes - mean[clouds.batch]


def scores_of(clouds: Clouds, mean: Tensor, deviations: Tensor, points: Tensor, step: Step) -> Tensor:
    """``-C(x, y) / epsilon`` between points ``(B or 1, M, D)`` and the nodes of each graph, ``(N, M)``.

    Up to a number per node, which no softmax sees; and with free masses plus ``log a``. ``mean`` and ``deviations`` are
    those of :func:`centre`.
    """
    middle = points.detach().mean(1, keepdim=True)  # an offset without a gradient, like the mean
    nearby = points - middle
    pull = nearby if step.weights is None else nearby * step.weights.square()
    # -|x - y|^2 = 2 x.y - |x|^2 up to a number that is the same for all points, and y is its mean and its deviation.
    from_mean = (pull * (2 * (mean.unsqueeze(1) - middle) - nearby)).sum(-1, keepdim=True)  # (B, M, 1)
    constant, slope = from_mean / step.epsilon[:, None, None], 2 * pull / step.epsilon[:, None, None]
    if step.free:
        constant = constant + step.shares.log().unsqueeze(-1)
    coefficients = torch.cat([constant, slope], -1)  # (B, M, 1 + D)
    terms = torch.cat([torch.ones_like(deviations[:, :1]), deviations], 1)  # (N, 1 + D)
    return products_of_rows(terms, coefficients.mT, clouds.ptr, step.compiled)
