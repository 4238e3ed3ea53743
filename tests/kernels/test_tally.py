"""Running totals of a layer's work in one launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epoch_moe.kernels.tally import tally


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("experts", [1, 5, 256])
def test_totals_are_those_of_plain_torch(experts: int, dtype: torch.dtype) -> None:
    torch.manual_seed(experts)
    totals = torch.tensor([3, 4, 5])
    counts_E = torch.randint(0, 3, (experts,), dtype=dtype)
    tally(counts_E, torch.tensor([7], dtype=torch.int32), *totals)
    tally(counts_E, None, *totals)
    assert totals.tolist() == [3 + 2 * int(counts_E.sum()), 4 + 2 * int((counts_E > 0).sum()), 12]


def test_what_does_not_fit_is_refused() -> None:
    totals: list[Tensor] = list(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="counts_E"):
        tally(torch.zeros(4), None, *totals)
    with pytest.raises(ValueError, match=r"active is torch.float32 \[2\]: expected torch.int64 of one element"):
        tally(torch.zeros(4, dtype=torch.int64), None, totals[0], torch.zeros(2), totals[2])
