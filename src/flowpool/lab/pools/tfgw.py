"""Template fused Gromov-Wasserstein pooling (Vincent-Cuaz et al., 2022): distances to learned graphs."""

from __future__ import annotations

import torch
from ot.gnn import TFGWPooling
from torch import Tensor

from flowpool.lab.pools.base import Pool, Readout, graph_sizes, local_edges, no_loss
from flowpool.lab.pools.tw import NUM_TEMPLATES


class TFGWPool(Pool):
    """POT's TFGWPooling with eight templates of M nodes each and a learned balance of features and structure.

    POT solves these problems in single precision, whatever the precision of the features. Graphs are handed
    over one by one: POT's own way through a batch fails when the last node has no edge.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(NUM_TEMPLATES)
        self.layer = TFGWPooling(in_channels, n_tplt=NUM_TEMPLATES, n_tplt_nodes=num_points)

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        clouds = x.float().split(graph_sizes(batch, num_graphs).tolist())
        edges = local_edges(edge_index, batch, num_graphs)
        distances = torch.stack([self.layer(nodes, own) for nodes, own in zip(clouds, edges, strict=True)])  # (B, T)
        return Readout(distances.to(x.dtype), no_loss(x))
