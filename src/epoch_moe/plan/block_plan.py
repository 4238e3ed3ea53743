"""One block's state: supports and caches of all layers, token stamps, and the steps that layers take through it.

Shape suffixes: B sequences, S rows per sequence in a forward, N window rows, T = B x S, H hidden, M = B x N.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.liveness import NO_TOKEN, RowPlan, RowStates, classify, decide_rows, plan_rows
from epoch_moe.plan.padded import Compact, PaddedRowPlan, pad_rows
from epoch_moe.plan.support import SupportState


@dataclass
class LayerState:
    """What one layer keeps within a block.

    Attributes:
        support: its expert support.
        cache_MH: routed output (scaling included, shared expert not) of decoded rows; only entries whose token stamp
            matches are read.
        last_forward: number of the last forward whose outputs the cache reflects; -1 = none.
        entered: number of the last forward that reached the layer; -1 = none.
    """

    support: SupportState = field(default_factory=SupportState)
    cache_MH: Tensor | None = None
    last_forward: int = -1
    entered: int = -1


@dataclass(frozen=True)
class LayerStep:
    """One layer's part in one forward.

    Attributes:
        rows: what happens to each row; `PaddedRowPlan` where the plan is kept on the device.
        state: the layer's state.
        cold: the layer compiles its support in this step and reuses nothing.
    """

    rows: RowPlan | PaddedRowPlan
    state: LayerState
    cold: bool


def check_block(batch: int, window: int, prefix: int, future: int) -> None:
    """Refuse a block that cannot be, quoting the values."""
    if batch < 1 or window < 1:
        raise ValueError(f"a block needs batch >= 1 and window >= 1, got batch={batch}, window={window}")
    if prefix < 0 or future < 0 or prefix + future >= window:
        raise ValueError(
            f"prefix={prefix} and future={future} must be at least 0 and leave rows of the window={window} to the block"
        )


class BlockPlan:
    """The plan of one block of B sequences.

    Args:
        config: the choices.
        num_layers: MoE layers.
        batch: B.
        window: N, rows per sequence that have state.
        prefix: how many of them lie before the current block.
        future: how many lie behind it (later blocks of a fixed canvas).
        prefix_constant: prefix rows cannot change within the block.
        counters: where work is counted.
        compact: packs rows on the device. With it no forward of the block waits for the device, rows have their padded
            form (`epoch_moe.plan.padded`), and all state is updated in place, at addresses that do not change. None:
            rows are lists, at the price of host syncs once per forward.
    """

    def __init__(
        self,
        config: EpochConfig,
        num_layers: int,
        *,
        batch: int,
        window: int,
        prefix: int,
        prefix_constant: bool,
        future: int = 0,
        counters: Counters,
        compact: Compact | None = None,
    ):
        check_block(batch, window, prefix, future)
        self.config, self.counters = config, counters
        self.batch, self.window, self.prefix, self.future = batch, window, prefix, future
        self.prefix_constant = prefix_constant
        self.compact = compact
        self.layers = [LayerState(SupportState(fixed=compact is not None)) for _ in range(num_layers)]
        self.forwards = 0
        self.moves = 0
        self._stamps_BN: Tensor | None = None
        self._missing: Tensor | None = None

    def restart(self) -> None:
        """Begin another block of the same shape in the same memory."""
        self.forwards = 0
        for layer in self.layers:
            layer.last_forward = layer.entered = -1
        for state, value in ((self._stamps_BN, NO_TOKEN), (self._missing, 0)):
            if state is not None:
                state.fill_(value)

    @property
    def identity(self) -> tuple[int, ...]:
        """What a recording of this plan's work depends on beside the kind of forward: its memory, and its shape."""
        return (id(self), self.moves, self.batch, self.window, self.prefix, self.future, int(self.prefix_constant))

    @property
    def is_refresh(self) -> bool:
        """Whether the next forward recomputes all rows."""
        interval = self.config.refresh_interval
        return interval is not None and self.forwards % interval == 0

    def check_capacity(self) -> None:
        """Were all fresh rows computed? Waits for the device if a forward had a smaller capacity than rows.

        Raises:
            RuntimeError: some were not, and what was decoded from these forwards is wrong.
        """
        if self._missing is not None:
            missing = int(self._missing.item())
            self._missing.zero_()
            if missing > 0:
                raise RuntimeError(
                    f"a forward had {missing} fresh rows more than its capacity, and they were not computed: what was "
                    "decoded since is wrong. Decode the block again with a larger capacity (None always suffices)"
                )

    def next_forward(
        self,
        ids_BS: Tensor,
        *,
        mask_id: int | None,
        valid_BS: Tensor | None,
        lead: int,
        live_BN: Tensor | None,
        changed_BN: Tensor | None,
        capacity: int | None = None,
    ) -> ForwardPlan:
        """Decide what the next forward does with its rows (see `epoch_moe.plan.liveness`).

        ``capacity``: of the padded form, for a forward that is neither cold nor a refresh; see `pad_rows`.
        """
        # A copy: a caller that commits tokens into the same tensor must not change what the stamps will say.
        ids_BS = ids_BS.to(torch.int64, copy=True)
        if self._stamps_BN is None:
            self._stamps_BN = torch.full((self.batch, self.window), NO_TOKEN, device=ids_BS.device)
        states = classify(
            ids_BS,
            self._stamps_BN,
            lead,
            self.prefix,
            self.future,
            self.prefix_constant,
            self.config.future_rows == "dormant",
            mask_id,
            valid_BS,
            live_BN,
            changed_BN,
        )
        if self.compact is None:
            self._read_shortfalls()
        forward = ForwardPlan(self, ids_BS, states, lead, self.forwards, capacity)
        if isinstance(forward.rows, PaddedRowPlan) and forward.rows.capacity < forward.rows.total:
            missing = forward.rows.count - forward.rows.capacity
            if self._missing is None:
                self._missing = torch.zeros_like(missing)
            torch.maximum(self._missing, missing, out=self._missing)
        return forward

    def _read_shortfalls(self) -> None:
        """Have the layers whose support fell short in the last forward compile it anew (one sync for all layers)."""
        by_device: dict[torch.device, list[SupportState]] = {}
        for layer in self.layers:
            layer.support.rebuild_G = None
            if layer.support.short_G is not None:
                by_device.setdefault(layer.support.short_G.device, []).append(layer.support)
        for supports in by_device.values():
            short_LG = torch.stack([s.short_G for s in supports if s.short_G is not None])
            for support, flags in zip(supports, short_LG.tolist(), strict=True):
                if any(flags):
                    support.rebuild_G = support.short_G
                support.short_G = None

    def complete(self, forward: ForwardPlan) -> None:
        """Record the tokens that the caches now hold outputs for; called after a forward that did not fail."""
        assert self._stamps_BN is not None
        states, lead = forward.states, forward.lead
        # An entry that this forward could not have used (edited, masked again, live, declared changed, of a row that
        # was not there) is lost for good: the row may come back with its old token.
        kept_BN = states.cached_BN & ~states.live_BN & ~states.awake_BN & states.valid_BS[:, lead:]
        stamps_BN = self._stamps_BN.masked_fill(~kept_BN, NO_TOKEN)
        self._stamps_BN.copy_(torch.where(forward.stored_BS[:, lead:], forward.ids_BS[:, lead:], stamps_BN))
        self.forwards += 1


