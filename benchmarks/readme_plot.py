"""The picture of the README, docs/figures/accuracy.png, drawn from the table of docs/readouts.md.

python benchmarks/readme_plot.py
"""

import re
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
SHOWN = {"FlowReadout": "#0072B2", "sum, mean, max": "#E69F00"}


def losses(text: str) -> tuple[list[str], dict[str, list[float]]]:
    """The tasks, and the losses of each pool."""
    block = re.search(r"^\| task, network .*\n(?:\|.*\n)+", text, re.MULTILINE)
    assert block is not None, "docs/readouts.md has no table of tasks"  # noqa: S101
    head, _, *rows = [[cell.strip(" *`") for cell in line.strip()[1:-1].split("|")] for line in block[0].splitlines()]
    return [row[0] for row in rows], {pool: [float(row[k]) for row in rows] for k, pool in enumerate(head) if k}


def draw(tasks: list[str], found: dict[str, list[float]]) -> Figure:
    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, (pool, colour) in enumerate(SHOWN.items()):
        more = [100 * (own / base - 1) for own, base in zip(found[pool], found["sum"], strict=True)]
        heights = [task + 0.36 * (place - 0.5) for task in range(len(tasks))]
        axes.barh(heights, more, 0.34, color=colour, label=pool)
    axes.axvline(0, color="black", lw=1.5)
    axes.set_yticks(range(len(tasks)), [task.rpartition(", ")[0] for task in tasks], fontsize=12)
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    axes.set_xlabel("validation loss, in % more or less than with a sum", fontsize=12)
    axes.legend(fontsize=12, loc="upper left", frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


if __name__ == "__main__":
    draw(*losses((DOCS / "readouts.md").read_text(encoding="utf-8"))).savefig(
        DOCS / "figures" / "accuracy.png", dpi=110
    )
