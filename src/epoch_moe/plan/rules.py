"""LSP: what a forward does with each of its rows. The one rule book, on masks alone.

Blocks in lockstep (`epoch_moe.plan.block_plan`) and keyed batches (`epoch_moe.plan.keyed`) say what their rows are
(`RowClasses`) and where they belong (`RowPlaces`); `decide_rows` says what happens to them (`RowMasks`). No value is
read on the host. `epoch_moe.plan.packed` makes from the masks what layers compute with.

Shape suffixes: T rows of the forward, G groups (sequences of a block, or slots of a keyed batch), N rows with state of
each group, M = G x N cache entries, W rows of each group's current block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig

NO_TOKEN = -1
"""Token stamp of a cache entry that holds nothing."""


@dataclass(frozen=True)
class RowPlaces:
    """Where the rows of a forward belong: int64 ``[T]``.

    Attributes:
        groups, width, block_len: G, N and W.
        group_T: the group whose support the row uses; without meaning for rows that do not exist.
        entry_T: the row's cache entry, ``0..M-1``; M for rows without state.
        vote_T: the row's place ``0..G*W-1`` in the current blocks; ``G*W`` for rows of no current block.
    """

    groups: int
    width: int
    block_len: int
    group_T: Tensor
    entry_T: Tensor
    vote_T: Tensor

    @property
    def total(self) -> int:
        """T."""
        return self.entry_T.shape[0]

    @property
    def entries(self) -> int:
        """M."""
        return self.groups * self.width


@dataclass(frozen=True)
class RowClasses:
    """What the rows of a forward are: bool ``[T]``, or ``[1]`` where it holds for all of them.

    Attributes:
        valid_T: rows that exist (not padding, not of a finished sequence).
        state_T: rows that have a cache entry; the others (prompt rows, rows of a finished block) are always fresh,
            route freely and are never cached.
        live_T: rows with state whose logits can still change a decode decision.
        edited_T: live rows that hold a token: decoders that edit tokens may still replace it.
        cached_T: rows whose cache entry was computed for their present token.
        block_T: rows of the current block, for which the support speaks.
        constant_T: rows before the block that cannot change behind its first forward (block-causal mask), or that are
            not seen again.
        awake_T: MASK rows of later blocks that are computed on every forward; no output of theirs is kept.
        cold_T: rows whose block is in its first forward: nothing is restricted.
        full_T: rows that are recomputed whatever is cached.
    """

    valid_T: Tensor
    state_T: Tensor
    live_T: Tensor
    edited_T: Tensor
    cached_T: Tensor
    block_T: Tensor
    constant_T: Tensor
    awake_T: Tensor
    cold_T: Tensor
    full_T: Tensor


@dataclass(frozen=True)
class RowMasks:
    """What happens to the rows of a forward: bool ``[T]``.

    Attributes:
        valid_T: rows that exist.
        fresh_T: go through the routed experts.
        reuse_T: take their cached output.
        stored_T: fresh, and their output is cached.
        kept_T: their present cache entry stays usable after this forward, computed anew or not.
        restricted_T: fresh, and select inside the support.
        joining_T: fresh, and their experts join the support.
        voting_T: fresh, and a support is compiled from them: rows of the block that are live and hold no token.
        drifting_T: fresh, but a layer leaves them out (`leave_out`) where its input of the row has hardly moved.
    """

    valid_T: Tensor
    fresh_T: Tensor
    reuse_T: Tensor
    stored_T: Tensor
    kept_T: Tensor
    restricted_T: Tensor
    joining_T: Tensor
    voting_T: Tensor
    drifting_T: Tensor


def cached_rows(stamp_T: Tensor, ids_T: Tensor, changed_T: Tensor | None) -> Tensor:
    """Rows whose cache entry was computed for their present token: bool ``[T]``.

    Args:
        stamp_T: int64, the token that each row's entry was computed for; `NO_TOKEN` where there is none.
        ids_T: int64, token ids.
        changed_T: bool, rows whose entry must not be used, whatever its stamp says; None = none.
    """
    # An id below zero (some callers pad with -1) is no token that an entry could have been computed for.
    cached_T = (stamp_T == ids_T) & (stamp_T != NO_TOKEN)
    return cached_T if changed_T is None else cached_T & ~changed_T


def decide_rows(rows: RowClasses, config: EpochConfig) -> RowMasks:
    """What happens to each row of a forward, from its class."""
    undecided_T = rows.live_T | rows.awake_T
    drift, live_drift = config.drift is not None, config.live_drift is not None
    keeps_T = rows.state_T if live_drift else rows.state_T & ~undecided_T
    kept_T = keeps_T & rows.cached_T
    if not drift:  # by age alone, and nobody counts that of a row that was not there
        kept_T = kept_T & rows.valid_T
    usable_T = rows.valid_T & kept_T & ~rows.full_T
    drifting_T = usable_T & (undecided_T if live_drift else torch.zeros_like(kept_T))
    if drift:
        # What cannot change any more is reused without a look at it.
        drifting_T = drifting_T | (usable_T & ~undecided_T & (rows.cold_T | ~rows.constant_T))
    reuse_T = usable_T & ~drifting_T
    fresh_T = rows.valid_T & ~reuse_T
    # A support is compiled from undecoded rows. A row that holds a token routes otherwise, also where it is live.
    undecoded_T = rows.live_T & ~rows.edited_T
    warm_T = fresh_T & ~rows.cold_T
    # The support speaks for the block's rows: rows before and behind it route freely under either setting.
    restricted_T = warm_T & (rows.block_T if config.restrict_new else undecoded_T)
    return RowMasks(
        valid_T=rows.valid_T,
        fresh_T=fresh_T,
        reuse_T=reuse_T,
        stored_T=fresh_T & keeps_T,
        kept_T=kept_T,
        restricted_T=restricted_T,
        joining_T=warm_T & rows.block_T & ~restricted_T & (keeps_T & ~rows.cached_T | rows.edited_T),
        voting_T=fresh_T & rows.block_T & undecoded_T,
        drifting_T=drifting_T,
    )


def only(masks: RowMasks, rows_T: Tensor) -> RowMasks:
    """The masks of one layer that does nothing with other rows than ``rows_T``: these come out as zeros."""
    names = ("fresh_T", "reuse_T", "stored_T", "restricted_T", "joining_T", "voting_T", "drifting_T")
    return replace(masks, **{name: getattr(masks, name) & rows_T for name in names})


def still_rows(
    x_TH: Tensor, inputs_M1H: Tensor, places: RowPlaces, rows: RowClasses, config: EpochConfig
) -> Tensor:
    """Rows whose input of a layer has hardly moved since their cached output was computed: bool ``[T]``.

    Args:
        x_TH: the layer's input.
        inputs_M1H: the inputs of the cached outputs; what entries hold that were never written does not matter.
        config: of the layer (`EpochConfig.of_layer`).
    """
    assert not isinstance(config.drift, tuple) and not isinstance(config.live_drift, tuple)
    cosine_T = torch.cosine_similarity(x_TH.float(), inputs_M1H[places.entry_T].float(), dim=-1).clamp(max=1.0)
    # An input that is no number compares as moved.
    still_T = cosine_T > (1.0 if config.drift is None else config.drift)
    if config.live_drift is not None:
        still_T = torch.where(rows.live_T | rows.awake_T, cosine_T > config.live_drift, still_T)
    return still_T


def leave_out(masks: RowMasks, still_T: Tensor) -> RowMasks:
    """The masks of one layer: of the forward's fresh rows, those in ``still_T`` take their cached output instead."""
    return replace(only(masks, ~still_T), reuse_T=masks.reuse_T | still_T)


def stamps_after(masks: RowMasks, stamp_T: Tensor, ids_T: Tensor) -> Tensor:
    """Stamps of the rows' entries after a forward that did not fail: int64 ``[T]``.

    An entry that the forward could not have used (edited, masked again, live, declared changed; by age alone also of a
    row that was not there) is lost for good: the row may come back with its old token.
    """
    return torch.where(masks.stored_T, ids_T, stamp_T.masked_fill(~masks.kept_T, NO_TOKEN))
