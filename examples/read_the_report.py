"""What happened to each graph: the report of a layer, and the full record behind it."""

import warnings

import torch
from matplotlib.figure import Figure

from flowpool import FlowPool, Status
from flowpool.lab.datasets import load_dataset

batch = load_dataset("MUTAG").batch(range(20))
sent = torch.zeros_like(batch.x).index_add(0, batch.edge_index[1], batch.x[batch.edge_index[0]])
x = batch.x + sent / 2  # node labels and half of the neighbours' ones

pool = FlowPool(in_channels=7, num_points=4)
z = pool(x, batch.batch)
print(f"usual:    {pool.report}")

# Trouble in one graph is reported for that graph; the others are as they were.
x_bad = x.clone()
x_bad[batch.batch == 3] = torch.nan
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    z_bad = pool(x_bad, batch.batch, dim_size=21)
print(f"trouble:  {pool.report}")
print(f"warning:  {caught[0].message}")
trouble = pool.report
others = [graph for graph in range(20) if graph != 3]
print(f"graphs that are not affected: {int((z_bad[others] == z[others]).all(1).sum())} of {len(others)}")
for status in (Status.NONFINITE_INPUT, Status.EMPTY):
    print(f"{status.name}: graphs {pool.report.graphs(status)}. {status.advice}")

# A training run that must not go on with such graphs raises instead.
strict = FlowPool(in_channels=7, num_points=4, max_steps=3, on_failure="raise")
try:
    strict(x, batch.batch)
except ArithmeticError as error:
    print(f"raised:   {error}")

# The full record: what pooling lost, and which nodes went to which point.
record = pool.pooled(x, batch.batch)
lost, graph = record.divergence.max(0)
plan = record.plan(int(graph))  # (4, nodes of the graph)
print(f"graph {int(graph)} lost most: S_eps = {lost:.4f}; its points take masses {plan.sum(1).tolist()}")

# One look at a batch: residual and status of each graph.
figure = Figure(figsize=(8, 3.4), layout="constrained")
axes = figure.subplots()
for status, colour in ((Status.OK, "#0072b2"), (Status.EMPTY, "#999999"), (Status.NONFINITE_INPUT, "#d55e00")):
    graphs = trouble.graphs(status)
    lengths = trouble.residual[graphs].nan_to_num(1.0).clamp_min(1e-12)
    axes.scatter(graphs, lengths, s=60, color=colour, label=status.name)
axes.axhline(1e-5, color="black", lw=0.8)
axes.set(yscale="log", xlabel="graph", ylabel="residual, in units of R", title="the line is the tolerance")
axes.set_xticks(range(21))
axes.legend(loc="upper right")
figure.savefig("report.png", dpi=110)
