"""Both ends of the lane: pack the fresh rows, restore the dense shard.

Shape suffixes: T rows of the forward, R fresh rows, H hidden, M cache entries (B sequences x N window rows).
"""

from __future__ import annotations

from torch import Tensor

from epoch_moe.plan.packed import ListedRows, PackedRows


def pack(x_TH: Tensor, rows: PackedRows) -> Tensor:
    """The fresh rows, packed: ``[R,H]``. What padding rows hold means nothing."""
    return x_TH if rows.all_fresh else x_TH.index_select(0, rows.fresh_R)


class Restore:
    """Puts fresh and cached outputs into the dense shard ``[T,H]``, in two halves: cached rows can be copied early.

    Rows that are neither (padding, finished sequences) come out as zeros. The cache is read before it is written, and
    only at entries whose stamp the row plan has checked: what else lies in it (uninitialised memory) is never touched.

    Args:
        rows: of the forward.
        cache_MH: the layer's cached outputs, in the dtype of the fresh ones.
        out_TH: what is written; None: new memory, taken by the first half.
    """

    def __init__(self, rows: ListedRows, cache_MH: Tensor, out_TH: Tensor | None = None):
        self.rows, self.cache_MH, self.out_TH = rows, cache_MH, out_TH
        self._copied = False

    def copy_cached(self) -> None:
        """The first half, which needs no fresh output: reused rows, and zeros. A second call does nothing."""
        rows = self.rows
        if self._copied or rows.all_fresh:
            return
        if self.out_TH is None:
            self.out_TH = self.cache_MH.new_empty((rows.total, self.cache_MH.shape[1]))
        if rows.num_fresh + rows.reuse_dst.numel() != rows.total:
            self.out_TH.zero_()
        self.out_TH.index_copy_(0, rows.reuse_dst, self.cache_MH.index_select(0, rows.reuse_src))
        self._copied = True

    def finish(self, y_RH: Tensor) -> Tensor:
        """The second half: the first one if it has not been run, then the fresh rows, and what the cache keeps of them.

        Returns:
            The shard.
        """
        rows = self.rows
        if rows.all_fresh:
            out_TH = y_RH if self.out_TH is None else self.out_TH.copy_(y_RH)
        else:
            self.copy_cached()
            assert self.out_TH is not None
            out_TH = self.out_TH.index_copy_(0, rows.fresh_R, y_RH)
        if rows.store_src.numel():
            self.cache_MH.index_copy_(0, rows.store_dst, y_RH.index_select(0, rows.store_src))
        return out_TH


def restore(y_RH: Tensor, rows: ListedRows, cache_MH: Tensor, out_TH: Tensor | None = None) -> Tensor:
    """Both halves of a `Restore` at once: ``[T,H]``, written to ``out_TH`` if given; writes the cache."""
    return Restore(rows, cache_MH, out_TH).finish(y_RH)
