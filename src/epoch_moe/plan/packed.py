"""The fresh rows of a forward, packed: as lists of known length, or padded to a capacity that the host chose.

Both are made from the masks of `epoch_moe.plan.rules`. `list_rows` waits for the device once; `pad_rows` does not.

Shape suffixes: T rows of the forward, R packed rows (padded: the capacity, of which the first ``count`` are real),
G groups, M cache entries, W rows of each group's current block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from epoch_moe.plan.rules import RowMasks, RowPlaces

Compact = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""``(mask_T, capacity) -> rows_R, rank_T, count``: see `epoch_moe.kernels.compaction.compact`."""


@dataclass(frozen=True)
class PackedRows:
    """The fresh rows of one forward as every layer's routing sees them.

    Padding rows have values that do nothing: they are not restricted, join nothing, and their places are behind the
    last one.

    Attributes:
        places: where the forward's T rows belong.
        fresh_R: int64, rows ``0..T-1`` that go through the routed experts, ascending; 0 in padding.
        restricted_R: bool, fresh rows whose selection stays inside the support.
        joining_R: bool, fresh rows whose experts join the support.
        vote_R: int64, for rows that a support is compiled from their place ``0..G*W-1`` in the current blocks; ``G*W``
            for all others.
        group_R: int64, the group of each fresh row.
        entry_R: int64, the cache entry of each fresh row; M for rows without one.
    """

    places: RowPlaces
    fresh_R: Tensor
    restricted_R: Tensor
    joining_R: Tensor
    vote_R: Tensor
    group_R: Tensor
    entry_R: Tensor

    @property
    def total(self) -> int:
        """T."""
        return self.places.total

    @property
    def votes_R(self) -> Tensor:
        """Bool, rows that a support is compiled from."""
        return self.vote_R < self.places.groups * self.places.block_len

    @property
    def all_fresh(self) -> bool:
        """Every one of the T rows is fresh, and the host knows it."""
        return False

    @property
    def may_restrict(self) -> bool:
        """False where the host knows that no row is restricted."""
        return True


@dataclass(frozen=True)
class ListedRows(PackedRows):
    """What a forward does with each of its T rows, as lists of known length: the form for the host.

    Attributes:
        store_src, store_dst: int64, positions in ``fresh_R`` whose outputs are cached, and their cache entries.
        reuse_src, reuse_dst: int64, cache entries that are restored, and the rows that they become.
        num_rows: rows that a dense forward would compute (valid rows).
        num_restricted, num_voting: how many fresh rows are restricted, and how many vote.
    """

    store_src: Tensor
    store_dst: Tensor
    reuse_src: Tensor
    reuse_dst: Tensor
    num_rows: int
    num_restricted: int
    num_voting: int

    @property
    def num_fresh(self) -> int:
        """R."""
        return self.fresh_R.shape[0]

    @property
    def all_fresh(self) -> bool:
        """Every one of the T rows is fresh."""
        return self.num_fresh == self.total

    @property
    def may_restrict(self) -> bool:
        """Whether a row is restricted."""
        return self.num_restricted > 0


@dataclass(frozen=True)
class PaddedRows(PackedRows):
    """What a forward does with each of its T rows, without a length on the host: the form for the device.

    Attributes:
        count: int32 ``[1]``, fresh rows; above the capacity R where they did not fit.
        source_T: int64, where each row's output comes from: packed row ``s >= 0``; -1, nowhere (zeros); ``-(m + 2)``,
            cache entry m.
        store_R: int64, the cache entry that each packed row's output is kept in; -1 for none.
        num_rows: int64 ``[]``, rows that a dense forward would compute (valid rows).
        num_voting: int64 ``[]``, live rows that hold no token.
    """

    count: Tensor
    source_T: Tensor
    store_R: Tensor
    num_rows: Tensor
    num_voting: Tensor

    @property
    def capacity(self) -> int:
        """R."""
        return self.fresh_R.shape[0]


