"""`BlockPlanContext`: the two clocks of a decode, and where a model's MoE layers find the plan of a forward.

The block clock: `block` opens a plan, and everything in it goes at its end. The iteration clock: `iteration` surrounds
one forward. Contexts are independent of each other: several models, and several threads on one model, do not mix.

Shape suffixes: B sequences, S rows per sequence, N window rows, C lead rows (S = C + N).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.plan.block_plan import BlockPlan, ForwardPlan, check_block
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.recorder import ExpertRecorder

LmHeadRows = Literal["live", "block"]


class DenseForward:
    """A forward without a plan whose work is counted.

    Attributes:
        counters: where.
        valid_BS: bool, False for rows that do not exist; None = all True.
        valid_R: int64, the rows that exist, where some do not (padding, finished sequences): as under a plan, no
            expert computes the others. None = all.
        num_rows: valid rows.
    """

    def __init__(self, counters: Counters, shape: torch.Size, valid_BS: Tensor | None):
        self.counters = counters
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


class PlanSlot:
    """Where the MoE blocks of one patched model find the forward under way: one value per thread.

    Copies and pickles come out empty: a forward under way belongs to the thread that runs it.
    """

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


class Patched(Protocol):
    """What `epoch_moe.patch` leaves on a model under ``_epoch_moe``."""

    slot: PlanSlot
    config: EpochConfig | None

    @property
    def routing_block(self) -> int | None:
        """Rows that share a pool of experts (LLaDA2.2), or None where every row routes for itself."""
        ...

    def bytes_per_expert(self) -> list[int]:
        """For each MoE layer."""
        ...

    def ensure_stacked(self) -> None:
        """Stack expert weights whose storage was replaced since the last use."""
        ...


class BlockPlanContext:
    """The plan of one decode on a patched model.

    Args:
        patched: what `epoch_moe.patch` left on the model (``model._epoch_moe``).
        config: the plan's configuration; None = no plan, work is counted only.
        record: also keep which experts each forward used (``counters.recorder``), for `epoch_moe.report.plan_figure`.

    Attributes:
        counters: work so far; ``counters.read()`` gives the numbers.
        lm_head_rows: ``"live"`` under a plan, ``"block"`` without.

    Example::

        context = open_context(model, EpochConfig())
        with context.block(batch=1, window=32):
            while undecoded:
                with context.iteration(ids_BS, mask_id=mask_id):
                    hidden = model.model(ids_BS, ...)
                ...
    """

    def __init__(self, patched: Patched, config: EpochConfig | None, record: bool = False):
        self._patched, self.config = patched, config
        bytes_per_expert = patched.bytes_per_expert()
        self.counters = Counters(len(bytes_per_expert), bytes_per_expert)
        if record:
            self.counters.recorder = ExpertRecorder(self.counters.num_layers)
        self.lm_head_rows: LmHeadRows = "block" if config is None else "live"
        self._plan: BlockPlan | None = None
        self._open = False

    def begin_block(
        self, *, batch: int, window: int, prefix: int = 0, prefix_constant: bool = False, future: int = 0
    ) -> None:
        """Open a block; see `BlockPlan` for the arguments. An unfinished earlier block is discarded."""
        self.end_block()
        check_block(batch, window, prefix, future)
        pool = self._patched.routing_block
        if pool is not None and prefix_constant and prefix % pool:
            raise ValueError(
                f"prefix={prefix} with prefix_constant=True: this model's rows share a pool of experts in routing "
                f"blocks of {pool}, so prefix rows that share one with the block change with it; use a prefix of whole "
                "routing blocks, or prefix_constant=False"
            )
        self._patched.ensure_stacked()
        self._open = True
        if self.config is not None:
            self._plan = BlockPlan(
                self.config,
                self.counters.num_layers,
                batch=batch,
                window=window,
                prefix=prefix,
                prefix_constant=prefix_constant,
                future=future,
                counters=self.counters,
            )

    def end_block(self) -> None:
        """Discard the block's supports, masks and caches. Only K/V lives on."""
        self._plan = None
        self._open = False

    @contextmanager
    def block(
        self, *, batch: int, window: int, prefix: int = 0, prefix_constant: bool = False, future: int = 0
    ) -> Iterator[None]:
        """`begin_block` and `end_block` around a block, also when it ends by an exception."""
        self.begin_block(batch=batch, window=window, prefix=prefix, prefix_constant=prefix_constant, future=future)
        try:
            yield
        finally:
            self.end_block()

    @contextmanager
    def iteration(
        self,
        ids_BS: Tensor,
        *,
        mask_id: int | None = None,
        valid_BS: Tensor | None = None,
        lead: int = 0,
        live_BN: Tensor | None = None,
        changed_BN: Tensor | None = None,
    ) -> Iterator[None]:
        """Surround exactly one forward of the model.

        Args:
            ids_BS: int64, the forward's token ids: ``lead`` rows, then the window.
            mask_id: id of undecoded positions. Needed unless ``live_BN`` is given.
            valid_BS: bool, False for padding and for rows of finished sequences. Default: all True.
            lead: C, rows whose K/V this forward writes for good; always fresh and unrestricted. Where rows share pools
                of experts (LLaDA2.2), the rows that exist of each sequence must start at a routing block, and the lead
                must be whole ones: the pool of a block that is partly in the K/V cache cannot be formed.
            live_BN: bool, rows whose logits can still change a decision, where that is not "MASK in the block": tokens
                that a decoder may still edit, for one. With ``mask_id`` such a row routes as freely as a newly decoded
                one; without it every live row counts as undecoded.
            changed_BN: bool, rows whose cached output must not be used.

        A forward that raises closes the block: the model is left without a plan, as before.
        """
        if not self._open:
            raise RuntimeError("no block is open: call begin_block, or use `with context.block(...)`")
        self._check_rows(ids_BS, mask_id, valid_BS, lead, live_BN, changed_BN)
        forward: ForwardPlan | DenseForward
        if self._plan is None:
            forward = DenseForward(self.counters, ids_BS.shape, valid_BS)
            valid_rows = forward.num_rows
        else:
            forward = self._plan.next_forward(
                ids_BS, mask_id=mask_id, valid_BS=valid_BS, lead=lead, live_BN=live_BN, changed_BN=changed_BN
            )
            valid_rows = forward.rows.num_rows
        if self.counters.recorder is not None:
            self.counters.recorder.begin_forward()
        try:
            with self._patched.slot.activate(forward):
                yield
        except BaseException:
            self.end_block()
            raise
        self.counters.add_forward(valid_rows)
        if isinstance(forward, ForwardPlan) and self._plan is not None:
            self._plan.complete(forward)
            self.counters.add_history(
                {
                    "forward": forward.number,
                    "rows": valid_rows,
                    "fresh": forward.rows.num_fresh,
                    "live": forward.rows.vote_src.numel(),
                }
            )

    @contextmanager
    def prefill(self, ids_BS: Tensor, valid_BS: Tensor | None = None) -> Iterator[None]:
        """Surround a forward outside of a block that only writes K/V: dense, and counted.

        Args:
            ids_BS: int64, the forward's token ids.
            valid_BS: bool, False for padding. Default: all True.
        """
        if self._open:
            raise RuntimeError("a block is open: prompt rows of its forwards are lead rows (`lead=`)")
        self._patched.ensure_stacked()
        forward = DenseForward(self.counters, ids_BS.shape, valid_BS)
        with self._patched.slot.activate(forward):
            yield
        self.counters.add_forward(forward.num_rows)

    def _check_rows(
        self,
        ids_BS: Tensor,
        mask_id: int | None,
        valid_BS: Tensor | None,
        lead: int,
        live_BN: Tensor | None,
        changed_BN: Tensor | None,
    ) -> None:
        if ids_BS.dim() != 2:
            raise ValueError(f"ids_BS has shape {tuple(ids_BS.shape)}: expected [sequences, rows]")
        if lead < 0:
            raise ValueError(f"lead={lead}: expected a number of rows, at least 0")
        pool = self._patched.routing_block
        if pool is not None and lead % pool:
            raise ValueError(
                f"lead={lead}: this model's rows share a pool of experts in routing blocks of {pool}, so the lead must "
                f"be whole routing blocks: use decode blocks whose length is a multiple of {pool}"
            )
        if mask_id is None and live_BN is None:
            raise ValueError("pass mask_id, or live_BN for a decoder without a mask token")
        if self._plan is None:
            return
        batch, window = self._plan.batch, self._plan.window
        if tuple(ids_BS.shape) != (batch, lead + window):
            raise ValueError(
                f"ids_BS has shape {tuple(ids_BS.shape)}: this block has {batch} sequences and a window of {window} "
                f"rows, so with lead={lead} expected [{batch}, {lead + window}]"
            )
        masks = {
            "valid_BS": (valid_BS, lead + window),
            "live_BN": (live_BN, window),
            "changed_BN": (changed_BN, window),
        }
        for name, (mask, length) in masks.items():
            if mask is not None and (tuple(mask.shape) != (batch, length) or mask.dtype != torch.bool):
                raise ValueError(
                    f"{name} is {mask.dtype} of shape {tuple(mask.shape)}: expected bool [{batch}, {length}]"
                )

    def end_iteration(self, confidence_BS: Tensor | None = None) -> None:
        """Tell the plan what the decoder thought of each row (nothing uses it yet on this path)."""

    def count_lm_head(self, rows: int) -> None:
        """Count rows that went through the LM head."""
        self.counters.lm_head_rows += rows

    def count_attention(self, pairs: int) -> None:
        """Count query-key pairs of one layer."""
        self.counters.attention_pairs += pairs


