r"""Ground costs C(x, y) (section 3.1 of the paper).

A cost is any callable that maps ``(..., M, 1, D)`` and ``(..., 1, N, D)`` to ``(..., M, N)``; it may be an
``nn.Module`` with parameters, the :math:`C_\theta` of section 10. The classes here also say how the cost behaves when
both clouds are moved and scaled together, which lets the solver work on standardised clouds: features around 1e6, or
of size 1e-12, then do no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

CostFunction = Callable[[Tensor, Tensor], Tensor]


class Cost(nn.Module):
    """Base of the costs that the solver knows something about.

    Attributes:
        degree: p when ``C(s x + t, s y + t) = s^p C(x, y)`` for every shift t and scale s > 0, else ``None``.
    """

    degree: float | None = None


class SquaredEuclidean(Cost):
    r"""The cost of the paper's experiments, :math:`|x - y|^2`."""

    degree = 2.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).square().sum(-1)


class Euclidean(Cost):
    r"""Power of the Euclidean distance, :math:`D^p = |x - y|^p`, so that L_C is W_p^p.

    The gradient at zero distance is zero, also for p < 2 where the distance has a kink. For p = 1 minimisers may sit on
    such kinks, where no gradient vanishes; the status then says so.
    """

    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        if not power > 0:
            raise ValueError(f"power is {power}; pass a value > 0.")
        self.degree = self.power = float(power)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        squared = (x - y).square().sum(-1)
        apart = squared > 0
        # The inner where keeps the power away from zero, or its infinite slope would turn the gradient into NaN.
        return torch.where(apart, torch.where(apart, squared, 1.0).pow(self.power / 2), 0.0)

    def extra_repr(self) -> str:
        return f"power={self.power:g}"


