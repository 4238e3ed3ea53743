"""What a residency budget means for a checkpoint, in experts and bytes, and what fits a card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from epoch_moe.residency.config import parse_budget, slots_per_layer
from epoch_moe.tables import Cell, Table

BUDGETS: tuple[float, ...] = (0.1, 0.2, 0.4, 0.6, 1.0)
RESERVE = 0.1
"""Share of a card that is left for K/V cache and activations."""


def residency_sizes(
    checkpoint: Mapping[str, Any], budgets: Sequence[float | int | str] = (), card: str | int | None = None
) -> dict[str, Any]:
    """What budgets mean for a checkpoint.

    Args:
        checkpoint: as `epoch_moe.inspection.describe_checkpoint` gives it; weights are taken as they are stored.
        budgets: see `ResidencyConfig`, beside the usual shares.
        card: memory of a device, such as ``"24GB"``.

    Returns:
        ``budgets``: of each, experts per layer, their bytes, and bytes of the whole model in fast memory; ``card``: the
        largest number of experts per layer that fits, 0 where none does, None where the model's other weights do not.

    Raises:
        ValueError: no MoE layer, a budget that holds no expert, or a card that is no number of bytes.
    """
    if not checkpoint["moe_layers"]:
        raise ValueError(f"{checkpoint['checkpoint']} has no MoE layer: there is nothing to keep or to leave out")
    layers, each = checkpoint["moe_layers"], checkpoint["bytes_per_expert"]
    num_experts = checkpoint["router"]["num_experts"]
    others = checkpoint["bytes"] - checkpoint["expert_bytes"]
    shares = [share for share in BUDGETS if share * num_experts >= 1]
    rows = []
    for budget in (*shares, *budgets):
        slots = slots_per_layer(budget, num_experts, [each] * layers, 2 * each)
        expert_bytes = sum(slots) * each
        rows.append(
            {
                "budget": budget, "experts_per_layer": sum(slots) / layers, "share": sum(slots) / layers / num_experts,
                "expert_bytes": expert_bytes, "total_bytes": others + expert_bytes + 2 * each,
            }
        )  # fmt: skip
    result: dict[str, Any] = {
        "bytes_per_expert": each, "experts": num_experts, "moe_layers": layers, "other_bytes": others, "budgets": rows,
    }  # fmt: skip
    if card is not None:
        size: float | int = 0.0
        with suppress(ValueError):
            size = parse_budget(card)
        if not isinstance(size, int):
            raise ValueError(f"--card {card}: expected bytes, such as 24GB")
        room = int(size * (1 - RESERVE)) - others - 2 * each
        slots = min(room // (layers * each), num_experts)
        result["card"] = {
            "bytes": size, "reserved": RESERVE, "experts_per_layer": slots if room >= 0 else None,
            "share": max(slots, 0) / num_experts, "budget": max(slots, 0) * layers * each + 2 * each,
        }  # fmt: skip
    return result


def sizes_text(sizes: Mapping[str, Any]) -> str:
    """The text that ``epoch-moe inspect --residency`` prints."""

    def size(number: int) -> str:
        return f"{number / 1e9:,.2f} GB" if number >= 1e9 else f"{number / 1e6:,.2f} MB"

    rows: list[tuple[Cell, ...]] = []
    for row in sizes["budgets"]:
        budget = row["budget"]
        name = f"{budget:.0%}" if isinstance(budget, float) else str(budget)
        rows.append(
            (name, f"{row['experts_per_layer']:.1f} of {sizes['experts']}", size(row["expert_bytes"]),
             size(row["total_bytes"]))
        )  # fmt: skip
    table = Table(("budget", "experts per layer", "their weights", "with the rest of the model"), tuple(rows))
    lines = [
        f"residency: {sizes['moe_layers']} layers of {sizes['experts']} experts, {size(sizes['bytes_per_expert'])} "
        f"each; the rest of the model takes {size(sizes['other_bytes'])}",
        str(table),
    ]
    if "card" in sizes:
        card = sizes["card"]
        fits = card["experts_per_layer"]
        if fits is None:
            verdict = "does not hold the rest of the model"
        elif fits == sizes["experts"]:
            verdict = "holds all experts: no residency is needed"
        else:
            verdict = (
                f"holds {fits} of {sizes['experts']} experts per layer ({card['share']:.1%}): "
                f"ResidencyConfig(budget={card['budget']})"
            )
        lines.append(
            f"a card of {size(card['bytes'])}, {card['reserved']:.0%} of it left for K/V cache and activations, "
            f"{verdict}"
        )
    return "\n".join(lines)
