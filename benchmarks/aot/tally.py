"""Ahead-of-time cases of the running totals: `epoch_moe.kernels.tally`."""

from __future__ import annotations

from aot.compiler import AotCase

from epoch_moe.kernels.tally import tally_kernel


def aot_cases() -> list[AotCase]:
    """A layer of 256 experts, rows counted on the device."""
    sums = dict.fromkeys(("pairs_ptr", "active_ptr", "total_ptr"), "*i64")
    return [
        AotCase(
            "tally", "256 experts", tally_kernel, {"counts_ptr": "*i64", "rows_ptr": "*i32", **sums, "E": "i32"},
            {"E_P": 256}, num_warps=1, num_stages=3, bytes_moved=256 * 8 + 52,
        )
    ]  # fmt: skip
