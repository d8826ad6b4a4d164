"""The table of ``flowpool bench``: forward, backward and memory of FlowPool and its peers, and how time grows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from flowpool import flow_pool
from flowpool.lab.datasets import DatasetNotFoundError
from flowpool.lab.datasets.catalog import data_folder
from flowpool.lab.speed.cases import GRAPH_CASES, Case, graph_case, large_case
from flowpool.lab.speed.memory import peak_megabytes
from flowpool.lab.speed.ott import time_ott
from flowpool.lab.speed.peers import BASE, Peer, flow_peer, layer_peers
from flowpool.lab.speed.turns import Times, in_turns, passes, shortest

EPSILONS = (1.0, 0.3, 0.1)
LARGE = (100_000, 1_000_000)


@dataclass(frozen=True)
class Measurement:
    """One line of the table. Times are in milliseconds, the best of many."""

    case: str
    method: str
    epsilon: float | None
    forward: float
    backward: float
    ratio: float | None  # (forward + backward) / that of GraphMultisetTransformer in the same run
    converged: float | None  # share of graphs that are stationary
    megabytes: float | None


def run_bench(data: str | None = None, large: bool = True, ott_steps: int = 100) -> Iterator[Measurement]:
    """Measurements one by one, as they are made. Cases whose dataset is not on this machine are left out."""
    if ott_steps < 1:
        raise ValueError(f"{ott_steps} steps of the paper's scheme; pass at least 1.")
    data_folder(data)  # raises if it is given and does not exist
    for name, width, num_points in GRAPH_CASES:
        try:
            case = graph_case(name, width, num_points, data=data)
        except DatasetNotFoundError:
            continue
        yield from _graphs(case)
        if name == "MUTAG":
            yield from _ott(case, ott_steps)
    for size in LARGE if large else ():
        yield from _large(large_case(size))
    yield from _growth()


def _graphs(case: Case) -> Iterator[Measurement]:
    peers: dict[tuple[str, float | None], Peer] = {
        ("flow, compiled", epsilon): flow_peer(case, "compiled", epsilon) for epsilon in EPSILONS
    }
    peers |= {(name, None): layer for name, layer in layer_peers(case).items()}
    taken = in_turns({name: _passes(peer, case) for name, peer in peers.items()}, 2, float(len(peers)))
    base = sum(shortest(taken[BASE, None]))
    # The torch engine takes long for wide features on a CPU: one run tells enough.
    slow = ("flow, torch", EPSILONS[-1])
    taken |= in_turns({slow: _passes(flow_peer(case, "torch", EPSILONS[-1]), case)}, 1)
    for (name, epsilon), times in taken.items():
        share = used = None
        if name == "flow, compiled" and epsilon is not None:
            share = _converged(case, "compiled", epsilon)
            used = peak_megabytes(_work, case, "compiled", epsilon)
        yield _line(case, name, epsilon, shortest(times), base, share, used)


def _large(case: Case) -> Iterator[Measurement]:
    small = len(case.nodes) <= 200_000
    work: dict[float | None, Callable[[], Times]] = {
        epsilon: _passes(flow_peer(case, "compiled", epsilon), case) for epsilon in EPSILONS
    }
    if small:
        work[None] = _passes(layer_peers(case)[BASE], case)
    taken = in_turns(work, 1)
    base = sum(shortest(taken.pop(None))) if small else None
    for epsilon, times in taken.items():
        share = _converged(case, "compiled", epsilon or 0.0) if small else None
        used = peak_megabytes(_work, case, "compiled", epsilon) if epsilon == EPSILONS[-1] else None
        yield _line(case, "flow, compiled", epsilon, shortest(times), base, share, used)


def _ott(case: Case, steps: int) -> Iterator[Measurement]:
    try:
        run = time_ott(case, 0.1, steps)
    except ImportError:
        return
    yield Measurement(
        case.name, f"paper's scheme on OTT, {steps} steps", 0.1, 1e3 * run.forward, 1e3 * run.backward, None,
        run.stationary, None,
    )  # fmt: skip


def _growth() -> Iterator[Measurement]:
    """One thing at a time doubled, from 32 clouds of 32 nodes with d=16 and M=8."""
    plain = {"count": 32, "size": 32, "width": 16, "num_points": 8}
    for name, values in (
        ("count", (8, 32, 128)),
        ("size", (32, 128, 512)),
        ("width", (4, 16, 64)),
        ("num_points", (4, 8, 16)),
    ):
        for value in values:
            case = _random_case(**{**plain, name: value})
            taken = in_turns({"": _passes(flow_peer(case, "compiled", 0.1), case)}, 2, 1.0)[""]
            share = _converged(case, "compiled", 0.1)
            yield _line(case, f"flow, compiled, {name}={value}", 0.1, shortest(taken), None, share, None)


def _random_case(count: int, size: int, width: int, num_points: int) -> Case:
    nodes = torch.randn(count * size, width, generator=torch.Generator().manual_seed(0))
    return Case("growth", nodes, torch.arange(count).repeat_interleave(size), count, num_points)


def _passes(peer: Peer, case: Case) -> Callable[[], Times]:
    """Forward and backward of a peer, on fresh nodes each time."""
    return passes(lambda: peer(case.nodes.detach().requires_grad_()))


def _line(
    case: Case,
    method: str,
    epsilon: float | None,
    times: Times,
    base: float | None,
    share: float | None,
    used: float | None,
) -> Measurement:
    ratio = None if base is None else sum(times) / base
    forward, backward = (1e3 * seconds for seconds in times)
    return Measurement(case.name, method, epsilon, forward, backward, ratio, share, used)


def _converged(case: Case, engine: Any, epsilon: float) -> float:
    reference = torch.randn(case.num_points, case.width, generator=torch.Generator().manual_seed(0))
    pooled = flow_pool(
        case.nodes, case.batch, reference=reference, engine=engine, epsilon=epsilon, dim_size=case.num_graphs
    )
    return float(pooled.converged.double().mean())


def _work(case: Case, engine: Any, epsilon: float) -> Callable[[], None]:
    """A forward and a backward pass, after a smaller one that loads the kernels."""
    count = min(len(case.nodes), 10_000)  # enough to be read in blocks
    few = Case(case.name, torch.randn(count, case.width), torch.zeros(count, dtype=torch.long), 1, case.num_points)

    def work(on: Case) -> Callable[[], None]:
        nodes = on.nodes.clone().requires_grad_()
        return lambda: flow_peer(on, engine, epsilon)(nodes).sum().backward()

    work(few)()
    return work(case)


def write_rows(rows: Sequence[Any], path: Path) -> Path:
    """The rows, which are dataclasses, as a CSV file, whose folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    return path


def write_bench(rows: list[Measurement], out: Path) -> list[Path]:
    """``bench.csv`` and ``bench.png`` in the folder ``out``."""
    table = write_rows(rows, out / "bench.csv")
    picture = out / "bench.png"
    _draw(rows, picture)
    return [table, picture]


def _draw(rows: list[Measurement], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = [name for name, _, _ in GRAPH_CASES if any(row.case == name for row in rows)]
    figure = Figure(figsize=(4.6 * max(1, len(cases)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for place, name in enumerate(cases):
        axes = figure.add_subplot(1, len(cases), place + 1)
        own = [row for row in rows if row.case == name]
        labels = [row.method + (f", ε={row.epsilon:g}" if row.epsilon else "") for row in own]
        colours = ["#0072B2" if row.method.startswith("flow") else "#999999" for row in own]
        axes.barh(labels, [row.forward + row.backward for row in own], color=colours)
        axes.set_xscale("log")
        axes.set_xlabel("forward + backward, ms")
        axes.set_title(name)
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=7)
    figure.savefig(path, dpi=150)
