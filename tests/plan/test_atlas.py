"""ATLAS against the python loops of `atlas_oracle`, and its properties."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from atlas_oracle import atlas, candidates, choose, covered
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epoch_moe.plan.atlas import compile_support
from epoch_moe.routing import NO_EXPERT, RouterSpec, select

CHECKED = settings(max_examples=60)


@dataclass
class Case:
    spec: RouterSpec
    selection_BWE: Tensor
    combine_BWE: Tensor
    vote_BW: Tensor
    coverage: float
    factor: int

    def compile(self, **changes: object) -> Tensor:
        args: dict[str, object] = {"coverage": self.coverage, "candidate_factor": self.factor} | changes
        return compile_support(self.selection_BWE, self.combine_BWE, self.vote_BW, self.spec, **args)  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...] = ("sigmoid_group", "softmax")) -> Case:
    group_size, n_group = draw(st.sampled_from([(2, 4), (4, 2), (4, 4), (8, 4), (12, 2), (16, 2), (8, 1), (1, 8)]))
    topk_group = draw(st.integers(1, n_group))
    kind = draw(st.sampled_from(kinds))
    usable = topk_group * group_size if kind == "sigmoid_group" else group_size * n_group
    top_k = draw(st.integers(1, min(6, usable)))
    spec = RouterSpec(
        kind=kind, num_experts=group_size * n_group, top_k=top_k, n_group=n_group, topk_group=topk_group
    )  # type: ignore[arg-type]
    supports, width = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.3, 1.0, 3.0]))
    logits = spread * torch.randn(supports, width, spec.num_experts, generator=gen)
    if draw(st.booleans()):  # rows of a block resemble each other
        logits = logits * 0.2 + spread * torch.randn(1, 1, spec.num_experts, generator=gen)
    if kind == "softmax":
        combine = selection = logits.softmax(-1)
    else:
        combine = logits.sigmoid()
        selection = combine + draw(st.sampled_from([0.0, 0.1, 1.0])) * torch.randn(spec.num_experts, generator=gen)
    vote = torch.rand(supports, width, generator=gen) < draw(st.sampled_from([0.2, 0.8, 1.1]))
    coverage = draw(st.sampled_from([0.05, 0.5, 0.8, 0.95, 0.999, 1.0]))
    return Case(spec, selection, combine, vote, coverage, draw(st.integers(1, 4)))


def sets(support_BE: Tensor) -> list[set[int]]:
    return [set(row.nonzero().flatten().tolist()) for row in support_BE]


@CHECKED
@given(cases())
def test_equals_the_oracle(case: Case) -> None:
    for changes in ({}, {"least_saving": 0.15}, {"max_support": case.spec.top_k + 2}):
        assert sets(case.compile(**changes)) == [
            atlas(a.tolist(), b.tolist(), vote.tolist(), case.spec, case.coverage, case.factor, **changes)  # type: ignore[arg-type]
            for a, b, vote in zip(case.selection_BWE, case.combine_BWE, case.vote_BW, strict=True)
        ]


@CHECKED
@given(cases())
def test_every_voting_row_is_covered_and_finds_k_experts(case: Case) -> None:
    support_BE = case.compile()
    assert (support_BE.sum(1) >= case.spec.top_k).all()
    for b, w in case.vote_BW.nonzero().tolist():
        selection, combine = case.selection_BWE[b, w].tolist(), case.combine_BWE[b, w].tolist()
        inside = set(support_BE[b].nonzero().flatten().tolist())
        own = sum(combine[e] for e in choose(selection, case.spec))
        cand = candidates(selection, combine, case.spec, case.factor)
        assert covered(cand, inside, case.spec.top_k) >= case.coverage * own * (1 - 3e-6)
        ids_K = select(case.selection_BWE[b, w][None], case.spec, support_BE[b])
        assert (ids_K != NO_EXPERT).all(), (b, w, ids_K, inside)


@CHECKED
@given(cases())
def test_full_coverage_is_the_union_of_natural_choices(case: Case) -> None:
    for b, support in enumerate(sets(case.compile(coverage=1.0))):
        rows = case.vote_BW[b].nonzero().flatten().tolist()
        union = {e for w in rows for e in choose(case.selection_BWE[b, w].tolist(), case.spec)}
        assert support == (union if rows else set(range(case.spec.num_experts)))


@CHECKED
@given(cases())
def test_rows_without_a_vote_have_no_influence(case: Case) -> None:
    before = case.compile()
    silent = ~case.vote_BW
    case.selection_BWE[silent] = 5 * torch.rand_like(case.selection_BWE[silent])
    case.combine_BWE[silent] = torch.rand_like(case.combine_BWE[silent])
    assert torch.equal(case.compile(), before)


def test_nobody_votes_everything_is_allowed() -> None:
    spec = RouterSpec(kind="softmax", num_experts=8, top_k=2)
    scores = torch.rand(3, 4, 8).softmax(-1)
    vote = torch.tensor([[True] * 4, [False] * 4, [False, False, True, False]])
    for coverage in (0.5, 1.0):
        support_BE = compile_support(scores, scores, vote, spec, coverage, 2)
        assert support_BE[1].all()
        assert not support_BE[0].all() and not support_BE[2].all()


@CHECKED
@given(cases())
def test_a_batch_of_supports_is_one_by_one_and_deterministic(case: Case) -> None:
    support_BE = case.compile()
    assert torch.equal(case.compile(), support_BE)
    for b in range(support_BE.shape[0]):
        one = slice(b, b + 1)
        alone = Case(
            case.spec, case.selection_BWE[one], case.combine_BWE[one], case.vote_BW[one], case.coverage, case.factor
        )
        assert torch.equal(alone.compile(), support_BE[one])


def test_size_grows_with_coverage() -> None:
    """On average: a greedy filling may take one expert less for a slightly higher target."""
    spec = RouterSpec(kind="sigmoid_group", num_experts=32, top_k=4, n_group=4, topk_group=2)
    combine = torch.randn(40, 16, 32).sigmoid()
    vote = torch.ones(40, 16, dtype=torch.bool)
    sizes = [
        float(compile_support(combine, combine, vote, spec, coverage, 4).sum(1).float().mean())
        for coverage in (0.7, 0.8, 0.9, 0.95, 0.99)  # below, K usable experts per row decide
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] - 4
    assert sizes[0] >= spec.top_k


@CHECKED
@given(cases(("sigmoid_group",)))
def test_what_was_compiled_is_what_rows_get(case: Case) -> None:
    """A voting row that selects inside its support holds the coverage that the support was compiled for."""
    case.selection_BWE = case.combine_BWE  # without a bias the heaviest usable experts are the selected ones
    support_BE = case.compile()
    for b, w in case.vote_BW.nonzero().tolist():
        row = case.combine_BWE[b, w]
        natural, inside = select(row[None], case.spec)[0], select(row[None], case.spec, support_BE[b])[0]
        assert float(row[inside].sum()) >= case.coverage * float(row[natural].sum()) * (1 - 3e-6)
        if case.coverage == 1.0:
            assert torch.equal(inside, natural)


def test_a_block_without_rows_allows_everything() -> None:
    spec = RouterSpec(kind="softmax", num_experts=4, top_k=1)
    empty = torch.zeros(2, 0, 4)
    support = compile_support(empty, empty, torch.zeros(2, 0, dtype=torch.bool), spec, 0.9, 2)
    assert support.all()


@pytest.mark.parametrize("coverage", [0.5, 1.0])
def test_one_expert_for_all(coverage: float) -> None:
    spec = RouterSpec(kind="softmax", num_experts=8, top_k=1)
    logits = torch.full((1, 6, 8), -9.0)
    logits[..., 3] = 9.0
    probs = logits.softmax(-1)
    support = compile_support(probs, probs, torch.ones(1, 6, dtype=torch.bool), spec, coverage, 4)
    assert sets(support) == [{3}]
