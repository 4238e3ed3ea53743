"""`residency_report`: what expert residency did on a model: hits, misses, bytes and seconds by tier, layer by layer."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from epoch_moe.checks import flag, module
from epoch_moe.residency.costs import Costs
from epoch_moe.residency.loader import LayerCounts
from epoch_moe.residency.placement import PlacementCounts
from epoch_moe.residency.state import Residency
from epoch_moe.tables import Cell, Table


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        slots: experts that fit into its fast memory.
        resident: experts that are there now.
        placement: hits, misses, loads and so on, counted in experts per forward.
        counts: bytes and seconds.
    """

    slots: int
    resident: int
    placement: PlacementCounts
    counts: LayerCounts


@dataclass(frozen=True)
class ResidencyReport:
    """What expert residency did since `patch` or the last reset.

    Attributes:
        policy: who decides.
        tier: where experts lie that are not in fast memory: ``"disk"`` or ``"host"``.
        num_experts: of each layer.
        bytes_per_expert: in fast memory.
        fast_bytes: fast memory that slots take, and on the CPU the buffers that experts pass through.
        spilled_bytes: written to temporary files.
        decision: the rule for missing experts, with its numbers.
        costs: these numbers.
        layers: layer by layer.
    """

    policy: str
    tier: str
    num_experts: int
    bytes_per_expert: int
    fast_bytes: int
    spilled_bytes: int
    decision: str
    costs: Costs
    layers: tuple[LayerReport, ...]

    @property
    def placement(self) -> PlacementCounts:
        """All layers together."""
        return sum((layer.placement for layer in self.layers), PlacementCounts())

    @property
    def counts(self) -> LayerCounts:
        """All layers together."""
        return sum((layer.counts for layer in self.layers), LayerCounts())

    @property
    def hit_rate(self) -> float | None:
        """Share of the experts that forwards asked for which were in fast memory; None before the first forward."""
        return self.placement.hit_rate

    def as_dict(self) -> dict[str, Any]:
        """All numbers, ready for JSON."""
        own = ("policy", "tier", "num_experts", "bytes_per_expert", "fast_bytes", "spilled_bytes", "decision")
        return {
            **{name: getattr(self, name) for name in own},
            "hit_rate": self.hit_rate,
            "costs": asdict(self.costs),
            **asdict(self.placement),
            **asdict(self.counts),
            "per_layer": [
                {"slots": one.slots, "resident": one.resident, **asdict(one.placement), **asdict(one.counts)}
                for one in self.layers
            ],
        }

    def table(self) -> Table:
        """Layer by layer, and their sum."""
        header = (
            "MoE layer", "slots", "hits", "misses", "hit rate", "loads", "bypassed pairs", "MB read", "s reading",
            "s waited", "s products", "s bypassed",
        )  # fmt: skip

        def row(label: str, slots: int, placement: PlacementCounts, counts: LayerCounts) -> tuple[Cell, ...]:
            return (
                label, slots, placement.hits, placement.misses, placement.hit_rate, placement.loads,
                placement.bypassed_pairs, (counts.file_bytes + counts.host_bytes + counts.moved_bytes) / 1e6,
                counts.read_seconds, counts.wait_seconds, counts.slot_seconds, counts.bypass_seconds,
            )  # fmt: skip

        rows = [row(str(number), one.slots, one.placement, one.counts) for number, one in enumerate(self.layers)]
        rows.append(row("all", sum(one.slots for one in self.layers), self.placement, self.counts))
        return Table(header, tuple(rows))

    def _lines(self) -> list[str]:
        where = "main memory" if self.tier == "host" else "files"
        spilled = f", of them {self.spilled_bytes / 1e6:,.1f} MB written by us" if self.spilled_bytes else ""
        return [
            f"epoch_moe: {self.fast_bytes / 1e6:,.1f} MB of fast memory for experts of "
            f"{self.bytes_per_expert / 1e6:.2f} MB each, {self.num_experts} per layer; the others in {where}{spilled}",
            f"policy {self.policy}; {self.decision}",
        ]

    def __str__(self) -> str:
        return "\n".join([*self._lines(), str(self.table())])

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self._lines())
        return lines + self.table()._repr_html_()


def residency_report(model: nn.Module, *, reset: bool = False) -> ResidencyReport:
    """What expert residency did on a model since `epoch_moe.patch` or the last reset.

    Args:
        model: patched or loaded with ``residency=``.
        reset: start the counts anew. What is in fast memory stays there.

    Raises:
        ValueError: all experts of the model are in memory.

    Example:
        >>> import epoch_moe
        >>> model, tokenizer = epoch_moe.load_model("tiny-llada2", residency=epoch_moe.ResidencyConfig(budget=0.4))
        >>> prompt = tokenizer("sum 3 6 5 4 2:", return_tensors="pt")["input_ids"]
        >>> out = epoch_moe.generate(model, prompt, gen_length=32)
        >>> 0 < epoch_moe.residency_report(model).hit_rate < 1
        True
    """
    flag("reset", reset)
    patched = module("model", model).__dict__.get("_epoch_moe")
    state: Residency | None = None if patched is None else patched.residency
    if state is None:
        raise ValueError(
            f"{type(model).__name__} has all of its experts in memory: pass residency=ResidencyConfig(...) to "
            "epoch_moe.patch or epoch_moe.load_model first"
        )
    with state.clock.turn():
        costs = state.loader.costs
        layers = tuple(
            LayerReport(
                one.placement.slots, len(one.placement.resident), replace(one.placement.counts), replace(one.counts)
            )
            for one in state.layers
        )
        if reset:
            for one in state.layers:
                one.counts, one.placement.counts = LayerCounts(), PlacementCounts()
        return ResidencyReport(
            policy=state.config.policy,
            tier=state.tier,
            num_experts=state.layers[0].num_experts,
            bytes_per_expert=state.layers[0].ensure().bytes_per_expert,
            fast_bytes=state.fast_bytes,
            spilled_bytes=state.spilled,
            decision=costs.explain(state.config.miss),
            costs=costs,
            layers=layers,
        )
