"""Fresh rows packed to the front of a buffer of fixed size, in plain torch.

Shape suffixes: T rows of the forward, R = capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compact_reference(mask_T: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `epoch_moe.kernels.compaction.compact` returns."""
    position_T = mask_T.long().cumsum(0) - 1
    kept_T = mask_T & (position_T < capacity)
    rank_T = torch.where(kept_T, position_T, -1)
    # One extra row swallows what is not kept.
    rows_R = torch.zeros(capacity + 1, dtype=torch.int64, device=mask_T.device)
    rows = torch.arange(mask_T.numel(), device=mask_T.device)
    rows_R.scatter_(0, torch.where(kept_T, position_T, capacity), rows)
    return rows_R[:capacity].clone(), rank_T, mask_T.sum(dtype=torch.int32).view(1)
