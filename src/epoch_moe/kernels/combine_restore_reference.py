"""Plain torch of `kernels.combine_restore`: the same sums in the same order, one operation after another.

Shape suffixes: T rows of the forward, R capacity of the packed rows, K top-k, P pairs, H hidden, M cache entries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def combine_reference(pairs_PH: Tensor, rank_RK: Tensor, weights_RK: Tensor, count: Tensor | None = None) -> Tensor:
    """Weighted sum over the K pairs of each row, fp32, slot 0 first, rounded once: ``[R,H]`` in the pairs' dtype.

    A slot with rank -1 adds nothing, and neither its weight nor any pair is looked at for it. Rows from ``count`` on
    are padding and come out as zeros, whatever their ranks and weights hold.
    """
    num_rows, top_k = rank_RK.shape
    sum_RH = torch.zeros(num_rows, pairs_PH.shape[1], dtype=torch.float32, device=pairs_PH.device)
    real_R = torch.arange(num_rows, device=rank_RK.device) < (num_rows if count is None else count)
    for slot in range(top_k):
        row_V = torch.nonzero(real_R & (rank_RK[:, slot] >= 0)).flatten()
        pair_VH = pairs_PH[rank_RK[row_V, slot].long()].float()
        sum_RH[row_V] += weights_RK[row_V, slot].float().unsqueeze(1) * pair_VH
    return sum_RH.to(pairs_PH.dtype)


def restore_reference(y_RH: Tensor, source_T: Tensor, store_R: Tensor, cache_MH: Tensor, out_TH: Tensor) -> None:
    """Write the dense shard and the cache from combined rows: see `kernels.combine_restore.restore`."""
    fresh_V = torch.nonzero(source_T >= 0).flatten()
    reused_V = torch.nonzero(source_T <= -2).flatten()
    cached_VH = cache_MH[-(source_T[reused_V] + 2)]
    out_TH.zero_()
    out_TH[fresh_V] = y_RH[source_T[fresh_V]]
    out_TH[reused_V] = cached_VH
    packed_V = source_T[fresh_V]
    kept_V = packed_V[store_R[packed_V] >= 0]
    cache_MH[store_R[kept_V]] = y_RH[kept_V]


def combine_restore_reference(
    pairs_PH: Tensor,
    rank_RK: Tensor,
    weights_RK: Tensor,
    source_T: Tensor,
    store_R: Tensor,
    cache_MH: Tensor,
    out_TH: Tensor,
) -> None:
    """`combine_reference` of the packed rows that ``source_T`` names, then `restore_reference`."""
    named_R = torch.zeros(rank_RK.shape[0], dtype=torch.bool, device=rank_RK.device)
    named_R[source_T[source_T >= 0]] = True
    rank_RK = torch.where(named_R.unsqueeze(1), rank_RK, -1)
    restore_reference(combine_reference(pairs_PH, rank_RK, weights_RK), source_T, store_R, cache_MH, out_TH)
