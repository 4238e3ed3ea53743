"""Work counters of a decode: kept on the device, read once.

Shape suffixes: L MoE layers, E experts, G supports, R fresh rows.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from epoch_moe.kernels.launch import by_kernels
from epoch_moe.plan.recorder import HISTORY_LENGTH, ExpertRecorder

_INTEGERS = ("pairs", "active_experts", "support_experts", "supports", "rows", "unpaid")
_FLOATS = ("covered_weight", "natural_weight")


@dataclass(frozen=True)
class LayerWork:
    """What one MoE layer computed.

    Attributes:
        rows: rows that went through its routed experts.
        pairs: (row, expert) products.
        active_experts: experts with at least one pair, summed over forwards.
        weight_bytes: bytes of weights that those experts hold.
        support_experts, supports: experts in supports that restricted rows, and how many such supports there were,
            summed over forwards.
        unpaid: supports that were compiled and not kept, because they would have left out too few experts.
        covered_weight, natural_weight: routing weight of restricted rows inside their support, and in all.
    """

    rows: int
    pairs: int
    active_experts: int
    weight_bytes: int
    support_experts: int
    supports: int
    covered_weight: float
    natural_weight: float
    unpaid: int = 0

    @property
    def support_size(self) -> float:
        """Mean experts in a support (nan where nothing was restricted)."""
        return self.support_experts / self.supports if self.supports else math.nan

    @property
    def coverage(self) -> float:
        """Share of the restricted rows' natural routing weight that their support held (nan: no such row)."""
        return self.covered_weight / self.natural_weight if self.natural_weight else math.nan


@dataclass(frozen=True)
class Work:
    """What a decode computed, over all its forwards. ``a + b`` is the work of both.

    Attributes:
        forwards: model forwards.
        forward_rows: valid rows of all forwards (attention, shared experts and dense layers run on these).
        attention_pairs: query-key pairs of one layer, summed over sequences and forwards.
        dense_rows: (row, MoE layer) visits that the same forwards make without a plan.
        lm_head_rows: rows that went through the LM head.
        fallbacks: how often a layer (or a support: ``"shortfall"``) left its plan, by reason.
        per_layer: work of each MoE layer.
    """

    forwards: int
    forward_rows: int
    attention_pairs: int
    dense_rows: int
    lm_head_rows: int
    fallbacks: dict[str, int]
    per_layer: tuple[LayerWork, ...]

    @property
    def total(self) -> LayerWork:
        """All MoE layers together."""
        return LayerWork(**{f.name: sum(getattr(layer, f.name) for layer in self.per_layer) for f in fields(LayerWork)})

    @property
    def rows(self) -> int:
        """(Row, MoE layer) visits that went through routed experts."""
        return self.total.rows

    @property
    def pairs(self) -> int:
        """(Row, expert) products."""
        return self.total.pairs

    @property
    def active_experts(self) -> int:
        """Experts with at least one pair, summed over layers and forwards."""
        return self.total.active_experts

    @property
    def weight_bytes(self) -> int:
        """Bytes of routed-expert weights that the active experts hold."""
        return self.total.weight_bytes

    @property
    def support_size(self) -> float:
        """Mean experts in a support that restricted rows."""
        return self.total.support_size

    @property
    def coverage(self) -> float:
        """Share of the restricted rows' natural routing weight that their supports held."""
        return self.total.coverage

    @property
    def unpaid(self) -> int:
        """Supports that were compiled and not kept, because they would have left out too few experts."""
        return self.total.unpaid

    def __add__(self, other: Work) -> Work:
        layers = tuple(
            LayerWork(**{f.name: getattr(a, f.name) + getattr(b, f.name) for f in fields(LayerWork)})
            for a, b in zip(self.per_layer, other.per_layer, strict=True)
        )
        names = ("forwards", "forward_rows", "attention_pairs", "dense_rows", "lm_head_rows")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Work(**sums, fallbacks=dict(Counter(self.fallbacks) + Counter(other.fallbacks)), per_layer=layers)

    def as_dict(self) -> dict[str, Any]:
        """All numbers, ready for JSON (undefined means are None)."""

        def numbers(work: Work | LayerWork, names: tuple[str, ...]) -> dict[str, Any]:
            values = {name: getattr(work, name) for name in names}
            return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}

        shared = ("rows", "pairs", "active_experts", "weight_bytes", "support_size", "coverage", "unpaid")
        own = ("forwards", "forward_rows", "attention_pairs", "dense_rows", "lm_head_rows")
        return {
            **numbers(self, (*own, *shared)),
            "fallbacks": dict(self.fallbacks),
            "per_layer": [numbers(layer, shared) for layer in self.per_layer],
        }


