"""The worklist: token-expert pairs in expert order, with the way back.

Shape suffixes: R rows, K top-k, P = R x K pairs (empty ones included), E experts.

Shapes depend on R and K alone, never on how many pairs are valid, so building a worklist needs no host sync: empty
pairs (`NO_EXPERT`) sort behind all experts, no expert's segment reaches them, and `Combine` skips them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epoch_moe.routing import NO_EXPERT


@dataclass(frozen=True)
class Worklist:
    """Pairs of R rows, sorted by expert.

    Attributes:
        row_P: int64, the row of each sorted pair.
        rank_RK: int64, where pair (row, slot) lies in sorted order (the inverse permutation).
        counts_E: int64, valid pairs of each expert.
        offsets_E: int32, end of each expert's segment (inclusive prefix sum of the counts).
        valid_RK: bool, False for empty pairs.
    """

    row_P: Tensor
    rank_RK: Tensor
    counts_E: Tensor
    offsets_E: Tensor
    valid_RK: Tensor


def count_pairs(ids_RK: Tensor, num_experts: int) -> Tensor:
    """Pairs of each expert, int64 ``[E]``, without a host sync; empty ones (``NO_EXPERT``) are left out."""
    keys_P = ids_RK.reshape(-1)
    keys_P = torch.where(keys_P != NO_EXPERT, keys_P, num_experts)
    # One extra bin collects the empty pairs; scatter_add is deterministic on integers.
    bins = torch.zeros(num_experts + 1, dtype=torch.int64, device=keys_P.device)
    return bins.scatter_add_(0, keys_P, torch.ones_like(keys_P))[:num_experts]


def build_worklist(ids_RK: Tensor, num_experts: int) -> Worklist:
    """Sort the pairs ``ids_RK`` (int64, ``NO_EXPERT`` = empty) by expert; within an expert by row, then slot."""
    num_rows, top_k = ids_RK.shape
    flat_P = ids_RK.reshape(-1)
    valid_P = flat_P != NO_EXPERT
    keys_P = torch.where(valid_P, flat_P, num_experts)
    order_P = keys_P.argsort(stable=True)
    rank_P = torch.empty_like(order_P)
    rank_P[order_P] = torch.arange(order_P.numel(), device=order_P.device)
    counts_E = count_pairs(ids_RK, num_experts)
    return Worklist(
        row_P=order_P // top_k,
        rank_RK=rank_P.view(num_rows, top_k),
        counts_E=counts_E,
        offsets_E=counts_E.cumsum(0).to(torch.int32),
        valid_RK=valid_P.view(num_rows, top_k),
    )


def combine(pairs_PH: Tensor, weights_RK: Tensor, worklist: Worklist, dtype: torch.dtype) -> Tensor:
    """Weighted sum over the K pairs of each row, fp32, in slot order, rounded once to ``dtype``: ``[R,H]``.

    Rows of ``pairs_PH`` behind the last segment are uninitialised memory, so empty pairs are replaced by zeros rather
    than multiplied by a zero weight (0 x NaN is NaN), and before the product: its gradient by the weights would be NaN
    otherwise.
    """
    empty_RK = ~worklist.valid_RK
    gathered_RKH = pairs_PH[worklist.rank_RK].float().masked_fill(empty_RK.unsqueeze(-1), 0.0)
    return (gathered_RKH * weights_RK.masked_fill(empty_RK, 0.0).unsqueeze(-1)).sum(dim=1).to(dtype)
