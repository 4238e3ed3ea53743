"""How long do the kernels take, beside their floors, beside `torch.nn.functional.grouped_mm` and a plain loop?

Shape suffixes as in `kernel_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from parts.kernel_layers import LayerShape, Rows, Weights, floors, make_rows
from torch import Tensor

from epoch_moe.experts.run import run_experts, supports_grouped_mm
from epoch_moe.functional.views import expert_views
from epoch_moe.kernels.combine_restore import combine, combine_restore
from epoch_moe.kernels.compaction import compact
from epoch_moe.kernels.grouped_mlp import grouped_mlp
from epoch_moe.kernels.route import route
from epoch_moe.kernels.tuning import GroupedMlpConfig, grouped_mlp_config_for
from epoch_moe.kernels.worklist import device_worklist
from epoch_moe.routing import combine_weights, router_scores, select
from epoch_moe.worklist import Worklist, build_worklist
from epoch_moe.worklist import combine as torch_combine

Timer = Callable[[Callable[[], object]], float]
"""Median milliseconds of a call."""


def rotating(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """The calls in turn, so that one does not find the last one's inputs in the L2 cache."""
    turns = cycle(calls)
    return lambda: next(turns)()


@dataclass(frozen=True)
class RowLists:
    """Rows and entries as lists of known length: what the library's torch path takes."""

    reuse_dst: Tensor
    reuse_src: Tensor
    store_src: Tensor
    store_dst: Tensor

    @staticmethod
    def of(rows: Rows) -> RowLists:
        """Waits for the device."""
        reuse_dst = (rows.source_T <= -2).nonzero().flatten()
        store_src = (rows.store_R >= 0).nonzero().flatten()
        return RowLists(reuse_dst, -(rows.source_T[reuse_dst] + 2), store_src, rows.store_R[store_src])


@dataclass(frozen=True)
class Turn:
    """One set of inputs, with what the earlier kernels make of it."""

    rows: Rows
    ids_RK: Tensor
    weights_RK: Tensor
    worklist: Worklist
    pairs_PH: Tensor
    lists: RowLists


