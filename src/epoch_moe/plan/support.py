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
from epoch_moe.plan.atlas import compile_rows
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.packed import ListedRows, PackedRows, true_places
from epoch_moe.routing import NO_EXPERT, RouterSpec, Routing, Scores, check_size, combine_weights, select


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

    def compile(
        self, rows: PackedRows, group_R: Tensor, groups: int, only_G: Tensor | None, shared: SharedSupport | None
    ) -> Tensor:
        """Supports ``[G,E]`` from the voting rows; those outside ``only_G`` come out without meaning.

        See `epoch_moe.plan.atlas.compile_support`.
        """
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
        self._natural_RK: Tensor | None = None

    def choose(self, support_GE: Tensor | None = None, group_R: Tensor | None = None) -> Chosen:
        """See `Selection`."""
        inside = self.pools_RE if support_GE is None else support_GE[group_R]
        ids_RK = select(self.scores.selection_TE, self.spec, inside)
        if inside is None:
            self._natural_RK = ids_RK
        weights_RK = combine_weights(self.scores.combine_TE, ids_RK, self.spec, self.dtype)
        return Chosen(ids_RK, weights_RK, _weight(self.scores, ids_RK))

    def compile(
        self, rows: PackedRows, group_R: Tensor, groups: int, only_G: Tensor | None, shared: SharedSupport | None
    ) -> Tensor:
        """See `Selection`. Waits for the device."""
        assert isinstance(rows, ListedRows) and isinstance(self.config.coverage, (int, float))
        voting_R = rows.votes_R
        if only_G is None:
            voting_V = true_places(voting_R, rows.num_voting)
        else:
            voting_V = (voting_R & only_G[group_R]).nonzero().squeeze(1)
        selection_VE, weights_VE = self.scores.selection_TE[voting_V], self.scores.combine_TE[voting_V]
        group_V = group_R[voting_V]
        natural_VK = None if shared is not None or self._natural_RK is None else self._natural_RK[voting_V]
        if shared is not None:
            selection_VE, weights_VE, here_V = shared.gather(selection_VE, weights_VE)
            selection_VE, weights_VE = selection_VE[here_V], weights_VE[here_V]
            group_V = torch.zeros_like(selection_VE[:, 0], dtype=torch.int64)
        return compile_rows(
            selection_VE,
            weights_VE,
            group_V,
            groups,
            self.spec,
            self.config.coverage,
            self.config.candidate_factor,
            max_support=self.config.max_support,
            least_saving=self.config.least_saving,
            natural_VK=natural_VK,
        )


@dataclass
class SupportState:
    """One layer's support within a block.

    Attributes:
        fixed: `support_GE` and `short_G` keep their memory, and every forward reads the flags of the last one on the
            device (`rebuild_G` is always a mask then). For rows in their padded form.
        support_GE: bool, experts that restricted rows may choose; None before the cold pass. One that holds all
            experts restricts nothing.
        holds_all: the host knows that every one of them holds all experts.
        short_G: bool, supports that held too little of their rows' weight in the last forward (read on the host
            once per forward for all layers).
        rebuild_G: bool, supports to compile anew in this forward; None = none.
        unpaid_G: bool, supports that the last forward compiled and did not keep, because they would not have paid;
            None where it compiled none. For the counters, as are the others.
        used_G: bool, supports that the restricted rows of the last forward belong to; None where there was no such
            row.
        covered_R, natural_R: fp32, routing weight of the restricted rows inside the support and in all, of the last
            forward; None where nothing was restricted.
    """

    fixed: bool = False
    support_GE: Tensor | None = None
    holds_all: bool = False
    short_G: Tensor | None = None
    rebuild_G: Tensor | None = None
    unpaid_G: Tensor | None = None
    used_G: Tensor | None = None
    covered_R: Tensor | None = None
    natural_R: Tensor | None = None

    def begin(self, rebuilds: bool) -> None:
        """Begin a forward: drop the last one's counts and coverage.

        With ``fixed`` and ``rebuilds``, supports that fell short in the last forward are marked to be compiled anew.
        """
        self.unpaid_G = self.used_G = self.covered_R = self.natural_R = None
        if not self.fixed:
            self.short_G = None
        elif self.short_G is not None:
            self.rebuild_G = self.short_G.clone() if rebuilds else None
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
        """Note which supports held too little in this forward."""
        self.short_G = short_G if self.short_G is None else self.short_G.copy_(short_G)

    def count(self, counters: Counters, layer: int) -> None:
        """Add what the last forward restricted, if anything."""
        if self.unpaid_G is not None:
            counters.add_unpaid(layer, self.unpaid_G)
        if self.used_G is None:
            return
        assert self.support_GE is not None and self.covered_R is not None and self.natural_R is not None
        counters.add_support(layer, self.support_GE, self.used_G, self.covered_R, self.natural_R, self.short_G)


