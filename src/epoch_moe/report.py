"""Counters as numbers, ratios, text and a picture: what a decode computed, and what a plan saved.

The FLOP formula (multiply-adds count as two, norms and activations not at all), summed over a decode:

* attention projections: ``forward_rows x layers x 2 H D (2 heads + 2 kv_heads)``
* attention itself: ``attention_pairs x layers x 4 D heads``
* dense MLP layers: ``forward_rows x dense_layers x 6 H I``
* router: ``rows x 2 H E``; routed experts: ``pairs x 6 H F``; shared experts: ``dense_rows x 6 H G``
* LM head: ``lm_head_rows x 2 H V``

with H hidden size, D head dimension, I dense inner size, E experts, F and G inner sizes of a routed and of the shared
expert, V vocabulary; `rows`, `pairs` and so on are the fields of `epoch_moe.plan.counters.Work`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from epoch_moe.checks import MOST, instance, whole, wrong
from epoch_moe.paired import paired_text
from epoch_moe.plan.counters import Counters, Work
from epoch_moe.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNTS = ("forwards", "rows", "pairs", "active_experts", "weight_bytes", "lm_head_rows", "flops")
"""The counts that a comparison shows, in order."""

_REGIME = ("experts_per_forward_and_layer", "support_size", "coverage")
_LABELS = {
    "accuracy": "right",
    "lm_head_rows": "LM head rows",
    "flops": "FLOPs",
    "experts_per_forward_and_layer": "experts per layer, fwd",
    "support_size": "support size",
    "coverage": "support coverage",
    "unpaid": "supports not kept",
}


def flops(config: Any, work: Work) -> int:
    """FLOPs of the whole model for ``work``, by the formula in this module's docstring.

    Args:
        config: a configuration of this package (`LLaDA2MoeConfig`, `LLaDAMoEConfig`).
        work: counters of a decode on a patched model.
    """
    instance("work", work, Work, "the numbers of a decode, out.counters.read()")
    if not callable(getattr(config, "sizes", None)):
        raise wrong("config", config, "a configuration of this package")
    sizes = config.sizes()
    hidden, layers = sizes.hidden, sizes.layers
    projections = 2 * hidden * sizes.head_dim * (2 * sizes.heads + 2 * sizes.kv_heads)
    return (
        work.forward_rows * layers * projections
        + work.attention_pairs * layers * 4 * sizes.head_dim * sizes.heads
        + work.forward_rows * (layers - len(sizes.moe_layers)) * 6 * hidden * sizes.dense_inner
        + work.rows * 2 * hidden * sizes.experts
        + work.pairs * 6 * hidden * sizes.expert_inner
        + work.dense_rows * 6 * hidden * sizes.shared_inner
        + work.lm_head_rows * 2 * hidden * sizes.vocab
    )


def work_summary(config: Any, work: Work) -> dict[str, Any]:
    """The counts of one decode (`COUNTS`), with what describes its regime.

    ``flops`` is None where the configuration is not one of this package's (released remote code).
    ``experts_per_forward_and_layer`` is the mean number of distinct experts that one MoE layer touches in a forward.
    """
    instance("work", work, Work, "the numbers of a decode, out.counters.read()")
    layer_visits = max(work.forwards * len(work.per_layer), 1)
    numbers = work.as_dict()
    numbers["flops"] = flops(config, work) if hasattr(config, "sizes") else None
    numbers["experts_per_forward_and_layer"] = work.active_experts / layer_visits
    return {name: numbers[name] for name in (*COUNTS, "forward_rows", "attention_pairs", *_REGIME, "unpaid")}


def ratios(
    dense: Mapping[str, Any], plan: Mapping[str, Any], names: Sequence[str] = (*COUNTS, "seconds")
) -> dict[str, Any]:
    """Plan / dense for each name; None where the dense number is 0."""
    return {name: plan[name] / dense[name] if dense[name] else None for name in names}


def work_table(config: Any, works: Mapping[str, Work]) -> Table:
    """The counts of several decodes side by side, each but the first also as a multiple of the first.

    Args:
        config: the model's configuration.
        works: title of a column -> ``out.counters.read()`` of a `generate` result; the first is what the others are
            compared with.
    """
    instance("works", works, Mapping, "a dictionary: title of a column -> out.counters.read()")
    if not works:
        raise ValueError("work_table needs at least one decode, got none")
    reasons = sorted({reason for work in works.values() for reason in work.fallbacks})
    fallbacks = {f"fallbacks: {reason}": reason for reason in reasons}
    summaries = {
        title: work_summary(config, work) | {name: work.fallbacks.get(r, 0) for name, r in fallbacks.items()}
        for title, work in works.items()
    }
    names = (*COUNTS, *_REGIME, "unpaid", *fallbacks)
    return _side_by_side(summaries, names, COUNTS, {name: name for name in fallbacks})


def _side_by_side(
    summaries: Mapping[str, Mapping[str, Any]], names: Sequence[str], compared: Sequence[str], labels: Mapping[str, str]
) -> Table:
    """Numbers of several decodes by name, each but the first also over the first's, where ``compared`` names them."""
    first, *others = summaries
    header = ["", first, *(title for other in others for title in (other, f"{other} / {first}"))]
    over = {title: ratios(summaries[first], summaries[title], compared) for title in others}
    rows = []
    for name in names:
        label = (_LABELS | dict(labels)).get(name, name.replace("_", " "))
        cells = [cell for title in others for cell in (summaries[title][name], over[title].get(name))]
        rows.append((label, summaries[first][name], *cells))
    return Table(tuple(header), tuple(rows))


