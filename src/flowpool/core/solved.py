"""What is computed from pooled points once somebody asks: the coupling with the nodes, and what pooling has lost."""

from __future__ import annotations

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
        potential: of the transports to the nodes and to the points, ``(B, K, M)``, in units of epsilon.
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
        return self._evaluated(torch.tensor([graph]), False)[1].plan[0, :, as_given]

    def divergence(self) -> Tensor:
        """S_eps(X*, Y), ``(B,)``; zero for graphs that are one point, or empty."""
        result = torch.zeros_like(self.epsilon)
        for graphs in self.clouds.groups(
            self.solvable.nonzero().squeeze(-1), self.points.shape[1] * self.points.shape[2]
        ):
            energy, here = self._evaluated(graphs, True)
            cost = energy.geometry.matrix(energy.nodes, energy.nodes)
            given = (cost, energy.masses, energy.masses, energy.epsilon)
            nodes = sinkhorn.value(*given, sinkhorn.solve(*given))
            result[graphs] = (energy.value(here) - nodes / 2) * self.cost_unit[graphs]
        return result

    def at_end(self, graph: int) -> tuple[Energy, Evaluation] | None:
        """What one graph descended, and its gradient at X*; ``None`` if it needed no flow."""
        return self._evaluated(torch.tensor([graph]), self.debias) if bool(self.solvable[graph]) else None

    def _evaluated(self, graphs: Tensor, debias: bool) -> tuple[Energy, Evaluation]:
        """Some graphs, ``(K,)``, at X*."""
        graphs = graphs.to(self.epsilon.device)
        nodes, masses = self.clouds.padded(graphs)
        shares = self.point_masses.expand(len(graphs), -1)
        energy = Energy(self.geometry, nodes, masses, shares, self.epsilon[graphs], debias)
        known = self.potential[graphs].transpose(0, 1)[: 1 + debias]
        return energy, energy.evaluate(self.points[graphs], known if len(known) == 1 + debias else None)
