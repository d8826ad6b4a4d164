r"""The Sinkhorn divergence and its gradient in X (sections 3.3 and 7.1 of the paper, eqs. 11 and 19).

.. math::
    S_\varepsilon(X, Y) = L^\varepsilon_{C(X,Y)}(a, b) - \tfrac12 L^\varepsilon_{C(X,X)}(a, a)
                        - \tfrac12 L^\varepsilon_{C(Y,Y)}(b, b)

    \nabla_X S_\varepsilon = [\partial_X C(X, Y)]^\top P - \tfrac12 [\partial_X C(X, X)]^\top Q

Both plans are optimal, so by the envelope theorem their own dependence on X drops out of the first derivative. It does
not drop out of the second, which is why P and Q are differentiable here.

X meets Y and itself at once: one matrix of costs to all W = N + M of them, and K = 2 problems that differ in the masses of
its columns, b for the nodes in the one and a for the points in the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flowpool import costs
from flowpool.core import sinkhorn
from flowpool.core.once import once
from flowpool.core.sinkhorn import DifferentiablePlan, Transport
from flowpool.costs import CostFunction, Geometry


class Evaluation(NamedTuple):
    """Gradient of the energy at some points, with the transports behind it."""

    points: Tensor  # (B, M, D)
    gradient: Tensor  # (B, M, D)
    cost: Tensor  # (B, M, W)
    transport: Transport  # both problems, (2, B, M, W); only the first when the energy is not debiased, and then W = N

    def select(self, index: Tensor) -> Evaluation:
        """The evaluations of some of the clouds."""
        transport = Transport(*(x[:, index] for x in self.transport))
        return Evaluation(self.points[index], self.gradient[index], self.cost[index], transport)

    @property
    def error(self) -> Tensor:
        """The larger of the two marginal errors, ``(B,)``."""
        return self.transport.error.amax(0)

    @property
    def plan(self) -> Tensor:
        """P, ``(B, M, N)``."""
        return self._between(self.transport.plan)

    @property
    def conditional(self) -> Tensor:
        """``P / b``, ``(B, M, N)``."""
        return self._between(self.transport.conditional)

    @property
    def self_plan(self) -> Tensor:
        """Q, ``(B, M, M)``, where the energy is debiased."""
        return self.transport.plan[1, ..., -self.points.shape[1] :]

    def _between(self, values: Tensor) -> Tensor:
        nodes = values.shape[-1] - (len(values) - 1) * self.points.shape[1]
        return values[0, ..., :nodes]


class Scales(NamedTuple):
    """What makes the numbers of a cloud free of units."""

    centre: Tensor  # (B, 1, D), mean of the nodes
    radius: Tensor  # (B,), R: root of the sum of their variances
    stiffness: Tensor  # (B, M), typical curvature of the energy at a point: 2 a_i for the squared Euclidean cost
    pull: Tensor  # (B,), gradient that counts as one: R for the squared Euclidean cost

    def outside(self, points: Tensor) -> Tensor:
        """Where points lie that are given about the centre and in units of R, ``(B, M, D)``."""
        return torch.addcmul(self.centre, self.radius[:, None, None], points)


@dataclass(frozen=True)
class Energy:
    """What the flow descends: a batch of B node clouds of N nodes each, seen from M points.

    Attributes:
        geometry: the ground cost.
        nodes: Y, ``(B, N, D)``. Rows of mass zero are padding and change nothing.
        masses: b, ``(B, N)``.
        point_masses: a, ``(B, M)``, positive.
        epsilon: ``(B,)``.
        debias: S_eps, or L_eps alone.
    """

    geometry: Geometry
    nodes: Tensor
    masses: Tensor
    point_masses: Tensor
    epsilon: Tensor
    debias: bool = True

    def select(self, index: Tensor) -> Energy:
        """The energies of some of the clouds."""
        nodes, masses, shares = self.nodes[index], self.masses[index], self.point_masses[index]
        return Energy(self.geometry, nodes, masses, shares, self.epsilon[index], self.debias)

    @property
    def scales(self) -> Scales:
        """Centre, radius and stiffness of each cloud."""
        weights, nodes = self.masses.detach().unsqueeze(-1), self.nodes.detach()
        centre = (weights * nodes).sum(-2, keepdim=True)
        variance = (weights * (nodes - centre).square()).sum((-1, -2))
        cost = variance
        if not self.geometry.is_squared_euclidean:
            with torch.no_grad():
                cost = (self.masses * self.geometry.matrix(centre, nodes).squeeze(-2)).sum(-1)
        radius, stiffness = variance.sqrt(), 2 * self.point_masses.detach() * (cost / variance)[:, None]
        return Scales(centre, radius, stiffness, radius * stiffness.sum(-1) / 2)

    @property
    def own(self) -> int:
        """How many of the columns are the points themselves."""
        return self.point_masses.shape[1] if self.debias else 0

    def columns(self, points: Tensor) -> Tensor:
        """What the points ``(B, M, D)`` meet: the nodes, and themselves, ``(B, W, D)``."""
        return torch.cat([self.nodes, points], 1) if self.debias else self.nodes

    def problems(self, cost: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The K transports: their costs, ``(K, B, M, W)``, masses of rows and columns, and epsilons."""
        if not self.debias:
            return cost[None], self.point_masses[None], self.masses[None], self.epsilon[None]
        nodes, points = torch.zeros_like(self.masses), torch.zeros_like(self.point_masses)
        columns = torch.stack([torch.cat([self.masses, points], -1), torch.cat([nodes, self.point_masses], -1)])
        return cost.expand(2, -1, -1, -1), self.point_masses.expand(2, -1, -1), columns, self.epsilon.expand(2, -1)

    @torch.no_grad()
    def evaluate(
        self, points: Tensor, potential: Tensor | None = None, tolerance: Tensor | float = 1e-12
    ) -> Evaluation:
        """The gradient at ``points``, ``(B, M, D)``, with the inner problems solved to ``tolerance``.

        ``potential`` are potentials to start from, ``(K, B, M)`` in units of epsilon, as of a transport at nearby points.
        """
        cost, pulled = self.geometry.opened(points, self.columns(points), self.own)
        found = sinkhorn.solve(*self.problems(cost), potential, tolerance)
        return Evaluation(points, pulled(signed(found.plan)), cost, found)

    def gradient(self, points: Tensor, solved: Evaluation) -> Tensor:
        """The gradient at ``points`` as a differentiable function of them and of every tensor of the energy.

        Args:
            points: ``(B, M, D)``, equal in value to ``solved.points``.
            solved: the tightly solved evaluation there; it supplies the values of the plans.
        """
        cost, pulled = self.geometry.opened(points, self.columns(points), self.own)
        return pulled(signed(DifferentiablePlan.apply(*self.problems(cost), solved.transport)))

    def value(self, here: Evaluation) -> Tensor:
        """What the flow descends, up to the part that does not depend on X, ``(B,)``."""
        losses = sinkhorn.value(*self.problems(here.cost), here.transport)
        return losses[0] - losses[1] / 2 if self.debias else losses[0]


