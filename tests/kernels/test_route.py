"""The route kernel against its reference, the router in torch, and the released models' golden data."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from aot.compiler import compile_elsewhere
from helpers import Golden, load_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from epoch_moe.kernels.route import route
from epoch_moe.kernels.route_reference import route_reference
from epoch_moe.models.llada2 import LLaDA2MoeConfig
from epoch_moe.routing import (
    NO_EXPERT,
    RouterSpec,
    combine_weights,
    router_logits,
    router_scores,
    select,
    sequence_pools,
)

Result = tuple[Tensor, Tensor, Tensor]
MINI = RouterSpec(
    kind="sigmoid_group", num_experts=256, top_k=8, n_group=8, topk_group=4, routed_scaling_factor=2.5
)  # LLaDA2.0-mini and flash
LLADA_MOE = RouterSpec(kind="softmax", num_experts=64, top_k=8)
SOME_ROWS = slice(0, None, 9)  # of the golden forwards: the interpreter takes 10 ms for a row


@dataclass
class Case:
    spec: RouterSpec
    logits_RE: Tensor
    bias_E: Tensor | None
    dtype: torch.dtype
    support_GE: Tensor | None
    group_R: Tensor | None
    restricted_R: Tensor | None
    count: Tensor | None

    @property
    def args(self) -> dict[str, object]:
        names = ("dtype", "support_GE", "group_R", "restricted_R", "count")
        return {name: getattr(self, name) for name in names}

    def kernel(self) -> Result:
        return route(self.logits_RE, self.bias_E, self.spec, **self.args)  # type: ignore[arg-type]

    def reference(self) -> Result:
        return route_reference(self.logits_RE, self.bias_E, self.spec, **self.args)  # type: ignore[arg-type]


def assert_same(actual: Result, expected: Result, spec: RouterSpec, dtype: torch.dtype = torch.float32) -> None:
    """Same ids; weights to the last bits of fp32 sums and powers (a rounded softmax weight: one step of its dtype)."""
    (ids, weights, total), (expected_ids, expected_weights, expected_total) = actual, expected
    assert ids.dtype == torch.int64 and weights.dtype == total.dtype == torch.float32
    assert torch.equal(ids, expected_ids), (ids, expected_ids)
    step = torch.finfo(dtype).eps if spec.kind == "softmax" and dtype != torch.float32 else 0.0
    torch.testing.assert_close(weights, expected_weights, rtol=max(step, 2e-6), atol=1e-37)
    torch.testing.assert_close(total, expected_total, rtol=2e-6, atol=1e-6)
    if step:
        assert torch.equal(weights, weights.to(dtype).float())


def specs(draw: st.DrawFn) -> RouterSpec:
    kind = draw(st.sampled_from(["softmax", "sigmoid_group", "sigmoid_group", "block_pool"]))
    n_group = draw(st.integers(1, 5)) if kind == "sigmoid_group" else 1
    num_experts = n_group * draw(st.integers(1, 7)) if n_group > 1 else draw(st.sampled_from([1, 2, 5, 8, 17]))
    topk_group = draw(st.integers(1, n_group))
    usable = topk_group * (num_experts // n_group)
    top_k = draw(st.sampled_from(sorted({1, min(2, usable), min(3, usable), usable})))
    extra = {"expert_capacity": num_experts, "block_size": 4} if kind == "block_pool" else {}
    return RouterSpec(
        kind=kind,
        num_experts=num_experts,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        **extra,
    )


@st.composite
def cases(draw: st.DrawFn, ties: bool = False) -> Case:
    """Rows of any router, with and without supports and padding; padding is NaN and points nowhere."""
    spec = specs(draw)
    rows = draw(st.integers(0, 5))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_experts = spec.num_experts
    if ties:
        # Few values, so that most rows have ties. No two sums of two sigmoids or probabilities nearly agree unless the
        # values are the same, so what is a tie does not depend on how a power is rounded.
        levels = torch.tensor([-1.7, -0.4, 0.3, 1.1])
        logits = levels[torch.randint(0, 4, (rows, num_experts), generator=gen)]
        bias = None
    else:
        logits = 2 * torch.randn(rows, num_experts, generator=gen)
        bias = draw(st.sampled_from([None, 0.1, 1.0]))
        bias = None if bias is None else bias * torch.randn(num_experts, generator=gen)
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    if draw(st.booleans()):
        logits = logits.half()
    support = group = restricted = None
    share = draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    which = draw(st.sampled_from(["none", "one", "per_row", "grouped"]))
    if which == "none" and spec.kind == "block_pool":
        which = "per_row"
    if which != "none":
        supports = {"one": 1, "per_row": rows, "grouped": 3}[which]
        support = torch.rand(supports, num_experts, generator=gen) < share
        if which == "grouped":
            group = torch.randint(0, 3, (rows,), generator=gen)
        if draw(st.booleans()):
            restricted = torch.rand(rows, generator=gen) < 0.6
    count = None
    if draw(st.booleans()):
        real = draw(st.integers(0, rows))
        count = torch.tensor([real], dtype=torch.int32)
        logits[real:] = float("nan")
        if group is not None:
            group[real:] = 2**40
    return Case(spec, logits, bias, dtype, support, group, restricted, count)


# --------------------------------------------------------------------------------------------------- against references


@settings(max_examples=40)
@given(cases())
def test_equals_the_reference(case: Case) -> None:
    assert_same(case.kernel(), case.reference(), case.spec, case.dtype)


@settings(max_examples=25)
@given(cases(ties=True))
def test_ties_go_to_the_lowest_id(case: Case) -> None:
    assert_same(case.kernel(), case.reference(), case.spec, case.dtype)


@settings(max_examples=40)
@given(cases())
def test_the_reference_is_the_router_where_there_are_no_ties(case: Case) -> None:
    ids, weights, total = case.reference()
    rows = ids.shape[0] if case.count is None else int(case.count)
    scores = router_scores(case.logits_RE[:rows].float(), case.bias_E, case.spec)
    support = case.support_GE
    if support is not None:
        support = support.expand(ids.shape[0], -1)[:rows] if case.group_R is None else support[case.group_R[:rows]]
        if case.restricted_R is not None:
            support = support | ~case.restricted_R[:rows, None]
    expected = select(scores.selection_TE, case.spec, support)
    assert torch.equal(ids[:rows], expected)
    assert torch.equal(weights[:rows], combine_weights(scores.combine_TE, expected, case.spec, case.dtype))
    raw = scores.combine_TE.gather(1, expected.clamp_min(0)).masked_fill(expected == NO_EXPERT, 0.0)
    assert torch.equal(total[:rows], raw.sum(-1))
    assert (ids[rows:] == NO_EXPERT).all() and (weights[rows:] == 0).all() and (total[rows:] == 0).all()


@pytest.mark.parametrize("spec", [MINI, LLADA_MOE], ids=["llada2", "llada_moe"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_released_shapes(spec: RouterSpec, dtype: torch.dtype) -> None:
    logits_RE, bias_E = torch.randn(11, spec.num_experts), 0.1 * torch.randn(spec.num_experts)
    support_GE = torch.rand(2, spec.num_experts) < torch.tensor([[0.3], [0.02]])
    group_R, restricted_R = torch.arange(11) % 2, torch.arange(11) % 3 > 0
    for count in (None, torch.tensor([9], dtype=torch.int32)):
        case = Case(spec, logits_RE, bias_E, dtype, support_GE, group_R, restricted_R, count)
        assert_same(case.kernel(), case.reference(), spec, dtype)
        free = Case(spec, logits_RE, bias_E, dtype, None, None, None, count)
        assert_same(free.kernel(), free.reference(), spec, dtype)


@pytest.mark.parametrize("name", ["llada2", "llada2_1", "llada2_2_routing", "llada2_bf16"])
def test_llada2_golden(name: str) -> None:
    golden = load_golden(name)
    spec = LLaDA2MoeConfig(**golden.config).router_spec()
    for layer in golden.moe_layers:
        logits_TE, bias_E = golden.forward[f"layer{layer}.router_logits"].float(), _gate(golden, layer, "expert_bias")
        pools = None
        if spec.kind == "block_pool":
            batch = golden.forward[f"layer{layer}.moe_in"].shape[0]
            pools = sequence_pools(router_scores(logits_TE, bias_E, spec).selection_TE, spec, batch)
            pools = pools[SOME_ROWS]
        ids_TK, weights_TK, _ = route(logits_TE[SOME_ROWS], bias_E, spec, dtype=torch.bfloat16, support_GE=pools)
        ids, order = ids_TK.sort(-1)
        golden_ids, golden_order = golden.forward[f"layer{layer}.topk_idx"][SOME_ROWS].sort(-1)
        assert torch.equal(ids, golden_ids)
        expected = golden.forward[f"layer{layer}.topk_weight"][SOME_ROWS].gather(1, golden_order)
        torch.testing.assert_close(weights_TK.gather(1, order), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llada_moe", "llada_moe_bf16", "llada_moe_shared_bias"])
def test_llada_moe_on_golden_activations(name: str) -> None:
    """The golden data holds no ids of this router; the router in torch, which gives the golden blocks, stands in."""
    golden = load_golden(name)
    spec = RouterSpec(
        kind="softmax", num_experts=golden.config["num_experts"], top_k=golden.config["num_experts_per_tok"]
    )
    for layer in golden.moe_layers:
        x_TH = golden.forward[f"layer{layer}.moe_in"].flatten(0, 1)[SOME_ROWS]
        bias_E = golden.weights.get(f"model.layers.{layer}.mlp.expert_bias")
        logits_TE = router_logits(x_TH, _gate(golden, layer, "weight"), spec)
        scores = router_scores(logits_TE, bias_E, spec)
        expected_TK = select(scores.selection_TE, spec)
        ids_TK, weights_TK, total_T = route(logits_TE, bias_E, spec, dtype=x_TH.dtype)
        chosen = scores.selection_TE.gather(1, expected_TK)
        assert (chosen[:, 1:] < chosen[:, :-1]).all(), "the golden rows have no ties"
        assert torch.equal(ids_TK, expected_TK)
        weights = combine_weights(scores.combine_TE, expected_TK, spec, x_TH.dtype)
        step = 2e-6 if x_TH.dtype == torch.float32 else torch.finfo(x_TH.dtype).eps
        torch.testing.assert_close(weights_TK, weights, rtol=step, atol=0)
        torch.testing.assert_close(total_T, scores.combine_TE.gather(1, expected_TK).sum(-1), rtol=2e-6, atol=0)


def _gate(golden: Golden, layer: int, name: str) -> Tensor:
    return golden.weights[f"model.layers.{layer}.mlp.gate.{name}"]


# --------------------------------------------------------------------------------------------------------- single rules


def test_all_scores_equal() -> None:
    spec = RouterSpec(kind="sigmoid_group", num_experts=12, top_k=3, n_group=4, topk_group=2)
    ids, weights, _ = route(torch.zeros(2, 12), None, spec, dtype=torch.float32)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_softmax_weights_are_rounded_to_nearest_even() -> None:
    """Halfway between two bf16 numbers, once below an even one and once above."""
    spec = RouterSpec(kind="softmax", num_experts=2, top_k=2)
    bias = torch.tensor([1.0, 3.0]) / 2**9
    ids, weights, _ = route(torch.zeros(1, 2), bias, spec, dtype=torch.bfloat16)
    assert ids.tolist() == [[1, 0]]
    assert weights.tolist() == [[0.5 + 2**-7, 0.5]] == [(0.5 + bias[[1, 0]]).bfloat16().tolist()]


def test_an_expert_that_a_bias_shuts_out_is_never_chosen() -> None:
    spec = RouterSpec(kind="sigmoid_group", num_experts=3, top_k=3)
    bias = torch.tensor([0.0, float("-inf"), 0.0])
    actual = route(torch.tensor([[0.0, 9.0, 1.0]]), bias, spec, dtype=torch.float32)
    assert actual[0].tolist() == [[2, 0, NO_EXPERT]] and actual[1][0, 2] == 0
    assert_same(actual, route_reference(torch.tensor([[0.0, 9.0, 1.0]]), bias, spec, dtype=torch.float32), spec)


def test_a_short_row_trades_a_group_without_usable_experts() -> None:
    spec = RouterSpec(kind="sigmoid_group", num_experts=6, top_k=2, n_group=3, topk_group=1)
    logits = torch.tensor([[0.9, 0.9, 0.5, 0.4, 0.3, 0.2]])
    support = torch.tensor([[False, False, True, True, True, True]])
    ids, _, _ = route(logits, None, spec, dtype=torch.float32, support_GE=support)
    assert ids.tolist() == [[2, 3]]
    # Enough usable experts in the natural group: it stays, though another is better inside the support.
    support = torch.tensor([[True, True, True, True, False, False]])
    ids, _, _ = route(logits, None, spec, dtype=torch.float32, support_GE=support)
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("scale", [1.0, 30.0, 200.0])
def test_powers_are_accurate(scale: float) -> None:
    """Sigmoids and probabilities within a few ulp of fp64, also where exp over- or underflows."""
    # Multiples of 1/8, so that subtracting the largest is exact.
    logits = (8 * scale * torch.linspace(-1, 1, 64)).round().view(8, 8) / 8
    for kind in ("softmax", "sigmoid_group"):
        spec = RouterSpec(kind=kind, num_experts=8, top_k=8)  # type: ignore[arg-type]
        ids, weights, total = route(logits, None, spec, dtype=torch.float32)
        exact = logits.double().softmax(-1) if kind == "softmax" else logits.double().sigmoid()
        torch.testing.assert_close(total.double(), exact.sum(-1), rtol=1e-6, atol=1e-37)
        if kind == "softmax":
            torch.testing.assert_close(weights.double(), exact.gather(1, ids), rtol=1e-6, atol=1e-37)


def test_nan_stays_visible() -> None:
    """A real row of NaN gets experts and NaN weights, as in torch; its neighbours are untouched."""
    for spec in (MINI, LLADA_MOE):
        logits = torch.randn(2, spec.num_experts)
        clean = route(logits, None, spec, dtype=torch.float32)
        logits[0] = float("nan")
        ids, weights, total = route(logits, None, spec, dtype=torch.float32)
        assert (ids[0] >= 0).all() and weights[0].isnan().all() and total[0].isnan()
        assert torch.equal(ids[1], clean[0][1]) and torch.equal(weights[1], clean[1][1])


@settings(max_examples=15)
@given(cases())
def test_two_runs_are_bit_equal_whatever_the_buffers_held(case: Case) -> None:
    first = case.kernel()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is then NaN, or the largest integer
    try:
        second = case.kernel()
    finally:
        torch.use_deterministic_algorithms(before)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


# -------------------------------------------------------------------------------------------------- operator, bad input


def planned(logits_RE: Tensor, support_GE: Tensor, group_R: Tensor, count: Tensor) -> Result:
    return route(logits_RE, None, LLADA_MOE, dtype=torch.bfloat16, support_GE=support_GE, group_R=group_R, count=count)


def planned_args(device: str) -> tuple[Tensor, ...]:
    return (
        torch.randn(4, 64, device=device),
        torch.ones(2, 64, dtype=torch.bool, device=device),
        torch.zeros(4, dtype=torch.int64, device=device),
        torch.ones(1, dtype=torch.int32, device=device),
    )


def test_compiled_forwards_pass_through() -> None:
    args = planned_args("cpu")
    compiled = torch.compile(planned, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(*args), planned(*args), strict=True):
        assert torch.equal(one, other)


def test_nothing_waits_for_the_device() -> None:
    """Fake CUDA tensors have no values: reading one raises."""
    with FakeTensorMode():
        ids, weights, total = planned(*planned_args("cuda"))
    assert {ids.device.type, weights.device.type, total.device.type} == {"cuda"}
    assert ids.shape == weights.shape == (4, 8) and total.shape == (4,)


def operator_cases() -> list[Case]:
    full = Case(
        RouterSpec(kind="sigmoid_group", num_experts=8, top_k=2, n_group=4, topk_group=2),
        torch.randn(3, 8),
        torch.randn(8),
        torch.bfloat16,
        torch.rand(2, 8) < 0.5,
        torch.tensor([0, 1, 0]),
        torch.tensor([True, False, True]),
        torch.tensor([2], dtype=torch.int32),
    )
    bare = Case(RouterSpec(kind="softmax", num_experts=5, top_k=2), torch.randn(3, 5), *[None] * 6)  # type: ignore[arg-type]
    bare.dtype = torch.float16
    return [full, bare]


@pytest.mark.parametrize("which", [0, 1])
def test_the_operator_is_declared_right(which: int) -> None:
    case = operator_cases()[which]
    groups = (4, 2) if which == 0 else (1, 1)
    torch.library.opcheck(
        torch.ops.epoch_moe.route.default,
        (
            case.logits_RE,
            case.spec.top_k,
            *groups,
            which == 1,
            1.0,
            case.dtype,
            case.bias_E,
            case.support_GE,
            case.group_R,
            case.restricted_R,
            case.count,
        ),
    )


def test_no_rows() -> None:
    ids, weights, total = route(torch.empty(0, 256), None, MINI, dtype=torch.float32)
    assert ids.shape == weights.shape == (0, 8) and total.shape == (0,)


@pytest.mark.parametrize(
    ("changes", "quoted"),
    [
        ({"dtype": torch.float64}, "dtype=torch.float64"),
        ({"support_GE": torch.ones(2, 64, dtype=torch.bool)}, "2 supports for 3 rows: expected 1 or 3"),
        ({"support_GE": torch.ones(1, 64)}, r"support_GE is torch.float32 .*: expected torch.bool"),
        ({"support_GE": torch.ones(1, 63).bool()}, r"support_GE is .*\(1, 63\) .*torch.bool \[supports, 64\]"),
        ({"group_R": torch.zeros(3, dtype=torch.int64)}, "without support_GE"),
        ({"count": torch.tensor([3])}, r"count is torch.int64 .*: expected torch.int32"),
        ({"count": torch.tensor(3, dtype=torch.int32)}, r"count is torch.int32 \(\) .*: expected torch.int32 \[1\]"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, object], quoted: str) -> None:
    args: dict[str, object] = {"dtype": torch.float32} | changes
    with pytest.raises(ValueError, match=quoted):
        route(torch.zeros(3, 64), None, LLADA_MOE, **args)  # type: ignore[arg-type]


def test_pools_are_needed() -> None:
    spec = RouterSpec(kind="block_pool", num_experts=8, top_k=2, expert_capacity=4, block_size=4)
    with pytest.raises(ValueError, match="needs its pools"):
        route(torch.zeros(3, 8), None, spec, dtype=torch.float32)


@pytest.mark.slow
def test_compiles_ahead_of_time_without_spills() -> None:
    results = compile_elsewhere("route", 90)
    assert len(results) == 4
    for result in results:
        assert result["spill_bytes"] == 0, result
        assert result["wide_loads"] or not result["wide_loads_expected"], result
