"""`BlockPlanContext`: the two clocks of a decode, and where a model's MoE layers find the plan of a forward.

The block clock: `block` opens a plan, and everything in it goes at its end. The iteration clock: `iteration` surrounds
one forward. Contexts are independent of each other: several models, and several threads on one model, do not mix.

Shape suffixes: B sequences, S rows per sequence, N window rows, C lead rows (S = C + N).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from torch import Tensor, nn

from epoch_moe.checks import FLOAT_DTYPES, flag, instance, tensor, whole, wrong
from epoch_moe.config import EpochConfig
from epoch_moe.experts.views import ExpertViews
from epoch_moe.plan import refusals
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.capture import CapturedIterations, CudaGraph, Graph, Run, check_capture
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.forward import ForwardPlan
from epoch_moe.plan.patched import layers_of, patched_of
from epoch_moe.plan.ranks import OtherRanks
from epoch_moe.plan.recorder import ExpertRecorder
from epoch_moe.plan.slot import DenseForward, Hold

LmHeadRows = Literal["live", "block"]


class BlockPlanContext:
    """The plan of one decode.

    Args:
        model: a patched model; or one `EpochMoEBlock`, or a list of them in the order in which they run, for blocks
            that were put into a model by hand.
        config: the plan's configuration; None = no plan, work is counted only.
        record: also keep which experts each forward used (``counters.recorder``), for `epoch_moe.report.plan_figure`.

    Attributes:
        counters: work so far; ``counters.read()`` gives the numbers.
        lm_head_rows: ``"live"`` under a plan, ``"block"`` without.
        latest: the last forward of the open block.

    Example:
        >>> import epoch_moe, torch
        >>> model, _ = epoch_moe.load_model("tiny-llada2")
        >>> report, mask_id = epoch_moe.patch(model), model.config.mask_token_id
        >>> ids_BS = torch.full((1, 32), mask_id)
        >>> with torch.no_grad(), epoch_moe.BlockPlanContext(model, epoch_moe.EpochConfig()) as context:
        ...     with context.block(batch=1, window=32):
        ...         while (ids_BS == mask_id).any():  # eight tokens per forward, the most probable ones
        ...             with context.iteration(ids_BS, mask_id=mask_id):
        ...                 best = model(ids_BS).logits.softmax(-1).max(-1)
        ...             rows = best.values.masked_fill(ids_BS != mask_id, -1.0).topk(8).indices
        ...             ids_BS = ids_BS.scatter(1, rows, best.indices.gather(1, rows))
        >>> context.counters.read().forwards
        4

    As a ``with`` block it surrounds the whole decode: until its end, also between the decode's blocks, the patch cannot
    change; at its end an open block is closed, and `finish` called unless an error is on its way.
    """

    def __init__(self, model: Any, config: EpochConfig | None, record: bool = False):
        self._patched = layers_of(model)
        instance("config", config, (EpochConfig, type(None)), "an EpochConfig, or None: no plan")
        flag("record", record)
        self.config = config
        bytes_per_expert = self._patched.bytes_per_expert()
        if config is not None:
            known = getattr(model, "config", None) if isinstance(model, nn.Module) else None
            config.check_model(len(bytes_per_expert), known)
        self.counters = Counters(len(bytes_per_expert), bytes_per_expert)
        if record:
            self.counters.recorder = ExpertRecorder(self.counters.num_layers)
        self.lm_head_rows: LmHeadRows = "block" if config is None else "live"
        self._ranks = OtherRanks(self._patched, config, self.counters)
        self._decode: Hold | None = None
        self._layers: list[ExpertViews] | None = None  # during a decode that was entered
        self._plan: BlockPlan | None = None
        self._finished: BlockPlan | None = None  # what the next block goes on with, see `EpochConfig.commit`
        self._sequences: list[int] = []  # of it that are still decoded
        self._open: Hold | None = None
        self._entered = False
        self._shape = 0, 0
        self.latest: ForwardPlan | DenseForward | None = None
        self._kept: dict[tuple[int, int, int, bool, int, bool], BlockPlan] | None = None
        self.recording = False  # then `CapturedIterations` enters the forward in the history

    def __enter__(self) -> BlockPlanContext:
        if self._decode is not None:
            raise RuntimeError("this context is entered already: one `with` block is one decode")
        self._decode = self._patched.slot.hold("a decode")
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        held, self._decode = self._decode, None
        assert held is not None
        try:
            self.end_block()
            if kind is None:
                self.finish()
        finally:
            self._finished = self._layers = None
            self._patched.slot.release(held)

    def begin_block(
        self,
        *,
        batch: int,
        window: int,
        prefix: int = 0,
        prefix_constant: bool = False,
        future: int = 0,
        only_live: bool = False,
    ) -> None:
        """Open a block; see `BlockPlan` for the arguments. An unfinished earlier block is discarded.

        ``only_live`` promises that the last MoE layer is in the model's last layer, and that what comes out of that is
        read for live rows alone. With ``commit="drift"`` this must be the block behind the last one of this context.
        """
        refusals.check_begin(self._patched.routing_block, batch, window, prefix, prefix_constant, future)
        flag("only_live", only_live)
        self.end_block()
        layers = self._stacked()
        if self.config is not None:
            refusals.check_devices(layers)
        self._open, self._entered = self._patched.slot.hold("a block"), False
        self._shape = batch, window
        if self.config is not None:
            compact = self._patched.compact_for(self.config, layers)
            kept, shape = self._kept, (batch, window, prefix, prefix_constant, future, only_live)
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
                    only_live=only_live,
                    counters=self.counters,
                    compact=compact,
                )
                if self._finished is not None and batch == len(self._sequences):
                    self._plan.follow(self._finished, self._sequences)
                self._finished = None
            if kept is not None:
                kept[shape] = self._plan

    def _stacked(self) -> list[ExpertViews]:
        """The layers' weights; within an entered decode as of its begin, as each layer compares its own anyway."""
        if self._decode is None:
            return self._patched.ensure_stacked()
        if self._layers is None:
            self._layers = self._patched.ensure_stacked()
        return self._layers

    def end_block(self) -> None:
        """Discard the block's supports, masks and caches. Only K/V lives on; with ``commit="drift"``, caches do too."""
        plan, self._plan, self.latest = self._plan, None, None
        if plan is not None and plan.forwards:
            # Recordings hold the addresses of their block's caches.
            goes_on = plan.config.commit == "drift" and plan.config.refresh_interval != 1 and self._kept is None
            if not self._ranks.after_block(plan) and goes_on:
                self._finished, self._sequences = plan, list(range(plan.batch))
        if self._open is not None:
            self._patched.slot.release(self._open)
        self._open = None

    def select(self, sequences: Sequence[int]) -> None:
        """Between two blocks: the decode goes on with these sequences of the batch alone, in this order."""
        if self._open is not None:
            raise RuntimeError("select: a block is open: sequences come and go between blocks")
        if self._finished is not None:
            most = len(self._sequences) - 1
            self._sequences = [self._sequences[whole("sequences", one, "of the batch", most=most)] for one in sequences]

    @contextmanager
    def block(
        self,
        *,
        batch: int,
        window: int,
        prefix: int = 0,
        prefix_constant: bool = False,
        future: int = 0,
        only_live: bool = False,
    ) -> Iterator[None]:
        """`begin_block` and `end_block` around a block, also when it ends by an exception."""
        self.begin_block(
            batch=batch, window=window, prefix=prefix, prefix_constant=prefix_constant, future=future,
            only_live=only_live,
        )  # fmt: skip
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
        pool = self._patched.routing_block
        refusals.check_iteration(pool, *self._shape, ids_BS, mask_id, valid_BS, lead, live_BN, changed_BN, capacity)
        self._ranks.before_iteration(self._plan, ids_BS)
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
            self._ranks.after_forward()
        except BaseException:
            self.end_block()
            self._finished = None
            raise
        self.latest, self._entered = forward, True
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
        self._kept, self._finished = {}, None
        return CapturedIterations(self, self._patched, run, CudaGraph if graph is None else graph)

    def open_plan(self) -> BlockPlan:
        """The plan of the open block.

        Raises:
            RuntimeError: none is open.
        """
        if self._plan is None:
            raise RuntimeError("no block is open: call begin_block, or use `with context.block(...)`")
        return self._plan

    def replayed(self, forward: ForwardPlan) -> None:
        """Note on the host that a recorded iteration was done again."""
        plan = self.open_plan()
        for layer in plan.layers:
            layer.entered = layer.last_forward = plan.forwards
        plan.forwards += 1
        self.counters.forwards += 1
        self.latest = forward

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
        refusals.check_prefill(ids_BS, valid_BS)
        if self._open is not None:
            raise RuntimeError("a block is open: prompt rows of its forwards are lead rows (`lead=`)")
        self._finished = None  # the next block follows these rows
        self._stacked()
        forward = DenseForward(self.counters, ids_BS.shape, valid_BS, cold=True, once=True)
        self._ranks.before_prefill(ids_BS)
        with self._patched.slot.activate(forward):
            yield
        self._ranks.after_forward()
        self.counters.add_forward(forward.num_rows)

    def finish(self) -> None:
        """End the decode. With experts on several ranks: join the others' forwards until they have ended theirs too.

        Every rank of the group calls this when it has no more forwards to run, also a rank that had none at all. The
        end of a ``with`` block does so, and `epoch_moe.generate`; within `epoch_moe.in_step` its end does.
        """
        self.end_block()
        self._finished = None
        self._ranks.finish()

    def end_iteration(self, confidence_BS: Tensor | None = None) -> None:
        """The forward that was run last has ended: pass on the probabilities of the tokens drawn from it.

        Experts outside of fast memory are chosen by it (`epoch_moe.residency`); a plan makes nothing of it.

        Args:
            confidence_BS: fp32, probability of the token that it drew for the row; only live rows count. None: unknown.
        """
        if confidence_BS is not None:
            tensor("confidence_BS", confidence_BS, FLOAT_DTYPES, ("sequences", "rows"))
        if self._patched.slot.listener is not None and self.latest is not None:
            self._patched.slot.listener.end_forward(self.latest, confidence_BS)

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

    def __enter__(self) -> UntrackedContext:
        return self

    def __exit__(self, *error: object) -> None: ...

    def block(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """See `BlockPlanContext.block`, `BlockPlanContext.iteration`, `BlockPlanContext.prefill`."""
        return nullcontext()

    def end_iteration(self, *args: Any) -> None:
        """See `BlockPlanContext.end_iteration`, `BlockPlanContext.count_lm_head` and their like."""

    iteration = prefill = block
    finish = select = count_lm_head = count_attention = end_iteration


def open_context(
    model: Any, plan: EpochConfig | Literal["patched"] | None = "patched", *, record: bool = False
) -> BlockPlanContext | UntrackedContext:
    """The context for one decode on ``model``.

    Args:
        model: patched or not.
        plan: a configuration for this decode; ``"patched"``: the one given to `epoch_moe.patch`; None: no plan.
        record: keep which experts each forward used, see `BlockPlanContext`; needs a plan.
    """
    patched = patched_of(model)
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
    return BlockPlanContext(model, config, record)
