"""Both ends of the lane: pack the fresh rows, restore the dense shard.

The cache is read before it is written, and only at entries whose stamp the row plan has checked: what else lies in it
(uninitialised memory) is never touched.

Shape suffixes: T rows of the forward, R fresh rows, H hidden, M cache entries (B sequences x N window rows).
"""

from __future__ import annotations

from torch import Tensor

from epoch_moe.plan.packed import ListedRows, PackedRows


def pack(x_TH: Tensor, rows: PackedRows) -> Tensor:
    """The fresh rows, packed: ``[R,H]``. What padding rows hold means nothing."""
    return x_TH if rows.all_fresh else x_TH.index_select(0, rows.fresh_R)


def begin_restore(rows: ListedRows, cache_MH: Tensor, out_TH: Tensor | None = None) -> Tensor | None:
    """The half of `restore` that needs no fresh output: ``[T,H]`` with reused rows, and zeros where nothing is.

    What its fresh rows hold means nothing. Where all rows are fresh, ``out_TH`` as it is.
    """
    if rows.all_fresh:
        return out_TH
    if out_TH is None:
        out_TH = cache_MH.new_empty((rows.total, cache_MH.shape[1]))
    if rows.num_fresh + rows.reuse_dst.numel() != rows.total:
        out_TH.zero_()
    return out_TH.index_copy_(0, rows.reuse_dst, cache_MH.index_select(0, rows.reuse_src))


def finish_restore(y_RH: Tensor, rows: ListedRows, cache_MH: Tensor, begun_TH: Tensor | None) -> Tensor:
    """The other half: ``[T,H]``, what `begin_restore` gave with the fresh rows in it; writes the cache."""
    if begun_TH is None:
        out_TH = y_RH
    else:
        out_TH = begun_TH.copy_(y_RH) if rows.all_fresh else begun_TH.index_copy_(0, rows.fresh_R, y_RH)
    if rows.store_src.numel():
        cache_MH.index_copy_(0, rows.store_dst, y_RH.index_select(0, rows.store_src))
    return out_TH


def restore(y_RH: Tensor, rows: ListedRows, cache_MH: Tensor, out_TH: Tensor | None = None) -> Tensor:
    """The dense shard ``[T,H]`` from fresh and cached outputs; writes the cache.

    Rows that are neither (padding, finished sequences) come out as zeros.

    Args:
        y_RH: the fresh rows' outputs.
        rows: of the forward.
        cache_MH: the layer's cached outputs, in the dtype of the fresh ones.
        out_TH: what is written; None: new memory, or ``y_RH`` itself where all rows are fresh.
    """
    return finish_restore(y_RH, rows, cache_MH, begin_restore(rows, cache_MH, out_TH))
