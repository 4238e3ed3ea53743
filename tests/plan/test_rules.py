"""LSP: the row plan of every forward against the row-by-row loops of `lsp_oracle`, and what the cache serves."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lsp_oracle import MASK, Forward, Oracle, random_decode
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.freshlane.restore import pack, restore
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.packed import ListedRows

CHECKED = settings(max_examples=60)


def open_plan(oracle: Oracle) -> BlockPlan:
    config = EpochConfig(
        coverage=None,
        refresh_interval=oracle.interval,
        restrict_new=oracle.restrict_new,
        future_rows="dormant" if oracle.dormant else "fresh",
    )
    return BlockPlan(
        config,
        1,
        batch=oracle.batch,
        window=oracle.window,
        prefix=oracle.prefix,
        prefix_constant=oracle.constant,
        future=oracle.future,
        counters=Counters(1, [1]),
    )


@st.composite
def decodes(draw: st.DrawFn) -> tuple[Oracle, list[Forward]]:
    rng = random.Random(draw(st.integers(0, 2**31)))
    batch, prefix, block = draw(st.integers(1, 3)), draw(st.sampled_from([0, 0, 5])), draw(st.integers(1, 8))
    future = draw(st.sampled_from([0, 0, 4]))
    oracle = Oracle(
        batch,
        prefix + block + future,
        prefix,
        constant=draw(st.booleans()),
        interval=draw(st.sampled_from([1, 2, 3, 5, None])),
        restrict_new=draw(st.booleans()),
        future=future,
        dormant=draw(st.booleans()),
    )
    edits = draw(st.booleans())
    forwards = random_decode(rng, batch, prefix, block, draw(st.integers(1, 12)), edits, future)
    if oracle.constant:  # constant prefix rows do not change
        for forward in forwards:
            for b in range(batch):
                forward.ids[b][forward.lead : forward.lead + prefix] = forwards[0].ids[b][
                    forwards[0].lead : forwards[0].lead + prefix
                ]
    return oracle, forwards


def plan_of(plan: BlockPlan, forward: Forward) -> tuple[ListedRows, object]:
    step = plan.next_forward(
        torch.tensor(forward.ids),
        mask_id=MASK,
        valid_BS=torch.tensor(forward.valid),
        lead=forward.lead,
        live_BN=None,
        changed_BN=None,
    )
    assert isinstance(step.rows, ListedRows)
    return step.rows, step


@CHECKED
@given(decodes())
def test_row_plans_equal_the_oracle(decode: tuple[Oracle, list[Forward]]) -> None:
    oracle, forwards = decode
    plan = open_plan(oracle)
    for forward in forwards:
        rows, step = plan_of(plan, forward)
        want = oracle.forward(forward.ids, forward.lead, forward.valid)
        seq_len, window = forward.lead + oracle.window, oracle.window

        def places(index: Tensor, length: int = seq_len) -> set[tuple[int, int]]:
            return {divmod(i, length) for i in index.tolist()}

        assert rows.fresh_R.tolist() == sorted(rows.fresh_R.tolist())
        assert places(rows.fresh_R) == want.fresh
        assert places(rows.reuse_dst) == want.reused
        assert places(rows.fresh_R[rows.restricted_R]) == want.restricted
        assert places(rows.fresh_R[rows.store_src]) == want.stored
        if oracle.number > 1:  # the cold pass compiles the support, nothing joins it
            assert places(rows.fresh_R[rows.joining_R]) == want.joining
        voting_R = rows.vote_R < oracle.batch * rows.places.block_len
        assert places(rows.fresh_R[voting_R]) == want.voting and rows.num_voting == len(want.voting)
        # Places in the cache and in the voting grid belong to the same rows.
        assert {(b, n + forward.lead) for b, n in places(rows.store_dst, window)} == want.stored
        assert [(b, n + forward.lead) for b, n in map(lambda i: divmod(i, window), rows.reuse_src.tolist())] == [
            divmod(i, seq_len) for i in rows.reuse_dst.tolist()
        ]
        first = forward.lead + oracle.prefix
        votes = [divmod(i, rows.places.block_len) for i in rows.vote_R[voting_R].tolist()]
        assert [(b, w + first) for b, w in votes] == [divmod(i, seq_len) for i in rows.fresh_R[voting_R].tolist()]
        assert rows.group_R.tolist() == (rows.fresh_R // seq_len).tolist()
        assert rows.num_rows == sum(map(sum, forward.valid))
        assert rows.num_restricted == len(want.restricted)
        assert rows.all_fresh == (len(want.fresh) == oracle.batch * seq_len)
        plan.complete(step)  # type: ignore[arg-type]


@CHECKED
@given(decodes())
def test_a_restored_row_was_computed_for_this_token_in_this_place(decode: tuple[Oracle, list[Forward]]) -> None:
    """A layer whose output says for which sequence, row, token and forward it was computed; the cache starts as NaN."""
    oracle, forwards = decode
    plan = open_plan(oracle)
    computed: dict[tuple[int, int], int] = {}  # (sequence, window row) -> forward of its last fresh output
    cache_MH = torch.full((oracle.batch * oracle.window, 4), float("nan"))
    for number, forward in enumerate(forwards):
        rows, step = plan_of(plan, forward)
        seq_len = forward.lead + oracle.window
        label_TH = torch.tensor(
            [[b, s - forward.lead, forward.ids[b][s], number] for b in range(oracle.batch) for s in range(seq_len)],
            dtype=torch.float32,
        )
        out_TH = restore(pack(label_TH, rows).clone(), rows, cache_MH)
        for t, (b, n, token, when) in enumerate(out_TH.tolist()):
            s = t % seq_len
            if not forward.valid[t // seq_len][s]:
                assert (b, n, token, when) == (0, 0, 0, 0)
                continue
            assert (b, n, token) == (t // seq_len, s - forward.lead, forward.ids[t // seq_len][s])
            if t in rows.fresh_R.tolist():
                assert when == number
            else:
                assert when == computed[int(b), int(n)]
                assert number - when < (oracle.interval or 10**9) or n < oracle.prefix
                assert token != MASK or n >= oracle.window - oracle.future
            computed[int(b), int(n)] = int(when)
        plan.complete(step)  # type: ignore[arg-type]


def simple_plan(**changes: object) -> BlockPlan:
    return open_plan(Oracle(**{  # type: ignore[arg-type]
        "batch": 1, "window": 4, "prefix": 0, "constant": False, "interval": None, "restrict_new": False, **changes
    }))


def step(plan: BlockPlan, ids: list[int], **masks: Tensor | None) -> ListedRows:
    arguments: dict[str, object] = {"mask_id": MASK, "valid_BS": None, "lead": 0, "live_BN": None, "changed_BN": None}
    forward = plan.next_forward(torch.tensor([ids]), **(arguments | masks))  # type: ignore[arg-type]
    plan.complete(forward)
    return forward.rows


def test_a_remasked_row_is_not_reused_when_it_gets_its_old_token_back() -> None:
    plan = simple_plan()
    step(plan, [7, 8, MASK, MASK])
    assert step(plan, [7, 8, MASK, MASK]).reuse_dst.tolist() == [0, 1]
    step(plan, [MASK, 8, MASK, MASK])
    assert step(plan, [7, 8, MASK, MASK]).reuse_dst.tolist() == [1]


def test_changed_rows_are_computed_and_cached_anew() -> None:
    plan = simple_plan()
    step(plan, [7, 8, 9, MASK])
    changed = torch.tensor([[False, True, False, False]])
    rows = step(plan, [7, 8, 9, MASK], changed_BN=changed)
    assert rows.fresh_R.tolist() == [1, 3] and rows.fresh_R[rows.joining_R].tolist() == [1]
    assert step(plan, [7, 8, 9, MASK]).fresh_R.tolist() == [3]


def test_liveness_from_the_decoder_overrides_the_mask_id() -> None:
    plan = simple_plan()
    live = torch.tensor([[True, False, True, False]])
    step(plan, [7, 8, MASK, MASK], mask_id=None, live_BN=live)
    rows = step(plan, [7, 8, MASK, MASK], mask_id=None, live_BN=live)
    assert rows.fresh_R.tolist() == [0, 2]  # an edit-eligible row is live; a MASK that is not live is reused
    assert rows.fresh_R[rows.restricted_R].tolist() == [0, 2]


def test_a_stable_row_that_becomes_live_is_computed() -> None:
    plan = simple_plan()
    for live in ([False, False], [False, True], [False, True], [False, False], [False, False]):
        rows = step(plan, [7, 8, 9, MASK], live_BN=torch.tensor([[*live, False, True]]))
        if plan.forwards == 1:
            continue
        # In the fourth forward it is not live any more, but what was cached before it was live is gone.
        assert (1 in rows.fresh_R.tolist()) == (plan.forwards in (2, 3, 4))


def test_an_invalid_live_row_neither_votes_nor_runs() -> None:
    plan = simple_plan()
    rows = step(plan, [7, MASK, MASK, MASK], valid_BS=torch.tensor([[True, True, False, True]]))
    assert rows.fresh_R.tolist() == [0, 1, 3] and (rows.vote_R < 4).tolist() == [False, True, True]
    assert rows.num_rows == 3


def test_padding_with_minus_one_is_never_taken_for_a_cached_row() -> None:
    plan = simple_plan()
    step(plan, [5, 6, 7, MASK], valid_BS=torch.tensor([[False, True, True, True]]))
    rows = step(plan, [-1, 6, 7, MASK])
    assert rows.reuse_dst.tolist() == [1, 2] and 0 in rows.fresh_R.tolist()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_tokens_committed_into_the_same_tensor_do_not_reach_the_stamps(dtype: torch.dtype) -> None:
    plan = simple_plan()
    ids = torch.tensor([[MASK, MASK, 3, MASK]], dtype=dtype)
    masks: dict[str, object] = {"mask_id": MASK, "valid_BS": None, "lead": 0, "live_BN": None, "changed_BN": None}
    forward = plan.next_forward(ids, **masks)  # type: ignore[arg-type]
    ids[0, 2] = 4  # an edit while the forward is still open: its output belongs to token 3
    plan.complete(forward)
    again = plan.next_forward(ids, **masks)  # type: ignore[arg-type]
    assert again.rows.reuse_dst.tolist() == []


@pytest.mark.parametrize("constant", [True, False])
def test_a_refresh_spares_constant_prefix_rows_only(constant: bool) -> None:
    plan = simple_plan(prefix=2, constant=constant, interval=2)
    ids = [1, 2, MASK, 4]
    assert step(plan, ids).num_fresh == 4
    assert step(plan, ids).fresh_R.tolist() == [2]
    assert step(plan, ids).fresh_R.tolist() == ([2, 3] if constant else [0, 1, 2, 3])


@pytest.mark.parametrize("restrict_new", [False, True])
@CHECKED
@given(st.data())
def test_tokens_that_may_be_edited_are_live_but_route_freely(restrict_new: bool, data: st.DataObject) -> None:
    """A decoder's live mask decides what is fresh and never stored; the mask id says which live rows hold a token."""
    batch, block, lead = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0, 2]))
    config = EpochConfig(coverage=None, refresh_interval=None, restrict_new=restrict_new)
    plan = BlockPlan(config, 1, batch=batch, window=block, prefix=0, prefix_constant=False, counters=Counters(1, [1]))
    flags = st.lists(st.lists(st.booleans(), min_size=block, max_size=block), min_size=batch, max_size=batch)
    held: set[tuple[int, int, int]] = set()
    for number in range(4):
        masked, live = torch.tensor(data.draw(flags)), torch.tensor(data.draw(flags))
        valid = torch.tensor(data.draw(flags)) | torch.tensor(number == 0)
        ids_BN = torch.randint(0, 3, (batch, block)).masked_fill(masked, MASK)
        ids_BS = torch.cat([torch.zeros(batch, lead, dtype=torch.long), ids_BN], dim=1)
        valid_BS = torch.cat([torch.ones(batch, lead, dtype=torch.bool), valid], dim=1)
        forward = plan.next_forward(
            ids_BS, mask_id=MASK, valid_BS=valid_BS, lead=lead, live_BN=live, changed_BN=None
        )
        rows = forward.rows
        got = {name: set() for name in ("fresh", "restricted", "joining", "voting", "stored")}
        for place, row in enumerate(rows.fresh_R.tolist()):
            cell = (row // (lead + block), row % (lead + block) - lead)
            if cell[1] < 0:
                assert not rows.restricted_R[place] and not rows.joining_R[place]
                continue
            got["fresh"].add(cell)
            got["restricted"] |= {cell} if rows.restricted_R[place] else set()
            got["joining"] |= {cell} if rows.joining_R[place] else set()
            got["voting"] |= {cell} if rows.vote_R[place] < rows.places.groups * rows.places.block_len else set()
            got["stored"] |= {cell} if place in rows.store_src.tolist() else set()
        want = {name: set() for name in got}
        for b in range(batch):
            for n in range(block):
                token = int(ids_BN[b, n])
                if not valid[b, n]:
                    continue
                is_live, stable = bool(live[b, n]), (b, n, token) in held and number > 0
                if stable and not is_live:
                    continue
                want["fresh"].add((b, n))
                undecoded = is_live and token == MASK
                if not is_live:
                    want["stored"].add((b, n))
                if undecoded:
                    want["voting"].add((b, n))
                if number > 0 and (undecoded or restrict_new):
                    want["restricted"].add((b, n))
                elif number > 0 and not undecoded:
                    want["joining"].add((b, n))
        assert got == want
        held = {cell for cell in held if valid[cell[0], cell[1]] and not live[cell[0], cell[1]]}
        held = {cell for cell in held if int(ids_BN[cell[0], cell[1]]) == cell[2]}
        held |= {(b, n, int(ids_BN[b, n])) for b, n in want["stored"]}
        plan.complete(forward)
