"""
What epsilon does
=================

Epsilon is the blur of the transport, in units of each set's own variance. A small one gives every node to one point, a large one
shares every node among all. The divergence is debiased, so the points change less with epsilon than the plan does.
"""

import matplotlib.pyplot as plt
import torch

from flowpool import flow_pool

generator = torch.Generator().manual_seed(3)
centres = torch.tensor([[-1.2, 0.0], [0.2, 1.0], [1.2, -0.6]])
nodes = torch.cat([centre + 0.35 * torch.randn(22, 2, generator=generator) for centre in centres])
reference = torch.randn(5, 2, generator=generator)
colours = plt.get_cmap("Dark2").colors[:5]

figure, panes = plt.subplots(2, 2, figsize=(7, 6), layout="constrained")
for axes, epsilon in zip(panes.flat, (0.01, 0.1, 0.5, 2.0), strict=True):
    pooled = flow_pool(nodes, reference=reference, epsilon=epsilon)
    points, plan = pooled.points[0], pooled.plan(0)
    share = plan / plan.sum(0)  # (5, 66), of each node that goes to each point
    for i in range(5):
        for j in range(len(nodes)):
            axes.plot(
                *torch.stack([points[i], nodes[j]]).T,
                color=colours[i],
                lw=1.2,
                alpha=0.6 * float(share[i, j]),
                zorder=1,
            )
    axes.scatter(*nodes.T, s=14, color="white", edgecolor="grey", lw=0.7, zorder=2)
    axes.scatter(*points.T, s=110, color=colours, edgecolor="black", zorder=3)
    axes.set_title(f"epsilon {epsilon:g}: {int(pooled.steps)} steps")
    axes.set_aspect("equal")
    axes.set_axis_off()