def plan_figure(config: Any, counters: Counters, *, layer: int = 0, block: int = 0) -> Figure:
    """A picture of one decode under a plan, in three panels.

    Support size of each MoE layer; share of rows that were fresh (and that were live) in each forward; and which
    experts one layer used in each forward of one block, which needs ``generate(..., record=True)``.

    Args:
        config: the model's configuration.
        counters: ``out.counters`` of a `generate` result.
        layer: MoE layer of the third panel, counted among the MoE layers; negative from the end.
        block: block of the third panel, counted among those in ``counters.history``; negative from the end.

    Returns:
        A matplotlib figure that a notebook shows and ``figure.savefig("plan.png")`` writes; pyplot is not involved.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the decode had no plan.
        IndexError: there is no such layer or block.
    """
    figure = _figure()
    instance("counters", counters, Counters, "the counters of a decode on a patched model")
    whole("layer", layer, least=-MOST)
    whole("block", block, least=-MOST)
    return figure.draw_plan(config, counters, layer, block)


def frontier_figure(about: Mapping[str, Any]) -> Figure:
    """A picture of the settings that `epoch_moe.calibrate.calibrate` tried: what they cost and what they change.

    Args:
        about: ``calibration.about``, or the file that ``epoch-moe calibrate`` wrote.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return _figure().draw_frontier(instance("about", about, Mapping, "the `about` of a calibration"))


def _figure() -> Any:
    try:
        from epoch_moe import figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ImportError("a figure needs matplotlib: pip install matplotlib, or epoch-moe with [plot]") from error
    return figure


def comparison_table(result: Mapping[str, Any]) -> str:
    """The text that `epoch-moe compare` prints for its result."""
    instance("result", result, Mapping, "what `epoch_moe.compare.compare` returns")
    sides = {name: dict(result[name]) for name in ("dense", "plan")}
    names = (*COUNTS, "seconds", "tokens_per_forward", *_REGIME)
    if sides["dense"]["accuracy"] is not None:
        names = ("accuracy", *names)
        for side in sides.values():
            side["accuracy"] = f"{side['accuracy']:.1%}"
    labels = {"seconds": "seconds (CPU)"} if result["versions"]["device"] == "cpu" else {}
    table = _side_by_side(sides, names, (*COUNTS, "seconds"), labels)
    agreement = (
        f"same text as dense: {result['agreement']:.1%} of {result['problems']} problems; "
        f"same tokens: {result['token_agreement']:.2%}"
    )
    fallbacks = ", ".join(f"{reason} {count}" for reason, count in sorted(result["fallbacks"].items()))
    return f"{table}\n\n{agreement}\n{paired_text(result['paired'])}\nfallbacks: {fallbacks or 'none'}"
