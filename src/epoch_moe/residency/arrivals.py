"""How missing experts come in: read ahead by a thread, moved to the device, handed over one after the other.

Two buffers: while one expert is computed, the next is read. A buffer is written again only when what it held has been
used. Small experts are read by who computes them: handing them over between threads would take longer.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epoch_moe.experts.weights import Stacked

if TYPE_CHECKING:
    from epoch_moe.residency.experts import ResidentExperts
    from epoch_moe.residency.state import LayerCounts

Buffer = tuple[Tensor, Tensor]
Job = tuple[int, "int | None"]
"""An expert, and the slot that it is loaded into; None: it passes through."""
READ_AHEAD_BYTES = 1_000_000
"""Experts from this size on are read by the thread. Waking it takes about 0.1 ms, in which a file gives so much."""


class Reader:
    """One thread that reads, started at its first use, and again in a process that was forked."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = -1

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have it called."""
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(1, "epoch_moe_experts"), os.getpid()
        return self._pool.submit(function, *arguments)


class Arrivals:
    """The missing experts of one forward of a layer, in the order of its jobs.

    Args:
        layer: whose they are.
        jobs: what is to come; loads first.
        buffers: two, on the host, pinned where the device is a GPU.
        reader: reads them.
        counts: of the layer.

    Iterating gives ``(expert, loaded, weights)``: weights of one expert, in its slot or on the host, that stay valid
    until the next step. `close` ends it, also in the middle: no read is under way afterwards.
    """

    def __init__(
        self,
        layer: ResidentExperts,
        jobs: Sequence[Job],
        buffers: Sequence[Buffer],
        reader: Reader,
        counts: LayerCounts,
    ):
        self.layer, self.reader, self.counts = layer, reader, counts
        self._waiting: deque[Job] = deque(jobs)
        self._free: deque[tuple[Buffer, Any]] = deque((buffer, None) for buffer in buffers)
        self._coming: deque[tuple[Job, Buffer | None, Callable[[], int] | None]] = deque()
        self._futures: list[Future[int]] = []
        self._ahead = layer.stacked.bytes_per_expert >= READ_AHEAD_BYTES
        self._moves = layer.device.type != "cpu"
        self._submit()

    def _submit(self) -> None:
        """Start what can be read now: two experts ahead at most."""
        source = self.layer.source
        while self._waiting and len(self._coming) < 2:
            expert, slot = self._waiting[0]
            # From main memory, experts go to the device, and are computed, without a stop.
            buffered = not source.in_memory and (slot is None or self._moves)
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
            read: Callable[[], int] | None = None if target is None else partial(self._read, expert, target)
            if read is not None and self._ahead:
                future = self.reader.submit(read)
                self._futures.append(future)
                read = future.result
            self._coming.append((job, buffer, read))

    def _slot(self, slot: int) -> Buffer:
        slots = self.layer.slots
        return slots.gate_up_E2FH[slot], slots.down_EHF[slot]

    def _read(self, expert: int, buffer: Buffer) -> int:
        start = time.perf_counter()
        with torch.no_grad():
            size = self.layer.source.read(expert, *buffer)
        self.counts.read_seconds += time.perf_counter() - start
        return size

    def __iter__(self) -> Iterator[tuple[int, bool, Stacked]]:
        while self._coming:
            (expert, slot), buffer, read = self._coming.popleft()
            if read is not None:
                start = time.perf_counter()
                size = read()
                self.counts.wait_seconds += time.perf_counter() - start
                self.counts.add_read(size, from_file=not self.layer.source.in_memory)
            event = None
            if slot is None:
                gate_up, down = self.layer.source.weights(expert) if buffer is None else buffer
            else:
                if self._moves:
                    event = self._move(expert, buffer, slot)
                gate_up, down = self._slot(slot)
            self._submit()
            yield expert, slot is not None, Stacked(gate_up[None], down[None])
            if buffer is not None:
                self._free.append((buffer, event))
                self._submit()

    def _move(self, expert: int, buffer: Buffer | None, slot: int) -> Any:
        """Copy an expert to its slot on the device; what tells when its buffer may be written again.

        On CUDA the copy runs on a stream of its own beside the products under way; those that need it wait there.
        """
        host = self.layer.source.weights(expert) if buffer is None else buffer
        self.counts.moved_bytes += sum(t.numel() * t.element_size() for t in host)
        if self.layer.device.type != "cuda":
            for target, part in zip(self._slot(slot), host, strict=True):
                target.copy_(part)
            return None
        current = torch.cuda.current_stream(self.layer.device)
        stream = self.layer.state.stream(self.layer.device)
        stream.wait_stream(current)  # an earlier product may still read the slot
        with torch.cuda.stream(stream):
            for target, part in zip(self._slot(slot), host, strict=True):
                target.copy_(part, non_blocking=True)
            event = stream.record_event()
        current.wait_event(event)
        return event

    def close(self) -> None:
        """Cancel what has not begun, and wait for what has."""
        self._waiting.clear()
        self._coming.clear()
        for future in self._futures:
            if not future.cancel():
                future.exception()
