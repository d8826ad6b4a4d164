"""
Which atoms matter: the plan of a molecule
==========================================

A molecule of MUTAG becomes five points in the space of its atoms' features. The transport plan says how much of each atom
went to each point: nitro group, chlorines, rings.
"""

import matplotlib.pyplot as plt
import networkx
import torch

from flowpool import flow_pool
from flowpool.lab.datasets import load_dataset

molecule = load_dataset("MUTAG")[53]
atoms = [("C", "N", "O", "F", "I", "Cl", "Br")[kind] for kind in molecule.x.argmax(1).tolist()]

# Atom types, averaged twice over the bonds.
count = len(atoms)
bonds = torch.eye(count)
bonds[molecule.edge_index[0], molecule.edge_index[1]] = 1.0
features = torch.linalg.matrix_power(bonds / bonds.sum(1, keepdim=True), 2) @ molecule.x.float()

pooled = flow_pool(features, reference=torch.randn(5, features.shape[1], generator=torch.Generator().manual_seed(1)))
plan = pooled.plan(0)  # (5, atoms), rows sum to 1/5
print(pooled.status, pooled.residual)

# %%
graph = networkx.Graph(molecule.edge_index.T.tolist())
layout = networkx.kamada_kawai_layout(graph)
places = [layout[node] for node in range(count)]
figure, axes = plt.subplots(figsize=(6, 5.2))
for one, other in graph.edges:
    axes.plot(*zip(places[one], places[other], strict=True), color="grey", lw=1.6, zorder=1)
for place, shares, atom in zip(places, plan.T.tolist(), atoms, strict=True):
    axes.pie(shares, center=place, radius=0.1, colors=plt.get_cmap("Set2").colors[:5], wedgeprops={"zorder": 2})
    axes.text(*place, atom, ha="center", va="center", fontsize=15, weight="bold", zorder=3)
axes.set_aspect("equal")
axes.set_xlim(min(x for x, _ in places) - 0.13, max(x for x, _ in places) + 0.13)
axes.set_ylim(min(y for _, y in places) - 0.13, max(y for _, y in places) + 0.13)
axes.set_axis_off()
