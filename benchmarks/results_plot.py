"""The picture of the README, drawn from tables of docs/results.md that compare one method with others.

    python benchmarks/results_plot.py [--tables 0,1]

A dot is what a method has more or less than flowpool's, a line its error; dots beyond the edge stand at it. The numbers of
the tables count from 0; without them the script lists what there is.
"""

import argparse
import re
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
OWN = {"flow-readout": "FlowReadout", "flow-vectorizer": "FlowVectorizer"}
COLOURS = ["#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777", "#000000", "#882255"]
CELL = re.compile(r"[\d.]+ \(([+-]?[\d.]+), ([\d.]+)\)")
EDGE = 12.0  # points of accuracy

Gaps = dict[tuple[str, str], tuple[float, float]]  # by method and dataset


def tables(text: str) -> list[tuple[str, Gaps]]:
    """Our method, and what the others have more, with the errors."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip(" *`") for cell in line.strip()[1:-1].split("|")] for line in block.splitlines()]
        names = [row[0] for row in rows]
        upright = any(name in OWN for name in names)  # methods are rows
        own = next((name for name in (names if upright else rows[0]) if name in OWN), None)
        gaps: Gaps = {}
        for row in rows[2:]:
            for head, cell in zip(rows[0][1:], row[1:], strict=False):
                if match := CELL.search(cell):
                    method, dataset = (row[0], head) if upright else (head, row[0])
                    gaps[method, dataset.split(",")[0]] = float(match[1]), float(match[2])
        if own and gaps:
            found.append((own, gaps))
    return found


def draw(chosen: list[tuple[str, Gaps]]) -> Figure:
    figure = Figure(figsize=(5.4 * len(chosen), 5.2), layout="constrained")
    for axes, (own, gaps) in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
        methods, datasets = (list(dict.fromkeys(key[place] for key in gaps)) for place in (0, 1))
        for place, method in enumerate(methods):
            shown = [(datasets.index(dataset), *gap) for (other, dataset), gap in gaps.items() if other == method]
            heights = [row + 0.1 * (place - (len(methods) - 1) / 2) for row, _, _ in shown]
            values = [max(-EDGE, min(EDGE, gap)) for _, gap, _ in shown]
            errors = [error if abs(gap) < EDGE else 0.0 for _, gap, error in shown]
            axes.errorbar(values, heights, xerr=errors, fmt="o", ms=5, color=COLOURS[place], label=method)
        axes.axvline(0, color="#0072B2", lw=2)
        axes.set_yticks(range(len(datasets)), datasets, fontsize=12)
        axes.set(xlim=(-EDGE - 0.5, 8), ylim=(len(datasets) - 0.5, -0.5))
        axes.set_xlabel(f"points of accuracy beyond {OWN[own]}", fontsize=12)
        axes.legend(fontsize=10, loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=3, frameon=False)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", help="numbers, separated by commas")
    asked = parser.parse_args()
    there = tables((DOCS / "results.md").read_text(encoding="utf-8"))
    if asked.tables is None:
        for number, (own, gaps) in enumerate(there):
            print(number, own, *dict.fromkeys(f"{method};" for method, _ in gaps))
    else:
        draw([there[int(number)] for number in asked.tables.split(",")]).savefig(
            DOCS / "figures" / "accuracy.png", dpi=110
        )
