"""Token-expert pairs in expert order with a schedule of tiles, built on the device.

Shape suffixes: R rows, K top-k, P = R x K pairs, E experts, B blocks of pairs, N = upper bound on tiles.

A counting sort in three launches: each block of pairs counts its experts; the counts of each expert are summed up over
the blocks; each block then places its own pairs, and a part of the tile schedule is written beside it. Few pairs take
the last launch alone. Within a block a pair's place is the number of pairs before it in (expert, position) order, so
the order is that of a stable sort whichever program runs first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epoch_moe.checks import tensor
from epoch_moe.worklist import Tiles, Worklist, max_tiles

# Pairs that one program sorts alone, and pairs per program where there are more. The comparisons within a block go by
# the square of its size.
SINGLE_BLOCK = 512
BLOCK = 256
# Things that a block is compared with at a time.
PART = 32
# Tiles per program of the last launch, blocks that the scan takes at a time, and experts per program of the scan.
TILES = 128
SCAN_BLOCKS = 64
SCAN_EXPERTS = 16


@triton.jit
def _keys(ids_ptr, count_ptr, pair_P, num_pairs, num_experts, TOP_K: tl.constexpr):
    """Expert of each pair; ``num_experts`` for those that are empty or not there."""
    there_P = pair_P < num_pairs
    if count_ptr is not None:
        there_P = there_P & (pair_P // TOP_K < tl.load(count_ptr))
    # Padding rows are not read.
    id_P = tl.load(ids_ptr + pair_P, mask=there_P, other=-1)
    return tl.where((id_P >= 0) & (id_P < num_experts), id_P, num_experts).to(tl.int32)


@triton.jit
def _histogram(key_P, num_experts, BLOCK_E: tl.constexpr):
    """Pairs of each expert, empty ones left out."""
    # Empty pairs are counted as expert 0's and taken off again: a bin of their own would double the power of two.
    empty_P = key_P == num_experts
    bins_E = tl.histogram(tl.where(empty_P, 0, key_P), BLOCK_E)
    return bins_E - tl.where(tl.arange(0, BLOCK_E) == 0, tl.sum(empty_P.to(tl.int32), axis=0), 0)


@triton.jit
def _count_kernel(
    ids_ptr,  # i64 [R,K]
    count_ptr,  # i32 [1] or None
    blocks_ptr,  # i32 [B,E]
    num_pairs,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Pairs of each expert in each block."""
    block = tl.program_id(0)
    pair_P = block * BLOCK_P + tl.arange(0, BLOCK_P)
    counts_E = _histogram(_keys(ids_ptr, count_ptr, pair_P, num_pairs, num_experts, TOP_K), num_experts, BLOCK_E)
    expert_E = tl.arange(0, BLOCK_E)
    tl.store(blocks_ptr + block * num_experts + expert_E, counts_E, mask=expert_E < num_experts)


