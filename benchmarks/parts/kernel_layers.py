"""Layers and rows to run kernels on: the released models' shapes, and tiny ones for a CPU.

Shape suffixes: T rows of the forward, R packed rows, K top-k, P pairs, E experts, H hidden, F inner size, M cache
entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epoch_moe.routing import RouterSpec

BYTES_PER_SECOND = {"H100": 3.35e12, "H200": 4.8e12}
FLOPS_PER_SECOND = 990e12
"""Dense bf16, both; bandwidths and this by the vendor's data sheets."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one MoE layer."""

    name: str
    hidden: int
    inner: int
    router: RouterSpec

    @property
    def experts(self) -> int:
        """E."""
        return self.router.num_experts

    @property
    def top_k(self) -> int:
        """K."""
        return self.router.top_k


def _llada2(experts: int, top_k: int, groups: int, kept: int) -> RouterSpec:
    return RouterSpec(
        kind="sigmoid_group", num_experts=experts, top_k=top_k, n_group=groups, topk_group=kept,
        routed_scaling_factor=2.5,
    )  # fmt: skip


RELEASED = {
    shape.name: shape
    for shape in (
        LayerShape("llada2-mini", 2048, 512, _llada2(256, 8, 8, 4)),
        LayerShape("llada2-flash", 4096, 1024, _llada2(256, 8, 8, 4)),
        LayerShape("llada-moe", 2048, 1024, RouterSpec(kind="softmax", num_experts=64, top_k=8)),
    )
}
TINY = {
    shape.name: shape
    for shape in (
        LayerShape("tiny groups", 48, 32, _llada2(16, 4, 4, 2)),
        LayerShape("tiny odd", 37, 19, RouterSpec(kind="softmax", num_experts=5, top_k=2)),
    )
}


@dataclass(frozen=True)
class Weights:
    """One layer's experts: gate and up are views of one tensor, as the library stacks them."""

    gate_up_E2FH: Tensor
    down_EHF: Tensor

    @property
    def gate_EFH(self) -> Tensor:
        """Gate projections."""
        return self.gate_up_E2FH[:, : self.down_EHF.shape[2]]

    @property
    def up_EFH(self) -> Tensor:
        """Up projections."""
        return self.gate_up_E2FH[:, self.down_EHF.shape[2] :]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up and down projections."""
        return self.gate_EFH, self.up_EFH, self.down_EHF


def make_weights(shape: LayerShape, dtype: torch.dtype, generator: torch.Generator) -> Weights:
    """Random experts whose products keep the size of their inputs, drawn on the generator's device."""
    device = generator.device

    def draw(*size: int) -> Tensor:
        # One expert after another: no second copy of the layer in fp32.
        out = torch.empty(shape.experts, *size, dtype=dtype, device=device)
        for part in out:
            part.copy_(torch.randn(*size, generator=generator, device=device) * size[-1] ** -0.5)
        return out

    return Weights(draw(2 * shape.inner, shape.hidden), draw(shape.hidden, shape.inner))


@dataclass(frozen=True)
class Rows:
    """One forward's rows in the middle of a block: 5 of 8 fresh, the others reused, an eighth of all stored.

    Attributes:
        x_TH: rows.
        fresh_T: bool.
        rows_R: int64, the fresh rows; R is the capacity, and places behind the fresh rows hold 0.
        count: int32 ``[1]``, fresh rows.
        logits_RE: fp32 router logits of the packed rows.
        source_T, store_R: as `kernels.combine_restore.restore` takes them.
        cache_TH: NaN in entries that no row reads.
    """

    x_TH: Tensor
    fresh_T: Tensor
    rows_R: Tensor
    count: Tensor
    logits_RE: Tensor
    source_T: Tensor
    store_R: Tensor
    cache_TH: Tensor


def make_rows(
    shape: LayerShape, rows: int, dtype: torch.dtype, generator: torch.Generator, spare: int = 0, spread: float = 0.6
) -> Rows:
    """Rows that share a part of their router logits (``spread`` is the rest), as the rows of a block do.

    Args:
        shape: of the layer.
        rows: T.
        dtype: of rows and cache.
        generator: its device is the rows'.
        spare: capacity beyond the fresh rows.
        spread: 1 = each row has logits of its own.
    """
    device = generator.device

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    fresh_T = (torch.arange(rows, device=device) % 8) < 5
    fresh = int(fresh_T.sum())
    rows_R = torch.zeros(fresh + spare, dtype=torch.int64, device=device)
    rows_R[:fresh] = fresh_T.nonzero().flatten()
    entry_T = torch.randperm(rows, generator=generator, device=device)
    source_T = torch.where(fresh_T, fresh_T.cumsum(0) - 1, -(entry_T + 2))
    store_R = torch.full((fresh + spare,), -1, dtype=torch.int64, device=device)
    store_R[:fresh] = torch.where(torch.arange(fresh, device=device) % 5 == 0, entry_T[rows_R[:fresh]], -1)
    cache_TH = randn(rows, shape.hidden).to(dtype)
    cache_TH[entry_T[fresh_T]] = float("nan")
    # Blocks of 32 rows share logits: some 80 of 256 experts per block, hundreds per batch.
    blocks = -(-(fresh + spare) // 20)
    common = randn(blocks, shape.experts).repeat_interleave(20, 0)[: fresh + spare]
    logits_RE = 2.0 * ((1 - spread) * common + spread * randn(fresh + spare, shape.experts))
    return Rows(
        x_TH=randn(rows, shape.hidden).to(dtype), fresh_T=fresh_T, rows_R=rows_R,
        count=torch.tensor([fresh], dtype=torch.int32, device=device), logits_RE=logits_RE, source_T=source_T,
        store_R=store_R, cache_TH=cache_TH,
    )  # fmt: skip


def floors(bytes_moved: int, flops: int) -> dict[str, float]:
    """Least microseconds by arithmetic: everything moved once, all operations at the tensor cores' bf16 rate."""
    by_rate = flops / FLOPS_PER_SECOND * 1e6
    return {
        f"floor_us_{name}": max(bytes_moved / rate * 1e6, by_rate) for name, rate in BYTES_PER_SECOND.items()
    }
