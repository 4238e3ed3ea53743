"""Load or compute: the rule, and the constants that it is fed with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from epoch_moe.residency.costs import Costs, measure_costs
from epoch_moe.residency.sources import Buffers, FileSource, HostSource, TensorFile, find_parts

# 6 MB over 20 GB/s: 0.3 ms. The host reads the weights in 0.3 ms too, and computes 0.03 ms per row.
GPU = Costs(
    expert_bytes=6_000_000, flops_per_row=6_000_000, disk=2e9, link=20e9, host_bytes=20e9, host_flops=200e9
)


def test_few_rows_stay_with_the_host_unless_the_expert_comes_back() -> None:
    fast_host = Costs(
        expert_bytes=6_000_000, flops_per_row=6_000_000, disk=None, link=20e9, host_bytes=60e9, host_flops=200e9
    )
    assert not fast_host.worth_loading(1, 0.0)  # 0.1 ms against 0.3
    assert not fast_host.worth_loading(1, 1.0)  # 0.15
    assert fast_host.worth_loading(1, 2.0)  # 0.1
    assert not fast_host.worth_loading(9, 0.0)  # 0.27 ms of arithmetic
    assert fast_host.worth_loading(10, 0.0)
    assert GPU.worth_loading(1, 0.0)


def test_the_user_may_decide() -> None:
    assert not GPU.worth_loading(1, 0.0, "compute")
    assert not GPU.worth_loading(10_000, 9.0, "compute")
    assert Costs(1, 1, None, 1.0, 1e12, 1e12).worth_loading(1, 0.0, "load")


def test_without_a_link_loading_costs_nothing() -> None:
    cpu = Costs(expert_bytes=6_000_000, flops_per_row=6_000_000, disk=1e9, link=None, host_bytes=1e12, host_flops=1e15)
    assert cpu.worth_loading(1, 0.0)
    assert "1.00 GB/s" in cpu.explain() and "6.00 MB" in cpu.explain()


def test_the_explanation_has_the_numbers() -> None:
    text = GPU.explain()
    for part in ("6.00 MB", "0.30 ms at 20.0 GB/s", "0.96 ms for 32", "200 GFLOP/s", "2.00 GB/s"):
        assert part in text
    assert "always computed where it lies" in GPU.explain("compute")


def test_speeds_are_measured(tmp_path: Path) -> None:
    num_experts, inner, hidden = 4, 64, 128
    gate_up, down = torch.randn(num_experts, 2 * inner, hidden), torch.randn(num_experts, hidden, inner)
    save_file({"m.mlp.w1": gate_up, "m.mlp.w2": down}, tmp_path / "a.safetensors")
    file = TensorFile(tmp_path / "a.safetensors")
    found = find_parts(file.headers, {"a.safetensors": file}, "m.mlp", range(num_experts), inner, hidden)
    assert found is not None
    buffers = torch.empty(2 * inner, hidden), torch.empty(hidden, inner)
    costs = measure_costs(FileSource(*found, Buffers(inner, hidden)), num_experts, buffers, torch.device("cpu"))
    assert costs.expert_bytes == 3 * inner * hidden * 4 and costs.flops_per_row == 6 * inner * hidden
    assert costs.link is None and costs.disk is not None
    for speed in (costs.disk, costs.host_bytes, costs.host_flops):
        assert 1e5 < speed < 1e15
    in_memory = measure_costs(HostSource(gate_up, down), num_experts, buffers, torch.device("cpu"))
    assert in_memory.disk is None
    assert in_memory.host_seconds(1_000) == pytest.approx(
        max(costs.expert_bytes / in_memory.host_bytes, 1_000 * costs.flops_per_row / in_memory.host_flops)
    )