def list_rows(masks: RowMasks, places: RowPlaces, *flags: Tensor) -> tuple[ListedRows, list[int]]:
    """The rows of a forward as lists, by one host sync, and what else the caller wants to know in it.

    Args:
        masks: what happens to the rows.
        places: where they belong.
        flags: bool or integer tensors of any shape.

    Returns:
        The lists, and the values of ``flags``, one after the other.
    """
    counts = count_rows(masks)
    numbers = read(torch.cat([counts, *(flag.reshape(-1).to(counts) for flag in flags)]))
    return rows_of_counts(masks, places, numbers[: len(counts)]), numbers[len(counts) :]


def count_rows(masks: RowMasks) -> Tensor:
    """What `rows_of_counts` must know on the host: int64 ``[6]``."""
    lists = (masks.valid_T, masks.fresh_T, masks.reuse_T, masks.stored_T, masks.restricted_T, masks.voting_T)
    return torch.stack([mask_T.sum() for mask_T in lists])


def rows_of_counts(masks: RowMasks, places: RowPlaces, counts: list[int]) -> ListedRows:
    """The rows as lists, from the values of `count_rows`."""
    valid, fresh, reuse, stored, restricted, voting = counts
    fresh_R, reuse_dst = true_places(masks.fresh_T, fresh), true_places(masks.reuse_T, reuse)
    entry_R = places.entry_T[fresh_R]
    store_src = true_places(masks.stored_T[fresh_R], stored)
    return ListedRows(
        places=places,
        fresh_R=fresh_R,
        restricted_R=masks.restricted_T[fresh_R],
        joining_R=masks.joining_T[fresh_R],
        vote_R=_votes(masks.voting_T[fresh_R], places, fresh_R),
        group_R=places.group_T[fresh_R],
        entry_R=entry_R,
        store_src=store_src,
        store_dst=entry_R[store_src],
        reuse_src=places.entry_T[reuse_dst],
        reuse_dst=reuse_dst,
        num_rows=valid,
        num_restricted=restricted,
        num_voting=voting,
    )


def read(numbers: Tensor) -> list[int]:
    """The one host sync of a forward whose rows are lists."""
    return numbers.tolist()


def pad_rows(masks: RowMasks, places: RowPlaces, compact: Compact, capacity: int | None = None) -> PaddedRows:
    """The rows of a forward in a capacity; reads no value on the host.

    Args:
        masks: what happens to the rows.
        places: where they belong.
        compact: packs the fresh rows.
        capacity: R, at most T; None = T, which always suffices. Fresh rows beyond it are not computed, and their
            outputs are zeros: whoever gives a smaller one must look at ``count`` before the outputs are used.
    """
    total = places.total
    capacity = total if capacity is None else min(capacity, total)
    fresh_R, rank_T, count = compact(masks.fresh_T, capacity)
    real_R = torch.arange(capacity, device=fresh_R.device) < count

    def packed(mask_T: Tensor) -> Tensor:
        return mask_T.index_select(0, fresh_R) & real_R

    entry_R = places.entry_T[fresh_R]
    reused_T = torch.where(masks.reuse_T, -(places.entry_T + 2), -1)
    return PaddedRows(
        places=places,
        fresh_R=fresh_R,
        restricted_R=packed(masks.restricted_T),
        joining_R=packed(masks.joining_T),
        vote_R=_votes(packed(masks.voting_T), places, fresh_R),
        group_R=places.group_T[fresh_R],
        entry_R=torch.where(real_R, entry_R, places.entries),
        count=count,
        source_T=torch.where(rank_T >= 0, rank_T, reused_T),
        store_R=torch.where(packed(masks.stored_T), entry_R, -1),
        num_rows=masks.valid_T.sum(),
        num_voting=masks.voting_T.sum(),
    )


def true_places(mask_T: Tensor, count: int) -> Tensor:
    """Where a mask is True, ascending: ``[count]``. No host sync, as how many there are is known."""
    return torch.nonzero_static(mask_T, size=count).squeeze(1)


def _votes(voting_R: Tensor, places: RowPlaces, fresh_R: Tensor) -> Tensor:
    return torch.where(voting_R, places.vote_T[fresh_R], places.groups * places.block_len)
