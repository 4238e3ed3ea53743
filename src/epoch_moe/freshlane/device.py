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
from epoch_moe.plan.packed import Compact, PaddedRows
from epoch_moe.plan.support import Chosen
from epoch_moe.routing import RouterSpec, Routing, Scores


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

    def compile(self, selection_GWE: Tensor, weights_GWE: Tensor, votes_GW: Tensor, only_G: Tensor | None) -> Tensor:
        """See `Selection`. Supports outside ``only_G`` cost next to nothing."""
        from epoch_moe.kernels.atlas import compile_support_device

        assert self.config.coverage is not None
        return compile_support_device(
            selection_GWE,
            weights_GWE,
            votes_GW,
            self.spec,
            self.config.coverage,
            self.config.candidate_factor,
            only_G,
        )


def planned_lane(
    x_TH: Tensor, rows: PaddedRows, routing: Routing, stacked: ExpertViews, cache_MH: Tensor
) -> tuple[Tensor, Tensor]:
    """Experts of the packed rows, and the dense shard ``[T,H]``; writes the cache.

    Args:
        x_TH: all rows of the forward; the kernels gather the packed ones.
        rows: what happens to each row.
        routing: of the packed rows.
        stacked: the experts.
        cache_MH: of the layer; entries that no row names are neither read nor written.

    Returns:
        The shard, and pairs per expert (int64 ``[E]``).
    """
    from epoch_moe.kernels.combine_restore import combine_restore

    x_TH = x_TH.to(cache_MH.dtype).contiguous()
    worklist = device_worklist(x_TH, routing.ids_TK, stacked, rows.count)
    pairs_PH = pair_outputs(x_TH, rows.fresh_R, worklist, stacked, routing.ids_TK.shape[1])
    out_TH = torch.empty_like(x_TH)
    combine_restore(pairs_PH, worklist.rank_RK, routing.weights_TK, rows.source_T, rows.store_R, cache_MH, out_TH)
    return out_TH, worklist.counts_E
