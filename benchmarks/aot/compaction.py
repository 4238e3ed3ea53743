"""Ahead-of-time cases of compaction: `epoch_moe.kernels.compaction`."""

from __future__ import annotations

import torch
import triton
from aot.compiler import AotCase, pointer

from epoch_moe.kernels.compaction import _compact_kernel, _count_kernel, _shape


def aot_cases() -> list[AotCase]:
    """One block of rows, and many."""
    cases = []
    for num_rows in (1024, 32768):
        block, blocks = _shape(num_rows, num_rows)
        sizes = {"num_rows": "i32", "capacity": "i32"}
        places = {"rows_ptr": pointer(torch.int64), "rank_ptr": pointer(torch.int64), "count_ptr": pointer(torch.int32)}
        signature = {"mask_ptr": pointer(torch.bool), **places, **sizes}
        constexprs = {"BLOCK_T": block, "BLOCK_N": max(triton.next_power_of_2(blocks), 2)}
        if blocks == 1:
            constexprs |= {"partial_ptr": None, "num_blocks": 1}
        else:
            signature |= {"partial_ptr": pointer(torch.int32), "num_blocks": "i32"}
            cases.append(
                AotCase(
                    kernel="compact_count",
                    shape=f"{num_rows} rows",
                    function=_count_kernel,
                    signature={"mask_ptr": pointer(torch.bool), "partial_ptr": pointer(torch.int32), "num_rows": "i32"},
                    constexprs={"BLOCK_T": block},
                    num_warps=4,
                    num_stages=3,
                    bytes_moved=num_rows + 4 * blocks,
                )
            )
        cases.append(
            AotCase(
                kernel="compact",
                shape=f"{num_rows} rows",
                function=_compact_kernel,
                signature=signature,
                constexprs=constexprs,
                num_warps=4,
                num_stages=3,
                bytes_moved=(1 + 8 + 8) * num_rows,
            )
        )
    return cases
