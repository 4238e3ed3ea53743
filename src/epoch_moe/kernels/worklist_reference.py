"""Token-expert pairs in expert order with a schedule of tiles, in plain torch.

Shape suffixes: R rows, K top-k, P = R x K pairs, E experts, N = upper bound on tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.routing import NO_EXPERT
from epoch_moe.worklist import Tiles, Worklist, build_worklist, max_tiles


def worklist_reference(ids_RK: Tensor, num_experts: int, block_m: int, count: Tensor | None = None) -> Worklist:
    """What `epoch_moe.kernels.worklist.device_worklist` returns."""
    valid_RK = (ids_RK >= 0) & (ids_RK < num_experts)
    if count is not None:
        valid_RK &= torch.arange(ids_RK.shape[0], device=ids_RK.device).unsqueeze(1) < count
    lists = build_worklist(ids_RK.masked_fill(~valid_RK, NO_EXPERT), num_experts)
    behind_P = torch.arange(ids_RK.numel(), device=ids_RK.device) >= lists.ends_E[-1]
    counts_E, begins_E1 = lists.counts_E, lists.begins_E1.long()

    tiles_E = (counts_E + block_m - 1) // block_m
    tile_ends_E = tiles_E.cumsum(0)
    tile_N = torch.arange(max_tiles(ids_RK.numel(), num_experts, block_m), device=ids_RK.device)
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
        pair_P=lists.pair_P.masked_fill(behind_P, -1).int(),
        rank_RK=lists.rank_RK.int(),
        counts_E=counts_E,
        begins_E1=lists.begins_E1,
        tiles=tiles,
    )
