"""How close Euclidean distances between vectors are to W_2 between the sets: correlation and mean relative error.

Random pairs of sets; nodes of graphs are averaged over neighbours twice. Exact distances are those of POT.

    python benchmarks/vectorizer.py MUTAG ENZYMES DIGITS --data FOLDER
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flowpool.lab.evaluate import load_graphs
from flowpool.lab.frozen.embeddings import WEGL, Moments
from flowpool.lab.frozen.methods import weights_of
from flowpool.sklearn import FlowVectorizer, Propagate, wasserstein_distances

METHODS: dict[str, Callable[[int], Any]] = {
    "step, with deviations": lambda count: FlowVectorizer(count, size=None, random_state=0),
    "step, without": lambda count: FlowVectorizer(count, size=None, random_state=0, spread=False),
    "WEGL": lambda count: WEGL(count, random_state=0),
    "sliced": lambda count: FlowVectorizer(count, size=None, random_state=0, by="sliced"),
    "mean and deviations": lambda count: Moments("deviations"),
}


def measure(name: str, data: str | None, points: list[int], num_pairs: int) -> None:
    """Prints one line per method and number of points."""
    graphs = load_graphs(name, data)
    sets, weights = Propagate(2 if graphs.edge_index.shape[1] else 0).fit_transform(list(graphs)), weights_of(graphs)
    random = np.random.default_rng(0)
    pairs = np.array([random.choice(len(sets), 2, replace=False) for _ in range(num_pairs)])
    exact = np.array([_exact(sets, weights, *pair) for pair in pairs])
    apart = exact > 1e-3 * np.median(exact)  # equal sets have no relative error
    for count in points:
        for label, build in METHODS.items():
            embedding = build(count).fit(sets, sample_weight=weights)
            begin = time.perf_counter()
            vectors = embedding.transform(sets, sample_weight=weights).astype(np.float64)
            seconds = 1000 * (time.perf_counter() - begin) / len(sets)
            found = np.linalg.norm(vectors[pairs[:, 0]] - vectors[pairs[:, 1]], axis=1)
            correlation = np.corrcoef(exact, found)[0, 1]
            error = np.mean(np.abs(found[apart] / exact[apart] - 1))
            print(
                f"| {name} | {count} | {label} | {correlation:.3f} | {100 * error:.0f} % | {seconds:.2f} |", flush=True
            )


def _exact(sets: list[Any], weights: list[Any] | None, one: int, other: int) -> float:
    masses = (None, None) if weights is None else ([weights[one]], [weights[other]])
    return float(wasserstein_distances([sets[one]], [sets[other]], masses_a=masses[0], masses_b=masses[1])[0, 0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--data")
    parser.add_argument("--points", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--pairs", type=int, default=500)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print("| set | M | vector | correlation with W_2 | mean relative error | s / 1,000 sets |")
    print("|---|---|---|---|---|---|")
    for dataset in chosen.datasets:
        measure(dataset, chosen.data, chosen.points, chosen.pairs)
