"""Row plans for the device: rows compacted into a capacity, so that no length is a number on the host.

Shape suffixes: T rows of the forward, R capacity of the packed rows (the first ``count`` are real), B sequences,
S rows per sequence, N window rows, M = B x N cache entries, W rows of the current block.

The decision is that of `epoch_moe.plan.liveness.decide_rows`. `plan_rows` makes lists of known length from it, which
waits for the device; `pad_rows` makes buffers of a length that the host chose. Padding rows have values that do
nothing: they are not restricted, join nothing, vote for nothing, and their places are behind the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from epoch_moe.plan.liveness import PackedRows, RowDecision

Compact = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""``(mask_T, capacity) -> rows_R, rank_T, count``: see `epoch_moe.kernels.compaction.compact`."""


@dataclass(frozen=True)
class PaddedRowPlan(PackedRows):
    """What one forward does with each of its T rows, on the device.

    Attributes:
        count: int32 ``[1]``, fresh rows; above the capacity R where they did not fit.
        grid_R: int64, place of each packed row among the T rows; T in padding.
        source_T: int64, where each row's output comes from: packed row ``s >= 0``; -1, nowhere (zeros); ``-(m + 2)``,
            cache entry m.
        store_R: int64, the cache entry that each packed row's output is kept in; -1 for none.
        num_rows: int64 ``[]``, rows that a dense forward would compute (valid rows).
        num_voting: int64 ``[]``, live rows that hold no token.
    """

    count: Tensor
    grid_R: Tensor
    source_T: Tensor
    store_R: Tensor
    num_rows: Tensor
    num_voting: Tensor

    @property
    def place_R(self) -> Tensor:
        """`grid_R`."""
        return self.grid_R

    @property
    def capacity(self) -> int:
        """R."""
        return self.fresh_R.shape[0]


def pad_rows(decision: RowDecision, compact: Compact, capacity: int | None = None) -> PaddedRowPlan:
    """The row plan of a forward; reads no value on the host.

    Args:
        decision: of the forward.
        compact: packs the fresh rows.
        capacity: R, at most T; None = T, which always suffices. Fresh rows beyond it are not computed, and their
            outputs are zeros: whoever gives a smaller one must look at ``count`` before the outputs are used.
    """
    batch, seq_len = decision.valid_BS.shape
    total = batch * seq_len
    capacity = total if capacity is None else min(capacity, total)
    fresh_R, rank_T, count = compact(decision.fresh_BS.reshape(-1), capacity)
    real_R = torch.arange(capacity, device=fresh_R.device) < count
    row_T = torch.arange(total, device=fresh_R.device)

    def packed(mask_BS: Tensor) -> Tensor:
        return mask_BS.reshape(-1).index_select(0, fresh_R) & real_R

    reused_T = torch.where(decision.reuse_BS.reshape(-1), -(decision.entry(row_T) + 2), -1)
    return PaddedRowPlan(
        batch=batch,
        seq_len=seq_len,
        block_len=decision.block_len,
        fresh_R=fresh_R,
        restricted_R=packed(decision.restricted_BS),
        joining_R=packed(decision.joining_BS),
        vote_R=decision.vote(fresh_R, packed(decision.voting_BS)),
        sequence_R=fresh_R // seq_len,
        count=count,
        grid_R=torch.where(real_R, fresh_R, total),
        source_T=torch.where(rank_T >= 0, rank_T, reused_T),
        store_R=torch.where(packed(decision.stored_BS), decision.entry(fresh_R), -1),
        num_rows=decision.valid_BS.sum(),
        num_voting=decision.voting_BS.sum(),
    )
