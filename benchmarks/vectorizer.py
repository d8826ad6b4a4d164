"""How close Euclidean distances between vectors are to W_2 between the sets: correlation and mean relative error.

Random pairs of sets; nodes of graphs are averaged over neighbours twice. Exact distances are those of POT. The last error
is that of distances multiplied by one number, the median ratio over the first half of the pairs, measured on the others.

    python benchmarks/vectorizer.py MUTAG ENZYMES DIGITS --data FOLDER
    python benchmarks/vectorizer.py --sizes

With ``--times``: CPU seconds of ``transform`` for every embedding, and of exact distances, in one run. With ``--sizes`` and
no dataset: those of ``fit_transform`` by number and size of sets in the plane.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flowpool.lab.datasets import load_graphs
from flowpool.lab.frozen.embeddings import OTKE, WEGL, Flow, Moments, Slices, Sorted
from flowpool.lab.frozen.methods import weights_of
from flowpool.sklearn import FlowVectorizer, Propagate, wasserstein_distances

METHODS: dict[str, Callable[[int], Any]] = {
    "step": lambda count: FlowVectorizer(count, size=None, random_state=0),
    "free": lambda count: FlowVectorizer(count, by="free", size=None, random_state=0),
    "slices": lambda count: Slices(count, random_state=0),
    "WEGL": lambda count: WEGL(count, random_state=0),
    "mean and deviations": lambda count: Moments("deviations"),
}

TIMED: dict[str, Callable[[int], Any]] = {
    "sum": lambda count: Moments("sum"),
    "mean": lambda count: Moments("mean"),
    "sort": Sorted,
    "OTKE": lambda count: OTKE(count, random_state=0),
    **METHODS,
    "flow": lambda count: Flow(count, random_state=0),
}
PASSES = 3
SIZES = [(5_000, 10), (5_000, 100), (5_000, 1_000), (500, 10_000), (50, 100_000)]
COMPARED = 10  # sets whose exact distances to all others are timed


def measure(name: str, data: str | None, points: list[int], num_pairs: int) -> None:
    """Prints one line per method and number of points."""
    sets, weights = _sets(name, data)
    random = np.random.default_rng(0)
    pairs = np.array([random.choice(len(sets), 2, replace=False) for _ in range(num_pairs)])
    exact = np.array([_exact(sets, weights, *pair) for pair in pairs])
    for count in points:
        for label, build in METHODS.items():
            embedding = build(count).fit(sets, sample_weight=weights)
            begin = time.process_time()
            vectors = embedding.transform(sets, sample_weight=weights).astype(np.float64)
            seconds = 1000 * (time.process_time() - begin) / len(sets)
            found = np.linalg.norm(vectors[pairs[:, 0]] - vectors[pairs[:, 1]], axis=1)
            _tell(f"{name} | {count} | {label}", exact, found, f"{seconds:.2f}")


def _tell(what: str, exact: np.ndarray, found: np.ndarray, seconds: str) -> None:
    apart = exact > 1e-3 * np.median(exact)  # equal sets have no relative error
    correlation = np.corrcoef(exact, found)[0, 1]
    ratios = found[apart] / exact[apart]
    error, half = np.mean(np.abs(ratios - 1)), len(ratios) // 2
    scaled = np.mean(np.abs(ratios[half:] / np.median(ratios[:half]) - 1))
    print(f"| {what} | {correlation:.3f} | {100 * error:.1f} % | {100 * scaled:.1f} % | {seconds} |", flush=True)


def measure_times(name: str, data: str | None, count: int) -> None:
    """Prints CPU seconds per 1,000 sets, the best of some passes, methods in turn, then those of exact distances."""
    sets, weights = _sets(name, data)
    fitted = {label: build(count).fit(sets, sample_weight=weights) for label, build in TIMED.items()}
    best = dict.fromkeys(fitted, float("inf"))
    for _ in range(PASSES):
        for label, embedding in fitted.items():
            begin = time.process_time()
            embedding.transform(sets, sample_weight=weights)
            best[label] = min(best[label], time.process_time() - begin)
    for label, seconds in best.items():
        print(f"| {name} | {count} | {label} | {1000 * seconds / len(sets):.3f} |")
    masses = None if weights is None else weights[:COMPARED]
    begin = time.process_time()
    wasserstein_distances(sets[:COMPARED], sets, masses_a=masses, masses_b=weights)
    seconds = 1000 * (time.process_time() - begin) / COMPARED
    print(f"| {name} | | exact distances to all {len(sets)} | {seconds:.0f} |", flush=True)


def measure_sizes() -> None:
    """Prints CPU seconds of ``fit_transform`` for 5,000,000 members in the plane or fewer, ways in turn."""
    ways: dict[str, dict[str, Any]] = {"default": {}, "8 points": {"num_points": 8}, "free": {"by": "free"}}
    random = np.random.default_rng(0)
    print("| sets | members each | " + " | ".join(ways) + " |\n|---|---|" + "---|" * len(ways))
    for count, size in SIZES:
        sets = random.uniform(size=(count, size, 2))
        row = []
        for options in ways.values():
            FlowVectorizer(random_state=0, **options).fit(sets[:5])  # whatever is compiled once
            begin = time.process_time()
            FlowVectorizer(random_state=0, **options).fit_transform(sets)
            row.append(f"{time.process_time() - begin:.2f} s")
        print(f"| {count:,} | {size:,} | " + " | ".join(row) + " |", flush=True)


def _sets(name: str, data: str | None) -> tuple[list[Any], list[Any] | None]:
    graphs = load_graphs(name, data)
    return Propagate(2 if graphs.edge_index.shape[1] else 0).fit_transform(list(graphs)), weights_of(graphs)


def _exact(sets: list[Any], weights: list[Any] | None, one: int, other: int) -> float:
    masses = (None, None) if weights is None else ([weights[one]], [weights[other]])
    return float(wasserstein_distances([sets[one]], [sets[other]], masses_a=masses[0], masses_b=masses[1])[0, 0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("datasets", nargs="*")
    parser.add_argument("--data")
    parser.add_argument("--points", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--sizes", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.sizes:
        measure_sizes()
    elif chosen.times:
        print("| set | M | vector | CPU s / 1,000 sets |\n|---|---|---|---|")
        for dataset, count in itertools.product(chosen.datasets, chosen.points):
            measure_times(dataset, chosen.data, count)
    else:
        print("| set | M | vector | correlation with W_2 | mean relative error | after one factor | s / 1,000 sets |")
        print("|---|---|---|---|---|---|---|")
        for dataset in chosen.datasets:
            measure(dataset, chosen.data, chosen.points, chosen.pairs)
