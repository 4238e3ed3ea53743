"""Row plans for batches whose rows come and go: a keyed store in place of one block's state.

A serving stack's batch is a list of rows. Each belongs to a slot (where the engine keeps a request), a generation
(which request: it changes when the slot is given away), a block of that request and a position inside the block's
window. Requests are at different iterations of different blocks, some pause, some leave. The store keeps, per (slot,
position) and layer, the routed output of a decoded row, and per slot and layer the expert support; everything is keyed,
so nothing of another request or block is ever read.

Shape suffixes: T rows of the forward, S slots, W window rows per slot, M = S x W cache entries, L MoE layers,
E experts, R fresh rows, H hidden.

All memory is allocated once, at addresses that never change. The rules are those of `epoch_moe.plan.rules`;
`RowStore.fresh_rows` adds the one host sync of a forward, which turns masks into index lists of known length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epoch_moe.checks import FLOAT_DTYPES, MOST, WHOLE_DTYPES, instance, tensor, whole, wrong
from epoch_moe.config import EpochConfig
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.packed import ListedRows, list_rows
from epoch_moe.plan.rules import (
    NO_TOKEN,
    RowClasses,
    RowMasks,
    RowPlaces,
    cached_rows,
    decide_rows,
    leave_out,
    still_rows,
)
from epoch_moe.plan.support import SupportState, uses_support
from epoch_moe.routing import RouterSpec

NO_SLOT = -1
"""Slot of a padding row."""
NO_STATE = -1
"""Position of a row without state: prompt rows, and rows of a finished block whose K/V are written for good."""


@dataclass(frozen=True)
class RowKeys:
    """Which request's row each of the T rows is; all int64 ``[T]`` on the store's device.

    Attributes:
        slot_T: ``0..S-1``; `NO_SLOT` for padding.
        generation_T: which request owns the slot: any number >= 0 that changes with the request.
        block_T: which block of the request, >= 0.
        position_T: ``0..W-1`` in that block's window; `NO_STATE` for a row that is always fresh, routes freely and is
            never cached.
    """

    slot_T: Tensor
    generation_T: Tensor
    block_T: Tensor
    position_T: Tensor


@dataclass(frozen=True)
class Slots:
    """Keys and clocks of the slots, as of one forward.

    Attributes:
        active_S: bool, slots with state that have rows here.
        cold_S: bool, those of them that are in the first forward of their block.
        full_S: bool, those of them that recompute all rows.
        generation_S, block_S: int64, the key.
        forwards_S: int64, finished forwards of the block.
        trouble: bool ``[5]``, see `_TROUBLE`.
    """

    active_S: Tensor
    cold_S: Tensor
    full_S: Tensor
    generation_S: Tensor
    block_S: Tensor
    forwards_S: Tensor
    trouble: Tensor


@dataclass(frozen=True)
class FreshRows:
    """One forward's decision, the same for all layers; or, by drift, that of one layer (`RowStore.layer_rows`).

    Attributes:
        rows: index lists (`fresh_R`: the rows to compute) and host counts.
        masks: the same as masks.
        slots: which slots take part, and at which forward of their block.
        ids_T: int64, the tokens that outputs of this forward belong to.
        rebuild_L: per layer, bool ``[S]``: slots that compile their support in this forward; None where none does.
        number: of the forward, counted by the store.
        classes, places: what the forward's rows are, and where they belong.
        layer: whose decision this is; None: nobody's yet, or all layers'.
        x_NH: by drift, the layer's input of the rows whose outputs are cached.
    """

    rows: ListedRows
    masks: RowMasks
    slots: Slots
    ids_T: Tensor
    rebuild_L: tuple[Tensor | None, ...]
    number: int
    classes: RowClasses
    places: RowPlaces
    layer: int | None = None
    x_NH: Tensor | None = None

    @property
    def num_fresh(self) -> int:
        """R."""
        return self.rows.num_fresh

    def pick(self, x_TH: Tensor) -> Tensor:
        """The fresh rows of ``[T,...]``, packed: ``[R,...]`` (the same tensor where all rows are fresh)."""
        if x_TH.shape[0] != self.rows.total:
            raise ValueError(f"{x_TH.shape[0]} rows: this forward was planned for {self.rows.total}")
        return x_TH if self.rows.all_fresh else x_TH.index_select(0, self.rows.fresh_R)


_TROUBLE = (
    "a slot outside 0..{slots} (padding is -1)",
    "a position outside 0..{window} (rows without state have -1)",
    "two rows with the same slot and position",
    "rows of one slot with different generations or blocks (rows of a finished block have position -1)",
    "a generation or block below 0 on a row with state",
)


class RowStore:
    """Supports and routed outputs of up to ``max_slots`` requests, for one model (or pipeline stage).

    Args:
        config: the plan's choices; ``support_scope="batch"`` for a single slot only. Rows of a finished block have no
            state here (`NO_STATE`), so ``commit`` changes nothing: they are all computed.
        router: the layers' router; not the block-pool kind (see `epoch_moe.functional.supports`).
        num_layers: L.
        max_slots: S.
        window: W, rows per request that have state: the block length.
        hidden_size: H.
        dtype: of the layers' outputs.
        device: of everything.
        bytes_per_expert: weights of one expert, for the counters.

    Attributes:
        cache_LMH: routed outputs (uninitialised until written; read only under a matching key).
        stamps_M: int64, the token that each entry was computed for.
        support_LSE: bool, the supports.
        counters: work so far.

    One thread uses a store at a time.

    Example:
        >>> import torch
        >>> from epoch_moe.functional import RouterSpec, RowKeys, RowStore, fresh_rows
        >>> from epoch_moe import EpochConfig
        >>> router = RouterSpec(kind="softmax", num_experts=8, top_k=2)
        >>> store = RowStore(EpochConfig(), router, num_layers=2, max_slots=4, window=8, hidden_size=16)
        >>> slot, generation, block, position = torch.zeros(4, 8, dtype=torch.int64)
        >>> keys = RowKeys(slot, generation, block, torch.arange(8))  # the 8 rows of one request's first block
        >>> ids_T = torch.full((8,), 99)
        >>> fresh_rows(store, keys, ids_T, ids_T == 99, mask_id=99).num_fresh  # MASK rows are live: all are computed
        8
    """

    def __init__(
        self,
        config: EpochConfig,
        router: RouterSpec,
        *,
        num_layers: int,
        max_slots: int,
        window: int,
        hidden_size: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        bytes_per_expert: int = 0,
    ):
        instance("config", config, EpochConfig, "an EpochConfig")
        instance("router", router, RouterSpec, "a RouterSpec")
        whole("num_layers", num_layers, least=1)
        whole("max_slots", max_slots, least=1)
        whole("window", window, "rows of a block", least=1)
        whole("hidden_size", hidden_size, least=1)
        whole("bytes_per_expert", bytes_per_expert)
        if dtype not in FLOAT_DTYPES:
            raise wrong("dtype", dtype, "a torch dtype of floating point")
        if router.kind == "block_pool":
            raise ValueError("router kind 'block_pool' needs the scores of whole routing blocks: see supports(router)")
        config.check_model(num_layers)
        if config.support_scope == "batch" and max_slots > 1:
            raise ValueError(
                f"support_scope='batch' with max_slots={max_slots}: requests that come and go form no batch to make "
                "one support for; use support_scope='sequence'"
            )
        self.config, self.router = config, router
        self.num_layers, self.max_slots, self.window = num_layers, max_slots, window
        entries = max_slots * window
        self.cache_LMH = torch.empty(num_layers, entries, hidden_size, dtype=dtype, device=device)
        self.device = self.cache_LMH.device
        self._inputs: Tensor | None = None
        if config.watches_drift:
            self._inputs = self.cache_LMH.new_empty(num_layers, entries + 1, hidden_size)
        # One entry more than there are: rows without state write there.
        self._stamps = torch.full((entries + 1,), NO_TOKEN, device=self.device)
        self._voided = torch.zeros(entries + 1, dtype=torch.bool, device=self.device)
        self._generation_S = torch.full((max_slots,), -1, device=self.device)
        self._block_S = torch.full((max_slots,), -1, device=self.device)
        self._forwards_S = torch.zeros(max_slots, dtype=torch.int64, device=self.device)
        experts = router.num_experts if uses_support(router, config) else 0
        self.support_LSE = torch.ones(num_layers, max_slots, experts, dtype=torch.bool, device=self.device)
        self._short_LS = torch.zeros(num_layers, max_slots, dtype=torch.bool, device=self.device)
        self.counters = Counters(num_layers, [bytes_per_expert] * num_layers)
        self._number = 0
        self._open: FreshRows | None = None
        self._restored: set[int] = set()

    @property
    def stamps_M(self) -> Tensor:
        """int64, the token of each entry; `NO_TOKEN` where it holds nothing usable."""
        return self._stamps[:-1]

    @property
    def nbytes(self) -> int:
        """Device memory of the store."""
        own = (self.cache_LMH, self._inputs, self._stamps, self._voided, self.support_LSE, self._short_LS)
        return sum(t.numel() * t.element_size() for t in own if t is not None) + 24 * self.max_slots

    # ----------------------------------------------------------------------------------------------------- one forward

    def fresh_rows(
        self,
        keys: RowKeys,
        ids_T: Tensor,
        live_T: Tensor,
        *,
        mask_id: int | None = None,
        changed_T: Tensor | None = None,
    ) -> FreshRows:
        """Decide what the next forward computes. One host sync.

        Args:
            keys: of the forward's rows, in any order; each (slot, position) once.
            ids_T: int64, token ids.
            live_T: bool, rows whose logits can still change a decode decision (MASK now); never cached.
            mask_id: id of undecoded positions, for decoders that edit tokens: a live row that holds a token routes as
                freely as a newly decoded one. Without it every live row counts as undecoded.
            changed_T: bool, rows whose cached output must not be used although key and token fit.

        A slot seen under another generation or block than last time starts anew: cold, nothing reused. A slot without
        rows here keeps everything, its iteration count too. An entry of an active slot that this forward could not use
        (other token, live, changed, row absent) is void from here on, whether the forward completes or not; so an
        abandoned forward needs no cleaning up.

        Raises:
            ValueError: shapes or keys that cannot be; the store is as it was.
        """
        if mask_id is not None:
            whole("mask_id", mask_id, "a token id", least=-MOST)
        self._check(keys, ids_T, live_T, changed_T)
        ids_T = ids_T.to(torch.int64, copy=True)
        slots, classes, places = self._classify(keys, ids_T, live_T, mask_id, changed_T)
        masks = decide_rows(classes, self.config)
        if self.config.recompile == "refresh":
            rebuild_LS = slots.full_S.expand_as(self._short_LS)
        else:
            rebuild_LS = slots.cold_S | (self._short_LS & slots.active_S)
        rows, flags = list_rows(masks, places, slots.trouble, rebuild_LS.any(dim=1))
        self._refuse(flags[: len(_TROUBLE)])
        self._adopt(masks, slots, places, ids_T)
        planned = uses_support(self.router, self.config)
        rebuild_L = tuple(
            mask if planned and any_slot else None
            for mask, any_slot in zip(rebuild_LS, flags[len(_TROUBLE) :], strict=True)
        )
        self._number += 1
        self._restored = set()
        self._open = FreshRows(rows, masks, slots, ids_T, rebuild_L, self._number, classes, places)
        return self._open

    def layer_rows(self, layer: int, fresh: FreshRows, x_TH: Tensor) -> FreshRows:
        """What one layer computes of a forward, by drift from its input; without drift that is ``fresh``.

        One host sync, by drift.
        """
        self.check_open(fresh)
        if self._inputs is None:
            return fresh
        tensor("x_TH", x_TH, self.cache_LMH.dtype, (fresh.places.total, self.cache_LMH.shape[2]), self.device)
        assert self._open is not None
        still_T = still_rows(x_TH, self._inputs[layer], fresh.places, fresh.classes, self.config.of_layer(layer))
        masks = leave_out(self._open.masks, self._open.masks.drifting_T & still_T)
        rows = list_rows(masks, fresh.places)[0]
        return replace(fresh, rows=rows, masks=masks, layer=layer, x_NH=x_TH[rows.fresh_R[rows.store_src]])

    def _classify(
        self, keys: RowKeys, ids_T: Tensor, live_T: Tensor, mask_id: int | None, changed_T: Tensor | None
    ) -> tuple[Slots, RowClasses, RowPlaces]:
        """Clocks of the slots, and classes and places of the rows, from keys and tokens; no value is read on the host.

        Each slot has its own cold pass and its own refresh.
        """
        num_slots, window, interval = self.max_slots, self.window, self.config.refresh_interval
        nowhere = num_slots * window
        valid_T = keys.slot_T != NO_SLOT
        inside_T = (keys.slot_T >= 0) & (keys.slot_T < num_slots)
        placed_T = (keys.position_T >= 0) & (keys.position_T < window)
        state_T = inside_T & placed_T
        # Rows without state are sent to a slot and an entry behind the last ones.
        slot_T = torch.where(state_T, keys.slot_T, num_slots)
        entry_T = torch.where(state_T, keys.slot_T * window + keys.position_T, nowhere)

        def per_slot(values_T: Tensor, fill: Tensor) -> Tensor:
            return torch.cat((fill, fill[:1])).index_put((slot_T,), values_T)[:-1]

        active_S = per_slot(state_T, torch.zeros_like(self._generation_S, dtype=torch.bool))
        generation_S = per_slot(keys.generation_T, self._generation_S)
        block_S = per_slot(keys.block_T, self._block_S)
        reset_S = active_S & ((generation_S != self._generation_S) | (block_S != self._block_S))
        forwards_S = self._forwards_S.masked_fill(reset_S, 0)
        cold_S = active_S & (forwards_S == 0)
        full_S = cold_S if interval is None else active_S & (forwards_S % interval == 0)

        def of_slot(flags_S: Tensor) -> Tensor:
            return torch.cat((flags_S, torch.zeros_like(flags_S[:1])))[slot_T]

        own_T = torch.stack((generation_S, block_S))
        own_T = torch.cat((own_T, own_T[:, :1]), dim=1)[:, slot_T]
        given_T = torch.stack((keys.generation_T, keys.block_T))
        uses = torch.zeros(nowhere + 1, dtype=torch.int64, device=ids_T.device).scatter_add_(0, entry_T, state_T.long())
        trouble = torch.stack(
            (
                (valid_T & ~inside_T).any(),
                (inside_T & ~placed_T & (keys.position_T != NO_STATE)).any(),
                (uses[:-1] > 1).any(),
                (state_T & (own_T != given_T).any(dim=0)).any(),
                (state_T & (given_T < 0).any(dim=0)).any(),
            )
        )
        live_T = live_T & state_T
        no_T = torch.zeros_like(state_T)
        classes = RowClasses(
            valid_T=valid_T,
            state_T=state_T,
            live_T=live_T,
            edited_T=no_T if mask_id is None else live_T & (ids_T != mask_id),
            cached_T=cached_rows(self._stamps[entry_T], ids_T, changed_T) & ~of_slot(reset_S),
            block_T=state_T,
            constant_T=no_T,
            awake_T=no_T,
            cold_T=of_slot(cold_S),
            full_T=of_slot(full_S),
        )
        places = RowPlaces(num_slots, window, window, keys.slot_T, entry_T, entry_T)
        return Slots(active_S, cold_S, full_S, generation_S, block_S, forwards_S, trouble), classes, places

    def _adopt(self, masks: RowMasks, slots: Slots, places: RowPlaces, ids_T: Tensor) -> None:
        """Take over the keys of this forward, and void the entries that it could not use."""
        active_M1 = torch.zeros_like(self._voided)
        active_M1[:-1] = slots.active_S.repeat_interleave(self.window, output_size=active_M1.shape[0] - 1)
        self._stamps.masked_fill_(active_M1, NO_TOKEN)
        nowhere = self._stamps.shape[0] - 1
        self._stamps[places.entry_T.masked_fill(~masks.kept_T, nowhere)] = ids_T
        # `x[i] = number` would copy the number from the host, and wait for that.
        self._stamps[nowhere:].fill_(NO_TOKEN)
        self._generation_S.copy_(slots.generation_S)
        self._block_S.copy_(slots.block_S)
        self._forwards_S.copy_(slots.forwards_S)
        self._voided.zero_()

    def complete(self, fresh: FreshRows) -> None:
        """End a forward in which every layer was restored: its outputs may be reused from now on. No sync.

        Raises:
            RuntimeError: a layer was left out, or ``fresh`` is not the forward under way. Nothing is recorded: the rows
                that the forward would have cached stay fresh.
        """
        self.check_open(fresh)
        missing = sorted(set(range(self.num_layers)) - self._restored)
        if missing:
            raise RuntimeError(
                f"MoE layers {missing} of {self.num_layers} were not restored in this forward: call restore_rows for "
                "every layer before complete, or drop the forward"
            )
        assert self._open is not None
        rows = self._open.rows
        tokens = fresh.ids_T[rows.fresh_R[rows.store_src]]
        self._stamps[rows.store_dst] = tokens.masked_fill(self._voided[rows.store_dst], NO_TOKEN)
        self._forwards_S += fresh.slots.active_S
        self.counters.add_forward(rows.num_rows)
        self._open = None

    def invalidate(
        self, slots: Tensor | Sequence[int], positions: Tensor | Sequence[int] | None = None
    ) -> None:
        """Void what the store holds of some rows, also while a forward is under way. No sync for tensors.

        Args:
            slots: ``[N]``; -1 is ignored.
            positions: ``[N]``, the rows (slot, position) whose outputs must not be reused. None: whole slots, which
                then start anew with a cold pass.
        """
        for name, given in (("slots", slots), ("positions", positions)):
            if isinstance(given, Tensor):
                tensor(name, given, WHOLE_DTYPES, ("N",))
            elif given is not None:
                for place, one in enumerate(instance(name, given, Sequence, "whole numbers")):
                    whole(f"{name}[{place}]", one, least=-MOST)
        slots_N = torch.as_tensor(slots, dtype=torch.int64, device=self.device).reshape(-1)
        inside_N = (slots_N >= 0) & (slots_N < self.max_slots)
        void_S = torch.zeros(self.max_slots + 1, dtype=torch.bool, device=self.device)
        void = torch.zeros_like(self._voided)
        if positions is None:
            void_S.index_fill_(0, torch.where(inside_N, slots_N, self.max_slots), True)
            self._generation_S.masked_fill_(void_S[:-1], -1)
            void[:-1] = void_S[:-1].repeat_interleave(self.window, output_size=void.shape[0] - 1)
        else:
            positions_N = torch.as_tensor(positions, dtype=torch.int64, device=self.device).reshape(-1)
            if positions_N.shape != slots_N.shape:
                raise ValueError(f"{slots_N.numel()} slots and {positions_N.numel()} positions: expected one of each")
            inside_N = inside_N & (positions_N >= 0) & (positions_N < self.window)
            nowhere = void.shape[0] - 1
            void.index_fill_(0, torch.where(inside_N, slots_N * self.window + positions_N, nowhere), True)
        self._stamps.masked_fill_(void, NO_TOKEN)
        self._voided |= void

    # -------------------------------------------------------------------------------------------- what layers ask for

    def check_open(self, fresh: FreshRows, layer: int | None = None) -> None:
        """Refuse a decision that is not the last one, a layer that does not exist, and, by drift, another layer's."""
        if self._open is None or self._open.ids_T is not fresh.ids_T:
            raise RuntimeError(
                f"these rows are of forward {fresh.number}, which is over or was replaced by a later fresh_rows (the "
                f"store is at {self._number}): use the FreshRows of the forward under way"
            )
        if layer is not None and not 0 <= layer < self.num_layers:
            raise ValueError(f"layer={layer}: expected 0..{self.num_layers - 1}, the place among the MoE layers")
        if layer is not None and self._inputs is not None and fresh.layer != layer:
            raise ValueError(
                f"these rows are of {'no layer' if fresh.layer is None else f'layer {fresh.layer}'}: by drift each one "
                f"computes rows of its own, call layer_rows(store, {layer}, fresh, x_TH) in front of it"
            )

    def support_state(self, layer: int, fresh: FreshRows) -> SupportState:
        """The layer's supports for `route_fresh`; hand the result to `keep_support`."""
        return SupportState(support_GE=self.support_LSE[layer], rebuild_G=fresh.rebuild_L[layer])

    def keep_support(self, layer: int, fresh: FreshRows, state: SupportState) -> None:
        """Write back what routing made of the supports; slots without rows here keep theirs."""
        assert state.support_GE is not None
        self.support_LSE[layer].copy_(state.support_GE)
        short_S = torch.zeros_like(fresh.slots.active_S) if state.short_G is None else state.short_G
        self._short_LS[layer].copy_(torch.where(fresh.slots.active_S, short_S, self._short_LS[layer]))

    def mark_restored(self, layer: int, fresh: FreshRows) -> None:
        """Note that the layer's cache reflects the forward under way, and keep what it was computed on."""
        if self._inputs is not None:
            assert fresh.x_NH is not None
            self._inputs[layer].index_copy_(0, fresh.rows.store_dst, fresh.x_NH)
        self._restored.add(layer)

    # ---------------------------------------------------------------------------------------------------------- checks

    def _check(self, keys: RowKeys, ids_T: Tensor, live_T: Tensor, changed_T: Tensor | None) -> None:
        instance("keys", keys, RowKeys, "RowKeys")
        rows = "rows" if not isinstance(ids_T, Tensor) or ids_T.dim() != 1 else ids_T.shape[0]
        named = {"ids_T": ids_T, "live_T": live_T, **vars(keys)}
        if changed_T is not None:
            named["changed_T"] = changed_T
        for name, given in named.items():
            dtype = torch.bool if name in ("live_T", "changed_T") else torch.int64
            tensor(name, given, dtype, (rows,), self.device)

    def _refuse(self, flags: list[int]) -> None:
        for flag, message in zip(flags, _TROUBLE, strict=True):
            if flag:
                raise ValueError(f"keys: {message.format(slots=self.max_slots - 1, window=self.window - 1)}")
