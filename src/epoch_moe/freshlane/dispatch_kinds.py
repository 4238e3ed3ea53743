"""How rows get to their experts and back: locally, sharded or replicated over ranks. Three kinds of one interface.

Two ways to size the buffers of the sharded kind give the same numbers: exact counts, which are exchanged first and read
on the host; and a fixed `capacity` of rows per rank pair, where no size depends on the routing and the host waits for
nothing (what a CUDA graph needs).

Shape suffixes: R rows of this rank, D rows sent (one per row and destination), N rows received, P ranks, K top-k,
E experts, e = E / P experts of a rank, C capacity, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from epoch_moe.freshlane.collectives import ExpertParallelError, Pending, Ranks
from epoch_moe.routing import NO_EXPERT
from epoch_moe.worklist import tree_sum

RowLayout = Literal["local", "sharded", "replicated"]
ROW_LAYOUTS: tuple[RowLayout, ...] = get_args(RowLayout)


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
        needed_PR: bool ``[P,R]``, whether rank p has a pair of row r; None for the replicated layout.
        place_PR: int64 ``[P,R]``, where in the exchanged buffer row r's copy for rank p lies (anything where
            ``needed_PR`` is False); None for the replicated layout.
        send, receive: rows to and from each rank (host numbers); None with a fixed capacity, and for the replicated
            layout.
        name: what the dispatch was for, in errors.
    """

    num_rows: int
    arrived: int
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


class DispatchKind(Protocol):
    """One way to bring rows to their experts and sums back; see `FreshLaneDispatcher` for the arguments.

    Attributes:
        rows_travel: there is something to wait for between dispatch and the experts.
    """

    rows_travel: bool

    def dispatch(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, name: str) -> Pending:
        """Start sending rows; the `Pending`'s ``wait()`` gives `Dispatched`, as `FreshLaneDispatcher.dispatch`."""
        ...

    def combine(self, y_NH: Tensor, handle: DispatchHandle) -> Pending:
        """Start bringing sums back; ``wait()`` gives ``y_RH``, as `FreshLaneDispatcher.combine`."""
        ...

    def check_capacity(self) -> None:
        """Raise `ExpertParallelError` where a buffer of fixed size was too small since the last call."""
        ...


