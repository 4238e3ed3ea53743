"""Experts over the pairs of a worklist: two grouped products, SiLU and the product with ``up`` in between.

Shape suffixes: T rows, R packed rows, K top-k, P pairs (sorted by expert), E experts, H hidden, F expert inner size,
N tiles; in the kernels M rows of a tile, N output columns, K depth.

Rows are gathered while they are read: there is no ``[P,H]`` input copy. Each program takes one tile of rows of one
expert and one block of columns, and runs through the depth in fixed order, so results do not depend on what else is in
the batch. Tiles that the schedule does not use exit before they read anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from epoch_moe.checks import tensor
from epoch_moe.kernels.tuning import GemmConfig, GroupedMlpConfig
from epoch_moe.worklist import Worklist


@triton.jit
def _tile(tile_expert_ptr, tile_row_ptr, begins_ptr, most_tiles, columns, GROUP_M: tl.constexpr):
    """Of this program: expert (-1: none), block of columns, first sorted position, positions."""
    program = tl.program_id(0)
    group = program // (GROUP_M * columns)
    within = program % (GROUP_M * columns)
    tile = group * GROUP_M + within % GROUP_M
    there = tile < most_tiles
    expert = tl.load(tile_expert_ptr + tile, mask=there, other=-1)
    first = tl.load(tile_row_ptr + tile, mask=there, other=0)
    end = tl.load(begins_ptr + expert + 1)
    return expert, within // GROUP_M, first, end - first


@triton.jit
def _load(base_ptr, offset_K, there, left_K, EVEN: tl.constexpr, EVEN_K: tl.constexpr, K_FIRST: tl.constexpr):
    """One step of an operand: ``[rows, BLOCK_K]``, or ``[BLOCK_K, rows]`` where K_FIRST; zeros outside."""
    if K_FIRST:
        place = base_ptr[None, :] + offset_K[:, None]
        inside_rows = there[None, :]
        inside_depth = (offset_K < left_K)[:, None]
    else:
        place = base_ptr[:, None] + offset_K[None, :]
        inside_rows = there[:, None]
        inside_depth = (offset_K < left_K)[None, :]
    if EVEN and EVEN_K:
        value = tl.load(place)
    elif EVEN_K:
        value = tl.load(place, mask=inside_rows, other=0.0)
    elif EVEN:
        value = tl.load(place, mask=inside_depth, other=0.0)
    else:
        value = tl.load(place, mask=inside_rows & inside_depth, other=0.0)
    return value


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [T,H]
    rows_ptr,  # i64 [R], None: packed row r is row r
    pair_ptr,  # i32 [P]
    begins_ptr,  # i32 [E+1]
    tile_expert_ptr,  # i32 [N]
    tile_row_ptr,  # i32 [N]
    gate_ptr,  # [E,F,H]
    up_ptr,  # [E,F,H]
    act_ptr,  # [P,F]
    most_tiles,
    hidden,
    inner,
    x_stride,
    gate_stride_e,
    gate_stride_f,
    up_stride_e,
    up_stride_f,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """``silu(x gate^T) * (x up^T)`` of one tile of gathered rows, rounded once."""
    columns = tl.cdiv(inner, BLOCK_N)
    expert, column, first, size = _tile(tile_expert_ptr, tile_row_ptr, begins_ptr, most_tiles, columns, GROUP_M)
    if expert < 0:
        return
    m = tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_m, in_n = m < size, n < inner
    row = tl.load(pair_ptr + first + m, mask=in_m, other=0) // TOP_K
    if rows_ptr is None:
        row = row.to(tl.int64)
    else:
        row = tl.load(rows_ptr + row, mask=in_m, other=0)
    x_row_ptr = x_ptr + row * x_stride
    n64 = n.to(tl.int64)
    gate_row_ptr = gate_ptr + expert.to(tl.int64) * gate_stride_e + n64 * gate_stride_f
    up_row_ptr = up_ptr + expert.to(tl.int64) * up_stride_e + n64 * up_stride_f

    if SWAP:
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, hidden, BLOCK_K):
        left = hidden - start
        x = _load(x_row_ptr + start, k, in_m, left, False, EVEN_K, SWAP)
        gate_w = _load(gate_row_ptr + start, k, in_n, left, EVEN_N, EVEN_K, not SWAP)
        up_w = _load(up_row_ptr + start, k, in_n, left, EVEN_N, EVEN_K, not SWAP)
        if SWAP:
            gate = tl.dot(gate_w, x, gate, input_precision="ieee")
            up = tl.dot(up_w, x, up, input_precision="ieee")
        else:
            gate = tl.dot(x, gate_w, gate, input_precision="ieee")
            up = tl.dot(x, up_w, up, input_precision="ieee")
    act = (gate * tl.sigmoid(gate) * up).to(act_ptr.dtype.element_ty)
    if SWAP:
        act = tl.trans(act)
    act_row_ptr = act_ptr + (first + m).to(tl.int64) * inner
    tl.store(act_row_ptr[:, None] + n[None, :], act, mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _down_kernel(
    act_ptr,  # [P,F]
    begins_ptr,  # i32 [E+1]
    tile_expert_ptr,  # i32 [N]
    tile_row_ptr,  # i32 [N]
    down_ptr,  # [E,H,F]
    pairs_ptr,  # [P,H]
    most_tiles,
    hidden,
    inner,
    down_stride_e,
    down_stride_h,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """``act down^T`` of one tile of sorted positions."""
    columns = tl.cdiv(hidden, BLOCK_N)
    expert, column, first, size = _tile(tile_expert_ptr, tile_row_ptr, begins_ptr, most_tiles, columns, GROUP_M)
    if expert < 0:
        return
    m = tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_m, in_n = m < size, n < hidden
    position = (first + m).to(tl.int64)
    act_row_ptr = act_ptr + position * inner
    down_row_ptr = down_ptr + expert.to(tl.int64) * down_stride_e + n.to(tl.int64) * down_stride_h
    if SWAP:
        out = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        left = inner - start
        act = _load(act_row_ptr + start, k, in_m, left, False, EVEN_K, SWAP)
        down_w = _load(down_row_ptr + start, k, in_n, left, EVEN_N, EVEN_K, not SWAP)
        if SWAP:
            out = tl.dot(down_w, act, out, input_precision="ieee")
        else:
            out = tl.dot(act, down_w, out, input_precision="ieee")
    rounded = out.to(pairs_ptr.dtype.element_ty)
    if SWAP:
        rounded = tl.trans(rounded)
    pairs_row_ptr = pairs_ptr + position * hidden
    tl.store(pairs_row_ptr[:, None] + n[None, :], rounded, mask=in_m[:, None] & in_n[None, :])


def _constexprs(config: GemmConfig, block_m: int, columns: int, depth: int) -> dict[str, Any]:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SWAP": config.swap,
        "GROUP_M": config.group_m,
        "EVEN_N": columns % config.block_n == 0,
        "EVEN_K": depth % config.block_k == 0,
    }


def _programs(config: GemmConfig, tiles: int, columns: int) -> int:
    return int(triton.cdiv(tiles, config.group_m) * config.group_m * triton.cdiv(columns, config.block_n))


@torch.library.custom_op("epoch_moe::grouped_mlp", mutates_args=())
def _grouped_mlp(
    x_TH: Tensor,
    rows_R: Tensor | None,
    pair_P: Tensor,
    begins_E1: Tensor,
    tile_expert_N: Tensor,
    tile_row_N: Tensor,
    gate_EFH: Tensor,
    up_EFH: Tensor,
    down_EHF: Tensor,
    top_k: int,
    config: Sequence[int],
) -> Tensor:
    """Both launches; ``config`` is a `GroupedMlpConfig` as integers."""
    tiles_of = GroupedMlpConfig.from_ints(config)
    hidden, inner = down_EHF.shape[1:]
    pairs_PH = _empty(x_TH, rows_R, pair_P)
    act_PF = x_TH.new_empty(pair_P.numel(), inner)
    tiles = tile_expert_N.numel()
    if tiles == 0:
        return pairs_PH
    with torch.cuda.device_of(x_TH):
        gemm = tiles_of.gate_up
        _gate_up_kernel[(_programs(gemm, tiles, inner),)](
            x_TH,
            rows_R,
            pair_P,
            begins_E1,
            tile_expert_N,
            tile_row_N,
            gate_EFH,
            up_EFH,
            act_PF,
            tiles,
            hidden,
            inner,
            x_TH.stride(0),
            gate_EFH.stride(0),
            gate_EFH.stride(1),
            up_EFH.stride(0),
            up_EFH.stride(1),
            TOP_K=top_k,
            **_constexprs(gemm, tiles_of.block_m, inner, hidden),
            num_warps=gemm.num_warps,
            num_stages=gemm.num_stages,
        )
        gemm = tiles_of.down
        _down_kernel[(_programs(gemm, tiles, hidden),)](
            act_PF,
            begins_E1,
            tile_expert_N,
            tile_row_N,
            down_EHF,
            pairs_PH,
            tiles,
            hidden,
            inner,
            down_EHF.stride(0),
            down_EHF.stride(1),
            **_constexprs(gemm, tiles_of.block_m, hidden, inner),
            num_warps=gemm.num_warps,
            num_stages=gemm.num_stages,
        )
    return pairs_PH


def _empty(x_TH: Tensor, rows_R: Tensor | None, pair_P: Tensor, *_: object) -> Tensor:
    return x_TH.new_empty(pair_P.numel(), x_TH.shape[1])


_grouped_mlp.register_fake(_empty)


def grouped_mlp(
    x_TH: Tensor,
    rows_R: Tensor | None,
    worklist: Worklist,
    gate_EFH: Tensor,
    up_EFH: Tensor,
    down_EHF: Tensor,
    top_k: int,
    config: GroupedMlpConfig,
) -> Tensor:
    """Outputs of all pairs, in the worklist's order: ``[P,H]`` in the dtype of ``x_TH``.

    Args:
        x_TH: rows, last stride 1.
        rows_R: int64, the row of ``x_TH`` of each packed row; None: packed row r is row r.
        worklist: of the packed rows, in tiles of ``config.block_m``.
        gate_EFH: gate projections: a view (of ``[E,2F,H]``, say), last stride 1.
        up_EFH: up projections, likewise.
        down_EHF: down projections, likewise.
        top_k: K.
        config: tiles, as `epoch_moe.kernels.tuning.grouped_mlp_config` gives them.

    Positions behind the last segment are never written. Not differentiable.

    Raises:
        ValueError: for shapes, dtypes or strides that do not fit each other, or a worklist with other tiles.
    """
    tiles, (num_experts, hidden, inner) = worklist.tiles, down_EHF.shape
    if tiles is None or tiles.size != config.block_m:
        size = None if tiles is None else tiles.size
        raise ValueError(f"the worklist has tiles of {size}, the configuration of {config.block_m}")
    if worklist.begins_E1.numel() != num_experts + 1:
        raise ValueError(f"the worklist is of {worklist.begins_E1.numel() - 1} experts, the weights of {num_experts}")
    packed = worklist.pair_P.numel() // max(top_k, 1)
    if rows_R is not None:
        tensor("rows_R", rows_R, torch.int64, (packed,))
    elif x_TH.shape[0] < packed:
        raise ValueError(f"the worklist is of {packed} rows, x_TH has {x_TH.shape[0]}")
    for name, value, shape in (
        ("x_TH", x_TH, ("rows", hidden)),
        ("gate_EFH", gate_EFH, (num_experts, inner, hidden)),
        ("up_EFH", up_EFH, (num_experts, inner, hidden)),
        ("down_EHF", down_EHF, (num_experts, hidden, inner)),
    ):
        tensor(name, value, x_TH.dtype, shape, x_TH.device)
        if value.stride(-1) != 1:
            raise ValueError(f"{name} has strides {value.stride()}: its last dimension must be contiguous")
    pairs_PH: Tensor = _grouped_mlp(
        x_TH,
        rows_R,
        worklist.pair_P,
        worklist.begins_E1,
        tiles.expert_N,
        tiles.row_N,
        gate_EFH,
        up_EFH,
        down_EHF,
        top_k,
        config.as_ints(),
    )
    return pairs_PH
