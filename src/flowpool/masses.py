r"""Masses b of the nodes (section 4 of the paper): how much of its graph each node accounts for.

Equal masses say that every node matters the same. Anything else known about their importance goes to the pool as
``FlowPool(...)(x, batch, masses=b)``, which normalises it in every graph and passes gradients back to it. Masses that are
computed from edges alone have torch's default dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch_geometric.utils import degree as count
from torch_geometric.utils import scatter, softmax

from flowpool.core.measures import checked_index
from flowpool.inputs import check_number
from flowpool.nn.edges import check_edges, check_nodes, check_within

_ERROR = 1e-12  # of PageRank, in the sum of absolute values


def degree(edge_index: Tensor, batch: Tensor | None = None, *, num_nodes: int | None = None) -> Tensor:
    """One plus the number of edges that end in each node, ``(N,)``; the one gives isolated nodes a mass.

    It helps where hubs are what a graph is about. It is the stationary distribution of a random walk that may stay in
    place.

    Args:
        edge_index: ``(2, E)``; each undirected edge in both directions.
        batch: graph of each node, ``(N,)``, in any order.
        num_nodes: or N, if all nodes form one graph.
    """
    graph = _graph_of_nodes(edge_index, batch, num_nodes)
    result: Tensor = 1 + count(edge_index[1], len(graph), torch.get_default_dtype())
    return result


def pagerank(
    edge_index: Tensor, batch: Tensor | None = None, *, num_nodes: int | None = None, damping: float = 0.85
) -> Tensor:
    r"""PageRank of each node within its graph, ``(N,)``; it sums to one in every graph.

    .. math:: r_j = \frac{1 - d}{N} + d \Big( \sum_{i \to j} \frac{r_i}{\deg i} + \frac1N \sum_{i \text{ leads nowhere}} r_i \Big)

    It helps where a node matters by its place in the whole graph, not only by its neighbours.

    Args:
        edge_index: ``(2, E)``, from the first row to the second.
        batch: graph of each node, ``(N,)``, in any order.
        num_nodes: or N, if all nodes form one graph.
        damping: d, how likely the walk is to follow an edge instead of starting anew in its graph.
    """
    check_number("damping", damping)
    if not 0 <= damping < 1:
        raise ValueError(f"damping is {damping}; pass a value from 0 to below 1, like 0.85.")
    graph = _graph_of_nodes(edge_index, batch, num_nodes)
    source, target = edge_index
    num_graphs = int(graph.max()) + 1 if len(graph) else 0
    fair = count(graph, num_graphs, torch.float64)[graph].reciprocal()  # (N,), 1 / N_g
    leaving = count(source, len(graph), torch.float64)  # (N,)
    share = leaving[source].reciprocal()  # (E,)
    rank: Tensor = fair
    # Every round shrinks the error by the damping, so their number is known beforehand.
    for _ in range(math.ceil(math.log(_ERROR) / math.log(damping)) if damping > 0 else 1):
        followed = scatter(share * rank[source], target, dim_size=len(graph))
        stranded = scatter(torch.where(leaving == 0, rank, 0.0), graph, dim_size=num_graphs)[graph] * fair
        rank = (1 - damping) * fair + damping * (followed + stranded)
    return rank.to(torch.get_default_dtype())


class Attention(nn.Module):
    r"""Learned masses :math:`b_j = N \, \mathrm{softmax}_j(\langle w, y_j\rangle)` within each graph.

    They are positive and one on average, so that their total is still the size of the graph, and start equal. It helps
    where some nodes are noise, which a measure with equal masses must carry along.

    Args:
        in_channels: number of features, D.
    """

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.score = nn.Linear(in_channels, 1, bias=False)  # a constant would cancel in the softmax
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Equal masses."""
        nn.init.zeros_(self.score.weight)

    def forward(self, x: Tensor, batch: Tensor | None = None, dim_size: int | None = None) -> Tensor:
        """Masses of nodes ``(N, D)``, ``(N,)``; without ``batch`` they form one graph.

        They are finite where features are not, so that a pool can say which graphs these belong to.
        """
        graph = torch.zeros(len(x), dtype=torch.long, device=x.device) if batch is None else batch
        finite = x.isfinite().all(-1, keepdim=True)
        shares: Tensor = softmax(self.score(x.masked_fill(~finite, 0.0)).squeeze(-1), graph, num_nodes=dim_size)
        sizes: Tensor = count(graph, dim_size, shares.dtype)  # (B,)
        return shares * sizes[graph]


def _graph_of_nodes(edge_index: Tensor, batch: Tensor | None, num_nodes: int | None) -> Tensor:
    """Graph of each node, ``(N,)``, after checks of the edges."""
    if batch is None:
        if num_nodes is None:
            raise ValueError("The number of nodes is not known; pass batch, or num_nodes if all form one graph.")
        graph = torch.zeros(num_nodes, dtype=torch.long, device=edge_index.device)
    else:
        found = batch.shape[0] if isinstance(batch, Tensor) and batch.dim() else 0
        graph = checked_index(batch, found if num_nodes is None else num_nodes, None)
    check_edges(edge_index)
    check_nodes(edge_index, len(graph))
    check_within(edge_index, graph)
    return graph
