"""The lane on one device by the Triton kernels: a plan's iteration without a number on the host.

Shape suffixes: T rows of the forward, R capacity of the packed rows, E experts, K top-k, H hidden, M cache entries,
G supports, W voting rows.

Triton is imported when one of these is called, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.experts.device import device_worklist, pair_outputs
from epoch_moe.experts.run import pick_backend
from epoch_moe.experts.views import ExpertViews
from epoch_moe.freshlane.lane import ListedLane
from epoch_moe.plan.packed import Compact, PackedRows, PaddedRows
from epoch_moe.plan.support import Chosen, SharedSupport
from epoch_moe.precision import product_dtype
from epoch_moe.routing import RouterSpec, Routing, Scores
from epoch_moe.worklist import Worklist


def compact_for(config: EpochConfig, layers: Sequence[ExpertViews]) -> Compact | None:
    """What packs the rows of a plan on the device, or None where rows must be lists.

    They must be where experts are not computed by the kernels, or lie on several devices.
    """
    if len({experts.down_EHF.device for experts in layers}) != 1:
        return None
    if any(pick_backend(config.backend, experts) != "triton" for experts in layers):
        return None
    from epoch_moe.kernels.compaction import compact

    return compact


@dataclass
class DeviceSelection:
    """`epoch_moe.plan.support.Selection` by the kernels.

    Among equal scores they choose the lowest id, where ``torch.topk`` leaves open which.

    Attributes:
        scores: of the packed rows.
        bias_E: the router's expert bias.
        spec: the router.
        config: the plan's choices.
        rows: the packed rows.
        dtype: the model's.
        pools_RE: the block-pool router's own supports.
    """

    scores: Scores
    bias_E: Tensor | None
    spec: RouterSpec
    config: EpochConfig
    rows: PaddedRows
    dtype: torch.dtype
    pools_RE: Tensor | None = None

    def choose(self, support_GE: Tensor | None = None, group_R: Tensor | None = None) -> Chosen:
        """Top-k of each packed row, inside its support where one is given; padding rows choose nothing."""
        from epoch_moe.kernels.route import route

        ids_RK, weights_RK, total_R = route(
            self.scores.logits_TE,
            self.bias_E,
            self.spec,
            dtype=self.dtype,
            support_GE=self.pools_RE if support_GE is None else support_GE,
            group_R=group_R,
            count=self.rows.count,
        )
        return Chosen(ids_RK, weights_RK, total_R)

    def compile(
        self, rows: PackedRows, group_R: Tensor, groups: int, only_G: Tensor | None, shared: SharedSupport | None
    ) -> Tensor:
        """Supports ``[G,E]`` from the voting rows; those outside ``only_G`` mean nothing and cost next to nothing."""
        from epoch_moe.kernels.atlas import compile_support_device

        assert isinstance(self.config.coverage, (int, float)) and shared is None
        scores, places = self.scores, rows.places.groups * rows.places.block_len
        # Behind the block's places lies one more, for the rows that do not vote.
        grids = torch.zeros(2, places + 1, self.spec.num_experts, device=group_R.device)
        grids[0].index_copy_(0, rows.vote_R, scores.selection_TE)
        grids[1].index_copy_(0, rows.vote_R, scores.combine_TE)
        votes = torch.zeros(places + 1, dtype=torch.bool, device=group_R.device)
        votes.index_copy_(0, rows.vote_R, rows.votes_R)
        selection_GWE, combine_GWE = grids[:, :places].reshape(2, groups, -1, self.spec.num_experts)
        return compile_support_device(
            selection_GWE,
            combine_GWE,
            votes[:places].view(groups, -1),
            self.spec,
            self.config.coverage,
            self.config.candidate_factor,
            only_G,
            max_support=self.config.max_support,
            least_saving=self.config.least_saving,
        )


@dataclass(kw_only=True)
class PaddedLane(ListedLane):
    """The fresh rows of a plan on the device. They are not packed: the product gathers them.

    Raises:
        RuntimeError: somebody listens to the routing, which takes rows as lists.
    """

    def __post_init__(self) -> None:
        if self.listener is not None:
            raise RuntimeError("recording was begun within a block of backend='triton': begin it between blocks")
        step = self.step
        assert step is not None and isinstance(step.rows, PaddedRows) and step.state.cache_MH is not None
        self._rows, self._cache_MH = step.rows, step.state.cache_MH

    def route(self, x_BSH: Tensor) -> tuple[Tensor, Routing]:
        """All rows ``[T,H]``, and the experts of the packed ones ``[R,K]``."""
        _, routing = super().route(x_BSH)
        return x_BSH.reshape(-1, x_BSH.shape[-1]), routing

    def _selection(
        self, scores: Scores, config: EpochConfig, pools_RE: Tensor | None, dtype: torch.dtype
    ) -> DeviceSelection:
        return DeviceSelection(scores, self.bias_E, self.router, config, self._rows, dtype, pools_RE)

    def run(self, x_TH: Tensor, routing: Routing) -> Tensor:
        """The output of each pair ``[P,H]``, in expert order: weights are applied where rows are restored."""
        assert self.forward is not None
        self._dtype, self._weights_RK = product_dtype(x_TH), routing.weights_TK
        pairs_PH, self._worklist = run_padded(x_TH.to(self._cache_MH.dtype), self._rows, routing, self.views)
        self.forward.counters.add_layer(self.index, self._rows.count, self._worklist.counts_E)
        self.meanwhile()
        return pairs_PH

    def restore(self, pairs_PH: Tensor) -> Tensor:
        """The dense shard ``[T,H]`` from the pairs' outputs and cached rows; keeps what will be reused."""
        out_TH = restore_padded(pairs_PH, self._rows, self._worklist, self._weights_RK, self._cache_MH)
        return out_TH.to(self._dtype)


def run_padded(x_TH: Tensor, rows: PaddedRows, routing: Routing, views: ExpertViews) -> tuple[Tensor, Worklist]:
    """Experts of the packed rows, pair by pair: ``[P,H]`` in the worklist's order, and the worklist.

    Args:
        x_TH: all rows of the forward, in the experts' dtype; the kernels gather the packed ones.
        rows: what happens to each row.
        routing: of the packed rows.
        views: the experts.
    """
    x_TH = x_TH.contiguous()
    worklist = device_worklist(x_TH, routing.ids_TK, views, rows.count)
    return pair_outputs(x_TH, rows.fresh_R, worklist, views, routing.ids_TK.shape[1]), worklist


def restore_padded(
    pairs_PH: Tensor, rows: PaddedRows, worklist: Worklist, weights_RK: Tensor, cache_MH: Tensor
) -> Tensor:
    """The dense shard ``[T,H]`` from pairs and cache; writes the cache.

    Args:
        pairs_PH, worklist: as `run_padded` gives them.
        rows: what happens to each row.
        weights_RK: of the packed rows.
        cache_MH: of the layer; entries that no row names are neither read nor written.
    """
    from epoch_moe.kernels.combine_restore import combine_restore

    out_TH = cache_MH.new_empty(rows.total, cache_MH.shape[1])
    combine_restore(pairs_PH, worklist.rank_RK, weights_RK, rows.source_T, rows.store_R, cache_MH, out_TH)
    return out_TH
