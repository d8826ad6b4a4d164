"""Graphs as probability measures (section 4 of the paper, eq. 12).

A graph with node features Y and masses b is the measure ``nu = sum_j b_j delta_{y_j}``. A batch of them is kept
ragged: the nodes of all graphs one after the other, with offsets, and padded where graphs are computed side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_GRAPHS = 2**26
GROUP = 2**24  # numbers that the largest tensor of a group of graphs may have; more only in a graph alone


def wrong_ids(sentence: str, name: str = "batch") -> ValueError:
    """Something is wrong with the graph ids, which functions call ``batch`` and PyG's aggregations ``index``.

    Args:
        sentence: with ``{ids}`` for their name; the error keeps it, for who calls them by another one.
    """
    error = ValueError(sentence.format(ids=name))
    error.about_ids = sentence  # type: ignore[attr-defined]
    return error


@dataclass(frozen=True)
class Clouds:
    """A ragged batch of B weighted clouds.

    Attributes:
        nodes: Y of all graphs, sorted by graph, ``(N, D)``.
        masses: b, non-negative, summing to one in every graph that has nodes, ``(N,)``.
        ptr: offsets, graph g owns the nodes ``ptr[g]:ptr[g + 1]``, ``(B + 1,)`` int64.
        batch: graph of each node, ``(N,)``.
    """

    nodes: Tensor
    masses: Tensor
    ptr: Tensor
    batch: Tensor

    @staticmethod
    def from_ptr(nodes: Tensor, masses: Tensor, ptr: Tensor) -> Clouds:
        graphs = torch.arange(ptr.numel() - 1, device=ptr.device)
        return Clouds(nodes, masses, ptr, graphs.repeat_interleave(ptr.diff(), output_size=nodes.shape[0]))

    def moved(self, nodes: Tensor) -> Clouds:
        """The same masses at other places."""
        return Clouds(nodes, self.masses, self.ptr, self.batch)

    @property
    def num_graphs(self) -> int:
        return self.ptr.numel() - 1

    @property
    def sizes(self) -> Tensor:
        return self.ptr.diff()  # (B,)

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a value per node ``(N, ...)`` over each graph ``(B, ...)``."""
        total = values.new_zeros((self.num_graphs, *values.shape[1:]))
        return total.index_add(0, self.batch, values)

    def mean(self) -> Tensor:
        """Mean ``b^T Y`` of each cloud, ``(B, D)``; zero for an empty one."""
        return self.sum(self.masses.unsqueeze(-1) * self.nodes)

    def groups(self, graphs: Tensor, per_node: int) -> list[Tensor]:
        """Some graphs, ``(K,)``, in groups of similar size.

        Padded to one size, with ``per_node`` numbers for each node and the square of that for each graph, a group takes at most
        :data:`GROUP` numbers, or is one graph.
        """
        groups: list[list[int]] = []
        sizes = self.sizes.tolist()
        for graph in sorted(graphs.tolist(), key=sizes.__getitem__):  # the last of a group is its largest
            each = sizes[graph] * max(per_node, sizes[graph]) + per_node**2
            if groups and (len(groups[-1]) + 1) * each <= GROUP:
                groups[-1].append(graph)
            else:
                groups.append([graph])
        return [torch.tensor(group, device=self.ptr.device) for group in groups]

    def padded(self, graphs: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes ``(K, N, D)`` and masses ``(K, N)`` of some graphs, with zeros as padding."""
        start, size = self.ptr[graphs, None], self.sizes[graphs, None]
        column = torch.arange(int(size.max()), device=start.device)
        places = torch.where(column < size, start + column, len(self.nodes))
        nodes = torch.cat([self.nodes, self.nodes.new_zeros(1, self.nodes.shape[1])])
        masses = torch.cat([self.masses, self.masses.new_zeros(1)])
        return nodes[places], masses[places]


def make_clouds(
    nodes: Tensor,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    masses: Tensor | None = None,
    num_graphs: int | None = None,
) -> tuple[Clouds, Tensor]:
    """Checked measures of a batch of graphs, and which node of the caller stands at each place ``(N,)``.

    Args:
        nodes: Y, ``(N, D)`` floating point.
        batch: graph id of each node, ``(N,)``, in any order.
        ptr: offsets ``(B + 1,)`` of nodes that are sorted by graph. With both, they must agree. With neither, all
            nodes form one graph.
        masses: b, ``(N,)``, not yet normalised; ``None`` gives all nodes of a graph the same mass.
        num_graphs: B, when it is more than the ids show (trailing graphs without nodes).

    Gradients flow back to ``nodes`` and ``masses`` in the caller's order. Inside a graph the nodes are put into an
    order that depends on their features alone, so that the order they were given in cannot even change the rounding.
    """
    check_features(nodes)
    offsets, graph = graphs_of(nodes, batch, ptr, masses, num_graphs)
    return sorted_clouds(nodes, masses, offsets, graph)


def sorted_clouds(nodes: Tensor, masses: Tensor | None, ptr: Tensor, graph: Tensor) -> tuple[Clouds, Tensor]:
    """:func:`make_clouds` of what :func:`graphs_of` has checked."""
    order = _order(nodes.detach(), graph)
    weights = nodes.new_ones(nodes.shape[0]) if masses is None else masses[order]
    clouds = Clouds.from_ptr(nodes[order], weights, ptr)
    return Clouds(clouds.nodes, weights / clouds.sum(weights)[clouds.batch], ptr, clouds.batch), order


def graphs_of(
    nodes: Tensor,
    batch: Tensor | None,
    ptr: Tensor | None,
    masses: Tensor | None,
    num_graphs: int | None,
) -> tuple[Tensor, Tensor]:
    """Offsets of the graphs once their nodes are sorted, ``(B + 1,)``, and the graph of each node, ``(N,)``; checks all.

    Arguments as for :func:`make_clouds`.
    """
    if masses is not None:
        if not isinstance(masses, Tensor):
            raise TypeError(f"masses is a {type(masses).__name__}; pass a tensor of shape (num_nodes,), or None.")
        require_like(masses, nodes, "masses")
    num_nodes = nodes.shape[0]
    if isinstance(num_graphs, float) or num_graphs is not None and not 0 <= num_graphs <= _MOST_GRAPHS:
        raise ValueError(
            f"dim_size is {num_graphs}; pass a whole number of graphs from 0 to {_MOST_GRAPHS} that fits in memory."
        )
    if ptr is not None:
        offsets = checked_ptr(ptr, num_nodes, num_graphs)
        if batch is not None:
            _check_agreement(checked_index(batch, num_nodes, offsets.numel() - 1), offsets)
        count = offsets.numel() - 1
        graph = torch.arange(count, device=offsets.device).repeat_interleave(offsets.diff())
    elif batch is not None:
        graph = checked_index(batch, num_nodes, num_graphs)
        found = int(graph.max()) + 1 if num_nodes and num_graphs is None else 0
        count = found if num_graphs is None else num_graphs
    else:
        if num_graphs not in (None, 1):
            raise wrong_ids(f"dim_size is {num_graphs}, but without {{ids}} or ptr all nodes form one graph.")
        graph, count = torch.zeros(num_nodes, dtype=torch.long), 1
    graph = graph.to(nodes.device)
    if masses is not None:
        _check_masses(masses, num_nodes)
        _check_totals(masses, graph, count)
    return _offsets(torch.bincount(graph, minlength=count)), graph


def _order(nodes: Tensor, graph: Tensor) -> Tensor:
    # Any fixed direction tells different nodes apart; sums over the last axis have the same bits in every row.
    direction = torch.arange(1, nodes.shape[1] + 1, device=nodes.device, dtype=nodes.dtype).cos()
    by_features = (nodes * direction).sum(-1).argsort(stable=True)
    return by_features[graph[by_features].argsort(stable=True)]


def check_features(nodes: Tensor) -> None:
    """Raises unless ``nodes`` is an ``(N, D)`` floating-point tensor with D >= 1."""
    if not isinstance(nodes, Tensor):
        raise TypeError(f"nodes is a {type(nodes).__name__}; pass a torch.Tensor of shape (num_nodes, num_features).")
    if nodes.dim() != 2 or nodes.shape[1] == 0:
        raise ValueError(
            f"nodes has shape {tuple(nodes.shape)}; expected (num_nodes, num_features) with at least one feature."
        )
    if not nodes.is_floating_point():
        raise TypeError(f"nodes has dtype {nodes.dtype}; pooling needs real numbers: pass nodes.float().")


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def checked_index(batch: Tensor, num_nodes: int, num_graphs: int | None) -> Tensor:
    """Graph ids as int64; raises unless they are one integer per node, in range."""
    if not isinstance(batch, Tensor) or batch.dtype not in (
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    ):
        found = batch.dtype if isinstance(batch, Tensor) else type(batch).__name__
        raise wrong_ids(f"{{ids}} is {found}; pass an integer tensor with the graph id of each node (torch.long).")
    if batch.dim() != 1 or batch.numel() != num_nodes:
        raise wrong_ids(f"{{ids}} has shape {tuple(batch.shape)}; expected ({num_nodes},), one graph id per node.")
    index = batch.long()
    lowest, highest = (int(end) for end in index.aminmax()) if num_nodes else (0, -1)
    if lowest < 0 or num_graphs is not None and highest >= num_graphs:
        wrong = (index < 0) if num_graphs is None else (index < 0) | (index >= num_graphs)
        node = int(wrong.nonzero()[0])
        known = "" if num_graphs is None else f" and below dim_size={num_graphs}"
        raise wrong_ids(f"{{ids}}[{node}] is {int(index[node])}; graph ids must be at least 0{known}.")
    # bincount would otherwise try to allocate whatever a corrupt id asks for.
    if num_graphs is None and highest >= _MOST_GRAPHS:
        node = int(index.argmax())
        raise wrong_ids(f"{{ids}}[{node}] is {int(index[node])}; that many graphs do not fit. Pass ids 0..B-1.")
    return index


def checked_ptr(ptr: Tensor, num_nodes: int, num_graphs: int | None) -> Tensor:
    """Offsets as int64; raises unless they rise from 0 to the number of nodes."""
    if not isinstance(ptr, Tensor) or ptr.dtype not in (torch.int64, torch.int32):
        found = ptr.dtype if isinstance(ptr, Tensor) else type(ptr).__name__
        raise ValueError(f"ptr is {found}; pass an integer tensor of offsets (torch.long).")
    if ptr.dim() != 1 or ptr.numel() == 0:
        raise ValueError(f"ptr has shape {tuple(ptr.shape)}; expected (num_graphs + 1,).")
    ptr = ptr.long()
    if int(ptr[0]) != 0:
        raise ValueError(f"ptr[0] is {int(ptr[0])}; offsets start at 0.")
    if bool((ptr.diff() < 0).any()):
        place = int((ptr.diff() < 0).nonzero()[0])
        raise ValueError(
            f"ptr falls from {int(ptr[place])} to {int(ptr[place + 1])} at position {place + 1}; "
            "offsets never decrease."
        )
    if int(ptr[-1]) != num_nodes:
        raise ValueError(
            f"ptr[-1] is {int(ptr[-1])}, but there are {num_nodes} nodes; the last offset is their number."
        )
    if num_graphs is not None and num_graphs != ptr.numel() - 1:
        raise ValueError(f"dim_size is {num_graphs}, but ptr describes {ptr.numel() - 1} graphs.")
    return ptr


def _check_agreement(index: Tensor, ptr: Tensor) -> None:
    expected = torch.arange(ptr.numel() - 1, device=ptr.device).repeat_interleave(ptr.diff())
    wrong = index.to(ptr.device) != expected
    if bool(wrong.any()):
        node = int(wrong.nonzero()[0])
        raise wrong_ids(
            f"{{ids}} and ptr disagree: {{ids}}[{node}] is {int(index[node])}, ptr puts node {node} into graph "
            f"{int(expected[node])}. Pass one of them, or make them agree."
        )


def _check_totals(masses: Tensor, graph: Tensor, count: int) -> None:
    total = masses.detach().new_zeros(count).index_add(0, graph, masses.detach())
    weightless = (total <= 0) & (torch.bincount(graph, minlength=count) > 0)
    if bool(weightless.any()):
        raise ValueError(
            f"All masses of graph {int(weightless.nonzero()[0])} are zero. Give at least one of its nodes a positive "
            "mass, or leave the graph's nodes out to pool it as an empty graph."
        )
    endless = ~total.isfinite()
    if bool(endless.any()):
        raise ValueError(
            f"The masses of graph {int(endless.nonzero()[0])} sum to more than {total.dtype} holds. Divide them by their largest."
        )


def _check_masses(masses: Tensor, num_nodes: int) -> None:
    if masses.shape != (num_nodes,):
        raise ValueError(f"masses has shape {tuple(masses.shape)}; expected ({num_nodes},), one mass per node.")
    finite = masses.detach().isfinite()
    if not bool(finite.all()):
        node = int((~finite).nonzero()[0])
        raise ValueError(
            f"{int((~finite).sum())} masses are not finite (first: node {node}, {float(masses[node])}). "
            "Pass finite values >= 0."
        )
    if bool((masses.detach() < 0).any()):
        wrong = masses.detach() < 0
        node = int(wrong.nonzero()[0])
        raise ValueError(
            f"{int(wrong.sum())} masses are negative (first: node {node}, {float(masses[node]):g}). "
            "Pass values >= 0, or masses=None to give every node of a graph the same mass."
        )


def require_like(value: Tensor, nodes: Tensor, name: str) -> None:
    """Raises unless ``value`` has the dtype and the device of the nodes."""
    if value.dtype != nodes.dtype:
        raise TypeError(f"{name} is {value.dtype}, nodes are {nodes.dtype}; pass {name}.to(nodes.dtype).")
    if value.device != nodes.device:
        raise ValueError(f"{name} is on {value.device}, nodes are on {nodes.device}; move one of them.")