class ForwardPlan:
    """One forward under a block plan: what each MoE layer asks when it is reached."""

    def __init__(
        self,
        plan: BlockPlan,
        ids_BS: Tensor,
        states: RowStates,
        lead: int,
        number: int,
        capacity: int | None = None,
    ):
        self.plan, self.ids_BS, self.states, self.lead, self.number = plan, ids_BS, states, lead, number
        self.cold, self.refresh = number == 0, plan.is_refresh
        self.wants_router = False
        self.rows, self.stored_BS = self._plan(self.cold, self.refresh, capacity)
        self._full_rows = self.rows if self.cold else None

    def _plan(
        self, cold: bool, refresh: bool, capacity: int | None = None
    ) -> tuple[RowPlan | PaddedRowPlan, Tensor]:
        """The row plan, and which rows' outputs it keeps: bool ``[B,S]``."""
        decision = decide_rows(
            self.states,
            cold=cold,
            refresh=refresh,
            lead=self.lead,
            prefix=self.plan.prefix,
            future=self.plan.future,
            restrict_new=self.plan.config.restrict_new,
        )
        if self.plan.compact is None:
            return plan_rows(decision), decision.stored_BS
        if cold or refresh:
            capacity = None
        rows = pad_rows(decision, self.plan.compact, capacity)
        # A row that found no place is not computed.
        return rows, decision.stored_BS & (rows.source_T >= 0).view_as(decision.stored_BS)

    @property
    def config(self) -> EpochConfig:
        """The plan's configuration."""
        return self.plan.config

    @property
    def counters(self) -> Counters:
        """Where work is counted."""
        return self.plan.counters

    @property
    def num_rows(self) -> int | Tensor:
        """Valid rows."""
        return self.rows.num_rows

    def numbers(self) -> dict[str, int | Tensor]:
        """This forward's entry in `Counters.history`."""
        rows = self.rows
        return {
            "forward": self.number,
            "rows": rows.num_rows,
            "fresh": rows.num_fresh if isinstance(rows, RowPlan) else rows.count,
            "live": rows.num_voting,
        }

    def valid_of(self, x_BSH: Tensor) -> Tensor | None:
        """The rows ``[B,S]`` that exist, where they fit a layer's input, else None."""
        return self.states.valid_BS if x_BSH.shape[:2] == self.ids_BS.shape else None

    def enter(self, layer: int, x_BSH: Tensor) -> LayerStep | None:
        """The step of MoE layer ``layer`` on its input, or None where it must run dense (counted with its reason)."""
        state = self.plan.layers[layer]
        reason = ""
        if x_BSH.shape[:2] != self.ids_BS.shape:
            reason = "shape"
        elif state.entered == self.number:
            reason = "revisit"
        elif self.wants_router:
            reason = "router_logits"
        state.entered = self.number
        if reason:
            self.counters.fallbacks[reason] += 1
            state.last_forward = -1
            return None
        rows, cold = self.rows, self.cold
        cache_shape = (self.plan.batch * self.plan.window, x_BSH.shape[2])
        fits = (
            state.cache_MH is not None
            and state.cache_MH.shape == cache_shape
            and state.cache_MH.dtype == x_BSH.dtype
            and state.cache_MH.device == x_BSH.device
        )
        if not self.cold and (not fits or state.last_forward != self.number - 1):
            # This layer missed a forward (or changed dtype or device): its cache no longer matches the stamps.
            self.counters.fallbacks["version"] += 1
            if self._full_rows is None:
                self._full_rows, _ = self._plan(cold=True, refresh=True)
            rows, cold = self._full_rows, True
        if not fits:
            state.cache_MH = x_BSH.new_empty(cache_shape)
            self.plan.moves += 1
        state.last_forward = self.number
        return LayerStep(rows, state, cold)
