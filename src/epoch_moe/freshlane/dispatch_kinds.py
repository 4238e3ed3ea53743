"""How rows get to their experts and back: locally, sharded or replicated over ranks. Three kinds of one interface.

Two ways to size the buffers of the sharded kind give the same numbers: exact counts, which are exchanged first and read
on the host; and a fixed `capacity` of rows per rank pair, where no size depends on the routing and the host waits for
nothing (what a CUDA graph needs).

Shape suffixes: R rows of this rank, D rows sent (one per row and destination), N rows received, P ranks, K top-k,
E experts, e = E / P experts of a rank, C capacity, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from epoch_moe.freshlane.collectives import ExpertParallelError, Pending, Ranks
from epoch_moe.routing import NO_EXPERT
from epoch_moe.worklist import tree_sum

KindName = Literal["local", "sharded", "replicated"]
GROUP_KINDS: tuple[KindName, ...] = ("sharded", "replicated")
"""Those over a group of ranks."""


@dataclass(frozen=True)
class ExpertRange:
    """One rank's experts of a layer, a contiguous range.

    Attributes:
        first: number of the first one.
        count: e.
        total: E.
    """

    first: int
    count: int
    total: int

    @classmethod
    def of(cls, total: int, ranks: Ranks | None) -> ExpertRange:
        """This rank's share.

        Raises:
            ValueError: the experts cannot be split evenly.
        """
        if ranks is None:
            return cls(0, total, total)
        if total % ranks.world:
            raise ValueError(
                f"{total} experts cannot be split evenly over {ranks.world} ranks: use a number of ranks "
                f"that divides {total}"
            )
        count = total // ranks.world
        return cls(ranks.rank * count, count, total)

    @property
    def numbers(self) -> range:
        """Numbers of this rank's experts in the layer: ``first`` up to, not including, ``first + count``."""
        return range(self.first, self.first + self.count)

    @property
    def part(self) -> tuple[int, int] | None:
        """As `epoch_moe.worklist.build_worklist` takes it: (first, total), or None where these are all."""
        return None if self.count == self.total else (self.first, self.total)

    def owner(self, ids: Tensor) -> Tensor:
        """Rank of each pair; -1 where there is none."""
        valid = (ids >= 0) & (ids < self.total)
        return torch.where(valid, ids // self.count, -1)

    def local(self, ids: Tensor, rank: Tensor | int) -> Tensor:
        """Ids among the experts of ``rank``; `NO_EXPERT` for all others'."""
        own = ids - rank * self.count
        return own.masked_fill((own < 0) | (own >= self.count), NO_EXPERT)


@dataclass(frozen=True, kw_only=True)
class DispatchHandle:
    """What `combine` needs to bring results back; made by `dispatch`, valid for one `combine`.

    Attributes:
        num_rows: R.
        arrived: N, the rows that `combine` takes.
        dtype: torch.dtype of the rows, and of what `combine` returns.
        name: what the dispatch was for, in errors.
        needed_PR: bool ``[P,R]``, whether rank p has a pair of row r; None where rows do not travel.
        place_PR: int64 ``[P,R]``, where in the exchanged buffer row r's copy for rank p lies (anything where
            ``needed_PR`` is False); None where rows do not travel.
        send, receive: rows to and from each rank (host numbers); None with a fixed capacity, and where rows do not
            travel.
    """

    num_rows: int
    arrived: int
    dtype: torch.dtype
    name: str
    needed_PR: Tensor | None = None
    place_PR: Tensor | None = None
    send: tuple[int, ...] | None = None
    receive: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """The rows that this rank's experts work on.

    Attributes:
        x_NH: rows, in the dtype of the source rows.
        ids_NK: int64, *local* expert ids ``0..e-1``; `NO_EXPERT` for pairs of other ranks, empty pairs and unused
            places of a buffer of fixed size.
        weights_NK: fp32 combine weights; 0 where there is no local expert.
        own_rows: these are the rows that `dispatch` was given, in their order.
        partial: the sums over this rank's experts are added to other ranks' and stay in fp32 until then.
        handle: for `combine`.
    """

    x_NH: Tensor
    ids_NK: Tensor
    weights_NK: Tensor
    own_rows: bool
    partial: bool
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


class LocalDispatch:
    """Rows are where their experts are: nothing moves. The kind that the others are made from.

    Args:
        experts: this rank's.
        ranks: the group; None: all experts are in this process.
        traffic: where bytes are counted.
        capacity: C, of the sharded kind; None: exact counts.

    Attributes:
        rows_travel: there is something to wait for between dispatch and the experts.
    """

    rows_travel = False

    def __init__(self, experts: ExpertRange, ranks: Ranks | None, traffic: Traffic, capacity: int | None = None):
        self.experts, self.traffic, self.capacity = experts, traffic, capacity
        self._ranks = ranks

    @property
    def ranks(self) -> Ranks:
        """The group."""
        assert self._ranks is not None
        return self._ranks

    def dispatch(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, name: str) -> Pending:
        """Start sending rows; the `Pending`'s ``wait()`` gives `Dispatched`, as `FreshLaneDispatcher.dispatch`."""
        ids_NK = self.experts.local(ids_RK, self.experts.first // self.experts.count)
        ready = Dispatched(
            x_NH=x_RH,
            ids_NK=ids_NK,
            weights_NK=weights_RK.masked_fill(ids_NK == NO_EXPERT, 0.0),
            own_rows=True,
            partial=self._ranks is not None,
            handle=DispatchHandle(num_rows=x_RH.shape[0], arrived=x_RH.shape[0], dtype=x_RH.dtype, name=name),
        )
        return Pending(None, name, lambda: ready)

    def combine(self, y_NH: Tensor, handle: DispatchHandle) -> Pending:
        """Start bringing sums back; ``wait()`` gives ``y_RH``, as `FreshLaneDispatcher.combine`."""
        return Pending(None, handle.name, lambda: y_NH.to(handle.dtype))

    def check_capacity(self) -> None:
        """Raise `ExpertParallelError` where a buffer of fixed size was too small since the last call."""


class ReplicatedDispatch(LocalDispatch):
    """All ranks have the same rows: no row moves, partial sums are added."""

    def combine(self, y_NH: Tensor, handle: DispatchHandle) -> Pending:
        """Every rank sums a share of the rows over ranks, by `tree_sum`, and the shares are collected.

        As many bytes as an all-reduce, whose order of additions would depend on the number of ranks and the backend.
        """
        ranks, num_rows, hidden = self.ranks, handle.num_rows, y_NH.shape[1]
        share = -(-num_rows // ranks.world)
        padded = F.pad(y_NH, (0, 0, 0, share * ranks.world - num_rows))
        parts = ranks.all_to_all(padded, None, None, f"{handle.name}: sum of partial sums").wait()
        own = tree_sum(parts.view(ranks.world, share, hidden).float()).to(handle.dtype)
        remote = (ranks.world - 1) * share
        self.traffic.combine_rows += 2 * remote
        self.traffic.combine_bytes += remote * hidden * (y_NH.element_size() + own.element_size())
        return ranks.all_gather(own, f"{handle.name}: collection of sums", lambda rows: rows[:num_rows])


class ShardedDispatch(LocalDispatch):
    """Every rank has its own rows, and sends each to the ranks that own its experts."""

    rows_travel = True
    _overflow: Tensor | None = None

    def dispatch(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, name: str) -> Pending:
        """Each row once to every rank that owns one of its experts; the rows that arrive are those of all ranks."""
        owner_RK = self.experts.owner(ids_RK)
        rank_P1 = torch.arange(self.ranks.world, device=ids_RK.device).unsqueeze(1)
        needed_PR = (owner_RK == rank_P1.unsqueeze(2)).any(dim=-1)
        send: tuple[int, ...] | None = None
        receive: tuple[int, ...] | None = None
        if self.capacity is None:
            send, receive = self._exchange_counts(needed_PR, owner_RK, name)
            places, arrived, remote = sum(send), sum(receive), sum(send) - send[self.ranks.rank]
            place_PR = needed_PR.reshape(-1).cumsum(0).view_as(needed_PR) - 1
        else:
            places = arrived = self.ranks.world * self.capacity
            remote = places - self.capacity
            turn_PR = needed_PR.cumsum(dim=1) - 1
            over = (needed_PR & (turn_PR >= self.capacity)).any()
            self._overflow = over if self._overflow is None else self._overflow | over
            needed_PR = needed_PR & (turn_PR < self.capacity)
            place_PR = rank_P1 * self.capacity + turn_PR
        payload = self._fill(x_RH, ids_RK, weights_RK, torch.where(needed_PR, place_PR, places), places)
        self.traffic.dispatch_rows += remote
        self.traffic.dispatch_bytes += remote * payload.shape[1]
        handle = DispatchHandle(
            num_rows=x_RH.shape[0], arrived=arrived, dtype=x_RH.dtype, name=name,
            needed_PR=needed_PR, place_PR=place_PR, send=send, receive=receive,
        )  # fmt: skip

        def unpack(received: Tensor) -> Dispatched:
            x_NH, ids_NK, weights_NK = _unpack(received, x_RH.shape[1], x_RH.dtype, ids_RK.shape[1])
            return Dispatched(
                x_NH=x_NH, ids_NK=ids_NK, weights_NK=weights_NK, own_rows=False, partial=True, handle=handle
            )

        return self.ranks.all_to_all(payload, send, receive, f"{name}: dispatch of rows", unpack)

    def _exchange_counts(
        self, needed_PR: Tensor, owner_RK: Tensor, name: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows to and from each rank. The one host sync."""
        ranks, send_P = self.ranks, needed_PR.sum(dim=1)
        receive_P = ranks.all_to_all(send_P, None, None, f"{name}: exchange of row counts").wait()
        pairs = ((owner_RK >= 0) & (owner_RK != ranks.rank)).sum().expand_as(send_P)
        send, receive, (pair_rows, *_) = torch.stack([send_P, receive_P, pairs]).tolist()
        self.traffic.count_bytes += (ranks.world - 1) * send_P.element_size()
        self.traffic.pair_rows += pair_rows
        return tuple(send), tuple(receive)

    def _fill(
        self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, place_PR: Tensor, places: int
    ) -> Tensor:
        """The buffer that is sent: rows at their places; zeros without an expert at unused ones."""
        world, num_rows = place_PR.shape
        copy_PR = torch.arange(world * num_rows, device=x_RH.device)
        # The last place is thrown away, and what no copy of a row goes to becomes one row more than there are.
        copy_D = torch.full((places + 1,), world * num_rows, device=x_RH.device)
        copy_D = copy_D.scatter_(0, place_PR.reshape(-1), copy_PR)[:places]
        rank_D, row_D = copy_D // max(num_rows, 1), copy_D % max(num_rows, 1)
        if self.capacity is not None:
            row_D = torch.where(rank_D < world, row_D, num_rows)
            x_RH, weights_RK = F.pad(x_RH, (0, 0, 0, 1)), F.pad(weights_RK, (0, 0, 0, 1))
            ids_RK = F.pad(ids_RK, (0, 0, 0, 1), value=NO_EXPERT)
        return _pack(x_RH[row_D], self.experts.local(ids_RK[row_D], rank_D.unsqueeze(1)), weights_RK[row_D])

    def combine(self, y_NH: Tensor, handle: DispatchHandle) -> Pending:
        """Partial sums to the ranks that their rows came from, where `tree_sum` adds them."""
        remote = handle.arrived - (handle.receive[self.ranks.rank] if handle.receive else self.capacity or 0)
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

    def check_capacity(self) -> None:
        """Raise where rows did not fit; one host sync, with a capacity."""
        over, self._overflow = self._overflow, None
        if over is not None and bool(over):
            raise ExpertParallelError(
                f"more than capacity={self.capacity} rows of rank {self.ranks.rank} had pairs on one rank: raise the "
                "capacity to the rows of a forward on one rank, or pass None for exact counts"
            )


KINDS: dict[KindName, type[LocalDispatch]] = {
    "local": LocalDispatch,
    "sharded": ShardedDispatch,
    "replicated": ReplicatedDispatch,
}


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
