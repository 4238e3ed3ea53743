"""Routing of fresh rows under a block plan: ATLAS supports, the miss policy, and the coverage watch.

Shape suffixes: B sequences, S rows per sequence, R fresh rows, E experts, K top-k, W rows of the current block,
G supports (B, or 1 for ``support_scope="batch"``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.plan.atlas import compile_support
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.liveness import RowPlan
from epoch_moe.plan.placement import contiguous_ranks
from epoch_moe.routing import NO_EXPERT, RouterSpec, Routing, Scores, combine_weights, select


class SharedSupport(Protocol):
    """How ranks with different sequences keep one support (`epoch_moe.freshlane.expert_parallel.SharedSupport`).

    Each of its methods is a collective: every rank calls it at the same place of the same forward, without rows too.
    """

    def gather(self, selection_WE: Tensor, weights_WE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and weights of all ranks' voting rows, and a mask of the rows that exist."""
        ...

    def union(self, experts_E: Tensor) -> Tensor:
        """Experts that any rank named."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """Sum over ranks."""
        ...


@dataclass
class SupportState:
    """One layer's support within a block.

    Attributes:
        support_GE: bool, experts that restricted rows may choose; None before the cold pass.
        short_G: bool, supports that held too little of their rows' weight in the last forward (read on the host
            once per forward for all layers).
        rebuild_G: bool, supports to compile anew in this forward; None = none.
        used_G: bool, supports that the restricted rows of the last forward belong to; None where there was no such
            row. For the counters, as are the next two.
        covered_R, natural_R: fp32, routing weight of the restricted rows inside the support and in all, of the last
            forward; None where nothing was restricted.
    """

    support_GE: Tensor | None = None
    short_G: Tensor | None = None
    rebuild_G: Tensor | None = None
    used_G: Tensor | None = None
    covered_R: Tensor | None = None
    natural_R: Tensor | None = None

    def count(self, counters: Counters, layer: int) -> None:
        """Add what the last forward restricted, if anything."""
        if self.used_G is None:
            return
        assert self.support_GE is not None and self.covered_R is not None and self.natural_R is not None
        counters.add_support(layer, self.support_GE, self.used_G, self.covered_R, self.natural_R, self.short_G)


def uses_support(spec: RouterSpec, config: EpochConfig) -> bool:
    """Whether ATLAS does anything: the block-pool router (LLaDA2.2) restricts itself."""
    return config.coverage is not None and spec.kind != "block_pool"


def route_fresh(
    scores: Scores,
    spec: RouterSpec,
    rows: RowPlan,
    state: SupportState,
    config: EpochConfig,
    *,
    cold: bool,
    dtype: torch.dtype,
    pools_RE: Tensor | None = None,
    shared: SharedSupport | None = None,
) -> Routing:
    """Experts and weights of the fresh rows, keeping the layer's support up to date.

    Args:
        scores: of the fresh rows.
        cold: compile the support from this forward and restrict nothing.
        dtype: the model's.
        pools_RE: the block-pool router's own supports.
        shared: for ``support_scope="batch"`` over ranks that hold different sequences.
    """
    natural_RK = select(scores.selection_TE, spec, pools_RE)
    state.short_G = state.used_G = state.covered_R = state.natural_R = None
    if not uses_support(spec, config):
        return Routing(natural_RK, combine_weights(scores.combine_TE, natural_RK, spec, dtype))
    if cold or state.support_GE is None:
        state.support_GE = _compile(scores, spec, rows, config, shared=shared)
        return Routing(natural_RK, combine_weights(scores.combine_TE, natural_RK, spec, dtype))
    if state.rebuild_G is not None:
        rebuilt_GE = _compile(scores, spec, rows, config, state.rebuild_G, shared)
        state.support_GE = torch.where(state.rebuild_G.unsqueeze(1), rebuilt_GE, state.support_GE)
    if not config.restrict_new:
        state.support_GE = _join(state.support_GE, natural_RK, rows.joining_R, rows, config, shared)
    if rows.num_restricted == 0 and shared is None:
        return Routing(natural_RK, combine_weights(scores.combine_TE, natural_RK, spec, dtype))
    return _restricted(scores, natural_RK, spec, rows, state, config, dtype, shared)


def _group_of(rows: RowPlan, config: EpochConfig) -> Tensor:
    """Which support each fresh row uses: ``[R]``."""
    return rows.sequence_R if config.support_scope == "sequence" else torch.zeros_like(rows.sequence_R)


def _compile(
    scores: Scores,
    spec: RouterSpec,
    rows: RowPlan,
    config: EpochConfig,
    only_G: Tensor | None = None,
    shared: SharedSupport | None = None,
) -> Tensor:
    """Supports ``[G,E]`` from this forward's voting rows; those outside ``only_G`` come out without meaning."""
    assert config.coverage is not None
    selection_WE, weights_WE = scores.selection_TE[rows.vote_src], scores.combine_TE[rows.vote_src]
    num_experts, places = spec.num_experts, rows.batch * rows.block_len
    device = scores.selection_TE.device
    if shared is not None:
        selection, weights, votes = shared.gather(selection_WE, weights_WE)
    else:
        selection = torch.zeros(places, num_experts, device=device)
        weights = torch.zeros(places, num_experts, device=device)
        votes = torch.zeros(places, dtype=torch.bool, device=device)
        selection[rows.vote_dst] = selection_WE
        weights[rows.vote_dst] = weights_WE
        # Rows of supports that nobody asked for do not vote: filling their deficits would take rounds for nothing.
        votes[rows.vote_dst] = True if only_G is None else only_G[_group_of(rows, config)[rows.vote_src]]
    groups = rows.batch if config.support_scope == "sequence" else 1
    return compile_support(
        selection.view(groups, -1, num_experts),
        weights.view(groups, -1, num_experts),
        votes.view(groups, -1),
        spec,
        config.coverage,
        config.candidate_factor,
        None if config.balance_ranks is None else contiguous_ranks(num_experts, config.balance_ranks, device),
        config.max_experts_per_rank,
    )


