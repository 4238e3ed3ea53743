"""`Residency`: what the layers of a model with expert residency share: policy, clock, buffers, counts.

Shape suffixes: B sequences, S rows per sequence, R rows, K top-k.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epoch_moe.plan.block_plan import ForwardPlan
from epoch_moe.plan.packed import ListedRows
from epoch_moe.residency.arrivals import Arrivals, Buffer, Job, Reader
from epoch_moe.residency.config import ResidencyConfig
from epoch_moe.residency.costs import Costs, measure_costs
from epoch_moe.residency.demand import (
    Demand,
    classes_of,
    dense_classes_of,
    dense_demand,
    live_rows,
    planned_demand,
)
from epoch_moe.residency.placement import Steps
from epoch_moe.residency.policies import make_policy
from epoch_moe.residency.sources import FileSource

if TYPE_CHECKING:
    from epoch_moe.plan.slot import DenseForward
    from epoch_moe.residency.experts import ResidentExperts


@dataclass
class LayerCounts:
    """Bytes and seconds of one layer, beside `PlacementCounts`.

    Attributes:
        file_bytes, host_bytes: read from files, and from main memory to buffers.
        moved_bytes: moved to a device that is not the CPU.
        read_seconds: of the reading thread.
        wait_seconds: products waited for it.
        slot_seconds, bypass_seconds: products of experts in slots, and of those computed where they lie. On a device
            other than the CPU the former are the seconds of asking for them.
    """

    file_bytes: int = 0
    host_bytes: int = 0
    moved_bytes: int = 0
    read_seconds: float = 0.0
    wait_seconds: float = 0.0
    slot_seconds: float = 0.0
    bypass_seconds: float = 0.0

    def add_read(self, size: int, *, from_file: bool) -> None:
        """One expert was read."""
        if from_file:
            self.file_bytes += size
        else:
            self.host_bytes += size


@dataclass
class _Seen:
    """One forward: its number, and the class of its rows by how many of them a layer computes."""

    number: int
    classes: dict[int, Tensor] = field(default_factory=dict)


class Residency:
    """The shared state of a model's `ResidentExperts`.

    Args:
        config: the user's choices.
        num_layers: MoE layers.
        num_experts: of each layer, on this rank.
        slots_L: experts that each layer holds.

    Attributes:
        layers: the experts, layer by layer; filled by who makes them.
        counts: of each layer.
        costs: speeds of this machine; None until `measure`.
        spilled: bytes that were written to a temporary file.

    Forwards of several threads take turns, one layer at a time: they share slots and policy.
    """

    def __init__(self, config: ResidencyConfig, num_layers: int, num_experts: int, slots_L: Sequence[int]):
        self.config = config
        self.layers: list[ResidentExperts] = []
        self.counts = [LayerCounts() for _ in range(num_layers)]
        self.policy = make_policy(config.policy, num_layers, num_experts, max(slots_L))
        self.costs: Costs | None = None
        self.spilled = 0
        self._number = 0
        self._ended = True
        self._bare_layer = num_layers
        self._bare_rows = -1
        self._latest: _Seen | None = None
        self._start()

    def _start(self) -> None:
        """What belongs to one process and one model, and is never copied."""
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._reader = Reader()
        self._known: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()
        self._buffers: dict[tuple[torch.dtype, bool], list[Buffer]] = {}
        self._streams: dict[torch.device, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Residency:
        new: Residency = object.__new__(type(self))
        memo[id(self)] = new
        own = ("_lock", "_process", "_reader", "_known", "_buffers", "_streams")
        new._start()
        for name, value in self.__dict__.items():
            if name not in own:
                setattr(new, name, copy.deepcopy(value, memo))
        return new

    def __reduce__(self) -> Any:
        raise TypeError("a model with experts outside of its memory cannot be pickled: call epoch_moe.unpatch first")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One thread at a time. In a forked process the lock is a new one: nobody there can hold the old."""
        if self._process != os.getpid():
            self._lock, self._process, self._reader = threading.RLock(), os.getpid(), Reader()
        with self._lock:
            yield

    # --------------------------------------------------------------------------------------------- for one layer's run

    def demand(
        self,
        layer: ResidentExperts,
        ids_RK: Tensor,
        weights_RK: Tensor,
        forward: ForwardPlan | DenseForward | None,
        known_rows: bool,
    ) -> Demand:
        """What a layer asks for, with what the plan says of its rows."""
        num_rows, index, num_experts = ids_RK.shape[0], layer.index, layer.num_experts
        seen = self._enter(index, forward)
        common = (index, seen.number, ids_RK, weights_RK, num_experts)
        if forward is None:
            cold, self._bare_rows = num_rows != self._bare_rows, num_rows
            return dense_demand(*common, cold=cold)
        if not known_rows:
            cold = forward.cold
            return dense_demand(*common, row_R=torch.full((num_rows,), -1), cold=cold)
        if isinstance(forward, ForwardPlan):
            # A layer that fell back has more fresh rows than the others, or all.
            plans = [rows for rows in (forward.rows, forward._full_rows) if isinstance(rows, ListedRows)]
            rows = next((rows for rows in plans if rows.num_fresh == num_rows), None)
            if rows is None:
                return dense_demand(*common, cold=forward.cold)
            if num_rows not in seen.classes:
                seen.classes[num_rows] = classes_of(forward, rows).cpu()
            return planned_demand(
                forward, rows, index, seen.number, ids_RK, weights_RK, num_experts, seen.classes[num_rows]
            )
        if num_rows not in seen.classes:
            seen.classes[num_rows] = dense_classes_of(forward, num_rows)
        return dense_demand(
            *common,
            row_R=forward.valid_R if forward.num_rows == num_rows else None,
            class_R=seen.classes[num_rows],
            seq_len=forward.shape[-1],
            lead=forward.lead,
            cold=forward.cold,
        )

    def _enter(self, layer: int, forward: ForwardPlan | DenseForward | None) -> _Seen:
        """The forward that a layer is in: a new one, or one that other layers have been in."""
        if forward is None:
            # Nothing tells forwards without a context apart but the order of their layers.
            seen = None if layer <= self._bare_layer else self._latest
            self._bare_layer = layer
        else:
            seen = self._known.get(forward)
            self._bare_layer = len(self.counts)
        if seen is None:
            if not self._ended:
                self.policy.end_forward()
            self._number += 1
            self._ended = False
            seen = _Seen(self._number)
            if forward is not None:
                self._known[forward] = seen
        self._latest = seen
        return seen

    def plan(self, layer: ResidentExperts, demand: Demand) -> Steps:
        """What is in place, what is brought, and what passes through."""
        if not demand.experts:
            return Steps([], [], [])  # rows of other ranks only: no forward of the policy's
        self.policy.observe(demand)
        return layer.placement.plan(demand, self.policy, self._decide)

    def _decide(self, expert: int, rows: int, reuse: float) -> Any:
        assert self.costs is not None
        return self.costs.decide(rows, reuse, self.config.miss)

    @contextmanager
    def bring(self, layer: ResidentExperts, jobs: Sequence[Job]) -> Iterator[Iterator[Any]]:
        """Missing experts, as they come in; nothing is under way behind it."""
        arrivals = Arrivals(layer, jobs, self.buffers_of(layer), self._reader, self.counts[layer.index])
        try:
            yield iter(arrivals)
        finally:
            arrivals.close()

    # ------------------------------------------------------------------------------------------------------ the clock

    def end_forward(self, forward: ForwardPlan | DenseForward, confidence_BS: Tensor | None) -> None:
        """What the decoder thought of the rows of the forward that has just ended."""
        with self.turn():
            seen = self._known.get(forward)
            if self._ended or seen is None or seen is not self._latest:
                return  # no layer computed anything, or another thread's forward came in between
            self._ended = True
            live_T = live_rows(forward) if isinstance(forward, ForwardPlan) else None
            rows = forward.ids_BS.numel() if isinstance(forward, ForwardPlan) else forward.shape.numel()
            if confidence_BS is not None and confidence_BS.numel() == rows:
                self.policy.end_forward(confidence_BS.reshape(-1).to("cpu", torch.float32), live_T)
            else:
                self.policy.end_forward(None, live_T)

    # ---------------------------------------------------------------------------------------------------------- memory

    def buffers_of(self, layer: ResidentExperts) -> list[Buffer]:
        """Two buffers for experts of this layer's dtype, allocated on the first call."""
        pinned = layer.device.type == "cuda"
        key = (layer.slots.down_EHF.dtype, pinned)
        if key not in self._buffers:
            used = {(one.slots.down_EHF.dtype, one.device.type == "cuda") for one in self.layers}
            for old in [old for old in self._buffers if old not in used]:
                del self._buffers[old]
            with torch.inference_mode(False):
                self._buffers[key] = [
                    (
                        torch.empty(2 * layer.inner, layer.hidden, dtype=key[0], pin_memory=pinned),
                        torch.empty(layer.hidden, layer.inner, dtype=key[0], pin_memory=pinned),
                    )
                    for _ in range(2)
                ]
        return self._buffers[key]

    def stream(self, device: torch.device) -> Any:
        """The stream that moves experts to a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    @property
    def tier(self) -> str:
        """Where experts lie that are not in a slot: ``"host"`` or ``"disk"``."""
        return "host" if self.layers[0].source.in_memory else "disk"

    @property
    def fast_bytes(self) -> int:
        """Slots of all layers, and on the CPU the buffers too."""
        on_host = self.layers[0].device.type == "cpu"
        return sum(layer.slot_bytes for layer in self.layers) + (self.buffer_bytes if on_host else 0)

    @property
    def buffer_bytes(self) -> int:
        """What experts pass through."""
        buffers = [buffer for pair in self._buffers.values() for buffer in pair]
        staged = {id(layer.source.staging): layer.source.staging for layer in self.layers
                  if isinstance(layer.source, FileSource)}  # fmt: skip
        return sum(t.numel() * t.element_size() for buffer in buffers for t in buffer) + sum(
            staging.nbytes for staging in staged.values()
        )

    def summary(self) -> str:
        """One line for reports."""
        slots = [layer.placement.slots for layer in self.layers]
        kept = f"{slots[0]}" if len(set(slots)) == 1 else f"{min(slots)} to {max(slots)}"
        where = "main memory" if self.tier == "host" else "the checkpoint's files"
        if self.spilled:
            where = f"temporary files ({self.spilled / 1e6:,.1f} MB)"
        return (
            f"residency: {kept} of {self.layers[0].num_experts} experts per layer in {self.fast_bytes / 1e6:,.1f} MB "
            f"of fast memory, the others in {where}; policy {self.config.policy}"
        )

    def measure(self) -> None:
        """Take this machine's speeds from the first layer."""
        layer = self.layers[0]
        buffer = self.buffers_of(layer)[0]
        self.costs = measure_costs(layer.source, layer.num_experts, *buffer, layer.device)
