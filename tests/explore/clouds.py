"""Questions to the views, for clouds in the plane."""

from __future__ import annotations

from typing import Any

import torch


def crescent(count: int = 12, seed: int = 0) -> list[list[float]]:
    """Nodes along a bent line, with masses that differ."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.linspace(0, 4, count, dtype=torch.float64)
    noise = 0.1 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    places = torch.stack([angle.cos(), angle.sin()], 1) + noise
    masses = 0.5 + torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.cat([places, masses[:, None]], 1).tolist()


def question(nodes: list[list[float]], **changes: Any) -> dict[str, Any]:
    return {"nodes": nodes, "points": 4, "epsilon": 0.1, "seed": 1, "debias": True, "measured": False} | changes
