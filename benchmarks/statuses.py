"""What becomes of real graphs: statuses, steps and time, over datasets, widths, numbers of points and epsilons.

    python benchmarks/statuses.py [--data DIR] [--datasets MUTAG,ENZYMES] [--count 100] [--engine compiled]

Features are those of a random two-layer GIN, one per setting. ``neither`` is the share of graphs that are neither OK nor
SINGULAR, ``slow`` the share that took more than 100 steps, with their share of all steps.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch

from flowpool import Status, flow_pool, references
from flowpool.lab.datasets import load_dataset
from flowpool.lab.speed.cases import random_gin

DATASETS = "MUTAG,PTC_MR,ENZYMES,IMDB-BINARY,PROTEINS"
SETTINGS = [(16, 3), (16, 8), (16, 16), (32, 5), (32, 8), (64, 8), (64, 16)]  # d, M


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--datasets", default=DATASETS)
    parser.add_argument("--epsilons", default="0.03,0.1,0.3,1,3")
    parser.add_argument("--count", type=int, default=100, help="graphs of each dataset")
    parser.add_argument("--engine", default="compiled")
    parser.add_argument("--backward", action="store_true", help="the gradient, too")
    options = parser.parse_args()
    for level in map(float, options.epsilons.split(",")):
        for name in options.datasets.split(","):
            dataset = load_dataset(name, options.data, download=False)
            order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
            found: Counter[str] = Counter()
            steps, bad, damped, began = [], [], 0, time.process_time()
            for seed, (width, num_points) in enumerate(SETTINGS):
                batch = dataset.batch(order[: options.count])
                nodes = random_gin(batch, width, torch.Generator().manual_seed(seed))
                nodes = nodes.detach().requires_grad_(options.backward)
                reference = references.normal(width, num_points, seed)
                pooled = flow_pool(nodes, batch.batch, reference=reference, epsilon=level, engine=options.engine)
                if options.backward:
                    pooled.points.square().sum().backward()
                    assert nodes.grad is not None and bool(nodes.grad.isfinite().all())  # noqa: S101
                    damped += int(pooled.backward.damped.sum())
                found.update(Status(code).name for code in pooled.status.tolist())
                steps += pooled.steps.tolist()
                bad += [f"d{width}M{num_points}#{order[g]}" for g in (~pooled.converged).nonzero().flatten().tolist()]
            spent = time.process_time() - began
            total, slow = sum(found.values()), [count for count in steps if count > 100]
            print(
                f"epsilon {level:g} {name}: {total} graphs, neither {len(bad) / total:.2%}, SINGULAR "
                f"{found['SINGULAR'] / total:.1%}, damped {damped / total:.1%}, slow {len(slow) / total:.1%} with "
                f"{sum(slow) / sum(steps):.0%} of the steps (mean {sum(steps) / total:.0f}, most {max(steps)}), "
                f"{spent:.1f} s of CPU {' '.join(bad[:6])}",
                flush=True,
            )


if __name__ == "__main__":
    main()
