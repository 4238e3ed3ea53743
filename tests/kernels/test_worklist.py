"""Pairs in expert order and their tiles, against plain torch and against the worklist of the torch backend."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from aot.compiler import compile_elsewhere
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epoch_moe.kernels import worklist
from epoch_moe.kernels.worklist import device_worklist
from epoch_moe.kernels.worklist_reference import worklist_reference
from epoch_moe.worklist import Worklist, build_worklist, max_tiles


def random_ids(num_rows: int, top_k: int, num_experts: int, empty: float = 0.0) -> Tensor:
    ids_RK = torch.rand(num_rows, num_experts).argsort(dim=1)[:, :top_k].clone()
    return ids_RK.masked_fill_(torch.rand(num_rows, top_k) < empty, -1)


def assert_same(ids_RK: Tensor, num_experts: int, block_m: int, count: int | None = None) -> Worklist:
    limit = None if count is None else torch.tensor([count], dtype=torch.int32)
    actual = device_worklist(ids_RK, num_experts, block_m, limit)
    expected = worklist_reference(ids_RK, num_experts, block_m, limit)
    for ours, theirs in zip(tensors_of(actual), tensors_of(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return actual


def tensors_of(work: Worklist) -> list[Tensor]:
    assert work.tiles is not None
    both = [getattr(part, field.name) for part in (work, work.tiles) for field in fields(part)]
    return [value for value in both if isinstance(value, Tensor)]


@pytest.mark.parametrize("count", [None, 0, 5, 23])
def test_reference_agrees_with_the_torch_backend(count: int | None) -> None:
    ids_RK = random_ids(23, 3, 7, empty=0.3)
    limit = None if count is None else torch.tensor([count], dtype=torch.int32)
    lists = worklist_reference(ids_RK, 7, 4, limit)
    if count is not None:
        ids_RK[count:] = -1
    plain = build_worklist(ids_RK, 7)
    total = int(plain.counts_E.sum())
    assert torch.equal(lists.counts_E, plain.counts_E)
    assert torch.equal(lists.begins_E1, plain.begins_E1)
    assert torch.equal(lists.pair_P[:total].long() // 3, plain.row_P[:total])
    assert torch.equal(lists.rank_RK.long(), plain.rank_RK)


@given(st.data())
@settings(max_examples=60)
def test_tiles_cover_each_segment_once(data: st.DataObject) -> None:
    num_experts, block_m = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7))
    ids = data.draw(st.lists(st.integers(-1, num_experts - 1), max_size=40))
    lists = worklist_reference(torch.tensor(ids, dtype=torch.int64).view(-1, 1), num_experts, block_m)
    covered = []
    for tile in range(int(lists.tiles.count)):
        expert, first = int(lists.tiles.expert_N[tile]), int(lists.tiles.row_N[tile])
        last = min(first + block_m, int(lists.begins_E1[expert + 1]))
        assert int(lists.begins_E1[expert]) <= first < last
        covered += range(first, last)
    assert covered == list(range(sum(expert >= 0 for expert in ids)))
    assert (lists.tiles.expert_N[int(lists.tiles.count) :] == -1).all()
    assert int(lists.tiles.count) <= max_tiles(len(ids), num_experts, block_m) == lists.tiles.expert_N.numel()


def test_the_bound_on_tiles_is_reached() -> None:
    ids_RK = torch.tensor([0, 1, 2, 3, 0, 0, 0, 0]).view(-1, 1)  # counts 5, 1, 1, 1 in tiles of 4
    assert int(worklist_reference(ids_RK, 4, 4).tiles.count) == max_tiles(8, 4, 4) == 5


@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts", "empty"),
    [
        (0, 3, 5, 0.4), (1, 1, 1, 0.0), (1, 1, 1, 1.0), (7, 1, 13, 0.4), (31, 5, 5, 0.0), (31, 5, 5, 0.4),
        (17, 8, 61, 0.4), (17, 8, 61, 1.0), (64, 8, 256, 0.4), (101, 7, 64, 0.0),
    ],
)  # fmt: skip
def test_worklist(num_rows: int, top_k: int, num_experts: int, empty: float, poisoned_empty: None) -> None:
    ids_RK = random_ids(num_rows, top_k, num_experts, empty)
    assert_same(ids_RK, num_experts, 16)
    assert_same(ids_RK, num_experts, 3, count=num_rows // 2)
    assert_same(ids_RK, num_experts, 128, count=num_rows)


def test_all_pairs_to_one_expert() -> None:
    for rows in (300, 900):
        lists = assert_same(torch.full((rows, 1), 6), 11, 64)
        assert int(lists.tiles.count) == -(-rows // 64)


def test_ids_that_are_no_experts() -> None:
    ids_RK = torch.tensor([[5, -1], [-7, 2], [4, 99]])
    assert_same(ids_RK, 5, 16)


def test_garbage_in_padding_rows() -> None:
    ids_RK = random_ids(40, 2, 9)
    ids_RK[25:] = torch.randint(-(2**62), 2**62, (15, 2))
    for block_m in (2, 16):
        garbage = assert_same(ids_RK, 9, block_m, count=25)
        ids_RK[25:] = -1
        assert torch.equal(garbage.pair_P, assert_same(ids_RK, 9, block_m).pair_P)


def test_count_beyond_the_capacity() -> None:
    """The count of a compaction that overflowed: all rows are real."""
    assert_same(random_ids(10, 2, 9), 9, 4, count=12)


@pytest.mark.parametrize("num_rows", [40, 200])
def test_many_blocks(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of pairs that the scan takes in several steps, and more tile blocks than blocks of pairs."""
    monkeypatch.setattr(worklist, "SINGLE_BLOCK", 8)
    monkeypatch.setattr(worklist, "BLOCK", 32)
    monkeypatch.setattr(worklist, "SCAN_BLOCKS", 4)
    monkeypatch.setattr(worklist, "TILES", 32)
    for top_k, num_experts, block_m in ((3, 37, 1), (1, 5, 2), (5, 17, 64)):
        assert_same(random_ids(num_rows, top_k, num_experts, 0.2), num_experts, block_m, count=num_rows - 3)


