"""
Between two sets of different sizes
===================================

Pooled from the same reference, a set of 70 points and one of 240 become two tables of 48 rows each, and a row means the same in
both. So sets can be averaged, interpolated and compared like vectors.
"""

import math

import matplotlib.pyplot as plt
import torch

from flowpool import flow_pool

generator = torch.Generator().manual_seed(0)
angle = 2 * math.pi * torch.rand(70, generator=generator)
ring = torch.stack([angle.cos(), angle.sin()], 1) + 0.04 * torch.randn(70, 2, generator=generator)
along, across = torch.rand(240, generator=generator) * 2 - 1, 0.22 * (torch.rand(240, generator=generator) - 0.5)
upright = torch.arange(240) < 120
cross = torch.stack([torch.where(upright, across, along), torch.where(upright, along, across)], 1)

nodes = torch.cat([ring, cross])
batch = torch.tensor([0] * 70 + [1] * 240)
pooled = flow_pool(nodes, batch, reference=torch.randn(48, 2, generator=generator), epsilon=0.03)
first, last = pooled.points  # (48, 2) each
print(pooled.converged.tolist(), pooled.divergence.tolist())

figure, panes = plt.subplots(2, 3, figsize=(8, 5.6), layout="constrained")
panes = panes.ravel()
colours = first[:, 1].atan2(first[:, 0])  # of each row, by where it is in the ring
for axes, cloud, size in ((panes[0], ring, 70), (panes[5], cross, 240)):
    axes.scatter(*cloud.T, s=8, color="grey")
    axes.set_title(f"{size} points")
for axes, time in zip(panes[1:5], torch.linspace(0, 1, 4), strict=True):
    axes.scatter(*((1 - time) * first + time * last).T, s=26, c=colours, cmap="twilight")
    axes.set_title("48 rows" if float(time) in (0.0, 1.0) else "")
for axes in panes:
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
    axes.set_axis_off()
