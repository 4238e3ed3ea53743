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
class PackedRows:
    """The fresh rows of one forward, packed, as every layer's routing sees them.

    Attributes:
        batch, seq_len: B and S.
        block_len: W, rows of the current block.
        fresh_R: int64, rows ``0..T-1`` that go through the routed experts, ascending.
        restricted_R: bool, fresh rows whose selection stays inside the support.
        joining_R: bool, fresh rows whose experts join the support.
        vote_R: int64, for rows that a support is compiled from (live rows that hold no token) their place
            ``0..B*W-1`` in the current block; ``B*W`` for all others.
        sequence_R: int64, the sequence of each fresh row.
    """

    batch: int
    seq_len: int
    block_len: int
    fresh_R: Tensor
    restricted_R: Tensor
    joining_R: Tensor
    vote_R: Tensor
    sequence_R: Tensor

    @property
    def total(self) -> int:
        """T."""
        return self.batch * self.seq_len

    @property
    def place_R(self) -> Tensor:
        """Where each fresh row lies in a grid of B x S places: sums over a sequence's rows go through that grid.

        ``B*S`` for what belongs to no place.
        """
        return self.fresh_R

    @property
    def all_fresh(self) -> bool:
        """Every one of the T rows is fresh, and the host knows it."""
        return False

    @property
    def may_restrict(self) -> bool:
        """False where the host knows that no row is restricted."""
        return True


@dataclass(frozen=True)
class RowPlan(PackedRows):
    """What one forward does with each of its T rows; the same for all layers, computed once per forward.

    The form for the host: lists of known length. `epoch_moe.plan.padded.PaddedRowPlan` is the form for the device.

    Attributes:
        store_src, store_dst: int64, positions in ``fresh_R`` whose outputs are cached, and where (``0..B*N-1``).
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
        return self.fresh_R.numel()

    @property
    def all_fresh(self) -> bool:
        """Every one of the T rows is fresh."""
        return self.num_fresh == self.total

    @property
    def may_restrict(self) -> bool:
        """Whether a row is restricted."""
        return self.num_restricted > 0


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


@dataclass(frozen=True)
class RowDecision:
    """What one forward does with each of its rows, as masks over them; no value was read on the host.

    Attributes:
        lead, prefix, future: C, and the window rows before and behind the current block.
        valid_BS: rows that exist.
        fresh_BS: go through the routed experts.
        reuse_BS: take their cached output.
        stored_BS: fresh, and their output is cached.
        restricted_BS: fresh, and select inside the support.
        joining_BS: fresh, and their experts join the support.
        voting_BS: a support is compiled from these.
    """

    lead: int
    prefix: int
    future: int
    valid_BS: Tensor
    fresh_BS: Tensor
    reuse_BS: Tensor
    stored_BS: Tensor
    restricted_BS: Tensor
    joining_BS: Tensor
    voting_BS: Tensor

    @property
    def window(self) -> int:
        """N."""
        return self.valid_BS.shape[1] - self.lead

    @property
    def block_len(self) -> int:
        """W."""
        return self.window - self.prefix - self.future

    def entry(self, rows: Tensor) -> Tensor:
        """Cache entries of window rows, given by their numbers ``0..T-1``."""
        seq_len = self.valid_BS.shape[1]
        return (rows // seq_len) * self.window + rows % seq_len - self.lead

    def vote(self, rows: Tensor, voting: Tensor) -> Tensor:
        """`PackedRows.vote_R` of rows, given by their numbers and whether they vote."""
        batch, seq_len = self.valid_BS.shape
        place = (rows // seq_len) * self.block_len + rows % seq_len - self.lead - self.prefix
        return torch.where(voting, place, batch * self.block_len)


def decide_rows(
    states: RowStates, *, refresh: bool, cold: bool, lead: int, prefix: int, future: int, restrict_new: bool
) -> RowDecision:
    """What happens to each row, from its class.

    Args:
        refresh: recompute all rows but constant prefix rows.
        cold: the block's first forward: nothing is reused or restricted.
        lead: C.
        prefix, future: window rows before and behind the current block.
        restrict_new: restrict the block's decoded rows too.
    """
    valid_BS, live_BN = states.valid_BS, states.live_BN
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

    reuse_BS = whole(reusable_BN) & valid_BS
    fresh_BS = valid_BS & ~reuse_BS
    stored_BN = ~live_BN & ~states.awake_BN
    # The support speaks for the block's rows: prefix and future rows route freely under either setting.
    block_BN = torch.zeros_like(live_BN)
    block_BN[:, prefix : block_BN.shape[1] - future] = True
    # A support is compiled from undecoded rows. A row that holds a token routes otherwise, also where it is live.
    undecoded_BN = live_BN & ~states.edited_BN
    restricted_BN = torch.zeros_like(live_BN) if cold else (block_BN if restrict_new else undecoded_BN)
    joining_BN = (stored_BN & ~states.cached_BN | states.edited_BN) & block_BN & ~restricted_BN
    return RowDecision(
        lead=lead,
        prefix=prefix,
        future=future,
        valid_BS=valid_BS,
        fresh_BS=fresh_BS,
        reuse_BS=reuse_BS,
        stored_BS=whole(stored_BN) & fresh_BS,
        restricted_BS=whole(restricted_BN) & fresh_BS,
        joining_BS=whole(joining_BN) & fresh_BS,
        voting_BS=whole(undecoded_BN & block_BN) & fresh_BS,
    )


def plan_rows(decision: RowDecision) -> RowPlan:
    """The index lists that every layer of a forward uses. Waits for the device."""
    batch, seq_len = decision.valid_BS.shape
    fresh_R = decision.fresh_BS.view(-1).nonzero().squeeze(1)
    reuse_T = decision.reuse_BS.view(-1).nonzero().squeeze(1)

    def packed(mask_BS: Tensor) -> Tensor:
        return mask_BS.view(-1)[fresh_R]

    restricted_R, voting_R = packed(decision.restricted_BS), packed(decision.voting_BS)
    store_src = packed(decision.stored_BS).nonzero().squeeze(1)
    counts = torch.stack([decision.valid_BS.sum(), restricted_R.sum(), voting_R.sum()])
    num_rows, num_restricted, num_voting = counts.tolist()
    return RowPlan(
        batch=batch,
        seq_len=seq_len,
        block_len=decision.block_len,
        fresh_R=fresh_R,
        restricted_R=restricted_R,
        joining_R=packed(decision.joining_BS),
        vote_R=decision.vote(fresh_R, voting_R),
        sequence_R=fresh_R // seq_len,
        store_src=store_src,
        store_dst=decision.entry(fresh_R[store_src]),
        reuse_src=decision.entry(reuse_T),
        reuse_dst=reuse_T,
        num_rows=num_rows,
        num_restricted=num_restricted,
        num_voting=num_voting,
    )


def true_places(mask_T: Tensor, count: int) -> Tensor:
    """Where a mask is True, ascending: nonzero() without its host sync, as how many there are is known."""
    return mask_T.to(torch.uint8).argsort(descending=True, stable=True)[:count]
