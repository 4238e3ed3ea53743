"""One forward under a block plan, and the steps that layers take through it.

Shape suffixes: B sequences, C lead rows, N window rows, S = C + N rows per sequence, T = B x S, H hidden, D carried
rows, M = B x (D + N) (see `epoch_moe.plan.block_plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.packed import Compact, ListedRows, PaddedRows, count_rows, list_rows, pad_rows, rows_of_counts
from epoch_moe.plan.rules import RowClasses, RowMasks, RowPlaces, decide_rows, leave_out, only, still_rows
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


class Watching(Protocol):
    """Notices changes of what is no expert (`epoch_moe.follow.watch.Watch`)."""

    def changed(self) -> bool:
        """Whether the model is another one than when this was made."""
        ...


class OpenBlock(Protocol):
    """What a forward reads of its block, and changes (`epoch_moe.plan.block_plan.BlockPlan` documents it)."""

    config: EpochConfig
    counters: Counters
    batch: int
    window: int
    only_live: bool
    compact: Compact | None
    layers: list[LayerState]
    forwards: int
    moves: int
    watch: Watching | None

    @property
    def width(self) -> int:
        """Rows per sequence that have a cache entry."""
        ...

    @property
    def is_refresh(self) -> bool:
        """Whether the next forward recomputes all rows."""
        ...

    @property
    def model_changed(self) -> bool:
        """Whether the model is another one than when the block began."""
        ...

    def complete(self, forward: ForwardPlan) -> None:
        """Record the tokens that the caches now hold outputs for."""
        ...


class ForwardPlan:
    """One forward under a block plan: what each MoE layer asks when it is reached.

    Attributes:
        model_seen: somebody has compared the model with that of the forward before.
    """

    def __init__(
        self,
        plan: OpenBlock,
        ids_BS: Tensor,
        places: RowPlaces,
        classes: RowClasses,
        stamp_T: Tensor,
        capacity: int | None,
        follows: bool,
    ):
        self.plan, self.ids_BS, self.number = plan, ids_BS, plan.forwards
        self.places, self.classes, self.stamp_T = places, classes, stamp_T
        self.cold, self.refresh = self.number == 0, plan.is_refresh
        self._reuses = follows or not self.cold
        self.wants_router = self.model_seen = False
        self._stale = False  # what follows was computed from another model's rows
        self.layer_rows: dict[int, ListedRows | PaddedRows] = {}  # of each layer that was entered
        self.masks = self._decide()
        self.rows: ListedRows | PaddedRows
        self._last_rows: ListedRows | PaddedRows  # of the last MoE layer
        if plan.compact is None:
            self.rows, self._last_rows = self._list()
        else:
            capacity = None if self.cold or self.refresh else capacity
            self.rows = self._last_rows = pad_rows(self.masks, places, plan.compact, capacity)
            # A row that found no place is not computed.
            self.masks = replace(self.masks, stored_T=self.masks.stored_T & (self.rows.source_T >= 0))
            if plan.only_live:
                self._last_rows = pad_rows(only(self.masks, self.classes.live_T), places, plan.compact, capacity)

    def _decide(self, everything: bool = False) -> RowMasks:
        """What happens to the rows; ``everything``: all are computed, and none is restricted."""
        no_T, config = self.classes.cold_T, self.config
        if everything or not self._reuses:
            full_T = ~no_T
        elif self.cold:
            full_T = self.classes.block_T
        else:
            full_T = ~self.classes.constant_T if self.refresh else no_T
        cold_T = ~no_T if everything or self.cold else no_T
        return decide_rows(replace(self.classes, cold_T=cold_T, full_T=full_T), config)

    def _list(self) -> tuple[ListedRows, ListedRows]:
        """The rows as lists, and those of the last MoE layer.

        The wait for them also tells which supports fell short in the last forward.
        """
        supports = [layer.support for layer in self.plan.layers]
        rebuilds = self.config.recompile == "shortfall"
        watched = [(support, support.short_G) for support in supports if rebuilds and support.short_G is not None]
        asked, last_masks = [short_G.to(self.ids_BS.device) for _, short_G in watched], None
        if self.plan.only_live:
            last_masks = only(self.masks, self.classes.live_T)
            asked.append(count_rows(last_masks))
        rows, flags = list_rows(self.masks, self.places, *asked)
        last = rows
        if last_masks is not None:
            last = rows_of_counts(last_masks, self.places, flags[sum(short_G.numel() for _, short_G in watched) :])
        for support in supports:
            support.rebuild_G = support.short_G = None
        for support, short_G in watched:
            own, flags = flags[: len(short_G)], flags[len(short_G) :]
            if any(own):
                support.rebuild_G = short_G
        return rows, last

    def _is_last(self, layer: int) -> bool:
        """Whether it is the last MoE layer, of which live rows alone are read: nothing mixes rows behind it."""
        return self.plan.only_live and layer == len(self.plan.layers) - 1

    def masks_of(self, layer: int, masks: RowMasks | None = None) -> RowMasks:
        """What one layer does with the rows, before it has looked at their inputs; ``masks``: the forward's."""
        masks = self.masks if masks is None else masks
        return only(masks, self.classes.live_T) if self._is_last(layer) else masks

    def _pack(self, masks: RowMasks, capacity: int | None = None) -> ListedRows | PaddedRows:
        """One layer's own rows."""
        if self.plan.compact is None:
            return list_rows(masks, self.places)[0]
        return pad_rows(masks, self.places, self.plan.compact, capacity)

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
            self._stale = self._reuses and self.plan.watch is not None
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
        last = self._is_last(layer)  # which reuses rows of this block alone
        rows, cold = self._last_rows if last else self.rows, self.cold
        reuses = self._reuses and not (cold and last)
        cache_shape = (self.places.entries, x_BSH.shape[2])
        fits = (
            state.cache_MH is not None
            and state.cache_MH.shape == cache_shape
            and state.cache_MH.dtype == dtype
            and state.cache_MH.device == x_BSH.device
        )
        # A layer behind one with other weights kept rows of other inputs, those before the block for good.
        self._stale = self._stale or (self._reuses and state.weights not in (None, weights))
        missed = state.last_forward != self.number - 1 or self._stale
        watched = (None if last else self.config.drift, self.config.live_drift) != (None, None)
        if reuses and (not fits or missed):
            # This layer missed a forward (or the model changed): its cache no longer matches the stamps.
            self.counters.fallbacks["version"] += 1
            cold = True
            rows = self._pack(self.masks_of(layer, self._decide(everything=True)))
        elif reuses and watched:
            masks = self.masks_of(layer)
            assert state.inputs_M1H is not None
            x_TH = x_BSH.reshape(-1, x_BSH.shape[2])
            still_T = still_rows(x_TH, state.inputs_M1H, self.places, self.classes, self.config.of_layer(layer))
            capacity = self.rows.capacity if isinstance(self.rows, PaddedRows) else None
            rows = self._pack(leave_out(masks, masks.drifting_T & still_T), capacity)
        if not fits:
            state.cache_MH = x_BSH.new_empty(cache_shape, dtype=dtype)
            state.inputs_M1H = x_BSH.new_empty(cache_shape[0] + 1, cache_shape[1]) if watched else None
            self.plan.moves += 1
        if last and state.inputs_M1H is not None:
            # The stamps say what other layers keep of these rows.
            unread_T = torch.where(self.classes.live_T, self.places.entries, self.places.entry_T)
            state.inputs_M1H.index_fill_(0, unread_T, float("nan"))
        state.last_forward, state.weights = self.number, weights
        self.layer_rows[layer] = rows
        return LayerStep(rows, state, cold or (self.refresh and self.config.recompile == "refresh"))
