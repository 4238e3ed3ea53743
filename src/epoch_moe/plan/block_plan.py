"""One block's state: supports and caches of all layers, token stamps, and the steps that layers take through it.

A forward's rows are the *lead* (C rows of each sequence whose K/V this forward writes for good: prompt blocks, or the
block that has just been finished) followed by the *window* (N rows with state). On a full window without K/V cache the
earlier blocks lie in the window before the current one, as *prefix* rows; on a fixed canvas the later ones lie behind
it, as *future* rows.

Shape suffixes: B sequences, C lead rows, N window rows, S = C + N rows per sequence, T = B x S, H hidden, M = B x N.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from epoch_moe.checks import MOST, whole
from epoch_moe.config import EpochConfig
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.packed import Compact, ListedRows, PaddedRows, list_rows, pad_rows
from epoch_moe.plan.rules import (
    NO_TOKEN,
    RowClasses,
    RowMasks,
    RowPlaces,
    cached_rows,
    decide_rows,
    leave_out,
    stamps_after,
)
from epoch_moe.plan.support import SupportState


@dataclass
class LayerState:
    """What one layer keeps within a block.

    Attributes:
        support: its expert support.
        cache_MH: routed output (scaling included, shared expert not) of decoded rows; only entries whose token stamp
            matches are read.
        inputs_M1H: the layer's input that each entry was computed on, and one more for rows without state; None where
            nobody asks how far inputs have moved (`EpochConfig.drift`).
        last_forward: number of the last forward whose outputs the cache reflects; -1 = none.
        entered: number of the last forward that reached the layer; -1 = none.
        weights: version of the weights that the cache was computed with.
    """

    support: SupportState = field(default_factory=SupportState)
    cache_MH: Tensor | None = None
    inputs_M1H: Tensor | None = None
    last_forward: int = -1
    entered: int = -1
    weights: Hashable = None


@dataclass(frozen=True)
class LayerStep:
    """One layer's part in one forward.

    Attributes:
        rows: what happens to each row; `PaddedRows` where the plan is kept on the device.
        state: the layer's state.
        cold: the layer compiles its support in this step, and restricts no row.
    """

    rows: ListedRows | PaddedRows
    state: LayerState
    cold: bool


def check_block(batch: int, window: int, prefix: int, future: int) -> None:
    """Refuse a block that cannot be, quoting the values."""
    whole("batch", batch, "sequences", least=1)
    whole("window", window, "rows of a sequence", least=1)
    whole("prefix", prefix, "rows before the block", least=-MOST)
    whole("future", future, "rows behind the block", least=-MOST)
    if prefix < 0 or future < 0 or prefix + future >= window:
        raise ValueError(
            f"prefix={prefix} and future={future} must be at least 0 and leave rows of the window={window} to the block"
        )


class Watching(Protocol):
    """Notices changes of what is no expert and no gate (`epoch_moe.follow.watch.Watch`)."""

    def changed(self) -> bool:
        """Whether the model is another one than when this was made."""
        ...


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
        compact: packs rows on the device. With it no forward of the block waits for the device, rows are `PaddedRows`,
            and all state is updated in place, at addresses that do not change. None: rows are `ListedRows`, at the
            price of one host sync per forward.
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
        # Exact settings reuse nothing at all: they are exact whatever happens to the model between two forwards.
        self.prefix_constant = prefix_constant and config.refresh_interval != 1
        self.compact = compact
        self.layers = [LayerState(SupportState(fixed=compact is not None)) for _ in range(num_layers)]
        self.forwards = 0
        self.moves = 0
        self._stamps_M1: Tensor | None = None  # one entry more than there are: rows without state read and write there
        self._places: dict[int, tuple[RowPlaces, RowClasses]] = {}
        self._missing: Tensor | None = None
        self.watch: Watching | None = None  # of the model that the block began with

    @property
    def stamps_M(self) -> Tensor | None:
        """int64, the token that each cache entry was computed for, `NO_TOKEN` for none; None before a first forward."""
        return None if self._stamps_M1 is None else self._stamps_M1[:-1]

    def restart(self) -> None:
        """Begin another block of the same shape in the same memory."""
        self.forwards = 0
        for layer in self.layers:
            layer.last_forward = layer.entered = -1
        for state, value in ((self._stamps_M1, NO_TOKEN), (self._missing, 0)):
            if state is not None:
                state.fill_(value)

    @property
    def identity(self) -> tuple[int, ...]:
        """What a recording of this plan's work depends on beside the kind of forward: its memory, and its shape."""
        return (id(self), self.moves, self.batch, self.window, self.prefix, self.future, int(self.prefix_constant))

    @property
    def model_changed(self) -> bool:
        """Whether the model is not the one that the block began with, but for its experts, which layers check."""
        return self.watch is not None and self.watch.changed()

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
        """Decide what the next forward does with its rows (see `epoch_moe.plan.rules`).

        ``capacity``: of the padded form, for a forward that is neither cold nor a refresh; see `pad_rows`.
        """
        # A copy: a caller that commits tokens into the same tensor must not change what the stamps will say.
        ids_BS = ids_BS.to(torch.int64, copy=True)
        if self._stamps_M1 is None:
            self._stamps_M1 = torch.full((self.batch * self.window + 1,), NO_TOKEN, device=ids_BS.device)
        places, classes = self._geometry(lead, ids_BS.device)
        stamp_T = self._stamps_M1[places.entry_T]
        classes = self._classify(classes, ids_BS, stamp_T, lead, mask_id, valid_BS, live_BN, changed_BN)
        forward = ForwardPlan(self, ids_BS, places, classes, stamp_T, self.forwards, capacity)
        if isinstance(forward.rows, PaddedRows) and forward.rows.capacity < forward.rows.total:
            missing = forward.rows.count - forward.rows.capacity
            if self._missing is None:
                self._missing = torch.zeros_like(missing)
            torch.maximum(self._missing, missing, out=self._missing)
        return forward

    def _geometry(self, lead: int, device: torch.device) -> tuple[RowPlaces, RowClasses]:
        """Where the rows of forwards with so many lead rows belong, and what follows from it about their classes."""
        if lead not in self._places:
            batch, window, block = self.batch, self.window, self.window - self.prefix - self.future
            slot_S = torch.arange(lead + window, device=device) - lead
            group_T = torch.arange(batch, device=device).repeat_interleave(lead + window)
            slot_T = slot_S.repeat(batch)
            state_T, before_T, behind_T = slot_T >= 0, slot_T < self.prefix, slot_T >= self.prefix + block
            block_T = state_T & ~before_T & ~behind_T
            vote_T = torch.where(block_T, group_T * block + slot_T - self.prefix, batch * block)
            entry_T = torch.where(state_T, group_T * window + slot_T, batch * window)
            no_T = torch.zeros_like(state_T)
            classes = RowClasses(
                valid_T=~no_T,
                state_T=state_T,
                live_T=no_T,
                edited_T=no_T,
                cached_T=no_T,
                block_T=block_T,
                constant_T=state_T & before_T if self.prefix_constant else no_T,
                awake_T=behind_T if self.config.future_rows == "fresh" else no_T,
                cold_T=no_T,
                full_T=no_T,
            )
            self._places[lead] = RowPlaces(batch, window, block, group_T, entry_T, vote_T), classes
        return self._places[lead]

    def _classify(
        self,
        classes: RowClasses,
        ids_BS: Tensor,
        stamp_T: Tensor,
        lead: int,
        mask_id: int | None,
        valid_BS: Tensor | None,
        live_BN: Tensor | None,
        changed_BN: Tensor | None,
    ) -> RowClasses:
        """The classes of a forward's rows, from token ids, or from masks where the decoder knows better.

        Args:
            classes: what their places say.
            stamp_T: the token that each row's cache entry was computed for.
            mask_id: id of undecoded positions; needed unless ``live_BN`` is given. Without it every live row counts as
                undecoded.
            valid_BS: default: all rows.
            live_BN: overrides "MASK in the current block".
            changed_BN: rows whose cache entry must not be used, whatever its stamp says.
        """
        ids_T = ids_BS.view(-1)
        valid_T = classes.valid_T if valid_BS is None else valid_BS.reshape(-1)

        def whole(mask_BN: Tensor) -> Tensor:
            """A window mask as a mask over the forward's rows."""
            return torch.nn.functional.pad(mask_BN, (lead, 0), value=False).reshape(-1)

        if live_BN is None:
            assert mask_id is not None
            live_T = ids_T.eq(mask_id) & classes.block_T
        else:
            live_T = whole(live_BN)
        live_T = live_T & valid_T
        return replace(
            classes,
            valid_T=valid_T,
            live_T=live_T,
            edited_T=classes.edited_T if mask_id is None else live_T & ids_T.ne(mask_id),
            cached_T=cached_rows(stamp_T, ids_T, None if changed_BN is None else whole(changed_BN)),
        )

    def complete(self, forward: ForwardPlan) -> None:
        """Record the tokens that the caches now hold outputs for; called after a forward that did not fail."""
        assert self._stamps_M1 is not None
        masks, ids_T = forward.masks, forward.ids_BS.view(-1)
        self._stamps_M1.index_copy_(0, forward.places.entry_T, stamps_after(masks, forward.stamp_T, ids_T))
        self._stamps_M1[-1:].fill_(NO_TOKEN)
        self.forwards += 1


