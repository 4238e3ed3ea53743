"""`Patched`: the MoE layers that one plan is for, and what they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from epoch_moe.checks import module, wrong
from epoch_moe.config import EpochConfig
from epoch_moe.experts.views import ExpertViews
from epoch_moe.plan.packed import Compact
from epoch_moe.plan.slot import PlanSlot
from epoch_moe.plan.turns import Turns

ATTRIBUTE = "_epoch_moe"
"""Where `epoch_moe.patch` leaves a `Patched` on a model."""


class StackedWeights(Protocol):
    """A layer's routed experts."""

    def ensure(self) -> ExpertViews:
        """Their weights, stacked anew where a parameter's storage was replaced since the last use."""
        ...

    @property
    def version(self) -> tuple[int, int]:
        """As they were stacked last: another value after every change."""
        ...


class PlannedLayer(Protocol):
    """One MoE layer (`epoch_moe.block.EpochMoEBlock`).

    Attributes:
        slot: where it finds the forward under way.
        index: its place in the plan.
    """

    slot: PlanSlot
    index: int

    @property
    def weights(self) -> StackedWeights:
        """Its routed experts."""
        ...

    @property
    def routing_block(self) -> int | None:
        """Rows that share a pool of experts (LLaDA2.2), or None where every row routes for itself."""
        ...

    def compact_for(self, config: EpochConfig, layers: Sequence[ExpertViews]) -> Compact | None:
        """What packs the rows of a plan on the device, or None where rows must be lists."""
        ...

    def __call__(self, hidden_states: Tensor) -> Any:
        """Run it on ``[B,S,H]``."""
        ...


@dataclass
class Patched:
    """The MoE layers of one model.

    Attributes:
        slot: where the layers find the forward under way.
        config: the plan that is used where none is given.
        blocks: name -> layer, in the order in which they run.
        ep: the ranks that the experts are split over; None: all are here.
    """

    slot: PlanSlot
    config: EpochConfig | None
    blocks: Mapping[str, PlannedLayer]
    ep: Turns | None = None

    @property
    def routing_block(self) -> int | None:
        """Rows that share a pool of experts (LLaDA2.2), or None where every row routes for itself."""
        return next((block.routing_block for block in self.blocks.values()), None)

    def ensure_stacked(self) -> list[ExpertViews]:
        """Stack expert weights whose storage was replaced since the last use; the weights of all layers."""
        return [block.weights.ensure() for block in self.blocks.values()]

    def versions(self) -> list[tuple[int, int]]:
        """Of each layer's experts, as they were stacked last: another value after every change."""
        return [block.weights.version for block in self.blocks.values()]

    def bytes_per_expert(self) -> list[int]:
        """For each MoE layer."""
        return [experts.bytes_per_expert for experts in self.ensure_stacked()]

    def compact_for(self, config: EpochConfig, layers: Sequence[ExpertViews]) -> Compact | None:
        """What packs the rows of a plan on the device, or None where rows must be lists."""
        return next((block.compact_for(config, layers) for block in self.blocks.values()), None)

    @property
    def device(self) -> torch.device:
        """Where ids and masks of forwards are."""
        return next(iter(self.blocks.values())).weights.ensure().down_EHF.device

    def idle_forward(self, batch: int, rows: int) -> None:
        """Run every MoE block on rows that do not exist, for the collectives in it."""
        for block in self.blocks.values():
            down_EHF = block.weights.ensure().down_EHF
            size = (batch, rows, down_EHF.shape[1])
            block(torch.zeros(size, dtype=down_EHF.dtype, device=down_EHF.device))


def patched_of(model: Any) -> Patched | None:
    """What `epoch_moe.patch` left on a model, also inside a wrapper; None where it is not patched."""
    return getattr(inner_model(model), ATTRIBUTE, None)


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside a peft wrapper, whose adapters lie in its layers; any other model is returned as it is."""
    if not any(cls.__module__.startswith("peft.") for cls in type(module("model", model)).__mro__):
        return model
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model.base_model.model  # type: ignore[operator,union-attr,assignment]
    return inner


def layers_of(what: Any) -> Patched:
    """The layers that a context is asked to plan.

    Args:
        what: a patched model; what `epoch_moe.patch` left on one; or an `EpochMoEBlock` that somebody made, or a list
            of them in the order in which they run. Such a list shares a slot from here on.
    """
    if isinstance(what, nn.Module) and (found := patched_of(what)) is not None:
        return found
    blocks = list(what) if isinstance(what, (list, tuple, nn.ModuleList)) else [what]
    if blocks and all(isinstance(block, nn.Module) and isinstance(_slot(block), PlanSlot) for block in blocks):
        return _join(blocks)
    if isinstance(_slot(what), PlanSlot):
        return what  # type: ignore[no-any-return]
    raise wrong("model", what, "a patched model, or an EpochMoEBlock, or a list of these; call epoch_moe.patch(model)")


def _slot(what: Any) -> Any:
    return getattr(what, "slot", None)


def _join(blocks: list[Any]) -> Patched:
    """Blocks that were made one by one, as the layers of one plan; or those of one plan already, all and in order."""
    slot, places = blocks[0].slot, list(range(len(blocks)))
    if any(block.slot.num_layers is not None for block in blocks):
        known = [block.index for block in blocks]
        if slot.num_layers != len(blocks) or known != places or any(block.slot is not slot for block in blocks):
            raise ValueError(
                f"blocks with index {known}, of a plan for {slot.num_layers} layers: expected all blocks of that plan "
                "in their order (or the patched model), or blocks that no plan was made for yet"
            )
    elif len(set(map(id, blocks))) < len(blocks):
        raise ValueError(f"a list of {len(blocks)} blocks has one of them twice: expected each layer once")
    if any(block.dispatcher.ranks is not None for block in blocks):
        raise ValueError(
            "these blocks' experts are split over ranks, whose forwards must be the same: epoch_moe.patch(model, "
            "ep_group=...) sees to it"
        )
    slot.num_layers = len(blocks)
    for index, block in zip(places, blocks, strict=True):
        block.slot, block.index = slot, index
    return Patched(slot, None, dict(zip(map(str, places), blocks, strict=True)))
