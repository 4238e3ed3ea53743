"""From sorted pairs back to the dense shard: weighted sums, reused rows and the cache in one pass.

One program per row and tile of H. Every output element is written by one program and every sum runs over the slots in
ascending order in fp32, products rounded before they are added, so results do not depend on scheduling and are those of
`combine_restore_reference` to the bit. What a program does is decided by ``source_T``:

  s >= 0    the weighted sum of packed row s, to the dense shard, and to the cache where ``store_R[s]`` names an entry
  s == -1   zeros (padding, finished sequences): nothing is read
  s <= -2   cache entry ``-(s + 2)``

Packed rows that no ``source_T`` names are padding: their ranks, weights and pairs are never read.

Shape suffixes: T rows of the forward, R capacity of the packed rows, K top-k, P = R x K pairs, H hidden, M cache
entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epoch_moe.checks import tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS = {"enable_fp_fusion": False}  # a product is rounded before it is added, as plain torch does it


@triton.jit
def _weighted_sum(
    pairs_ptr, rank_ptr, weights_ptr, row, column, H, pairs_stride, K: tl.constexpr, BLOCK_H: tl.constexpr
):
    """fp32 ``[BLOCK_H]``: slot 0 first. An empty slot reads no pair, and its weight, whatever it holds, is not used."""
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for slot in tl.static_range(K):
        rank = tl.load(rank_ptr + row * K + slot)
        filled = rank >= 0
        weight = tl.where(filled, tl.load(weights_ptr + row * K + slot), 0.0)
        reads = column < tl.where(filled, H, 0)
        # [P,H] holds more than 2^31 elements at 16,384 rows of flash: 64-bit offsets.
        pair = tl.load(pairs_ptr + rank.to(tl.int64) * pairs_stride + column, mask=reads, other=0.0)
        total += weight * pair.to(tl.float32)
    return total


@triton.jit
def combine_kernel(
    pairs_ptr, rank_ptr, weights_ptr, count_ptr, out_ptr, pairs_stride, H, K: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Packed rows ``[R,H]``, contiguous; rows from the count on (if there is one) become zeros without a read."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = column < H
    to = out_ptr + row * H + column
    real = True
    if count_ptr is not None:
        real = row < tl.load(count_ptr)
    if real:
        y = _weighted_sum(pairs_ptr, rank_ptr, weights_ptr, row, column, H, pairs_stride, K, BLOCK_H)
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(to, tl.zeros([BLOCK_H], dtype=out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def restore_kernel(
    y_ptr, rank_ptr, weights_ptr, source_ptr, store_ptr, cache_ptr, out_ptr, y_stride, cache_stride, out_stride, H,
    K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The dense shard. ``y`` are sorted pairs ``[P,H]``; without ranks packed rows ``[R,H]``, already combined."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = column < H
    to = out_ptr + row * out_stride + column
    source = tl.load(source_ptr + row)
    if source >= 0:
        if rank_ptr is not None:
            total = _weighted_sum(y_ptr, rank_ptr, weights_ptr, source, column, H, y_stride, K, BLOCK_H)
            y = total.to(out_ptr.dtype.element_ty)
        else:
            y = tl.load(y_ptr + source * y_stride + column, mask=inside)
        tl.store(to, y, mask=inside)
        entry = tl.load(store_ptr + source)
        if entry >= 0:
            tl.store(cache_ptr + entry * cache_stride + column, y, mask=inside)
    elif source == -1:
        tl.store(to, tl.zeros([BLOCK_H], dtype=out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(to, tl.load(cache_ptr + -(source + 2) * cache_stride + column, mask=inside), mask=inside)


def _tile(hidden: int) -> tuple[int, int]:
    """Columns per program and warps: 8 elements (16 bytes of a 16-bit type) per thread, 4 where rows are unaligned."""
    block = max(64, min(1024, triton.next_power_of_2(hidden)))
    return block, max(1, block // (256 if hidden % 16 == 0 else 128))


def _check_rows(name: str, value: Tensor, like: Tensor) -> None:
    tensor(name, value, FLOATS if value is like else like.dtype, ("rows", like.shape[-1]), like.device)
    if value.stride(1) != 1 and value.shape[1] > 1:
        raise ValueError(f"{name} has strides {value.stride()}: expected elements of a row side by side")


def _check_pairs(pairs_PH: Tensor, rank_RK: Tensor, weights_RK: Tensor, count: Tensor | None = None) -> None:
    device = pairs_PH.device
    _check_rows("pairs_PH", pairs_PH, pairs_PH)
    tensor("rank_RK", rank_RK, torch.int32, ("rows", "K"), device)
    tensor("weights_RK", weights_RK, torch.float32, rank_RK.shape, device)
    if count is not None:
        tensor("count", count, torch.int32, (1,), device)


@torch.library.custom_op("epoch_moe::combine", mutates_args=())
def combine(pairs_PH: Tensor, rank_RK: Tensor, weights_RK: Tensor, count: Tensor | None = None) -> Tensor:
    """Weighted sum over the K pairs of each packed row: ``[R,H]`` in the dtype of ``pairs_PH``.

    The sum is taken in fp32, slot 0 first, and rounded once (`epoch_moe.worklist.combine` adds by groups of experts:
    equal to rounding). Rows from ``count`` on come out as zeros.

    Args:
        pairs_PH: expert outputs in sorted order (`kernels.grouped_mlp`); rows behind the last segment hold
            anything.
        rank_RK: int32, the sorted position of each pair; -1 = empty slot, which adds nothing.
        weights_RK: fp32. Weights of empty slots may hold anything.
        count: int32 ``[1]`` on the device, how many rows are real; None means all of them.

    Raises:
        ValueError: a dtype, shape, device or layout is not the one above.
    """
    out_RH = _empty(pairs_PH, rank_RK, weights_RK, count)
    rows, hidden = out_RH.shape
    block, warps = _tile(hidden)
    if out_RH.numel():
        with torch.cuda.device_of(out_RH):
            combine_kernel[rows, triton.cdiv(hidden, block)](
                pairs_PH, rank_RK.contiguous(), weights_RK.contiguous(), count, out_RH, pairs_PH.stride(0), hidden,
                K=rank_RK.shape[1], BLOCK_H=block, num_warps=warps, **OPTIONS,
            )  # fmt: skip
    return out_RH


def _empty(pairs_PH: Tensor, rank_RK: Tensor, weights_RK: Tensor, count: Tensor | None = None) -> Tensor:
    """Memory for the sums, once the arguments are found right."""
    _check_pairs(pairs_PH, rank_RK, weights_RK, count)
    return pairs_PH.new_empty(rank_RK.shape[0], pairs_PH.shape[1])


combine.register_fake(_empty)


@torch.library.custom_op("epoch_moe::restore", mutates_args=("cache_MH", "out_TH"))
def restore(y_RH: Tensor, source_T: Tensor, store_R: Tensor, cache_MH: Tensor, out_TH: Tensor) -> None:
    """The dense shard from rows that are already combined (over ranks, say); writes the cache.

    Args:
        y_RH: packed rows. Only those that ``source_T`` names are read.
        source_T: int64, what each row of ``out_TH`` is: a packed row, -1 for zeros, ``-(entry + 2)`` for a cache entry.
        store_R: int64, the cache entry that a packed row is written to, negative for none.
        cache_MH: written at the stored entries and nowhere else. No entry may be both read and stored, or stored twice,
            in one call: programs run in any order. Row plans hold this, as a row is either fresh or reused.
        out_TH: every row is written.

    Raises:
        ValueError: a dtype, shape, device or layout is not the one above.
    """
    _check_rows("y_RH", y_RH, y_RH)
    _restore(y_RH, None, None, source_T, store_R, cache_MH, out_TH)


@torch.library.custom_op("epoch_moe::combine_restore", mutates_args=("cache_MH", "out_TH"))
def combine_restore(
    pairs_PH: Tensor,
    rank_RK: Tensor,
    weights_RK: Tensor,
    source_T: Tensor,
    store_R: Tensor,
    cache_MH: Tensor,
    out_TH: Tensor,
) -> None:
    """`combine` and `restore` in one pass: no packed ``[R,H]`` is written in between, and the result is the same bits.

    Arguments and errors as there.
    """
    _check_pairs(pairs_PH, rank_RK, weights_RK)
    _restore(pairs_PH, rank_RK.contiguous(), weights_RK.contiguous(), source_T, store_R, cache_MH, out_TH)


@restore.register_fake
@combine_restore.register_fake
def _(*tensors: Tensor) -> None:
    """Nothing is returned: memory that is there is written."""


def _restore(
    y: Tensor,
    rank_RK: Tensor | None,
    weights_RK: Tensor | None,
    source_T: Tensor,
    store_R: Tensor,
    cache_MH: Tensor,
    out_TH: Tensor,
) -> None:
    """The launch of both: ``y`` are pairs ``[P,H]``, or packed rows ``[R,H]`` where there are no ranks."""
    _check_rows("cache_MH", cache_MH, y)
    _check_rows("out_TH", out_TH, y)
    (rows, hidden), packed = out_TH.shape, (y if rank_RK is None else rank_RK).shape[0]
    tensor("source_T", source_T, torch.int64, (rows,), y.device)
    tensor("store_R", store_R, torch.int64, (packed,), y.device)
    block, warps = _tile(hidden)
    if out_TH.numel():
        with torch.cuda.device_of(out_TH):
            restore_kernel[rows, triton.cdiv(hidden, block)](
                y, rank_RK, weights_RK, source_T.contiguous(), store_R.contiguous(), cache_MH, out_TH, y.stride(0),
                cache_MH.stride(0), out_TH.stride(0), hidden, K=1 if rank_RK is None else rank_RK.shape[1],
                BLOCK_H=block, num_warps=warps, **OPTIONS,
            )  # fmt: skip
