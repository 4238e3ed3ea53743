"""Token-expert pairs in expert order with a schedule of tiles, in plain torch.

Shape suffixes: R rows, K top-k, P = R x K pairs, E experts, N = upper bound on tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceWorklist:
    """Pairs of R rows sorted by expert, within an expert by row, then slot, cut in tiles; all of it on the device.

    Empty pairs (ids that are no expert's, and rows behind ``count``) are in no segment and in no tile.

    Attributes:
        pair_P: int32, the pair ``row * K + slot`` at each sorted position, -1 behind the last segment.
        rank_RK: int32, the sorted position of each pair, -1 for empty ones.
        counts_E: int64, pairs of each expert.
        offsets_E: int32 ``[E+1]``, where each expert's segment begins; the last entry is the number of pairs.
        tile_expert_N: int32, the expert of each tile, -1 behind the last tile.
        tile_row_N: int32, the first sorted position of each tile, 0 behind the last tile. A tile ends after ``block_m``
            positions or with its expert's segment.
        num_tiles: int32 ``[1]``.
        block_m: sorted positions per tile.
    """

    pair_P: Tensor
    rank_RK: Tensor
    counts_E: Tensor
    offsets_E: Tensor
    tile_expert_N: Tensor
    tile_row_N: Tensor
    num_tiles: Tensor
    block_m: int


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most tiles that so many pairs can make: N, known without looking at them."""
    # Each expert with pairs ends at most one tile early; the more of them, the more tiles.
    experts = min(num_pairs, num_experts)
    return experts + (num_pairs - experts) // block_m


def worklist_reference(ids_RK: Tensor, num_experts: int, block_m: int, count: Tensor | None = None) -> DeviceWorklist:
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
    offsets_E = torch.cat([ends_E.new_zeros(1), ends_E])

    tiles_E = (counts_E + block_m - 1) // block_m
    tile_ends_E = tiles_E.cumsum(0)
    tile_N = torch.arange(max_tiles(flat_P.numel(), num_experts, block_m), device=flat_P.device)
    expert_N = torch.searchsorted(tile_ends_E, tile_N, right=True)
    there_N = expert_N < num_experts
    known_N = expert_N.clamp(max=num_experts - 1)
    first_N = offsets_E[known_N] + (tile_N - (tile_ends_E - tiles_E)[known_N]) * block_m
    return DeviceWorklist(
        pair_P=torch.where(valid_P[order_P], order_P, -1).int(),
        rank_RK=torch.where(valid_P, rank_P, -1).int().view(num_rows, top_k),
        counts_E=counts_E,
        offsets_E=offsets_E.int(),
        tile_expert_N=torch.where(there_N, expert_N, -1).int(),
        tile_row_N=torch.where(there_N, first_N, 0).int(),
        num_tiles=tiles_E.sum(dtype=torch.int32).view(1),
        block_m=block_m,
    )
