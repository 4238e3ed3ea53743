"""`ExpertViews`: one layer's expert weights, stacked, as every way to compute them reads them.

Shape suffixes: E experts, F expert inner size, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

ViewKind = Literal["fused", "separate"]


@dataclass(frozen=True)
class ExpertViews:
    """Routed expert weights of one layer, stacked: what every way to compute them reads.

    Attributes:
        kind: ``"fused"`` or ``"separate"``, how gate and up lie.
        projections: fused ``(gate_up_E2FH,)``, the gate above up; or separate ``(gate_EFH, up_EFH)``.
        down_EHF: ``[E,H,F]``.

    They are views of memory that somebody else keeps alive and in place; values may change in place.
    """

    kind: ViewKind
    projections: tuple[Tensor, ...]
    down_EHF: Tensor

    @classmethod
    def fused(cls, gate_up_E2FH: Tensor, down_EHF: Tensor) -> ExpertViews:
        """Experts whose gate and up projections are one tensor."""
        return cls("fused", (gate_up_E2FH,), down_EHF)

    @classmethod
    def empty(cls, num_experts: int, inner: int, hidden: int, **where: Any) -> ExpertViews:
        """Fused uninitialised memory for E experts; ``where`` as for `torch.empty`."""
        # Tensors made in inference mode could not be written outside of it, and never be trained.
        with torch.inference_mode(False):
            gate_up_E2FH = torch.empty(num_experts, 2 * inner, hidden, **where)
            return cls.fused(gate_up_E2FH, torch.empty(num_experts, hidden, inner, **where))

    @property
    def gate_up_E2FH(self) -> Tensor:
        """The one projection of fused experts."""
        (gate_up_E2FH,) = self.projections
        return gate_up_E2FH

    @property
    def num_experts(self) -> int:
        """E, the experts that lie here."""
        return self.down_EHF.shape[0]

    @property
    def bytes_per_expert(self) -> int:
        """Bytes that one active expert makes a forward read."""
        _, hidden, inner = self.down_EHF.shape
        return 3 * hidden * inner * self.down_EHF.element_size()

    def part(self, first: int, end: int) -> ExpertViews:
        """Experts ``first`` to ``end - 1``."""
        projections = tuple(weight[first:end] for weight in self.projections)
        return ExpertViews(self.kind, projections, self.down_EHF[first:end])