@given(st.data())
@settings(max_examples=40)
def test_any_ids(data: st.DataObject) -> None:
    num_experts, top_k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    num_rows = data.draw(st.integers(0, 30))
    ids = data.draw(st.lists(st.integers(-1, num_experts - 1), min_size=num_rows * top_k, max_size=num_rows * top_k))
    count = data.draw(st.none() | st.integers(0, num_rows))
    ids_RK = torch.tensor(ids, dtype=torch.int64).view(num_rows, top_k)
    assert_same(ids_RK, num_experts, data.draw(st.integers(1, 20)), count)


def test_strided_ids() -> None:
    assert_same(random_ids(30, 6, 9)[:, ::2], 9, 8)


def test_runs_are_bit_equal() -> None:
    ids_RK = random_ids(150, 8, 64)
    first, second = device_worklist(ids_RK, 64, 16), device_worklist(ids_RK, 64, 16)
    assert all(map(torch.equal, tensors_of(first), tensors_of(second)))


def test_refusals() -> None:
    ids_RK = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"ids_RK is torch.int32 \(3, 2\)"):
        device_worklist(ids_RK.int(), 4, 16)
    with pytest.raises(ValueError, match="num_experts=0, block_m=16"):
        device_worklist(ids_RK, 0, 16)
    with pytest.raises(ValueError, match=r"count is torch.int64 \(1,\)"):
        device_worklist(ids_RK, 4, 16, torch.tensor([1]))


@pytest.mark.parametrize("count", [None, torch.tensor([9], dtype=torch.int32)])
def test_op(count: Tensor | None) -> None:
    torch.library.opcheck(torch.ops.epoch_moe.worklist, (random_ids(20, 3, 7), 7, 4, count))


@pytest.mark.slow
def test_machine_code() -> None:
    (fact,) = compile_elsewhere("worklist", 90, match="[32 rows")
    assert fact["name"].startswith("worklist_place") and fact["spill_bytes"] == 0, fact


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", [80, 90])
def test_machine_code_of_all_cases(arch: int) -> None:
    facts = compile_elsewhere("worklist", arch, timeout=580)
    assert {fact["name"].partition("[")[0] for fact in facts} == {"worklist_count", "worklist_scan", "worklist_place"}
    assert all(fact["spill_bytes"] == 0 for fact in facts), facts
