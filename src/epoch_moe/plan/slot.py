"""`PlanSlot`: where a model's MoE layers find the forward under way, and `DenseForward`, one without a plan.

Shape suffixes: B sequences, S rows per sequence, T = B x S, R rows that exist, K top-k, H hidden.
"""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from epoch_moe.plan.counters import Counters
from epoch_moe.plan.forward import ForwardPlan


class DenseForward:
    """A forward without a plan whose work is counted.

    Attributes:
        counters: where.
        valid_BS: bool, False for rows that do not exist; None = all True.
        valid_R: int64, the rows that exist, where some do not (padding, finished sequences): as under a plan, no
            expert computes the others. None = all.
        num_rows: valid rows.
        lead: C, rows whose K/V this forward writes for good.
        cold: it is the first of a block, or belongs to none.
        once: its rows are not seen again (a prefill).
    """

    def __init__(
        self,
        counters: Counters,
        shape: torch.Size,
        valid_BS: Tensor | None,
        *,
        lead: int = 0,
        cold: bool = False,
        once: bool = False,
    ):
        self.counters = counters
        self.lead, self.cold, self.once = lead, cold, once
        self.wants_router = self.model_seen = False
        self.shape = shape
        self.valid_BS = valid_BS
        self.valid_R = None if valid_BS is None else valid_BS.reshape(-1).nonzero().squeeze(1)
        self.num_rows = shape.numel() if self.valid_R is None else self.valid_R.numel()

    def rows_of(self, shape: tuple[int, int]) -> Tensor | None:
        """`valid_R` where a layer's input has this forward's B and S, else None."""
        return self.valid_R if shape == tuple(self.shape) else None

    def valid_of(self, shape: tuple[int, int]) -> Tensor | None:
        """`valid_BS` where a layer's input has this forward's B and S, else None."""
        return self.valid_BS if shape == tuple(self.shape) else None


class Listener(Protocol):
    """Who learns what the forwards of a model ask of its experts (`epoch_moe.residency.clock.Clock`)."""

    def observe(
        self,
        layer: int,
        ids_RK: Tensor,
        weights_RK: Tensor,
        forward: ForwardPlan | DenseForward | None,
        known_rows: bool = True,
    ) -> Any:
        """What one layer routes to.

        Args:
            layer: its place among the MoE layers.
            ids_RK: int64, experts of the rows that go through them.
            weights_RK: their routing weights.
            forward: under way; None: the model's own function, without a context.
            known_rows: the rows are those of ``forward``, and not another rank's.
        """
        ...

    def end_forward(self, forward: ForwardPlan | DenseForward, confidence_BS: Tensor | None) -> None:
        """A forward has ended; ``confidence_BS`` fp32: the probability of the token drawn for each row, NaN: none."""
        ...


@dataclass(eq=False)
class Hold:
    """Something that is under way on a patched model, and what would break if the patch changed meanwhile.

    Attributes:
        what: it is, in words.
        thread: name of the thread that began it.
        forward: that the MoE layers follow meanwhile; None once it was left.
        frame: call that ends it, see `PlanSlot.bind`.
        task: asyncio task that entered the forward; None: no task did.
    """

    what: str
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    forward: ForwardPlan | DenseForward | None = None
    frame: FrameType | None = None
    task: asyncio.Task[Any] | None = None


