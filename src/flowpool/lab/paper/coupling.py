r"""How the plan answers to the cost, without, with small and with larger regularisation (section 8 of the paper).

Two points and three nodes: the plans with given marginals form a polygon, with :math:`P_{11}, P_{12}` as coordinates,
so that the paper's sketch of the polytope U(a, b) can be drawn as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flowpool.core import sinkhorn
from flowpool.lab.paper import style
from flowpool.lab.paper.exhibit import Exhibit, Progress

ROWS = (0.5, 0.5)  # a
COLUMNS = (0.35, 0.35, 0.3)  # b
COST = ((0.50, 0.40, 0.20), (0.10, 0.30, 0.60))  # C; at C_11 near 0.20 another vertex becomes optimal
SMALL, LARGER = 0.01, 0.1
NUDGE = 0.02  # C_11 goes from this below the tie to this above it
_SHADES = {0.0: (style.BLACK, "-"), SMALL: (style.PURPLE, "--"), LARGER: (style.GREEN, "-.")}


@dataclass(frozen=True)
class Couplings:
    """Plans as the entry C_11 of the cost changes.

    Attributes:
        cost: values of C_11, ``(K,)``.
        entry: P_11 at each of them for each epsilon; epsilon 0 is unregularised, ``(K,)``.
        before, after: plans just below and above the tie, by epsilon, ``(2, 3)``.
        levels: a range of epsilon, ``(E,)``.
        moved: how far the plan goes between before and after, ``|P' - P|_1``, ``(E,)``.
        moved_exact: the same without regularisation.
    """

    cost: Tensor
    entry: dict[float, Tensor]
    before: dict[float, Tensor]
    after: dict[float, Tensor]
    levels: Tensor
    moved: Tensor
    moved_exact: float


def plans(costs: Tensor, rows: Tensor, columns: Tensor, epsilon: float | Tensor) -> Tensor:
    """Optimal plans of a batch of costs ``(K, M, N)``; epsilon 0 means unregularised."""
    count = len(costs)
    if isinstance(epsilon, float) and epsilon == 0:
        return torch.stack([sinkhorn.exact_transport(cost, rows, columns)[0] for cost in costs])
    levels = torch.as_tensor(epsilon, dtype=costs.dtype).expand(count)
    return sinkhorn.solve(costs, rows.expand(count, -1), columns.expand(count, -1), levels).plan


def with_entry(values: Tensor) -> Tensor:
    """The cost with C_11 replaced by each of the values, ``(K, 2, 3)``."""
    costs = torch.tensor(COST, dtype=torch.float64).repeat(len(values), 1, 1)
    costs[:, 0, 0] = values
    return costs


def ties(cost: Tensor, rows: Tensor, columns: Tensor) -> list[float]:
    """Values of C_11, between grid points, at which the unregularised plan jumps."""
    entry = plans(with_entry(cost), rows, columns, 0.0)[:, 0, 0]
    return [float((cost[k] + cost[k + 1]) / 2) for k in (entry.diff().abs() > 1e-9).nonzero().flatten().tolist()]


def compute(num_values: int = 241, num_levels: int = 41) -> Couplings:
    rows, columns = torch.tensor(ROWS, dtype=torch.float64), torch.tensor(COLUMNS, dtype=torch.float64)
    cost = torch.linspace(-0.6, 0.6, num_values, dtype=torch.float64)
    entry = {level: plans(with_entry(cost), rows, columns, level)[:, 0, 0] for level in _SHADES}
    tie = ties(cost, rows, columns)[-1]
    ends = with_entry(torch.tensor([tie - NUDGE, tie + NUDGE], dtype=torch.float64))
    pairs = {level: plans(ends, rows, columns, level) for level in _SHADES}
    levels = torch.logspace(-2.5, 1, num_levels, dtype=torch.float64)
    low, high = (plans(end.expand(num_levels, 2, 3), rows, columns, levels) for end in ends)
    moved = (high - low).abs().sum((-1, -2))
    exact = float((pairs[0.0][1] - pairs[0.0][0]).abs().sum())
    return Couplings(
        cost, entry, {k: v[0] for k, v in pairs.items()}, {k: v[1] for k, v in pairs.items()}, levels, moved, exact
    )


def polygon() -> Tensor:
    """Corners of U(a, b) in the coordinates P_11, P_12, in order, ``(K, 2)``."""
    first, second, third = COLUMNS
    lines = [(1.0, 0.0, 0.0), (1.0, 0.0, first), (0.0, 1.0, 0.0), (0.0, 1.0, second), (1.0, 1.0, ROWS[0])]
    lines.append((1.0, 1.0, ROWS[0] - third))
    corners = []
    for place, one in enumerate(lines):
        for other in lines[place + 1 :]:
            matrix = torch.tensor([one[:2], other[:2]], dtype=torch.float64)
            if abs(float(torch.linalg.det(matrix))) < 1e-12:
                continue
            x, y = torch.linalg.solve(matrix, torch.tensor([one[2], other[2]], dtype=torch.float64)).tolist()
            rest = ROWS[0] - x - y
            if all(-1e-9 <= value <= most + 1e-9 for value, most in ((x, first), (y, second), (rest, third))):
                corners.append((x, y))
    found: Tensor = torch.tensor(corners, dtype=torch.float64).unique(dim=0)
    middle = found - found.mean(0)
    return found[torch.atan2(middle[:, 1], middle[:, 0]).argsort()]


def _name(level: float) -> str:
    return "no regularisation" if level == 0 else rf"$\varepsilon$ = {level:g}"


def draw(record: Couplings) -> Figure:
    figure, axes = style.canvas(3, width=10.5, height=3.6)
    _draw_entry(axes[0, 0], record)
    _draw_polygon(axes[0, 1], record)
    _draw_moved(axes[0, 2], record)
    return figure


def _draw_entry(axes: Axes, record: Couplings) -> None:
    for level, (colour, line) in _SHADES.items():
        axes.plot(record.cost, record.entry[level], color=colour, ls=line, label=_name(level))
    axes.set_xlabel("cost $C_{11}$")
    axes.set_ylabel("plan $P_{11}$")
    axes.set_title("one entry of the plan against its cost")
    axes.set_ylim(-0.02, 0.5)
    axes.legend(loc="upper right")


def _draw_polygon(axes: Axes, record: Couplings) -> None:
    corners = polygon()
    closed = torch.cat([corners, corners[:1]])
    axes.fill(*corners.T, color=style.SKY, alpha=0.25, lw=0)
    axes.plot(*closed.T, color=style.GREY, lw=1.0)
    for level, (colour, _) in _SHADES.items():
        start, end = record.before[level][0, :2], record.after[level][0, :2]
        # The three moves lie almost on one line: the longest one is the broadest and lies below.
        width = 4.5 if level == 0 else 1.6
        axes.plot(*torch.stack([start, end]).T, color=colour, lw=width, alpha=0.35 if level == 0 else 1.0)
        axes.plot(*start, "o", color=colour, ms=4 + width, zorder=4)
        axes.plot(*end, "s", color=colour, ms=4 + width, mfc="white", zorder=4)
    axes.text(0.19, 0.24, "U(a, b)", ha="center", color=style.GREY)
    axes.plot([], [], "o", color=style.GREY, label="$P^*(C)$")
    axes.plot([], [], "s", color=style.GREY, mfc="white", label="$P^*(C')$")
    axes.legend(loc="upper right")
    axes.set_xlabel("$P_{11}$")
    axes.set_ylabel("$P_{12}$")
    axes.set_title("the plan moves in the polygon U(a, b)")
    axes.margins(0.12)
    axes.grid(False)


def _draw_moved(axes: Axes, record: Couplings) -> None:
    axes.plot(record.levels, record.moved, color=style.BLUE, label="regularised")
    axes.axhline(record.moved_exact, color=style.BLACK, ls="--", lw=1.2, label="no regularisation")
    for level in (SMALL, LARGER):
        colour, _ = _SHADES[level]
        axes.plot(level, float((record.after[level] - record.before[level]).abs().sum()), "o", color=colour)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(r"entropic regularisation $\varepsilon$")
    axes.set_ylabel(r"$|P^*(C') - P^*(C)|_1$")
    axes.set_title(f"its move when $C_{{11}}$ grows by {2 * NUDGE:g}")
    axes.legend(loc="lower left")


def steepest(record: Couplings, level: float) -> float:
    """Largest slope of P_11 against C_11 on the grid."""
    return float((record.entry[level].diff() / record.cost.diff()).abs().max())


def make(progress: Progress) -> Exhibit:
    record = compute()
    progress(0.7)
    numbers = {"moved_exact": record.moved_exact}
    for name, level in (("small", SMALL), ("larger", LARGER)):
        numbers |= {
            f"moved_{name}": float((record.after[level] - record.before[level]).abs().sum()),
            f"slope_{name}": steepest(record, level),
        }
    caption = (
        f"The plan against the cost, for 2 points and 3 nodes. When C_11 grows by {2 * NUDGE:g} across a tie, the plan "
        "moves "
        f"by |P' - P|_1 = {record.moved_exact:.2f} without regularisation (it jumps to another vertex), by "
        f"{numbers['moved_small']:.2f} at epsilon = {SMALL} and by {numbers['moved_larger']:.3f} at epsilon = "
        f"{LARGER}. The "
        f"steepest slope of P_11 against C_11 is infinite, {numbers['slope_small']:.2f} and "
        f"{numbers['slope_larger']:.2f}."
    )
    curves = {"c_11": record.cost.tolist()} | {
        f"p_11_epsilon_{level:g}": record.entry[level].tolist() for level in _SHADES
    }
    moves = {"epsilon": record.levels.tolist(), "moved": record.moved.tolist()}
    return Exhibit(draw(record), caption, numbers, {"entry": curves, "moves": moves})
