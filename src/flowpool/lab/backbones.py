"""What stands before the pool: a frozen part, computed once per dataset, and a part that is trained.

`prepare` gives the dataset with the frozen part applied, `build_backbone` the module for the rest. Both see one graph
at a time, so nothing passes from one graph to another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn
from torch_geometric.nn import GINConv, GINEConv

from flowpool.lab.datasets import GraphDataset
from flowpool.lab.names import Backbone, Propagation

POWER = 2  # K of the paper's SGC layer


def prepare(dataset: GraphDataset, backbone: Backbone, propagation: Propagation | None) -> GraphDataset:
    """The dataset as the trained part of the backbone needs it.

    Args:
        dataset: as it was loaded.
        backbone: ``"sgc"``: propagated features. ``"gin"``, ``"gine"``: unchanged. The others: without edges, so
            that neither the backbone nor the pool can see the structure.
        propagation: how SGC propagates; None for the other backbones, which have nothing to propagate.
    """
    check_backbone(backbone, propagation)
    if propagation is not None:
        return replace(dataset, features=propagate(dataset, propagation))
    if backbone in ("blind", "linear", "sets"):
        return replace(dataset, edge_index=dataset.edge_index[:, :0], edge_ptr=torch.zeros_like(dataset.edge_ptr))
    return dataset


def propagate(dataset: GraphDataset, propagation: Propagation, power: int = POWER) -> Tensor:
    r"""Features that were averaged or summed over neighbours K times, ``(N, D)``.

    .. math:: S^K X \text{ with } S = \tilde D^{-1/2} (A + I) \tilde D^{-1/2} \text{ or } S = A + I

    Args:
        dataset: the graphs.
        propagation: ``"normalised"`` (Wu et al., 2019, as in section 9 of the paper) or ``"raw"``, which keeps the
            degrees.
        power: K.
    """
    num_nodes = len(dataset.features)
    edges_of_graph = dataset.edge_ptr.diff()
    shift = torch.repeat_interleave(dataset.node_ptr[:-1], edges_of_graph)  # (E,)
    loops = torch.arange(num_nodes).expand(2, -1)
    index = torch.cat([dataset.edge_index + shift, loops], dim=1)  # (2, E + N)
    weights = torch.ones(index.shape[1], dtype=torch.float64)
    if propagation == "normalised":
        degree = torch.bincount(index[1], minlength=num_nodes).double()  # at least one: the loop
        weights = degree[index[0]].rsqrt() * degree[index[1]].rsqrt()
    matrix = torch.sparse_coo_tensor(index, weights, (num_nodes, num_nodes), check_invariants=False).coalesce()
    features = dataset.features.double()
    for _ in range(power):
        features = torch.sparse.mm(matrix, features)
    return features.to(dataset.features.dtype)


def build_backbone(
    backbone: Backbone,
    in_channels: int,
    channels: int,
    layers: int = 2,
    *,
    jumping: bool = False,
    edge_channels: int = 0,
) -> nn.Module:
    """The trained part: a module that maps ``(N, in_channels)``, ``(2, E)`` and ``(E, edge_channels)`` to ``(N, channels)``.

    Where edges have no features, it is given None for them. ``layers`` and ``jumping`` are for GIN and GINE; jumping, they
    hand over their layers side by side, ``(N, layers * channels)``.
    """
    if backbone == "gin":
        return GIN(in_channels, channels, layers, jumping=jumping)
    if backbone == "gine":
        return GINE(in_channels, channels, layers, jumping=jumping, edge_channels=edge_channels)
    makers = {"sgc": Linear, "blind": Blind, "linear": Linear, "sets": DeepSets}
    module: nn.Module = makers[backbone](in_channels, channels)
    return module


def check_backbone(backbone: str, propagation: str | None) -> None:
    """Raises ValueError unless the two fit together."""
    if backbone not in get_args(Backbone):
        raise ValueError(f"Unknown backbone {backbone!r}; there are {', '.join(get_args(Backbone))}.")
    if backbone == "sgc" and propagation not in get_args(Propagation):
        raise ValueError(f"Unknown propagation {propagation!r}; sgc has {', '.join(get_args(Propagation))}.")
    if backbone != "sgc" and propagation is not None:
        raise ValueError(f"Propagation {propagation!r} belongs to the backbone sgc; {backbone} has none.")


class Linear(nn.Module):
    """One linear layer on each node by itself, after which a mean or a sum knows the first moment and nothing else.

    Also what is left of SGC: its propagation has no parameters and was done by `prepare`.
    """

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_features: Tensor | None = None) -> Tensor:
        result: Tensor = self.linear(x)
        return result


class GIN(nn.Module):
    """Layers of the graph isomorphism network (Xu et al., 2019), each with an MLP of two layers: the last, or all."""

    def __init__(self, in_channels: int, channels: int, layers: int = 2, *, jumping: bool = False) -> None:
        super().__init__()
        self.jumping = jumping
        widths = [in_channels] + [channels] * layers
        self.layers = nn.ModuleList(
            GINConv(_mlp(before, after)) for before, after in zip(widths, widths[1:], strict=False)
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_features: Tensor | None = None) -> Tensor:
        return _walked(self.layers, self.jumping, x, edge_index)


class GINE(nn.Module):
    """The same with a message that depends on the edge, relu(x + W e) (Hu et al., 2020), after a linear layer on nodes."""

    def __init__(
        self, in_channels: int, channels: int, layers: int = 2, *, jumping: bool = False, edge_channels: int
    ) -> None:
        super().__init__()
        if edge_channels < 1:
            raise ValueError("The edges of this dataset have no features, which the backbone gine needs; take gin.")
        self.jumping = jumping
        self.linear = nn.Linear(in_channels, channels)
        self.layers = nn.ModuleList(GINEConv(_mlp(channels, channels), edge_dim=edge_channels) for _ in range(layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_features: Tensor | None = None) -> Tensor:
        return _walked(self.layers, self.jumping, self.linear(x), edge_index, edge_features)


def _mlp(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(before, after),
        nn.BatchNorm1d(after),
        nn.ReLU(),
        nn.Linear(after, after),
        nn.ReLU(),
    )


def _walked(layers: nn.ModuleList, jumping: bool, x: Tensor, *edges: Tensor | None) -> Tensor:
    """The nodes after the last layer, or after all layers side by side."""
    found = [x]
    for layer in layers:
        found.append(layer(found[-1], *edges))
    return torch.cat(found[1:], 1) if jumping else found[-1]


class DeepSets(nn.Module):
    """Two layers on each node by itself; behind a sum, the network of Zaheer et al. (2017)."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(in_channels, channels), nn.ReLU(), nn.Linear(channels, channels))

    def forward(self, x: Tensor, edge_index: Tensor, edge_features: Tensor | None = None) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class Blind(nn.Module):
    """One layer on each node by itself: with sum pooling, the structure-blind baseline of Errica et al. (2020)."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_features: Tensor | None = None) -> Tensor:
        return torch.relu(self.linear(x))
