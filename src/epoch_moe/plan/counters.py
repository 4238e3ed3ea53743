"""Work counters of a decode: kept on the device, read once.

Shape suffixes: L MoE layers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

_INTEGERS = ("pairs", "active_experts", "support_size", "supports")
_FLOATS = ("covered_weight", "natural_weight")


@dataclass(frozen=True)
class Work:
    """What was computed, over all forwards of a decode.

    Attributes:
        forwards: model forwards.
        forward_rows: valid rows of all forwards (attention, shared experts and dense layers run on these).
        attention_pairs: query-key pairs, summed over sequences and forwards, of one layer.
        dense_rows: (row, MoE layer) visits that the same forwards make without a plan.
        rows: those that went through the routed experts.
        pairs: (row, expert) products.
        active_experts: experts with at least one pair, summed over layers and forwards.
        weight_bytes: bytes of routed-expert weights that those experts hold.
        lm_head_rows: rows that went through the LM head.
        support_size: mean experts in a support where it restricted rows (nan: never).
        coverage: natural routing weight of restricted rows that their support held (nan: no restricted row).
        fallbacks: how often a layer or sequence left its plan, by reason.
        per_layer: rows, pairs, active_experts, support_size and coverage of each MoE layer.
    """

    forwards: int
    forward_rows: int
    attention_pairs: int
    dense_rows: int
    rows: int
    pairs: int
    active_experts: int
    weight_bytes: int
    lm_head_rows: int
    support_size: float
    coverage: float
    fallbacks: dict[str, int]
    per_layer: list[dict[str, float]]

    def as_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON (undefined ratios are None)."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            if isinstance(value, list):
                return [plain(item) for item in value]
            return None if isinstance(value, float) and math.isnan(value) else value

        return plain(asdict(self))  # type: ignore[no-any-return]


@dataclass
class Counters:
    """Running counters of one context. Layers add device numbers; `read` is the only host sync."""

    num_layers: int
    bytes_per_expert: list[int]
    forwards: int = 0
    forward_rows: int = 0
    attention_pairs: int = 0
    dense_rows: int = 0
    lm_head_rows: int = 0
    rows_L: list[int] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    history: list[dict[str, int]] = field(default_factory=list)
    _integers: dict[torch.device, Tensor] = field(default_factory=dict)
    _floats: dict[torch.device, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows_L = [0] * self.num_layers

    def add_layer(self, layer: int, rows: int, counts_E: Tensor) -> None:
        """One layer's routed work: fresh rows (host) and pairs per expert (device)."""
        self.rows_L[layer] += rows
        totals = self._of(self._integers, counts_E.device, len(_INTEGERS), torch.int64)
        totals[layer, 0] += counts_E.sum()
        totals[layer, 1] += (counts_E > 0).sum()

    def add_support(self, layer: int, support_BE: Tensor, covered_R: Tensor, natural_R: Tensor) -> None:
        """One layer's support and the routing weight that it held of the restricted rows."""
        totals = self._of(self._integers, support_BE.device, len(_INTEGERS), torch.int64)
        totals[layer, 2] += support_BE.sum()
        totals[layer, 3] += support_BE.shape[0]
        weights = self._of(self._floats, support_BE.device, len(_FLOATS), torch.float64)
        weights[layer, 0] += covered_R.sum(dtype=torch.float64)
        weights[layer, 1] += natural_R.sum(dtype=torch.float64)

    def _of(self, store: dict[torch.device, Tensor], device: torch.device, width: int, dtype: torch.dtype) -> Tensor:
        # One tensor per device: a model spread by device_map has layers on several.
        if device not in store:
            store[device] = torch.zeros(self.num_layers, width, dtype=dtype, device=device)
        return store[device]

    def read(self) -> Work:
        """Everything so far (one host sync per device)."""
        integers = torch.zeros(self.num_layers, len(_INTEGERS), dtype=torch.int64)
        floats = torch.zeros(self.num_layers, len(_FLOATS), dtype=torch.float64)
        for part in self._integers.values():
            integers += part.cpu()
        for part in self._floats.values():
            floats += part.cpu()
        per_layer = [
            {
                "rows": rows,
                "pairs": int(ints[0]),
                "active_experts": int(ints[1]),
                "support_size": _ratio(ints[2], ints[3]),
                "coverage": _ratio(weights[0], weights[1]),
            }
            for rows, ints, weights in zip(self.rows_L, integers, floats, strict=True)
        ]
        weight_bytes = sum(int(row["active_experts"]) * b for row, b in zip(per_layer, self.bytes_per_expert, strict=True))
        return Work(
            forwards=self.forwards,
            forward_rows=self.forward_rows,
            attention_pairs=self.attention_pairs,
            dense_rows=self.dense_rows,
            rows=sum(self.rows_L),
            pairs=int(integers[:, 0].sum()),
            active_experts=int(integers[:, 1].sum()),
            weight_bytes=weight_bytes,
            lm_head_rows=self.lm_head_rows,
            support_size=_ratio(integers[:, 2].sum(), integers[:, 3].sum()),
            coverage=_ratio(floats[:, 0].sum(), floats[:, 1].sum()),
            fallbacks=dict(self.fallbacks),
            per_layer=per_layer,
        )


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if float(whole) else float("nan")
