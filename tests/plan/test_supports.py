"""Supports inside a decode: who is restricted, the miss policies, the coverage watch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from decode import LAYOUTS, MASK_ID, dense, make_decode, patched_model, plain_model, planned
from helpers import relative_error
from torch import Tensor

import epoch_moe.freshlane.lane
from epoch_moe.config import EpochConfig
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.context import BlockPlanContext
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.packed import ListedRows
from epoch_moe.plan.rules import RowPlaces
from epoch_moe.plan.support import SupportState, route_fresh
from epoch_moe.problems import generate_problems
from epoch_moe.routing import NO_EXPERT, RouterSpec, Routing, Scores, router_scores, select


@dataclass
class Routed:
    scores: Scores
    rows: ListedRows
    routing: Routing
    support_GE: Tensor
    before_GE: Tensor | None
    short_G: Tensor | None
    rebuild_G: Tensor | None
    cold: bool


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[Routed]:
    """Every routing decision taken under a plan."""
    log: list[Routed] = []

    def spy(
        scores: Scores, spec: RouterSpec, rows: ListedRows, state: SupportState, config: EpochConfig, **kwargs: object
    ) -> Routing:
        before, rebuild = state.support_GE, state.rebuild_G
        routing = route_fresh(scores, spec, rows, state, config, **kwargs)  # type: ignore[arg-type]
        assert state.support_GE is not None
        log.append(
            Routed(scores, rows, routing, state.support_GE, before, state.short_G, rebuild, bool(kwargs["cold"]))
        )
        return routing

    monkeypatch.setattr(epoch_moe.freshlane.lane, "route_fresh", spy)
    return log


SPEC = RouterSpec(
    kind="sigmoid_group", num_experts=16, top_k=4, n_group=4, topk_group=2, routed_scaling_factor=2.5
)


@pytest.mark.parametrize("on_miss", ["reselect", "drop"])
@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("restrict_new", [False, True])
def test_restricted_rows_stay_inside_and_others_are_free(
    on_miss: str, scope: str, restrict_new: bool, routed: list[Routed]
) -> None:
    config = EpochConfig(
        coverage=0.6,
        coverage_floor=0.0, least_saving=0.0,
        on_miss=on_miss,  # type: ignore[arg-type]
        support_scope=scope,  # type: ignore[arg-type]
        restrict_new=restrict_new,
        refresh_interval=3,
    )
    for seed, layout in enumerate(LAYOUTS.values()):
        list(planned(patched_model(), make_decode(seed, batch=3, **layout), config))  # type: ignore[arg-type]
    outside = restricted = 0
    for call in routed:
        natural_RK = select(call.scores.selection_TE, SPEC)
        assert call.support_GE.shape[0] == (3 if scope == "sequence" else 1)
        for r in range(call.rows.num_fresh):
            ids = call.routing.ids_TK[r].tolist()
            weights = call.routing.weights_TK[r]
            natural = natural_RK[r].tolist()
            if call.cold or not call.rows.restricted_R[r]:
                assert ids == natural
                continue
            restricted += 1
            group = int(call.rows.group_R[r]) if scope == "sequence" else 0
            inside = set(call.support_GE[group].nonzero().flatten().tolist())
            outside += len(set(natural) - inside)
            assert set(ids) - {NO_EXPERT} <= inside
            assert (weights[torch.tensor(ids) == NO_EXPERT] == 0).all()
            if on_miss == "drop":
                assert ids == [e if e in inside else NO_EXPERT for e in natural]
                # The surviving pairs keep the weights that they have in the dense model.
                own = call.scores.combine_TE[r, natural_RK[r]]
                kept = torch.tensor([e in inside for e in natural])
                torch.testing.assert_close(weights, own / own.sum() * 2.5 * kept)
            elif NO_EXPERT not in ids:
                torch.testing.assert_close(weights.sum(), torch.tensor(2.5))
    assert outside > 20 and restricted > 100  # the supports were small enough to matter


def test_experts_of_new_rows_join_the_support(routed: list[Routed]) -> None:
    config = EpochConfig(coverage=0.3, coverage_floor=0.0, least_saving=0.0, refresh_interval=None, join=True)
    list(planned(patched_model(), make_decode(3, forwards=9), config))
    grown = 0
    for call in routed:
        if call.cold:
            continue
        assert call.before_GE is not None
        want_GE = call.before_GE.clone()
        for r in call.rows.joining_R.nonzero().flatten().tolist():
            want_GE[call.rows.group_R[r], call.routing.ids_TK[r]] = True
        assert torch.equal(call.support_GE, want_GE)
        grown += int((want_GE != call.before_GE).sum())
    assert grown > 0


def test_restricting_new_rows_freezes_the_support(routed: list[Routed]) -> None:
    config = EpochConfig.paper(coverage=0.3, coverage_floor=0.0, least_saving=0.0)
    list(planned(patched_model(), make_decode(3), config))
    assert all(torch.equal(call.support_GE, call.before_GE) for call in routed if not call.cold)  # type: ignore[arg-type]


def _still(forwards: int) -> object:
    """A decode in which nothing is committed: every forward is the first one."""
    decode = make_decode(5, all_valid=True)
    first = next(f for f in decode.forwards if (f.ids_BS == MASK_ID).any())
    decode.forwards = [first] * forwards
    return decode


@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("on_miss", ["reselect", "drop"])
def test_a_shortfall_routes_freely_at_once_and_rebuilds_next(
    scope: str, on_miss: str, routed: list[Routed]
) -> None:
    decode = _still(4)
    model = patched_model()
    (want, *_) = dense(plain_model(), decode)  # type: ignore[arg-type]
    context = BlockPlanContext(
        model._epoch_moe,
        EpochConfig(
            coverage=0.4,
            coverage_floor=0.35,
            least_saving=0.0,
            refresh_interval=1,
            support_scope=scope,  # type: ignore[arg-type]
            on_miss=on_miss,  # type: ignore[arg-type]
        ),
    )
    compiled: list[Tensor] = []

    def shrink(plan: BlockPlan, number: int) -> None:
        if number == 0:
            compiled.extend(layer.support.support_GE.clone() for layer in plan.layers)  # type: ignore[union-attr]
            for layer in plan.layers:
                assert layer.support.support_GE is not None
                layer.support.support_GE[0] = False
                layer.support.support_GE[0, :1] = True
                layer.support.holds_all = False

    results = list(planned(model, decode, None, between=shrink, context=context))  # type: ignore[arg-type]
    for logits in results[:2] if scope == "batch" else [results[0]]:
        assert relative_error(logits, want) < 1e-5
    # Sequence 0 ran without the planted support, and the forward that compiles it anew is a cold pass for it.
    for number in (1, 2):
        assert relative_error(results[number][0], want[0]) < 1e-5
    by_forward = [routed[2 * n : 2 * n + 2] for n in range(4)]
    assert all(call.short_G is not None and bool(call.short_G[0]) for call in by_forward[1])
    for call, support_GE in zip(by_forward[2], compiled, strict=True):
        assert call.rebuild_G is not None and bool(call.rebuild_G[0])
        if scope == "batch" or call is by_forward[2][0]:
            # The same inputs give the same support as in the cold pass; decoded rows only add to it.
            assert (call.support_GE[0] | ~support_GE[0]).all()
    for call in by_forward[3]:  # and then it is restricted again
        assert call.rebuild_G is None and call.short_G is not None and not call.short_G.any()
        used = call.rows.restricted_R & (call.rows.group_R == 0)
        ids_RK = call.routing.ids_TK[used]
        assert used.any() and not call.support_GE[0].all()
        assert call.support_GE[0][ids_RK[ids_RK != NO_EXPERT]].all()
    assert context.counters.read().fallbacks == {"shortfall": 2}


def test_a_shortfall_in_the_last_forward_is_counted() -> None:
    decode = _still(2)
    model = patched_model()
    context = BlockPlanContext(model._epoch_moe, EpochConfig(refresh_interval=1))

    def shrink(plan: BlockPlan, number: int) -> None:
        for layer in plan.layers:
            assert layer.support.support_GE is not None
            layer.support.support_GE.zero_()
            layer.support.holds_all = False

    list(planned(model, decode, None, between=shrink, context=context))  # type: ignore[arg-type]
    assert context.counters.read().fallbacks == {"shortfall": 4}  # two layers, two sequences


def test_finished_sequences_do_not_count_as_supports() -> None:
    decode = make_decode(5, all_valid=True, edits=False)
    decode.forwards = decode.forwards[:1] * 3
    for inputs in decode.forwards:
        inputs.valid_BS[1] = False
    model = patched_model()
    context = BlockPlanContext(model._epoch_moe, EpochConfig(coverage=0.5, coverage_floor=0.0, least_saving=0.0))
    sizes: list[int] = []

    def note(plan: BlockPlan, number: int) -> None:
        if number:
            sizes.extend(int(layer.support.support_GE[0].sum()) for layer in plan.layers)  # type: ignore[index]

    list(planned(model, decode, None, between=note, context=context))
    work = context.counters.read()
    assert work.total.supports == len(sizes) == 4
    assert work.support_size == sum(sizes) / 4 < 16


MINI = RouterSpec(
    kind="sigmoid_group", num_experts=256, top_k=8, n_group=8, topk_group=4, routed_scaling_factor=2.5
)


def _block(groups: int = 1, width: int = 32, seed: int = 0) -> tuple[Scores, ListedRows]:
    """Router scores of live rows that are alike, as a block's are, and the rows: all restricted, all voting."""
    gen = torch.Generator().manual_seed(seed)
    common, own = torch.randn(groups, 1, 256, generator=gen), torch.randn(groups, width, 256, generator=gen)
    logits_TE = (0.88**0.5 * common + 0.12**0.5 * own).view(-1, 256)
    row_T = torch.arange(groups * width)
    none, yes_T = row_T[:0], row_T >= 0
    rows = ListedRows(
        places=RowPlaces(groups, width, width, row_T // width, row_T, row_T), fresh_R=row_T, restricted_R=yes_T,
        joining_R=~yes_T, vote_R=row_T, group_R=row_T // width, entry_R=row_T, store_src=none, store_dst=none,
        reuse_src=none, reuse_dst=none, num_rows=len(row_T), num_restricted=len(row_T), num_voting=len(row_T),
    )  # fmt: skip
    return router_scores(logits_TE, None, MINI), rows


def _twice(config: EpochConfig, groups: int = 1) -> tuple[SupportState, Routing, Routing]:
    """A cold pass, and a second forward with the very same scores."""
    scores, rows = _block(groups)
    state = SupportState()
    cold, warm = (
        route_fresh(scores, MINI, rows, state, config, cold=first, dtype=torch.float32) for first in (True, False)
    )
    return state, cold, warm


@pytest.mark.parametrize("coverage", [0.95, 0.8])
@pytest.mark.parametrize("on_miss", ["reselect", "drop"])
def test_a_support_holds_its_share_of_the_logits_that_it_was_compiled_from(on_miss: str, coverage: float) -> None:
    config = EpochConfig(on_miss=on_miss, coverage=coverage, coverage_floor=coverage, least_saving=0.0)  # type: ignore[arg-type]
    state, cold, warm = _twice(config)
    assert state.support_GE is not None and state.short_G is not None and not state.short_G.any()
    held_TK = state.support_GE[0][cold.ids_TK]
    dense_TE = _block()[0].combine_TE
    natural_TK = dense_TE.gather(1, cold.ids_TK)
    held = float((natural_TK * held_TK).sum() / natural_TK.sum())
    assert coverage <= held < 1.0
    torch.testing.assert_close(state.covered_R, (natural_TK * held_TK).sum(1))
    torch.testing.assert_close(state.natural_R, natural_TK.sum(1))
    if on_miss == "drop":
        assert (warm.ids_TK == NO_EXPERT).sum() == (~held_TK).sum() > 0
        assert torch.equal(warm.ids_TK == NO_EXPERT, ~held_TK)
    else:
        assert (warm.ids_TK != NO_EXPERT).all() and state.support_GE[0][warm.ids_TK].all()


@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("on_miss", ["reselect", "drop"])
def test_a_largest_size_is_never_exceeded_nor_undone(on_miss: str, scope: str) -> None:
    config = EpochConfig(max_support=12, on_miss=on_miss, support_scope=scope)  # type: ignore[arg-type]
    state, _, warm = _twice(config, groups=3)
    assert state.support_GE is not None and (state.support_GE.sum(1) == 12).all()
    assert state.short_G is not None and not state.short_G.any()
    group_T = _block(3)[1].group_R if scope == "sequence" else torch.zeros(96, dtype=torch.long)
    inside_TK = state.support_GE[group_T].gather(1, warm.ids_TK.clamp_min(0))
    assert (inside_TK | (warm.ids_TK == NO_EXPERT)).all() and (warm.ids_TK != NO_EXPERT).any(1).all()
    with pytest.raises(ValueError, match="max_support=7 must be at least top_k=8"):
        _twice(EpochConfig(max_support=7))


def test_a_support_that_would_not_pay_is_not_kept_and_counted() -> None:
    scores, rows = _block(2)
    used = [select(scores.selection_TE[rows.group_R == g], MINI).unique().numel() for g in range(2)]
    sizes = _twice(EpochConfig(least_saving=0.0), 2)[0].support_GE.sum(1)  # type: ignore[union-attr]
    saved = [1 - int(size) / n for size, n in zip(sizes, used, strict=True)]
    assert saved[0] != saved[1]
    between = sum(saved) / 2
    assert between > 0
    state = SupportState()
    config = EpochConfig(least_saving=between)
    route_fresh(scores, MINI, rows, state, config, cold=True, dtype=torch.float32)
    assert state.support_GE is not None and state.support_GE.all(1).tolist() == [s < between for s in saved]
    counters = Counters(1, [1])
    state.count(counters, 0)
    assert counters.read().unpaid == counters.read().as_dict()["unpaid"] == 1
    warm = route_fresh(scores, MINI, rows, state, config, cold=False, dtype=torch.float32)
    free = rows.group_R == int(saved[1] < between)
    assert torch.equal(warm.ids_TK[free], select(scores.selection_TE, MINI)[free])
    assert state.used_G is not None and state.used_G.tolist() == [s >= between for s in saved]


def test_compiled_anew_at_refreshes_only(routed: list[Routed]) -> None:
    config = EpochConfig(coverage=0.5, coverage_floor=0.5, least_saving=0.0, recompile="refresh", refresh_interval=3)
    list(planned(patched_model(), _still(6), config))  # type: ignore[arg-type]
    assert [call.cold for call in routed] == [True, True, False, False, False, False] * 2
    assert all(call.rebuild_G is None for call in routed)


def test_shortfalls_are_rare_on_the_tiny_checkpoint() -> None:
    model, tokenizer = epoch_moe.load_model("tiny-llada2")
    epoch_moe.patch(model)
    prompts = [tokenizer(p.prompt, add_special_tokens=False)["input_ids"] for p in generate_problems(40, 3)]
    work = epoch_moe.generate(model, prompts, gen_length=64).counters.read()
    # Of every sequence's passes through a layer, those of sequences that have ended included.
    assert 0 < work.fallbacks["shortfall"] < 0.02 * work.forwards * len(work.per_layer) * len(prompts)
    assert work.unpaid > 0
