"""
A smaller graph
===============

``FlowCoarsen`` keeps the edges, too: its points become the nodes of a smaller graph, joined as strongly as the nodes that they
represent.
"""

import matplotlib.pyplot as plt
import networkx
import torch

from flowpool import FlowCoarsen

graph = networkx.random_geometric_graph(90, 0.2, seed=4)
graph = graph.subgraph(max(networkx.connected_components(graph), key=len))
graph = networkx.convert_node_labels_to_integers(graph)
x = torch.tensor([graph.nodes[node]["pos"] for node in graph])  # the features are the places, to have a picture
edge_index = torch.tensor(list(graph.to_directed().edges)).T

coarse = FlowCoarsen(in_channels=2, num_points=10, epsilon=0.03)(x, edge_index)
points, edges, weights = coarse.x.detach(), coarse.edge_index, coarse.edge_weight.detach()
print(f"{len(x)} nodes and {graph.number_of_edges()} edges -> {len(points)} points")

figure, panes = plt.subplots(1, 2, figsize=(9.5, 4.4), layout="constrained")
networkx.draw_networkx_edges(graph, x.numpy(), ax=panes[0], edge_color="grey", width=0.8)
panes[0].scatter(*x.T, s=26, color="tab:blue", zorder=2)
for (one, other), weight in zip(edges.T.tolist(), (weights / weights.max()).tolist(), strict=True):
    if one != other:
        panes[1].plot(
            *points[[one, other]].T, color="grey", lw=14 * weight, alpha=0.6, solid_capstyle="round", zorder=1
        )
panes[1].scatter(*points.T, s=240, color="tab:red", edgecolor="black", zorder=2)
for axes, title in zip(panes, ("before", "after"), strict=True):
    axes.set(title=title, xlim=(-0.05, 1.05), ylim=(-0.05, 1.05), aspect="equal")
    axes.set_axis_off()
