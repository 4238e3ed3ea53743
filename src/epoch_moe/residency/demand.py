"""`Demand`: what one MoE layer asks of its experts in one forward, and what kind of rows ask.

Shape suffixes: B sequences, S rows per sequence in a forward (C lead rows, then N window rows), T = B x S, R rows that
go through the routed experts, K top-k, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from epoch_moe.plan.forward import ForwardPlan
from epoch_moe.plan.packed import ListedRows
from epoch_moe.plan.slot import DenseForward


class RowClass(IntEnum):
    """What a row is in a forward, which tells when its routing matters again.

    Attributes:
        LIVE: its logits can still change a decision; it goes through the experts again in the next forward, unless the
            decoder commits it.
        NEW: it was just decoded, and its output is cached now; next time at the refresh.
        STABLE: decoded before, computed because of a refresh; next time at the next refresh.
        COMMIT: not seen again within the block: lead rows, and prefix rows that cannot change.
        OTHER: it goes through the experts on every forward: rows of later blocks, and all rows where there is no plan.
    """

    LIVE = 0
    NEW = 1
    STABLE = 2
    COMMIT = 3
    OTHER = 4


@dataclass(frozen=True, eq=False)
class Demand:
    """The (row, expert) pairs of one MoE layer in one forward, on the host.

    Attributes:
        layer: the layer's place among the MoE layers.
        forward: a number that grows with every forward; gaps do not matter.
        cold: the forward begins a block: what was known of rows is void.
        ids_RK: int64, experts of each row; -1 = no expert (dropped, or another rank's).
        weights_RK: fp32, their routing weights.
        row_R: int64, flat row ``0..T-1`` of the forward; -1 where that is unknown (rows of other ranks).
        class_R: int8, `RowClass`.
        to_refresh: forwards until the next one that computes all rows: 1 = the next forward; None = never.
        num_experts: E.
        seq_len: S; None: as many rows as the forward has are one sequence.
        lead: C, how many of each sequence's S rows are lead rows.
    """

    layer: int
    forward: int
    cold: bool
    ids_RK: Tensor
    weights_RK: Tensor
    row_R: Tensor
    class_R: Tensor
    to_refresh: int | None
    num_experts: int
    seq_len: int | None = None
    lead: int = 0

    @cached_property
    def counts_E(self) -> Tensor:
        """int64, rows of each expert."""
        ids_P = self.ids_RK.reshape(-1)
        return torch.bincount(ids_P[ids_P >= 0], minlength=self.num_experts)

    @cached_property
    def experts(self) -> list[int]:
        """Experts with at least one pair, ascending."""
        found: list[int] = self.counts_E.nonzero().squeeze(1).tolist()
        return found

    @cached_property
    def window_R(self) -> Tensor:
        """int64, each row's number in the windows of all sequences, the same in all forwards of a block; -1 = none."""
        if self.seq_len is None:
            return self.row_R
        sequence_R, position_R = self.row_R // self.seq_len, self.row_R % self.seq_len
        window_R = sequence_R * (self.seq_len - self.lead) + position_R - self.lead
        return window_R.masked_fill((self.row_R < 0) | (position_R < self.lead), -1)


def rows_of(forward: ForwardPlan | DenseForward | None, layer: int, num_rows: int) -> dict[str, Any]:
    """The R rows that a layer computes in a forward, as fields of `Demand`: ``row_R`` to ``lead``.

    Rows of a layer that left its plan, and of a forward that nobody named (None), are numbered in order, and come back
    on every forward.
    """
    if isinstance(forward, DenseForward):
        return {
            "row_R": forward.valid_R.cpu() if forward.valid_R is not None and forward.num_rows == num_rows
            else torch.arange(num_rows),
            "class_R": _dense_classes(forward, num_rows),
            "to_refresh": None,
            "seq_len": forward.shape[-1],
            "lead": forward.lead,
        }  # fmt: skip
    if forward is not None:
        rows = forward.layer_rows.get(layer, forward.rows)
        if isinstance(rows, ListedRows) and rows.num_fresh == num_rows:
            interval = forward.config.refresh_interval
            return {
                "row_R": rows.fresh_R.cpu(),
                "class_R": _planned_classes(forward, rows).cpu(),
                "to_refresh": None if interval is None else interval - forward.number % interval,
                "seq_len": forward.ids_BS.shape[1],
                "lead": forward.lead,
            }
    return others(torch.arange(num_rows))


def others(row_R: Tensor) -> dict[str, Any]:
    """Rows that come back on every forward, or of which nothing is known (-1), as fields of `Demand`."""
    return {"row_R": row_R, "class_R": torch.full_like(row_R, RowClass.OTHER, dtype=torch.int8), "to_refresh": None}


def _planned_classes(forward: ForwardPlan, rows: ListedRows) -> Tensor:
    """``[R]`` int8 `RowClass` of the fresh rows of a forward under a plan, on the plan's device."""
    classes = forward.classes

    def fresh(mask_T: Tensor) -> Tensor:
        return mask_T[rows.fresh_R]

    # Later cases win. A decoded row of a block's first forward may have been decoded long ago (a prompt's last tokens).
    class_R = torch.full_like(rows.fresh_R, RowClass.COMMIT, dtype=torch.int8)
    kept_T = classes.state_T & ~classes.constant_T
    class_R[fresh(kept_T)] = RowClass.STABLE
    if not forward.cold:
        class_R[fresh(kept_T & ~classes.cached_T)] = RowClass.NEW
    class_R[fresh(classes.awake_T)] = RowClass.OTHER
    class_R[fresh(classes.live_T)] = RowClass.LIVE
    return class_R


def _dense_classes(forward: DenseForward, num_rows: int) -> Tensor:
    """``[R]`` int8 `RowClass` of a forward without a plan, or of its rows that exist: what comes back always does."""
    if forward.once:
        return torch.full((num_rows,), RowClass.COMMIT, dtype=torch.int8)
    class_BS = torch.full(forward.shape, RowClass.OTHER, dtype=torch.int8)
    class_BS[:, : forward.lead] = RowClass.COMMIT
    class_T = class_BS.reshape(-1)
    if class_T.numel() == num_rows:
        return class_T
    return class_T[forward.valid_R.cpu()] if forward.valid_R is not None else class_T[:num_rows]

