"""Ahead-of-time cases of the worklist: `epoch_moe.kernels.worklist`."""

from __future__ import annotations

import torch
from aot.compiler import AotCase, pointer

from epoch_moe.kernels.worklist import (
    PART,
    SCAN_BLOCKS,
    SCAN_EXPERTS,
    _block_e,
    _count_kernel,
    _place_kernel,
    _scan_kernel,
    _shape,
)
from epoch_moe.worklist import max_tiles


def aot_cases() -> list[AotCase]:
    """One block of pairs, and many."""
    ids, count = {"ids_ptr": pointer(torch.int64)}, {"count_ptr": pointer(torch.int32)}
    blocks_BE, counts_E = {"blocks_ptr": pointer(torch.int32)}, {"counts_ptr": pointer(torch.int64)}
    outputs = ("pair_ptr", "rank_ptr", "begins_ptr", "tile_expert_ptr", "tile_row_ptr", "num_tiles_ptr")
    cases = []
    for num_rows, top_k, num_experts, block_m in ((32, 8, 256, 16), (16384, 8, 256, 128), (16384, 8, 64, 128)):
        num_pairs = num_rows * top_k
        shape = f"{num_rows} rows, {num_experts} experts"
        blocks, block, tiles, _ = _shape(num_pairs, num_experts, block_m)
        place: dict[str, int | None] = {
            "TOP_K": top_k,
            "BLOCK_M": block_m,
            "BLOCK_P": block,
            "BLOCK_E": _block_e(num_experts),
            "BLOCK_N": tiles,
            "PART": PART,
        }
        place_signature = ids | count | counts_E | {name: pointer(torch.int32) for name in outputs}
        place_signature |= {"num_pairs": "i32", "num_experts": "i32", "most_tiles": "i32"}
        schedule_bytes = 8 * max_tiles(num_pairs, num_experts, block_m) + 12 * num_experts
        if blocks == 1:
            place["blocks_ptr"] = None
        else:
            place_signature |= blocks_BE
            cases += [
                AotCase(
                    kernel="worklist_count",
                    shape=shape,
                    function=_count_kernel,
                    signature=ids | count | blocks_BE | {"num_pairs": "i32", "num_experts": "i32"},
                    constexprs={name: place[name] for name in ("TOP_K", "BLOCK_P", "BLOCK_E")},
                    num_warps=4,
                    num_stages=3,
                    bytes_moved=8 * num_pairs + 4 * blocks * num_experts,
                ),
                AotCase(
                    kernel="worklist_scan",
                    shape=shape,
                    function=_scan_kernel,
                    signature=blocks_BE | counts_E | {"num_blocks": "i32", "num_experts": "i32"},
                    constexprs={"BLOCK_B": SCAN_BLOCKS, "BLOCK_E": SCAN_EXPERTS},
                    num_warps=4,
                    num_stages=3,
                    bytes_moved=8 * blocks * num_experts + 8 * num_experts,
                ),
            ]
        cases.append(
            AotCase(
                kernel="worklist_place",
                shape=shape,
                function=_place_kernel,
                signature=place_signature,
                constexprs=place,
                num_warps=8,
                num_stages=1,
                bytes_moved=(8 + 4 + 4) * num_pairs + schedule_bytes + (4 * blocks * num_experts if blocks > 1 else 0),
            )
        )
    return cases
