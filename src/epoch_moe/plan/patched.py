"""`Patched`: what a patched model offers to the plans of its decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from epoch_moe.config import EpochConfig
from epoch_moe.experts.views import Experts
from epoch_moe.freshlane.expert_parallel import ExpertParallel
from epoch_moe.plan.slot import PlanSlot

if TYPE_CHECKING:
    from epoch_moe.residency.state import Residency


class Patched(Protocol):
    """What `epoch_moe.patch` leaves on a model under ``_epoch_moe``."""

    slot: PlanSlot
    config: EpochConfig | None
    ep: ExpertParallel | None
    residency: Residency | None

    @property
    def routing_block(self) -> int | None:
        """Rows that share a pool of experts (LLaDA2.2), or None where every row routes for itself."""
        ...

    def bytes_per_expert(self) -> list[int]:
        """For each MoE layer."""
        ...

    def ensure_stacked(self) -> Sequence[Experts]:
        """Stack expert weights whose storage was replaced since the last use; the weights of all layers."""
        ...

    @property
    def device(self) -> torch.device:
        """Where ids and masks of forwards are."""
        ...

    def idle_forward(self, batch: int, rows: int) -> None:
        """Run every MoE block on rows that do not exist, for the collectives in it."""
        ...
