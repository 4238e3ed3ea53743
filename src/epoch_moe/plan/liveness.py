"""LSP: which rows of a forward go through the routed experts, and what happens to the others.

Shape suffixes: B sequences, S rows per sequence in this forward, C lead rows, N window rows (S = C + N), T = B x S,
R fresh rows.

A forward's rows are the *lead* (blocks whose K/V this forward writes for good: prompt blocks, or the block that has
just been finished) followed by the *window*, whose rows have state. On a full window without K/V cache the earlier
blocks lie before the current one as *prefix* rows, and on a fixed canvas the later ones behind it as *future* rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_TOKEN = -1
"""Token stamp of a cache entry that holds nothing."""


@dataclass(frozen=True)
class RowPlan:
    """What one forward does with each of its T rows; the same for all layers, computed once per forward.

    Attributes:
        batch, seq_len: B and S.
        fresh_R: int64, rows ``0..T-1`` that go through the routed experts, ascending.
        restricted_R: bool, fresh rows whose selection stays inside the support.
        joining_R: bool, fresh rows whose experts join the support.
        vote_src, vote_dst: int64, positions in ``fresh_R`` of the rows that a support is compiled from (live rows that
            hold no token), and their places ``0..B*W-1`` in the current block of W rows.
        block_len: W.
        sequence_R: int64, the sequence of each fresh row.
        store_src, store_dst: int64, positions in ``fresh_R`` whose outputs are cached, and where (``0..B*N-1``).
        reuse_src, reuse_dst: int64, cache entries that are restored, and the rows that they become.
        num_rows: rows that a dense forward would compute (valid rows).
        num_restricted: how many fresh rows are restricted (a host number).
        all_fresh: every one of the T rows is fresh.
    """

    batch: int
    seq_len: int
    fresh_R: Tensor
    restricted_R: Tensor
    joining_R: Tensor
    vote_src: Tensor
    vote_dst: Tensor
    sequence_R: Tensor
    store_src: Tensor
    store_dst: Tensor
    reuse_src: Tensor
    reuse_dst: Tensor
    block_len: int
    num_rows: int
    num_restricted: int
    all_fresh: bool

    @property
    def num_fresh(self) -> int:
        """R."""
        return self.fresh_R.numel()

    @property
    def total(self) -> int:
        """T."""
        return self.batch * self.seq_len

    @property
    def place_R(self) -> Tensor:
        """Where each fresh row lies in a grid of B x S places: sums over a sequence's rows go through that grid."""
        return self.fresh_R


@dataclass(frozen=True)
class RowStates:
    """Row classes of one forward (DESIGN: live, new, stable, prefix, commit), as masks.

    Attributes:
        valid_BS: rows that exist (not padding, not of a finished sequence).
        live_BN: rows whose logits can still change a decode decision.
        edited_BN: live rows that hold a token: decoders that edit tokens may still replace it.
        cached_BN: rows whose cache entry was computed for their present token.
        constant_BN: prefix rows that cannot change within the block (block-causal mask).
        awake_BN: future rows that go through the experts on every forward; no output of theirs is kept.
    """

    valid_BS: Tensor
    live_BN: Tensor
    edited_BN: Tensor
    cached_BN: Tensor
    constant_BN: Tensor
    awake_BN: Tensor


