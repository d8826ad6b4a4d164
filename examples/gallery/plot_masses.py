"""
Masses pull the points
======================

Every node can have a mass that says how much it matters: a degree, a PageRank, the ink of a pixel, a learned attention. The
pooled points follow the mass, with exact gradients in it.
"""

import matplotlib.pyplot as plt
import torch

from flowpool import flow_pool

generator = torch.Generator().manual_seed(5)
nodes = 2 * torch.rand(160, 2, generator=generator) - 1
reference = torch.randn(9, 2, generator=generator)

weights = {
    "equal masses": torch.ones(160),
    "heavy to the right": (2.5 * nodes[:, 0]).exp(),
    "heavy near the centre": (-6 * nodes.square().sum(1)).exp(),
}
figure, panes = plt.subplots(1, 3, figsize=(10.5, 3.6), layout="constrained")
for axes, (name, masses) in zip(panes, weights.items(), strict=True):
    points = flow_pool(nodes, reference=reference, masses=masses).points[0]
    axes.scatter(*nodes.T, s=60 * masses / masses.mean(), color="tab:blue", alpha=0.35, lw=0)
    axes.scatter(*points.T, s=80, color="tab:red", edgecolor="black")
    axes.set_title(name)
    axes.set_aspect("equal")
    axes.set_axis_off()
