"""`Residency`: what a patched model holds of the experts outside of its fast memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from epoch_moe.residency.clock import Clock
from epoch_moe.residency.config import ResidencyConfig
from epoch_moe.residency.experts import ResidentExperts
from epoch_moe.residency.loader import Loader


@dataclass(eq=False)
class Residency:
    """The experts of all layers, and what they share.

    Attributes:
        config: the user's choices.
        clock: tells the policy what forwards ask for.
        loader: brings missing experts in.
        layers: the experts, layer by layer.
        spilled: bytes that were written to temporary files.
    """

    config: ResidencyConfig
    clock: Clock
    loader: Loader
    layers: list[ResidentExperts]
    spilled: int

    def __deepcopy__(self, memo: dict[int, Any]) -> Residency:
        clock, loader, layers = copy.deepcopy((self.clock, self.loader, self.layers), memo)
        return Residency(self.config, clock, loader, layers, self.spilled)

    def __reduce__(self) -> Any:
        raise TypeError("a model with experts outside of its memory cannot be pickled: call epoch_moe.unpatch first")

    @property
    def tier(self) -> str:
        """Where experts lie that are not in a slot: ``"host"`` or ``"disk"``."""
        return "host" if self.layers[0].source.in_memory else "disk"

    @property
    def fast_bytes(self) -> int:
        """Bytes of the slots of all layers, and on the CPU of what experts pass through."""
        slots = sum(layer.placement.slots * layer.ensure().bytes_per_expert for layer in self.layers)
        return slots + (self.loader.buffers.nbytes if self.layers[0].device.type == "cpu" else 0)

    def summary(self) -> str:
        """One line for reports."""
        slots = [layer.placement.slots for layer in self.layers]
        kept = f"{slots[0]}" if len(set(slots)) == 1 else f"{min(slots)} to {max(slots)}"
        where = "main memory" if self.tier == "host" else "the checkpoint's files"
        if self.spilled:
            where = f"temporary files ({self.spilled / 1e6:,.1f} MB)"
        return (
            f"residency: {kept} of {self.layers[0].num_experts} experts per layer in {self.fast_bytes / 1e6:,.1f} MB "
            f"of fast memory, the others in {where}; policy {self.config.policy}"
        )