def signed(plans: Tensor) -> Tensor:
    """``[P, -Q]``, ``(B, M, W)``: how much of each column pulls at a point, and how much of each point pushes."""
    return plans[0] - plans[1] if len(plans) == 2 else plans[0]


def make_energy(
    points: Tensor,
    nodes: Tensor,
    epsilon: float | Tensor,
    point_masses: Tensor | None = None,
    masses: Tensor | None = None,
    cost: str | CostFunction = "sqeuclidean",
    debias: bool = True,
) -> Energy:
    """The energy of clouds ``(B, M, D)`` and ``(B, N, D)``, with uniform masses unless they are given."""
    batch, num_points = points.shape[:2]
    if point_masses is None:
        point_masses = points.new_full((batch, num_points), 1.0 / num_points)
    if masses is None:
        masses = nodes.new_full(nodes.shape[:2], 1.0 / nodes.shape[1])
    geometry = costs.bind(costs.resolve(cost), points.dtype, points.device)
    epsilon = torch.as_tensor(epsilon, dtype=points.dtype, device=points.device).expand(batch)
    return Energy(geometry, nodes, masses, point_masses, epsilon, debias)


def sinkhorn_loss(
    points: Tensor,
    nodes: Tensor,
    epsilon: float | Tensor,
    point_masses: Tensor | None = None,
    masses: Tensor | None = None,
    cost: str | CostFunction = "sqeuclidean",
) -> Tensor:
    """L_eps between clouds ``(B, M, D)`` and ``(B, N, D)``, ``(B,)``; differentiable in everything, once.

    The derivative is the envelope's: ``dL = <P, dC> + <f, da> + <g, db> - H(P) d epsilon``, with the plan as it is.
    """
    energy = make_energy(points, nodes, epsilon, point_masses, masses, cost)
    matrix = energy.geometry.matrix(points, nodes)
    with torch.no_grad():
        a, b, eps = energy.point_masses, energy.masses, energy.epsilon
        solved = sinkhorn.solve(matrix, a, b, eps)
        value = sinkhorn.value(matrix, a, b, eps, solved)
        potential, dual = sinkhorn.potentials(matrix, b, eps, solved)
        entropy: Tensor = -torch.special.xlogy(solved.plan, solved.plan).sum((-1, -2))
    loss = (
        value
        + (solved.plan * (matrix - matrix.detach())).sum((-1, -2))
        + (potential * (energy.point_masses - a.detach())).nan_to_num(0.0).sum(-1)
        + (dual * (energy.masses - b.detach())).nan_to_num(0.0).sum(-1)
        - entropy * (energy.epsilon - eps.detach())
    )
    return once(loss, "A Sinkhorn loss")


def sinkhorn_divergence(
    points: Tensor,
    nodes: Tensor,
    epsilon: float | Tensor,
    point_masses: Tensor | None = None,
    masses: Tensor | None = None,
    cost: str | CostFunction = "sqeuclidean",
) -> Tensor:
    """S_eps between clouds ``(B, M, D)`` and ``(B, N, D)``, ``(B,)``: zero for equal clouds, never negative."""
    between = sinkhorn_loss(points, nodes, epsilon, point_masses, masses, cost)
    own_points = sinkhorn_loss(points, points, epsilon, point_masses, point_masses, cost)
    own_nodes = sinkhorn_loss(nodes, nodes, epsilon, masses, masses, cost)
    return between - (own_points + own_nodes) / 2
