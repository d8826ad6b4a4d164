"""The view *Play*: a cloud in the plane, its pooled points, the way they took and the plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowpool import Pooled, Status, flow_pool, references, transport_pool
from flowpool.core.divergence import sinkhorn_divergence
from flowpool.core.sinkhorn import wasserstein
from flowpool.explore import fields

MOST_FRAMES = 12  # of a path; the steps of a longer flow are thinned out
EULER = (0.125, 0.125, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0)  # step sizes along the flow without debiasing


class Question(NamedTuple):
    """A cloud, and how it is to be pooled."""

    nodes: Tensor  # (N, 2)
    masses: Tensor  # (N,)
    reference: Tensor  # (M, 2), in units of R around the mean
    epsilon: float  # in units of R^2
    debias: bool

    @property
    def mean(self) -> Tensor:
        return self.masses @ self.nodes

    @property
    def radius(self) -> float:
        """R, the root of the sum of the variances."""
        return float((self.masses @ (self.nodes - self.mean).square().sum(1)).sqrt())

    def pool(self, max_steps: int = 1000) -> Pooled:
        return flow_pool(
            self.nodes,
            reference=self.reference,
            masses=self.masses,
            epsilon=self.epsilon,
            debias=self.debias,
            gradient="none",
            max_steps=max_steps,
            on_failure="ignore",  # the page shows the status
        )


def read(body: fields.Body) -> Question:
    nodes, masses = fields.cloud(body)
    num_points = fields.whole(body, "points", 1, fields.MOST_POINTS)
    reference = references.normal(2, num_points, seed=fields.whole(body, "seed", 0, fields.MOST_SEED)).double()
    epsilon = fields.number(body, "epsilon", *fields.EPSILON_RANGE)
    return Question(nodes, masses, reference, epsilon, fields.flag(body, "debias"))


def answer(body: fields.Body) -> dict[str, Any]:
    """The pooled points with everything that is drawn around them.

    With ``measured`` the frames of the path bring their own divergence and W_2, for the time of an animation.
    """
    fields.require(body, ("nodes", "points", "epsilon", "seed", "debias", "measured"))
    asked, measured = read(body), fields.flag(body, "measured")
    if len(asked.nodes) == 0:
        return _nothing(Status.EMPTY)
    pooled = asked.pool()
    points, status = pooled.points[0], Status(int(pooled.status[0]))
    if not bool(points.isfinite().all()):
        return _nothing(status)
    if asked.radius > 0:
        frames, numbers = path(asked, pooled)
    else:
        frames, numbers = points[None], [0]
    given = {
        "points": points.tolist(),
        "plan": pooled.plan(0).tolist(),
        "path": frames.tolist(),
        "path_steps": numbers,
        "divergence": fields.finite(_in_units(float(pooled.divergence[0]), asked.radius**2)),
        "lost": _in_units(float(wasserstein(points, asked.nodes, asked.masses)), asked.radius),
        "radius": asked.radius,
        "residual": fields.finite(float(pooled.residual[0])),
        "steps": int(pooled.steps[0]),
        "status": status.name,
        "advice": status.advice,
    }
    return given | (measure(asked, frames) if measured else {})


def path(asked: Question, pooled: Pooled) -> tuple[Tensor, list[int]]:
    """X^(0), places along the flow, and X*, ``(K, M, 2)``; and after how many steps each was reached.

    With debiasing these are the solver's own steps: the flow is asked to stop after one step, after two, and so on.
    Without it the flow is followed by Euler's method, whose velocity is the way to the barycentric map.
    """
    frames = [asked.mean + asked.radius * asked.reference]
    if asked.debias:
        last = int(pooled.steps[0])
        # Every step; or even ratios between their numbers, where there are more than are drawn.
        inner = range(1, last) if last <= MOST_FRAMES else np.unique(np.geomspace(1, last - 1, MOST_FRAMES - 1).round())
        numbers = [int(step) for step in inner]
        frames += [asked.pool(step).points[0] for step in numbers]
        numbers.append(last)
    else:
        level = asked.epsilon * asked.radius**2
        for size in EULER:
            image = transport_pool(
                asked.nodes, reference=frames[-1], epsilon=level, relative=False, masses=asked.masses
            ).points[0]
            frames.append(frames[-1] + size * (image - frames[-1]))
        numbers = list(range(1, len(EULER) + 2))
    return torch.stack([*frames, pooled.points[0]]), [0, *numbers]


def measure(asked: Question, frames: Tensor) -> dict[str, list[float | None]]:
    """S_eps / R^2 and W_2 / R of every frame ``(K, M, 2)``."""
    count, num_points = len(frames), frames.shape[1]
    divergence = sinkhorn_divergence(
        frames,
        asked.nodes.expand(count, -1, -1),
        asked.epsilon * asked.radius**2,
        frames.new_full((count, num_points), 1 / num_points),
        asked.masses.expand(count, -1),
    )
    lost = [_in_units(float(wasserstein(frame, asked.nodes, asked.masses)), asked.radius) for frame in frames]
    return {
        "path_divergence": [fields.finite(_in_units(value, asked.radius**2)) for value in divergence.tolist()],
        "path_lost": list(lost),
    }


def _nothing(status: Status) -> dict[str, Any]:
    """The answer where there are no points to draw."""
    empty: dict[str, Any] = dict.fromkeys(("divergence", "lost", "residual"))
    lists: dict[str, Any] = {name: [] for name in ("points", "plan", "path", "path_steps")}
    return lists | empty | {"radius": 0.0, "steps": 0, "status": status.name, "advice": status.advice}


def _in_units(value: float, unit: float) -> float:
    return value / unit if unit > 0 else 0.0
