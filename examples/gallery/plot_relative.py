"""
What relative means
===================

By default epsilon and the reference are in units of each set's own scale R. The same set, in other units, then gives the same
picture (above). With ``relative=False`` both are absolute numbers, as in the paper: what they do depends on the units of the
features (below).
"""

import matplotlib.pyplot as plt
import torch

from flowpool import flow_pool

generator = torch.Generator().manual_seed(3)
centres = torch.tensor([[-1.2, 0.0], [0.2, 1.0], [1.2, -0.6]])
nodes = torch.cat([centre + 0.35 * torch.randn(16, 2, generator=generator) for centre in centres])
reference = torch.randn(5, 2, generator=generator)
colours = plt.get_cmap("Dark2").colors[:5]

figure, panes = plt.subplots(2, 3, figsize=(9, 5.4), layout="constrained")
for row, relative in zip(panes, (True, False), strict=True):
    for axes, factor in zip(row, (0.1, 1.0, 10.0), strict=True):
        pooled = flow_pool(factor * nodes, reference=reference, relative=relative, epsilon=0.1, gradient="none")
        points, plan = pooled.points[0] / factor, pooled.plan(0)
        share = plan / plan.sum(0)  # (5, 48), of each node that goes to each point
        for i in range(5):
            for j in range(len(nodes)):
                ends = torch.stack([points[i], nodes[j]]).T
                axes.plot(*ends, color=colours[i], lw=1.2, alpha=0.6 * float(share[i, j]), zorder=1)
        axes.scatter(*nodes.T, s=12, color="white", edgecolor="grey", lw=0.7, zorder=2)
        axes.scatter(*points.T, s=90, color=colours, edgecolor="black", zorder=3)
        axes.set_title(f"relative={relative}, features times {factor:g}", fontsize=10)
        axes.set_aspect("equal")
        axes.set_axis_off()
