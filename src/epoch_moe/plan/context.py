"""`BlockPlanContext`: the two clocks of a decode, and where a model's MoE layers find the plan of a forward.

The block clock: `block` opens a plan, and everything in it goes at its end. The iteration clock: `iteration` surrounds
one forward. Contexts are independent of each other: several models, and several threads on one model, do not mix.

Shape suffixes: B sequences, S rows per sequence, N window rows, C lead rows (S = C + N).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from epoch_moe.checks import FLOAT_DTYPES, MOST, WHOLE_DTYPES, flag, instance, module, tensor, whole, wrong
from epoch_moe.config import EpochConfig
from epoch_moe.plan.block_plan import BlockPlan, ForwardPlan, check_block
from epoch_moe.plan.capture import CapturedIterations, CudaGraph, Graph, Run, check_capture
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.patched import Patched
from epoch_moe.plan.recorder import ExpertRecorder
from epoch_moe.plan.slot import DenseForward, Hold
from epoch_moe.plan.turns import Turn

LmHeadRows = Literal["live", "block"]


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
        if not hasattr(patched, "slot"):
            raise wrong("patched", patched, "what patch() left on a model, model._epoch_moe")
        instance("config", config, (EpochConfig, type(None)), "an EpochConfig, or None: no plan")
        flag("record", record)
        self._patched, self.config = patched, config
        bytes_per_expert = patched.bytes_per_expert()
        self.counters = Counters(len(bytes_per_expert), bytes_per_expert)
        if record:
            self.counters.recorder = ExpertRecorder(self.counters.num_layers)
        self.lm_head_rows: LmHeadRows = "block" if config is None else "live"
        self._plan: BlockPlan | None = None
        self._open: Hold | None = None
        self._entered = False
        self._shape: tuple[int, int] | None = None
        self._latest: ForwardPlan | DenseForward | None = None
        self._kept: dict[tuple[int, int, int, bool, int], BlockPlan] | None = None
        self.weights_at: tuple[int, ...] = ()
        self.recording = False  # then `CapturedIterations` enters the forward in the history

    def begin_block(
        self, *, batch: int, window: int, prefix: int = 0, prefix_constant: bool = False, future: int = 0
    ) -> None:
        """Open a block; see `BlockPlan` for the arguments. An unfinished earlier block is discarded."""
        check_block(batch, window, prefix, future)
        flag("prefix_constant", prefix_constant)
        pool = self._patched.routing_block
        if pool is not None and prefix_constant and prefix % pool:
            raise ValueError(
                f"prefix={prefix} with prefix_constant=True: this model's rows share a pool of experts in routing "
                f"blocks of {pool}, so prefix rows that share one with the block change with it; use a prefix of whole "
                "routing blocks, or prefix_constant=False"
            )
        self.end_block()
        layers = self._patched.ensure_stacked()
        devices = sorted({str(experts.down_EHF.device) for experts in layers})
        if self.config is not None and len(devices) > 1:
            raise ValueError(
                f"the MoE layers lie on {', '.join(devices)}: the rows of a block plan are on one device; put the "
                "model on one, or decode without a plan (plan=None)"
            )
        self._open, self._entered = self._patched.slot.hold("a block"), False
        self._shape = batch, window
        if self.config is not None:
            compact = self._patched.compact_for(self.config, layers)
            kept, shape = self._kept, (batch, window, prefix, prefix_constant, future)
            if kept is not None and shape in kept and kept[shape].compact is compact:
                self._plan = kept[shape]
                self._plan.restart()
            else:
                self._plan = BlockPlan(
                    self.config,
                    self.counters.num_layers,
                    batch=batch,
                    window=window,
                    prefix=prefix,
                    prefix_constant=prefix_constant,
                    future=future,
                    counters=self.counters,
                    compact=compact,
                )
            if kept is not None:
                kept[shape] = self._plan
                self.weights_at = tuple(w.data_ptr() for e in layers for w in (*e.projections, e.down_EHF))

    def end_block(self) -> None:
        """Discard the block's supports, masks and caches. Only K/V lives on."""
        # Other ranks may still be at a block whose support is everybody's.
        if self._plan is not None and self._plan.forwards and self._begins_together:
            assert self._patched.ep is not None
            self._patched.ep.idle_plan = self._plan
        self._plan = self._latest = None
        if self._open is not None:
            self._patched.slot.release(self._open)
        self._open = None

    @contextmanager
    def block(
        self, *, batch: int, window: int, prefix: int = 0, prefix_constant: bool = False, future: int = 0
    ) -> Iterator[None]:
        """`begin_block` and `end_block` around a block, also when it ends by an exception."""
        self.begin_block(batch=batch, window=window, prefix=prefix, prefix_constant=prefix_constant, future=future)
        try:
            yield
            self.check_capacity()
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
        capacity: int | None = None,
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
            capacity: with rows on the device (``backend="triton"``), how many fresh rows there is room for in a
                forward that is neither the block's first nor a refresh; None = for all. Call `check_capacity` before
                tokens of such forwards are used: too many rows show on the device only.

        A forward that raises closes the block: the model is left without a plan, as before.
        """
        if self._open is None:
            raise RuntimeError("no block is open: call begin_block, or use `with context.block(...)`")
        self._check_rows(ids_BS, mask_id, valid_BS, lead, live_BN, changed_BN, capacity)
        if self._patched.ep is not None:
            cold = self._plan is not None and self._plan.forwards == 0
            self._take_turn(Turn.BEGIN if cold and self._begins_together else Turn.ITERATION, ids_BS)
        forward: ForwardPlan | DenseForward
        if self._plan is None:
            forward = DenseForward(self.counters, ids_BS.shape, valid_BS, lead=lead, cold=not self._entered)
        else:
            forward = self._plan.next_forward(
                ids_BS,
                mask_id=mask_id,
                valid_BS=valid_BS,
                lead=lead,
                live_BN=live_BN,
                changed_BN=changed_BN,
                capacity=capacity,
            )
        if self.counters.recorder is not None:
            self.counters.recorder.begin_forward()
        try:
            with self._patched.slot.activate(forward):
                yield
            self._check_dispatch()
        except BaseException:
            self.end_block()
            raise
        self._latest, self._entered = forward, True
        self.counters.add_forward(forward.num_rows)
        if isinstance(forward, ForwardPlan) and self._plan is not None:
            self._plan.complete(forward)
            if not self.recording:
                self.counters.add_history(forward.numbers())

    def capture(self, run: Run, graph: Callable[[], Graph] | None = None) -> CapturedIterations:
        """Record this decode's iterations as CUDA graphs, and replay them; see `epoch_moe.plan.capture`.

        From here on blocks of one shape share their memory, so that recordings outlive a block.

        Args:
            run: the forward, from token ids ``[B,S]``.
            graph: makes a recorder; None: `CudaGraph`, which needs a GPU.

        Raises:
            RuntimeError: no GPU is here; or the experts are on several ranks; or the decode is recorded or traced.
            ValueError: the decode has no plan.
        """
        check_capture(self, self._patched, on_gpu=graph is None)
        if self._open is not None:
            raise RuntimeError("capture: a block is open: call capture before begin_block")
        self._kept = {}
        return CapturedIterations(self, run, CudaGraph if graph is None else graph)

    def open_plan(self) -> BlockPlan:
        """The plan of the open block.

        Raises:
            RuntimeError: none is open.
        """
        if self._plan is None:
            raise RuntimeError("no block is open: call begin_block, or use `with context.block(...)`")
        return self._plan

    @property
    def latest(self) -> ForwardPlan | DenseForward | None:
        """The last forward of the open block."""
        return self._latest

    def replayed(self, forward: ForwardPlan) -> None:
        """Note on the host that a recorded iteration was done again."""
        plan = self.open_plan()
        for layer in plan.layers:
            layer.entered = layer.last_forward = plan.forwards
        plan.forwards += 1
        self.counters.forwards += 1
        self._latest = forward

    def check_capacity(self) -> None:
        """Were all fresh rows computed? To be asked where tokens are read, after forwards with a ``capacity``.

        Raises:
            RuntimeError: see `BlockPlan.check_capacity`.
        """
        if self._plan is not None:
            self._plan.check_capacity()

    @contextmanager
    def prefill(self, ids_BS: Tensor, valid_BS: Tensor | None = None) -> Iterator[None]:
        """Surround a forward outside of a block that only writes K/V: dense, and counted.

        Args:
            ids_BS: int64, the forward's token ids.
            valid_BS: bool, False for padding. Default: all True.
        """
        tensor("ids_BS", ids_BS, (*WHOLE_DTYPES, *FLOAT_DTYPES), ("sequences", "rows"))
        if valid_BS is not None:
            tensor("valid_BS", valid_BS, torch.bool, ids_BS.shape)
        if self._open is not None:
            raise RuntimeError("a block is open: prompt rows of its forwards are lead rows (`lead=`)")
        self._patched.ensure_stacked()
        forward = DenseForward(self.counters, ids_BS.shape, valid_BS, cold=True, once=True)
        if self._patched.ep is not None:
            self._take_turn(Turn.PREFILL if self._begins_together else Turn.ITERATION, ids_BS)
        with self._patched.slot.activate(forward):
            yield
        self._check_dispatch()
        self.counters.add_forward(forward.num_rows)

    def _check_dispatch(self) -> None:
        """Before a decoder reads a forward's logits: did every row reach its experts?"""
        if self._patched.ep is not None:
            self._patched.ep.check_capacity()

    @contextmanager
    def decode(self) -> Iterator[None]:
        """Surround a whole decode: until its end, also between its blocks, the patch cannot change. Calls `finish`."""
        with self._patched.slot.holding("a decode"):
            yield
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """End the decode. With experts on several ranks: join the others' forwards until they have ended theirs too.

        Every rank of the group calls this when it has no more forwards to run, also a rank that had none at all.
        `epoch_moe.generate` does so, unless it is called within `epoch_moe.in_step`.
        """
        self.end_block()
        ep = self._patched.ep
        if ep is not None and not ep.deferred:
            self._patched.ensure_stacked()
            self._take_turn(Turn.DONE)
            ep.idle_plan = None

    @property
    def _begins_together(self) -> bool:
        """Whether ranks with different sequences share a support, and so must begin their blocks together."""
        ep, config = self._patched.ep, self.config
        shared = config is not None and config.support_scope == "batch" and config.coverage is not None
        return ep is not None and ep.layout == "sharded" and shared

    def _take_turn(self, turn: Turn, ids_BS: Tensor | None = None) -> None:
        """Join what is more urgent on other ranks, until it is this rank's turn."""
        ep, config = self._patched.ep, self.config
        assert ep is not None
        ep.agree_once()
        while (most := ep.most_urgent(turn, config, ids_BS))[0] != turn:
            self._join(*most)
            config = most[1]

    def _join(self, turn: Turn, config: EpochConfig | None) -> None:
        """A forward of other ranks, without rows of this one; its supports are kept up to date."""
        if config is None or turn == Turn.PREFILL:
            nothing_11 = torch.zeros(1, 1, dtype=torch.bool, device=self._patched.device)
            dense = DenseForward(self.counters, nothing_11.shape, nothing_11)
            with self._patched.slot.activate(dense):
                self._patched.idle_forward(1, 1)
            return
        ep = self._patched.ep
        assert ep is not None
        plan: BlockPlan | None = ep.idle_plan
        if plan is None or turn == Turn.BEGIN or plan.config != config:
            plan = ep.idle_plan = BlockPlan(
                config,
                self.counters.num_layers,
                batch=1,
                window=1,
                prefix=0,
                prefix_constant=False,
                counters=self.counters,
            )
        shape = (plan.batch, plan.window)
        forward = plan.next_forward(
            torch.zeros(shape, dtype=torch.int64, device=self._patched.device),
            mask_id=-1,
            valid_BS=torch.zeros(shape, dtype=torch.bool, device=self._patched.device),
            lead=0,
            live_BN=None,
            changed_BN=None,
        )
        with self._patched.slot.activate(forward):
            self._patched.idle_forward(*shape)
        plan.complete(forward)

    def _check_rows(
        self,
        ids_BS: Tensor,
        mask_id: int | None,
        valid_BS: Tensor | None,
        lead: int,
        live_BN: Tensor | None,
        changed_BN: Tensor | None,
        capacity: int | None,
    ) -> None:
        tensor("ids_BS", ids_BS, WHOLE_DTYPES, ("sequences", "rows"))
        whole("lead", lead, "rows before the window")
        if mask_id is not None:
            whole("mask_id", mask_id, "a token id", least=-MOST)
        if capacity is not None:
            whole("capacity", capacity, "fresh rows")
        pool = self._patched.routing_block
        if pool is not None and lead % pool:
            raise ValueError(
                f"lead={lead}: this model's rows share a pool of experts in routing blocks of {pool}, so the lead must "
                f"be whole routing blocks: use decode blocks whose length is a multiple of {pool}"
            )
        if mask_id is None and live_BN is None:
            raise ValueError("pass mask_id, or live_BN for a decoder without a mask token")
        assert self._shape is not None
        batch, window = self._shape
        if tuple(ids_BS.shape) != (batch, lead + window):
            raise ValueError(
                f"ids_BS has shape {tuple(ids_BS.shape)}: this block has {batch} sequences and a window of {window} "
                f"rows, so with lead={lead} expected [{batch}, {lead + window}]"
            )
        for name, mask, length in (
            ("valid_BS", valid_BS, lead + window), ("live_BN", live_BN, window), ("changed_BN", changed_BN, window),
        ):  # fmt: skip
            if mask is not None:
                tensor(name, mask, torch.bool, (batch, length))

    def end_iteration(self, confidence_BS: Tensor | None = None) -> None:
        """The forward that was run last has ended: hand on what the decoder thought of each of its rows.

        Experts outside of fast memory are chosen by it (`epoch_moe.residency`); a plan makes nothing of it.

        Args:
            confidence_BS: fp32, probability of the token that it drew for the row; only live rows count. None: unknown.
        """
        if confidence_BS is not None:
            tensor("confidence_BS", confidence_BS, FLOAT_DTYPES, ("sequences", "rows"))
        if self._patched.slot.listener is not None and self._latest is not None:
            self._patched.slot.listener.end_forward(self._latest, confidence_BS)

    def count_lm_head(self, rows: int) -> None:
        """Count rows that went through the LM head."""
        self.counters.lm_head_rows += whole("rows", rows)

    def count_attention(self, pairs: int) -> None:
        """Count query-key pairs of one layer."""
        self.counters.attention_pairs += whole("pairs", pairs)


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

    @contextmanager
    def decode(self) -> Iterator[None]:
        """See `BlockPlanContext.decode`."""
        yield

    def finish(self) -> None:
        """See `BlockPlanContext.finish`."""

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
    patched: Patched | None = getattr(module("model", model), "_epoch_moe", None)
    if not isinstance(plan, (EpochConfig, type(None))) and not (isinstance(plan, str) and plan == "patched"):
        raise wrong("plan", plan, "an EpochConfig, 'patched' or None (dense)")
    flag("record", record)
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


@contextmanager
def in_step(model: Any) -> Iterator[None]:
    """Keep ranks that share a model's experts in step over several decodes, whose numbers may differ between ranks.

    Within it, a rank that has ended a decode goes on with its next one; at its end it joins the others' forwards until
    all ranks are there. Without it, every rank must make the same number of `epoch_moe.generate` calls.

    Args:
        model: patched; without ``ep_group`` this does nothing.
    """
    patched: Patched | None = getattr(module("model", model), "_epoch_moe", None)
    ep = None if patched is None else patched.ep
    if patched is None or ep is None or ep.deferred:
        yield
        return
    ep.deferred = True
    try:
        yield
    finally:
        ep.deferred = False
    BlockPlanContext(patched, patched.config).finish()
