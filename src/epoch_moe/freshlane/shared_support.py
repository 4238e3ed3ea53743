"""`SharedSupport`: one expert support for the sequences of all ranks.

Shape suffixes: W voting rows of this rank, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from epoch_moe.freshlane.collectives import Ranks


class SharedSupport:
    """The exchange behind one support for all ranks' sequences.

    Args:
        ranks: the group.
        name: of the layer, for errors.
    """

    def __init__(self, ranks: Ranks, name: str):
        self.ranks, self.name = ranks, name

    def gather(self, selection_WE: Tensor, weights_WE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All ranks' voting rows in rank order: their scores, weights, and which of the rows are there (padding)."""
        rows, experts = selection_WE.shape
        most = int(self.ranks.maximum(selection_WE.new_tensor([rows], dtype=torch.int64), f"{self.name}: voting rows"))
        own = torch.cat([selection_WE, weights_WE, torch.ones_like(selection_WE[:, :1])], dim=1)
        own = F.pad(own, (0, 0, 0, most - rows))
        everyone = self.ranks.all_gather(own, f"{self.name}: scores of voting rows").wait()
        return everyone[:, :experts], everyone[:, experts:-1], everyone[:, -1] > 0

    def union(self, experts_E: Tensor) -> Tensor:
        """Experts that any rank named: bool ``[E]``."""
        return self.ranks.maximum(experts_E.to(torch.int32), f"{self.name}: experts that join the support") > 0

    def total(self, values: Tensor) -> Tensor:
        """Sum over ranks, elementwise, in rank order."""
        everyone = self.ranks.all_gather(values.unsqueeze(0), f"{self.name}: coverage of the support").wait()
        out = torch.zeros_like(values)
        for part in everyone:
            out = out + part
        return out
