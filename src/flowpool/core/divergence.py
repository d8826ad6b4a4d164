r"""The Sinkhorn divergence and its gradient in X (sections 3.3 and 7.1 of the paper, eqs. 11 and 19).

.. math::
    S_\varepsilon(X, Y) = L^\varepsilon_{C(X,Y)}(a, b) - \tfrac12 L^\varepsilon_{C(X,X)}(a, a)
                        - \tfrac12 L^\varepsilon_{C(Y,Y)}(b, b)

    \nabla_X S_\varepsilon = [\partial_X C(X, Y)]^\top P - \tfrac12 [\partial_X C(X, X)]^\top Q

Both plans are optimal, so by the envelope theorem their own dependence on X drops out of the first derivative. It does
not drop out of the second, which is why P and Q are differentiable here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flowpool import costs
from flowpool.core import sinkhorn
from flowpool.core.constants import FURTHER
from flowpool.core.directions import Directions, leading_directions
from flowpool.core.once import once
from flowpool.core.records import lazy, take
from flowpool.core.sinkhorn import DifferentiablePlan, DifferentiableSelfPlan, SelfTransport, Transport
from flowpool.costs import CostFunction, Geometry


class Evaluation(NamedTuple):
    """Gradient of the energy at some points, with the transports behind it."""

    points: Tensor  # (B, M, D)
    gradient: Tensor  # (B, M, D)
    cost: Tensor  # (B, M, N)
    xy: Transport
    xx: SelfTransport | None  # None when the energy is not debiased

    @property
    def error(self) -> Tensor:
        """The larger of the two marginal errors, ``(B,)``."""
        return self.xy.error if self.xx is None else torch.maximum(self.xy.error, self.xx.error)

    @property
    def self_potential(self) -> Tensor:
        """h, ``(B, M)``; zeros when the energy is not debiased."""
        return torch.zeros_like(self.xy.potential) if self.xx is None else self.xx.potential


class Scales(NamedTuple):
    """What makes the numbers of a cloud free of units."""

    centre: Tensor  # (B, 1, D), mean of the nodes
    radius: Tensor  # (B,), R: root of the sum of their variances
    stiffness: Tensor  # (B, M), typical curvature of the energy at a point: 2 a_i for the squared Euclidean cost
    pull: Tensor  # (B,), gradient that counts as one: R for the squared Euclidean cost


class Drift(NamedTuple):
    """What the potentials did at the last move of the points, f beyond what :meth:`Energy.carried` expects of it."""

    moved: Tensor  # (B, M, D)
    potential: Tensor  # (B, M)
    self_potential: Tensor  # (B, M)

    def share(self, moved: Tensor) -> Tensor:
        """How far another move goes along this one, in units of it, ``(B, 1)``."""
        along = (self.moved * moved).sum((-1, -2)) / self.moved.square().sum((-1, -2))
        return along.clamp(-FURTHER, FURTHER).nan_to_num(0.0).unsqueeze(-1)


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
        resolution: relative precision that the nodes were given in; finer differences are rounding.
        features: how many of the D features are no padding; ``None``: all.
    """

    geometry: Geometry
    nodes: Tensor
    masses: Tensor
    point_masses: Tensor
    epsilon: Tensor
    debias: bool = True
    resolution: float = torch.finfo(torch.float64).eps
    features: int | None = None

    def select(self, index: Tensor) -> Energy:
        """The energies of some of the clouds."""
        part = replace(
            self,
            nodes=self.nodes[index],
            masses=self.masses[index],
            point_masses=self.point_masses[index],
            epsilon=self.epsilon[index],
        )
        for name in ("scales", "leading", "coordinates"):  # what is known of all is known of some
            if name in self.__dict__:
                part.__dict__[name] = take(self.__dict__[name], index)
        return part

    @lazy
    @torch.no_grad()
    def scales(self) -> Scales:
        """Centre, radius and stiffness of each cloud."""
        weights = self.masses.unsqueeze(-1)
        centre = (weights * self.nodes).sum(-2, keepdim=True)
        variance = (weights * (self.nodes - centre).square()).sum((-1, -2))
        cost = variance
        if not self.geometry.is_squared_euclidean:
            cost = (self.masses * self.geometry.matrix(centre, self.nodes).squeeze(-2)).sum(-1)
        radius, stiffness = variance.sqrt(), 2 * self.point_masses * (cost / variance)[:, None]
        return Scales(centre, radius, stiffness, radius * stiffness.sum(-1) / 2)

    @lazy
    def leading(self) -> Directions:
        """Directions in which the nodes vary most."""
        centred, num_points = self.nodes - self.scales.centre, self.point_masses.shape[1]
        return leading_directions(centred, self.masses, self.epsilon, num_points, self.resolution, self.features)

    @lazy
    def coordinates(self) -> Tensor:
        """Those of the nodes along the leading directions, ``(B, K, N)``."""
        return torch.bmm(self.leading.basis, self.nodes.mT)

    @torch.no_grad()
    def evaluate(
        self,
        points: Tensor,
        warm: Evaluation | None = None,
        tolerance: Tensor | float = 1e-12,
        drift: Drift | None = None,
    ) -> Evaluation:
        """The gradient at ``points``, ``(B, M, D)``, with the inner problems solved to ``tolerance``.

        ``warm`` is an evaluation at nearby points. Its potential is carried along, and what the last move has shown beyond
        that is added, in proportion to how far this one goes along it.
        """
        opened = self.geometry.opened(points, self.nodes)
        if warm is None:
            return self._evaluate(points, opened, None, None, tolerance)
        potential, self_potential = self.carried(warm, opened[0]), warm.self_potential
        if drift is not None:
            share = drift.share(points - warm.points)
            potential = torch.addcmul(potential, share, drift.potential)
            self_potential = torch.addcmul(self_potential, share, drift.self_potential)
        return self._evaluate(points, opened, potential, self_potential, tolerance)

    def carried(self, warm: Evaluation, cost: Tensor) -> Tensor:
        """f of nearby points for another cost, ``f_i += sum_j P_ij (C_ij(new) - C_ij(old)) / a_i``, ``(B, M)``.

        A point that moves by 4 R in one step would otherwise leave its potential 30 epsilon behind.
        """
        return warm.xy.potential + (warm.xy.plan * (cost - warm.cost)).sum(-1) / self.point_masses

    def drift(self, before: Evaluation, after: Evaluation) -> Drift:
        """What the potentials did between two evaluations; nothing where the second failed."""
        beyond = after.xy.potential - self.carried(before, after.cost)
        own = after.self_potential - before.self_potential
        return Drift(after.points - before.points, *(value.nan_to_num(0.0, 0.0, 0.0) for value in (beyond, own)))

    @torch.no_grad()
    def evaluate_from(
        self,
        points: Tensor,
        potential: Tensor,
        self_potential: Tensor | None,
        tolerance: Tensor | float = 1e-12,
    ) -> Evaluation:
        """The gradient at ``points`` with the inner problems started from given potentials ``(B, M)``."""
        return self._evaluate(points, self.geometry.opened(points, self.nodes), potential, self_potential, tolerance)

    def _evaluate(
        self,
        points: Tensor,
        opened: tuple[Tensor, Callable[[Tensor], Tensor]],
        potential: Tensor | None,
        self_potential: Tensor | None,
        tolerance: Tensor | float,
    ) -> Evaluation:
        cost, pulled = opened
        self_cost, self_pulled = self.geometry.opened(points) if self.debias else (None, None)
        xy, xx = sinkhorn.solve_both(
            cost, self_cost, self.point_masses, self.masses, self.epsilon, potential, self_potential, tolerance
        )
        gradient = pulled(xy.plan)
        if xx is not None and self_pulled is not None:
            gradient = gradient - self_pulled(xx.plan)
        return Evaluation(points, gradient, cost, xy, xx)

    def gradient(self, points: Tensor, solved: Evaluation) -> Tensor:
        """The gradient at ``points`` as a differentiable function of them and of every tensor of the energy.

        Args:
            points: ``(B, M, D)``, equal in value to ``solved.points``.
            solved: the tightly solved evaluation there; it supplies the values of the plans.
        """
        cost, pulled = self.geometry.opened(points, self.nodes)
        plan = DifferentiablePlan.apply(cost, self.point_masses, self.masses, self.epsilon, solved.xy)
        gradient = pulled(plan)
        if solved.xx is not None:
            cost, pulled = self.geometry.opened(points)
            gradient = gradient - pulled(DifferentiableSelfPlan.apply(cost, self.point_masses, self.epsilon, solved.xx))
        return gradient

    def value(self, points: Tensor, solved: Evaluation) -> Tensor:
        """What the flow descends, up to the part that does not depend on X, ``(B,)``."""
        loss = solved.xy.value(solved.cost, self.point_masses, self.masses, self.epsilon)
        return loss if solved.xx is None else loss - solved.xx.value(self.point_masses) / 2


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
        value = solved.value(matrix, a, b, eps)
        dual = torch.where(b > 0, solved.dual_potential(matrix, b, eps), 0.0)
        entropy: Tensor = -torch.special.xlogy(solved.plan, solved.plan).sum((-1, -2))
    loss = (
        value
        + (solved.plan * (matrix - matrix.detach())).sum((-1, -2))
        + (solved.potential * (energy.point_masses - a.detach())).sum(-1)
        + (dual * (energy.masses - b.detach())).sum(-1)
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
