"""Template Wasserstein pooling (Becigneul et al., 2020): distances from the node cloud to learned clouds."""

from __future__ import annotations

import ot
import torch
from ot.gnn import TWPooling
from torch import Tensor

from flowpool.lab.pools.base import Pool, Readout, graph_sizes, no_loss

# Papers on template pooling use a few templates per class; eight serves the usual two to six classes.
NUM_TEMPLATES = 8


class TWPool(Pool):
    """Exact squared Wasserstein distances to eight templates of M nodes each, with learned places and masses.

    POT's TWPooling holds the templates. Its own forward stops the network simplex after 50 pivots, which is
    too early for graphs of 40 nodes and returns distances that are nowhere near optimal for some hundred
    nodes, so the same distances are computed here without that limit.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(NUM_TEMPLATES)
        self.templates = TWPooling(in_channels, n_tplt=NUM_TEMPLATES, n_tplt_nodes=num_points)

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        template_masses = self.templates.q0.softmax(dim=1)  # (T, M)
        rows = []
        for nodes in x.split(graph_sizes(batch, num_graphs).tolist()):
            node_masses = nodes.new_full((len(nodes),), 1 / len(nodes))
            distances = [
                ot.emd2(node_masses, masses, ot.dist(nodes, places))
                for places, masses in zip(self.templates.tplt_features, template_masses, strict=True)
            ]
            rows.append(torch.stack(distances))  # (T,)
        return Readout(torch.stack(rows), no_loss(x))