@dataclass
class Counters:
    """Running counters of one context. Layers add device numbers; `read` is the only host sync.

    Attributes:
        num_layers: L.
        bytes_per_expert: routed-expert weight bytes of one expert, per layer.
        recorder: which experts the forwards of `history` used; None = not recorded.
    """

    num_layers: int
    bytes_per_expert: list[int]
    forwards: int = 0
    forward_rows: int = 0
    attention_pairs: int = 0
    dense_rows: int = 0
    lm_head_rows: int = 0
    rows_L: list[int] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    recorder: ExpertRecorder | None = None
    _history: deque[dict[str, int | Tensor]] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))
    _integers: dict[torch.device, Tensor] = field(default_factory=dict)
    _floats: dict[torch.device, Tensor] = field(default_factory=dict)
    _shortfalls: dict[torch.device, Tensor] = field(default_factory=dict)
    _forward_rows: dict[torch.device, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows_L = [0] * self.num_layers

    def add_forward(self, valid_rows: int | Tensor) -> None:
        """One model forward of so many valid rows (on the host, or on the device)."""
        self.forwards += 1
        if isinstance(valid_rows, Tensor):
            self._of(self._forward_rows, valid_rows.device, 1, torch.int64)[0, 0].add_(valid_rows)
        else:
            self.forward_rows += valid_rows
            self.dense_rows += valid_rows * self.num_layers

    def add_history(self, entry: Mapping[str, int | Tensor]) -> None:
        """What one finished forward under a plan did: its number in the block, and numbers of rows."""
        self._history.append(dict(entry))
        if self.recorder is not None:
            self.recorder.end_forward()

    @property
    def history(self) -> list[dict[str, int]]:
        """One entry per forward under a plan, the latest `HISTORY_LENGTH` of them.

        Its number in the block, valid rows, fresh rows, live rows that hold no token. Waits for the device where these
        numbers are on one.
        """
        waiting = [(e, name) for e in self._history for name, value in e.items() if isinstance(value, Tensor)]
        if waiting:
            values = torch.stack([torch.as_tensor(entry[name]).reshape(()).long() for entry, name in waiting])
            for (entry, name), value in zip(waiting, values.tolist(), strict=True):
                entry[name] = value
        return [{name: int(value) for name, value in entry.items()} for entry in self._history]

    def add_layer(self, layer: int, rows: int | Tensor, counts_E: Tensor) -> None:
        """One layer's routed work: fresh rows (on the host or the device) and pairs per expert (on the device)."""
        own = self._of(self._integers, counts_E.device, len(_INTEGERS), torch.int64)[layer]
        device_rows = rows if isinstance(rows, Tensor) else None
        if not isinstance(rows, Tensor):
            self.rows_L[layer] += rows
        if by_kernels(counts_E):
            from epoch_moe.kernels.tally import tally

            tally(counts_E, device_rows, own[0], own[1], own[4])
        else:
            own[0].add_(counts_E.sum())
            own[1].add_((counts_E > 0).sum())
            if device_rows is not None:
                own[4:5].add_(device_rows)
        if self.recorder is not None:
            self.recorder.add_layer(layer, counts_E)

    def add_support(
        self,
        layer: int,
        support_GE: Tensor,
        used_G: Tensor,
        covered_R: Tensor,
        natural_R: Tensor,
        short_G: Tensor | None,
    ) -> None:
        """One layer's supports that restricted rows, what they held of these rows' weight, and their shortfalls."""
        totals = self._of(self._integers, support_GE.device, len(_INTEGERS), torch.int64)
        totals[layer, 2] += (support_GE & used_G.unsqueeze(1)).sum()
        totals[layer, 3] += used_G.sum()
        if self.recorder is not None:
            self.recorder.add_support(layer, support_GE, used_G)
        if short_G is not None:
            self._of(self._shortfalls, short_G.device, 1, torch.int64)[layer, 0] += short_G.sum()
        weights = self._of(self._floats, support_GE.device, len(_FLOATS), torch.float64)
        weights[layer, 0] += covered_R.sum(dtype=torch.float64)
        weights[layer, 1] += natural_R.sum(dtype=torch.float64)

    def add_unpaid(self, layer: int, unpaid_G: Tensor) -> None:
        """One layer's supports that were compiled and not kept."""
        self._of(self._integers, unpaid_G.device, len(_INTEGERS), torch.int64)[layer, 5] += unpaid_G.sum()

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
        fallbacks = Counter(self.fallbacks)
        shortfalls = sum(int(part.sum()) for part in self._shortfalls.values())
        if shortfalls:
            fallbacks["shortfall"] = shortfalls
        integers[:, 4] += torch.tensor(self.rows_L)
        device_rows = sum(int(part[0, 0]) for part in self._forward_rows.values())
        layers = tuple(
            LayerWork(
                weight_bytes=size * ints[1],
                **dict(zip(_INTEGERS, ints, strict=True)),
                **dict(zip(_FLOATS, weights, strict=True)),
            )
            for size, ints, weights in zip(self.bytes_per_expert, integers.tolist(), floats.tolist(), strict=True)
        )
        return Work(
            forwards=self.forwards,
            forward_rows=self.forward_rows + device_rows,
            attention_pairs=self.attention_pairs,
            dense_rows=self.dense_rows + device_rows * self.num_layers,
            lm_head_rows=self.lm_head_rows,
            fallbacks=dict(fallbacks),
            per_layer=layers,
        )
