"""Compaction, worklist and experts one after the other: fake CUDA tensors pass, compiled code gives the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from epoch_moe.experts.run import run_experts, worklist_for
from epoch_moe.experts.views import ExpertViews
from epoch_moe.kernels.compaction import compact
from epoch_moe.kernels.grouped_mlp import grouped_mlp
from epoch_moe.kernels.tuning import GemmConfig, GroupedMlpConfig, grouped_mlp_config_for
from epoch_moe.kernels.worklist import device_worklist

SMALL = GemmConfig(16, 16, 4, 1, False, 1)


def fresh_pairs(
    x_TH: Tensor,
    mask_T: Tensor,
    ids_RK: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    config: GroupedMlpConfig,
    look: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs of the pairs of the masked rows, and where each pair lies."""
    rows_R, _, count = compact(mask_T, ids_RK.shape[0])
    if look:
        count.item()
    lists = device_worklist(ids_RK, weights[0].shape[0], config.block_m, count)
    return grouped_mlp(x_TH, rows_R, lists, *weights, ids_RK.shape[1], config), lists.rank_RK


def inputs(device: str, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    x_TH = torch.randn(num_rows, 24, device=device, dtype=dtype)
    mask_T = torch.rand(num_rows, device=device) < 0.5
    ids_RK = torch.rand(num_rows, 5, device=device).topk(2).indices
    shapes = ((5, 20, 24), (5, 20, 24), (5, 24, 20))
    return x_TH, mask_T, ids_RK, tuple(torch.randn(shape, device=device, dtype=dtype) / 5 for shape in shapes)


def test_fake_cuda_tensors_need_no_sync() -> None:
    with FakeTensorMode():
        x_TH, mask_T, ids_RK, weights = inputs("cuda", 40, torch.bfloat16)
        config = grouped_mlp_config_for(x_TH, weights, 16)
        pairs_PH, rank_RK = fresh_pairs(x_TH, mask_T, ids_RK, weights, config)
        assert pairs_PH.shape == (80, 24) and pairs_PH.dtype == torch.bfloat16 and pairs_PH.device.type == "cuda"
        assert rank_RK.shape == (40, 2) and rank_RK.dtype == torch.int32
        with pytest.raises(DataDependentOutputException):
            fresh_pairs(x_TH, mask_T, ids_RK, weights, config, look=True)


def test_compiled_without_a_graph_break() -> None:
    config = GroupedMlpConfig(16, SMALL, SMALL)
    compiled = torch.compile(fresh_pairs, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_rows in (9, 14):
        x_TH, mask_T, ids_RK, weights = inputs("cpu", num_rows, torch.float32)
        pairs_PH, rank_RK = fresh_pairs(x_TH, mask_T, ids_RK, weights, config)
        again_PH, again_RK = compiled(x_TH, mask_T, ids_RK, weights, config)
        total = 2 * int(mask_T.sum())
        assert torch.equal(rank_RK, again_RK) and int((rank_RK >= 0).sum()) == total > 0
        assert torch.equal(pairs_PH[:total], again_PH[:total])


def test_rows_are_those_of_the_mask() -> None:
    """Each pair's output is that of its row alone."""
    config = GroupedMlpConfig(16, SMALL, SMALL)
    x_TH, mask_T, ids_RK, (gate_EFH, up_EFH, down_EHF) = inputs("cpu", 11, torch.float32)
    pairs_PH, rank_RK = fresh_pairs(x_TH, mask_T, ids_RK, (gate_EFH, up_EFH, down_EHF), config)
    for packed, row in enumerate(mask_T.nonzero().flatten().tolist()):
        for slot, expert in enumerate(ids_RK[packed].tolist()):
            hidden_F = torch.nn.functional.silu(gate_EFH[expert] @ x_TH[row]) * (up_EFH[expert] @ x_TH[row])
            torch.testing.assert_close(pairs_PH[rank_RK[packed, slot]], down_EHF[expert] @ hidden_F)


def test_a_view_of_wider_rows_gets_the_tiles_of_contiguous_ones() -> None:
    torch.manual_seed(0)
    wide_RH = torch.randn(100, 17)
    x_RH, ids_RK, weights_RK = wide_RH[:, :16], torch.arange(100).unsqueeze(1) % 2, torch.rand(100, 1)
    stacked = ExpertViews.fused(torch.randn(2, 32, 16) / 4, torch.randn(2, 16, 16) / 4)
    lists = worklist_for("triton", x_RH, ids_RK, stacked)
    found_RH = run_experts(x_RH, ids_RK, weights_RK, stacked, "triton", lists)
    torch.testing.assert_close(found_RH, run_experts(x_RH, ids_RK, weights_RK, stacked, "reference"))
