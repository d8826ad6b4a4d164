"""What predictions are judged by, and how such a number is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowpool.lab.datasets import GraphDataset
from flowpool.lab.datasets.tables import Kind

Array = NDArray[Any]


@dataclass(frozen=True)
class Metric:
    """One measure.

    Attributes:
        name: of the measure.
        kind: what is predicted.
        score: of predictions and truth. Predictions are class numbers ``(B,)``; scores of the classes ``(B, C)`` where
            ``ranks``; or numbers ``(B, T)`` in the caller's units, over which errors of several targets are averaged.
        lower_is_better: whether it is an error.
        ranks: whether it needs scores.
        percent: whether it is written in per cent.
    """

    name: str
    kind: Kind
    score: Callable[[Array, Array], float]
    lower_is_better: bool = False
    ranks: bool = False
    percent: bool = False

    def better(self, one: float, other: float) -> bool:
        return one < other if self.lower_is_better else one > other

    @property
    def title(self) -> str:
        return f"{self.name} %" if self.percent else self.name

    def number(self, value: float, *, sign: bool = False) -> str:
        """The value as it stands in tables: ``82.48`` or ``0.594``."""
        scaled, digits = (100 * value, 2) if self.percent else (value, 3)
        return f"{scaled:{'+' if sign else ''}.{digits}f}"


def _accuracy(predictions: Array, truth: Array) -> float:
    return int((predictions == truth).sum()) / len(truth)


def _auc(scores: Array, truth: Array) -> float:
    from sklearn.metrics import roc_auc_score

    present = len(np.unique(truth))
    if present < scores.shape[1]:
        raise ValueError(
            f"The area under the curve needs every class in each part; one part has {present} of {scores.shape[1]}."
        )
    if scores.shape[1] == 2:
        return float(roc_auc_score(truth, scores[:, 1] - scores[:, 0]))
    shares = np.exp(scores - scores.max(1, keepdims=True))
    return float(roc_auc_score(truth, shares / shares.sum(1, keepdims=True), multi_class="ovr"))


def _rmse(predictions: Array, truth: Array) -> float:
    return float(np.sqrt(((predictions - truth) ** 2).mean(0)).mean())


def _mae(predictions: Array, truth: Array) -> float:
    return float(np.abs(predictions - truth).mean())


def _r2(predictions: Array, truth: Array) -> float:
    spread = ((truth - truth.mean(0)) ** 2).sum(0)
    if not (spread > 0).all():
        raise ValueError(
            "r2 compares with the spread of a target, and one part has a target that is the same everywhere."
        )
    return float((1 - ((predictions - truth) ** 2).sum(0) / spread).mean())


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "classes", _accuracy, percent=True),
        Metric("auc", "classes", _auc, ranks=True),
        Metric("rmse", "numbers", _rmse, lower_is_better=True),
        Metric("mae", "numbers", _mae, lower_is_better=True),
        Metric("r2", "numbers", _r2),
    )
}


def kind_of(metric: str | None) -> Kind | None:
    """What targets are, if a metric says so."""
    return None if metric is None else METRICS[metric].kind


def metric_for(dataset: GraphDataset, asked: str | None) -> Metric:
    """The metric that was asked for, if it fits what the dataset holds; else accuracy or RMSE."""
    kind = "classes" if dataset.has_classes else "numbers"
    metric = METRICS[asked or ("accuracy" if dataset.has_classes else "rmse")]
    if metric.kind != kind:
        fitting = ", ".join(name for name, other in METRICS.items() if other.kind == kind)
        raise ValueError(
            f"The targets of {dataset.name} are {kind}, of which {metric.name} is no measure; pass {fitting}."
        )
    return metric
