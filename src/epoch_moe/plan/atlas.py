"""ATLAS: compile a layer's expert support from the rows of a block's cold pass.

Shape suffixes: B supports (one per sequence, or 1 for a batch), W voting rows per support, E experts, K top-k,
C candidates per row.

Source: Epoch (arXiv 2609.09748), as described by readers of the paper: candidates wider than top-k, a coverage target
of routing weight per row, heavy experts first, then greedy filling of what single rows still miss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.checks import instance, real, tensor, whole
from epoch_moe.routing import NO_EXPERT, RouterSpec, group_limited, select


def compile_support(
    selection_BWE: Tensor,
    combine_BWE: Tensor,
    vote_BW: Tensor,
    spec: RouterSpec,
    coverage: float,
    candidate_factor: int,
) -> Tensor:
    """The experts that B groups of rows may route to: bool ``[B,E]``.

    Args:
        selection_BWE: fp32 selection scores of the voting rows.
        combine_BWE: fp32 combine scores (softmax probability; unbiased sigmoid score).
        vote_BW: bool, False for rows that do not vote. A support without a voter holds all experts.
        spec: the router.
        coverage: share of each row's natural weight that its best K candidates inside the support must reach.
            1.0 gives the union of the rows' natural top-k.
        candidate_factor: a row's candidates are its best ``candidate_factor * K`` experts by selection score.

    Every support holds at least K experts, and every voting row finds K of them (group limits included).
    """
    instance("spec", spec, RouterSpec, "a RouterSpec")
    tensor("selection_BWE", selection_BWE, torch.float32, ("supports", "rows", spec.num_experts))
    tensor("combine_BWE", combine_BWE, torch.float32, selection_BWE.shape, selection_BWE.device)
    tensor("vote_BW", vote_BW, torch.bool, selection_BWE.shape[:2], selection_BWE.device)
    coverage = real("coverage", coverage, "a share in (0, 1]", most=1.0, above=True)
    whole("candidate_factor", candidate_factor, least=1)
    num_experts = selection_BWE.shape[-1]
    flat_TE = selection_BWE.reshape(-1, num_experts)
    # Candidates come from a row's own groups: what lies elsewhere it could not choose, whatever the support holds.
    limited_BWE = group_limited(flat_TE, spec).view_as(selection_BWE)
    natural_BWK = limited_BWE.topk(spec.top_k, dim=-1).indices
    if coverage >= 1.0:
        return _with_all_where_nobody_votes(_union(natural_BWK, vote_BW, num_experts), vote_BW)

    own_BW = combine_BWE.gather(2, natural_BWK).sum(-1) * vote_BW
    target_BW = coverage * own_BW
    # Only this kind has groups to stay in, whatever the other kinds' fields say.
    usable = spec.topk_group * spec.group_size if spec.kind == "sigmoid_group" else num_experts
    num_candidates = min(candidate_factor * spec.top_k, usable)
    ids_BWC = limited_BWE.topk(num_candidates, dim=-1).indices
    weights_BWC, order_BWC = combine_BWE.gather(2, ids_BWC).masked_fill(~vote_BW.unsqueeze(-1), 0.0).sort(
        dim=-1, descending=True, stable=True
    )
    ids_BWC = ids_BWC.gather(2, order_BWC)
    candidates = _Candidates(ids_BWC, weights_BWC, spec.top_k, num_experts)

    support_BE = _union(natural_BWK[..., :1], vote_BW, num_experts)
    support_BE = _add_heaviest(support_BE, candidates, target_BW)
    support_BE = _fill_deficits(support_BE, candidates, target_BW)
    return _make_feasible(support_BE, selection_BWE, natural_BWK, vote_BW, spec)


class _Candidates:
    """Each row's candidate experts, heaviest first."""

    def __init__(self, ids_BWC: Tensor, weights_BWC: Tensor, top_k: int, num_experts: int):
        self.ids_BWC, self.weights_BWC, self.top_k = ids_BWC, weights_BWC, top_k
        num_supports, width, num_candidates = ids_BWC.shape
        self.flat_ids = ids_BWC.reshape(num_supports, width * num_candidates)
        self._zeros_BWE = weights_BWC.new_zeros(num_supports, width, num_experts)

    def covered(self, support_BE: Tensor) -> Tensor:
        """Weight of each row's best K candidates inside the support: ``[B,W]``."""
        inside_BWC = support_BE.gather(1, self.flat_ids).view_as(self.ids_BWC)
        counted_BWC = inside_BWC & (inside_BWC.cumsum(-1) <= self.top_k)
        return (self.weights_BWC * counted_BWC).sum(-1)

    def total(self, per_candidate_BWC: Tensor) -> Tensor:
        """Sum of a per-candidate quantity over the rows, by expert: ``[B,E]``."""
        # Not by scatter_add, whose order of additions, and with it the choice among near-ties, is open on a GPU.
        return self._zeros_BWE.scatter(2, self.ids_BWC, per_candidate_BWC).sum(dim=1)


