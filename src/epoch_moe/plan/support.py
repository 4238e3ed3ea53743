"""Routing of fresh rows under a block plan: ATLAS supports, the miss policy, and the coverage watch.

Shape suffixes: R fresh rows, E experts, K top-k, W rows of the current block, G supports: one per group of the rows
(see `epoch_moe.plan.rules`), or 1 for ``support_scope="batch"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.plan.atlas import compile_support
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.packed import ListedRows, PackedRows, true_places
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


class Chosen(NamedTuple):
    """Experts of some rows: ids, combine weights, and the sum of the experts' unnormalised scores."""

    ids_RK: Tensor
    weights_RK: Tensor
    total_R: Tensor


class Selection(Protocol):
    """How rows choose experts and supports are compiled: `TorchSelection`, or the kernels."""

    def choose(self, support_GE: Tensor | None = None, group_R: Tensor | None = None) -> Chosen:
        """Each row's top-k; with ``support_GE``, inside the support that ``group_R`` names."""
        ...

    def compile(self, selection_GWE: Tensor, weights_GWE: Tensor, votes_GW: Tensor, only_G: Tensor | None) -> Tensor:
        """Supports ``[G,E]``; those outside ``only_G`` come out without meaning."""
        ...


class TorchSelection:
    """`Selection` by the functions of `epoch_moe.routing` and `epoch_moe.plan.atlas`.

    Args:
        scores: of the fresh rows.
        spec: the router.
        config: the plan's choices.
        dtype: the model's.
        pools_RE: the block-pool router's own supports.
    """

    def __init__(
        self, scores: Scores, spec: RouterSpec, config: EpochConfig, dtype: torch.dtype, pools_RE: Tensor | None
    ):
        self.scores, self.spec, self.config, self.dtype, self.pools_RE = scores, spec, config, dtype, pools_RE

    def choose(self, support_GE: Tensor | None = None, group_R: Tensor | None = None) -> Chosen:
        """See `Selection`."""
        inside = self.pools_RE if support_GE is None else support_GE[group_R]
        ids_RK = select(self.scores.selection_TE, self.spec, inside)
        weights_RK = combine_weights(self.scores.combine_TE, ids_RK, self.spec, self.dtype)
        return Chosen(ids_RK, weights_RK, _weight(self.scores, ids_RK))

    def compile(self, selection_GWE: Tensor, weights_GWE: Tensor, votes_GW: Tensor, only_G: Tensor | None) -> Tensor:
        """See `Selection`. Waits for the device."""
        coverage, factor = self.config.coverage, self.config.candidate_factor
        assert coverage is not None
        return compile_support(selection_GWE, weights_GWE, votes_GW, self.spec, coverage, factor)


@dataclass
class SupportState:
    """One layer's support within a block.

    Attributes:
        fixed: `support_GE` and `short_G` keep their memory, and every forward reads the flags of the last one on the
            device (`rebuild_G` is always a mask then). For rows in their padded form.
        support_GE: bool, experts that restricted rows may choose; None before the cold pass.
        short_G: bool, supports that held too little of their rows' weight in the last forward (read on the host
            once per forward for all layers).
        rebuild_G: bool, supports to compile anew in this forward; None = none.
        used_G: bool, supports that the restricted rows of the last forward belong to; None where there was no such
            row. For the counters, as are the next two.
        covered_R, natural_R: fp32, routing weight of the restricted rows inside the support and in all, of the last
            forward; None where nothing was restricted.
    """

    fixed: bool = False
    support_GE: Tensor | None = None
    short_G: Tensor | None = None
    rebuild_G: Tensor | None = None
    used_G: Tensor | None = None
    covered_R: Tensor | None = None
    natural_R: Tensor | None = None

    def begin(self) -> None:
        """Forget what the last forward left for the counters, and with ``fixed`` take up its shortfalls."""
        self.used_G = self.covered_R = self.natural_R = None
        if not self.fixed:
            self.short_G = None
        elif self.short_G is not None:
            self.rebuild_G = self.short_G.clone()
            self.short_G.zero_()

    def keep(self, support_GE: Tensor) -> None:
        """Make this the support."""
        if self.fixed and self.support_GE is not None:
            self.support_GE.copy_(support_GE)
        else:
            self.support_GE = support_GE
        if self.fixed and self.short_G is None:
            self.short_G = torch.zeros_like(support_GE[:, 0])

    def fell_short(self, short_G: Tensor) -> None:
        """Have these supports compiled anew on the next forward."""
        self.short_G = short_G if self.short_G is None else self.short_G.copy_(short_G)

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
    rows: PackedRows,
    state: SupportState,
    config: EpochConfig,
    *,
    cold: bool,
    dtype: torch.dtype,
    pools_RE: Tensor | None = None,
    shared: SharedSupport | None = None,
    by: Selection | None = None,
) -> Routing:
    """Experts and weights of the fresh rows, keeping the layer's support up to date.

    Args:
        scores: of the fresh rows.
        cold: compile the support from this forward and restrict nothing.
        dtype: the model's.
        pools_RE: the block-pool router's own supports.
        shared: for ``support_scope="batch"`` over ranks that hold different sequences; rows in the list form only.
        by: None = `TorchSelection` of the arguments.
    """
    by = TorchSelection(scores, spec, config, dtype, pools_RE) if by is None else by
    natural = by.choose()
    free = Routing(natural.ids_RK, natural.weights_RK)
    state.begin()
    if not uses_support(spec, config):
        return free
    if cold or state.support_GE is None:
        state.keep(_compile(scores, by, rows, config, shared=shared))
        return free
    if state.rebuild_G is not None:
        rebuilt_GE = _compile(scores, by, rows, config, state.rebuild_G, shared)
        state.keep(torch.where(state.rebuild_G.unsqueeze(1), rebuilt_GE, state.support_GE))
    if not config.restrict_new:
        state.keep(_join(state.support_GE, natural.ids_RK, rows.joining_R, rows, config, shared))
    if not rows.may_restrict and shared is None:
        return free
    return _restricted(scores, natural, by, rows, state, config, shared)


