"""Routed experts by the Triton kernels: worklist, both products, weighted sum, without a look at any value.

Shape suffixes: T rows, R packed rows, K top-k, P = R x K pairs, H hidden, F expert inner size, E experts.

Triton is imported when one of these is called, never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from epoch_moe.experts.views import ExpertViews
from epoch_moe.worklist import Worklist

if TYPE_CHECKING:
    from epoch_moe.kernels.tuning import GroupedMlpConfig


def device_worklist(x_TH: Tensor, ids_RK: Tensor, stacked: ExpertViews, count: Tensor | None = None) -> Worklist:
    """The worklist of packed rows, in the tiles that `pair_outputs` takes.

    Args:
        x_TH: where the rows are.
        ids_RK: int64, of the packed rows.
        stacked: the experts.
        count: int32 ``[1]``, how many of the packed rows are real; None = all.
    """
    from epoch_moe.kernels import worklist

    block_m = _config(x_TH, ids_RK.numel(), stacked).block_m
    return worklist.device_worklist(ids_RK, stacked.down_EHF.shape[0], block_m, count)


def pair_outputs(
    x_TH: Tensor, rows_R: Tensor | None, worklist: Worklist, stacked: ExpertViews, top_k: int
) -> Tensor:
    """Each pair's output, in the worklist's order: ``[P,H]``; what lies behind the last segment is never written.

    Args:
        rows_R: int64, the row of ``x_TH`` that each packed row is; None: these are the rows themselves.
    """
    from epoch_moe.kernels.grouped_mlp import grouped_mlp

    inner = stacked.down_EHF.shape[2]
    split = stacked.projections if len(stacked.projections) == 2 else stacked.projections[0].split(inner, dim=1)
    gate_EFH, up_EFH = split
    config = _config(x_TH, worklist.pair_P.numel(), stacked)
    return grouped_mlp(x_TH, rows_R, worklist, gate_EFH, up_EFH, stacked.down_EHF, top_k, config)


def run_device(x_RH: Tensor, weights_RK: Tensor, stacked: ExpertViews, worklist: Worklist) -> Tensor:
    """`epoch_moe.experts.run.run_experts` by the kernels: ``[R,H]``."""
    from epoch_moe.kernels.combine_restore import combine

    x_RH = x_RH.contiguous()
    pairs_PH = pair_outputs(x_RH, None, worklist, stacked, weights_RK.shape[1])
    out_RH: Tensor = combine(pairs_PH, worklist.rank_RK, weights_RK.float().contiguous())
    return out_RH


def _config(x_TH: Tensor, pairs: int, stacked: ExpertViews) -> GroupedMlpConfig:
    """Of the products: what the host knows of rows per expert is the most pairs that there can be."""
    from epoch_moe.kernels.tuning import grouped_mlp_config_for

    experts = max(min(stacked.down_EHF.shape[0], pairs), 1)
    # The products get contiguous rows, whatever view the caller has: the worklist must have the same tiles.
    like_TH = x_TH if x_TH.is_contiguous() else x_TH.new_empty(1, x_TH.shape[1])
    return grouped_mlp_config_for(like_TH, (*stacked.projections, stacked.down_EHF), pairs / experts)
