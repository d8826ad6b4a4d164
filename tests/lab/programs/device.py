"""What ``flowpool bench --device`` counts, and what a stand-in for an accelerator has seen; prints lines of JSON."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "engines" / "programs"))
import elsewhere

from flowpool.lab.speed.cases import Case
from flowpool.lab.speed.device import layers_of, measure

OURS = ("FlowReadout", "FlowPool")

sizes = torch.randint(5, 30, (32,), generator=torch.Generator().manual_seed(0))
nodes = torch.randn(int(sizes.sum()), 8, generator=torch.Generator().manual_seed(1))
case = Case("random", nodes, torch.arange(32).repeat_interleave(sizes), 32, 5)
layers = {name: layer for name, layer in layers_of(case, elsewhere.THERE).items() if name in OURS}
rows = list(measure(case, elsewhere.THERE, layers, rounds=1))
for name, layer in layers.items():
    forward, backward = [row for row in rows if row.method == name]
    there, batch = case.nodes.to(elsewhere.THERE).requires_grad_(), case.batch.to(elsewhere.THERE)
    elsewhere.happened.clear()
    out = layer(there, batch, dim_size=32)
    print(json.dumps({"seen": elsewhere._crossings(), "counted": asdict(forward)}), flush=True)
    seed = torch.ones_like(out)
    elsewhere.happened.clear()
    out.backward(seed)
    print(json.dumps({"seen": elsewhere._crossings(), "counted": asdict(backward)}), flush=True)
