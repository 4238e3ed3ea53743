"""Demands made by hand and at random, for the tests of residency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from epoch_moe.residency.demand import Demand, RowClass


def demand_of(ids: Sequence[Any], number: int, num_experts: int, **fields: Any) -> Demand:
    """A demand of rows ``[[expert, ...], ...]``, or of one row for each expert ``[expert, ...]``.

    Rows are live, in order, and the heavier branches come first, unless ``fields`` say otherwise.
    """
    if not isinstance(ids, torch.Tensor):
        ids = torch.tensor([[one] if isinstance(one, int) else one for one in ids], dtype=torch.int64)
    if ids.dim() == 1:
        ids = ids.reshape(0, 1) if not ids.numel() else ids.unsqueeze(1)
    rows, top_k = ids.shape
    made: dict[str, Any] = {
        "layer": 0,
        "forward": number,
        "cold": number == 0,
        "ids_RK": ids,
        "weights_RK": torch.linspace(1.0, 0.5, top_k).expand(rows, top_k).clone(),
        "row_R": torch.arange(rows),
        "class_R": torch.full((rows,), RowClass.LIVE, dtype=torch.int8),
        "to_refresh": None,
        "num_experts": num_experts,
    }
    return Demand(**(made | fields))
