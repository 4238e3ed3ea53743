"""`FreshLaneDispatcher`: fresh rows to the ranks that own their experts, and the partial sums back.

Experts lie in contiguous ranges: of P ranks, rank p owns experts ``p * E / P`` up to ``(p + 1) * E / P``.

    sharded: every rank has its own rows         replicated: every rank has all rows

    rank 0  x_RH --+--> rank 0's rows            x_RH  (on all ranks)
                   |                               |
                   +--> rank 1: once, though       each rank: its own experts' pairs of all rows
                        two of its experts           |
                        are wanted                 partial sums ---> summed over ranks, row by row,
    rank 1: its experts' pairs of received              `tree_sum` ----> y_RH on all ranks
            rows, summed to one row in fp32
                   |
    y_RH <---------+  summed over ranks by `tree_sum`, fp32, rounded once

Nothing is sent for a row and a rank without a pair. Empty pairs (id -1, or an id outside 0..E-1) read no expert and add
nothing. Every rank joins every exchange, with no rows too.

Two ways to size the buffers of the sharded layout give the same numbers: exact counts, which are exchanged first and
read on the host; and a fixed `capacity` of rows per rank pair, where no size depends on the routing and the host waits
for nothing (what a CUDA graph needs).

Shape suffixes: R rows of this rank, D rows sent (one per row and destination), N rows received, P ranks, K top-k,
E experts, e = E / P experts of a rank, C capacity, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from epoch_moe.experts.worklist import tree_sum
from epoch_moe.freshlane.collectives import ExpertParallelError, Pending, Ranks
from epoch_moe.routing import NO_EXPERT

Layout = Literal["sharded", "replicated"]
LAYOUTS: tuple[Layout, ...] = ("sharded", "replicated")


@dataclass(frozen=True, kw_only=True)
class DispatchHandle:
    """What `combine` needs to bring results back; made by `dispatch`, valid for one `combine`.

    Attributes:
        layout: of the dispatcher.
        num_rows: R.
        dtype: torch.dtype of the rows, and of what `combine` returns.
        needed_PR: bool ``[P,R]``, whether rank p has a pair of row r; None for the replicated layout.
        place_PR: int64 ``[P,R]``, where in the exchanged buffer row r's copy for rank p lies (anything where
            ``needed_PR`` is False); None for the replicated layout.
        send, receive: rows to and from each rank (host numbers); None with a fixed capacity, and for the replicated
            layout.
        name: what the dispatch was for, in errors.
    """

    layout: Layout
    num_rows: int
    dtype: torch.dtype
    needed_PR: Tensor | None
    place_PR: Tensor | None
    send: tuple[int, ...] | None
    receive: tuple[int, ...] | None
    name: str


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """The rows that this rank's experts work on.

    Attributes:
        x_NH: rows, in the dtype of the source rows.
        ids_NK: int64, *local* expert ids ``0..e-1``; `NO_EXPERT` for pairs of other ranks, empty pairs and unused
            slots.
        weights_NK: fp32 combine weights; 0 where there is no local expert.
        handle: for `combine`.
    """

    x_NH: Tensor
    ids_NK: Tensor
    weights_NK: Tensor
    handle: DispatchHandle


@dataclass
class Traffic:
    """What went over the wire from this rank: rows and bytes to *other* ranks.

    Attributes:
        dispatch_rows, dispatch_bytes: rows with their ids and weights, towards the experts.
        combine_rows, combine_bytes: partial sums, back.
        count_bytes: sizes that were exchanged first.
        pair_rows: what an exchange of one row per pair would have sent in each direction (with a fixed capacity this
            is not counted: it would wait for the device).
    """

    dispatch_rows: int = 0
    dispatch_bytes: int = 0
    combine_rows: int = 0
    combine_bytes: int = 0
    count_bytes: int = 0
    pair_rows: int = 0


class FreshLaneDispatcher:
    """Dispatch and combine of one layer's (or one model's) fresh rows over a process group.

    Args:
        num_experts: E; must be a multiple of the number of ranks.
        group: a process group or one-dimensional DeviceMesh.
        layout: ``"sharded"`` or ``"replicated"``.
        capacity: rows per pair of ranks for the sharded layout without host sync, equal on all ranks; None exchanges
            exact counts.

    Attributes:
        ranks: the group.
        first_expert, local_experts: this rank's range of experts.
        traffic: what was sent so far.
    """

    def __init__(self, num_experts: int, group: Any, *, layout: Layout = "sharded", capacity: int | None = None):
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r}: expected 'sharded' or 'replicated'")
        if capacity is not None and (layout != "sharded" or capacity < 1):
            raise ValueError(
                f"capacity={capacity} with layout={layout!r}: a capacity is a number of rows >= 1, for 'sharded' only"
            )
        self.ranks = group if isinstance(group, Ranks) else Ranks(group)
        if num_experts % self.ranks.world:
            raise ValueError(
                f"{num_experts} experts cannot be split evenly over {self.ranks.world} ranks: use a number of ranks "
                f"that divides {num_experts}"
            )
        self.num_experts, self.layout, self.capacity = num_experts, layout, capacity
        self.local_experts = num_experts // self.ranks.world
        self.first_expert = self.ranks.rank * self.local_experts
        self.traffic = Traffic()
        self._overflow: Tensor | None = None

    def dispatch(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, *, name: str = "dispatch") -> Pending:
        """Start sending rows to their experts.

        Args:
            x_RH: this rank's fresh rows (replicated: everybody's, the same on all ranks); R may be 0 and may differ
                between ranks.
            ids_RK: int64 global expert ids; `NO_EXPERT` or an id outside 0..E-1 is no pair.
            weights_RK: fp32 combine weights, scaling included.
            name: what this is for ("layer 3"), for errors.

        Returns:
            A `Pending` whose ``wait()`` gives `Dispatched`. Compute what does not need the experts before waiting.

        Raises:
            ValueError: shapes or dtypes that do not fit together.
            ExpertParallelError: a failed exchange, from ``wait()`` too.
        """
        self._check(x_RH, ids_RK, weights_RK)
        if self.layout == "replicated":
            ids_NK = self._local(ids_RK, self.ranks.rank)
            handle = DispatchHandle(
                layout=self.layout,
                num_rows=x_RH.shape[0],
                dtype=x_RH.dtype,
                needed_PR=None,
                place_PR=None,
                send=None,
                receive=None,
                name=name,
            )
            weights_NK = weights_RK.masked_fill(ids_NK == NO_EXPERT, 0.0)
            ready = Dispatched(x_NH=x_RH, ids_NK=ids_NK, weights_NK=weights_NK, handle=handle)
            return Pending(None, name, lambda: ready)
        owner_RK = self._owner(ids_RK)
        rank_P11 = torch.arange(self.ranks.world, device=ids_RK.device)[:, None, None]
        needed_PR = (owner_RK == rank_P11).any(dim=-1)
        if self.capacity is None:
            return self._dispatch_exact(x_RH, ids_RK, weights_RK, owner_RK, needed_PR, name)
        return self._dispatch_fixed(x_RH, ids_RK, weights_RK, needed_PR, self.capacity, name)

    def _dispatch_exact(
        self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, owner_RK: Tensor, needed_PR: Tensor, name: str
    ) -> Pending:
        ranks, num_rows = self.ranks, x_RH.shape[0]
        send_P = needed_PR.sum(dim=1)
        receive_P = ranks.all_to_all(send_P, None, None, f"{name}: exchange of row counts").wait()
        pairs = ((owner_RK >= 0) & (owner_RK != ranks.rank)).sum().expand_as(send_P)
        send, receive, (pair_rows, *_) = torch.stack([send_P, receive_P, pairs]).tolist()  # the one host sync
        place_PR = needed_PR.reshape(-1).cumsum(0).view_as(needed_PR) - 1
        # Where it is True, ascending: how many that are is known, so that nonzero() need not wait for it.
        flat_D = needed_PR.reshape(-1).to(torch.uint8).argsort(descending=True, stable=True)[: sum(send)]
        row_D, rank_D = flat_D % max(num_rows, 1), flat_D // max(num_rows, 1)
        ids_DK = self._local(ids_RK[row_D], rank_D.unsqueeze(1))
        payload = _pack(x_RH[row_D], ids_DK, weights_RK[row_D])
        remote = sum(send) - send[ranks.rank]
        traffic = self.traffic
        traffic.count_bytes += (ranks.world - 1) * send_P.element_size()
        traffic.dispatch_rows += remote
        traffic.dispatch_bytes += remote * payload.shape[1]
        traffic.pair_rows += pair_rows
        handle = DispatchHandle(
            layout=self.layout,
            num_rows=num_rows,
            dtype=x_RH.dtype,
            needed_PR=needed_PR,
            place_PR=place_PR,
            send=tuple(send),
            receive=tuple(receive),
            name=name,
        )
        return self._exchange(payload, x_RH, ids_RK.shape[1], handle)

    def _dispatch_fixed(
        self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, needed_PR: Tensor, capacity: int, name: str
    ) -> Pending:
        ranks, num_rows, device = self.ranks, x_RH.shape[0], x_RH.device
        slots = ranks.world * capacity
        slot_PR = needed_PR.cumsum(dim=1) - 1
        fits_PR = needed_PR & (slot_PR < capacity)
        over = (needed_PR & ~fits_PR).any()
        self._overflow = over if self._overflow is None else self._overflow | over
        first_P1 = torch.arange(ranks.world, device=device).unsqueeze(1) * capacity
        place_PR = torch.where(fits_PR, first_P1 + slot_PR, slots)  # the last slot is thrown away
        row_PR = torch.arange(num_rows, device=device).expand_as(place_PR)
        row_D = torch.full((slots + 1,), num_rows, device=device).scatter_(
            0, place_PR.reshape(-1), row_PR.reshape(-1)
        )[:slots]
        # One row more than there are, for unused slots: zeros without an expert.
        x_more = torch.cat([x_RH, x_RH.new_zeros(1, x_RH.shape[1])])
        ids_more = torch.cat([ids_RK, ids_RK.new_full((1, ids_RK.shape[1]), NO_EXPERT)])
        weights_more = torch.cat([weights_RK, weights_RK.new_zeros(1, weights_RK.shape[1])])
        rank_D1 = torch.arange(ranks.world, device=device).repeat_interleave(capacity).unsqueeze(1)
        payload = _pack(x_more[row_D], self._local(ids_more[row_D], rank_D1), weights_more[row_D])
        remote = (ranks.world - 1) * capacity
        self.traffic.dispatch_rows += remote
        self.traffic.dispatch_bytes += remote * payload.shape[1]
        handle = DispatchHandle(
            layout=self.layout,
            num_rows=num_rows,
            dtype=x_RH.dtype,
            needed_PR=fits_PR,
            place_PR=place_PR.clamp_max(slots - 1),
            send=None,
            receive=None,
            name=name,
        )
        return self._exchange(payload, x_RH, ids_RK.shape[1], handle)

    def _exchange(self, payload: Tensor, x_RH: Tensor, top_k: int, handle: DispatchHandle) -> Pending:
        def unpack(received: Tensor) -> Dispatched:
            x_NH, ids_NK, weights_NK = _unpack(received, x_RH.shape[1], x_RH.dtype, top_k)
            return Dispatched(x_NH=x_NH, ids_NK=ids_NK, weights_NK=weights_NK, handle=handle)

        return self.ranks.all_to_all(
            payload, handle.send, handle.receive, f"{handle.name}: dispatch of rows", unpack
        )

    def combine(self, y_NH: Tensor, handle: DispatchHandle) -> Pending:
        """Start bringing partial sums back.

        Args:
            y_NH: one row per received row: the sum over this rank's experts. It travels in its own dtype (fp32, where
                no bit may be lost), and is summed over ranks in fp32.
            handle: of the `dispatch` that gave the rows.

        Returns:
            A `Pending` whose ``wait()`` gives ``y_RH`` in the dtype of the source rows.
        """
        if self.layout == "replicated":
            return self._combine_replicated(y_NH, handle)
        remote = (
            (self.ranks.world - 1) * (self.capacity or 0)
            if handle.receive is None
            else sum(handle.receive) - handle.receive[self.ranks.rank]
        )
        self.traffic.combine_rows += remote
        self.traffic.combine_bytes += remote * y_NH.shape[1] * y_NH.element_size()

        def gather(back_DH: Tensor) -> Tensor:
            assert handle.needed_PR is not None and handle.place_PR is not None
            if not back_DH.shape[0]:
                return y_NH.new_zeros((handle.num_rows, y_NH.shape[1]), dtype=handle.dtype)
            parts_PRH = back_DH[handle.place_PR.clamp(0, back_DH.shape[0] - 1)].float()
            return tree_sum(parts_PRH.masked_fill(~handle.needed_PR.unsqueeze(-1), 0.0)).to(handle.dtype)

        return self.ranks.all_to_all(
            y_NH, handle.receive, handle.send, f"{handle.name}: return of partial sums", gather
        )

    def _combine_replicated(self, y_RH: Tensor, handle: DispatchHandle) -> Pending:
        """Every rank sums a share of the rows over ranks, by `tree_sum`, and the shares are collected.

        As many bytes as an all-reduce, whose order of additions would depend on the number of ranks and the backend.
        """
        ranks, num_rows, hidden = self.ranks, handle.num_rows, y_RH.shape[1]
        share = -(-num_rows // ranks.world)
        padded = torch.nn.functional.pad(y_RH, (0, 0, 0, share * ranks.world - num_rows))
        parts = ranks.all_to_all(padded, None, None, f"{handle.name}: sum of partial sums").wait()
        own = tree_sum(parts.view(ranks.world, share, hidden).float()).to(handle.dtype)
        remote = (ranks.world - 1) * share
        self.traffic.combine_rows += 2 * remote
        self.traffic.combine_bytes += remote * hidden * (y_RH.element_size() + own.element_size())
        return ranks.all_gather(own, f"{handle.name}: collection of sums", lambda rows: rows[:num_rows])

    def check_capacity(self) -> None:
        """Raise where a dispatch since the last call had more rows for a rank than `capacity` (one host sync).

        Raises:
            ExpertParallelError: on the rank whose rows did not fit; its results since then are incomplete.
        """
        over, self._overflow = self._overflow, None
        if over is not None and bool(over):
            raise ExpertParallelError(
                f"more than capacity={self.capacity} rows of rank {self.ranks.rank} had pairs on one rank: raise the "
                "capacity to the rows of a forward on one rank, or pass None for exact counts"
            )

    def _owner(self, ids: Tensor) -> Tensor:
        """Rank of each pair; -1 where there is none."""
        valid = (ids >= 0) & (ids < self.num_experts)
        return torch.where(valid, ids // self.local_experts, -1)

    def _local(self, ids: Tensor, rank: Tensor | int) -> Tensor:
        """Ids among the experts of ``rank``; `NO_EXPERT` for all others'."""
        return torch.where(self._owner(ids) == rank, ids % self.local_experts, NO_EXPERT)

    def _check(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> None:
        if x_RH.dim() != 2 or ids_RK.dim() != 2 or ids_RK.shape[0] != x_RH.shape[0]:
            raise ValueError(
                f"x_RH has shape {tuple(x_RH.shape)} and ids_RK {tuple(ids_RK.shape)}: expected [rows, hidden] and "
                "[rows, top-k]"
            )
        if ids_RK.dtype != torch.int64 or weights_RK.dtype != torch.float32 or weights_RK.shape != ids_RK.shape:
            raise ValueError(
                f"ids_RK is {ids_RK.dtype} and weights_RK {weights_RK.dtype} of shape {tuple(weights_RK.shape)}: "
                f"expected int64 and float32, both {tuple(ids_RK.shape)}"
            )


def _pack(x_DH: Tensor, ids_DK: Tensor, weights_DK: Tensor) -> Tensor:
    """Rows, ids and weights as one buffer of bytes, so that one exchange carries all three."""
    parts = (x_DH, ids_DK.to(torch.int32), weights_DK.masked_fill(ids_DK == NO_EXPERT, 0.0))
    return torch.cat([_plain(part).view(torch.uint8) for part in parts], dim=1)


def _plain(x: Tensor) -> Tensor:
    """Contiguous, with a last stride of 1 also where that dimension has one element or there is no row."""
    x = x.contiguous()
    return x.as_strided(x.shape, (x.shape[1], 1))


def _unpack(payload: Tensor, hidden: int, dtype: torch.dtype, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [hidden * torch.empty((), dtype=dtype).element_size(), 4 * top_k, 4 * top_k]
    x, ids, weights = (_plain(part) for part in payload.split(sizes, dim=1))
    return x.view(dtype), ids.view(torch.int32).long(), weights.view(torch.float32)