@triton.jit
def _scan_kernel(
    blocks_ptr,  # i32 [B,E]: counts in, sums over the blocks before out
    counts_ptr,  # i64 [E]
    num_blocks,
    num_experts,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Exclusive sums over the blocks, a few experts per program."""
    expert_E = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    before_E = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        block_B = first + tl.arange(0, BLOCK_B)
        there_BE = (block_B < num_blocks)[:, None] & (expert_E < num_experts)[None, :]
        place_BE = blocks_ptr + block_B[:, None] * num_experts + expert_E[None, :]
        counts_BE = tl.load(place_BE, mask=there_BE, other=0)
        tl.store(place_BE, before_E[None, :] + tl.cumsum(counts_BE, axis=0) - counts_BE, mask=there_BE)
        before_E += tl.sum(counts_BE, axis=0)
    tl.store(counts_ptr + expert_E, before_E.to(tl.int64), mask=expert_E < num_experts)


@triton.jit
def _place_kernel(
    ids_ptr,  # i64 [R,K]
    count_ptr,  # i32 [1] or None
    blocks_ptr,  # i32 [B,E], None where one program sorts alone
    counts_ptr,  # i64 [E]
    pair_ptr,  # i32 [P]
    rank_ptr,  # i32 [R,K]
    begins_ptr,  # i32 [E+1]
    tile_expert_ptr,  # i32 [N]
    tile_row_ptr,  # i32 [N]
    num_tiles_ptr,  # i32 [1]
    num_pairs,
    num_experts,
    most_tiles,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
):
    """Places of one block's pairs, and one block of the tile schedule."""
    block = tl.program_id(0)
    local_P = tl.arange(0, BLOCK_P)
    pair_P = block * BLOCK_P + local_P
    key_P = _keys(ids_ptr, count_ptr, pair_P, num_pairs, num_experts, TOP_K)
    expert_E = tl.arange(0, BLOCK_E)
    if blocks_ptr is None:
        counts_E = _histogram(key_P, num_experts, BLOCK_E)
        tl.store(counts_ptr + expert_E, counts_E.to(tl.int64), mask=expert_E < num_experts)
    else:
        counts_E = tl.load(counts_ptr + expert_E, mask=expert_E < num_experts, other=0).to(tl.int32)
    total = tl.sum(counts_E, axis=0)

    # Pairs before each one within the block: of the same expert or, where one program sorts alone, of lower ones too.
    place_P = tl.zeros([BLOCK_P], tl.int32)
    for chunk in range(0, BLOCK_P, PART):
        other_C = chunk + tl.arange(0, PART)
        other_key_C = _keys(ids_ptr, count_ptr, block * BLOCK_P + other_C, num_pairs, num_experts, TOP_K)
        if blocks_ptr is None:
            before_PC = (other_key_C * BLOCK_P + other_C)[None, :] < (key_P * BLOCK_P + local_P)[:, None]
        else:
            before_PC = (other_key_C[None, :] == key_P[:, None]) & (other_C[None, :] < local_P[:, None])
        place_P += tl.sum(before_PC.to(tl.int32), axis=1)
    valid_P = key_P < num_experts
    if blocks_ptr is not None:
        place_P += tl.load(blocks_ptr + block * num_experts + key_P, mask=valid_P, other=0)
        for first in range(0, BLOCK_E, PART):  # and all pairs of lower experts
            lower_C = first + tl.arange(0, PART)
            counts_C = tl.load(counts_ptr + lower_C, mask=lower_C < num_experts, other=0).to(tl.int32)
            place_P += tl.sum(tl.where(lower_C[None, :] < key_P[:, None], counts_C[None, :], 0), axis=1)
    tl.store(rank_ptr + pair_P, tl.where(valid_P, place_P, -1), mask=pair_P < num_pairs)
    tl.store(pair_ptr + place_P, pair_P, mask=valid_P)
    tl.store(pair_ptr + pair_P, tl.full([BLOCK_P], -1, tl.int32), mask=(pair_P >= total) & (pair_P < num_pairs))

    tiles_E = (counts_E + BLOCK_M - 1) // BLOCK_M
    tile_ends_E = tl.cumsum(tiles_E, axis=0)
    if block == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles_E, axis=0))
        tl.store(begins_ptr, 0)
        tl.store(begins_ptr + 1 + expert_E, tl.cumsum(counts_E, axis=0), mask=expert_E < num_experts)
    if block * BLOCK_N < most_tiles:
        # Experts whose tiles all come before a tile: their number is the tile's expert, their pairs come before it.
        for part in range(0, BLOCK_N, PART):
            tile_N = block * BLOCK_N + part + tl.arange(0, PART)
            past_NE = tile_ends_E[None, :] <= tile_N[:, None]
            expert_N = tl.sum(past_NE.to(tl.int32), axis=1)
            first_N = tl.sum(tl.where(past_NE, counts_E[None, :], 0), axis=1)
            skipped_N = tl.sum(tl.where(past_NE, tiles_E[None, :], 0), axis=1)
            there_N = tile_N < tl.sum(tiles_E, axis=0)
            row_N = first_N + (tile_N - skipped_N) * BLOCK_M
            tl.store(tile_expert_ptr + tile_N, tl.where(there_N, expert_N, -1), mask=tile_N < most_tiles)
            tl.store(tile_row_ptr + tile_N, tl.where(there_N, row_N, 0), mask=tile_N < most_tiles)


def _shape(num_pairs: int, num_experts: int, block_m: int) -> tuple[int, int, int, int]:
    """Blocks of pairs, pairs per block, tiles per program, programs of the last launch."""
    tiles = max_tiles(num_pairs, num_experts, block_m)
    if num_pairs <= SINGLE_BLOCK:
        # There are never more tiles than pairs, so one program is enough for both.
        block = max(triton.next_power_of_2(num_pairs), PART)
        return 1, block, max(triton.next_power_of_2(tiles), PART), 1
    blocks = triton.cdiv(num_pairs, BLOCK)
    return blocks, BLOCK, TILES, max(blocks, triton.cdiv(tiles, TILES))


