"""
What the status says
====================

Four graphs and their statuses. Each graph has its own: the one with a NaN does not affect the others.
"""

import matplotlib.pyplot as plt
import torch

from flowpool import Status, flow_pool

generator = torch.Generator().manual_seed(1)
usual = torch.randn(24, 2, generator=generator)
pair = torch.tensor([[-1.0, -0.5], [1.0, 0.5]])
broken = usual.clone()
broken[5, 1] = torch.nan
reference = torch.randn(5, 2, generator=generator)

graphs = {"24 nodes": usual, "2 nodes for 5 points": pair, "a NaN among 24 nodes": broken}
batch = torch.arange(3).repeat_interleave(torch.tensor([len(graph) for graph in graphs.values()]))
together = flow_pool(torch.cat(list(graphs.values())), batch, reference=reference, gradient="none", on_failure="ignore")
stopped = flow_pool(usual, reference=reference, gradient="none", max_steps=3, on_failure="ignore")

shown = [(name, nodes, together.points[i], together.status[i]) for i, (name, nodes) in enumerate(graphs.items())]
shown.append(("24 nodes, max_steps=3", usual, stopped.points[0], stopped.status[0]))
figure, panes = plt.subplots(2, 2, figsize=(7, 7.4), layout="constrained")
for axes, (name, nodes, points, status) in zip(panes.flat, shown, strict=True):
    axes.scatter(*nodes.T, s=22, color="#56b4e9")
    axes.scatter(*points.T, s=90, color="#d55e00", edgecolor="black", alpha=0.6, zorder=3)
    axes.set_title(f"{name}\n{Status(int(status)).name}", fontsize=11)
    axes.set(xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), aspect="equal", xticks=[], yticks=[])