class UntrackedContext:
    """The context of a model that is not patched: no plan, nothing counted. Its methods do nothing."""

    counters: Counters | None = None
    lm_head_rows: LmHeadRows = "live"

    @contextmanager
    def block(self, **kwargs: Any) -> Iterator[None]:
        """See `BlockPlanContext.block`."""
        yield

    @contextmanager
    def iteration(self, ids_BS: Tensor, **kwargs: Any) -> Iterator[None]:
        """See `BlockPlanContext.iteration`."""
        yield

    @contextmanager
    def prefill(self, ids_BS: Tensor, valid_BS: Tensor | None = None) -> Iterator[None]:
        """See `BlockPlanContext.prefill`."""
        yield

    def end_iteration(self, confidence_BS: Tensor | None = None) -> None:
        """See `BlockPlanContext.end_iteration`."""

    def count_lm_head(self, rows: int) -> None:
        """See `BlockPlanContext.count_lm_head`."""

    def count_attention(self, pairs: int) -> None:
        """See `BlockPlanContext.count_attention`."""


def open_context(
    model: Any, plan: EpochConfig | Literal["patched"] | None = "patched", *, record: bool = False
) -> BlockPlanContext | UntrackedContext:
    """The context for one decode on ``model``.

    Args:
        model: patched or not.
        plan: a configuration for this decode; ``"patched"``: the one given to `epoch_moe.patch`; None: no plan.
        record: keep which experts each forward used, see `BlockPlanContext`; needs a plan.
    """
    patched: Patched | None = getattr(model, "_epoch_moe", None)
    if plan is not None and plan != "patched" and not isinstance(plan, EpochConfig):
        raise TypeError(f"plan={plan!r}: expected an EpochConfig, 'patched' or None (dense)")
    if patched is None:
        if isinstance(plan, EpochConfig):
            raise ValueError("a plan needs patched MoE layers: call epoch_moe.patch(model) first")
        if record:
            raise ValueError("record=True needs patched MoE layers: call epoch_moe.patch(model) first")
        return UntrackedContext()
    config = patched.config if plan == "patched" else plan
    if record and config is None:
        raise ValueError("record=True records a block plan, and this decode has none: pass plan=EpochConfig(...)")
    return BlockPlanContext(patched, config, record)
