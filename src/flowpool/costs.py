r"""Ground costs C(x, y) (section 3.1 of the paper).

A cost is any callable that maps ``(..., M, 1, D)`` and ``(..., 1, N, D)`` to ``(..., M, N)``; it may be an
``nn.Module`` with parameters, the :math:`C_\theta` of section 10. The classes here also say how the cost behaves when
both clouds are moved and scaled together, which lets the solver work on standardised clouds: features around 1e6, or
of size 1e-12, then do no harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

CostFunction = Callable[[Tensor, Tensor], Tensor]


class Cost(nn.Module):
    """Base of the costs that the solver knows something about.

    Attributes:
        degree: p when ``C(s x + t, s y + t) = s^p C(x, y)`` for every shift t and scale s > 0, else ``None``.
        known: symmetric, without a kink, and a function of its arguments and parameters alone. Any other cost is
            tried before it is used (:mod:`flowpool.trial`).
    """

    degree: float | None = None
    known = False


class SquaredEuclidean(Cost):
    r"""The cost of the paper's experiments, :math:`|x - y|^2`."""

    degree = 2.0
    known = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).square().sum(-1)


class Euclidean(Cost):
    r"""Power of the Euclidean distance, :math:`D^p = |x - y|^p`, so that L_C is W_p^p.

    For p = 1 it has a kink where x = y. Minimisers sit on kinks, where no gradient vanishes, so that no flow can be run with
    it. A radius r rounds the kink off: :math:`(|x - y|^2 + r^2)^{p/2} - r^p` is quadratic for distances well below r
    and :math:`D^p` up to a constant well above.

    Args:
        power: p.
        radius: r, in the units of the features; about a tenth of their spread is a good start.
    """

    def __init__(self, power: float = 1.0, radius: float = 0.0) -> None:
        super().__init__()
        if not power > 0:
            raise ValueError(f"power is {power}; pass a value > 0.")
        self.power, self.radius = float(power), _checked_radius(radius)
        self.degree = None if self.radius else self.power

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        squared = (x - y).square().sum(-1)
        if self.radius:
            return (squared + self.radius**2).pow(self.power / 2) - math.pow(self.radius, self.power)
        apart = squared > 0
        # The inner where keeps the power away from zero, or its infinite slope would turn the gradient into NaN.
        return torch.where(apart, torch.where(apart, squared, 1.0).pow(self.power / 2), 0.0)

    def extra_repr(self) -> str:
        return f"power={self.power:g}, radius={self.radius:g}"


class Manhattan(Cost):
    r"""Sum of the absolute differences, :math:`\sum_d |x_d - y_d|`.

    It has a kink wherever two features are equal, see :class:`Euclidean`. A radius r makes it
    :math:`\sum_d \sqrt{(x_d - y_d)^2 + r^2} - r`.

    Args:
        radius: r, in the units of the features.
    """

    def __init__(self, radius: float = 0.0) -> None:
        super().__init__()
        self.radius = _checked_radius(radius)
        self.degree = None if self.radius else 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.radius:
            return ((x - y).square() + self.radius**2).sqrt().sum(-1) - self.radius * x.shape[-1]
        return (x - y).abs().sum(-1)

    def extra_repr(self) -> str:
        return f"radius={self.radius:g}"


def _checked_radius(radius: float) -> float:
    if not 0 <= radius < math.inf:
        raise ValueError(f"radius is {radius}; pass a value >= 0.")
    return float(radius)


class Cosine(Cost):
    r"""One minus the cosine of the angle, :math:`1 - \langle x, y\rangle / (|x| |y|)`; a zero vector is at cost one."""

    known = True

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
    known = True

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

    known = True

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


def check_width(cost: Cost, in_channels: int) -> None:
    """Raises if a cost was made for another number of features."""
    made_for = getattr(cost, "in_channels", in_channels)
    if made_for != in_channels:
        raise ValueError(f"The cost {cost} was made for {made_for} features; there are {in_channels}.")


