"""ATLAS: compile a layer's expert support from the rows of a block's cold pass.

Shape suffixes: B or G supports (one per sequence, or 1 for a batch), W rows per support, V voting rows, E experts,
K top-k, C candidates per row.

Source: Epoch (arXiv 2609.09748), as described by readers of the paper: candidates wider than top-k, a coverage target
of routing weight, heavy experts first, then greedy filling of what single rows still miss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.checks import instance, real, tensor, whole
from epoch_moe.routing import NO_EXPERT, RouterSpec, check_size, natural_order, select, settle

UNITS = 2.0**40
"""Weights are added up as whole numbers of 1 / UNITS: the sums do not depend on the order, on any device."""


def compile_support(
    selection_BWE: Tensor,
    combine_BWE: Tensor,
    vote_BW: Tensor,
    spec: RouterSpec,
    coverage: float,
    candidate_factor: int,
    *,
    max_support: int | None = None,
    least_saving: float = 0.0,
) -> Tensor:
    """The experts that B groups of rows may route to: bool ``[B,E]``.

    Args:
        selection_BWE: fp32 selection scores of the rows.
        combine_BWE: fp32 combine scores (softmax probability; unbiased sigmoid score); below zero counts as zero.
        vote_BW: bool, False for rows that do not vote. A support without a voter holds all experts.
        spec: the router.
        coverage: share of the natural weight (of all voting rows' natural top-k) that lies inside the support. Beside
            it each row's best K candidates inside weigh at least this share of its own natural top-k. 1.0 gives the
            union of the rows' natural top-k.
        candidate_factor: a row's candidates are its best ``candidate_factor * K`` experts by selection score, in its
            own groups. 1: each row has the share of its natural weight itself inside.
        max_support: most experts of a support. Where coverage asks for more these are the heaviest ones, and both
            shares may be missed. At least K.
        least_saving: a support that leaves out less than this share of the experts in the rows' natural top-k holds
            all experts instead. Has no effect with ``max_support`` or where ``coverage`` is 1.

    Without ``max_support`` every support holds at least K experts, and every voting row finds K of them (group limits
    included). Waits for the device.
    """
    instance("spec", spec, RouterSpec, "a RouterSpec")
    tensor("selection_BWE", selection_BWE, torch.float32, ("supports", "rows", spec.num_experts))
    tensor("combine_BWE", combine_BWE, torch.float32, selection_BWE.shape, selection_BWE.device)
    tensor("vote_BW", vote_BW, torch.bool, selection_BWE.shape[:2], selection_BWE.device)
    coverage = real("coverage", coverage, "a share in (0, 1]", most=1.0, above=True)
    whole("candidate_factor", candidate_factor, least=1)
    check_size(max_support, spec)
    real("least_saving", least_saving, "a share in [0, 1]", most=1.0)
    supports, width, num_experts = selection_BWE.shape
    group_T = torch.arange(supports, device=vote_BW.device).repeat_interleave(width)
    flat = (selection_BWE.reshape(-1, num_experts), combine_BWE.reshape(-1, num_experts), group_T)
    if not bool(vote_BW.all()):
        voting_V = vote_BW.reshape(-1).nonzero().squeeze(1)
        flat = tuple(x.index_select(0, voting_V) for x in flat)  # type: ignore[assignment]
    return compile_rows(
        *flat, supports, spec, coverage, candidate_factor, max_support=max_support, least_saving=least_saving
    )


def compile_rows(
    selection_VE: Tensor,
    combine_VE: Tensor,
    group_V: Tensor,
    supports: int,
    spec: RouterSpec,
    coverage: float,
    candidate_factor: int,
    *,
    max_support: int | None,
    least_saving: float,
    natural_VK: Tensor | None = None,
) -> Tensor:
    """`compile_support` of voting rows alone, in any order.

    ``group_V`` (int64) says to which support each belongs, ``natural_VK`` what it chooses without one (None: unknown).
    """
    if natural_VK is None:
        natural_VK = natural_order(selection_VE, spec, spec.top_k)
    votes = _Votes(natural_VK, combine_VE, group_V, supports, spec)
    natural_GE, used_GE = _add_up(votes.at_VC, votes.units_VC, votes.shape), votes.named(spec.top_k)
    support_GE = used_GE
    if coverage < 1.0:
        support_GE = _add_heaviest(votes.named(1), natural_GE, coverage)
        # One that is larger than this is settled already, whatever joins it.
        limit_G = used_GE.sum(dim=1) * (1.0 - least_saving if least_saving > 0.0 else spec.num_experts)
        if max_support is not None:
            limit_G = torch.full_like(limit_G, max_support)
        open_G = support_GE.sum(dim=1) <= limit_G
        if not bool(open_G.all()):
            rows_N = open_G[group_V].nonzero().squeeze(1)
            selection_VE, combine_VE, group_V = (x.index_select(0, rows_N) for x in (selection_VE, combine_VE, group_V))
        if group_V.numel():
            # Only the grouped kind has groups to stay in: what lies elsewhere a row could not choose.
            usable = spec.topk_group * spec.group_size if spec.kind == "sigmoid_group" else spec.num_experts
            ids_VC = natural_order(selection_VE, spec, min(candidate_factor * spec.top_k, usable))
            votes = _Votes(ids_VC, combine_VE, group_V, supports, spec)
            support_GE = _fill_deficits(support_GE, votes, coverage, limit_G)
            support_GE = _make_feasible(support_GE, selection_VE, votes)
    support_GE = settle(support_GE, used_GE, natural_GE, coverage, max_support, least_saving)
    return support_GE | ~used_GE.any(dim=1, keepdim=True)


class _Votes:
    """Each voting row's candidate experts, in the order in which the row would choose them: natural top-k first.

    Attributes:
        at_VC: the experts' places in a flattened ``[G,E]``.
        weights_VC: their weights in fp32.
        units_VC: int64, the weights in `UNITS`.
        own_V: natural weight of each row.
    """

    def __init__(self, ids_VC: Tensor, combine_VE: Tensor, group_V: Tensor, supports: int, spec: RouterSpec):
        self.group_V, self.shape, self.spec = group_V, (supports, spec.num_experts), spec
        self.at_VC = ids_VC if supports == 1 else ids_VC + (group_V * spec.num_experts).unsqueeze(1)
        self.weights_VC = combine_VE.gather(1, ids_VC).clamp_min_(0.0)
        self.units_VC = in_units(self.weights_VC)
        self.own_V = self.weights_VC[:, : spec.top_k].sum(1)

    def named(self, count: int, rows_N: Tensor | None = None) -> Tensor:
        """Experts among the first ``count`` candidates of the rows: bool ``[G,E]``."""
        at_NC = self.at_VC[:, :count] if rows_N is None else self.at_VC[rows_N, :count]
        marks = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.bool, device=at_NC.device)
        return marks.scatter_(0, at_NC.reshape(-1), True).view(self.shape)


def in_units(weights: Tensor) -> Tensor:
    """Weights as whole numbers of 1 / UNITS: int64."""
    return (weights.double() * UNITS).long()


def _add_up(at_VC: Tensor, units_VC: Tensor, shape: tuple[int, int]) -> Tensor:
    """Sum by support and expert: int64 ``[G,E]``."""
    sums = torch.zeros(shape[0] * shape[1], dtype=torch.int64, device=at_VC.device)
    return sums.scatter_add_(0, at_VC.reshape(-1), units_VC.reshape(-1)).view(shape)


def _inside(at_VC: Tensor, support_GE: Tensor) -> Tensor:
    """Candidates inside the support: bool ``[V,C]``."""
    return support_GE.view(-1).index_select(0, at_VC.view(-1)).view_as(at_VC)


def _add_heaviest(support_GE: Tensor, natural_GE: Tensor, coverage: float) -> Tensor:
    """Add experts by natural weight until the share ``coverage`` of it is inside."""
    # Not by the weight of all candidates: such supports come out larger than the rows' natural top-k together.
    # What is inside already comes first, whatever it weighs.
    first_GE = natural_GE.masked_fill(support_GE, torch.iinfo(torch.int64).max)
    order_GE = first_GE.argsort(dim=1, descending=True, stable=True)
    held_GE = natural_GE.gather(1, order_GE)
    sum_GE = held_GE.cumsum(1)
    needed_GE = (sum_GE - held_GE).double() < coverage * sum_GE[:, -1:].double()
    return support_GE | torch.zeros_like(support_GE).scatter_(1, order_GE, needed_GE)


def _fill_deficits(support_GE: Tensor, votes: _Votes, coverage: float, limit_G: Tensor) -> Tensor:
    """While a row's best K candidates inside weigh too little, add the expert that fills the most missing weight.

    Supports of more than ``limit_G`` experts are left as they are.
    """
    at_VC, weights_VC, target_V, group_V = votes.at_VC, votes.weights_VC, coverage * votes.own_V, votes.group_V
    while True:
        inside_VC = _inside(at_VC, support_GE)
        best_VC = inside_VC & (inside_VC.cumsum(-1) <= votes.spec.top_k)
        deficit_V = target_V - (weights_VC * best_VC).sum(-1)
        # fp32 sums of the same numbers in another order differ in the last bits; a row that close to its target has it.
        short_V = deficit_V > 1e-6 * target_V
        short_G = torch.zeros_like(limit_G, dtype=torch.bool).index_fill_(0, group_V[short_V], True)
        short_G &= support_GE.sum(dim=1) <= limit_G
        # Supports without a short row are done; all rows of the others are looked at again.
        rows_N = short_G[group_V].nonzero().squeeze(1)
        if not rows_N.numel():
            return support_GE
        missing_V = deficit_V * short_V
        if rows_N.numel() < group_V.numel():
            at_VC, weights_VC, target_V, group_V, missing_V = (
                x[rows_N] for x in (at_VC, weights_VC, target_V, group_V, missing_V)
            )
        gain_GE = _add_up(at_VC, in_units(torch.minimum(weights_VC, missing_V.unsqueeze(-1))), votes.shape)
        gain_GE = gain_GE.masked_fill(support_GE, 0)
        best_G1 = gain_GE.argmax(dim=1, keepdim=True)
        added_G1 = gain_GE.gather(1, best_G1) > 0
        if not bool(added_G1.any()):
            return support_GE
        support_GE = support_GE.scatter(1, best_G1, support_GE.gather(1, best_G1) | added_G1)


def _make_feasible(support_GE: Tensor, selection_VE: Tensor, votes: _Votes) -> Tensor:
    """Give every voting row K usable experts: a row that finds fewer brings its natural top-k into the support.

    Then it has K in its natural groups, and chooses those, so one round is enough. A row with K candidates inside, all
    in its own groups, need not be asked.
    """
    spec = votes.spec
    rows_N = (_inside(votes.at_VC, support_GE).sum(-1) < spec.top_k).nonzero().squeeze(1)
    if not rows_N.numel():
        return support_GE
    chosen_NK = select(selection_VE[rows_N], spec, support_GE[votes.group_V[rows_N]])
    return support_GE | votes.named(spec.top_k, rows_N[(chosen_NK == NO_EXPERT).any(-1)])