def _stay(
    x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, experts: ExpertRange, name: str, *, partial: bool
) -> Pending:
    """`Dispatched` of rows that are where their experts are: N = R."""
    num_rows = x_RH.shape[0]
    ids_NK = experts.local(ids_RK, experts.first // experts.count)
    handle = DispatchHandle(
        num_rows=num_rows, arrived=num_rows, dtype=x_RH.dtype, needed_PR=None, place_PR=None, send=None, receive=None,
        name=name,
    )  # fmt: skip
    ready = Dispatched(
        x_NH=x_RH,
        ids_NK=ids_NK,
        weights_NK=weights_RK.masked_fill(ids_NK == NO_EXPERT, 0.0),
        own_rows=True,
        partial=partial,
        handle=handle,
    )
    return Pending(None, name, lambda: ready)


class LocalDispatch:
    """All experts are in this process: nothing moves.

    Args:
        experts: all of them.
    """

    rows_travel = False

    def __init__(self, experts: ExpertRange):
        self.experts = experts

    def dispatch(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, name: str) -> Pending:
        """See `DispatchKind`."""
        return _stay(x_RH, ids_RK, weights_RK, self.experts, name, partial=False)

    def combine(self, y_NH: Tensor, handle: DispatchHandle) -> Pending:
        """See `DispatchKind`."""
        return Pending(None, handle.name, lambda: y_NH.to(handle.dtype))

    def check_capacity(self) -> None:
        """Nothing to check: no buffer has a fixed size."""


class ReplicatedDispatch:
    """All ranks have the same rows: no row moves, partial sums are added.

    Args:
        ranks: the group.
        experts: this rank's.
        traffic: where bytes are counted.
        capacity: None; no row moves.
    """

    rows_travel = False

    def __init__(self, ranks: Ranks, experts: ExpertRange, traffic: Traffic, capacity: int | None = None):
        self.ranks, self.experts, self.traffic = ranks, experts, traffic

    def dispatch(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, name: str) -> Pending:
        """See `DispatchKind`."""
        return _stay(x_RH, ids_RK, weights_RK, self.experts, name, partial=True)

    def combine(self, y_NH: Tensor, handle: DispatchHandle) -> Pending:
        """Every rank sums a share of the rows over ranks, by `tree_sum`, and the shares are collected.

        As many bytes as an all-reduce, whose order of additions would depend on the number of ranks and the backend.
        """
        ranks, num_rows, hidden = self.ranks, handle.num_rows, y_NH.shape[1]
        share = -(-num_rows // ranks.world)
        padded = torch.nn.functional.pad(y_NH, (0, 0, 0, share * ranks.world - num_rows))
        parts = ranks.all_to_all(padded, None, None, f"{handle.name}: sum of partial sums").wait()
        own = tree_sum(parts.view(ranks.world, share, hidden).float()).to(handle.dtype)
        remote = (ranks.world - 1) * share
        self.traffic.combine_rows += 2 * remote
        self.traffic.combine_bytes += remote * hidden * (y_NH.element_size() + own.element_size())
        return ranks.all_gather(own, f"{handle.name}: collection of sums", lambda rows: rows[:num_rows])

    def check_capacity(self) -> None:
        """Nothing to check: no buffer has a fixed size."""


class ShardedDispatch:
    """Every rank has its own rows, and sends each to the ranks that own its experts.

    Args:
        ranks: the group.
        experts: this rank's.
        traffic: where bytes are counted.
        capacity: C; None: exact counts.
    """

    rows_travel = True

    def __init__(self, ranks: Ranks, experts: ExpertRange, traffic: Traffic, capacity: int | None):
        self.ranks, self.experts, self.traffic, self.capacity = ranks, experts, traffic, capacity
        self._overflow: Tensor | None = None

    def dispatch(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, name: str) -> Pending:
        """See `DispatchKind`."""
        owner_RK = self.experts.owner(ids_RK)
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
        flat_D = torch.nonzero_static(needed_PR.reshape(-1), size=sum(send)).squeeze(1)
        row_D, rank_D = flat_D % max(num_rows, 1), flat_D // max(num_rows, 1)
        ids_DK = self.experts.local(ids_RK[row_D], rank_D.unsqueeze(1))
        payload = _pack(x_RH[row_D], ids_DK, weights_RK[row_D])
        remote = sum(send) - send[ranks.rank]
        traffic = self.traffic
        traffic.count_bytes += (ranks.world - 1) * send_P.element_size()
        traffic.dispatch_rows += remote
        traffic.dispatch_bytes += remote * payload.shape[1]
        traffic.pair_rows += pair_rows
        handle = DispatchHandle(
            num_rows=num_rows,
            arrived=sum(receive),
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
        places = ranks.world * capacity  # of the buffer that is sent
        turn_PR = needed_PR.cumsum(dim=1) - 1
        fits_PR = needed_PR & (turn_PR < capacity)
        over = (needed_PR & ~fits_PR).any()
        self._overflow = over if self._overflow is None else self._overflow | over
        first_P1 = torch.arange(ranks.world, device=device).unsqueeze(1) * capacity
        place_PR = torch.where(fits_PR, first_P1 + turn_PR, places)  # the last one is thrown away
        row_PR = torch.arange(num_rows, device=device).expand_as(place_PR)
        row_D = torch.full((places + 1,), num_rows, device=device).scatter_(
            0, place_PR.reshape(-1), row_PR.reshape(-1)
        )[:places]
        # One row more than there are, for unused places: zeros without an expert.
        x_more = torch.cat([x_RH, x_RH.new_zeros(1, x_RH.shape[1])])
        ids_more = torch.cat([ids_RK, ids_RK.new_full((1, ids_RK.shape[1]), NO_EXPERT)])
        weights_more = torch.cat([weights_RK, weights_RK.new_zeros(1, weights_RK.shape[1])])
        rank_D1 = torch.arange(ranks.world, device=device).repeat_interleave(capacity).unsqueeze(1)
        payload = _pack(x_more[row_D], self.experts.local(ids_more[row_D], rank_D1), weights_more[row_D])
        remote = (ranks.world - 1) * capacity
        self.traffic.dispatch_rows += remote
        self.traffic.dispatch_bytes += remote * payload.shape[1]
        handle = DispatchHandle(
            num_rows=num_rows,
            arrived=places,
            dtype=x_RH.dtype,
            needed_PR=fits_PR,
            place_PR=place_PR.clamp_max(places - 1),
            send=None,
            receive=None,
            name=name,
        )
        return self._exchange(payload, x_RH, ids_RK.shape[1], handle)

    def _exchange(self, payload: Tensor, x_RH: Tensor, top_k: int, handle: DispatchHandle) -> Pending:
        def unpack(received: Tensor) -> Dispatched:
            x_NH, ids_NK, weights_NK = _unpack(received, x_RH.shape[1], x_RH.dtype, top_k)
            return Dispatched(
                x_NH=x_NH, ids_NK=ids_NK, weights_NK=weights_NK, own_rows=False, partial=True, handle=handle
            )

        return self.ranks.all_to_all(
            payload, handle.send, handle.receive, f"{handle.name}: dispatch of rows", unpack
        )

    def combine(self, y_NH: Tensor, handle: DispatchHandle) -> Pending:
        """See `DispatchKind`."""
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

    def check_capacity(self) -> None:
        """Raise where rows did not fit; see `FreshLaneDispatcher.check_capacity`."""
        over, self._overflow = self._overflow, None
        if over is not None and bool(over):
            raise ExpertParallelError(
                f"more than capacity={self.capacity} rows of rank {self.ranks.rank} had pairs on one rank: raise the "
                "capacity to the rows of a forward on one rank, or pass None for exact counts"
            )


KINDS: dict[RowLayout, Any] = {"sharded": ShardedDispatch, "replicated": ReplicatedDispatch}
"""The kinds over a group, made from (ranks, experts, traffic, capacity)."""


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