class ForwardPlan:
    """One forward under a block plan: what each MoE layer asks when it is reached.

    Attributes:
        model_seen: somebody has compared the model with that of the forward before.
    """

    def __init__(
        self,
        plan: BlockPlan,
        ids_BS: Tensor,
        places: RowPlaces,
        classes: RowClasses,
        stamp_T: Tensor,
        number: int,
        capacity: int | None = None,
    ):
        self.plan, self.ids_BS, self.number = plan, ids_BS, number
        self.places, self.classes, self.stamp_T = places, classes, stamp_T
        self.cold, self.refresh = number == 0, plan.is_refresh
        self.wants_router = self.model_seen = False
        self._stale = False  # what follows was computed from another model's rows
        self.layer_rows: dict[int, ListedRows | PaddedRows] = {}  # of each layer that was entered
        self.masks = self._decide(self.cold, self.refresh)
        self.rows: ListedRows | PaddedRows
        if plan.compact is None:
            self.rows = self._list()
        else:
            self.rows = pad_rows(self.masks, places, plan.compact, None if self.cold or self.refresh else capacity)
            # A row that found no place is not computed.
            self.masks = replace(self.masks, stored_T=self.masks.stored_T & (self.rows.source_T >= 0))
        self._full_rows = self.rows if self.cold else None

    def _decide(self, cold: bool, refresh: bool) -> RowMasks:
        no_T = self.classes.cold_T
        cold_T, full_T = (~no_T if flag else no_T for flag in (cold, cold or refresh))
        classes = replace(self.classes, cold_T=cold_T, full_T=full_T)
        config = self.config
        return decide_rows(
            classes,
            restrict_new=config.restrict_new,
            drift=config.drift is not None,
            live_drift=config.live_drift is not None,
        )

    def _list(self) -> ListedRows:
        """The rows as lists. The wait for them also tells which supports fell short in the last forward."""
        supports = [layer.support for layer in self.plan.layers]
        rebuilds = self.config.recompile == "shortfall"
        watched = [(support, support.short_G) for support in supports if rebuilds and support.short_G is not None]
        rows, flags = list_rows(self.masks, self.places, *(short_G.to(self.ids_BS.device) for _, short_G in watched))
        for support in supports:
            support.rebuild_G = support.short_G = None
        for support, short_G in watched:
            own, flags = flags[: len(short_G)], flags[len(short_G) :]
            if any(own):
                support.rebuild_G = short_G
        return rows

    def _all_rows(self) -> ListedRows | PaddedRows:
        """Every row fresh, for layers that left the plan."""
        if self._full_rows is None:
            masks = self._decide(cold=True, refresh=True)
            compact = self.plan.compact
            self._full_rows = (
                list_rows(masks, self.places)[0] if compact is None else pad_rows(masks, self.places, compact)
            )
        return self._full_rows

    @property
    def lead(self) -> int:
        """Rows in front of the window, whose K/V this forward writes for good: C."""
        return self.ids_BS.shape[1] - self.plan.window

    @property
    def valid_BS(self) -> Tensor:
        """Bool, the rows that exist."""
        return self.classes.valid_T.view_as(self.ids_BS)

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
            "fresh": self._most_fresh(),
            "live": rows.num_voting,
        }

    def _most_fresh(self) -> int | Tensor:
        """Fresh rows of the layer that had most."""
        layers = list(self.layer_rows.values()) or [self.rows]
        listed = [rows.num_fresh for rows in layers if isinstance(rows, ListedRows)]
        if listed:
            return max(listed)
        return torch.stack([rows.count for rows in layers if isinstance(rows, PaddedRows)]).amax(dim=0)

    def valid_of(self, shape: tuple[int, int]) -> Tensor | None:
        """The rows ``[B,S]`` that exist, where a layer's input has this forward's B and S, else None."""
        return self.valid_BS if shape == tuple(self.ids_BS.shape) else None

    def look_at_model(self, watch: Callable[[], Watching]) -> None:
        """Before the first layer: rows that another model computed are not used; ``watch`` begins to look."""
        if self.model_seen:
            return
        self.model_seen = True
        if self.plan.watch is None or self.plan.model_changed:
            self._stale = not self.cold and self.plan.watch is not None
            self.plan.watch = watch()

    def enter(self, layer: int, x_BSH: Tensor, dtype: torch.dtype, weights: Hashable) -> LayerStep | None:
        """The step of MoE layer ``layer`` on its input, or None where it must run dense (counted with its reason).

        Args:
            layer: its place.
            x_BSH: its input.
            dtype: of its routed output.
            weights: changes with its weights.
        """
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
            and state.cache_MH.dtype == dtype
            and state.cache_MH.device == x_BSH.device
        )
        # A layer behind one with other weights kept rows of other inputs, those before the block for good.
        self._stale = self._stale or (not self.cold and state.weights not in (None, weights))
        missed = state.last_forward != self.number - 1 or self._stale
        watched = self.config.watches_drift
        if not self.cold and (not fits or missed):
            # This layer missed a forward (or the model changed): its cache no longer matches the stamps.
            self.counters.fallbacks["version"] += 1
            rows, cold = self._all_rows(), True
        elif watched and not self.cold:
            rows = self._moved_rows(x_BSH.reshape(-1, x_BSH.shape[2]), state, self.config.of_layer(layer))
        if not fits:
            state.cache_MH = x_BSH.new_empty(cache_shape, dtype=dtype)
            state.inputs_M1H = x_BSH.new_empty(cache_shape[0] + 1, cache_shape[1]) if watched else None
            self.plan.moves += 1
        state.last_forward, state.weights = self.number, weights
        self.layer_rows[layer] = rows
        return LayerStep(rows, state, cold or (self.refresh and self.config.recompile == "refresh"))

    def _moved_rows(self, x_TH: Tensor, state: LayerState, config: EpochConfig) -> ListedRows | PaddedRows:
        """A layer's rows: those of the forward without the ones whose input has hardly moved."""
        classes = self.classes
        assert state.inputs_M1H is not None and not isinstance(config.drift, tuple)
        assert not isinstance(config.live_drift, tuple)
        before_TH = state.inputs_M1H[self.places.entry_T].float()
        cosine_T = torch.cosine_similarity(x_TH.float(), before_TH, dim=-1).clamp(max=1.0)
        # An input that is no number compares as moved.
        still_T = cosine_T > (1.0 if config.drift is None else config.drift)
        if config.live_drift is not None:
            still_T = torch.where(classes.live_T | classes.awake_T, cosine_T > config.live_drift, still_T)
        masks = leave_out(self.masks, self.masks.drifting_T & still_T)
        if self.plan.compact is None:
            return list_rows(masks, self.places)[0]
        assert isinstance(self.rows, PaddedRows)
        return pad_rows(masks, self.places, self.plan.compact, self.rows.capacity)
