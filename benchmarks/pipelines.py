"""Whether anything can go wrong behind `FlowVectorizer`: ridge, SVM, random forest and k-NN, with and without a scaler.

Root mean squared error for ESOL, accuracy in per cent for the others, over the first splits of each dataset: published
ones for molecules, drawn ones of ORBIT5K, stratified ones else. The weight of ridge is chosen by leaving one out and the
penalty of the machine by three inner folds; a forest tries the root of the columns at each split; everything else is
scikit-learn's default.

    python benchmarks/pipelines.py ESOL BACE ENZYMES ORBIT5K --data FOLDER
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import RidgeClassifierCV, RidgeCV
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from sklearn.svm import SVC, SVR

from flowpool.lab.datasets import GraphDataset, load_graphs
from flowpool.sklearn import FlowVectorizer, Propagate

PENALTIES = {"C": [1.0, 10.0, 100.0]}
RIDGES = np.logspace(-5, 5, 21)
MODELS: dict[str, tuple[Any, Any]] = {
    "ridge": (lambda: RidgeClassifierCV(RIDGES), lambda: RidgeCV(RIDGES)),
    "SVM": (lambda: GridSearchCV(SVC(), PENALTIES, cv=3), lambda: GridSearchCV(SVR(), PENALTIES, cv=3)),
    "random forest": (
        lambda: RandomForestClassifier(random_state=0),
        lambda: RandomForestRegressor(max_features="sqrt", random_state=0),
    ),
    "5-NN": (KNeighborsClassifier, KNeighborsRegressor),
}
SCALERS: dict[str, list[Any]] = {"as it is": [], "StandardScaler": [StandardScaler()], "Normalizer": [Normalizer()]}


def splits_of(graphs: GraphDataset, targets: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    if graphs.folds:
        return [(np.concatenate([fold.train, fold.validation]), fold.test) for fold in graphs.folds]
    return list(StratifiedKFold(5, shuffle=True, random_state=0).split(targets, targets))


def measure(name: str, data: str | None, options: dict[str, Any], num_splits: int) -> None:
    """Prints one line per model."""
    graphs = load_graphs(name, data)
    targets = graphs.labels.numpy().squeeze()
    is_regression = targets.dtype.kind == "f"
    found: dict[tuple[str, str], list[float]] = {}
    for train, test in splits_of(graphs, targets)[:num_splits]:
        propagate = Propagate(2 if graphs.edge_index.shape[1] else 0)
        sets, others = (
            propagate.fit_transform([graphs[i] for i in train]),
            propagate.transform([graphs[i] for i in test]),
        )
        begin = time.process_time()
        vectorizer = FlowVectorizer(random_state=0, **options)
        vectors = vectorizer.fit_transform(sets).astype(np.float64)
        test_vectors = vectorizer.transform(others).astype(np.float64)
        print(
            f"{name}: {len(targets)} -> {vectors.shape[1]} numbers in {time.process_time() - begin:.1f} s", flush=True
        )
        for scaler, steps in SCALERS.items():
            for model, makers in MODELS.items():
                pipeline = make_pipeline(*steps, makers[is_regression]()).fit(vectors, targets[train])
                predictions = pipeline.predict(test_vectors)
                right = predictions - targets[test] if is_regression else predictions == targets[test]
                score = np.sqrt(np.mean(right**2)) if is_regression else 100 * np.mean(right)
                found.setdefault((model, scaler), []).append(score)
    what = ", ".join([name, *(f"{key}={value!r}" for key, value in options.items())])
    for model in MODELS:
        scores = " | ".join(
            f"{np.mean(found[model, scaler]):.3f}" if is_regression else f"{np.mean(found[model, scaler]):.1f}"
            for scaler in SCALERS
        )
        print(f"| {what} | {model} | {scores} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--data")
    parser.add_argument("--by", default="step")
    parser.add_argument("--size", default="log")
    parser.add_argument("--points", type=int, default=32)
    parser.add_argument("--splits", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print("| | | " + " | ".join(SCALERS) + " |\n|---|---|" + "---|" * len(SCALERS))
    for dataset in chosen.datasets:
        options = {"num_points": chosen.points, "by": chosen.by, "size": chosen.size}
        defaults = {"num_points": 32, "by": "step", "size": "log"}
        measure(dataset, chosen.data, {k: v for k, v in options.items() if v != defaults[k]}, chosen.splits)
