"""Ahead-of-time cases of combine and restore: `epoch_moe.kernels.combine_restore`."""

from __future__ import annotations

import torch
from aot.compiler import AotCase, pointer

from epoch_moe.kernels.combine_restore import OPTIONS, _tile, combine_kernel, restore_kernel

# Hidden size and K of the released models (LLaDA-MoE has those of LLaDA2.0-mini), and sizes that nothing divides.
AOT_SHAPES = {"llada2-mini": (2048, 8), "llada2-flash": (4096, 8), "odd": (1111, 5)}
# Sequences of 32 rows in the middle of a block: 16 live and 4 new rows go through the experts, 12 are reused.
AOT_BATCHES, AOT_ROWS, AOT_FRESH, AOT_STORED = (1, 512), 32, 20, 4


def aot_cases() -> list[AotCase]:
    """Both kernels at the released models' shapes, for a small and a large batch."""
    cases = []
    for shape, (hidden, top_k) in AOT_SHAPES.items():
        odd = frozenset({"pairs_stride", "y_stride", "cache_stride", "out_stride", "H"} if hidden % 16 else ())
        block, warps = _tile(hidden)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)[: 3 if shape == "llada2-mini" else 1]:
            element, size = pointer(dtype), dtype.itemsize
            for batch in AOT_BATCHES if dtype == torch.bfloat16 else AOT_BATCHES[:1]:
                rows, fresh, stored = (batch * part for part in (AOT_ROWS, AOT_FRESH, AOT_STORED))
                label = f"{shape} {str(dtype).removeprefix('torch.')} {rows} rows"
                row_bytes = hidden * size
                slots = {"rank_ptr": "*i32", "weights_ptr": "*fp32"}
                # What a sum reads: its pairs, and rank and weight of each slot.
                sums = fresh * top_k * (row_bytes + 8)
                signature: dict[str, str] = {"pairs_ptr": element, **slots, "count_ptr": "*i32", "out_ptr": element}
                signature |= {"pairs_stride": "i32", "H": "i32"}
                cases.append(AotCase(
                    "combine", label, combine_kernel, signature, {"K": top_k, "BLOCK_H": block},
                    num_warps=warps, num_stages=3, bytes_moved=sums + fresh * row_bytes,
                    flops=2 * fresh * top_k * hidden, not_divisible=odd & set(signature), wide_loads=not odd,
                    options=OPTIONS,
                ))  # fmt: skip
                # Sources and entries, reused rows in, the dense shard out, entries out.
                restored = rows * 8 + fresh * 8 + (rows - fresh + rows + stored) * row_bytes
                signature = {"y_ptr": element, "source_ptr": "*i64", "store_ptr": "*i64"}
                signature |= {"cache_ptr": element, "out_ptr": element}
                signature |= {name: "i32" for name in ("y_stride", "cache_stride", "out_stride", "H")}
                for kernel, combined, moved in (
                    ("combine_restore", True, sums + restored),
                    ("restore", False, fresh * row_bytes + restored),
                ):
                    cases.append(AotCase(
                        kernel, label, restore_kernel, signature | (slots if combined else {}),
                        {"K": top_k if combined else 1, "BLOCK_H": block}
                        | ({} if combined else dict.fromkeys(slots)),
                        num_warps=warps, num_stages=3, bytes_moved=moved,
                        flops=2 * fresh * top_k * hidden if combined else 0, not_divisible=odd & set(signature),
                        wide_loads=not odd, options=OPTIONS,
                    ))  # fmt: skip
    return cases
