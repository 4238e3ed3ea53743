"""What a layer's forward computed, added to running totals on the device in one launch.

Shape suffixes: E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epoch_moe.checks import tensor
from epoch_moe.kernels.launch import require_triton


@triton.jit
def tally_kernel(counts_ptr, rows_ptr, pairs_ptr, active_ptr, total_ptr, E, E_P: tl.constexpr):
    """One program: pairs, experts that have one, and rows (where they are on the device)."""
    expert_E = tl.arange(0, E_P)
    count_E = tl.load(counts_ptr + expert_E, mask=expert_E < E, other=0).to(tl.int64)
    tl.store(pairs_ptr, tl.load(pairs_ptr) + tl.sum(count_E, axis=0))
    tl.store(active_ptr, tl.load(active_ptr) + tl.sum((count_E > 0).to(tl.int64), axis=0))
    if rows_ptr is not None:
        tl.store(total_ptr, tl.load(total_ptr) + tl.load(rows_ptr).to(tl.int64))


@torch.library.custom_op("epoch_moe::tally", mutates_args=("pairs", "active", "total"))
def tally(counts_E: Tensor, rows: Tensor | None, pairs: Tensor, active: Tensor, total: Tensor) -> None:
    """Add one layer's forward to its totals.

    Args:
        counts_E: pairs of each expert, int64 or int32.
        rows: int32 or int64 ``[1]``, rows that were computed; None: the host counts them.
        pairs, active, total: int64 of one element each: pairs, experts with at least one, rows.

    Raises:
        ValueError: a shape or dtype that does not fit, or a device without Triton.
    """
    require_triton(counts_E.device)
    tensor("counts_E", counts_E, (torch.int64, torch.int32), ("experts",))
    for name, sum_ in (("pairs", pairs), ("active", active), ("total", total)):
        if sum_.numel() != 1 or sum_.dtype != torch.int64:
            raise ValueError(f"{name} is {sum_.dtype} {list(sum_.shape)}: expected torch.int64 of one element")
    with torch.cuda.device_of(counts_E):
        tally_kernel[(1,)](
            counts_E.contiguous(), rows, pairs, active, total, counts_E.shape[0],
            E_P=triton.next_power_of_2(max(counts_E.shape[0], 1)), num_warps=1,
        )  # fmt: skip


@tally.register_fake
def _(*tensors: Tensor) -> None:
    """Nothing is returned: totals that are there are written."""
