"""Reference clouds X^(0) (section 7.2.4 of the paper): the point of reference that all graphs share.

Every function gives ``(num_points, num_features)`` in the units of ``relative=True``: the mean of a graph is at zero
and the sum of its variances is one, so that one reference fits graphs of any place and size.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def normal(num_points: int, num_features: int, seed: int = 0) -> Tensor:
    """Seeded draws from the normal distribution whose variances sum to one."""
    _check_size(num_points, num_features)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_points, num_features, generator=generator).div(math.sqrt(num_features))


def kmeans(features: Tensor, num_points: int, seed: int = 0) -> Tensor:
    """Centres of k-means on node features ``(N, D)``, standardised by the features' own mean and variance."""
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise ImportError("k-means references need scikit-learn: pip install 'flowpool[lab]'.") from error
    if features.dim() != 2 or not features.is_floating_point():
        raise ValueError(
            f"features is {features.dtype} {tuple(features.shape)}; expected real numbers, (num_nodes, D)."
        )
    _check_size(num_points, features.shape[1])
    values = features.detach().cpu().double()
    if not bool(values.isfinite().all()):
        raise ValueError("features hold NaN or infinite values; k-means needs finite ones.")
    distinct = len(values.unique(dim=0))
    if distinct < num_points:
        raise ValueError(
            f"{num_points} reference points asked for, but the features have only {distinct} distinct rows; "
            "ask for fewer points or give more nodes."
        )
    centred = values - values.mean(0)
    standardised = centred / centred.square().sum(-1).mean().sqrt()
    fitted = KMeans(num_points, n_init=10, random_state=seed).fit(standardised.numpy())
    return torch.from_numpy(fitted.cluster_centers_).to(features.dtype)


def check(reference: Tensor, num_features: int) -> None:
    """Raises unless ``reference`` is a finite ``(M, D)`` cloud of distinct points."""
    check_shape(reference, num_features)
    check_values(reference)


def check_shape(reference: Tensor, num_features: int) -> None:
    """Raises unless ``reference`` is a tensor ``(M, D)``."""
    if not isinstance(reference, Tensor):
        raise TypeError(
            f"reference is a {type(reference).__name__}; pass a tensor of shape (num_points, num_features)."
        )
    if reference.dim() != 2 or reference.shape[0] == 0 or reference.shape[1] != num_features:
        raise ValueError(
            f"reference has shape {tuple(reference.shape)}; expected (num_points, {num_features}) "
            "with at least one point."
        )


def check_values(reference: Tensor) -> None:
    """Raises unless the points of ``reference`` are finite and distinct."""
    values = reference.detach().cpu().double().numpy() + 0.0  # -0.0 is 0.0
    if not np.isfinite(values).all():
        raise ValueError("reference holds NaN or infinite values; pass finite points.")
    seen: dict[bytes, int] = {}
    for row, value in enumerate(values):
        first = seen.setdefault(value.tobytes(), row)
        if first != row:
            raise ValueError(
                f"Rows {first} and {row} of the reference are equal. Equal points stay equal along the whole flow; "
                "pass distinct ones, for example references.normal(M, D)."
            )


def _check_size(num_points: int, num_features: int) -> None:
    if num_points < 1 or num_features < 1:
        raise ValueError(f"A reference of {num_points} points with {num_features} features; both must be at least 1.")
