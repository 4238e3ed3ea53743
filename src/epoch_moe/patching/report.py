"""`PatchReport`: what `epoch_moe.patch` says it did."""

from __future__ import annotations

from dataclasses import dataclass

from epoch_moe.config import EpochConfig
from epoch_moe.tables import Cell, Table


@dataclass(frozen=True)
class PatchReport:
    """What a patch did.

    Attributes:
        family: model family of the patched blocks.
        patched: module paths of the replaced blocks.
        skipped: module path -> reason, for MoE-like modules that were left alone.
        backend: how routed experts are computed.
        dtype: of the expert weights.
        expert_bytes: bytes of routed-expert weights, all layers.
        moved_bytes: bytes copied into stacked storage (0 where it was stacked already).
        peak_extra_bytes: largest extra memory at one time while stacking.
        updated: the model was patched before, and only the configuration changed.
        config: the plan's configuration (None: no plan by default).
        experts: which experts are on this rank, where they are split over several; else "".
        residency: how many experts are in fast memory and where the others lie; "" where all are in memory.
    """

    family: str
    patched: list[str]
    skipped: dict[str, str]
    backend: str
    dtype: str
    expert_bytes: int
    moved_bytes: int
    peak_extra_bytes: int
    updated: bool
    config: EpochConfig | None = None
    experts: str = ""
    residency: str = ""

    def __str__(self) -> str:
        lines = [
            f"epoch_moe: {'updated' if self.updated else 'patched'} {len(self.patched)} MoE layers ({self.family}), "
            f"backend {self.backend}, experts {self.expert_bytes / 1e6:,.1f} MB in {self.dtype}, "
            f"{self.moved_bytes / 1e6:,.1f} MB moved, peak extra {self.peak_extra_bytes / 1e6:,.1f} MB"
        ]
        lines += [f"  {line}" for line in (self.experts, self.residency) if line]
        lines += [f"  skipped {path}: {reason}" for path, reason in self.skipped.items()]
        lines.append(f"  plan: {self.config if self.config is not None else 'none (dense)'}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows: list[tuple[str, Cell]] = [
            ("MoE layers updated" if self.updated else "MoE layers patched", len(self.patched)),
            ("family", self.family),
            ("plan", str(self.config if self.config is not None else "none (dense)")),
            ("backend", self.backend),
            ("expert weights", f"{self.expert_bytes / 1e6:,.1f} MB in {self.dtype}"),
            ("moved", f"{self.moved_bytes / 1e6:,.1f} MB"),
            ("peak extra memory", f"{self.peak_extra_bytes / 1e6:,.1f} MB"),
            *([("experts", self.experts)] if self.experts else []),
            *([("residency", self.residency)] if self.residency else []),
            *((f"skipped: {path}", reason) for path, reason in self.skipped.items()),
        ]
        return Table(("epoch_moe.patch", ""), tuple(rows))._repr_html_()
