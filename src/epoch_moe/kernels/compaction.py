"""Fresh rows packed to the front of a buffer of fixed size, their number left on the device.

Shape suffixes: T rows of the forward, R = capacity, N blocks of rows.

Two passes over the mask, the first of which is skipped where one block holds all rows: the rows of each block are
counted; then each block adds up the counts before it and numbers its own rows. Nothing depends on the order in which
programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epoch_moe.checks import tensor

# Rows that one program takes alone, and rows per program where there are more (or more places).
SINGLE_BLOCK = 4096
BLOCK = 1024


@triton.jit
def _count_kernel(mask_ptr, partial_ptr, num_rows, BLOCK_T: tl.constexpr):
    """Set rows of each block of the mask."""
    block = tl.program_id(0)
    row_T = block * BLOCK_T + tl.arange(0, BLOCK_T)
    set_T = tl.load(mask_ptr + row_T, mask=row_T < num_rows, other=0).to(tl.int32)
    tl.store(partial_ptr + block, tl.sum(set_T, axis=0))


@triton.jit
def _compact_kernel(
    mask_ptr,  # i1 [T]
    partial_ptr,  # i32 [N], None where one block holds all rows
    rows_ptr,  # i64 [R]
    rank_ptr,  # i64 [T]
    count_ptr,  # i32 [1]
    num_rows,
    capacity,
    num_blocks,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Numbers of the rows of one block, and one block of the padding behind the last row."""
    block = tl.program_id(0)
    row_T = block * BLOCK_T + tl.arange(0, BLOCK_T)
    set_T = tl.load(mask_ptr + row_T, mask=row_T < num_rows, other=0).to(tl.int32)
    if partial_ptr is None:
        before = 0
        total = tl.sum(set_T, axis=0)
    else:
        index_N = tl.arange(0, BLOCK_N)
        partial_N = tl.load(partial_ptr + index_N, mask=index_N < num_blocks, other=0)
        before = tl.sum(tl.where(index_N < block, partial_N, 0), axis=0)
        total = tl.sum(partial_N, axis=0)
    position_T = before + tl.cumsum(set_T, axis=0) - 1
    kept_T = (set_T != 0) & (position_T < capacity)
    tl.store(rank_ptr + row_T, tl.where(kept_T, position_T, -1).to(tl.int64), mask=row_T < num_rows)
    tl.store(rows_ptr + position_T, row_T.to(tl.int64), mask=kept_T)
    tl.store(rows_ptr + row_T, tl.zeros([BLOCK_T], tl.int64), mask=(row_T >= total) & (row_T < capacity))
    if block == 0:
        tl.store(count_ptr, total)


def _shape(num_rows: int, capacity: int) -> tuple[int, int]:
    """Rows per program, and programs: one where it can take every row and every place alone."""
    most = max(num_rows, capacity, 1)
    if most <= SINGLE_BLOCK:
        return max(triton.next_power_of_2(most), 16), 1
    return BLOCK, triton.cdiv(most, BLOCK)


@torch.library.custom_op("epoch_moe::compact", mutates_args=())
def compact(mask_T: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pack the set rows of a mask into ``capacity`` places.

    Args:
        mask_T: bool ``[T]``.
        capacity: R, the places.

    Returns:
        rows_R: int64 ``[R]``, the set rows in ascending order, 0 in places that are left.
        rank_T: int64 ``[T]``, the place of each row, -1 where it has none: not set, or beyond the capacity.
        count: int32 ``[1]``, how many rows are set: more than ``capacity`` where they did not fit.

    Raises:
        ValueError: for a mask that is not a bool vector, or a negative capacity.
    """
    rows_R, rank_T, count = _empty(mask_T, capacity)
    mask_T = mask_T.contiguous()
    block, blocks = _shape(mask_T.numel(), capacity)
    partial_N = None
    with torch.cuda.device_of(mask_T):
        if blocks > 1:
            partial_N = torch.empty(blocks, dtype=torch.int32, device=mask_T.device)
            _count_kernel[(blocks,)](mask_T, partial_N, mask_T.numel(), BLOCK_T=block, num_warps=4)
        _compact_kernel[(blocks,)](
            mask_T,
            partial_N,
            rows_R,
            rank_T,
            count,
            mask_T.numel(),
            capacity,
            blocks,
            BLOCK_T=block,
            BLOCK_N=max(triton.next_power_of_2(blocks), 2),
            num_warps=4,
        )
    return rows_R, rank_T, count


def _empty(mask_T: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results, once the arguments are found right."""
    tensor("mask_T", mask_T, torch.bool, ("rows",))
    if capacity < 0:
        raise ValueError(f"capacity={capacity}: expected 0 or more")
    rows_R = torch.empty(capacity, dtype=torch.int64, device=mask_T.device)
    return rows_R, rows_R.new_empty(mask_T.shape[0]), rows_R.new_empty(1, dtype=torch.int32)


compact.register_fake(_empty)
