"""Reference clouds X^(0) (section 7.2.4 of the paper): the point of reference that all graphs share.

Every function gives ``(num_points, in_channels)``, in the units of ``relative=True``: the mean of a graph is at zero and
the sum of its variances is one, so that one reference fits graphs of any place and size.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from flowpool.inputs import checked_count


def normal(in_channels: int, num_points: int, seed: int = 0) -> Tensor:
    """Seeded draws from the normal distribution whose variances sum to one, ``(M, D)``."""
    shape = checked_count("num_points", num_points), checked_count("in_channels", in_channels)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).div(math.sqrt(in_channels))


def kmeans(x: Tensor, num_points: int, seed: int = 0, relative: bool = True) -> Tensor:
    """Centres of k-means on node features ``(N, D)``, ``(M, D)``; needs scikit-learn.

    Args:
        x: features of the nodes of all graphs together.
        num_points: number of points, M.
        seed: of the first centres.
        relative: standardised by the mean and the variance of these features; otherwise in their own coordinates.
    """
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise ImportError("k-means references need scikit-learn: pip install 'flowpool[sklearn]'.") from error
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; pass a tensor of shape (num_nodes, in_channels).")
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; expected real numbers, (num_nodes, in_channels).")
    count = checked_count("num_points", num_points)
    values = x.detach().cpu().double()
    if not bool(values.isfinite().all()):
        raise ValueError("x holds NaN or infinite values; k-means needs finite ones.")
    distinct = len(values.unique(dim=0))
    if distinct < count:
        raise ValueError(
            f"{count} reference points asked for, but x has only {distinct} distinct rows; "
            "ask for fewer points or give more nodes."
        )
    mean = values.mean(0)
    spread = (values - mean).square().sum(-1).mean().sqrt()
    scale = spread if float(spread) > 0 else torch.ones_like(spread)  # nodes that are all equal have one centre
    fitted = KMeans(count, n_init=10, random_state=seed).fit(((values - mean) / scale).numpy())
    centres = torch.from_numpy(fitted.cluster_centers_)
    return (centres if relative else mean + scale * centres).to(x.dtype)


def check(reference: Tensor, in_channels: int) -> None:
    """Raises unless ``reference`` is a finite ``(M, D)`` cloud of distinct points."""
    check_shape(reference, in_channels)
    check_values(reference)


def check_shape(reference: Tensor, in_channels: int) -> None:
    """Raises unless ``reference`` is a floating-point tensor ``(M, D)``."""
    if not isinstance(reference, Tensor):
        raise TypeError(f"reference is a {type(reference).__name__}; pass a tensor of shape (num_points, in_channels).")
    if reference.dim() != 2 or reference.shape[0] == 0 or reference.shape[1] != in_channels:
        raise ValueError(
            f"reference has shape {tuple(reference.shape)}; expected (num_points, {in_channels}) "
            "with at least one point."
        )
    if not reference.is_floating_point():
        raise TypeError(f"reference is {reference.dtype}; pass reference.float().")


def check_values(reference: Tensor) -> None:
    """Raises unless the points of ``reference`` are finite and distinct."""
    values = (reference.detach().cpu().double() + 0.0).numpy()  # which makes 0 of -0
    if not np.isfinite(values).all():
        raise ValueError("reference holds NaN or infinite values; pass finite points.")
    rows = [row.tobytes() for row in values]
    if len(set(rows)) < len(rows):
        second = next(place for place, row in enumerate(rows) if rows.index(row) < place)
        raise ValueError(
            f"Rows {rows.index(rows[second])} and {second} of the reference are equal. Equal points stay equal along the whole "
            "flow; pass distinct ones, for example references.normal(in_channels, num_points)."
        )
