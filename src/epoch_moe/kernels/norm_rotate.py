"""RMS norm, and the norm and rotary embedding of queries and keys, one launch each.

Every rounding is that of `norm_rotate_reference`: statistics in fp32, products rounded to the model's dtype one by one.

Shape suffixes: B sequences, N heads, S positions, D head dimension (or hidden size), R rotary dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epoch_moe.checks import tensor
from epoch_moe.kernels.launch import require_triton

OPTIONS = {"enable_fp_fusion": False}
"""A product is rounded before it is added, as in the reference."""


@triton.jit
def norm_rotate_kernel(
    x_ptr,  # [B,N,S,D] by strides
    weight_ptr,  # [D], None: no norm
    cos_ptr,  # [B or 1,S,R] by strides, None: no rotation
    sin_ptr,  # as cos
    out_ptr,  # [B,N,S,D], contiguous
    rows,  # B x N x S
    heads,
    positions,
    x_stride_b, x_stride_n, x_stride_s,
    angle_stride_b, angle_stride_s,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Some rows, each with all its dimensions."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    s, n, b = row % positions, row // positions % heads, row // (positions * heads)
    start = x_ptr + (b * x_stride_b + n * x_stride_n + s * x_stride_s)[:, None]
    dtype = out_ptr.dtype.element_ty
    x = tl.load(start + column[None, :], mask=inside, other=0.0)
    y = x
    if weight_ptr is not None:
        x32 = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x32 * x32, axis=1) / D + eps)[:, None]
        weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        y = ((x32 * scale).to(dtype).to(tl.float32) * weight).to(dtype)
    if cos_ptr is not None:
        turned = column < R
        partner = tl.where(column < R // 2, column + R // 2, column - R // 2)
        reach = inside & turned[None, :]
        z = tl.load(start + partner[None, :], mask=reach, other=0.0)
        if weight_ptr is not None:
            other = tl.load(weight_ptr + partner, mask=turned, other=0.0).to(tl.float32)[None, :]
            z = ((z.to(tl.float32) * scale).to(dtype).to(tl.float32) * other).to(dtype)
        angle = (b * angle_stride_b + s * angle_stride_s)[:, None] + column[None, :]
        cos = tl.load(cos_ptr + angle, mask=reach, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=reach, other=0.0).to(tl.float32)
        z32 = tl.where((column < R // 2)[None, :], -z.to(tl.float32), z.to(tl.float32))
        own, crossed = (y.to(tl.float32) * cos).to(dtype), (z32 * sin).to(dtype)
        y = tl.where(turned[None, :], (own.to(tl.float32) + crossed.to(tl.float32)).to(dtype), y)
    tl.store(out_ptr + row[:, None] * D + column[None, :], y, mask=inside)


def tile(width: int) -> tuple[int, int, int]:
    """Rows per program, columns, and warps."""
    block = max(triton.next_power_of_2(width), 16)
    return max(1, 1024 // block), block, min(max(block // 256, 4), 8)


@torch.library.custom_op("epoch_moe::norm_rotate", mutates_args=())
def norm_rotate(
    x_BNSD: Tensor, weight_D: Tensor | None, cos_BSR: Tensor | None, sin_BSR: Tensor | None, eps: float
) -> Tensor:
    """Heads normed and turned: contiguous ``[B,N,S,D]`` in the dtype of the input.

    Args:
        x_BNSD: any strides, but for a last dimension side by side.
        weight_D: of the norm, in the same dtype; None: no norm.
        cos_BSR, sin_BSR: of the positions, ``[B or 1,S,R]`` in the same dtype, R even; None: not turned.
        eps: of the norm.

    Raises:
        ValueError: a shape, dtype or stride that does not fit, or a device without Triton.
    """
    require_triton(x_BNSD.device)
    batch, heads, positions, width = x_BNSD.shape
    angles = cos_BSR if cos_BSR is not None and cos_BSR.shape[0] == batch else None
    rotary = 0 if cos_BSR is None else cos_BSR.shape[-1]
    for name, given, shape in (
        ("weight_D", weight_D, (width,)),
        ("cos_BSR", cos_BSR, (batch if angles is not None else 1, positions, rotary)),
        ("sin_BSR", sin_BSR, None if cos_BSR is None else tuple(cos_BSR.shape)),
    ):
        if given is not None:
            tensor(name, given, x_BNSD.dtype, shape or (), x_BNSD.device)
    if rotary % 2 or rotary > width:
        raise ValueError(f"cos_BSR has {rotary} angles: expected an even number, at most the {width} dimensions")
    if cos_BSR is not None and (sin_BSR is None or sin_BSR.stride() != cos_BSR.stride()):
        raise ValueError("sin_BSR must be given with cos_BSR, with the same strides")
    for name, given in (("x_BNSD", x_BNSD), ("weight_D", weight_D), ("cos_BSR", cos_BSR)):
        if given is not None and given.shape[-1] > 1 and given.stride(-1) != 1:
            raise ValueError(f"{name} has strides {given.stride()}: expected the last dimension side by side")
    out_BNSD = torch.empty(x_BNSD.shape, dtype=x_BNSD.dtype, device=x_BNSD.device)
    rows = batch * heads * positions
    if rows:
        block_rows, block, warps = tile(width)
        angle_strides = (0, 0) if cos_BSR is None else (0 if angles is None else cos_BSR.stride(0), cos_BSR.stride(1))
        sizes = {"D": width, "R": rotary, "BLOCK_ROWS": block_rows, "BLOCK_D": block, "num_warps": warps}
        with torch.cuda.device_of(x_BNSD):
            norm_rotate_kernel[(triton.cdiv(rows, block_rows),)](
                x_BNSD, weight_D, cos_BSR, sin_BSR, out_BNSD, rows, heads, positions, *x_BNSD.stride()[:3],
                *angle_strides, eps, **sizes, **OPTIONS,
            )  # fmt: skip
    return out_BNSD


@norm_rotate.register_fake
def _(
    x_BNSD: Tensor, weight_D: Tensor | None, cos_BSR: Tensor | None, sin_BSR: Tensor | None, eps: float
) -> Tensor:
    return torch.empty(x_BNSD.shape, dtype=x_BNSD.dtype, device=x_BNSD.device)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The last dimension normed, one launch; other dimensions as they come."""
    rows = x.reshape(1, 1, -1, x.shape[-1])
    out: Tensor = norm_rotate(rows, weight, None, None, eps)
    return out.view(x.shape)
