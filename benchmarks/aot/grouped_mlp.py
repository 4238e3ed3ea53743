"""Ahead-of-time cases of the experts' products: `epoch_moe.kernels.grouped_mlp`."""

from __future__ import annotations

import torch
from aot.compiler import AotCase, pointer

from epoch_moe.kernels.grouped_mlp import _constexprs, _down_kernel, _gate_up_kernel
from epoch_moe.kernels.tuning import grouped_mlp_config
from epoch_moe.worklist import max_tiles

_MODELS = {"llada2-mini": (2048, 512, 256, 8), "llada2-flash": (4096, 1024, 256, 8), "llada-moe": (2048, 1024, 64, 8)}
_ROWS_PER_EXPERT = {"weight-bound": 8, "32 per expert": 32, "100 per expert": 100, "compute-bound": 512}


def aot_cases() -> list[AotCase]:
    """The released models in each regime; odd sizes, and the other dtypes."""
    cases = []
    for model, sizes in _MODELS.items():
        for regime, rows in _ROWS_PER_EXPERT.items():
            archs = (90,) if regime == "compute-bound" else (80, 90)
            cases += _cases(f"{model} bf16 {regime}", *sizes, rows, torch.bfloat16, archs)
    rows = _ROWS_PER_EXPERT["compute-bound"]
    cases += _cases("llada2-mini bf16 compute-bound, no wgmma", *_MODELS["llada2-mini"], rows, torch.bfloat16, (80,))
    for regime in ("weight-bound", "compute-bound"):
        rows = _ROWS_PER_EXPERT[regime]
        archs = (90,) if regime == "compute-bound" else (80, 90)
        cases += _cases(f"llada2-mini fp16 {regime}", *_MODELS["llada2-mini"], rows, torch.float16, archs)
        cases += _cases(f"llada2-mini fp32 {regime}", *_MODELS["llada2-mini"], rows, torch.float32)
        cases += _cases(f"prime sizes bf16 {regime}", 2039, 509, 61, 7, rows, torch.bfloat16)
    return cases


def _cases(
    shape: str,
    hidden: int,
    inner: int,
    num_experts: int,
    top_k: int,
    rows_per_expert: int,
    dtype: torch.dtype,
    archs: tuple[int, ...] = (80, 90),
) -> list[AotCase]:
    aligned = hidden % 16 == 0 and inner % 16 == 0
    config = grouped_mlp_config(dtype, rows_per_expert, aligned, wgmma=90 in archs)
    pairs = rows_per_expert * num_experts
    rows, tiles = pairs // top_k, max_tiles(pairs, num_experts, config.block_m)
    of_dtype, of_int = pointer(dtype), pointer(torch.int32)
    schedule = {"begins_ptr": of_int, "tile_expert_ptr": of_int, "tile_row_ptr": of_int}
    sizes = {"most_tiles": "i32", "hidden": "i32", "inner": "i32"}
    # Whether the number of tiles is a multiple of 16 depends on the capacity; the rest on the model.
    odd = {"most_tiles"} | (set() if aligned else {"hidden", "inner"})
    gate_up_strides = ("x_stride", "gate_stride_e", "gate_stride_f", "up_stride_e", "up_stride_f")
    down_strides = ("down_stride_e", "down_stride_h")
    gate_up = AotCase(
        kernel="grouped_mlp_gate_up",
        shape=shape,
        function=_gate_up_kernel,
        signature={"x_ptr": of_dtype, "rows_ptr": pointer(torch.int64), "pair_ptr": of_int}
        | schedule
        | {"gate_ptr": of_dtype, "up_ptr": of_dtype, "act_ptr": of_dtype}
        | sizes
        | dict.fromkeys(gate_up_strides, "i32"),
        constexprs={"TOP_K": top_k, **_constexprs(config.gate_up, config.block_m, inner, hidden)},
        num_warps=config.gate_up.num_warps,
        num_stages=config.gate_up.num_stages,
        bytes_moved=dtype.itemsize * (2 * num_experts * inner * hidden + rows * hidden + pairs * inner)
        + 4 * pairs
        + 8 * (rows + tiles),
        flops=4 * pairs * hidden * inner,
        not_divisible=frozenset(odd | (set() if aligned else set(gate_up_strides))),
        tensor_cores=dtype != torch.float32,
        wide_loads=aligned,
        archs=archs,
    )
    down = AotCase(
        kernel="grouped_mlp_down",
        shape=shape,
        function=_down_kernel,
        signature={"act_ptr": of_dtype}
        | schedule
        | {"down_ptr": of_dtype, "pairs_ptr": of_dtype}
        | sizes
        | dict.fromkeys(down_strides, "i32"),
        constexprs=_constexprs(config.down, config.block_m, hidden, inner),
        num_warps=config.down.num_warps,
        num_stages=config.down.num_stages,
        bytes_moved=dtype.itemsize * (num_experts * inner * hidden + pairs * (inner + hidden)) + 8 * tiles,
        flops=2 * pairs * hidden * inner,
        not_divisible=frozenset(odd | (set() if aligned else set(down_strides))),
        tensor_cores=dtype != torch.float32,
        wide_loads=aligned,
        archs=archs,
    )
    return [gate_up, down]
