"""
The flow, step by step
======================

Eight points start away from a cloud and follow the gradient of the Sinkhorn divergence until they represent it. Each call
below is one step of Algorithm 1, from where the last one ended.
"""

import math

import matplotlib.pyplot as plt
import torch

from flowpool import flow_pool

generator = torch.Generator().manual_seed(0)
angle = torch.linspace(-0.2, 1.2, 60) * math.pi
arc = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(60, 2, generator=generator)
blob = torch.tensor([0.0, -0.9]) + 0.12 * torch.randn(25, 2, generator=generator)
nodes = torch.cat([arc, blob])
start = torch.tensor([2.0, 1.6]) + 0.35 * torch.randn(8, 2, generator=generator)

path = [start]
for _ in range(120):
    step = flow_pool(
        nodes, reference=path[-1], relative=False, epsilon=0.1, gradient="unrolled", step_size=0.1, max_steps=1
    )
    path.append(step.points[0].detach())
path = torch.stack(path)  # (121, 8, 2)

# %%
# ``flow_pool`` takes longer steps where it can and ends at the same points, with a residual that says how exactly.
pooled = flow_pool(nodes, reference=start, relative=False, epsilon=0.1)
print(f"{int(pooled.steps)} steps, residual {float(pooled.residual):.0e}, lost {float(pooled.divergence):.3f}")

figure, axes = plt.subplots(figsize=(6.4, 4.8))
axes.scatter(*nodes.T, s=18, color="tab:blue", alpha=0.5, label="nodes")
for line in path.unbind(1):
    axes.plot(*line.T, color="tab:orange", lw=1.4, zorder=1)
axes.scatter(*start.T, marker="x", s=45, color="black", label="start")
axes.scatter(*pooled.points[0].T, s=90, color="tab:red", edgecolor="black", zorder=3, label="pooled points")
axes.set_aspect("equal")
axes.legend(loc="lower right")
axes.set_axis_off()
