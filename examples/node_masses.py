"""Node masses: how much of the graph each node accounts for."""

import torch
from matplotlib.figure import Figure

from flowpool import FlowPool

torch.manual_seed(0)
pool = FlowPool(in_channels=2, num_points=3)
x = torch.randn(6, 2)

# A mass of two is the same as having the node twice, a mass of zero as not having it.
masses = torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0, 0.0])
repeated = x[[0, 0, 1, 2, 3, 4]]
print(f"weighted and repeated nodes differ by {(pool(x, masses=masses) - pool(repeated)).abs().max():.0e}")

# Only ratios count inside a graph ...
print(
    f"masses times 100 change the points by {(pool(x, masses=100 * masses) - pool(x, masses=masses)).abs().max():.0e}"
)

# ... and the total is handed over on demand: as one more column, or as a factor.
append = FlowPool(in_channels=2, num_points=3, size="append")
print(f"appended: {append(x, masses=masses)[0, -1]:g} with masses, {append(x)[0, -1]:g} nodes without")

# Masses can be learnt: here attention moves the mean of the pooled points to a target.
target = x[4] / 2
score = torch.zeros(6, requires_grad=True)
optimiser = torch.optim.Adam([score], lr=0.3)
for step in range(15):
    optimiser.zero_grad()
    points = pool(x, masses=score.exp()).view(3, 2)
    loss = (points.mean(0) - target).square().sum()
    loss.backward()
    optimiser.step()
    if step == 0:
        before = points.detach()
        print(f"loss before training {loss.item():.4f}")
print(f"loss after training  {loss.item():.4f}")

figure = Figure(figsize=(8, 3.6), layout="constrained")
shown = ((before, torch.ones(6), "equal masses"), (points.detach(), score.detach().exp(), "masses that were learnt"))
for axes, (where, weights, title) in zip(figure.subplots(1, 2, sharex=True, sharey=True), shown, strict=True):
    axes.scatter(*x.T, s=600 * weights / weights.sum(), color="#56b4e9", label="nodes, as large as their mass")
    axes.scatter(*where.T, s=90, color="#d55e00", edgecolor="black", label="pooled points")
    axes.scatter(*where.mean(0), marker="+", s=160, color="black", label="their mean")
    axes.scatter(*target, marker="*", s=160, color="#009e73", label="target")
    axes.set_title(title)
axes.legend(fontsize=8)
figure.savefig("node_masses.png", dpi=110)