def _block_e(num_experts: int) -> int:
    return max(int(triton.next_power_of_2(num_experts)), PART)


@torch.library.custom_op("epoch_moe::worklist", mutates_args=())
def _worklist(ids_RK: Tensor, num_experts: int, block_m: int, count: Tensor | None) -> list[Tensor]:
    """The tensors of a `Worklist` and its `Tiles`, in their order."""
    out = _empty(ids_RK, num_experts, block_m, count)
    pair_P, rank_RK, counts_E, begins_E1, tile_expert_N, tile_row_N, num_tiles = out
    ids_RK = ids_RK.contiguous()
    num_pairs, top_k = ids_RK.numel(), max(ids_RK.shape[1], 1)
    blocks, block, tiles, programs = _shape(num_pairs, num_experts, block_m)
    blocks_BE = None
    with torch.cuda.device_of(ids_RK):
        if blocks > 1:
            blocks_BE = torch.empty(blocks, num_experts, dtype=torch.int32, device=ids_RK.device)
            _count_kernel[(blocks,)](
                ids_RK,
                count,
                blocks_BE,
                num_pairs,
                num_experts,
                TOP_K=top_k,
                BLOCK_P=block,
                BLOCK_E=_block_e(num_experts),
                num_warps=4,
            )
            _scan_kernel[(triton.cdiv(num_experts, SCAN_EXPERTS),)](
                blocks_BE, counts_E, blocks, num_experts, BLOCK_B=SCAN_BLOCKS, BLOCK_E=SCAN_EXPERTS, num_warps=4
            )
        _place_kernel[(programs,)](
            ids_RK,
            count,
            blocks_BE,
            counts_E,
            pair_P,
            rank_RK,
            begins_E1,
            tile_expert_N,
            tile_row_N,
            num_tiles,
            num_pairs,
            num_experts,
            tile_expert_N.numel(),
            TOP_K=top_k,
            BLOCK_M=block_m,
            BLOCK_P=block,
            BLOCK_E=_block_e(num_experts),
            BLOCK_N=tiles,
            PART=PART,
            num_warps=8,
            num_stages=1,
        )
    return out


def _empty(ids_RK: Tensor, num_experts: int, block_m: int, count: Tensor | None) -> list[Tensor]:
    """Memory for the tensors of a worklist, once the arguments are found right."""
    tensor("ids_RK", ids_RK, torch.int64, ("rows", "top_k"))
    if ids_RK.numel() >= 2**31:
        raise ValueError(f"ids_RK has {ids_RK.numel()} pairs: positions are 32-bit integers, expected fewer than 2**31")
    if num_experts < 1 or block_m < 1:
        raise ValueError(f"num_experts={num_experts}, block_m={block_m}: expected 1 or more of both")
    if count is not None:
        tensor("count", count, torch.int32, (1,))

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=ids_RK.device)

    pairs = ids_RK.numel()
    tiles = max_tiles(pairs, num_experts, block_m)
    counts_E = ints(num_experts, dtype=torch.int64)
    return [ints(pairs), ints(*ids_RK.shape), counts_E, ints(num_experts + 1), ints(tiles), ints(tiles), ints(1)]


_worklist.register_fake(_empty)


def device_worklist(ids_RK: Tensor, num_experts: int, block_m: int, count: Tensor | None = None) -> Worklist:
    """Sort the pairs of R rows by expert and cut the segments in tiles, without a host sync.

    Args:
        ids_RK: int64 ``[R,K]``; ids below 0 or not below ``num_experts`` are empty pairs.
        num_experts: E.
        block_m: sorted positions per tile.
        count: int32 ``[1]``, how many rows are real; pairs of the rows behind them are empty, whatever ``ids_RK``
            holds there. None = all.

    Raises:
        ValueError: for other dtypes or shapes, or sizes below 1.
    """
    pair_P, rank_RK, counts_E, begins_E1, tile_expert_N, tile_row_N, num_tiles = _worklist(
        ids_RK, num_experts, block_m, count
    )
    tiles = Tiles(tile_expert_N, tile_row_N, num_tiles, block_m)
    return Worklist(pair_P, rank_RK, counts_E, begins_E1, tiles=tiles)
