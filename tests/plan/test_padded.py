"""Row plans for the device against the lists of the same forward, over random decodes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from lsp_oracle import MASK, Forward, Oracle
from test_rules import CHECKED, decodes, open_plan
from torch import Tensor

from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.forward import ForwardPlan
from epoch_moe.plan.packed import ListedRows, PaddedRows
from epoch_moe.plan.rules import NO_TOKEN


def compact(mask_T: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """A loop over the rows."""
    places = [t for t, flag in enumerate(mask_T.tolist()) if flag]
    rows_R = torch.tensor([*places, *[0] * capacity][:capacity], dtype=torch.int64)
    rank_T = torch.full(mask_T.shape, -1)
    for place, t in enumerate(places[:capacity]):
        rank_T[t] = place
    return rows_R, rank_T, torch.tensor([len(places)], dtype=torch.int32)


def padded_twin(plan: BlockPlan) -> BlockPlan:
    return BlockPlan(
        plan.config,
        1,
        batch=plan.batch,
        window=plan.window,
        prefix=plan.prefix,
        prefix_constant=plan.prefix_constant,
        future=plan.future,
        counters=plan.counters,
        compact=compact,
    )


def step_of(plan: BlockPlan, forward: Forward, capacity: int | None = None) -> ForwardPlan:
    return plan.next_forward(
        torch.tensor(forward.ids),
        mask_id=MASK,
        valid_BS=torch.tensor(forward.valid),
        lead=forward.lead,
        live_BN=None,
        changed_BN=None,
        capacity=capacity,
    )


@CHECKED
@given(decodes())
def test_padded_rows_equal_the_lists(decode: tuple[Oracle, list[Forward]]) -> None:
    oracle, forwards = decode
    listed = open_plan(oracle)
    padded = padded_twin(listed)
    for number, forward in enumerate(forwards):
        ours, theirs = step_of(padded, forward), step_of(listed, forward)
        rows, lists = ours.rows, theirs.rows
        assert isinstance(rows, PaddedRows) and isinstance(lists, ListedRows)
        fresh, total = lists.num_fresh, lists.total
        assert rows.capacity == rows.total == total and rows.count.tolist() == [fresh]
        for name in ("fresh_R", "restricted_R", "joining_R", "vote_R", "group_R", "entry_R"):
            assert torch.equal(getattr(rows, name)[:fresh], getattr(lists, name)), name
        # Padding does nothing.
        assert not rows.restricted_R[fresh:].any() and not rows.joining_R[fresh:].any()
        places = rows.places
        assert (rows.vote_R[fresh:] == places.groups * places.block_len).all()
        assert (rows.entry_R[fresh:] == places.entries).all()
        assert (rows.fresh_R[fresh:] == 0).all() and (rows.store_R[fresh:] == -1).all()
        # Where outputs come from and where they are kept.
        source_T = torch.full((total,), -1)
        source_T[lists.fresh_R] = torch.arange(fresh)
        source_T[lists.reuse_dst] = -(lists.reuse_src + 2)
        assert torch.equal(rows.source_T, source_T)
        store_R = torch.full((total,), -1)
        store_R[lists.store_src] = lists.store_dst
        assert torch.equal(rows.store_R, store_R)
        assert (int(rows.num_rows), int(rows.num_voting)) == (lists.num_rows, lists.num_voting)
        address = None if padded.stamps_M is None else padded.stamps_M.data_ptr()
        padded.complete(ours)
        listed.complete(theirs)
        assert padded.stamps_M is not None and listed.stamps_M is not None
        assert torch.equal(padded.stamps_M, listed.stamps_M), number
        assert padded.stamps_M.data_ptr() == address


@CHECKED
@given(decodes(), st.integers(0, 12))
def test_rows_beyond_the_capacity_show_and_are_not_kept(decode: tuple[Oracle, list[Forward]], capacity: int) -> None:
    oracle, forwards = decode
    listed = open_plan(oracle)
    padded = padded_twin(listed)
    for forward in forwards:
        ours, theirs = step_of(padded, forward, capacity), step_of(listed, forward)
        rows, lists = ours.rows, theirs.rows
        assert isinstance(rows, PaddedRows) and isinstance(lists, ListedRows)
        # The first forward and refreshes compute everything, whatever the bucket.
        held = rows.total if ours.cold or ours.refresh else min(capacity, rows.total)
        assert rows.capacity == held and rows.count.tolist() == [lists.num_fresh]
        kept = min(lists.num_fresh, held)
        assert torch.equal(rows.fresh_R[:kept], lists.fresh_R[:kept])
        assert (rows.source_T[lists.fresh_R[kept:]] == -1).all()
        padded.complete(ours)
        stamps_M = padded.stamps_M
        assert stamps_M is not None
        if kept < lists.num_fresh:
            lost_R = lists.entry_R[kept:]
            assert (stamps_M[lost_R[lost_R < stamps_M.shape[0]]] == NO_TOKEN).all()
            break
        listed.complete(theirs)
