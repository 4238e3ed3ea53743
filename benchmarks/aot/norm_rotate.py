"""Ahead-of-time cases of norm and rotary embedding: `epoch_moe.kernels.norm_rotate`."""

from __future__ import annotations

import torch
from aot.compiler import AotCase, pointer

from epoch_moe.kernels.norm_rotate import OPTIONS, norm_rotate_kernel, tile

ROWS = 32 * 32
"""Of a batch of 32 blocks."""


def aot_cases() -> list[AotCase]:
    """Norms of hidden states, and of query heads with their rotation, at the released models' sizes."""
    cases = []
    for shape, hidden, heads, rotary in (("llada2-mini", 2048, 16, 64), ("llada2-flash", 4096, 32, 64)):
        for kind, width, rows, turned in (("hidden", hidden, ROWS, 0), ("heads", 128, ROWS * heads, rotary)):
            for dtype in (torch.bfloat16, torch.float32)[: 2 if shape == "llada2-mini" else 1]:
                block_rows, block, warps = tile(width)
                element = pointer(dtype)
                signature = {"x_ptr": element, "weight_ptr": element, "out_ptr": element}
                signature |= dict.fromkeys(("rows", "heads", "positions"), "i32")
                signature |= dict.fromkeys(("x_stride_b", "x_stride_n", "x_stride_s"), "i32")
                signature |= {"angle_stride_b": "i32", "angle_stride_s": "i32", "eps": "fp32"}
                constexprs = {"D": width, "R": turned, "BLOCK_ROWS": block_rows, "BLOCK_D": block}
                if turned:
                    signature |= {"cos_ptr": element, "sin_ptr": element}
                else:
                    constexprs |= {"cos_ptr": None, "sin_ptr": None}
                moved = 2 * rows * width * dtype.itemsize
                cases.append(AotCase(
                    "norm_rotate", f"{shape} {kind} {str(dtype).removeprefix('torch.')}", norm_rotate_kernel, signature,
                    constexprs, num_warps=warps, num_stages=3, bytes_moved=moved, flops=6 * rows * width,
                    wide_loads=True, options=OPTIONS,
                ))  # fmt: skip
    return cases
