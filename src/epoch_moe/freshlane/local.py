"""The lane on one device: pick the fresh rows, compute them, restore the dense shard.

Shape suffixes: T rows of the forward, R fresh rows, H hidden, M cache entries (B sequences x N window rows).
"""

from __future__ import annotations

from torch import Tensor

from epoch_moe.plan.liveness import RowPlan


def pick(x_TH: Tensor, rows: RowPlan) -> Tensor:
    """The fresh rows, packed: ``[R,H]``."""
    return x_TH if rows.all_fresh else x_TH.index_select(0, rows.fresh_R)


def restore(y_RH: Tensor, rows: RowPlan, cache_MH: Tensor, out_TH: Tensor | None = None) -> Tensor:
    """Fresh outputs and cached ones in one dense shard ``[T,H]``, written to ``out_TH`` if given; writes the cache.

    Rows that are neither (padding, finished sequences) come out as zeros. The cache is read before it is written, and
    only at entries whose stamp the row plan has checked: what else lies in it (uninitialised memory) is never touched.
    """
    if rows.all_fresh:
        out_TH = y_RH if out_TH is None else out_TH.copy_(y_RH)
    else:
        complete = rows.num_fresh + rows.reuse_dst.numel() == rows.total
        if out_TH is None:
            out_TH = y_RH.new_empty((rows.total, y_RH.shape[1]))
        if not complete:
            out_TH.zero_()
        out_TH.index_copy_(0, rows.fresh_R, y_RH)
        out_TH.index_copy_(0, rows.reuse_dst, cache_MH.index_select(0, rows.reuse_src))
    if rows.store_src.numel():
        cache_MH.index_copy_(0, rows.store_dst, y_RH.index_select(0, rows.store_src))
    return out_TH
