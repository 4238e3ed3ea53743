"""`Patched`: what a patched model offers to the plans of its decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from epoch_moe.checks import module
from epoch_moe.config import EpochConfig
from epoch_moe.experts.views import ExpertViews
from epoch_moe.plan.packed import Compact
from epoch_moe.plan.slot import PlanSlot
from epoch_moe.plan.turns import Turns


class Patched(Protocol):
    """What `epoch_moe.patch` leaves on a model under ``_epoch_moe``."""

    slot: PlanSlot
    config: EpochConfig | None
    @property
    def ep(self) -> Turns | None:
        """The ranks that the experts are split over; None: all are here."""
        ...

    @property
    def routing_block(self) -> int | None:
        """Rows that share a pool of experts (LLaDA2.2), or None where every row routes for itself."""
        ...

    def bytes_per_expert(self) -> list[int]:
        """For each MoE layer."""
        ...

    def ensure_stacked(self) -> Sequence[ExpertViews]:
        """Stack expert weights whose storage was replaced since the last use; the weights of all layers."""
        ...

    def compact_for(self, config: EpochConfig, layers: Sequence[ExpertViews]) -> Compact | None:
        """What packs the rows of a plan on the device, or None where rows must be lists."""
        ...

    @property
    def device(self) -> torch.device:
        """Where ids and masks of forwards are."""
        ...

    def idle_forward(self, batch: int, rows: int) -> None:
        """Run every MoE block on rows that do not exist, for the collectives in it."""
        ...


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside a peft wrapper, whose adapters lie in its layers; any other model is returned as it is."""
    if not any(cls.__module__.startswith("peft.") for cls in type(module("model", model)).__mro__):
        return model
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model.base_model.model  # type: ignore[operator,union-attr,assignment]
    return inner
