"""`PlanSlot`: where a model's MoE layers find the forward under way, and `DenseForward`, one without a plan.

Shape suffixes: B sequences, S rows per sequence, T = B x S, R rows that exist, K top-k, H hidden.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from epoch_moe.plan.block_plan import ForwardPlan
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.liveness import RowPlan


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
        self.wants_router = False
        self.shape = shape
        self.valid_BS = valid_BS
        self.valid_R = None if valid_BS is None else valid_BS.reshape(-1).nonzero().squeeze(1)
        self.num_rows = shape.numel() if self.valid_R is None else self.valid_R.numel()

    def rows_of(self, x_BSH: Tensor) -> Tensor | None:
        """`valid_R` where it fits a layer's input, else None."""
        return self.valid_R if x_BSH.shape[:2] == self.shape else None

    def valid_of(self, x_BSH: Tensor) -> Tensor | None:
        """`valid_BS` where it fits a layer's input, else None."""
        return self.valid_BS if x_BSH.shape[:2] == self.shape else None


class Tracer(Protocol):
    """Listens to the routing of a model's forwards (`epoch_moe.residency.trace.TraceRecorder`)."""

    def add_layer(
        self,
        layer: int,
        forward: ForwardPlan | DenseForward | None,
        rows: RowPlan | Tensor | None,
        ids_RK: Tensor,
        weights_RK: Tensor,
    ) -> None:
        """What one layer routes to.

        Args:
            layer: its place among the MoE layers.
            forward: under way; None: the model's own function, without a context.
            rows: which rows these are: a plan's, flat rows ``[R]``, or None = all in order.
            ids_RK, weights_RK: their experts and weights.
        """
        ...

    def end_iteration(self, forward: ForwardPlan | DenseForward, confidence_BS: Tensor | None) -> None:
        """What the decoder thought of each row of a forward that has ended."""
        ...


class PlanSlot:
    """Where the MoE blocks of one patched model find the forward under way: one value per thread.

    Copies and pickles come out empty: a forward under way belongs to the thread that runs it.

    Attributes:
        tracer: is told what every layer routes to and what the decoder thought of it; None = nobody listens.
    """

    tracer: Tracer | None = None

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def active(self) -> ForwardPlan | DenseForward | None:
        """This thread's forward, or None outside of one."""
        frame = getattr(self._local, "frame", None)
        if frame is not None and not _on_stack(frame):
            self._local.active = self._local.frame = None
        return getattr(self._local, "active", None)

    def bind(self, frame: FrameType) -> None:
        """End the active forward with the call ``frame``, whatever way it ends.

        For forwards that hooks open: behind a KeyboardInterrupt the hook that would close them does not run.
        """
        self._local.frame = frame

    @contextmanager
    def activate(self, forward: ForwardPlan | DenseForward) -> Iterator[None]:
        """Make ``forward`` this thread's forward; refuses to nest."""
        if self.active is not None:
            raise RuntimeError("a forward is already under way on this model in this thread: plans do not nest")
        self._local.active = forward
        try:
            yield
        finally:
            if getattr(self._local, "active", None) is forward:
                self._local.active = self._local.frame = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanSlot:
        return PlanSlot()

    def __reduce__(self) -> tuple[type[PlanSlot], tuple[()]]:
        return PlanSlot, ()


def _on_stack(frame: FrameType) -> bool:
    """Whether a call of this thread is still running."""
    current: FrameType | None = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None
