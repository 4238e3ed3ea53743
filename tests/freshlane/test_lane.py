"""The lane on one device: worklists and restoring, against loops over rows."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epoch_moe.freshlane.restore import begin_restore, finish_restore, pack, restore
from epoch_moe.plan.packed import ListedRows, list_rows
from epoch_moe.plan.rules import RowMasks, RowPlaces
from epoch_moe.routing import NO_EXPERT
from epoch_moe.worklist import build_worklist, combine, tree_sum

CHECKED = settings(max_examples=50)


@st.composite
def assignments(draw: st.DrawFn) -> tuple[Tensor, int]:
    rows, top_k, experts = draw(st.integers(0, 17)), draw(st.integers(1, 5)), draw(st.integers(1, 13))
    ids = draw(st.lists(st.integers(-1, experts - 1), min_size=rows * top_k, max_size=rows * top_k))
    return torch.tensor(ids, dtype=torch.int64).view(rows, top_k), experts


@CHECKED
@given(assignments())
def test_worklists_hold_every_pair_in_expert_order(case: tuple[Tensor, int]) -> None:
    ids_RK, experts = case
    work = build_worklist(ids_RK, experts)
    pairs = sorted(
        (int(ids_RK[r, k]), r, k)
        for r in range(ids_RK.shape[0])
        for k in range(ids_RK.shape[1])
        if ids_RK[r, k] != NO_EXPERT
    )
    assert work.row_P[: len(pairs)].tolist() == [r for _, r, _ in pairs]
    assert [int(work.rank_RK[r, k]) for _, r, k in pairs] == list(range(len(pairs)))
    assert work.counts_E.tolist() == [sum(e == expert for e, _, _ in pairs) for expert in range(experts)]
    assert work.ends_E.tolist() == [sum(e <= expert for e, _, _ in pairs) for expert in range(experts)]
    assert work.ends_E.dtype == torch.int32
    assert torch.equal(work.rank_RK >= 0, ids_RK != NO_EXPERT)


@CHECKED
@given(assignments(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_combine_weighs_valid_pairs_and_ignores_the_rest(case: tuple[Tensor, int], dtype: torch.dtype) -> None:
    ids_RK, experts = case
    work = build_worklist(ids_RK, experts)
    pairs_PH = torch.randn(ids_RK.numel(), 3).to(dtype)
    pairs_PH[int(work.counts_E.sum()) :] = float("nan")
    weights_RK = torch.rand(ids_RK.shape)
    weights_RK[ids_RK == NO_EXPERT] = float("inf")
    want_RH = torch.zeros(ids_RK.shape[0], 3)
    for r in range(ids_RK.shape[0]):
        for k in range(ids_RK.shape[1]):
            if ids_RK[r, k] != NO_EXPERT:
                want_RH[r] += pairs_PH[work.rank_RK[r, k]].float() * weights_RK[r, k]
    out_RH = combine(pairs_PH, weights_RK, work, dtype)
    assert out_RH.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out_RH.float(), want_RH, rtol=tolerance, atol=tolerance)


@CHECKED
@given(assignments(), st.sampled_from([2, 4, 8]), st.integers(1, 3))
def test_partial_sums_of_ranks_add_up_to_the_bits_of_the_whole(case: tuple[Tensor, int], ranks: int, each: int) -> None:
    ids_RK = torch.where(case[0] < 0, NO_EXPERT, case[0] % (ranks * each))
    weights_RK = torch.rand(ids_RK.shape).masked_fill(ids_RK < 0, float("nan"))
    pair_RKH = torch.randn(*ids_RK.shape, 3).bfloat16()
    parts = []
    for first, count in [(0, ranks * each), *((rank * each, each) for rank in range(ranks))]:
        here_RK = (ids_RK >= first) & (ids_RK < first + count)
        own_RK = torch.where(here_RK, ids_RK - first, NO_EXPERT)
        work = build_worklist(own_RK, count, (first, ranks * each))
        pairs_PH = torch.full((ids_RK.numel(), 3), float("nan")).bfloat16()
        pairs_PH[work.rank_RK[here_RK]] = pair_RKH[here_RK]
        parts.append(combine(pairs_PH, weights_RK, work, torch.float32))
    assert torch.equal(tree_sum(torch.stack(parts[1:])), parts[0])


def row_plan(batch: int, seq_len: int, lead: int, kinds: list[str]) -> ListedRows:
    """A row plan from one word per row: fresh, store (fresh and cached), reuse, none."""
    window = seq_len - lead

    def rows_of(*words: str) -> Tensor:
        return torch.tensor([kind in words for kind in kinds])

    no_T = torch.zeros(len(kinds), dtype=torch.bool)
    masks = RowMasks(
        valid_T=~rows_of("none"),
        fresh_T=rows_of("fresh", "store"),
        reuse_T=rows_of("reuse"),
        stored_T=rows_of("store"),
        kept_T=no_T,
        restricted_T=no_T,
        joining_T=no_T,
        voting_T=no_T,
        drifting_T=no_T,
    )
    group_T, slot_T = torch.arange(len(kinds)) // seq_len, torch.arange(len(kinds)) % seq_len - lead
    entry_T = torch.where(slot_T >= 0, group_T * window + slot_T, batch * window)
    return list_rows(masks, RowPlaces(batch, window, window, group_T, entry_T, entry_T))[0]


@pytest.mark.parametrize("lead", [0, 3])
@pytest.mark.parametrize("words", [["fresh", "store"], ["store", "reuse"], ["fresh", "store", "reuse", "none"]])
def test_restore_gives_each_row_its_own_output(lead: int, words: list[str], poisoned_empty: None) -> None:
    rng = random.Random(len(words) + lead)
    for _ in range(20):
        batch, window = rng.randrange(1, 4), rng.randrange(1, 6)
        seq_len = lead + window
        kinds = [
            rng.choice(words) if t % seq_len >= lead else "fresh" for t in range(batch * seq_len)
        ]
        rows = row_plan(batch, seq_len, lead, kinds)
        x_TH = torch.randn(batch * seq_len, 2)
        cache_MH = torch.randn(batch * window, 2)
        before = cache_MH.clone()
        read = {int(m) for m in rows.reuse_src}
        for m in range(batch * window):
            if m not in read:
                before[m] = cache_MH[m] = float("nan")
        halves, cache_of_halves = [], cache_MH.clone()
        for given_TH in (None, torch.full_like(x_TH, float("nan"))):
            begun_TH = begin_restore(rows, cache_of_halves, given_TH)
            halves.append(finish_restore(pack(x_TH, rows) + 100, rows, cache_of_halves, begun_TH))
            assert given_TH is None or halves[-1] is given_TH
            if given_TH is None:
                cache_of_halves = cache_MH.clone()
        out_TH = restore(pack(x_TH, rows) + 100, rows, cache_MH)
        assert all(torch.equal(half, out_TH) for half in halves)
        assert torch.equal(cache_of_halves.nan_to_num(-1), cache_MH.nan_to_num(-1))
        for t, kind in enumerate(kinds):
            if t % seq_len < lead:
                assert torch.equal(out_TH[t], x_TH[t] + 100)
                continue
            entry = t // seq_len * window + t % seq_len - lead
            want = {"reuse": before[entry], "none": torch.zeros(2)}.get(kind, x_TH[t] + 100)
            assert torch.equal(out_TH[t], want)
            held = x_TH[t] + 100 if kind == "store" else before[entry]
            assert torch.equal(cache_MH[entry].nan_to_num(-1), held.nan_to_num(-1))


def test_the_cache_is_read_before_it_is_written() -> None:
    rows = row_plan(1, 2, 0, ["store", "reuse"])
    rows.reuse_src[0] = rows.store_dst[0]  # no row plan reads what it writes; the order is promised all the same
    cache_MH = torch.ones(2, 2)
    begun_TH = begin_restore(rows, cache_MH)
    assert torch.equal(cache_MH, torch.ones(2, 2))
    out_TH = finish_restore(torch.full((1, 2), 7.0), rows, cache_MH, begun_TH)
    assert torch.equal(out_TH, torch.tensor([[7.0, 7.0], [1.0, 1.0]])) and torch.equal(cache_MH[0], out_TH[0])


def test_restoring_does_not_let_the_cache_alias_the_output() -> None:
    rows = row_plan(1, 3, 0, ["store"] * 3)
    y_RH, cache_MH = torch.randn(3, 2), torch.zeros(3, 2)
    out_TH = restore(y_RH, rows, cache_MH)
    kept = cache_MH.clone()
    out_TH += 1  # a residual connection that works in place
    assert torch.equal(cache_MH, kept)