def _group_of(rows: PackedRows, config: EpochConfig) -> Tensor:
    """Which support each fresh row uses: ``[R]``."""
    return rows.group_R if config.support_scope == "sequence" else torch.zeros_like(rows.group_R)


def _compile(
    scores: Scores,
    by: Selection,
    rows: PackedRows,
    config: EpochConfig,
    only_G: Tensor | None = None,
    shared: SharedSupport | None = None,
) -> Tensor:
    """Supports ``[G,E]`` from this forward's voting rows; those outside ``only_G`` come out without meaning."""
    num_experts, places = scores.selection_TE.shape[1], rows.places.groups * rows.places.block_len
    device = scores.selection_TE.device
    if shared is not None:
        assert isinstance(rows, ListedRows)
        voting = true_places(rows.vote_R < places, rows.num_voting)
        selection, weights, votes = shared.gather(scores.selection_TE[voting], scores.combine_TE[voting])
    else:
        # Behind the block's places lies one more, for the rows that do not vote.
        grids = scores.selection_TE.new_zeros(2, places + 1, num_experts)
        selection, weights = grids[:, :places]
        grids[0].index_copy_(0, rows.vote_R, scores.selection_TE)
        grids[1].index_copy_(0, rows.vote_R, scores.combine_TE)
        # Rows of supports that nobody asked for do not vote: filling their deficits would take rounds for nothing.
        asked_R = torch.ones_like(rows.restricted_R) if only_G is None else only_G[_group_of(rows, config)]
        votes = torch.zeros(places + 1, dtype=torch.bool, device=device).index_copy_(0, rows.vote_R, asked_R)[:places]
    groups = rows.places.groups if config.support_scope == "sequence" else 1
    return by.compile(
        selection.reshape(groups, -1, num_experts),
        weights.reshape(groups, -1, num_experts),
        votes.view(groups, -1),
        only_G,
    )


def _join(
    support_GE: Tensor,
    ids_RK: Tensor,
    joining_R: Tensor,
    rows: PackedRows,
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
    natural: Chosen,
    by: Selection,
    rows: PackedRows,
    state: SupportState,
    config: EpochConfig,
    shared: SharedSupport | None = None,
) -> Routing:
    assert state.support_GE is not None
    group_R, restricted_R = _group_of(rows, config), rows.restricted_R
    if state.rebuild_G is not None:
        # The forward that compiles a support anew is a cold pass for its rows.
        restricted_R = restricted_R & ~state.rebuild_G[group_R]
    state.used_G = _per_group(restricted_R.float(), rows, config) > 0
    natural_R = torch.where(restricted_R, natural.total_R, 0.0)
    if config.on_miss == "expand":
        state.keep(_join(state.support_GE, natural.ids_RK, restricted_R, rows, config, shared))
        state.natural_R = state.covered_R = natural_R
        return Routing(natural.ids_RK, natural.weights_RK)

    if config.on_miss == "drop":
        # A dropped pair takes its weight along: the others keep theirs, so the error is the dropped output alone.
        held_RK = state.support_GE[group_R].gather(1, natural.ids_RK.clamp_min(0))
        ids_RK = natural.ids_RK.masked_fill(~held_RK, NO_EXPERT)
        inside = Chosen(ids_RK, natural.weights_RK.masked_fill(ids_RK == NO_EXPERT, 0.0), _weight(scores, ids_RK))
    else:
        inside = by.choose(state.support_GE, group_R)
    covered_R = torch.where(restricted_R, torch.minimum(inside.total_R, natural.total_R), 0.0)
    sums_2G = torch.stack([_per_group(covered_R, rows, config), _per_group(natural_R, rows, config)])
    covered_G, natural_G = sums_2G if shared is None else shared.total(sums_2G)
    short_G = covered_G < config.floor * natural_G
    state.fell_short(short_G)
    state.covered_R, state.natural_R = covered_R, natural_R
    # The watch acts at once (these rows route freely in this forward), and the next forward compiles the support anew.
    inside_R1 = (restricted_R & ~short_G[group_R]).unsqueeze(1)
    return Routing(
        torch.where(inside_R1, inside.ids_RK, natural.ids_RK),
        torch.where(inside_R1, inside.weights_RK, natural.weights_RK),
    )


def _weight(scores: Scores, ids_RK: Tensor) -> Tensor:
    """Unnormalised routing weight of each row's experts: ``[R]``."""
    weights_RK = scores.combine_TE.gather(1, ids_RK.clamp_min(0))
    return weights_RK.masked_fill(ids_RK == NO_EXPERT, 0.0).sum(-1)


def _per_group(value_R: Tensor, rows: PackedRows, config: EpochConfig) -> Tensor:
    """Sum over the rows of each support: ``[G]``. Through a dense grid, so that the order of the sum is fixed."""
    # Behind the grid lies one more place, for rows without state: no support speaks for them.
    grid = torch.zeros(rows.places.entries + 1, device=value_R.device, dtype=value_R.dtype)
    grid.index_copy_(0, rows.entry_R, value_R)
    sums_G = grid[:-1].view(rows.places.groups, rows.places.width).sum(dim=1)
    return sums_G if config.support_scope == "sequence" else sums_G.sum(dim=0, keepdim=True)
