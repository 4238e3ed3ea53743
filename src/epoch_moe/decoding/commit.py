"""Which of a block's undecoded rows an iteration commits.

Shape suffixes: B sequences, N rows of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def transfer_schedule(block_length: int, steps: int) -> list[int]:
    """Rows that each of `steps` iterations must at least commit: `block_length` split evenly, larger shares first."""
    base, extra = divmod(block_length, steps)
    return [base + (step < extra) for step in range(steps)]


def choose_rows(confidence_BN: Tensor, live_BN: Tensor, need: int, threshold: float) -> Tensor:
    """The live rows to commit: all above `threshold` if those are at least `need`, else the `need` most confident.

    Args:
        confidence_BN: ``[B,N]`` probability of each row's sampled token; values of rows that are not live are ignored.
        live_BN: ``[B,N]`` bool, rows that may be committed.
        need: the schedule's count for this iteration; a sequence with fewer live rows commits all of them.
        threshold: a confidence must be larger than this.

    Returns:
        ``[B,N]`` bool. Equal confidences go to the earlier row, so that the choice does not depend on the device.
    """
    confidence_BN = confidence_BN.masked_fill(~live_BN, float("-inf"))
    confident_BN = confidence_BN > threshold
    rank_BN = confidence_BN.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    best_BN = (rank_BN < need) & live_BN
    enough_B1 = confident_BN.sum(dim=-1, keepdim=True) >= need
    return torch.where(enough_B1, confident_BN, best_BN)