class Cosine(Cost):
    r"""One minus the cosine of the angle, :math:`1 - \langle x, y\rangle / (|x| |y|)`; a zero vector is at cost one."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 1.0 - (_unit(x) * _unit(y)).sum(-1)


def _unit(x: Tensor) -> Tensor:
    squared = x.square().sum(-1, keepdim=True)
    nonzero = squared > 0
    return torch.where(nonzero, x * torch.where(nonzero, squared, 1.0).rsqrt(), 0.0)


class Mahalanobis(Cost):
    r"""Learnable quadratic cost :math:`|L (x - y)|^2`.

    It helps where features differ in importance or in unit and no layer before the pool can learn that.

    A diagonal L is the squared Euclidean cost of the features L y, and as such it is pooled: in the metric of the cost,
    :math:`\dot x_i = -\tfrac1{2 a_i} L^{-2} \nabla_{x_i} S`, by either engine, so that the weights decide neither the
    stiffness of the flow nor its speed. With a rank, L may be blind in some directions, in which nothing pulls the
    points; the flow then runs in the Euclidean metric, on the torch engine.

    Args:
        in_channels: number of features, D.
        rank: rows of L; ``None`` makes L diagonal, D positive scales kept as logarithms.
    """

    degree = 2.0

    def __init__(self, in_channels: int, rank: int | None = None) -> None:
        super().__init__()
        self.in_channels, self.rank = in_channels, rank
        self.weight = nn.Parameter(torch.empty(in_channels if rank is None else (rank, in_channels)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The squared Euclidean cost, or a random projection of it when the rank is given."""
        if self.rank is None:
            nn.init.zeros_(self.weight)
        else:
            nn.init.orthogonal_(self.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        difference = x - y
        mapped = difference * self.weight.exp() if self.rank is None else difference @ self.weight.T
        return mapped.square().sum(-1)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, rank={self.rank}"


class Neural(Cost):
    r"""Learnable cost :math:`|\phi(x) - \phi(y)|^2` behind a small network,
    :math:`\phi(x) = W_0 x + W_2 \tanh(W_1 x + b)`.

    It starts as the squared Euclidean cost: the second layer is zero, and W_0 is the identity. It helps where features
    far apart should count as close, which no linear map can say; the points are still points of feature space, so
    the network bends what is near and not what comes out. It knows no scale of its own: normalise the features before.

    Args:
        in_channels: number of features, D.
        hidden: width of the tanh layer.
        out_channels: E of :math:`\phi`; ``None``: D. With less than D the cost is blind in some directions, in which
            nothing pulls the points. W_0 is then learned, from a random projection.
    """

    def __init__(self, in_channels: int, hidden: int, out_channels: int | None = None) -> None:
        super().__init__()
        self.in_channels, self.hidden, self.out_channels = in_channels, hidden, out_channels
        width = in_channels if out_channels is None else out_channels
        self.skip = nn.Identity() if out_channels is None else nn.Linear(in_channels, width, bias=False)
        self.first = nn.Linear(in_channels, hidden)
        self.second = nn.Linear(hidden, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The squared Euclidean cost, or a random projection of it when ``out_channels`` is given."""
        self.first.reset_parameters()
        nn.init.zeros_(self.second.weight)
        if isinstance(self.skip, nn.Linear):
            nn.init.orthogonal_(self.skip.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self._embed(x) - self._embed(y)).square().sum(-1)  # embedded before the clouds meet: M + N calls

    def _embed(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.skip(x) + self.second(self.first(x).tanh())
        return embedded

    def extra_repr(self) -> str:
        return f"{self.in_channels}, hidden={self.hidden}, out_channels={self.out_channels}"


class Custom(Cost):
    """Any callable as a cost, of which nothing is known but that it must be symmetric to be debiased."""

    def __init__(self, function: CostFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cost = self.function(x, y)
        expected = torch.broadcast_shapes(x.shape[:-1], y.shape[:-1])
        if cost.shape != expected:
            raise ValueError(
                f"The cost returned shape {tuple(cost.shape)} for inputs {tuple(x.shape)} and {tuple(y.shape)}; "
                f"expected {tuple(expected)}: broadcast the clouds against each other and sum over the last axis."
            )
        return cost


# They have no state, so that one of each is enough.
COSTS: dict[str, Cost] = {"sqeuclidean": SquaredEuclidean(), "euclidean": Euclidean(), "cosine": Cosine()}


def resolve(cost: str | CostFunction) -> Cost:
    """The :class:`Cost` behind a name or a callable."""
    if isinstance(cost, Cost):
        return cost
    if isinstance(cost, str):
        if cost not in COSTS:
            raise ValueError(f"Unknown cost {cost!r}; known names: {', '.join(COSTS)}. Or pass a callable.")
        return COSTS[cost]
    if callable(cost):
        return Custom(cost)
    raise TypeError(f"cost is a {type(cost).__name__}; pass a name, a costs.Cost or a callable.")


@dataclass(frozen=True)
class Geometry:
    """A cost together with the values of its parameters, in the precision of the solver.

    The parameters travel as arguments, so that a float32 module can be evaluated in float64 and differentiated
    without touching the module.
    """

    cost: Cost
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_squared_euclidean(self) -> bool:
        return isinstance(self.cost, SquaredEuclidean)

    def having(self, values: Iterable[Tensor]) -> Geometry:
        """The same with other values of its tensors, in their order."""
        return Geometry(self.cost, dict(zip(self.tensors, values, strict=True)))

    def to(self, dtype: torch.dtype, device: torch.device) -> Geometry:
        """The same in the precision of a solver, on its device."""
        return self.having(
            value.to(device, dtype) if value.is_floating_point() else value.to(device)
            for value in self.tensors.values()
        )

    def detached(self) -> Geometry:
        """The same without autograd history."""
        return self.having(value.detach() for value in self.tensors.values())

    @property
    def feature_weights(self) -> Tensor | None:
        """w, ``(D,)``, if the cost is ``|w (x - y)|^2``, the squared Euclidean one of weighted features; else None."""
        if is_weighing(self.cost) and not self.is_squared_euclidean:
            return self.tensors["weight"].exp()
        return None

    def matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """All costs between ``(B, M, D)`` and ``(B, N, D)``, as ``(B, M, N)``."""
        if self.is_squared_euclidean:
            squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
            return torch.baddbmm(squares, x, y.transpose(-1, -2), alpha=-2)  # accurate because the clouds are centred
        return self.pairwise(x.unsqueeze(-2), y.unsqueeze(-3))

    def pairwise(self, x: Tensor, y: Tensor) -> Tensor:
        """The cost on tensors that broadcast, ``(..., D)`` and ``(..., D)`` to ``(...)``."""
        result: Tensor = functional_call(self.cost, self.tensors, (x, y))
        return result

    def pull_back(self, plan: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Gradient of ``<plan, C(x, y)>`` in x alone, ``(B, M, D)``; differentiable in everything."""
        if self.is_squared_euclidean:
            return torch.baddbmm(plan.sum(-1, keepdim=True) * x, plan, y, beta=2, alpha=-2)
        with torch.enable_grad():
            # A copy, so that for y = x only the first argument is differentiated.
            first = x.clone() if x.requires_grad else x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.matrix(first, y), first, plan, create_graph=True)
        return gradient


def is_weighing(cost: Cost) -> bool:
    """Whether the cost is ``|w (x - y)|^2``, with weights of the features or without: what kernels know."""
    return isinstance(cost, SquaredEuclidean) or isinstance(cost, Mahalanobis) and cost.rank is None


def geometry_of(cost: Cost) -> Geometry:
    """The geometry of a cost with its parameters and buffers as they are now."""
    return Geometry(cost, dict([*cost.named_parameters(), *cost.named_buffers()]))


def bind(cost: Cost, dtype: torch.dtype, device: torch.device) -> Geometry:
    """:func:`geometry_of` in the precision of a solver, on its device."""
    return geometry_of(cost).to(dtype, device)
