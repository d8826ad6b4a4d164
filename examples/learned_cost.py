"""A cost of your own, with parameters that are learned through the pool.

Every cloud has two groups that differ in the first feature; the second feature is strong noise. Under the plain
squared Euclidean cost the noise pulls the two pooled points apart. The learned cost finds out by itself that the
second feature is useless.
"""

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from flowpool import FlowPool


class WeightedCost(nn.Module):
    """Squared differences, one positive weight per feature; any callable with these shapes is a cost."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.zeros(in_channels))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # (..., M, 1, D) and (..., 1, N, D) to (..., M, N)
        return ((x - y).square() * self.logarithm.exp()).sum(-1)


torch.manual_seed(0)
gap = 1 + torch.rand(16)  # (16,), what is to be read off the pooled points
side = torch.tensor([-0.5, 0.5]).repeat(6)  # (12,), group of each node
x = torch.stack([gap[:, None] * side, 1.5 * torch.randn(16, 12)], -1).flatten(0, 1)  # (16 * 12, 2)
batch = torch.arange(16).repeat_interleave(12)

pool = FlowPool(2, 2, cost=WeightedCost(2), tolerance=1e-3)
optimiser = torch.optim.Adam(pool.parameters(), lr=0.5)
history = []
for step in range(8):
    optimiser.zero_grad()
    points = pool(x, batch).view(16, 2, 2)
    found = (points[:, 0, 0] - points[:, 1, 0]).abs()
    loss = (found - gap).square().mean()
    loss.backward()
    optimiser.step()
    history.append(points.detach())
    weights = pool.cost.function.logarithm.exp()
    print(f"step {step}: error {loss.item():.3f}, weight of the noise {(weights[1] / weights[0]).item():.3f}")

figure = Figure(figsize=(8, 3.4), layout="constrained")
for axes, points, title in zip(figure.subplots(1, 2), (history[0], history[-1]), ("before", "after"), strict=True):
    axes.scatter(*x[:12].T, s=30, color="#56b4e9", label="nodes of cloud 0")
    axes.scatter(*points[0].T, s=110, color="#d55e00", edgecolor="black", label="its two points")
    axes.set(title=f"{title} training the cost", xlabel="the feature that matters", ylabel="noise")
    axes.set(xlim=(-1.2, 1.2))
axes.legend(loc="upper center")
figure.savefig("learned_cost.png", dpi=110)
