"""The ways of `freshlane_traffic.py` to move one layer's rows through the ranks of its experts, and what they count.

Shape suffixes: R rows of this rank, P pairs, N received rows, K top-k, H hidden, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from epoch_moe.freshlane.collectives import Ranks
from epoch_moe.freshlane.dispatcher import FreshLaneDispatcher
from epoch_moe.routing import NO_EXPERT

ROW, SLOT, COUNT = 2, 8, 8  # bytes: of one bf16 number, of an id with its weight, of one row count


@dataclass
class Moved:
    """Rows that one way moves, and the bytes of them."""

    rows: int = 0
    dispatch_bytes: int = 0
    combine_bytes: int = 0
    count_bytes: int = 0

    def add(self, rows: int, hidden: int, slots: int, counts: int) -> None:
        """Add one layer's exchange of so many rows in each direction, and so many counts."""
        self.rows += rows
        self.dispatch_bytes += rows * (hidden * ROW + slots * SLOT)
        self.combine_bytes += rows * hidden * ROW
        self.count_bytes += counts * COUNT

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.dispatch_bytes + self.combine_bytes + self.count_bytes

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return {**vars(self), "bytes": self.total}


Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows, local ids (`NO_EXPERT` elsewhere) and weights -> one row per row."""


def pack(x_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Rows, ids and weights as bytes."""
    return torch.cat([p.contiguous().view(torch.uint8) for p in (x_NH, ids_NK.int(), weights_NK)], dim=1)


def unpack(payload: Tensor, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The reverse."""
    row = hidden * dtype.itemsize
    slots = (payload.shape[1] - row) // 2
    x, ids, weights = (part.contiguous() for part in payload.split([row, slots, slots], dim=1))
    return x.view(dtype), ids.view(torch.int32).long(), weights.view(torch.float32)


class PerPair:
    """(a): one row per (row, expert), weighted where the expert is, summed over experts in fp32 at home."""

    def __init__(self, ranks: Ranks, num_experts: int):
        self.ranks, self.local, self.moved = ranks, num_experts // ranks.world, Moved()

    def __call__(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, experts: Experts) -> Tensor:
        """One layer."""
        ranks, top_k = self.ranks, ids_RK.shape[1]
        flat_P = ids_RK.reshape(-1)
        owner_P = torch.where(flat_P == NO_EXPERT, ranks.world, flat_P // self.local)
        order_P = owner_P.argsort(stable=True)[: int((flat_P != NO_EXPERT).sum())]
        send_W = owner_P.bincount(minlength=ranks.world + 1)[: ranks.world]
        receive_W = ranks.all_to_all(send_W, None, None, "counts").wait()
        send, receive = send_W.tolist(), receive_W.tolist()
        ids_P1 = (flat_P[order_P] % self.local).unsqueeze(1)
        payload = pack(x_RH[order_P // top_k], ids_P1, weights_RK.reshape(-1)[order_P].unsqueeze(1))
        received = ranks.all_to_all(payload, send, receive, "pairs").wait()
        y_NH = experts(*unpack(received, x_RH.shape[1], x_RH.dtype))
        back_PH = ranks.all_to_all(y_NH, receive, send, "pairs back").wait()
        pairs_PH = back_PH.new_zeros(flat_P.numel(), x_RH.shape[1])
        pairs_PH[order_P] = back_PH
        away_out, away_in = (sum(n) - n[ranks.rank] for n in (send, receive))
        self.moved.rows += away_out
        self.moved.dispatch_bytes += away_out * payload.shape[1]
        self.moved.combine_bytes += away_in * y_NH.shape[1] * y_NH.element_size()
        self.moved.count_bytes += (ranks.world - 1) * COUNT
        return pairs_PH.view(*ids_RK.shape, -1).float().sum(1).to(x_RH.dtype)


class Gathered:
    """(b): everybody gets all rows; partial sums are added on the way back, in the rows' dtype."""

    def __init__(self, ranks: Ranks, num_experts: int):
        self.ranks, self.local, self.moved = ranks, num_experts // ranks.world, Moved()

    def __call__(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, experts: Experts) -> Tensor:
        """One layer; equally many rows on all ranks."""
        ranks = self.ranks
        payload = pack(x_RH, ids_RK, weights_RK)
        everything = ranks.all_gather(payload, "all rows").wait()
        x_NH, ids_NK, weights_NK = unpack(everything, x_RH.shape[1], x_RH.dtype)
        here_NK = (ids_NK // self.local == ranks.rank) & (ids_NK != NO_EXPERT)
        y_NH = experts(x_NH, torch.where(here_NK, ids_NK % self.local, NO_EXPERT), weights_NK)
        out_RH = torch.empty_like(x_RH)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(out_RH, y_NH, group=ranks.group)
        away = (ranks.world - 1) * x_RH.shape[0]
        self.moved.rows += away
        self.moved.dispatch_bytes += away * payload.shape[1]
        self.moved.combine_bytes += away * x_RH.shape[1] * x_RH.element_size()
        return out_RH


class Lane:
    """(c), (d): the library's dispatcher."""

    def __init__(self, ranks: Ranks, num_experts: int):
        self.dispatcher = FreshLaneDispatcher(num_experts, ranks)

    @property
    def moved(self) -> Moved:
        """As the dispatcher counted."""
        traffic = self.dispatcher.traffic
        return Moved(traffic.dispatch_rows, traffic.dispatch_bytes, traffic.combine_bytes, traffic.count_bytes)

    def __call__(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, experts: Experts) -> Tensor:
        """One layer."""
        dispatched = self.dispatcher.dispatch(x_RH, ids_RK, weights_RK).wait()
        y_NH = experts(dispatched.x_NH, dispatched.ids_NK, dispatched.weights_NK)
        out: Tensor = self.dispatcher.combine(y_NH, dispatched.handle).wait()
        return out
