"""Are the kernels right? Each against fp64 or, where it moves integers, against its reference, over poisoned memory.

Shape suffixes as in `kernel_layers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from parts.kernel_layers import LayerShape, Rows, Weights, make_rows, make_weights
from torch import Tensor

from epoch_moe.kernels.atlas import compile_support_device
from epoch_moe.kernels.combine_restore import combine, combine_restore, restore
from epoch_moe.kernels.compaction import compact
from epoch_moe.kernels.compaction_reference import compact_reference
from epoch_moe.kernels.grouped_mlp import grouped_mlp
from epoch_moe.kernels.route import route
from epoch_moe.kernels.route_reference import route_reference, select_lowest
from epoch_moe.kernels.tuning import grouped_mlp_config_for
from epoch_moe.kernels.worklist import device_worklist
from epoch_moe.kernels.worklist_reference import worklist_reference
from epoch_moe.plan.atlas import compile_support
from epoch_moe.routing import NO_EXPERT, Scores, router_scores
from epoch_moe.worklist import Worklist

NAN = float("nan")


@dataclass(frozen=True)
class Check:
    """One comparison: right where ``error <= limit``."""

    kernel: str
    shape: str
    dtype: str
    what: str
    error: float
    limit: float

    @property
    def right(self) -> bool:
        """False for NaN too."""
        return self.error <= self.limit

    def __str__(self) -> str:
        word = "right" if self.right else "WRONG"
        measured = f"{self.error:.3g} (limit {self.limit:.3g})"
        return f"{word} {self.kernel} {self.shape} {self.dtype}: {self.what}: {measured}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"right": self.right}


@contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialised memory holds NaN, so that reading it shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def relative_rms(value: Tensor, exact: Tensor) -> float:
    """Root mean square difference over that of ``exact``, in fp64; NaN where ``value`` has one."""
    if exact.numel() == 0:
        return 0.0
    return float((value.double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt().clamp_min(1e-300))


def different(value: Tensor, expected: Tensor) -> float:
    """Share of elements that differ."""
    if value.shape != expected.shape:
        return 1.0
    return float((value != expected).double().mean()) if value.numel() else 0.0


def scores_64(logits_RE: Tensor, spec: Any) -> Scores:
    """`routing.router_scores` without bias in fp64."""
    logits_RE = logits_RE.double()
    scores_RE = logits_RE.softmax(-1) if spec.kind == "softmax" else logits_RE.sigmoid()
    return Scores(logits_RE, scores_RE, scores_RE)


def experts_64(x_TH: Tensor, rows_R: Tensor, worklist: Worklist, weights: Weights, top_k: int) -> Tensor:
    """Outputs of all pairs in sorted order, nothing rounded: fp64 ``[pairs,H]``."""
    ends = worklist.begins_E1.tolist()
    out_PH = torch.zeros(ends[-1], x_TH.shape[1], dtype=torch.float64, device=x_TH.device)
    for expert, (first, end) in enumerate(pairwise(ends)):
        if first < end:
            x = x_TH[rows_R[worklist.pair_P[first:end].long() // top_k]].double()
            gate, up = (x @ part[expert].double().t() for part in (weights.gate_EFH, weights.up_EFH))
            out_PH[first:end] = (gate * gate.sigmoid() * up) @ weights.down_EHF[expert].double().t()
    return out_PH


def combined_64(pairs_PH: Tensor, rank_RK: Tensor, weights_RK: Tensor) -> Tensor:
    """Weighted sums in fp64; empty slots add nothing."""
    there_RK = rank_RK >= 0
    gathered_RKH = pairs_PH[rank_RK.clamp_min(0).long()].double().masked_fill(~there_RK.unsqueeze(-1), 0.0)
    return (gathered_RKH * weights_RK.double().masked_fill(~there_RK, 0.0).unsqueeze(-1)).sum(1)


class Checks:
    """All comparisons of one layer shape in one dtype."""

    def __init__(self, shape: LayerShape, dtype: torch.dtype, rows: int, device: torch.device, seed: int):
        generator = torch.Generator(device).manual_seed(seed)
        self.shape, self.dtype, self.generator = shape, dtype, generator
        self.weights = make_weights(shape, dtype, generator)
        # A capacity beyond the fresh rows: what lies there must do nothing.
        self.rows: Rows = make_rows(shape, rows, dtype, generator, spare=13)
        # One rounding to the dtype is eps / sqrt(12) of relative RMS, evenly spread; twice that allows for the spread.
        self.rounding = max(torch.finfo(dtype).eps / 12**0.5 * 2, 2e-6)

    def check(self, kernel: str, what: str, error: float, limit: float) -> Check:
        """A comparison of this shape."""
        return Check(kernel, self.shape.name, str(self.dtype).removeprefix("torch."), what, error, limit)

    def run(self) -> Iterator[Check]:
        """Every kernel; each one's inputs come from those before it, so the last is the whole layer."""
        rows, shape = self.rows, self.shape
        yield from self.compaction()
        ids_RK, weights_RK, _ = found = self.route()
        yield from self.routed(*found)
        config = grouped_mlp_config_for(
            rows.x_TH, self.weights.parts, rows.x_TH.shape[0] * shape.top_k / shape.experts
        )
        worklist = device_worklist(ids_RK, shape.experts, config.block_m, rows.count)
        expected = worklist_reference(ids_RK, shape.experts, config.block_m, rows.count)
        for name in ("pair_P", "rank_RK", "counts_E", "begins_E1", "tiles.expert_N", "tiles.row_N", "tiles.count"):
            error = different(*map(attrgetter(name), (worklist, expected)))
            yield self.check("worklist", f"{name} is the reference's", error, 0.0)

        with poisoned():
            pairs_PH = grouped_mlp(
                rows.x_TH, rows.rows_R, worklist, self.weights.gate_EFH, self.weights.up_EFH, self.weights.down_EHF,
                shape.top_k, config,
            )  # fmt: skip
        exact_PH = experts_64(rows.x_TH, rows.rows_R, worklist, self.weights, shape.top_k)
        real = exact_PH.shape[0]
        # Rounded twice: between the products and at the end.
        yield self.check("grouped_mlp", "fp64", relative_rms(pairs_PH[:real], exact_PH), 2 * self.rounding)
        behind = float((~pairs_PH[real:].isnan()).double().mean()) if real < pairs_PH.shape[0] else 0.0
        yield self.check("grouped_mlp", "nothing is written behind the last segment", behind, 0.0)
        yield from self.restored(pairs_PH, worklist.rank_RK, weights_RK, exact_PH)
        yield from self.supports()
        yield from self.restricted()

    def compaction(self) -> Iterator[Check]:
        """Packed rows, with room to spare and with too little."""
        for capacity in (self.rows.rows_R.numel(), self.rows.rows_R.numel() // 2):
            found, expected = compact(self.rows.fresh_T, capacity), compact_reference(self.rows.fresh_T, capacity)
            error = max(different(a, b) for a, b in zip(found, expected, strict=True))
            yield self.check("compact", f"capacity {capacity} is the reference's", error, 0.0)

    def route(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, weights and totals of the packed rows; the logits of padding are poison."""
        logits_RE = self.rows.logits_RE.clone()
        logits_RE[int(self.rows.count) :] = NAN
        return route(logits_RE, None, self.shape.router, dtype=self.dtype, count=self.rows.count)

    def routed(self, ids_RK: Tensor, weights_RK: Tensor, total_R: Tensor) -> Iterator[Check]:
        """Against fp64: the choice up to near-ties of fp32, the weights of what was chosen."""
        spec, count = self.shape.router, int(self.rows.count)
        scores = scores_64(self.rows.logits_RE[:count], spec)
        padding = ids_RK[count:] != NO_EXPERT, weights_RK[count:] != 0, total_R[count:] != 0
        yield self.check("route", "padding is empty", max(float(p.any()) for p in padding), 0.0)
        ids_RK, weights_RK, total_R = ids_RK[:count], weights_RK[:count], total_R[:count]
        best_RK = select_lowest(scores.selection_TE, spec, None)
        rows_off = (ids_RK.sort(1).values != best_RK.sort(1).values).any(1).double().mean()
        yield self.check("route", "share of rows whose experts are not fp64's", float(rows_off), 0.002)
        raw_RK = scores.combine_TE.gather(1, ids_RK.clamp_min(0))
        exact_RK = raw_RK
        if spec.kind != "softmax":
            exact_RK = raw_RK / raw_RK.sum(1, keepdim=True) * spec.routed_scaling_factor
        limit = self.rounding if spec.kind == "softmax" else 2e-6
        yield self.check("route", "weights, fp64", relative_rms(weights_RK, exact_RK), limit)
        yield self.check("route", "totals, fp64", relative_rms(total_R, raw_RK.sum(1)), 2e-6)

    def restored(self, pairs_PH: Tensor, rank_RK: Tensor, weights_RK: Tensor, exact_PH: Tensor) -> Iterator[Check]:
        """Sums, dense shard and cache in one pass and in two; the whole layer against fp64."""
        rows, count = self.rows, int(self.rows.count)
        sums_RH = combined_64(pairs_PH, rank_RK[:count], weights_RK[:count])
        y_RH = combine(pairs_PH, rank_RK, weights_RK, rows.count)
        yield self.check("combine", "fp64", relative_rms(y_RH[:count], sums_RH), self.rounding)
        yield self.check("combine", "padding is zero", float((y_RH[count:] != 0).any()), 0.0)
        y_RH[count:] = NAN
        outs = []
        for run, inputs in ((restore, (y_RH,)), (combine_restore, (pairs_PH, rank_RK, weights_RK))):
            cache_TH, out_TH = rows.cache_TH.clone(), torch.full_like(rows.x_TH, NAN)
            run(*inputs, rows.source_T, rows.store_R, cache_TH, out_TH)
            outs.append((out_TH, cache_TH))
        (out_TH, cache_TH), (out_again_TH, cache_again_TH) = outs
        fresh_T, reused_T = rows.source_T >= 0, rows.source_T <= -2
        name = "combine_restore"
        error = relative_rms(out_again_TH[fresh_T], sums_RH[rows.source_T[fresh_T]])
        yield self.check(name, "fresh rows, fp64", error, self.rounding)
        cached = rows.cache_TH[-(rows.source_T[reused_T] + 2)]
        yield self.check(name, "reused rows are the cache's", different(out_again_TH[reused_T], cached), 0.0)
        stored = rows.store_R[rows.store_R >= 0]
        error = different(cache_again_TH[stored], y_RH[rows.store_R >= 0])
        yield self.check(name, "stored entries are the rows", error, 0.0)
        untouched = torch.ones(cache_TH.shape[0], dtype=torch.bool, device=cache_TH.device)
        untouched[stored] = False
        before, after = (cache[untouched].nan_to_num(9.0) for cache in (rows.cache_TH, cache_again_TH))
        yield self.check(name, "other entries are as they were", different(after, before), 0.0)
        yield self.check("restore", "rows are those of one pass", different(out_TH, out_again_TH), 0.0)
        error = different(cache_TH.nan_to_num(9.0), cache_again_TH.nan_to_num(9.0))
        yield self.check("restore", "the cache is that of one pass", error, 0.0)
        exact_RH = combined_64(exact_PH, rank_RK[:count], weights_RK[:count])
        yield self.check("layer", "fp64", relative_rms(y_RH[:count], exact_RH), 3 * self.rounding)

    def supports(self) -> Iterator[Check]:
        """Supports of eight blocks: the reference's sets, up to sums that agree in the last bits of fp32."""
        spec, experts = self.shape.router, self.shape.experts
        blocks, width = 8, 32 if self.shape.hidden > 64 else 6
        noise = torch.randn(blocks, width, experts, generator=self.generator, device=self.generator.device)
        common = torch.randn(blocks, 1, experts, generator=self.generator, device=self.generator.device)
        scores = router_scores((noise + 2 * common).flatten(0, 1), None, spec)
        selection, mixed = (s.view(blocks, width, experts) for s in (scores.selection_TE, scores.combine_TE))
        vote = torch.rand(blocks, width, generator=self.generator, device=self.generator.device) < 0.8
        for coverage, limit in ((1.0, 0.0), (0.95, 0.01), (0.8, 0.01)):
            found = compile_support_device(selection, mixed, vote, spec, coverage, 4)
            expected = compile_support(selection, mixed, vote, spec, coverage, 4)
            yield self.check("atlas", f"coverage {coverage}: the reference's set", different(found, expected), limit)

    def restricted(self) -> Iterator[Check]:
        """Every second row inside a support that 20 rows share, with a bias: the reference's choice and weights."""
        rows, spec, packed = self.rows, self.shape.router, self.rows.rows_R.numel()
        draw = {"generator": self.generator, "device": self.generator.device}
        place_R = torch.arange(packed, device=self.generator.device)
        group_R, restricted_R = place_R // 20, place_R % 2 == 0
        support_GE = torch.rand(-(-packed // 20), self.shape.experts, **draw) < 0.5
        bias_E = 0.05 * torch.randn(self.shape.experts, **draw)
        (ids_RK, weights_RK, _), (expected_RK, exact_RK, _) = (
            by(
                rows.logits_RE, bias_E, spec, dtype=self.dtype, support_GE=support_GE, group_R=group_R,
                restricted_R=restricted_R, count=rows.count,
            )
            for by in (route, route_reference)
        )  # fmt: skip
        held_RK = support_GE[group_R].gather(1, ids_RK.clamp_min(0)) | (ids_RK == NO_EXPERT)
        outside = float((restricted_R.unsqueeze(1) & ~held_RK).any())
        yield self.check("route", "restricted rows stay in their support", outside, 0.0)
        same_R = (ids_RK == expected_RK).all(1)
        off = float((~same_R).double().mean())
        yield self.check("route", "share of rows whose experts in a support are not the reference's", off, 0.002)
        limit = self.rounding if spec.kind == "softmax" else 2e-6
        error = relative_rms(weights_RK[same_R], exact_RK[same_R].double())
        yield self.check("route", "weights in a support, the reference's", error, limit)
