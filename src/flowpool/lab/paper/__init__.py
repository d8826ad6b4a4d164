"""The paper's figures and experiments, computed: one small module each, all seeded.

:data:`FIGURES` names them, :func:`make_figures` computes and writes any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flowpool.lab.paper import (
    circle,
    conditioning,
    coupling,
    flow,
    hessian,
    invariance,
    measure,
    mutag,
    sinkformer,
    style,
    vanishing,
)
from flowpool.lab.paper.exhibit import Exhibit, Progress, Written, write

__all__ = ["FIGURES", "Exhibit", "Progress", "Written", "make_figures"]

FIGURES: Mapping[str, Callable[[Progress], Exhibit]] = {
    "measure": measure.make,
    "flow": flow.make,
    "conditioning": conditioning.make,
    "hessian": hessian.make,
    "coupling": coupling.make,
    "vanishing": vanishing.make,
    "circle": circle.make,
    "invariance": invariance.make,
    "mutag": mutag.make,
    "sinkformer": sinkformer.make,
}


def make_figures(
    names: Sequence[str], out: str | Path, progress: Callable[[str, float], None] | None = None
) -> list[Written]:
    """Computes experiments and writes their pictures, data and captions.

    Args:
        names: of :data:`FIGURES`; none given means all, in the order of the paper.
        out: folder; made if it is not there.
        progress: told the name of the experiment at work and the share of it that is done.
    """
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise ValueError(f"There is no figure {unknown[0]!r}; the figures are {', '.join(FIGURES)}.")
    tell = progress or (lambda name, share: None)
    results = []
    for name in dict.fromkeys(names or FIGURES):
        begun, spent = time.perf_counter(), time.process_time()
        tell(name, 0.0)
        with style.applied():
            exhibit = FIGURES[name](lambda share, name=name: tell(name, share))  # type: ignore[misc]
            files = write(exhibit, name, Path(out))
        tell(name, 1.0)
        took = time.perf_counter() - begun, time.process_time() - spent
        results.append(Written(name, exhibit.caption, exhibit.numbers, tuple(files), *took))
    return results