@dataclass(frozen=True)
class Geometry:
    """A cost together with the values of its parameters, in the precision of the solver.

    The parameters travel as arguments, so that a float32 module can be evaluated in float64 and differentiated
    without touching the module.

    Attributes:
        constant: C(x, x) is the same for every x, so that a point's cost to itself has no derivative. The cost is then
            never differentiated there, where formulas such as ``(x - y).norm(dim=-1) ** 3`` have no second derivative.
    """

    cost: Cost
    tensors: dict[str, Tensor] = field(default_factory=dict)
    constant: bool = False

    @property
    def is_squared_euclidean(self) -> bool:
        return isinstance(self.cost, SquaredEuclidean)

    def having(self, values: Iterable[Tensor]) -> Geometry:
        """The same with other values of its tensors, in their order."""
        return replace(self, tensors=dict(zip(self.tensors, values, strict=True)))

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
            own = x.square().sum(-1, keepdim=True)
            other = own if y is x else y.square().sum(-1, keepdim=True)
            return torch.baddbmm(own + other.mT, x, y.mT, alpha=-2)  # accurate because the clouds are centred
        return self.pairwise(x.unsqueeze(-2), y.unsqueeze(-3))

    def pairwise(self, x: Tensor, y: Tensor) -> Tensor:
        """The cost on tensors that broadcast, ``(..., D)`` and ``(..., D)`` to ``(...)``."""
        result: Tensor = functional_call(self.cost, self.tensors, (x, y))
        return result

    def opened(self, x: Tensor, y: Tensor, own: int = 0) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """All costs, ``(B, M, N)``, and the function that maps a plan to the gradient of ``<plan, C>`` in x, ``(B, M, D)``.

        Both are differentiable in everything where grad mode is on; the gradient is that in the first argument alone.

        Args:
            own: so many rows at the end of y are x itself.
        """
        if self.is_squared_euclidean:
            return self.matrix(x, y), lambda plan: 2 * (plan.sum(-1, keepdim=True) * x - plan @ y)
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            moved = x.clone() if x.requires_grad else x.detach().requires_grad_()
            cost = self._pairs(moved.unsqueeze(-2), y, own)

        def pulled(plan: Tensor) -> Tensor:
            return torch.autograd.grad(cost, moved, plan, create_graph=again)[0]

        return cost if again else cost.detach(), pulled

    def slopes(self, x: Tensor, y: Tensor, plan: Tensor, own: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """First and second derivatives of the costs, each pair for itself; arguments as for :meth:`opened`.

        Returns:
            The derivative of ``C(x_i, y_j)`` in its first argument, ``(B, M, D, N)``; ``sum_j P_ij`` of the second derivative in
            that argument, ``(B, M, D, D)``; and ``P_ik`` times the mixed one, in both, for the rows of y that are x,
            ``(B, M, D, own, D)``.
        """
        batch, num_points, dim = x.shape
        if self.is_squared_euclidean:
            unit = torch.eye(dim, dtype=x.dtype, device=x.device)
            apart = 2 * (x.unsqueeze(-1) - y.mT.contiguous().unsqueeze(1))
            bends = 2 * plan.sum(-1)[..., None, None] * unit
            across = plan[..., plan.shape[-1] - own :]
            return apart, bends, -2 * across[:, :, None, :, None] * unit[:, None, :]
        with torch.enable_grad():
            first, second = x.detach().unsqueeze(2).requires_grad_(), y.detach().clone().requires_grad_()
            pairs = second.unsqueeze(1).expand(batch, num_points, -1, dim)
            wide = first.expand_as(pairs)
            (apart,) = torch.autograd.grad(self._pairs(wide, pairs, own).sum(), wide, create_graph=True)
            weighted = (plan.unsqueeze(-1) * apart).sum((0, 1, 2))
            rows = [_second(weighted[d], (first, pairs)) for d in range(dim)]
        bends = torch.stack([row[0].squeeze(2) for row in rows], 2)
        across = torch.stack([row[1][:, :, pairs.shape[2] - own :] for row in rows], 2)
        return apart.detach().mT, bends, across

    def _pairs(self, x: Tensor, y: Tensor, own: int) -> Tensor:
        """All costs, ``(B, M, N)``, between ``(B, M, 1 or N, D)`` and ``(B, N, D)`` or ``(B, M, N, D)``."""
        y = y.unsqueeze(1) if y.dim() == 3 else y
        if not (own and self.constant):
            return self.pairwise(x, y)
        others = y.shape[2] - own
        diagonal = torch.arange(own, device=x.device).unsqueeze(1) == torch.arange(-others, own, device=x.device)
        beside = y + diagonal.unsqueeze(-1).to(y.dtype)  # never the point itself, (B, M, N, D)
        itself = y[:, :1, -1:].detach()
        return torch.where(diagonal, self.pairwise(itself, itself), self.pairwise(x, beside))


def _second(value: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Derivatives of a first derivative, zero where that is constant."""
    if not value.requires_grad:
        return tuple(torch.zeros_like(one) for one in inputs)
    return torch.autograd.grad(value, inputs, retain_graph=True, materialize_grads=True)


def is_weighing(cost: Cost) -> bool:
    """Whether the cost is ``|w (x - y)|^2``, with weights of the features or without: what kernels know."""
    return isinstance(cost, SquaredEuclidean) or isinstance(cost, Mahalanobis) and cost.rank is None


def geometry_of(cost: Cost) -> Geometry:
    """The geometry of a cost with its parameters and buffers as they are now."""
    return Geometry(cost, dict([*cost.named_parameters(), *cost.named_buffers()]))


def bind(cost: Cost, dtype: torch.dtype, device: torch.device) -> Geometry:
    """:func:`geometry_of` in the precision of a solver, on its device."""
    return geometry_of(cost).to(dtype, device)