def _union(ids_BWK: Tensor, vote_BW: Tensor, num_experts: int) -> Tensor:
    votes_BWK = vote_BW.unsqueeze(-1).expand_as(ids_BWK).to(torch.int32)
    counts_BE = torch.zeros(ids_BWK.shape[0], num_experts, dtype=torch.int32, device=ids_BWK.device)
    counts_BE.scatter_add_(1, ids_BWK.reshape(ids_BWK.shape[0], -1), votes_BWK.reshape(ids_BWK.shape[0], -1))
    return counts_BE > 0


def _with_all_where_nobody_votes(support_BE: Tensor, vote_BW: Tensor) -> Tensor:
    return support_BE | ~vote_BW.any(dim=1, keepdim=True)


def _add_heaviest(support_BE: Tensor, candidates: _Candidates, target_BW: Tensor) -> Tensor:
    """Add experts by total candidate weight until the aggregate target is met.

    The covered weight grows with every expert added, so the shortest sufficient prefix of the ranking is found by
    bisection: log2(E) evaluations instead of one per expert.
    """
    total_BE = candidates.total(candidates.weights_BWC).masked_fill(support_BE, -1.0)
    rank_BE = total_BE.argsort(dim=1, descending=True, stable=True).argsort(dim=1, stable=True)
    aggregate_B1 = target_BW.sum(dim=1, keepdim=True)
    low_B1 = torch.zeros_like(aggregate_B1, dtype=torch.int64)
    high_B1 = torch.full_like(low_B1, total_BE.shape[1])
    for _ in range(total_BE.shape[1].bit_length()):
        middle_B1 = (low_B1 + high_B1) // 2
        reached_B1 = candidates.covered(support_BE | (rank_BE < middle_B1)).sum(1, keepdim=True) >= aggregate_B1
        high_B1 = torch.where(reached_B1, middle_B1, high_B1)
        low_B1 = torch.where(reached_B1, low_B1, (middle_B1 + 1).clamp_max(total_BE.shape[1]))
    return support_BE | (rank_BE < high_B1)


def _fill_deficits(support_BE: Tensor, candidates: _Candidates, target_BW: Tensor) -> Tensor:
    """While a row is short, add the expert that fills the most missing weight over all rows."""
    # fp32 sums of the same numbers in another order differ in the last bits; a row that close to its target has it.
    tolerance_BW = 1e-6 * target_BW
    for _ in range(support_BE.shape[1]):
        deficit_BW = target_BW - candidates.covered(support_BE)
        deficit_BW = deficit_BW.masked_fill(deficit_BW <= tolerance_BW, 0.0)
        gain_BE = candidates.total(torch.minimum(candidates.weights_BWC, deficit_BW.unsqueeze(-1)))
        gain_BE = gain_BE.masked_fill(support_BE, 0.0)
        best_B1 = gain_BE.argmax(dim=1, keepdim=True)
        added_B1 = gain_BE.gather(1, best_B1) > 0
        if not bool(added_B1.any()):
            break
        support_BE = support_BE.scatter(1, best_B1, support_BE.gather(1, best_B1) | added_B1)
    return support_BE


def _make_feasible(
    support_BE: Tensor, selection_BWE: Tensor, natural_BWK: Tensor, vote_BW: Tensor, spec: RouterSpec
) -> Tensor:
    """Give every voting row K usable experts: a row that finds fewer brings its natural top-k into the support.

    Then it has K in its natural groups, and chooses those, so one round is enough.
    """
    num_supports, width, num_experts = selection_BWE.shape
    flat_TE = selection_BWE.reshape(-1, num_experts)
    per_row_TE = support_BE.repeat_interleave(width, dim=0)
    short_BW = (select(flat_TE, spec, per_row_TE) == NO_EXPERT).any(-1).view(num_supports, width) & vote_BW
    support_BE = support_BE | _union(natural_BWK, short_BW, num_experts)
    return _with_all_where_nobody_votes(support_BE, vote_BW)