def uses_support(spec: RouterSpec, config: EpochConfig) -> bool:
    """Whether ATLAS does anything: the block-pool router (LLaDA2.2) restricts itself.

    Raises:
        ValueError: ``max_support`` is below top-k.
    """
    if config.coverage is None or spec.kind == "block_pool":
        return False
    check_size(config.max_support, spec)
    return True


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
    state.begin(config.recompile == "shortfall")
    if not uses_support(spec, config):
        return free
    if cold or state.support_GE is None:
        _compile(by, rows, state, config, None, shared)
        return free
    if state.rebuild_G is not None:
        _compile(by, rows, state, config, state.rebuild_G, shared)
    if config.join and not config.restrict_new:
        state.keep(_join(state.support_GE, natural.ids_RK, rows.joining_R, rows, config, shared))
    if not rows.may_restrict and shared is None:
        return free
    if state.holds_all:  # on all ranks that share it
        return free
    return _restricted(scores, natural, by, rows, state, config, shared)


def _group_of(rows: PackedRows, config: EpochConfig) -> Tensor:
    """Which support each fresh row uses: ``[R]``."""
    return rows.group_R if config.support_scope == "sequence" else torch.zeros_like(rows.group_R)


def _compile(
    by: Selection,
    rows: PackedRows,
    state: SupportState,
    config: EpochConfig,
    only_G: Tensor | None,
    shared: SharedSupport | None,
) -> None:
    """Compile the supports (of ``only_G``) from this forward's voting rows, and keep them."""
    group_R, groups = _group_of(rows, config), rows.places.groups if config.support_scope == "sequence" else 1
    support_GE = by.compile(rows, group_R, groups, only_G, shared)
    voted_G = torch.zeros(groups, dtype=torch.int32, device=support_GE.device)
    voted_G = voted_G.scatter_add_(0, group_R, rows.votes_R.to(torch.int32)) > 0
    state.unpaid_G = support_GE.all(dim=1) & voted_G
    if only_G is not None:
        assert state.support_GE is not None
        state.unpaid_G &= only_G
        support_GE = torch.where(only_G.unsqueeze(1), support_GE, state.support_GE)
    # With rows as lists, compiling has waited for the device anyway.
    state.holds_all = isinstance(rows, ListedRows) and bool(support_GE.all())
    state.keep(support_GE)


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
    group_R, num_experts = _group_of(rows, config), state.support_GE.shape[1]
    # The forward that compiles a support anew is a cold pass for its rows, and one of all experts restricts none.
    free_G = state.support_GE.all(dim=1)
    if state.rebuild_G is not None:
        free_G = free_G | state.rebuild_G
    restricted_R = rows.restricted_R & ~free_G[group_R]
    state.used_G = _per_group(restricted_R.float(), rows, config) > 0
    natural_R = torch.where(restricted_R, natural.total_R, 0.0)
    if config.on_miss == "expand":
        state.keep(_join(state.support_GE, natural.ids_RK, restricted_R, rows, config, shared))
        state.natural_R = state.covered_R = natural_R
        return Routing(natural.ids_RK, natural.weights_RK)

    place_RK = group_R.unsqueeze(1) * num_experts + natural.ids_RK.clamp_min(0)
    held_RK = state.support_GE.reshape(-1)[place_RK] & (natural.ids_RK != NO_EXPERT)
    held_ids_RK = natural.ids_RK.masked_fill(~held_RK, NO_EXPERT)
    covered_R = torch.where(restricted_R, _weight(scores, held_ids_RK), 0.0)
    sums_2G = torch.stack([_per_group(covered_R, rows, config), _per_group(natural_R, rows, config)])
    covered_G, natural_G = sums_2G if shared is None else shared.total(sums_2G)
    short_G = covered_G < config.floor * natural_G
    state.fell_short(short_G)
    state.covered_R, state.natural_R = covered_R, natural_R
    if config.on_miss == "drop":
        # A dropped pair takes its weight along: the others keep theirs, so the error is the dropped output alone.
        ids_RK, weights_RK = held_ids_RK, natural.weights_RK.masked_fill(~held_RK, 0.0)
    else:
        ids_RK, weights_RK, _ = by.choose(state.support_GE, group_R)
    # The watch acts at once: these rows route freely in this forward.
    inside_R1 = (restricted_R & ~short_G[group_R]).unsqueeze(1)
    return Routing(
        torch.where(inside_R1, ids_RK, natural.ids_RK), torch.where(inside_R1, weights_RK, natural.weights_RK)
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
