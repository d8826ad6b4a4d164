"""Point clouds of any size as vectors of one length, without any graph and without PyTorch Geometric.

Rings and discs are drawn with 20 to 60 points each, somewhere in the plane. With four pooled points per cloud the
nearest neighbour of a ring is a ring, and each pooled point can say which points of its cloud it represents.
"""

import math

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flowpool import flow_pool, references


def draw(kind: str, size: int) -> Tensor:
    """Points of a ring or of a disc, ``(size, 2)``, around a random centre."""
    angle = 2 * math.pi * torch.rand(size)
    radius = torch.ones(size) if kind == "ring" else torch.rand(size).sqrt()
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    return radius[:, None] * circle + 10 * torch.randn(2)


torch.manual_seed(0)
kinds = ["ring", "disc"] * 8
clouds = [draw(kind, int(torch.randint(20, 61, ()))) for kind in kinds]
batch = torch.arange(len(clouds)).repeat_interleave(torch.tensor([len(cloud) for cloud in clouds]))

pooled = flow_pool(torch.cat(clouds), batch, reference=references.normal(2, 4))
centred = pooled.points - pooled.points.mean(1, keepdim=True)  # (16, 4, 2), where a cloud is says nothing here

radius = centred.norm(dim=-1).mean(1)  # (16,)
distance = (radius[:, None] - radius).abs().fill_diagonal_(math.inf)
nearest = [kinds[i] for i in distance.argmin(1).tolist()]
agree = sum(mine == other for mine, other in zip(kinds, nearest, strict=True))
print(f"{len(clouds)} clouds of {min(map(len, clouds))} to {max(map(len, clouds))} points -> {tuple(centred.shape)}")
for kind in ("ring", "disc"):
    print(f"mean radius of the pooled points of a {kind}: {radius[[k == kind for k in kinds]].mean():.2f}")
print(f"nearest neighbour of the same kind: {agree} of {len(clouds)}")

plan = pooled.plan(0)  # (4, points of cloud 0)
owner = plan.argmax(0)
print(f"cloud 0: points taken over by each pooled point: {torch.bincount(owner, minlength=4).tolist()}")
print(f"cloud 0: what pooling lost, S_eps = {pooled.divergence[0]:.4f}")

figure = Figure(figsize=(8, 4.2), layout="constrained")
for graph, axes in enumerate(figure.subplots(2, 4).T.flat):
    axes.scatter(*clouds[graph].T, s=18, c=pooled.plan(graph).argmax(0), cmap="Set2", vmin=0, vmax=7)
    axes.scatter(*pooled.points[graph].T, s=90, c=range(4), cmap="Set2", vmin=0, vmax=7, edgecolor="black")
    axes.set(title=f"{kinds[graph]} of {len(clouds[graph])} points", aspect="equal")
    axes.set_axis_off()
figure.savefig("point_clouds.png", dpi=110)
