"""The paper, line by line: one cloud, Algorithm 1, the implicit gradient of section 8.2, the example of section 9.1.

Nothing here is relative and nothing is chosen for you: X^(0), epsilon, tau, L and lambda are absolute numbers. For anything
but a comparison with the paper use ``FlowPool``, which continues until the points are stationary.
"""

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from flowpool import algorithm_1, sinkhorn_divergence, wasserstein

torch.manual_seed(0)

# Section 4: a graph as a measure, b_j = 1 / N.
nodes = torch.randn(20, 2, dtype=torch.float64, requires_grad=True)  # Y

# Section 5: argmin_X S_eps(X, Y) with C(x, y) = |x - y|^2, from X^(0).
start = torch.randn(12, 2, dtype=torch.float64)  # X^(0)
settings = {"start": start, "epsilon": 0.1, "cost": "sqeuclidean", "debias": True}

# Section 6, Algorithm 1: while not converged, X <- update_step(X, grad_X S_eps, tau).
for update_step, tau in (("gradient", 2.0), ("momentum", 0.5), ("adam", 0.05)):
    pooled = algorithm_1(nodes, step_size=tau, max_steps=100, update_step=update_step, gradient="none", **settings)
    lost = sinkhorn_divergence(pooled.points, nodes.detach().unsqueeze(0), 0.1).item()
    distance = wasserstein(pooled.points[0], nodes.detach()).item()
    print(f"{update_step}: {pooled.steps.item()} steps, S_eps {lost:.4f}, W_2 {distance:.3f}")

# Section 8: v^T J, through the recorded steps (8.1), or from (A + lambda I) J = B by conjugate gradients (8.2).
cotangent = torch.randn(1, 12, 2, dtype=torch.float64)  # v
steps = {"step_size": 2.0, "max_steps": 300, "tolerance": 1e-7}
products = {}
for gradient, ridge in (("unrolled", None), ("implicit", 0.0), ("implicit", 1e-4), ("implicit", 1.0)):
    points = algorithm_1(nodes, gradient=gradient, ridge=ridge, **steps, **settings).points
    (products[gradient, ridge],) = torch.autograd.grad(points, nodes, cotangent)
    gap = (products[gradient, ridge] - products["unrolled", None]).norm() / products["unrolled", None].norm()
    print(f"{gradient}, lambda {ridge}: relative distance to the unrolled gradient {gap.item():.1e}")

# Section 9.1: Y is moved so that X(Y) lies on the unit circle, by Adam.
optimiser = torch.optim.Adam([nodes], lr=0.05)
clouds = []
for _ in range(15):
    optimiser.zero_grad()
    points = algorithm_1(nodes, step_size=3.0, max_steps=20, ridge=1e-4, **settings).points[0]
    loss = (points.square().sum(1) - 1).square().sum()
    clouds.append((nodes.detach().clone(), points.detach()))
    loss.backward()
    optimiser.step()
print(f"distance of X from the unit circle: {(points.detach().norm(dim=1) - 1).abs().mean().item():.3f}")

figure = Figure(figsize=(8, 4), layout="constrained")
shown = zip(figure.subplots(1, 2, sharex=True, sharey=True), (clouds[0], clouds[-1]), ("first", "last"), strict=True)
for axes, (before, pooled_points), name in shown:
    axes.add_patch(Circle((0, 0), 1, fill=False, color="grey"))
    axes.scatter(*before.T, s=30, color="#56b4e9", label="Y")
    axes.scatter(*pooled_points.T, s=70, color="#d55e00", edgecolor="black", label="X(Y)")
    axes.set(title=f"{name} step of Adam", aspect="equal")
axes.legend()
figure.savefig("unit_circle.png", dpi=110)