def classify(
    ids_BS: Tensor,
    stamps_BN: Tensor,
    lead: int,
    prefix: int,
    future: int,
    prefix_constant: bool,
    future_dormant: bool,
    mask_id: int | None,
    valid_BS: Tensor | None,
    live_BN: Tensor | None,
    changed_BN: Tensor | None,
) -> RowStates:
    """Row classes from token ids, or from masks where the decoder knows better.

    Args:
        ids_BS: token ids of the forward's rows.
        stamps_BN: token that each cache entry was computed for; `NO_TOKEN` where there is none.
        lead: C.
        prefix: how many of the window's first rows lie before the current block.
        future: how many of its last rows lie behind it.
        prefix_constant: whether the forward's mask keeps prefix rows from seeing the current block.
        future_dormant: future rows are cached and reused like stable ones.
        mask_id: id of undecoded positions; needed unless ``live_BN`` is given. Without it every live row counts as
            undecoded.
        valid_BS: default: all rows.
        live_BN: overrides "MASK in the current block".
        changed_BN: rows whose cache entry must not be used, whatever its stamp says.
    """
    window_BN = ids_BS[:, lead:]
    valid_BS = torch.ones_like(ids_BS, dtype=torch.bool) if valid_BS is None else valid_BS
    if live_BN is None:
        assert mask_id is not None
        live_BN = window_BN.eq(mask_id)
        live_BN[:, :prefix] = False
        live_BN[:, live_BN.shape[1] - future :] = False
    live_BN = live_BN & valid_BS[:, lead:]
    edited_BN = torch.zeros_like(live_BN) if mask_id is None else live_BN & window_BN.ne(mask_id)
    # An id below zero (some callers pad with -1) is no token that an entry could have been computed for.
    cached_BN = (stamps_BN == window_BN) & (stamps_BN != NO_TOKEN)
    if changed_BN is not None:
        cached_BN = cached_BN & ~changed_BN
    constant_BN = torch.zeros_like(cached_BN)
    constant_BN[:, :prefix] = prefix_constant
    awake_BN = torch.zeros_like(cached_BN)
    awake_BN[:, awake_BN.shape[1] - future :] = not future_dormant
    return RowStates(valid_BS, live_BN, edited_BN, cached_BN, constant_BN, awake_BN)


def plan_rows(
    states: RowStates, *, refresh: bool, cold: bool, lead: int, prefix: int, future: int, restrict_new: bool
) -> RowPlan:
    """Turn row classes into the index lists that every layer of this forward uses.

    Args:
        refresh: recompute all rows but constant prefix rows.
        cold: the block's first forward: nothing is reused or restricted.
        lead: C.
        prefix, future: window rows before and behind the current block.
        restrict_new: restrict the block's decoded rows too.
    """
    valid_BS, live_BN = states.valid_BS, states.live_BN
    batch, seq_len = valid_BS.shape
    window = seq_len - lead
    reusable_BN = states.cached_BN & ~live_BN & ~states.awake_BN
    if cold:
        reusable_BN = torch.zeros_like(reusable_BN)
    elif refresh:
        reusable_BN = reusable_BN & states.constant_BN

    def whole(mask_BN: Tensor) -> Tensor:
        """A window mask as a mask over the forward's rows."""
        full_BS = torch.zeros_like(valid_BS)
        full_BS[:, lead:] = mask_BN
        return full_BS

    live_BS, reuse_BS = whole(live_BN), whole(reusable_BN) & valid_BS
    fresh_BS = valid_BS & ~reuse_BS
    fresh_R = fresh_BS.view(-1).nonzero().squeeze(1)
    sequence_R, position_R = fresh_R // seq_len, fresh_R % seq_len
    live_R = live_BS.view(-1)[fresh_R]
    window_R = position_R >= lead
    stored_R = window_R & ~live_R & ~whole(states.awake_BN).view(-1)[fresh_R]
    new_R = stored_R & ~whole(states.cached_BN).view(-1)[fresh_R]
    # The support speaks for the block's rows: prefix and future rows route freely under either setting.
    block_R = (position_R >= lead + prefix) & (position_R < seq_len - future)
    # A support is compiled from undecoded rows. A row that holds a token routes otherwise, also where it is live.
    edited_R = whole(states.edited_BN).view(-1)[fresh_R]
    undecoded_R = live_R & ~edited_R
    restricted_R = torch.zeros_like(live_R) if cold else (block_R if restrict_new else undecoded_R)
    reuse_T = reuse_BS.view(-1).nonzero().squeeze(1)
    store_src = stored_R.nonzero().squeeze(1)
    vote_src = (undecoded_R & block_R).nonzero().squeeze(1)
    block_len = window - prefix - future
    num_rows = int(valid_BS.sum())
    return RowPlan(
        batch=batch,
        seq_len=seq_len,
        fresh_R=fresh_R,
        restricted_R=restricted_R,
        joining_R=(new_R | edited_R) & block_R & ~restricted_R,
        vote_src=vote_src,
        vote_dst=(sequence_R * block_len + position_R - lead - prefix)[vote_src],
        sequence_R=sequence_R,
        store_src=store_src,
        store_dst=(sequence_R * window + position_R - lead)[store_src],
        reuse_src=(reuse_T // seq_len) * window + reuse_T % seq_len - lead,
        reuse_dst=reuse_T,
        block_len=block_len,
        num_rows=num_rows,
        num_restricted=int(restricted_R.sum()),
        all_fresh=fresh_R.numel() == batch * seq_len,
    )
