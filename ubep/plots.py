"""Pictures. Needs the extra `ubep[plot]`; without it the callers say so and go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ubep.errors import UbepError
from ubep.protocol.order import send_steps
from ubep.protocol.plan import Plan

TIER_COLOURS = ("#fbb4ae", "#b3cde3", "#ccebc5", "#decbe4", "#fed9a6", "#ffffcc", "#e5d8bd", "#fddaec")
INSTALL_HINT = "pictures need matplotlib: pip install 'ubep[plot]'"


def _figure(columns: int, width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UbepError(INSTALL_HINT) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def traffic_picture(
    path: Path, sent: Sequence[Sequence[int]], expert_rows: dict[int, int], title: str
) -> None:
    """Who sent how many rows to whom, and how many rows each expert got.

    sent[src][dst]: rows by (token, expert).
    """
    ranks = len(sent)
    figure, (matrix, bars) = _figure(2, 11, 4.5)
    image = matrix.imshow(sent, cmap="viridis")
    matrix.set(xlabel="to rank", ylabel="from rank", title="rows sent (token, expert)")
    matrix.set_xticks(range(ranks))
    matrix.set_yticks(range(ranks))
    if ranks <= 16:
        middle = (image.norm.vmin + image.norm.vmax) / 2
        for src, row in enumerate(sent):
            for dst, count in enumerate(row):
                colour = "white" if count < middle else "black"
                matrix.text(dst, src, str(count), ha="center", va="center", color=colour)
    figure.colorbar(image, ax=matrix)
    experts = sorted(expert_rows)
    bars.bar(experts, [expert_rows[e] for e in experts], color="tab:blue")
    mean = sum(expert_rows.values()) / max(1, len(experts))
    bars.axhline(mean, color="tab:red", linewidth=1, label=f"mean {mean:.0f}")
    bars.set(xlabel="expert", ylabel="rows received", title="load of the experts")
    bars.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def order_picture(path: Path, plan: Plan) -> None:
    """The send order: ranks down, steps across, coloured by tier, the destination in each cell."""
    count = len(send_steps(plan.topology, 0, plan.order))
    figure, (grid,) = _figure(1, max(5, 0.4 * count + 2), max(3, 0.35 * plan.world_size + 1))
    from matplotlib.colors import ListedColormap

    steps = [send_steps(plan.topology, rank, plan.order) for rank in range(plan.world_size)]
    names = plan.topology.tier_names
    tiers = [
        [float("nan") if dst < 0 else plan.topology.tier(rank, dst) for dst in row]
        for rank, row in enumerate(steps)
    ]
    colours = ListedColormap(TIER_COLOURS[: len(names)])
    image = grid.imshow(tiers, cmap=colours, vmin=-0.5, vmax=len(names) - 0.5, aspect="auto")
    if count <= 48:
        for rank, row in enumerate(steps):
            for step, dst in enumerate(row):
                if dst >= 0:
                    grid.text(step, rank, str(dst), ha="center", va="center", fontsize=8)
    grid.set(xlabel="step", ylabel="rank", title=f"order {plan.order}: destination in each step, by tier")
    bar = figure.colorbar(image, ax=grid, ticks=range(len(names)))
    bar.ax.set_yticklabels(names)
    figure.savefig(path, dpi=120)
