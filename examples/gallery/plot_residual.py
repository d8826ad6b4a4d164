"""
What the residual says
======================

The flow is stopped after one step, after two, and so on. The residual is the length of the Newton step that is left. Over the last
steps it is the true distance to the pooled points, while the gradient is hundreds of times smaller: epsilon is large here, and the
divergence is flat.
"""

import matplotlib.pyplot as plt
import torch

from flowpool import flow_pool, sinkhorn_divergence

EPSILON = 3.0
generator = torch.Generator().manual_seed(0)
nodes = torch.randn(30, 2, generator=generator, dtype=torch.float64)
reference = torch.randn(6, 2, generator=generator, dtype=torch.float64)
radius = nodes.var(0, correction=0).sum().sqrt()  # R
options = {"reference": reference, "epsilon": EPSILON, "gradient": "none", "on_failure": "ignore"}

end = flow_pool(nodes, tolerance=1e-12, **options)
steps = list(range(1, int(flow_pool(nodes, **options).steps) + 1))
residuals, distances, gradients = [], [], []
for count in steps:
    stopped = flow_pool(nodes, max_steps=count, **options)
    residuals.append(float(stopped.residual))
    distances.append(float((stopped.points - end.points).norm() / radius))
    points = stopped.points.clone().requires_grad_()
    loss = sinkhorn_divergence(points, nodes[None], EPSILON * radius**2).sum()
    (slope,) = torch.autograd.grad(loss, points)
    gradients.append(float(slope.norm() / radius))

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
axes.semilogy(steps, distances, color="#0072b2", lw=6, alpha=0.35, label="true distance to the pooled points")
axes.semilogy(steps, residuals, color="#d55e00", marker="o", ms=4, label="residual")
axes.semilogy(steps, gradients, color="grey", ls="--", label="length of the gradient")
axes.axhline(1e-5, color="black", lw=0.8)
axes.annotate("tolerance: MAX_STEPS above, OK below", (steps[0], 1.5e-5), fontsize=9)
axes.set_ylim(1e-8, 30)
axes.set_xlabel("the flow is stopped after so many steps")
axes.set_ylabel("in units of R")
axes.legend(loc="lower left", frameon=False)
