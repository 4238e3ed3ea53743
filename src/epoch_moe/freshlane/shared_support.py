"""`SharedSupport`: one expert support for the sequences of all ranks.

Shape suffixes: W voting rows of this rank, E experts.
"""

from __future__ import annotations

import torch
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
        count = selection_WE.new_tensor([selection_WE.shape[0]], dtype=torch.int64)
        most = int(self.ranks.maximum(count, f"{self.name}: number of voting rows"))
        pad = (0, 0, 0, most - selection_WE.shape[0])
        here_W1 = torch.nn.functional.pad(torch.ones_like(selection_WE[:, :1]), pad)
        rows = torch.cat(
            [torch.nn.functional.pad(part, pad) for part in (selection_WE, weights_WE)] + [here_W1], dim=1
        )
        everyone = self.ranks.all_gather(rows, f"{self.name}: scores of voting rows").wait()
        num_experts = selection_WE.shape[1]
        return everyone[:, :num_experts], everyone[:, num_experts : 2 * num_experts], everyone[:, -1] > 0

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
