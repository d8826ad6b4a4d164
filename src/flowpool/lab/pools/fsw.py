"""Fourier sliced-Wasserstein embedding (Amir and Dym, 2025) as a readout, by the package of its authors."""

from __future__ import annotations

from fswlib import FSWEmbedding
from torch import Tensor
from torch_geometric.utils import to_dense_batch

from flowpool.lab.pools.base import Pool, Readout, no_loss

WIDTH = 4  # numbers per feature; more cost more than they are worth to wait for


class FSWPool(Pool):
    r"""Cosine transforms of the quantiles of learned slices, at learned frequencies.

    .. math:: E(\mu; v, \xi) = 2 (1 + \xi) \int_0^1 Q_{v^\top \mu}(t) \cos(2 \pi \xi t) \, dt

    One frequency for each slice, 4 D of them. The number of nodes is left to the model, as for every pool.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(WIDTH * in_channels)
        self.embedding = FSWEmbedding(
            in_channels,
            self.out_channels,
            learnable_slices=True,
            learnable_frequencies=True,
            use_custom_cuda_extension_if_available=False,
        )

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        nodes, mask = to_dense_batch(x, batch, batch_size=num_graphs)  # (B, N, D), (B, N)
        return Readout(self.embedding(nodes, mask.to(x.dtype)), no_loss(x))
