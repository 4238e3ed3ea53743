"""Routers against golden data, brute force and the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import Golden, assert_as_accurate, assert_golden, load_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epoch_moe.experts.run import pick_backend, run_experts
from epoch_moe.experts.views import ExpertViews
from epoch_moe.models.llada2 import LLaDA2MoeConfig
from epoch_moe.routing import (
    NO_EXPERT,
    RouterSpec,
    combine_weights,
    route,
    router_logits,
    router_scores,
    select,
    sequence_pools,
)

NEG_INF = float("-inf")
LLADA2 = ("llada2", "llada2_1", "llada2_2_routing", "llada2_bf16")
LLADA_MOE = ("llada_moe", "llada_moe_bf16", "llada_moe_shared_bias")


def stacked_of(golden: Golden, layer: int) -> ExpertViews:
    experts = range(golden.config["num_experts"])
    weight = {
        name: torch.stack([golden.weights[f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight"] for e in experts])
        for name in ("gate", "up", "down")
    }
    return ExpertViews.fused(torch.cat([weight["gate"], weight["up"]], dim=1), weight["down"])


def brute_force(scores: list[float], spec: RouterSpec, usable: list[bool]) -> list[int]:
    """Selection as DESIGN words it, on plain lists: ids, best first, then `NO_EXPERT`."""
    candidates = [e for e in range(spec.num_experts) if usable[e]]
    if spec.kind == "sigmoid_group":
        size = spec.num_experts // spec.n_group
        members = {group: range(group * size, (group + 1) * size) for group in range(spec.n_group)}
        value = {group: sum(sorted((scores[e] for e in own), reverse=True)[:2]) for group, own in members.items()}
        ranked = sorted(members, key=lambda group: value[group], reverse=True)
        kept = ranked[: spec.topk_group]
        if sum(usable[e] for group in kept for e in members[group]) < spec.top_k:
            kept = [group for group in ranked if any(usable[e] for e in members[group])][: spec.topk_group]
        candidates = [e for e in candidates if e // size in kept]
    best = sorted(candidates, key=lambda e: scores[e], reverse=True)[: spec.top_k]
    return best + [NO_EXPERT] * (spec.top_k - len(best))


@st.composite
def selections(draw: st.DrawFn) -> tuple[RouterSpec, Tensor, Tensor | None]:
    """A router, distinct scores [T,E] and maybe a support."""
    kind = draw(st.sampled_from(["softmax", "sigmoid_group", "block_pool"]))
    n_group = draw(st.integers(1, 5)) if kind == "sigmoid_group" else 1
    num_experts = n_group * draw(st.integers(1, 7))
    topk_group = draw(st.integers(1, n_group))
    top_k = draw(st.integers(1, topk_group * (num_experts // n_group)))
    extra = {"expert_capacity": num_experts, "block_size": 4} if kind == "block_pool" else {}
    spec = RouterSpec(kind=kind, num_experts=num_experts, top_k=top_k, n_group=n_group, topk_group=topk_group, **extra)
    rows = draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # Distinct multiples of a power of two: no ties, and sums of two are exact.
    steps = torch.stack(
        [torch.randperm(4096, generator=generator)[:num_experts] for _ in range(rows)]
        or [torch.zeros(num_experts, dtype=torch.long)]
    )[:rows]
    scores = steps.float() / 2048 - draw(st.sampled_from([0.0, 1.0, 2.5]))
    support = draw(st.sampled_from(["none", "shared", "per_row"]))
    if support == "none":
        return spec, scores, None
    shape = (num_experts,) if support == "shared" else (rows, num_experts)
    return spec, scores, torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))


@settings(max_examples=150)
@given(selections())
def test_select_equals_brute_force(case: tuple[RouterSpec, Tensor, Tensor | None]) -> None:
    spec, scores_TE, support = case
    ids_TK = select(scores_TE, spec, support)
    assert ids_TK.shape == (scores_TE.shape[0], spec.top_k)
    usable_TE = torch.ones_like(scores_TE, dtype=torch.bool) if support is None else support.expand_as(scores_TE)
    for row, (scores, usable) in enumerate(zip(scores_TE.tolist(), usable_TE.tolist(), strict=True)):
        expected = brute_force(scores, spec, usable)
        if spec.kind == "sigmoid_group" and ids_TK[row].tolist() != expected:
            # Equal group sums may be broken either way: the choice must still be one of the best.
            size = spec.group_size
            sums = {
                g: sum(sorted((scores[e] for e in range(g * size, (g + 1) * size) if usable[e]), reverse=True)[:2])
                for g in {e // size for e in expected + ids_TK[row].tolist() if e != NO_EXPERT}
            }
            assert len(set(sums.values())) < len(sums), (scores, usable, expected, ids_TK[row].tolist())
        else:
            assert ids_TK[row].tolist() == expected


@settings(max_examples=60)
@given(selections())
def test_weights_of_any_selection(case: tuple[RouterSpec, Tensor, Tensor | None]) -> None:
    spec, scores_TE, support = case
    combine_TE = scores_TE.sigmoid()
    ids_TK = select(scores_TE, spec, support)
    weights_TK = combine_weights(combine_TE, ids_TK, spec, torch.float32)
    assert weights_TK.dtype == torch.float32
    for ids, weights, scores in zip(ids_TK.tolist(), weights_TK.tolist(), combine_TE.tolist(), strict=True):
        raw = [scores[e] if e != NO_EXPERT else 0.0 for e in ids]
        if spec.kind != "softmax" and spec.top_k > 1:
            raw = [value / (sum(raw) + 1e-20) for value in raw]
        assert weights == pytest.approx(raw, rel=1e-5)
        assert all(w == 0.0 for e, w in zip(ids, weights, strict=True) if e == NO_EXPERT)


# ------------------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("name", LLADA2)
def test_llada2_golden(name: str) -> None:
    golden = load_golden(name)
    spec = LLaDA2MoeConfig(**golden.config).router_spec()
    assert spec.kind == ("block_pool" if name == "llada2_2_routing" else "sigmoid_group")
    for layer in golden.moe_layers:
        x_BSH = golden.forward[f"layer{layer}.moe_in"]
        x_TH = x_BSH.flatten(0, 1)
        gate = f"model.layers.{layer}.mlp.gate."
        weight_EH, bias_E = golden.weights[gate + "weight"], golden.weights[gate + "expert_bias"]
        routing, scores = route(x_TH, weight_EH, bias_E, spec, batch=x_BSH.shape[0])
        exact_TE = x_TH.double() @ weight_EH.double().T
        assert_as_accurate(scores.logits_TE, golden.forward[f"layer{layer}.router_logits"], exact_TE)
        ids, order = routing.ids_TK.sort(-1)
        golden_ids, golden_order = golden.forward[f"layer{layer}.topk_idx"].sort(-1)
        assert torch.equal(ids, golden_ids)
        weights = golden.forward[f"layer{layer}.topk_weight"].gather(1, golden_order)
        torch.testing.assert_close(routing.weights_TK.gather(1, order), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LLADA_MOE)
def test_softmax_routing_with_experts_gives_the_golden_block(name: str) -> None:
    golden = load_golden(name)
    spec = RouterSpec(
        kind="softmax", num_experts=golden.config["num_experts"], top_k=golden.config["num_experts_per_tok"]
    )
    assert golden.moe_layers
    for layer in golden.moe_layers:
        x_TH = golden.forward[f"layer{layer}.moe_in"].flatten(0, 1)
        bias_E = golden.weights.get(f"model.layers.{layer}.mlp.expert_bias")
        assert (bias_E is not None) == (name == "llada_moe_shared_bias")
        routing, _ = route(x_TH, golden.weights[f"model.layers.{layer}.mlp.gate.weight"], bias_E, spec)
        stacked = stacked_of(golden, layer)
        out_TH = run_experts(x_TH, routing.ids_TK, routing.weights_TK, stacked, pick_backend("auto", stacked))
        assert_golden(out_TH, golden.forward[f"layer{layer}.moe_out"].flatten(0, 1), x_TH.dtype)


# ----------------------------------------------------------------------------------------------------------- formulas


def test_softmax_formula() -> None:
    spec = RouterSpec(kind="softmax", num_experts=7, top_k=3)
    logits_TE, bias_E = torch.randn(5, 7), torch.randn(7)
    scores = router_scores(logits_TE, bias_E, spec)
    probs_TE = logits_TE.double().softmax(-1) + bias_E.double()
    torch.testing.assert_close(scores.selection_TE.double(), probs_TE, rtol=1e-5, atol=1e-6)
    ids_TK = select(scores.selection_TE, spec)
    weights_TK = combine_weights(scores.combine_TE, ids_TK, spec, torch.bfloat16)
    expected = probs_TE.topk(3)
    assert torch.equal(ids_TK, expected.indices)
    # The bias is part of the weight, nothing is normalised, and the weight is rounded to the model's dtype.
    assert torch.equal(weights_TK, scores.combine_TE.gather(1, ids_TK).bfloat16().float())
    torch.testing.assert_close(weights_TK.double(), expected.values, rtol=1e-2, atol=1e-3)


def test_sigmoid_formula() -> None:
    spec = RouterSpec(kind="sigmoid_group", num_experts=8, top_k=2, n_group=2, topk_group=2, routed_scaling_factor=2.5)
    logits_TE, bias_E = torch.randn(6, 8), 3 * torch.randn(8)
    scores = router_scores(logits_TE, bias_E, spec)
    ids_TK = select(scores.selection_TE, spec)
    unbiased_TE = logits_TE.double().sigmoid()
    assert torch.equal(ids_TK, (unbiased_TE + bias_E.double()).topk(2).indices)
    chosen_TK = unbiased_TE.gather(1, ids_TK)
    expected_TK = 2.5 * chosen_TK / chosen_TK.sum(-1, keepdim=True)
    weights_TK = combine_weights(scores.combine_TE, ids_TK, spec, torch.bfloat16)
    torch.testing.assert_close(weights_TK.double(), expected_TK, rtol=1e-5, atol=1e-6)


def test_one_expert_is_not_normalised() -> None:
    spec = RouterSpec(kind="sigmoid_group", num_experts=4, top_k=1, routed_scaling_factor=2.0)
    combine_TE = torch.tensor([[0.1, 0.3, 0.2, 0.0]])
    weights = combine_weights(combine_TE, torch.tensor([[1]]), spec, torch.float32)
    assert weights.tolist() == [[pytest.approx(0.6)]]


def test_logit_dtypes() -> None:
    x_TH, weight_EH = torch.randn(9, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    exact_TE = x_TH.double() @ weight_EH.double().T
    sigmoid = RouterSpec(kind="sigmoid_group", num_experts=16, top_k=2)
    softmax = RouterSpec(kind="softmax", num_experts=16, top_k=2)
    fp32_TE, bf16_TE = router_logits(x_TH, weight_EH, sigmoid), router_logits(x_TH, weight_EH, softmax)
    assert fp32_TE.dtype == bf16_TE.dtype == torch.float32
    torch.testing.assert_close(fp32_TE.double(), exact_TE, rtol=1e-5, atol=1e-4)
    assert torch.equal(bf16_TE, bf16_TE.bfloat16().float())
    assert (bf16_TE - exact_TE).abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------------------ support


def test_a_short_row_trades_a_group_without_usable_experts() -> None:
    spec = RouterSpec(kind="sigmoid_group", num_experts=6, top_k=2, n_group=3, topk_group=1)
    scores = torch.tensor([[0.9, 0.9, 0.5, 0.4, 0.3, 0.2]])
    support = torch.tensor([False, False, True, True, True, True])
    assert select(scores, spec, support).tolist() == [[2, 3]]
    # Negative scores too: a missing expert must not beat a usable one.
    assert select(scores - 5, spec, support).tolist() == [[2, 3]]


def test_groups_keep_their_natural_rank_inside_a_support() -> None:
    spec = RouterSpec(kind="sigmoid_group", num_experts=4, top_k=1, n_group=2, topk_group=1)
    scores = torch.tensor([[0.4, 0.8, 0.5, 0.3]])
    # Group 0 ranks first with both experts; it stays first with the weaker one alone.
    assert select(scores, spec, torch.tensor([True, False, True, True])).tolist() == [[0]]
    # A group with one usable expert is kept even where K is larger: what is missing stays empty.
    two = replace(spec, top_k=2)
    assert select(scores, two, torch.tensor([True, False, True, True])).tolist() == [[0, NO_EXPERT]]


@settings(max_examples=60)
@given(selections(), st.integers(0, 2**31))
def test_a_usable_natural_choice_is_kept(case: tuple[RouterSpec, Tensor, Tensor | None], seed: int) -> None:
    spec, scores_TE, _ = case
    natural_TK = select(scores_TE, spec)
    support_TE = torch.rand(scores_TE.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    support_TE.scatter_(1, natural_TK, True)
    assert torch.equal(select(scores_TE, spec, support_TE), natural_TK)


def test_fewer_than_k_usable_experts() -> None:
    for kind in ("softmax", "sigmoid_group"):
        spec = RouterSpec(kind=kind, num_experts=5, top_k=3, routed_scaling_factor=2.0)
        scores = torch.rand(4, 5)
        support = torch.tensor([False, True, False, True, False])
        ids = select(scores, spec, support)
        assert (ids[:, 2] == NO_EXPERT).all()
        assert (ids[:, :2].sort(-1).values == torch.tensor([1, 3])).all()
        weights = combine_weights(scores, ids, spec, torch.float32)
        assert (weights[:, 2] == 0).all()
        if kind == "sigmoid_group":
            torch.testing.assert_close(weights.sum(-1), torch.full((4,), 2.0))
        none = select(scores, spec, torch.zeros(5, dtype=torch.bool))
        assert (none == NO_EXPERT).all()
        assert (combine_weights(scores, none, spec, torch.float32) == 0).all()


def test_a_full_support_changes_nothing() -> None:
    spec = RouterSpec(kind="sigmoid_group", num_experts=12, top_k=4, n_group=4, topk_group=2)
    scores = torch.randn(33, 12)
    assert torch.equal(select(scores, spec), select(scores, spec, torch.ones(12, dtype=torch.bool)))


# --------------------------------------------------------------------------------------------------------------- pools


@pytest.mark.parametrize("seq_len", [1, 4, 7, 8, 11])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_pools_are_per_block_and_sequence(seq_len: int, batch: int, padded: bool) -> None:
    spec = RouterSpec(kind="block_pool", num_experts=10, top_k=2, expert_capacity=3, block_size=4)
    scores_BSE = torch.randn(batch, seq_len, 10)
    valid_BS = torch.ones(batch, seq_len, dtype=torch.bool)
    starts = [0] * batch
    if padded:
        starts = [(5 * sequence + 1) % seq_len for sequence in range(batch)]
        valid_BS = torch.arange(seq_len) >= torch.tensor(starts)[:, None]
        scores_BSE[~valid_BS] = 50.0  # padding would win every pool
    pools = sequence_pools(scores_BSE.flatten(0, 1), spec, batch, valid_BS if padded else None)
    for sequence, first in enumerate(starts):
        for start in range(first, seq_len, 4):
            best = scores_BSE[sequence, start : start + 4].amax(0).topk(3).indices.sort().values.tolist()
            for row in range(start, min(start + 4, seq_len)):
                assert pools.view(batch, seq_len, 10)[sequence, row].nonzero().flatten().tolist() == best


def test_rows_that_do_not_exist_do_not_vote() -> None:
    spec = RouterSpec(kind="block_pool", num_experts=6, top_k=1, expert_capacity=2, block_size=3)
    scores_SE = torch.zeros(6, 6)
    scores_SE[0, 1] = scores_SE[0, 2] = 1.0
    scores_SE[1, 4] = 9.0  # a row in the middle, and the whole second sequence
    scores_SE[3:, 5] = 9.0
    valid_BS = torch.tensor([[True, False, True], [False, False, False]])
    assert sequence_pools(scores_SE, spec, 2, valid_BS)[0].nonzero().flatten().tolist() == [1, 2]
    assert sequence_pools(scores_SE, spec, 2)[0, 4]
    assert sequence_pools(scores_SE[:0], spec, 2).shape == (0, 6)


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "quoted"),
    [
        ({"kind": "hash"}, "kind='hash'"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 9}, r"top_k=9 must lie in 1..num_experts=8"),
        ({"n_group": 3}, "num_experts=8 must be a multiple of n_group=3"),
        ({"n_group": 0}, "n_group=0"),
        ({"n_group": 4, "topk_group": 5}, "topk_group=5 must lie in 1..n_group=4"),
        ({"n_group": 4, "topk_group": 1, "top_k": 3}, "top_k=3 experts do not fit into topk_group=1 groups of 2"),
        ({"kind": "block_pool"}, "expert_capacity=None"),
        ({"kind": "block_pool", "expert_capacity": 1, "block_size": 4}, "expert_capacity=1 must lie in top_k=2"),
        ({"kind": "block_pool", "expert_capacity": 9, "block_size": 4}, "expert_capacity=9"),
        ({"kind": "block_pool", "expert_capacity": 4, "block_size": 0}, "block_size=0 must be at least 1"),
    ],
)
def test_specs_that_make_no_sense(changes: dict[str, object], quoted: str) -> None:
    with pytest.raises(ValueError, match=quoted):
        RouterSpec(**({"kind": "sigmoid_group", "num_experts": 8, "top_k": 2} | changes))
