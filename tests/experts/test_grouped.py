"""Every way to compute routed experts against a loop in fp64 and against golden blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_golden, load_golden, relative_error, relative_rms
from torch import Tensor

from epoch_moe.experts.run import Backend, pick_backend, run_experts, supports_grouped_mm
from epoch_moe.experts.views import ExpertViews
from epoch_moe.routing import NO_EXPERT
from epoch_moe.worklist import build_worklist, combine

BACKENDS: tuple[Backend, ...] = ("reference", "loop", "grouped")
SHAPES = {  # rows, experts, top-k, hidden, inner
    "usual": (20, 8, 2, 64, 32),
    "one_slot": (9, 5, 1, 16, 8),
    "all_experts": (6, 4, 4, 16, 8),
    "one_expert": (7, 1, 1, 16, 4),
    "more_experts_than_pairs": (2, 31, 3, 8, 4),
    "one_row": (1, 8, 3, 32, 16),
    "no_rows": (0, 8, 3, 32, 16),
    "odd": (13, 7, 3, 36, 20),
    "prime": (11, 5, 2, 37, 23),
}
pytestmark = pytest.mark.usefixtures("poisoned_empty")


def make_stacked(num_experts: int, hidden: int, inner: int, dtype: torch.dtype = torch.float32) -> ExpertViews:
    return ExpertViews.fused(
        (torch.randn(num_experts, 2 * inner, hidden) / hidden**0.5).to(dtype),
        (torch.randn(num_experts, hidden, inner) / inner**0.5).to(dtype),
    )


def random_ids(num_rows: int, num_experts: int, top_k: int) -> Tensor:
    return torch.rand(num_rows, num_experts).argsort(-1)[:, :top_k]


def oracle(x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, stacked: ExpertViews) -> Tensor:
    """Weighted sum of experts in fp64, without anything from the library."""
    out_RH = torch.zeros(x_RH.shape, dtype=torch.float64)
    inner = stacked.down_EHF.shape[2]
    for row in range(x_RH.shape[0]):
        for slot in range(ids_RK.shape[1]):
            expert = int(ids_RK[row, slot])
            if expert < 0:
                continue
            gate_up = stacked.gate_up_E2FH[expert].double() @ x_RH[row].double()
            out = stacked.down_EHF[expert].double() @ (F.silu(gate_up[:inner]) * gate_up[inner:])
            out_RH[row] += float(weights_RK[row, slot]) * out
    return out_RH


def assert_all_backends(x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, stacked: ExpertViews) -> None:
    expected_RH = oracle(x_RH, ids_RK, weights_RK, stacked)
    for backend in BACKENDS:
        if backend == "grouped" and not supports_grouped_mm(stacked)[0]:
            continue
        out_RH = run_experts(x_RH, ids_RK, weights_RK, stacked, backend)
        assert out_RH.dtype == x_RH.dtype
        if x_RH.dtype == torch.float32:
            assert relative_error(out_RH, expected_RH) < 2e-6, backend
        elif x_RH.numel():
            assert relative_rms(out_RH, expected_RH) < 1e-2, backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_backends_equal_the_oracle(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, experts, top_k, hidden, inner = shape
    stacked = make_stacked(experts, hidden, inner, dtype)
    x_RH, weights_RK = torch.randn(rows, hidden).to(dtype), torch.rand(rows, top_k)
    assert_all_backends(x_RH, random_ids(rows, experts, top_k), weights_RK, stacked)


@pytest.mark.parametrize("expert", [0, 3, 6])
def test_all_rows_to_one_expert(expert: int) -> None:
    stacked = make_stacked(7, 16, 8)
    ids_RK = torch.full((12, 1), expert)
    assert_all_backends(torch.randn(12, 16), ids_RK, torch.rand(12, 1), stacked)


@pytest.mark.parametrize("empty", ["some", "a_row", "all", "first_slot"])
def test_empty_pairs_add_nothing(empty: str) -> None:
    stacked = make_stacked(7, 16, 8)
    ids_RK = random_ids(10, 7, 3)
    where = {
        "some": torch.rand(10, 3) < 0.4,
        "a_row": torch.arange(10)[:, None].expand(10, 3) == 4,
        "all": torch.ones(10, 3, dtype=torch.bool),
        "first_slot": torch.arange(3).expand(10, 3) == 0,
    }[empty]
    ids_RK = ids_RK.masked_fill(where, NO_EXPERT)
    # A weight beside an empty slot must not matter, whatever it is.
    weights_RK = torch.rand(10, 3).masked_fill(where, 7.0)
    assert_all_backends(torch.randn(10, 16), ids_RK, weights_RK, stacked)


def test_unused_experts_are_not_read() -> None:
    stacked = make_stacked(6, 16, 8)
    stacked.gate_up_E2FH[[1, 4]] = float("nan")
    stacked.down_EHF[[1, 4]] = float("nan")
    ids_RK = torch.tensor([[0, 2], [3, 5], [5, NO_EXPERT]])
    x_RH = torch.randn(3, 16)
    for backend in BACKENDS:
        assert torch.isfinite(run_experts(x_RH, ids_RK, torch.rand(3, 2), stacked, backend)).all(), backend


def test_a_bad_row_stays_alone() -> None:
    stacked = make_stacked(6, 16, 8)
    x_RH, ids_RK, weights_RK = torch.randn(9, 16), random_ids(9, 6, 2), torch.rand(9, 2)
    clean = {backend: run_experts(x_RH, ids_RK, weights_RK, stacked, backend) for backend in BACKENDS}
    x_RH[4] = float("nan")
    for backend in BACKENDS:
        out_RH = run_experts(x_RH, ids_RK, weights_RK, stacked, backend)
        assert out_RH[4].isnan().all()
        kept = torch.arange(9) != 4
        torch.testing.assert_close(out_RH[kept], clean[backend][kept])


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_a_row_does_not_depend_on_the_others(backend: Backend) -> None:
    stacked = make_stacked(6, 16, 8)
    x_RH, ids_RK, weights_RK = torch.randn(9, 16), random_ids(9, 6, 2), torch.rand(9, 2)
    together = run_experts(x_RH, ids_RK, weights_RK, stacked, backend)
    order = torch.randperm(9)
    shuffled = run_experts(x_RH[order], ids_RK[order], weights_RK[order], stacked, backend)
    torch.testing.assert_close(shuffled, together[order], rtol=1e-5, atol=1e-6)
    worklist = build_worklist(ids_RK, 6)
    assert torch.equal(run_experts(x_RH, ids_RK, weights_RK, stacked, backend, worklist), together)


@pytest.mark.parametrize("name", ["llada2", "llada2_1", "llada2_2_routing", "llada2_bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_blocks(name: str, backend: Backend) -> None:
    golden = load_golden(name)
    for layer in golden.moe_layers:
        prefix = f"model.layers.{layer}.mlp."
        parts = {
            kind: torch.stack(
                [golden.weights[f"{prefix}experts.{e}.{kind}_proj.weight"] for e in range(golden.config["num_experts"])]
            )
            for kind in ("gate", "up", "down")
        }
        stacked = ExpertViews.fused(torch.cat((parts["gate"], parts["up"]), dim=1), parts["down"])
        x_TH = golden.forward[f"layer{layer}.moe_in"].flatten(0, 1)
        routed_TH = run_experts(
            x_TH,
            golden.forward[f"layer{layer}.topk_idx"],
            golden.forward[f"layer{layer}.topk_weight"],
            stacked,
            backend,
        )
        gate, up, down = (golden.weights[f"{prefix}shared_experts.{k}_proj.weight"] for k in ("gate", "up", "down"))
        shared_TH = F.linear(F.silu(F.linear(x_TH, gate)) * F.linear(x_TH, up), down)
        assert_golden(routed_TH + shared_TH, golden.forward[f"layer{layer}.moe_out"].flatten(0, 1), x_TH.dtype)


# ------------------------------------------------------------------------------------------------------------ backends


def test_auto_picks_what_fits() -> None:
    assert pick_backend("auto", make_stacked(3, 16, 8)) == "grouped"
    assert pick_backend("auto", make_stacked(3, 37, 8)) == "loop"
    assert pick_backend("auto", make_stacked(3, 16, 7)) == "loop"
    assert pick_backend("auto", make_stacked(3, 16, 8, torch.float64)) == "loop"
    assert pick_backend("reference", make_stacked(3, 16, 8)) == "reference"


def test_impossible_requests_say_why() -> None:
    with pytest.raises(ValueError, match=r"hidden size 37 in torch.float32.*backend='auto' or 'loop'"):
        pick_backend("grouped", make_stacked(3, 37, 8))
    with pytest.raises(ValueError, match=r"torch.float64"):
        pick_backend("grouped", make_stacked(3, 16, 8, torch.float64))
    with pytest.raises(ValueError, match=r"backend='fast'.*'auto'"):
        pick_backend("fast", make_stacked(3, 16, 8))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ worklist


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(7, 5, 2), (0, 5, 2), (13, 3, 3), (4, 1, 1), (5, 11, 1)])
def test_worklist_is_the_sorted_pairs(rows: int, experts: int, top_k: int) -> None:
    ids_RK = random_ids(rows, experts, top_k).masked_fill(torch.rand(rows, top_k) < 0.3, NO_EXPERT)
    worklist = build_worklist(ids_RK, experts)
    pairs = sorted(
        (expert if expert != NO_EXPERT else experts, row, slot)
        for row, ids in enumerate(ids_RK.tolist())
        for slot, expert in enumerate(ids)
    )
    assert worklist.row_P.tolist() == [row for _, row, _ in pairs]
    counts = [sum(e == expert for e, _, _ in pairs) for expert in range(experts)]
    assert worklist.counts_E.tolist() == counts
    assert worklist.ends_E.tolist() == [sum(counts[: e + 1]) for e in range(experts)]
    assert worklist.ends_E.dtype == torch.int32
    for place, (expert, row, slot) in enumerate(pairs):
        assert worklist.rank_RK[row, slot] == (place if expert != experts else -1)


def test_combine_ignores_what_lies_behind_the_segments() -> None:
    ids_RK = torch.tensor([[1, NO_EXPERT], [0, 1]])
    worklist = build_worklist(ids_RK, 2)
    pairs_PH = torch.tensor([[10.0], [1.0], [2.0], [float("nan")]])  # (1,0), (0,0), (1,1), empty
    out = combine(pairs_PH, torch.tensor([[0.5, 3.0], [2.0, 4.0]]), worklist, torch.float32)
    assert out.tolist() == [[0.5], [28.0]]


def test_combine_sums_in_fp32_and_rounds_once() -> None:
    worklist = build_worklist(torch.tensor([[0, 1, 2]]), 3)
    pairs_PH = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    out = combine(pairs_PH, torch.ones(1, 3), worklist, torch.bfloat16)
    assert out.item() == 258.0  # 256 + 1 is 256 in bf16: summed there, the ones would vanish