def _join(
    support_GE: Tensor,
    ids_RK: Tensor,
    joining_R: Tensor,
    rows: RowPlan,
    config: EpochConfig,
    shared: SharedSupport | None = None,
) -> Tensor:
    """The supports with the experts of the joining rows added."""
    groups, num_experts = support_GE.shape
    flat_RK = _group_of(rows, config).unsqueeze(1) * num_experts + ids_RK.clamp_min(0)
    joins_RK = (joining_R.unsqueeze(1) & (ids_RK != NO_EXPERT)).to(torch.int32)
    counts = torch.zeros(groups * num_experts, dtype=torch.int32, device=ids_RK.device)
    counts.scatter_add_(0, flat_RK.reshape(-1), joins_RK.reshape(-1))
    joined_GE = (counts > 0).view(groups, num_experts)
    return support_GE | (joined_GE if shared is None else shared.union(joined_GE[0])[None])


def _restricted(
    scores: Scores,
    natural_RK: Tensor,
    spec: RouterSpec,
    rows: RowPlan,
    state: SupportState,
    config: EpochConfig,
    dtype: torch.dtype,
    shared: SharedSupport | None = None,
) -> Routing:
    assert state.support_GE is not None
    group_R, restricted_R = _group_of(rows, config), rows.restricted_R
    if state.rebuild_G is not None:
        # The forward that compiles a support anew is a cold pass for its rows.
        restricted_R = restricted_R & ~state.rebuild_G[group_R]
    state.used_G = _per_group(restricted_R.float(), rows, config) > 0
    if config.on_miss == "expand":
        state.support_GE = _join(state.support_GE, natural_RK, restricted_R, rows, config, shared)
        weights_RK = combine_weights(scores.combine_TE, natural_RK, spec, dtype)
        state.natural_R = state.covered_R = _weight(scores, natural_RK) * restricted_R
        return Routing(natural_RK, weights_RK)

    support_RE = state.support_GE[group_R]
    if config.on_miss == "drop":
        inside_RK = natural_RK.masked_fill(~support_RE.gather(1, natural_RK.clamp_min(0)), NO_EXPERT)
    else:
        inside_RK = select(scores.selection_TE, spec, support_RE)
    natural_R = _weight(scores, natural_RK) * restricted_R
    covered_R = torch.minimum(_weight(scores, inside_RK) * restricted_R, natural_R)
    sums_2G = torch.stack([_per_group(covered_R, rows, config), _per_group(natural_R, rows, config)])
    covered_G, natural_G = sums_2G if shared is None else shared.total(sums_2G)
    short_G = covered_G < config.floor * natural_G
    # The watch acts at once (these rows route freely in this forward), and the next forward compiles the support anew.
    restricted_R = restricted_R & ~short_G[group_R]
    ids_RK = torch.where(restricted_R.unsqueeze(1), inside_RK, natural_RK)
    state.short_G, state.covered_R, state.natural_R = short_G, covered_R, natural_R
    if config.on_miss == "drop":
        # A dropped pair takes its weight along: the others keep theirs, so the error is the dropped output alone.
        weights_RK = combine_weights(scores.combine_TE, natural_RK, spec, dtype)
        return Routing(ids_RK, weights_RK.masked_fill(ids_RK == NO_EXPERT, 0.0))
    return Routing(ids_RK, combine_weights(scores.combine_TE, ids_RK, spec, dtype))


def _weight(scores: Scores, ids_RK: Tensor) -> Tensor:
    """Unnormalised routing weight of each row's experts: ``[R]``."""
    weights_RK = scores.combine_TE.gather(1, ids_RK.clamp_min(0))
    return weights_RK.masked_fill(ids_RK == NO_EXPERT, 0.0).sum(-1)


def _per_group(value_R: Tensor, rows: RowPlan, config: EpochConfig) -> Tensor:
    """Sum over the rows of each support: ``[G]``. Through a dense grid, so that the order of the sum is fixed."""
    places = rows.batch * rows.seq_len
    # Behind the grid lies one more place, for rows of keyed plans that belong to no support.
    grid = torch.zeros(places + 1, device=value_R.device, dtype=value_R.dtype)
    grid[rows.place_R] = value_R
    sums_B = grid[:places].view(rows.batch, rows.seq_len).sum(dim=1)
    return sums_B if config.support_scope == "sequence" else sums_B.sum(dim=0, keepdim=True)