class Timed:
    """The kernels of one layer at one number of rows, 5 of 8 of them fresh."""

    def __init__(self, shape: LayerShape, weights: Weights, rows: int, generator: torch.Generator, copies: int):
        dtype = weights.down_EHF.dtype
        self.shape, self.weights, self.rows = shape, weights, rows
        self.stacked = expert_views(weights.gate_up_E2FH, weights.down_EHF)
        self.turns: list[Turn] = []
        for _ in range(copies):
            made = make_rows(shape, rows, dtype, generator)
            made.cache_TH.nan_to_num_(0.0)
            ids_RK, weights_RK, _ = route(made.logits_RE, None, shape.router, dtype=dtype)
            if not self.turns:
                # What the host knows beforehand: all pairs, over the experts that they can reach.
                fresh = made.rows_R.numel()
                per_expert = fresh * shape.top_k / min(shape.experts, fresh * shape.top_k)
                self.config: GroupedMlpConfig = grouped_mlp_config_for(made.x_TH, weights.parts, per_expert)
            worklist = device_worklist(ids_RK, shape.experts, self.config.block_m)
            self.turns.append(Turn(made, ids_RK, weights_RK, worklist, self.mlp(made, worklist), RowLists.of(made)))

    def mlp(self, rows: Rows, worklist: Worklist) -> Tensor:
        """Both grouped products."""
        weights = self.weights
        return grouped_mlp(
            rows.x_TH, rows.rows_R, worklist, weights.gate_EFH, weights.up_EFH, weights.down_EHF, self.shape.top_k,
            self.config,
        )  # fmt: skip

    def triton_layer(self, turn: Turn) -> Tensor:
        """From logits to the dense shard, as a plan's iteration runs it."""
        rows = turn.rows
        ids_RK, weights_RK, _ = route(rows.logits_RE, None, self.shape.router, dtype=rows.x_TH.dtype, count=rows.count)
        worklist = device_worklist(ids_RK, self.shape.experts, self.config.block_m, rows.count)
        out_TH = torch.empty_like(rows.x_TH)
        pairs_PH = self.mlp(rows, worklist)
        combine_restore(
            pairs_PH, worklist.rank_RK, weights_RK, rows.source_T, rows.store_R, rows.cache_TH, out_TH
        )  # fmt: skip
        return out_TH

    def torch_layer(self, turn: Turn, backend: Any) -> Tensor:
        """The same in torch, experts in `backend`."""
        rows, spec = turn.rows, self.shape.router
        scores = router_scores(rows.logits_RE, None, spec)
        ids_RK = select(scores.selection_TE, spec)
        weights_RK = combine_weights(scores.combine_TE, ids_RK, spec, rows.x_TH.dtype)
        y_RH = run_experts(rows.x_TH[rows.rows_R], ids_RK, weights_RK, self.stacked, backend)
        out_TH, lists = torch.empty_like(rows.x_TH), turn.lists
        out_TH.index_copy_(0, rows.rows_R, y_RH)
        out_TH.index_copy_(0, lists.reuse_dst, rows.cache_TH.index_select(0, lists.reuse_src))
        rows.cache_TH.index_copy_(0, lists.store_dst, y_RH.index_select(0, lists.store_src))
        return out_TH

    def cases(self) -> Iterator[tuple[str, Callable[[Turn], object], int, int]]:
        """(name, call, bytes that must move, operations) of the kernels, then of whole layers."""
        shape, size = self.shape, self.weights.down_EHF.element_size()
        fresh, pairs = self.turns[0].ids_RK.shape[0], self.turns[0].ids_RK.numel()
        active = sum(int((turn.worklist.counts_E > 0).sum()) for turn in self.turns) / len(self.turns)
        row = shape.hidden * size
        expert_bytes = int(active * 3 * shape.hidden * shape.inner * size)
        products = 6 * pairs * shape.hidden * shape.inner
        logits = fresh * shape.experts * 4
        chosen = pairs * (8 + 4)
        stored = int((self.turns[0].rows.store_R >= 0).sum())
        restored = (2 * self.rows - fresh + stored) * row + (self.rows + fresh) * 8
        mlp_bytes = expert_bytes + fresh * row + pairs * (row + 2 * shape.inner * size)
        dtype = self.weights.down_EHF.dtype

        yield "compact", lambda t: compact(t.rows.fresh_T, fresh), self.rows * 9 + fresh * 8, 0
        yield "route", lambda t: route(t.rows.logits_RE, None, shape.router, dtype=dtype), logits + chosen, 0
        yield "worklist", lambda t: device_worklist(t.ids_RK, shape.experts, self.config.block_m), pairs * 16, 0
        yield "grouped_mlp", lambda t: self.mlp(t.rows, t.worklist), mlp_bytes, products
        yield (
            "combine",
            lambda t: combine(t.pairs_PH, t.worklist.rank_RK, t.weights_RK),
            pairs * (row + 8) + fresh * row,
            0,
        )
        yield (
            "combine_restore",
            lambda t: combine_restore(
                t.pairs_PH, t.worklist.rank_RK, t.weights_RK, t.rows.source_T, t.rows.store_R, t.rows.cache_TH,
                torch.empty_like(t.rows.x_TH),
            ),
            pairs * (row + 8) + restored,
            0,
        )  # fmt: skip
        # A layer could do without the pairs' outputs in memory: weights, rows in, cached rows and the shard out.
        layer_bytes = logits + expert_bytes + fresh * row + restored
        yield "layer, triton", self.triton_layer, layer_bytes, products
        if supports_grouped_mm(self.stacked)[0]:
            yield "layer, grouped_mm", lambda t: self.torch_layer(t, "grouped"), layer_bytes, products
        yield "layer, loop", lambda t: self.torch_layer(t, "loop"), layer_bytes, products
        yield "combine, torch", self.torch_combine, pairs * (row + 8) + fresh * row, 0

    def torch_combine(self, turn: Turn) -> Tensor:
        """Worklist and sum in torch."""
        worklist = build_worklist(turn.ids_RK, self.shape.experts)
        return torch_combine(turn.pairs_PH, turn.weights_RK, worklist, turn.pairs_PH.dtype)

    def agree(self) -> float:
        """Relative RMS difference of the layer in Triton and in torch; rows whose near-ties differ are in it."""
        turn = self.turns[0]
        ours, theirs = self.triton_layer(turn).double(), self.torch_layer(turn, "loop").double()
        return float((ours - theirs).pow(2).mean().sqrt() / theirs.pow(2).mean().sqrt())

    def measure(self, timer: Timer) -> Iterator[dict[str, Any]]:
        """One record per case."""
        for name, call, bytes_moved, flops in self.cases():
            microseconds = timer(rotating([partial(call, turn) for turn in self.turns])) * 1e3
            yield {
                "name": name,
                "shape": self.shape.name,
                "rows": self.rows,
                "fresh_rows": self.turns[0].ids_RK.shape[0],
                "us": microseconds,
                "bytes_moved": bytes_moved,
                "flops": flops,
                **floors(bytes_moved, flops),
            }
