"""The ATLAS kernels against `compile_support`.

Sums of fp32 scores depend on their order in the last bits, and sets could differ by it where a decision is that close.
So scores here are multiples of a power of two: all sums are exact, in any order, and both must find the same set. That
makes exact ties frequent, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from aot.compiler import compile_elsewhere
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from epoch_moe.kernels.atlas import compile_support_device
from epoch_moe.plan.atlas import compile_support
from epoch_moe.routing import RouterSpec

MINI = RouterSpec(kind="sigmoid_group", num_experts=256, top_k=8, n_group=8, topk_group=4)
LLADA_MOE = RouterSpec(kind="softmax", num_experts=64, top_k=8)
NAN = float("nan")


@dataclass
class Case:
    spec: RouterSpec
    selection_GWE: Tensor
    combine_GWE: Tensor
    vote_GW: Tensor
    coverage: float
    factor: int
    only_G: Tensor | None = None
    max_support: int | None = None
    least_saving: float = 0.0

    def kernel(self) -> Tensor:
        """With NaN in everything that must not matter."""
        vote_GW = self.vote_GW if self.only_G is None else self.vote_GW & self.only_G[:, None]
        silent_GW1 = ~vote_GW.unsqueeze(-1)
        return compile_support_device(
            self.selection_GWE.masked_fill(silent_GW1, NAN),
            self.combine_GWE.masked_fill(silent_GW1, NAN),
            self.vote_GW,
            self.spec,
            self.coverage,
            self.factor,
            self.only_G,
            max_support=self.max_support,
            least_saving=self.least_saving,
        )

    def reference(self) -> Tensor:
        support_GE = compile_support(
            self.selection_GWE, self.combine_GWE, self.vote_GW, self.spec, self.coverage, self.factor,
            max_support=self.max_support, least_saving=self.least_saving,
        )  # fmt: skip
        return support_GE if self.only_G is None else support_GE & self.only_G[:, None]


def on_grid(scores: Tensor, steps: int) -> Tensor:
    return (scores * steps).round() / steps


@st.composite
def cases(draw: st.DrawFn) -> Case:
    group_size, n_group = draw(st.sampled_from([(2, 4), (4, 4), (5, 3), (8, 2), (17, 1), (5, 1), (1, 8), (1, 1)]))
    topk_group = draw(st.integers(1, n_group))
    kind = draw(st.sampled_from(["sigmoid_group", "sigmoid_group", "softmax"]))
    num_experts = group_size * n_group
    usable = topk_group * group_size if kind == "sigmoid_group" else num_experts
    top_k = draw(st.sampled_from(sorted({1, min(2, usable), min(4, usable), usable})))
    spec = RouterSpec(kind=kind, num_experts=num_experts, top_k=top_k, n_group=n_group, topk_group=topk_group)  # type: ignore[arg-type]
    supports, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5, 7]))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.3, 1.0, 3.0]))
    logits = spread * torch.randn(supports, width, num_experts, generator=gen)
    if draw(st.booleans()):  # rows of a block resemble each other
        logits = logits * 0.2 + spread * torch.randn(1, 1, num_experts, generator=gen)
    scores = logits.softmax(-1) if kind == "softmax" else logits.sigmoid()
    combine = on_grid(scores, draw(st.sampled_from([8, 64, 8192])))
    if draw(st.booleans()):
        combine = combine - on_grid(torch.rand(num_experts, generator=gen) / 4, 8)  # some negative, as a bias can make
    # What ranks is told apart from what is summed: it has no ties (torch.topk would leave those open).
    selection = scores + draw(st.sampled_from([0.0, 0.1, 1.0])) * torch.randn(num_experts, generator=gen)
    vote = torch.rand(supports, width, generator=gen) < draw(st.sampled_from([0.2, 0.8, 1.1]))
    only = torch.rand(supports, generator=gen) < 0.5 if draw(st.booleans()) else None
    coverage = draw(st.sampled_from([0.125, 0.5, 0.75, 0.9375, 1.0]))
    largest = draw(st.sampled_from([None, None, top_k, min(top_k + 2, num_experts)]))
    saving = draw(st.sampled_from([0.0, 0.25]))
    return Case(spec, selection, combine, vote, coverage, draw(st.integers(1, 4)), only, largest, saving)


def released(spec: RouterSpec, supports: int, width: int, coverage: float) -> Case:
    """Scores as rows of a block have them: alike, with a bias on the selection."""
    logits = torch.randn(supports, width, spec.num_experts) + 2 * torch.randn(supports, 1, spec.num_experts)
    scores = logits.softmax(-1) if spec.kind == "softmax" else logits.sigmoid()
    selection = scores + 0.05 * torch.randn(spec.num_experts)
    return Case(spec, selection, on_grid(scores, 8192), torch.rand(supports, width) < 0.9, coverage, 4)


@settings(max_examples=20)
@given(cases())
def test_equals_the_reference(case: Case) -> None:
    assert torch.equal(case.kernel(), case.reference())


@pytest.mark.slow
@settings(max_examples=120)
@given(cases())
def test_equals_the_reference_on_more_cases(case: Case) -> None:
    assert torch.equal(case.kernel(), case.reference())


@pytest.mark.parametrize(
    ("spec", "coverage"), [(MINI, 0.9375), (LLADA_MOE, 0.5), (LLADA_MOE, 1.0)], ids=["llada2", "half", "union"]
)
def test_released_shapes(spec: RouterSpec, coverage: float) -> None:
    case = released(spec, 2, 6, coverage)
    support_GE = case.kernel()
    assert torch.equal(support_GE, case.reference())
    assert not support_GE.all() and support_GE.any()


def test_the_heaviest_and_the_filling_both_add_experts() -> None:
    """The released-shape cases are no test of steps that never run."""
    spec = replace(LLADA_MOE, top_k=2)
    case = released(spec, 3, 9, 0.9375)
    best_GE = torch.zeros(3, 64, dtype=torch.bool).scatter_(1, case.selection_GWE.argmax(-1), True)
    from epoch_moe.plan import atlas

    sizes: list[Tensor] = []
    original = atlas._fill_deficits

    def spy(support_BE: Tensor, *args: object) -> Tensor:
        filled_BE = original(support_BE, *args)  # type: ignore[arg-type]
        sizes.extend([support_BE.sum(1), filled_BE.sum(1)])
        return filled_BE

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atlas, "_fill_deficits", spy)
        expected = case.reference()
    assert (best_GE.sum(1) < sizes[0]).any() and (sizes[0] < sizes[1]).any()
    assert torch.equal(case.kernel(), expected)


@pytest.mark.parametrize("coverage", [0.75, 1.0])
def test_one_support_for_many_rows(coverage: float) -> None:
    """`support_scope="batch"`: rows in several chunks, the last one short, some chunks without a voter."""
    spec = RouterSpec(kind="sigmoid_group", num_experts=24, top_k=2, n_group=4, topk_group=2)
    logits = 2 * torch.randn(1, 141, 24)
    vote = torch.rand(1, 141) < 0.3
    vote[:, 64:128] = False  # a whole chunk
    case = Case(spec, logits.sigmoid(), on_grid(logits.sigmoid(), 8192), vote, coverage, 2)
    assert torch.equal(case.kernel(), case.reference())


@pytest.mark.parametrize("spec", [MINI, LLADA_MOE], ids=["llada2", "llada_moe"])
def test_scores_off_the_grid(spec: RouterSpec) -> None:
    """Plain fp32 scores at the default coverage, where no decision is close: the order of the rows changes nothing."""
    case = released(spec, 1, 9, 0.95)
    logits = torch.randn(1, 9, spec.num_experts) + 2 * torch.randn(spec.num_experts)
    case.combine_GWE = logits.softmax(-1) if spec.kind == "softmax" else logits.sigmoid()
    case.selection_GWE = case.combine_GWE + 0.05 * torch.randn(spec.num_experts)
    expected = case.reference()
    for _ in range(20):
        order = torch.randperm(9)
        shuffled = replace(
            case,
            selection_GWE=case.selection_GWE[:, order],
            combine_GWE=case.combine_GWE[:, order],
            vote_GW=case.vote_GW[:, order],
        )
        assert torch.equal(shuffled.reference(), expected)
    assert torch.equal(case.kernel(), expected)


@settings(max_examples=10)
@given(cases(), st.sampled_from([2, 4]))
def test_equal_selection_scores_go_to_the_lowest_id(case: Case, steps: int) -> None:
    tied_GWE = on_grid(case.selection_GWE, steps)
    actual = replace(case, selection_GWE=tied_GWE).kernel()
    # The same rule as scores without ties. Sums of groups follow it: a group with lower ids loses less.
    told_apart_GWE = tied_GWE - torch.arange(case.spec.num_experts) / 2**12
    assert torch.equal(actual, replace(case, selection_GWE=told_apart_GWE).reference())


@settings(max_examples=5)
@given(cases())
def test_two_runs_are_equal_whatever_the_scratch_memory_held(case: Case) -> None:
    first = case.kernel()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is then NaN, or the largest integer
    try:
        second = case.kernel()
    finally:
        torch.use_deterministic_algorithms(before)
    assert torch.equal(first, second)


def test_zeros_of_either_sign_are_equal() -> None:
    spec = RouterSpec(kind="softmax", num_experts=3, top_k=1)
    selection = torch.tensor([[[-0.0, 0.0, -1.0]]])
    vote = torch.ones(1, 1, dtype=torch.bool)
    assert compile_support_device(selection, selection, vote, spec, 1.0, 1).tolist() == [[True, False, False]]


def test_a_row_within_rounding_of_its_target_is_not_short() -> None:
    spec = RouterSpec(kind="softmax", num_experts=4, top_k=2)
    almost = 0.25 - 2**-24
    # Row 0 holds 0 and, by row 1, 3: together its target of 0.75 but for the last bits. Row 1 has more than its own.
    combine = torch.tensor([[[0.5, 0.5, 0.0, almost], [0.0, 0.0, 0.125, 4.0]]])
    selection = torch.tensor([[[4.0, 3.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]])
    case = Case(spec, selection, combine, torch.ones(1, 2, dtype=torch.bool), 0.75, 2)
    assert case.reference().tolist() == [[True, False, False, True]]
    assert torch.equal(case.kernel(), case.reference())
    combine[0, 0, 3] = 0.25 - 2**-16
    assert case.reference().tolist() == [[True, True, False, True]]
    assert torch.equal(case.kernel(), case.reference())


def test_nothing_waits_for_the_device() -> None:
    """Fake CUDA tensors have no values: reading one raises."""
    with FakeTensorMode():
        scores = torch.rand(2, 3, 64, device="cuda")
        vote, only = torch.ones(2, 3, device="cuda").bool(), torch.ones(2, device="cuda").bool()
        support_GE = compile_support_device(scores, scores, vote, LLADA_MOE, 0.95, 4, only)
    assert support_GE.device.type == "cuda" and support_GE.shape == (2, 64) and support_GE.dtype == torch.bool


def test_nobody_votes() -> None:
    scores = torch.rand(3, 4, 8)
    vote = torch.tensor([[True] * 4, [False] * 4, [False] * 4])
    only = torch.tensor([True, True, False])
    spec = RouterSpec(kind="softmax", num_experts=8, top_k=2)
    for coverage in (0.5, 1.0):
        support_GE = compile_support_device(scores, scores, vote, spec, coverage, 2, only)
        assert support_GE[1].all() and not support_GE[0].all() and not support_GE[2].any()
        none_GE = compile_support_device(scores[:, :0], scores[:, :0], vote[:, :0], spec, coverage, 2)
        assert none_GE.shape == (3, 8) and none_GE.all()
        assert compile_support_device(scores[:0], scores[:0], vote[:0], spec, coverage, 2).shape == (0, 8)


@pytest.mark.parametrize("coverage", [0.75, 1.0])
@pytest.mark.parametrize("with_only", [False, True])
def test_the_operator_is_declared_right(coverage: float, with_only: bool) -> None:
    scores, vote = torch.rand(2, 3, 8), torch.tensor([[True, True, False], [True, False, True]])
    only = torch.tensor([True, False]) if with_only else None
    torch.library.opcheck(
        torch.ops.epoch_moe.compile_support.default, (scores, scores, vote, only, 2, 4, 2, coverage, 4, None, 0.1)
    )


@pytest.mark.parametrize(
    ("changes", "quoted"),
    [
        ({"selection_GWE": torch.rand(2, 3, 7)}, r"selection_GWE is .*\(2, 3, 7\) .* \[supports, rows, 8\]"),
        ({"combine_GWE": torch.rand(2, 3, 8).half()}, "combine_GWE is torch.float16"),
        ({"vote_GW": torch.ones(2, 3)}, "vote_GW is torch.float32"),
        ({"only_G": torch.ones(3, dtype=torch.bool)}, r"only_G is torch.bool \(3,\) .*: expected torch.bool \[2\]"),
        ({"candidate_factor": 0}, "candidate_factor=0 must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, object], quoted: str) -> None:
    scores = torch.rand(2, 3, 8)
    args: dict[str, object] = {
        "selection_GWE": scores,
        "combine_GWE": scores,
        "vote_GW": torch.ones(2, 3, dtype=torch.bool),
        "spec": RouterSpec(kind="softmax", num_experts=8, top_k=2),
        "coverage": 0.9,
        "candidate_factor": 2,
    }
    with pytest.raises(ValueError, match=quoted):
        compile_support_device(**(args | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("match", "cases"), [("atlas_support[llada2", 2), pytest.param("atlas", 10, marks=pytest.mark.slow)]
)
def test_compiles_ahead_of_time_without_spills(match: str, cases: int) -> None:
    results = compile_elsewhere("atlas", 90, match)
    assert len(results) == cases
    for result in results:
        assert result["spill_bytes"] == 0, result
        assert result["wide_loads"] or not result["wide_loads_expected"], result
