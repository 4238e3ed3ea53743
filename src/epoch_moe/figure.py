"""Pictures of a decode under a plan; needs matplotlib, so it is imported when somebody asks for it.

Shape suffixes: D forwards of a block, E experts, U experts shown.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from epoch_moe.plan.counters import Counters, Work

# Okabe and Ito's palette, and cividis: told apart with any colour vision, and in print.
BLUE, ORANGE, GREY, LIGHT = "#0072B2", "#D55E00", "#7F7F7F", "#E3E3E3"
COLOURS = "cividis_r"


class PlanFigure(Figure):
    """A figure that a notebook shows without pyplot, whose global state would keep every figure alive."""

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png")
        return data.getvalue()


def draw_plan(config: Any, counters: Counters, layer: int, block: int) -> PlanFigure:
    """A figure of three panels; the arguments and errors are those of `epoch_moe.report.plan_figure`."""
    history = list(counters.history)
    if not history:
        raise ValueError("no forward under a plan was counted: decode with plan=EpochConfig(...) to draw it")
    work = counters.read()
    layers = len(work.per_layer)
    if not -layers <= layer < layers:
        raise IndexError(f"layer={layer}: the model has {layers} MoE layers, 0 to {layers - 1}")
    # A block begins with its forward 0; the first may be missing where the history has forgotten it.
    starts = sorted({0, *(place for place, entry in enumerate(history) if entry["forward"] == 0)})
    if not -len(starts) <= block < len(starts):
        raise IndexError(f"block={block}: the history holds {len(starts)} blocks, 0 to {len(starts) - 1}")
    layer, block = layer % layers, block % len(starts)
    begin, end = starts[block], [*starts, len(history)][block + 1]

    figure = PlanFigure(figsize=(13, 4.2), dpi=100, layout="constrained")
    supports, shares, experts = figure.subplots(1, 3, width_ratios=(1, 1.3, 1.3))
    _draw_supports(supports, work, int(config.num_experts))
    _draw_shares(shares, history, starts)
    _draw_experts(experts, counters, layer, begin, end)
    experts.set_title(f"Experts of MoE layer {layer}, block {block}")
    return figure


def draw_frontier(about: Mapping[str, Any]) -> PlanFigure:
    """See `epoch_moe.report.frontier_figure`."""
    figure = PlanFigure(figsize=(7, 4.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    for per_layer, marker, label in ((False, "o", "one value for all layers"), (True, "s", "a value per layer")):
        fits = [setting["fit"] for setting in about["settings"] if setting["per_layer"] is per_layer]
        places = [fit["cost"] for fit in fits], [100 * fit["seen"] for fit in fits]
        axes.plot(*places, marker, color=GREY, markersize=6, label=f"proposing: {label}")
    for accepted, colour, label in ((True, BLUE, "passed"), (False, ORANGE, "failed")):
        tried = [setting["check"] for setting in about["settings"] if setting.get("accepted") is accepted]
        costs, seen, bounds = ([one[name] for one in tried] for name in ("cost", "seen", "bound"))
        height = [100 * (bound - share) for bound, share in zip(bounds, seen, strict=True)]
        error = [[0.0] * len(tried), height]
        places = costs, [100 * share for share in seen]
        axes.errorbar(*places, yerr=error, fmt="D", color=colour, capsize=4, label=f"deciding, to its bound: {label}")
    axes.axhline(100 * about["tolerance"], color=GREY, linestyle="--", linewidth=1.2, label="tolerance")
    axes.set_xlabel(f"{about['objective']}, plan / dense")
    axes.set_ylabel(f"{about['bound_on']} (%)")
    axes.set_title("Settings tried")
    axes.legend(fontsize="small")
    return figure


def _draw_supports(axes: Axes, work: Work, num_experts: int) -> None:
    sizes = [layer.support_size for layer in work.per_layer]
    axes.set(title="Support per layer", xlabel="MoE layer", ylabel="experts (mean over forwards)")
    axes.axhline(num_experts, color=GREY, linestyle="--", linewidth=1.2, label=f"all {num_experts} experts")
    axes.set(xlim=(-0.6, len(sizes) - 0.4), ylim=(0, num_experts * 1.25))
    axes.set_yticks([tick for tick in MaxNLocator(8, integer=True).tick_values(0, num_experts) if tick <= num_experts])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    if all(map(math.isnan, sizes)):
        _note(axes, "no row was restricted\nto a support")
    else:
        bars = axes.bar(range(len(sizes)), sizes, color=BLUE, width=0.7, label="support")
        if len(sizes) <= 8:
            axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.legend(loc="upper center", ncols=2, frameon=False)


def _draw_shares(axes: Axes, history: list[dict[str, int]], starts: list[int]) -> None:
    forwards = range(len(history))
    marker = "o" if len(history) <= 60 else None
    for name, colour, style in (("fresh", BLUE, "-"), ("live", ORANGE, "--")):
        shares = [100 * entry[name] / max(entry["rows"], 1) for entry in history]
        axes.plot(forwards, shares, style, color=colour, marker=marker, markersize=4, label=name)
    if len(starts) <= 40:
        for number, start in enumerate(starts):
            label = "first of a block" if number == 0 else None
            axes.axvline(start, color=GREY, linestyle=":", linewidth=1, zorder=0, label=label)
    axes.set(title="Rows per forward", xlabel="forward", ylabel="share of the forward's rows (%)")
    axes.set(ylim=(0, 125), yticks=range(0, 101, 20))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.legend(loc="upper center", ncols=3, frameon=False)


def _draw_experts(axes: Axes, counters: Counters, layer: int, begin: int, end: int) -> None:
    if counters.recorder is None:
        _note(axes, "not recorded:\ngenerate(..., record=True)")
        axes.set_axis_off()
        return
    axes.set(xlabel="forward of the block", ylabel="experts, most used at the bottom")
    pairs_DLE, support_DLE = counters.recorder.read()
    pairs_DE, support_DE = pairs_DLE[begin:end, layer], support_DLE[begin:end, layer]
    order_E = pairs_DE.sum(dim=0).argsort(descending=True, stable=True)
    shown_U = order_E[(pairs_DE > 0).any(dim=0)[order_E] | support_DE.any(dim=0)[order_E]]
    pairs_UD, support_UD = pairs_DE[:, shown_U].T, support_DE[:, shown_U].T
    place = {"origin": "lower", "aspect": "auto", "interpolation": "nearest"}
    axes.imshow(
        torch.where(support_UD, 0.0, float("nan")).numpy(), cmap=ListedColormap([LIGHT]), vmin=0, vmax=1, **place
    )
    shades = torch.where(pairs_UD > 0, pairs_UD.float(), float("nan")).numpy()
    image = axes.imshow(shades, cmap=COLOURS, vmin=1, vmax=max(int(pairs_DE.max()), 2), **place)
    bar = axes.figure.colorbar(image, ax=axes, label="rows computed by the expert")
    bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    ticks = MaxNLocator(8, integer=True, min_n_ticks=1).tick_values(0, max(len(shown_U) - 1, 1))
    axes.set_yticks([tick for tick in ticks if tick < len(shown_U)])
    if end - begin <= 60:
        for edge in range(1, end - begin):
            axes.axvline(edge - 0.5, color="white", linewidth=0.8)
    axes.set_ylim(-0.5, 1.14 * len(shown_U) - 0.5)  # room for the legend
    axes.legend(handles=[Patch(facecolor=LIGHT, label="in the support, unused")], loc="upper center", frameon=False)


def _note(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
