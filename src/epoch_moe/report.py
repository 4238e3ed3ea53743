"""Counters as numbers, ratios and text: what a decode computed, and what a plan saved.

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
from typing import Any

from epoch_moe.models.sizes import ModelSizes
from epoch_moe.plan.counters import Work

COUNTS = ("forwards", "rows", "pairs", "active_experts", "weight_bytes", "lm_head_rows", "flops")
"""The counts that a comparison shows, in order."""


def flops(config: Any, work: Work) -> int:
    """FLOPs of the whole model for ``work``, by the formula in this module's docstring.

    Args:
        config: a configuration of this package (`LLaDA2MoeConfig`, `LLaDAMoEConfig`).
        work: counters of a decode on a patched model.
    """
    sizes: ModelSizes = config.sizes()
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

    ``experts_per_forward_and_layer`` is the mean number of distinct experts that one MoE layer touches in a forward.
    """
    layer_visits = max(work.forwards * len(work.per_layer), 1)
    numbers = work.as_dict()
    summary = {name: flops(config, work) if name == "flops" else numbers[name] for name in COUNTS}
    summary["forward_rows"] = work.forward_rows
    summary["attention_pairs"] = work.attention_pairs
    summary["experts_per_forward_and_layer"] = work.active_experts / layer_visits
    summary["support_size"] = numbers["support_size"]
    summary["coverage"] = numbers["coverage"]
    return summary


def ratios(
    dense: Mapping[str, Any], plan: Mapping[str, Any], names: Sequence[str] = (*COUNTS, "seconds")
) -> dict[str, Any]:
    """Plan / dense for each name; None where the dense number is 0."""
    return {name: plan[name] / dense[name] if dense[name] else None for name in names}


def comparison_table(result: Mapping[str, Any]) -> str:
    """The text that `epoch-moe compare` prints for its result."""
    dense, plan = result["dense"], result["plan"]
    lines = [f"{'':24}{'dense':>18}{'plan':>18}{'plan / dense':>14}"]

    def row(name: str, left: str, right: str, ratio: float | None = None) -> None:
        shown = "" if ratio is None else f"{ratio:.3f}"
        lines.append(f"{name:24}{left:>18}{right:>18}{shown:>14}")

    row("exactly right", f"{dense['accuracy']:.1%}", f"{plan['accuracy']:.1%}")
    for name in COUNTS:
        row(name.replace("_", " "), f"{dense[name]:,}", f"{plan[name]:,}", result["ratios"][name])
    row("seconds (CPU)" if result["versions"]["device"] == "cpu" else "seconds",
        f"{dense['seconds']:.2f}", f"{plan['seconds']:.2f}", result["ratios"]["seconds"])  # fmt: skip
    for name, label in (
        ("tokens_per_forward", "tokens per forward"),
        ("experts_per_forward_and_layer", "experts per layer, fwd"),
    ):
        row(label, f"{dense[name]:.2f}", f"{plan[name]:.2f}")
    if plan["support_size"] is not None:
        row("support size", "", f"{plan['support_size']:.1f}")
        row("support coverage", "", f"{plan['coverage']:.3f}")
    lines.append("")
    lines.append(
        f"same text as dense: {result['agreement']:.1%} of {result['problems']} problems; "
        f"same tokens: {result['token_agreement']:.2%}"
    )
    fallbacks = result["fallbacks"]
    lines.append("fallbacks: " + (", ".join(f"{k} {v}" for k, v in sorted(fallbacks.items())) or "none"))
    return "\n".join(lines)
