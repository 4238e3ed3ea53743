"""Explicit kernel configurations: one small table per kernel, by dtype, alignment and rows per expert.

There is no autotuning at run time: a plan knows its rows per expert, and a captured graph must not change under it.
`benchmarks/tune_kernels.py` searches on a GPU and prints the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal

import torch
from torch import Tensor

DtypeClass = Literal["half", "float"]


@dataclass(frozen=True)
class GemmConfig:
    """Tiles of one grouped product.

    Attributes:
        block_n: output columns per program (of the gate and of the up projection each).
        block_k: depth of one step.
        num_warps: warps per program.
        num_stages: depth of software pipelining.
        swap: the weights' rows are the tall side of the product, ``weights x rows^T``. Tensor cores of sm_90 take 64 of
            the tall side at least, and 8 or more of the other: few rows fit there.
        group_m: tiles of rows that go through the columns together, so that their weights are still in the L2 cache.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool
    group_m: int


@dataclass(frozen=True)
class GroupedMlpConfig:
    """Both products of the experts. They share the tile schedule of one worklist, so its ``block_m``."""

    block_m: int
    gate_up: GemmConfig
    down: GemmConfig

    def as_ints(self) -> list[int]:
        """For the op, whose arguments are plain; the inverse of `from_ints`."""
        return [self.block_m, *map(int, astuple(self.gate_up)), *map(int, astuple(self.down))]

    @staticmethod
    def from_ints(values: Sequence[int]) -> GroupedMlpConfig:
        """The inverse of `as_ints`."""
        gate_up, down = (
            GemmConfig(n, k, warps, stages, bool(swap), group)
            for n, k, warps, stages, swap, group in (values[1:7], values[7:13])
        )
        return GroupedMlpConfig(values[0], gate_up, down)

    def shared_bytes(self, element_size: int) -> int:
        """Shared memory that the operands of the larger product take."""
        gate_up = self.gate_up.num_stages * self.gate_up.block_k * (self.block_m + 2 * self.gate_up.block_n)
        down = self.down.num_stages * self.down.block_k * (self.block_m + self.down.block_n)
        return max(gate_up, down) * element_size


# (dtype class, sizes and strides multiples of 16): rows per expert up to which a configuration is used, in ascending
# order. Up to some 300 rows per expert an H100 reads weights for longer than it multiplies: small tiles of rows there,
# many programs along the columns, deep pipelines. The last entries are for products that keep the tensor cores busy.
GROUPED_MLP: Mapping[tuple[DtypeClass, bool], tuple[tuple[float, GroupedMlpConfig], ...]] = {
    ("half", True): (
        (16, GroupedMlpConfig(16, GemmConfig(64, 64, 4, 4, True, 1), GemmConfig(64, 128, 4, 4, True, 1))),
        (48, GroupedMlpConfig(32, GemmConfig(64, 64, 4, 4, True, 1), GemmConfig(64, 128, 4, 4, True, 1))),
        (160, GroupedMlpConfig(64, GemmConfig(64, 64, 4, 4, False, 1), GemmConfig(128, 64, 4, 4, False, 1))),
        (float("inf"), GroupedMlpConfig(128, GemmConfig(128, 64, 8, 3, False, 8), GemmConfig(256, 64, 8, 3, False, 8))),
    ),
    ("half", False): (
        (48, GroupedMlpConfig(16, GemmConfig(64, 32, 4, 2, False, 1), GemmConfig(64, 32, 4, 2, False, 1))),
        (float("inf"), GroupedMlpConfig(64, GemmConfig(64, 32, 8, 2, False, 8), GemmConfig(64, 32, 8, 2, False, 8))),
    ),
    ("float", True): (
        (48, GroupedMlpConfig(16, GemmConfig(32, 32, 4, 2, False, 1), GemmConfig(32, 32, 4, 2, False, 1))),
        (float("inf"), GroupedMlpConfig(64, GemmConfig(32, 32, 8, 2, False, 8), GemmConfig(64, 32, 8, 2, False, 8))),
    ),
    ("float", False): (
        (48, GroupedMlpConfig(16, GemmConfig(32, 32, 4, 2, False, 1), GemmConfig(32, 32, 4, 2, False, 1))),
        (float("inf"), GroupedMlpConfig(32, GemmConfig(32, 32, 4, 2, False, 8), GemmConfig(32, 32, 4, 2, False, 8))),
    ),
}

# In place of the last aligned half-precision entry where accumulators and operands share the registers of a thread: the
# matrix instructions of sm_90 take operands from shared memory, those before (and, here, those after) do not.
_GROUPED_MLP_MMA = GroupedMlpConfig(128, GemmConfig(64, 64, 8, 3, False, 8), GemmConfig(128, 64, 8, 3, False, 8))


def is_aligned(*tensors: Tensor) -> bool:
    """Whether every row of these begins at a multiple of 16 elements, so that it can be read 16 bytes at a time."""
    return all(size % 16 == 0 for tensor in tensors for size in (*tensor.stride()[:-1], tensor.shape[-1]))


def grouped_mlp_config(
    dtype: torch.dtype, rows_per_expert: float, aligned: bool, shared_limit: int = 163 * 1024, wgmma: bool = True
) -> GroupedMlpConfig:
    """The configuration for so many rows per expert.

    Args:
        dtype: of rows and weights.
        rows_per_expert: what the host knows: pairs (or their most) over the experts that have any.
        aligned: as `is_aligned` says.
        shared_limit: bytes of shared memory that a program may have; the default is that of sm_80, and no entry needs
            more. Consumer GPUs have 99 KB: pipelines are made shallower there.
        wgmma: whether the GPU has the warpgroup matrix instructions of sm_90.

    Raises:
        ValueError: for other dtypes, or less shared memory than any pipeline needs.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"dtype {dtype}: the kernels take bfloat16, float16 and float32")
    table = GROUPED_MLP["float" if dtype == torch.float32 else "half", aligned]
    config = next(config for limit, config in table if rows_per_expert <= limit)
    if not wgmma and config == GROUPED_MLP["half", True][-1][1]:
        config = _GROUPED_MLP_MMA
    while config.shared_bytes(dtype.itemsize) > shared_limit:
        stages = max(config.gate_up.num_stages, config.down.num_stages) - 1
        if stages < 1:
            raise ValueError(f"{shared_limit} bytes of shared memory are not enough for {config}")
        config = replace(
            config,
            gate_up=replace(config.gate_up, num_stages=min(config.gate_up.num_stages, stages)),
            down=replace(config.down, num_stages=min(config.down.num_stages, stages)),
        )
    return config


def grouped_mlp_config_for(x_TH: Tensor, weights: Sequence[Tensor], rows_per_expert: float) -> GroupedMlpConfig:
    """`grouped_mlp_config` for these rows and stacked weights, on the device where they are; no sync."""
    aligned = is_aligned(x_TH, *weights)
    if x_TH.device.type != "cuda" or not torch.cuda.is_available():  # fake tensors may be on a GPU that is not there
        return grouped_mlp_config(x_TH.dtype, rows_per_expert, aligned)
    gpu = torch.cuda.get_device_properties(x_TH.device)
    limit = getattr(gpu, "shared_memory_per_block_optin", gpu.shared_memory_per_block)
    return grouped_mlp_config(x_TH.dtype, rows_per_expert, aligned, int(limit), wgmma=gpu.major == 9)
