"""The lane on one device by the Triton kernels: a plan's iteration without a number on the host.

Shape suffixes: T rows of the forward, R capacity of the packed rows, E experts, K top-k, H hidden, M cache entries,
G supports, W voting rows.

Triton is imported when one of these is called, never before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.experts.device import device_worklist, pair_outputs
from epoch_moe.experts.run import pick_backend
from epoch_moe.experts.views import ExpertViews
from epoch_moe.freshlane.lane import Visit, route_packed
from epoch_moe.plan.block_plan import ForwardPlan, LayerStep
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


class DeviceSelection:
    """`epoch_moe.plan.support.Selection` by the kernels.

    Among equal scores they choose the lowest id, where ``torch.topk`` leaves open which.

    Args:
        scores: of the packed rows.
        bias_E: the router's expert bias.
        spec: the router.
        config: the plan's choices.
        rows: the packed rows.
        dtype: the model's.
        pools_RE: the block-pool router's own supports.
    """

    def __init__(
        self,
        scores: Scores,
        bias_E: Tensor | None,
        spec: RouterSpec,
        config: EpochConfig,
        rows: PaddedRows,
        dtype: torch.dtype,
        pools_RE: Tensor | None = None,
    ):
        self.scores, self.bias_E, self.spec, self.config = scores, bias_E, spec, config
        self.rows, self.dtype, self.pools_RE = rows, dtype, pools_RE

    def choose(self, support_GE: Tensor | None = None, group_R: Tensor | None = None) -> Chosen:
        """See `Selection`. Padding rows choose nothing."""
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
        """See `Selection`. Supports outside ``only_G`` cost next to nothing."""
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


class PaddedLane:
    """The fresh rows of a plan on the device, see `epoch_moe.freshlane.lane.Lane`.

    Args:
        visit: the layer and the forward.
        step: what happens to the rows.

    Raises:
        RuntimeError: somebody listens to the routing, which takes rows as lists.
    """

    router_output = None

    def __init__(self, visit: Visit, step: LayerStep):
        assert isinstance(step.rows, PaddedRows) and step.state.cache_MH is not None
        if visit.listener is not None:
            raise RuntimeError("recording was begun within a block of backend='triton': begin it between blocks")
        self.visit, self.step, self.rows, self.cache_MH = visit, step, step.rows, step.state.cache_MH

    def route(self, x_TH: Tensor) -> tuple[Tensor, Routing]:
        """See `Lane`. The rows are not packed: the product gathers them."""
        visit = self.visit
        assert isinstance(visit.forward, ForwardPlan)
        config, dtype = visit.forward.config.of_layer(visit.index), x_TH.dtype

        def by_kernels(scores: Scores, pools_RE: Tensor | None) -> DeviceSelection:
            return DeviceSelection(scores, visit.bias_E, visit.router, config, self.rows, dtype, pools_RE)

        _, routing = route_packed(visit, self.step, x_TH, by_kernels)
        return x_TH, routing

    def run(self, x_TH: Tensor, routing: Routing) -> Tensor:
        """The output of each pair, in expert order: weights are applied where rows are restored."""
        forward, self._dtype = self.visit.forward, product_dtype(x_TH)
        assert isinstance(forward, ForwardPlan)
        pairs_PH, self._worklist = run_padded(x_TH.to(self.cache_MH.dtype), self.rows, routing, self.visit.views)
        self._weights_RK = routing.weights_TK
        forward.counters.add_layer(self.visit.index, self.rows.count, self._worklist.counts_E)
        return pairs_PH

    def restore(self, pairs_PH: Tensor) -> Tensor:
        """See `Lane`."""
        out_TH = restore_padded(pairs_PH, self.rows, self._worklist, self._weights_RK, self.cache_MH)
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
