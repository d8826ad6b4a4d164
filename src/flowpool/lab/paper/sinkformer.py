r"""Sinkformer blocks with tied weights are Euler steps of one flow (Sander et al., 2022; section 2 of the paper).

L blocks :math:`Y \leftarrow Y + \tfrac1L A(Y)\, Y W_V` with doubly stochastic attention approach the flow
:math:`\dot Y = A(Y)\, Y W_V` at time one as 1/L. With :math:`W_V = -W_Q W_K^\top / \sqrt{D}`, symmetric, it is a Wasserstein
gradient flow, which contracts here as FlowPool's does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flowpool.lab.paper import style
from flowpool.lab.paper.exhibit import Exhibit, Progress, Table
from flowpool.lab.pools.sinkformer import SinkformerPool

NUM_NODES = 24
BLOCKS = (1, 2, 4, 8, 16, 32, 64)
FINEST = 512  # blocks that stand for the flow itself
_SHOWN = (3, 64)  # numbers of blocks whose paths are drawn


@dataclass(frozen=True)
class Limit:
    """Attributes:
    paths: nodes after each block, by number of blocks, ``(L + 1, N, 2)``.
    errors: largest distance from the flow at time one, for each of :data:`BLOCKS`, relative to the way.
    """

    paths: dict[int, Tensor]
    errors: list[float]


def tied_pool() -> SinkformerPool:
    """A pool whose blocks follow a gradient flow."""
    pool = SinkformerPool(2, 1).double()
    with torch.no_grad():
        pool.query.weight.copy_(torch.tensor([[1.2, 0.4], [0.4, 0.9]]))
        pool.key.weight.copy_(torch.eye(2))
        pool.value.weight.copy_(-pool.key.weight.T @ pool.query.weight / 2**0.5)
    return pool


@torch.no_grad()
def compute(seed: int = 0, progress: Progress = lambda _: None) -> Limit:
    nodes = torch.randn(NUM_NODES, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pool, paths, errors = tied_pool(), {}, []
    for done, count in enumerate((FINEST, *BLOCKS, *_SHOWN)):
        paths[count] = torch.stack(list(pool.walk(nodes[None], torch.ones(1, NUM_NODES, dtype=torch.bool), count)))[
            :, 0
        ]
        progress((done + 1) / (3 + len(BLOCKS)))
    way = (paths[FINEST][-1] - nodes).norm(dim=1).max()
    for count in BLOCKS:
        errors.append(float((paths[count][-1] - paths[FINEST][-1]).norm(dim=1).max() / way))
    return Limit({count: paths[count] for count in (*_SHOWN, FINEST)}, errors)


def draw(record: Limit) -> Figure:
    figure, axes = style.canvas(2, width=9.0, height=3.8)
    panel, other = axes[0]
    style.plane(panel, "the nodes on their way")
    for count, colour, line in zip(_SHOWN, (style.ORANGE, style.BLUE), ("--", "-"), strict=True):
        path = record.paths[count]
        panel.plot(path[:, :, 0], path[:, :, 1], color=colour, ls=line, lw=1.0)
        style.scatter(panel, path[-1], color=colour, s=16, zorder=3, label=f"after {count} blocks")
    style.scatter(panel, record.paths[FINEST][0], color=style.GREY, s=16, marker="x", label="before")
    panel.legend(frameon=False)
    other.loglog(BLOCKS, record.errors, "o-", color=style.BLUE, label="Sinkformer blocks")
    other.loglog(
        BLOCKS, [record.errors[-1] * BLOCKS[-1] / count for count in BLOCKS], color=style.GREY, ls=":", label="1/L"
    )
    other.set_xlabel("blocks with tied weights, L")
    other.set_ylabel("distance from the flow at time one, relative")
    other.legend(frameon=False)
    return figure


def make(progress: Progress) -> Exhibit:
    record = compute(progress=progress)
    numbers = {f"error_{count}": error for count, error in zip(BLOCKS, record.errors, strict=True)}
    told = ", ".join(f"{error:.1g} ({count})" for count, error in zip(BLOCKS, record.errors, strict=True))
    caption = (
        f"Sinkformer blocks with tied weights on {NUM_NODES} nodes in the plane: L blocks are L Euler steps of one Wasserstein "
        f"gradient flow over unit time. Largest distance of a node from where {FINEST} blocks take it, relative to the longest "
        f"way, by number of blocks: {told}. It falls as 1/L."
    )
    table: Table = {"blocks": list(BLOCKS), "error": record.errors}
    return Exhibit(draw(record), caption, numbers, {"": table})