class PlanSlot:
    """Where the MoE blocks of one patched model find the forward under way: one value per thread and asyncio task.

    A forward may be left by another thread than the one that entered it (a web framework advances a generator on any
    of its threads, and the garbage collector closes one in whichever thread it runs): leaving empties the forward's
    own `Hold`, wherever it is looked at. Copies and pickles come out empty.

    Attributes:
        num_layers: MoE layers that look here; None: not known yet.
        listener: is told every layer's routing and each drawn token's probability, which takes rows in lists;
            None = nobody listens.
    """

    listener: Listener | None = None

    def __init__(self, num_layers: int | None = None) -> None:
        self.num_layers = num_layers
        self._local = threading.local()  # not a ContextVar, which torch.compile cannot trace
        self._holds: WeakSet[Hold] = WeakSet()  # weak: a block that nobody closed ends with its context
        self._lock = threading.Lock()
        self._closed = ""

    @property
    def active(self) -> ForwardPlan | DenseForward | None:
        """The forward under way in this thread or task, or None outside of one."""
        hold = self._entered()
        return None if hold is None or (hold.task is not None and hold.task is not current_task()) else hold.forward

    def _entered(self) -> Hold | None:
        """What this thread entered and nobody has left."""
        hold: Hold | None = getattr(self._local, "hold", None)
        if hold is not None and hold.frame is not None and not _on_stack(hold.frame, sys._getframe(1)):
            self.release(hold)
        return None if hold is None or hold.forward is None else hold

    def bind(self, frame: FrameType) -> None:
        """End the active forward with the call ``frame``, whatever way it ends.

        For forwards that hooks open: behind a KeyboardInterrupt the hook that would close them does not run.
        """
        hold = self._entered()
        assert hold is not None
        hold.frame = frame

    @contextmanager
    def activate(self, forward: ForwardPlan | DenseForward) -> Iterator[None]:
        """Make ``forward`` this thread's forward; refuses to nest, also with another task of the thread."""
        if self._entered() is not None:
            raise RuntimeError("a forward is already under way on this model in this thread: plans do not nest")
        with self.holding("a forward") as hold:
            hold.forward, hold.task = forward, current_task()
            self._local.hold = hold
            yield

    def hold(self, what: str) -> Hold:
        """Note that something is under way, until `release` or until nobody has the `Hold` any more.

        Raises:
            RuntimeError: the patch was undone.
        """
        hold = Hold(what)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{what} cannot begin: {self._closed}")
            self._holds.add(hold)
        return hold

    def release(self, hold: Hold) -> None:
        """The end of what `hold` noted; the same from every thread, and when it was released before."""
        hold.forward = hold.frame = hold.task = None
        with self._lock:
            self._holds.discard(hold)

    @contextmanager
    def holding(self, what: str) -> Iterator[Hold]:
        """`hold` for the length of a ``with`` block."""
        hold = self.hold(what)
        try:
            yield hold
        finally:
            self.release(hold)

    def check_idle(self, doing: str, *, close: str = "") -> None:
        """Refuse what must not happen while anything is under way on the model, in any thread.

        Args:
            doing: what is about to happen, for the message.
            close: why nothing can begin from here on; "": things can.

        Raises:
            RuntimeError: names what is under way, and in which thread.
        """
        with self._lock:
            ended = [hold for hold in self._holds if hold.frame is not None and not _runs(hold.frame)]
            for hold in ended:
                self._holds.discard(hold)
            busy = sorted({f"{hold.what} (thread {hold.thread!r})" for hold in self._holds})
            if busy:
                raise RuntimeError(f"{doing}: under way on this model: {', '.join(busy)}; end that first")
            self._closed = close

    def reopen(self) -> None:
        """Take back what `check_idle` closed."""
        self._closed = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanSlot:
        new = PlanSlot(self.num_layers)
        new.listener = copy.deepcopy(self.listener, memo)  # fast memory of the model's copy is its own
        return new

    def __reduce__(self) -> tuple[type[PlanSlot], tuple[int | None]]:
        return PlanSlot, (self.num_layers,)


def current_task() -> asyncio.Task[Any] | None:
    """The asyncio task that this runs in, if any."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


def _runs(frame: FrameType) -> bool:
    """Whether a call is still running, in any thread."""
    return any(_on_stack(frame, top) for top in sys._current_frames().values())


def _on_stack(frame: FrameType, current: FrameType | None) -> bool:
    """Whether a call is the one that ``current`` runs in, or one around it."""
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None
