"""What is computed from pooled points once somebody asks: the coupling with the nodes, and what pooling has lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flowpool.core import sinkhorn
from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.measures import Clouds
from flowpool.costs import Geometry


@dataclass(frozen=True)
class Solved:
    """B graphs in their frames, with the points that they were pooled to.

    Attributes:
        clouds: the graphs.
        order: which node of the caller stands at each place, ``(N,)``.
        geometry: the cost in the frames.
        point_masses: a, ``(M,)``.
        epsilon: in the frames, ``(B,)``.
        debias: whether the points descended S_eps, or L_eps alone.
        cost_unit: how much the frame's unit of cost is outside, ``(B,)``.
        solvable: graphs that needed the flow, ``(B,)`` bool; all others are one point, empty, or not finite.
        points: X*, ``(B, M, D)``.
        potential: f, ``(B, M)``.
    """

    clouds: Clouds
    order: Tensor
    geometry: Geometry
    point_masses: Tensor
    epsilon: Tensor
    debias: bool
    cost_unit: Tensor
    solvable: Tensor
    points: Tensor
    potential: Tensor

    def plan(self, graph: int) -> Tensor:
        """The optimal coupling of one graph, ``(M, N_g)``, its nodes in the caller's order."""
        rows = slice(int(self.clouds.ptr[graph]), int(self.clouds.ptr[graph + 1]))
        as_given = self.order[rows].argsort()
        if not bool(self.solvable[graph]):  # one distinct node, or none: every point takes its share of everything
            return self.point_masses[:, None] * self.clouds.masses[rows][as_given]
        one = slice(graph, graph + 1)
        cost = self.geometry.matrix(self.points[one], self.clouds.nodes[rows].unsqueeze(0))
        masses = self.clouds.masses[rows].unsqueeze(0)
        solved = sinkhorn.solve(cost, self.point_masses[None], masses, self.epsilon[one], self.potential[one])
        return solved.plan[0, :, as_given]

    def divergence(self) -> Tensor:
        """S_eps(X*, Y), ``(B,)``; zero for graphs that are one point, or empty."""
        result = torch.zeros_like(self.epsilon)
        for graphs, energy in self._energies(self.solvable.nonzero().squeeze(-1), debias=True):
            here = energy.evaluate_from(self.points[graphs], self.potential[graphs], None)
            own = energy.geometry.matrix(energy.nodes, energy.nodes)
            nodes = sinkhorn.solve_self(own, energy.masses, energy.epsilon).value(energy.masses)
            result[graphs] = (energy.value(here.points, here) - nodes / 2) * self.cost_unit[graphs]
        return result

    def at_end(self, graph: int) -> tuple[Energy, Evaluation] | None:
        """What one graph descended, and its gradient at X*; ``None`` if it needed no flow."""
        if not bool(self.solvable[graph]):
            return None
        ((graphs, energy),) = self._energies(torch.tensor([graph], device=self.epsilon.device), self.debias)
        return energy, energy.evaluate_from(self.points[graphs], self.potential[graphs], None)

    def _energies(self, graphs: Tensor, debias: bool) -> Iterator[tuple[Tensor, Energy]]:
        """Some graphs, ``(K,)``, as padded energies."""
        num_points, dim = self.points.shape[1:]
        for chosen in self.clouds.groups(graphs, num_points * dim):
            nodes, masses, _ = self.clouds.padded(chosen)
            shares = self.point_masses.expand(len(chosen), num_points)
            yield chosen, Energy(self.geometry, nodes, masses, shares, self.epsilon[chosen], debias)
