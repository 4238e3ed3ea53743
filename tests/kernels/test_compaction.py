"""Fresh rows in a buffer of fixed size, against plain torch."""

from __future__ import annotations

import pytest
import torch
from aot.compiler import compile_elsewhere
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epoch_moe.kernels import compaction
from epoch_moe.kernels.compaction import compact
from epoch_moe.kernels.compaction_reference import compact_reference


def assert_same(mask_T: Tensor, capacity: int) -> None:
    for actual, expected in zip(compact(mask_T, capacity), compact_reference(mask_T, capacity), strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_reference_is_nonzero() -> None:
    mask_T = torch.rand(101) < 0.4
    rows = mask_T.nonzero().flatten()
    rows_R, rank_T, count = compact_reference(mask_T, 101)
    assert count.item() == rows.numel()
    assert torch.equal(rows_R[: rows.numel()], rows) and not rows_R[rows.numel() :].any()
    assert torch.equal(rank_T[rows], torch.arange(rows.numel())) and (rank_T[~mask_T] == -1).all()


@pytest.mark.parametrize(
    ("num_rows", "share"),
    [(rows, 0.3) for rows in (0, 1, 2, 31, 32, 1000, 4096, 4097, 9973)]
    + [(rows, share) for rows in (1, 4097) for share in (0.0, 1.0)],
)
def test_compaction(num_rows: int, share: float, poisoned_empty: None) -> None:
    mask_T = torch.rand(num_rows) < share
    set_rows = int(mask_T.sum())
    for capacity in {0, set_rows // 2, set_rows, num_rows, num_rows + 5}:
        assert_same(mask_T, capacity)


def test_places_beyond_one_program() -> None:
    """Few rows, more places than one program fills."""
    assert_same(torch.tensor([True, False, True]), 5000)


@given(st.lists(st.booleans(), max_size=80), st.integers(0, 100))
@settings(max_examples=40)
def test_any_mask(mask: list[bool], capacity: int) -> None:
    assert_same(torch.tensor(mask, dtype=torch.bool), capacity)


def test_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of programs, the last one partly filled."""
    monkeypatch.setattr(compaction, "SINGLE_BLOCK", 16)
    monkeypatch.setattr(compaction, "BLOCK", 16)
    mask_T = torch.rand(16 * 37 + 5) < 0.5
    for capacity in (0, 17, 300, 700):
        assert_same(mask_T, capacity)


def test_strided_mask() -> None:
    mask = torch.rand(50, 3) < 0.5
    assert_same(mask[:, 1], 40)


def test_runs_are_bit_equal() -> None:
    mask_T = torch.rand(5000) < 0.5
    for first, second in zip(compact(mask_T, 3000), compact(mask_T, 3000), strict=True):
        assert torch.equal(first, second)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"mask_T is torch.int64 \(3,\)"):
        compact(torch.ones(3, dtype=torch.int64), 3)
    with pytest.raises(ValueError, match=r"mask_T is torch.bool \(3, 1\)"):
        compact(torch.ones(3, 1, dtype=torch.bool), 3)
    with pytest.raises(ValueError, match="capacity=-1"):
        compact(torch.ones(3, dtype=torch.bool), -1)


def test_op() -> None:
    torch.library.opcheck(compact, (torch.rand(100) < 0.5, 64))


def test_machine_code() -> None:
    facts = compile_elsewhere("compaction", 90)
    assert {fact["name"].partition("[")[0] for fact in facts} == {"compact", "compact_count"}
    assert all(fact["spill_bytes"] == 0 for fact in facts), facts
