"""Supports for experts that lie on ranks: against the oracle, the cap, ties, and nothing new without the option."""

from __future__ import annotations

import pytest
import torch
from atlas_oracle import atlas, candidates, choose, covered
from hypothesis import given
from hypothesis import strategies as st
from test_atlas import CHECKED, Case, cases, sets
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.plan.atlas import compile_support
from epoch_moe.plan.liveness import classify, decide_rows, plan_rows
from epoch_moe.plan.placement import NEAR_TIE, Placement, contiguous_ranks
from epoch_moe.plan.support import SupportState, route_fresh
from epoch_moe.routing import NO_EXPERT, RouterSpec, router_scores, select


@st.composite
def placed(draw: st.DrawFn) -> tuple[Case, Tensor, int | None]:
    case = draw(cases())
    experts = case.spec.num_experts
    ranks = draw(st.sampled_from([r for r in (1, 2, 4, 8) if experts % r == 0]))
    rank_of_E = contiguous_ranks(experts, ranks)
    if draw(st.booleans()):  # owners need not be contiguous
        shuffle = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        rank_of_E = rank_of_E[torch.randperm(experts, generator=shuffle)]
    return case, rank_of_E, draw(st.sampled_from([None, 1, 2, max(experts // ranks // 2, 1)]))


@CHECKED
@given(placed())
def test_equals_the_oracle(placed: tuple[Case, Tensor, int | None]) -> None:
    case, rank_of_E, cap = placed
    expected = [
        atlas(
            selection.tolist(), combine.tolist(), vote.tolist(), case.spec, case.coverage, case.factor,
            rank_of_E.tolist(), cap,
        )
        for selection, combine, vote in zip(case.selection_BWE, case.combine_BWE, case.vote_BW, strict=True)
    ]  # fmt: skip
    assert sets(case.compile(rank_of_expert_E=rank_of_E, max_per_rank=cap)) == expected


@CHECKED
@given(placed())
def test_every_voting_row_is_covered_and_finds_k_experts(placed: tuple[Case, Tensor, int | None]) -> None:
    case, rank_of_E, cap = placed
    support_BE = case.compile(rank_of_expert_E=rank_of_E, max_per_rank=cap)
    for b, w in case.vote_BW.nonzero().tolist():
        selection, combine = case.selection_BWE[b, w].tolist(), case.combine_BWE[b, w].tolist()
        inside = set(support_BE[b].nonzero().flatten().tolist())
        own = sum(combine[e] for e in choose(selection, case.spec))
        cand = candidates(selection, combine, case.spec, case.factor)
        assert covered(cand, inside, case.spec.top_k) >= case.coverage * own * (1 - 3e-6)
        assert (select(case.selection_BWE[b, w][None], case.spec, support_BE[b]) != NO_EXPERT).all()


@CHECKED
@given(placed())
def test_a_cap_is_exceeded_only_where_a_row_needs_it(placed: tuple[Case, Tensor, int | None]) -> None:
    """More than the cap: rows' best experts, or what a row lacks whose other candidates are all in or on full ranks."""
    case, rank_of_E, cap = placed
    if cap is None or case.coverage == 1.0:
        return
    support_BE = case.compile(rank_of_expert_E=rank_of_E, max_per_rank=cap)
    rank_of = rank_of_E.tolist()
    for b, support in enumerate(sets(support_BE)):
        rows = case.vote_BW[b].nonzero().flatten().tolist()
        held = {rank: sum(rank_of[e] == rank for e in support) for rank in set(rank_of)}
        above = {rank for rank, count in held.items() if count > cap}
        if not rows or not above:
            continue
        scores = [(case.selection_BWE[b, w].tolist(), case.combine_BWE[b, w].tolist()) for w in rows]
        best = {choose(selection, case.spec)[0] for selection, _ in scores}
        if all(sum(rank_of[e] == rank for e in best) == held[rank] for rank in above):
            continue
        cand = [set(candidates(selection, combine, case.spec, case.factor)) for selection, combine in scores]
        within = {e for e in support if rank_of[e] not in above} | best
        starved = [own for own in cand if all(e in support or held[rank_of[e]] >= cap for e in own)]
        # Else a row that found fewer than K usable experts brought its natural ones.
        short = [s for s, _ in scores if len(choose(s, case.spec, within)) < case.spec.top_k]
        assert starved or short


@CHECKED
@given(cases())
def test_one_rank_and_no_near_ties_change_nothing(case: Case) -> None:
    """With all experts on one rank only the order among equals could differ, and there the best comes first."""
    nowhere = torch.zeros(case.spec.num_experts, dtype=torch.int64)
    assert torch.equal(case.compile(rank_of_expert_E=nowhere), case.compile())


def test_a_cap_moves_experts_to_other_ranks_and_keeps_the_coverage() -> None:
    """Rank 0 holds the better half of near-equal pairs; the cap sends rows to the other half of each pair."""
    spec = RouterSpec(kind="softmax", num_experts=8, top_k=1)
    ranks_E = contiguous_ranks(8, 2)
    row_WE = torch.full((4, 8), 0.001)
    for w in range(4):
        row_WE[w, w], row_WE[w, 4 + w] = 0.50, 0.45
    vote = torch.ones(1, 4, dtype=torch.bool)

    def compiled(**more: object) -> set[int]:
        return sets(compile_support(row_WE[None], row_WE[None], vote, spec, 0.85, 4, **more))[0]  # type: ignore[arg-type]

    # The rows' best experts are no choice.
    assert compiled() == compiled(rank_of_expert_E=ranks_E, max_per_rank=1) == {0, 1, 2, 3}
    spec = RouterSpec(kind="softmax", num_experts=8, top_k=2)
    row_WE[:, 3] = 0.6  # all rows share their best, on rank 0; the second one is a choice
    row_WE[3, 7] = 0.001
    assert compiled() == {0, 1, 2, 3}
    assert compiled(rank_of_expert_E=ranks_E, max_per_rank=2) == {0, 3, 5, 6}
    # Rank 0 is full from the start and rank 1 after one expert: the coverage of the other rows goes before the cap.
    assert compiled(rank_of_expert_E=ranks_E, max_per_rank=1) == {0, 3, 5, 6}


@pytest.mark.parametrize(("second", "chosen"), [(1 - 0.9 * NEAR_TIE, {0, 2, 5}), (1 - 1.1 * NEAR_TIE, {0, 2, 4})])
def test_near_ties_go_to_the_rank_that_holds_fewer(second: float, chosen: set[int]) -> None:
    """Ranks (0 1) (2 3) (4 5) ... the row lacks weight that 1 and 5 fill nearly alike, and rank 0 holds one already."""
    spec = RouterSpec(kind="softmax", num_experts=6, top_k=3)
    ranks_E = torch.tensor([0, 0, 1, 1, 0, 2])  # 4 lies with 0 and 1
    row_E = torch.tensor([0.5, 0.0, 0.4, 0.0, 0.3, 0.3 * second])
    support = compile_support(
        row_E.view(1, 1, 6), row_E.view(1, 1, 6), torch.ones(1, 1, dtype=torch.bool), spec, 0.98, 2, ranks_E
    )
    assert sets(support) == [chosen]


def test_of_equal_ranks_the_better_expert_and_of_equal_experts_the_first() -> None:
    placement = Placement(torch.tensor([0, 0, 1, 1]))
    held_BP = torch.tensor([[1, 1], [0, 0], [1, 0]])
    worth_BE = torch.tensor([[0.98, 1.0, 0.99, 0.5], [0.5, 0.9, 0.9, 0.1], [1.0, 1.0, 0.96, 0.97]])
    best_B1, adds_B1 = placement.best(worth_BE, held_BP, may_exceed=False)
    assert best_B1.flatten().tolist() == [1, 1, 3] and adds_B1.all()
    _, adds_B1 = placement.best(torch.zeros(3, 4), held_BP, may_exceed=True)
    assert not adds_B1.any()


def test_supports_are_more_even_over_ranks() -> None:
    """On many blocks the fullest rank of a support holds fewer experts with the option than without, and with a cap."""
    torch.manual_seed(0)
    spec = RouterSpec(kind="sigmoid_group", num_experts=64, top_k=4, n_group=8, topk_group=4)
    ranks_E = contiguous_ranks(64, 8)
    combine = (0.5 * torch.randn(64, 16, 64) + 0.5 * torch.randn(64, 1, 64)).sigmoid()
    vote = torch.ones(64, 16, dtype=torch.bool)

    def fullest(support_BE: Tensor) -> float:
        return float(Placement(ranks_E).held(support_BE).amax(1).float().mean())

    free = compile_support(combine, combine, vote, spec, 0.9, 4)
    balanced = compile_support(combine, combine, vote, spec, 0.9, 4, ranks_E)
    capped = compile_support(combine, combine, vote, spec, 0.9, 4, ranks_E, 2)
    assert fullest(balanced) < fullest(free)
    assert fullest(capped) < fullest(balanced)


def test_the_configuration_reaches_the_support() -> None:
    """`balance_ranks` and the cap through `route_fresh` are the support that `compile_support` gives."""
    spec = RouterSpec(kind="sigmoid_group", num_experts=32, top_k=4, n_group=4, topk_group=2)
    scores = router_scores(torch.randn(24, 32), None, spec)
    ids_BS = torch.zeros(2, 12, dtype=torch.int64)
    states = classify(ids_BS, torch.full((2, 12), -1), 0, 0, 0, False, False, 0, None, None, None)
    decision = decide_rows(states, refresh=True, cold=True, lead=0, prefix=0, future=0, restrict_new=False)
    rows = plan_rows(decision)
    found = {}
    for ranks, cap in ((None, None), (4, None), (4, 2)):
        config, state = EpochConfig(coverage=0.9, balance_ranks=ranks, max_experts_per_rank=cap), SupportState()
        route_fresh(scores, spec, rows, state, config, cold=True, dtype=torch.float32)
        assert state.support_GE is not None
        found[ranks, cap] = state.support_GE
        view_BWE = scores.selection_TE.view(2, 12, 32)
        rank_of_E = None if ranks is None else contiguous_ranks(32, ranks)
        vote = torch.ones(2, 12, dtype=torch.bool)
        assert torch.equal(
            state.support_GE, compile_support(view_BWE, view_BWE, vote, spec, 0.9, config.candidate_factor,
                                              rank_of_E, cap),
        )  # fmt: skip
    assert len({tuple(support.flatten().tolist()) for support in found.values()}) == 3


def test_bad_placements_are_refused() -> None:
    spec = RouterSpec(kind="softmax", num_experts=8, top_k=2)
    scores, vote = torch.rand(1, 3, 8), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="max_per_rank=2 without rank_of_expert_E"):
        compile_support(scores, scores, vote, spec, 0.9, 2, None, 2)
    with pytest.raises(ValueError, match=r"shape \(7,\): expected \[8\]"):
        compile_support(scores, scores, vote, spec, 0.9, 2, torch.zeros(7, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"torch.float32 \(8,\)"):
        compile_support(scores, scores, vote, spec, 0.9, 2, torch.zeros(8))
    with pytest.raises(ValueError, match="max_per_rank=0"):
        Placement(torch.zeros(8, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match="8 experts cannot be split evenly over 3 ranks"):
        contiguous_ranks(8, 3)
