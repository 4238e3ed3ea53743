"""Experts over a worklist, against plain torch and against the torch backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from aot.compiler import SHARED_LIMIT, compile_elsewhere
from helpers import assert_as_accurate
from torch import Tensor

from epoch_moe.experts.run import run_experts
from epoch_moe.experts.views import ExpertViews
from epoch_moe.kernels import tuning
from epoch_moe.kernels.grouped_mlp import grouped_mlp
from epoch_moe.kernels.grouped_mlp_reference import grouped_mlp_reference
from epoch_moe.kernels.tuning import GemmConfig, GroupedMlpConfig, grouped_mlp_config
from epoch_moe.kernels.worklist_reference import worklist_reference
from epoch_moe.worklist import Worklist

NAN = float("nan")
PLAIN = GroupedMlpConfig(16, GemmConfig(32, 32, 4, 2, False, 1), GemmConfig(32, 32, 4, 2, False, 1))
SWAPPED = GroupedMlpConfig(16, GemmConfig(32, 32, 4, 2, True, 1), GemmConfig(64, 16, 4, 2, True, 1))
GROUPED = GroupedMlpConfig(32, GemmConfig(16, 32, 4, 2, False, 3), GemmConfig(32, 16, 4, 2, False, 3))


class Layer:
    """Random experts and rows; the gate and up projections are views of one stacked tensor."""

    def __init__(self, num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        scale = hidden**-0.5
        self.gate_up_E2FH = (torch.randn(num_experts, 2 * inner, hidden) * scale).to(dtype)
        self.gate_EFH, self.up_EFH = self.gate_up_E2FH.split(inner, dim=1)
        self.down_EHF = (torch.randn(num_experts, hidden, inner) * inner**-0.5).to(dtype)

    def run(
        self,
        x_TH: Tensor,
        rows_R: Tensor | None,
        lists: Worklist,
        top_k: int,
        config: GroupedMlpConfig,
    ) -> Tensor:
        return grouped_mlp(x_TH, rows_R, lists, self.gate_EFH, self.up_EFH, self.down_EHF, top_k, config)

    def reference(self, x_TH: Tensor, rows_R: Tensor | None, lists: Worklist, top_k: int) -> Tensor:
        return grouped_mlp_reference(x_TH, rows_R, lists, self.gate_EFH, self.up_EFH, self.down_EHF, top_k)


def random_ids(num_rows: int, top_k: int, num_experts: int, empty: float = 0.0) -> Tensor:
    ids_RK = torch.rand(num_rows, num_experts).argsort(dim=1)[:, :top_k].clone()
    return ids_RK.masked_fill_(torch.rand(num_rows, top_k) < empty, -1)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """To the order of summation: fp32 sums of values of about 1, then one rounding of fp16 on either side."""
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("config", [PLAIN, SWAPPED, GROUPED], ids=["plain", "swapped", "grouped"])
@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts", "hidden", "inner", "dtype"),
    [
        (0, 2, 3, 16, 16, torch.float32), (1, 1, 1, 37, 23, torch.float32), (9, 1, 5, 64, 32, torch.float32),
        (20, 3, 3, 41, 19, torch.float32), (20, 3, 3, 41, 19, torch.float16),
    ],
)  # fmt: skip
def test_grouped_mlp(
    num_rows: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    inner: int,
    config: GroupedMlpConfig,
    dtype: torch.dtype,
    poisoned_empty: None,
) -> None:
    layer = Layer(num_experts, hidden, inner, dtype)
    ids_RK = random_ids(num_rows, top_k, num_experts, empty=0.2)
    lists = worklist_reference(ids_RK, num_experts, config.block_m)
    x_TH = torch.randn(num_rows, hidden).to(dtype)
    total = int(lists.counts_E.sum())
    actual = layer.run(x_TH, None, lists, top_k, config)
    assert actual.dtype == dtype and actual.shape == (ids_RK.numel(), hidden)
    assert_close(actual[:total], layer.reference(x_TH, None, lists, top_k)[:total])
    assert actual[total:].isnan().all(), "positions behind the last segment were written"


@pytest.mark.parametrize("config", [PLAIN, SWAPPED], ids=["plain", "swapped"])
def test_gathered_rows_with_padding(config: GroupedMlpConfig, poisoned_empty: None) -> None:
    """Rows that no pair names are NaN, as are buffers and what lies between rows: none of it gets through."""
    num_rows, top_k, num_experts, hidden, inner, count = 30, 2, 5, 48, 21, 11
    layer = Layer(num_experts, hidden, inner, torch.float32)
    rows_R = torch.cat([torch.randperm(num_rows)[:count].sort().values, torch.zeros(5, dtype=torch.int64)])
    x_TH = torch.full((num_rows, hidden + 3), NAN)[:, :hidden]
    x_TH[rows_R[:count]] = torch.randn(count, hidden)
    if 0 not in rows_R[:count].tolist():
        assert x_TH[0].isnan().all()
    limit = torch.tensor([count], dtype=torch.int32)
    ids_RK = random_ids(count + 5, top_k, num_experts)
    lists = worklist_reference(ids_RK, num_experts, config.block_m, limit)
    actual = layer.run(x_TH, rows_R, lists, top_k, config)
    assert_close(actual[: count * top_k], layer.reference(x_TH, rows_R, lists, top_k)[: count * top_k])
    assert actual[count * top_k :].isnan().all()


@pytest.mark.parametrize("config", [PLAIN, SWAPPED, GROUPED], ids=["plain", "swapped", "grouped"])
def test_all_pairs_to_one_expert(config: GroupedMlpConfig) -> None:
    """Several tiles of one expert; the weights of all others are NaN."""
    layer = Layer(4, 32, 40, torch.float32)
    for weight in (layer.gate_up_E2FH, layer.down_EHF):
        weight[[0, 1, 3]] = NAN
    lists = worklist_reference(torch.full((50, 1), 2), 4, config.block_m)
    x_TH = torch.randn(50, 32)
    assert_close(layer.run(x_TH, None, lists, 1, config), layer.reference(x_TH, None, lists, 1))


def test_the_torch_backend_agrees() -> None:
    """The same layer through `run_experts`, whose activation is rounded twice more in half precision; fp32 here."""
    layer = Layer(7, 48, 32, torch.float32)
    ids_RK, x_RH = random_ids(19, 3, 7, empty=0.3), torch.randn(19, 48)
    weights_RK = torch.rand(19, 3)
    lists = worklist_reference(ids_RK, 7, 16)
    pairs_PH = layer.run(x_RH, None, lists, 3, PLAIN)
    gathered_RKH = pairs_PH[lists.rank_RK.clamp(min=0).long()].masked_fill((lists.rank_RK < 0)[..., None], 0.0)
    views = ExpertViews("fused", (layer.gate_up_E2FH,), layer.down_EHF)
    expected = run_experts(x_RH, ids_RK, weights_RK, views, "reference")
    assert_close((gathered_RKH * weights_RK[..., None]).sum(1), expected)


def test_separate_and_strided_weights() -> None:
    """Views with gaps between rows and between experts."""
    layer = Layer(3, 24, 20, torch.float32)
    lists, x_TH = worklist_reference(random_ids(10, 2, 3), 3, 16), torch.randn(10, 24)
    expected = layer.run(x_TH, None, lists, 2, PLAIN)
    layer.gate_EFH, layer.up_EFH = layer.gate_EFH.clone(), layer.up_EFH.clone()
    wide = torch.full((6, 24, 33), NAN)
    wide[::2, :, 5:25] = layer.down_EHF
    layer.down_EHF = wide[::2, :, 5:25]
    assert torch.equal(layer.run(x_TH, None, lists, 2, PLAIN), expected)


@pytest.mark.parametrize("rows_per_expert", [8, 30, 100, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_configurations_of_the_table(rows_per_expert: int, dtype: torch.dtype) -> None:
    """Each entry computes; sizes that its tiles do not divide, or do."""
    layer = Layer(2, 80, 48, dtype)
    lists_ids, x_TH = random_ids(40, 1, 2), torch.randn(40, 80).to(dtype)
    for aligned in (True, False):
        config = grouped_mlp_config(dtype, rows_per_expert, aligned)
        lists = worklist_reference(lists_ids, 2, config.block_m)
        assert_close(layer.run(x_TH, None, lists, 1, config), layer.reference(x_TH, None, lists, 1))


@pytest.mark.parametrize("config", [PLAIN, SWAPPED], ids=["plain", "swapped"])
def test_a_row_does_not_depend_on_its_batch(config: GroupedMlpConfig) -> None:
    """Alone and among others: bit for bit in a second run, and as near to the exact row as the kernel gets.

    Not bit for bit on a CPU: the interpreter's products are the CPU library's, whose order of summation depends on the
    size of a tile.
    """
    layer = Layer(3, 40, 24, torch.float32)
    ids_RK, x_TH = random_ids(25, 1, 3), torch.randn(25, 40)
    gate_EFH, up_EFH, down_EHF = layer.gate_EFH.double(), layer.up_EFH.double(), layer.down_EHF.double()
    lists = worklist_reference(ids_RK, 3, config.block_m)
    out_PH = layer.run(x_TH, None, lists, 1, config)
    assert torch.equal(out_PH, layer.run(x_TH, None, lists, 1, config))
    for row in (0, 13):
        alone = layer.run(x_TH[row : row + 1], None, worklist_reference(ids_RK[row : row + 1], 3, 16), 1, config)
        expert, x_H = int(ids_RK[row, 0]), x_TH[row].double()
        exact_H = down_EHF[expert] @ (torch.nn.functional.silu(gate_EFH[expert] @ x_H) * (up_EFH[expert] @ x_H))
        assert_as_accurate(alone[0], out_PH[lists.rank_RK[row, 0]], exact_H)


def test_refusals() -> None:
    layer, x_TH = Layer(3, 24, 20, torch.float32), torch.randn(10, 24)
    lists = worklist_reference(random_ids(10, 2, 3), 3, 16)
    with pytest.raises(ValueError, match="tiles of 16, the configuration of 32"):
        layer.run(x_TH, None, lists, 2, GROUPED)
    with pytest.raises(ValueError, match="of 4 experts, the weights of 3"):
        layer.run(x_TH, None, worklist_reference(random_ids(10, 2, 4), 4, 16), 2, PLAIN)
    with pytest.raises(ValueError, match="of 10 rows, x_TH has 9"):
        layer.run(x_TH[:9], None, lists, 2, PLAIN)
    with pytest.raises(ValueError, match=r"rows_R is torch.int64 \(9,\) .*: expected torch.int64 \[10\]"):
        layer.run(x_TH, torch.arange(9), lists, 2, PLAIN)
    with pytest.raises(ValueError, match=r"x_TH is torch.float32 \(10, 23\) .*: expected torch.float32 \[rows, 24\]"):
        layer.run(x_TH[:, :23], None, lists, 2, PLAIN)
    with pytest.raises(ValueError, match=r"gate_EFH is torch\.float32 .*: expected torch\.float16"):
        layer.run(x_TH.half(), None, lists, 2, PLAIN)
    layer.down_EHF = layer.down_EHF.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match=r"down_EHF has strides .* last dimension must be contiguous"):
        layer.run(x_TH, None, lists, 2, PLAIN)


def test_op() -> None:
    layer, x_TH = Layer(3, 24, 20, torch.float32), torch.randn(10, 24)
    lists = worklist_reference(random_ids(10, 2, 3), 3, 16)
    schedule = (lists.pair_P, lists.begins_E1, lists.tiles.expert_N, lists.tiles.row_N)
    # Not views of one tensor: the check compares arguments before and after, storage by storage.
    weights = (layer.gate_EFH.clone(), layer.up_EFH.clone(), layer.down_EHF)
    for rows_R in (None, torch.arange(10)):
        torch.library.opcheck(
            torch.ops.epoch_moe.grouped_mlp, (x_TH, rows_R, *schedule, *weights, 2, PLAIN.as_ints())
        )


def test_table() -> None:
    for (dtype, _), entries in tuning.GROUPED_MLP.items():
        limits = [limit for limit, _ in entries]
        assert limits == sorted(limits) and limits[-1] == float("inf")
        for _, config in entries:
            assert GroupedMlpConfig.from_ints(config.as_ints()) == config
            assert config.shared_bytes(2 if dtype == "half" else 4) <= SHARED_LIMIT[80]
    few, many = (grouped_mlp_config(torch.bfloat16, rows, True) for rows in (16, 17))
    assert (few.block_m, many.block_m) == (16, 32)
    assert grouped_mlp_config(torch.bfloat16, 1000, True, wgmma=False).gate_up.block_n == 64
    with pytest.raises(ValueError, match="float64"):
        grouped_mlp_config(torch.float64, 1, True)


def test_less_shared_memory_makes_shallower_pipelines() -> None:
    full = grouped_mlp_config(torch.bfloat16, 1000, True)
    small = grouped_mlp_config(torch.bfloat16, 1000, True, shared_limit=99 * 1024)
    assert small.shared_bytes(2) <= 99 * 1024 < full.shared_bytes(2)
    stages = {"num_stages": full.gate_up.num_stages}
    assert replace(small.gate_up, **stages) == full.gate_up and replace(small.down, **stages) == full.down
    with pytest.raises(ValueError, match="1000 bytes of shared memory are not enough"):
        grouped_mlp_config(torch.bfloat16, 1000, True, shared_limit=1000)


def test_configuration_for_tensors() -> None:
    weights = (torch.empty(3, 32, 48, dtype=torch.float16), torch.empty(3, 48, 32, dtype=torch.float16))
    rows_TH = torch.empty(10, 48, dtype=torch.float16)
    assert tuning.grouped_mlp_config_for(rows_TH, weights, 4) == grouped_mlp_config(torch.float16, 4, True)
    odd = grouped_mlp_config(torch.float16, 4, False)
    assert tuning.grouped_mlp_config_for(torch.empty(10, 50, dtype=torch.float16)[:, :48], weights, 4) == odd
    assert tuning.grouped_mlp_config_for(rows_TH, (weights[0][..., :40], weights[1]), 4) == odd


def assert_promises(fact: dict[str, object], arch: int) -> None:
    assert fact["spill_bytes"] == 0, fact
    assert int(fact["shared_bytes"]) < SHARED_LIMIT[arch], fact
    assert not fact["tensor_cores_expected"] or fact["mma"], fact
    assert not fact["wide_loads_expected"] or fact["wide_loads"], fact


def test_machine_code() -> None:
    facts = compile_elsewhere("grouped_mlp", 90, match="llada2-mini bf16 weight-bound")
    assert len(facts) == 2
    for fact in facts:
        assert_promises(fact, 90)
        assert fact["wgmma"] and fact["wide_loads"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", [80, 90])
def test_machine_code_of_all_cases(arch: int) -> None:
    facts = compile_elsewhere("grouped_mlp", arch, timeout=580)
    assert len(facts) == {80: 30, 90: 36}[arch]
    for fact in facts:
        assert_promises(fact, arch)
        if arch == 90 and fact["wide_loads_expected"]:
            assert fact["wgmma"] or not fact["tensor_cores_expected"], fact
