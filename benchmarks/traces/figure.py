"""A picture of replays: hit rates and bytes missed by budget."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from traces.simulate import Replay

from epoch_moe.figure import BLUE, GREY, LIGHT, ORANGE, PlanFigure
from epoch_moe.outputs import write_output

LINES = {
    "retention": (BLUE, "-", "o"),
    "lru": (ORANGE, "--", "s"),
    "plain_lru": (ORANGE, ":", "x"),
    "lfu": ("#009E73", "--", "^"),
    "interval": ("#CC79A7", "-.", "D"),
    "static": (GREY, ":", "v"),
    "belady": ("black", "--", None),
    "belady_bound": ("black", "-", None),
}


def draw_replays(replays: Sequence[Replay], num_experts: int) -> PlanFigure:
    """Hit rate, and bytes missed per forward, by budget: one line for each policy.

    Args:
        replays: of one trace (`traces.simulate.simulate`).
        num_experts: of a layer.
    """
    if not replays:
        raise ValueError("there is no replay to draw")
    figure = PlanFigure(figsize=(11, 4.2), dpi=100, layout="constrained")
    hits, misses = figure.subplots(1, 2)
    for name in dict.fromkeys(replay.policy for replay in replays):
        mine = sorted((replay for replay in replays if replay.policy == name), key=lambda replay: replay.slots)
        colour, style, marker = LINES[name]
        budgets = [100 * replay.slots / num_experts for replay in mine]
        how = {"color": colour, "linestyle": style, "marker": marker, "markersize": 4, "label": name.replace("_", " ")}
        hits.plot(budgets, [100 * replay.hit_rate for replay in mine], **how)
        missed = [(replay.loaded_bytes + replay.bypass_bytes) / max(replay.forwards, 1) / 1e6 for replay in mine]
        misses.plot(budgets, missed, **how)
    hits.set_title("Experts found in fast memory")
    hits.set_ylabel("hit rate (%)")
    hits.set_ylim(0, 105)
    misses.set_title("Experts not found there")
    misses.set_ylabel("MB per forward")
    misses.set_ylim(bottom=0)
    for axes in (hits, misses):
        axes.set_xlabel("budget (% of each layer's experts)")
        axes.set_xlim(0, 102)
        axes.grid(color=LIGHT, linewidth=0.8)
    hits.legend(loc="lower right", frameon=False)
    return figure


def check_format(path: Path) -> None:
    """Refuse a picture's file that matplotlib cannot write, before the work that it would show.

    Raises:
        ValueError: an ending that is no format of matplotlib's (a name without ending becomes PNG).
    """
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ValueError(f"{path}: matplotlib does not write {path.suffix!r}; use one of {', '.join(sorted(formats))}")


def write_figure(path: Path, figure: Figure) -> None:
    """Write a picture as `epoch_moe.outputs.write_output` does; one whose name has no ending is a PNG."""
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix[1:].lower() or "png")
    write_output(path, data.getvalue())
