"""`Loader`: how missing experts come in, read ahead by a thread, moved to the device, handed over one after the other.

Two buffers: while one expert is computed, the next is read. A buffer is written again only when what it held has been
used. Small experts are read by who computes them: handing them over between threads would take longer.

Shape suffixes: E experts, F expert inner size, H hidden.
"""

from __future__ import annotations

import copy
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from epoch_moe.experts.views import ExpertViews
from epoch_moe.residency.config import Miss
from epoch_moe.residency.costs import Costs
from epoch_moe.residency.placement import Counts
from epoch_moe.residency.sources import Buffer, Buffers, ExpertSource

Job = tuple[int, "int | None"]
"""An expert, and the slot that it is loaded into; None: it passes through."""
READ_AHEAD_BYTES = 1_000_000
"""Experts from this size on are read by the thread. Waking it takes about 0.1 ms, in which a file gives so much."""


@dataclass
class LayerCounts(Counts):
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


class Loader:
    """What the layers of a model share to bring experts in: buffers, a thread that reads, a stream that moves.

    Args:
        buffers: that experts pass through.
        costs: speeds of this machine.
        miss: `ResidencyConfig.miss`.
    """

    def __init__(self, buffers: Buffers, costs: Costs, miss: Miss):
        self.buffers, self.costs, self.miss = buffers, costs, miss
        self._streams: dict[torch.device, Any] = {}
        self._thread: tuple[int, ThreadPoolExecutor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Loader:
        new = memo[id(self)] = Loader(copy.deepcopy(self.buffers, memo), self.costs, self.miss)
        return new

    def worth_loading(self, rows: int, reuse: float) -> bool:
        """See `Costs.worth_loading`."""
        return self.costs.worth_loading(rows, reuse, self.miss)

    def submit(self, read: Any) -> Future[int]:
        """Have the thread read: one that is started at its first use, and again in a process that was forked."""
        if self._thread is None or self._thread[0] != os.getpid():
            self._thread = os.getpid(), ThreadPoolExecutor(1, "epoch_moe_experts")
        return self._thread[1].submit(read)

    def stream(self, device: torch.device) -> Any:
        """The stream that moves experts to a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


PASSING = "one", "other"


def passing(buffers: Buffers, dtype: torch.dtype, device: torch.device) -> list[Buffer]:
    """The two buffers for experts on their way to ``device``, pinned for a GPU."""
    return [buffers.get(use, dtype, device.type == "cuda") for use in PASSING]


class Arrivals:
    """The missing experts of one forward of a layer, as they come in; a context, behind which no read is under way.

    Iterating gives ``(expert, loaded, weights)`` for each job: weights of one expert, in its slot or in main memory,
    that stay valid until the next one is asked for.

    Args:
        loader: of the model.
        source: of the layer.
        fast: its slots.
        jobs: what is to come, in this order; loads first.
        counts: of the layer.
    """

    def __init__(
        self, loader: Loader, source: ExpertSource, fast: ExpertViews, jobs: Sequence[Job], counts: LayerCounts
    ):
        self.loader, self.source, self.fast, self.counts = loader, source, fast, counts
        self.device = fast.down_EHF.device
        self._waiting: deque[Job] = deque(jobs)
        self._free: deque[tuple[Buffer, Any]] = deque(
            (buffer, None) for buffer in passing(loader.buffers, fast.down_EHF.dtype, self.device)
        )
        self._coming: deque[tuple[Job, Buffer | None, Any]] = deque()
        self._futures: list[Future[int]] = []
        self._ahead = fast.bytes_per_expert >= READ_AHEAD_BYTES
        self._moves = self.device.type != "cpu"
        self._submit()

    def __enter__(self) -> Arrivals:
        return self

    def _submit(self) -> None:
        """Start what can be read now: two experts ahead at most."""
        while self._waiting and len(self._coming) < 2:
            expert, slot = self._waiting[0]
            # From main memory, experts go to the device, and are computed, without a stop.
            buffered = not self.source.in_memory and (slot is None or self._moves)
            if buffered and not self._free:
                return
            job = self._waiting.popleft()
            buffer: Buffer | None = None
            if buffered:
                buffer, event = self._free.popleft()
                if event is not None:
                    event.synchronize()
            target = buffer
            if target is None and slot is not None and not self._moves:
                target = self._slot(slot)
            read: Any = None if target is None else partial(self._read, expert, target)
            if read is not None and self._ahead:
                future = self.loader.submit(read)
                self._futures.append(future)
                read = future.result
            self._coming.append((job, buffer, read))

    def _slot(self, slot: int) -> Buffer:
        return self.fast.gate_up_E2FH[slot], self.fast.down_EHF[slot]

    def _read(self, expert: int, buffer: Buffer) -> int:
        start = time.perf_counter()
        with torch.no_grad():
            size = self.source.read(expert, *buffer)
        self.counts.read_seconds += time.perf_counter() - start
        return size

    def __iter__(self) -> Iterator[tuple[int, bool, ExpertViews]]:
        while self._coming:
            (expert, slot), buffer, read = self._coming.popleft()
            if read is not None:
                start = time.perf_counter()
                size = read()
                self.counts.wait_seconds += time.perf_counter() - start
                if self.source.in_memory:
                    self.counts.host_bytes += size
                else:
                    self.counts.file_bytes += size
            event = None
            if slot is None:
                gate_up, down = self.source.weights(expert) if buffer is None else buffer
            else:
                if self._moves:
                    event = self._move(expert, buffer, slot)
                gate_up, down = self._slot(slot)
            self._submit()
            yield expert, slot is not None, ExpertViews.fused(gate_up[None], down[None])
            if buffer is not None:
                self._free.append((buffer, event))
                self._submit()

    def _move(self, expert: int, buffer: Buffer | None, slot: int) -> Any:
        """Copy an expert to its slot on the device; what tells when its buffer may be written again.

        On CUDA the copy runs on a stream of its own beside the products under way; those that need it wait there.
        """
        host = self.source.weights(expert) if buffer is None else buffer
        self.counts.moved_bytes += sum(t.numel() * t.element_size() for t in host)
        if self.device.type != "cuda":
            for target, part in zip(self._slot(slot), host, strict=True):
                target.copy_(part)
            return None
        current = torch.cuda.current_stream(self.device)
        stream = self.loader.stream(self.device)
        stream.wait_stream(current)  # an earlier product may still read the slot
        with torch.cuda.stream(stream):
            for target, part in zip(self._slot(slot), host, strict=True):
                target.copy_(part, non_blocking=True)
            event = stream.record_event()
        current.wait_event(event)
        return event

    def __exit__(self, *_: object) -> None:
        """Cancel what has not begun, and wait for what has."""
        for future in self._futures:
            if not future.cancel():
                future.exception()
