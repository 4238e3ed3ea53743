"""Token-expert pairs in expert order with a schedule of tiles, in plain torch.

Shape suffixes: R rows, K top-k, P = R x K pairs, E experts, N = upper bound on tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.worklist import Tiles, Worklist, max_tiles


def worklist_reference(ids_RK: Tensor, num_experts: int, block_m: int, count: Tensor | None = None) -> Worklist:
    """What `epoch_moe.kernels.worklist.device_worklist` returns."""
    num_rows, top_k = ids_RK.shape
    flat_P = ids_RK.reshape(-1)
    valid_P = (flat_P >= 0) & (flat_P < num_experts)
    if count is not None:
        valid_P &= torch.arange(num_rows, device=flat_P.device).repeat_interleave(top_k) < count
    keys_P = torch.where(valid_P, flat_P, num_experts)
    order_P = keys_P.argsort(stable=True)
    places_P = torch.arange(order_P.numel(), device=order_P.device)
    rank_P = torch.empty_like(order_P).scatter_(0, order_P, places_P)
    bins = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat_P.device)
    counts_E = bins.scatter_add_(0, keys_P, torch.ones_like(keys_P))[:num_experts].clone()
    ends_E = counts_E.cumsum(0)
    begins_E1 = torch.cat([ends_E.new_zeros(1), ends_E])

    tiles_E = (counts_E + block_m - 1) // block_m
    tile_ends_E = tiles_E.cumsum(0)
    tile_N = torch.arange(max_tiles(flat_P.numel(), num_experts, block_m), device=flat_P.device)
    expert_N = torch.searchsorted(tile_ends_E, tile_N, right=True)
    there_N = expert_N < num_experts
    known_N = expert_N.clamp(max=num_experts - 1)
    first_N = begins_E1[known_N] + (tile_N - (tile_ends_E - tiles_E)[known_N]) * block_m
    tiles = Tiles(
        expert_N=torch.where(there_N, expert_N, -1).int(),
        row_N=torch.where(there_N, first_N, 0).int(),
        count=tiles_E.sum(dtype=torch.int32).view(1),
        size=block_m,
    )
    return Worklist(
        pair_P=torch.where(valid_P[order_P], order_P, -1).int(),
        rank_RK=torch.where(valid_P, rank_P, -1).int().view(num_rows, top_k),
        counts_E=counts_E,
        begins_E1=begins_E1.int(),
        tiles=tiles,
    )
