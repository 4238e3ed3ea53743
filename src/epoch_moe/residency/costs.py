"""Load a missing expert, or compute it where it lies? Measured speeds decide.

An expert that is not in fast memory can be moved there and computed there, or its rows can be computed by the host
beside it. Moving it also serves the forwards that use it next, so its cost is spread over the uses that are predicted.
On a CPU alone fast memory is main memory, and what is missing lies in a file: it has to be read either way, so reading
it to a place where it can stay costs nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from epoch_moe.residency.config import Miss
from epoch_moe.residency.sources import Buffer, ExpertSource, FileSource

_SAMPLE_BYTES = 32_000_000
_REPEATS = 3

MOST_REUSE = 100.0
"""Reuse beyond this is not told apart: moving an expert has long paid off by then."""


@dataclass(frozen=True)
class Costs:
    """Speeds of this machine, and what one expert asks of them.

    Attributes:
        expert_bytes: of one expert in fast memory.
        flops_per_row: one row through one expert.
        disk: bytes per second from the file, its cache emptied before; None where no expert lies in a file.
        link: bytes per second from main memory to the device; None where they are the same.
        host_bytes: bytes of weights per second that the host's products read.
        host_flops: FLOP per second of the host's products on many rows.
    """

    expert_bytes: int
    flops_per_row: int
    disk: float | None
    link: float | None
    host_bytes: float
    host_flops: float

    def host_seconds(self, rows: int) -> float:
        """One expert on so many rows, computed by the host."""
        return max(self.expert_bytes / self.host_bytes, rows * self.flops_per_row / self.host_flops)

    def move_seconds(self) -> float:
        """One expert from main memory to the device; 0 where they are the same."""
        return 0.0 if self.link is None else self.expert_bytes / self.link

    def worth_loading(self, rows: int, reuse: float, miss: Miss = "auto") -> bool:
        """Whether a missing expert is moved into a slot, rather than computed where it lies.

        Args:
            rows: that need it now.
            reuse: predicted uses after this one, at least 0.
            miss: `ResidencyConfig.miss`.
        """
        if miss != "auto":
            return miss == "load"
        return self.move_seconds() / (1.0 + max(reuse, 0.0)) <= self.host_seconds(rows)

    def explain(self, miss: Miss = "auto") -> str:
        """The rule with its numbers, in words."""
        disk = "" if self.disk is None else f"; a file gives {self.disk / 1e9:.2f} GB/s"
        if miss != "auto":
            return f"a missing expert is always {'loaded' if miss == 'load' else 'computed where it lies'}{disk}"
        if self.link is None:
            return (
                "a missing expert is read from its file either way, and kept where the policy finds it worth a place"
                f"{disk}; one expert is {self.expert_bytes / 1e6:.2f} MB"
            )
        one, many = self.host_seconds(1), self.host_seconds(32)
        return (
            f"moving an expert ({self.expert_bytes / 1e6:.2f} MB) to the device takes "
            f"{self.move_seconds() * 1e3:.2f} ms at {self.link / 1e9:.1f} GB/s, spread over its predicted uses; the "
            f"host computes it in {one * 1e3:.2f} ms for one row and {many * 1e3:.2f} ms for 32 "
            f"({self.host_flops / 1e9:.0f} GFLOP/s, {self.host_bytes / 1e9:.1f} GB/s of weights){disk}. It is loaded "
            "where its share of the move is cheaper"
        )


def measure_costs(source: ExpertSource, num_experts: int, buffer: Buffer, device: torch.device) -> Costs:
    """Measure this machine with one layer's experts; takes some tens of milliseconds.

    Args:
        source: of the layer's ``num_experts`` experts.
        buffer: for one expert in the model's dtype; overwritten.
        device: the compute device.
    """
    gate_up_2FH, down_HF = buffer
    hidden, inner = down_HF.shape
    expert_bytes = sum(t.numel() * t.element_size() for t in buffer)
    disk = None
    if isinstance(source, FileSource):
        count = max(1, min(num_experts, 8, _SAMPLE_BYTES // expert_bytes))
        wanted = range(0, num_experts, num_experts // count)[:count]
        for expert in wanted:
            for part in source.parts_E[expert]:
                part.file.forget(part.start, part.size)
        start = time.perf_counter()
        read = sum(source.read(expert, *buffer) for expert in wanted)
        disk = read / max(time.perf_counter() - start, 1e-9)
    else:
        source.read(0, *buffer)
    link = None
    if device.type != "cpu":
        there = [torch.empty_like(t, device=device) for t in buffer]
        seconds = _best(lambda: [a.copy_(b) for a, b in zip(there, buffer, strict=True)], device)
        link = expert_bytes / seconds

    def product(rows: int) -> float:
        x_RH = torch.ones(rows, hidden, dtype=gate_up_2FH.dtype)

        def compute() -> Tensor:
            gate_RF, up_RF = F.linear(x_RH, gate_up_2FH).split(inner, dim=-1)
            return F.linear(F.silu(gate_RF) * up_RF, down_HF)

        return _best(compute, torch.device("cpu"))

    flops_per_row = 6 * hidden * inner
    with torch.no_grad():
        return Costs(
            expert_bytes=expert_bytes,
            flops_per_row=flops_per_row,
            disk=disk,
            link=link,
            host_bytes=expert_bytes / product(1),
            host_flops=64 * flops_per_row / product(64),
        )


def _best(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)  # the first one warms up


def run_length(chance: float) -> float:
    """How often in a row something happens that has this chance each time, at most `MOST_REUSE`."""
    return min(chance / max(1.0 - chance, 1e-9), MOST_REUSE)
