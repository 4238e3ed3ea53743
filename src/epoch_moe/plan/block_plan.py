"""One block's state: supports and caches of all layers, token stamps, and what the next forward does with its rows.

A forward's rows are the *lead* (C rows of each sequence whose K/V this forward writes for good: prompt blocks, or the
block that has just been finished) followed by the *window* (N rows with state). On a full window without K/V cache the
earlier blocks lie in the window before the current one, as *prefix* rows; on a fixed canvas the later ones lie behind
it, as *future* rows. A plan that follows a finished block's (`BlockPlan.follow`) has that block's last D rows in front
of its window as *carried* ones: lead rows of its first forward that have state.

Shape suffixes: B sequences, C lead rows, N window rows, S = C + N rows per sequence, T = B x S, H hidden, D carried
rows, M = B x (D + N).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.forward import ForwardPlan, LayerState, Watching
from epoch_moe.plan.packed import Compact, PaddedRows
from epoch_moe.plan.rules import NO_TOKEN, RowClasses, RowPlaces, cached_rows, stamps_after
from epoch_moe.plan.support import SupportState


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
        only_live: nothing is read of a forward but what the live rows are behind the last MoE layer: there the others
            are not computed.
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
        only_live: bool = False,
        counters: Counters,
        compact: Compact | None = None,
    ):
        self.config, self.counters = config, counters
        self.batch, self.window, self.prefix, self.future = batch, window, prefix, future
        # Exact settings reuse nothing at all: they are exact whatever happens to the model between two forwards.
        self.prefix_constant = prefix_constant and config.refresh_interval != 1
        self.only_live = only_live
        self.compact = compact
        self.layers = [LayerState(SupportState(fixed=compact is not None)) for _ in range(num_layers)]
        self.forwards = 0
        self.moves = 0
        self.carried = 0  # D
        self._stamps_M1: Tensor | None = None  # one entry more than there are: rows without state read and write there
        self._finished: tuple[BlockPlan, list[int]] | None = None  # what `follow` was given, until the first forward
        self._places: dict[tuple[int, bool], tuple[RowPlaces, RowClasses]] = {}
        self._missing: Tensor | None = None
        self.watch: Watching | None = None  # of the model that the block began with

    @property
    def stamps_M(self) -> Tensor | None:
        """int64, the token that each cache entry was computed for, `NO_TOKEN` for none; None before a first forward."""
        return None if self._stamps_M1 is None else self._stamps_M1[:-1]

    def follow(self, finished: BlockPlan, sequences: list[int]) -> None:
        """Before the first forward: go on with what a finished block's layers kept (``commit="drift"``).

        In a decode's positions this block begins where the finished one ended. Rows that both plans know, but for those
        of this block, are reused in its first forward as far as their inputs have not moved.

        Args:
            finished: its plan, which is of no use from then on.
            sequences: for each sequence of this block, which one of the finished block it is.
        """
        self._finished, self.watch = (finished, sequences), finished.watch

    @property
    def width(self) -> int:
        """D + N."""
        return self.carried + self.window

    def _take_over(self, finished: BlockPlan, sequences: list[int], lead: int, device: torch.device) -> None:
        """Stamps, outputs and inputs of `follow`'s plan at the places that their rows have in this one."""
        assert finished._stamps_M1 is not None
        offset = self.prefix - finished.window + finished.future  # of the finished window, in rows of this one
        self.carried = min(max(-offset, 0), lead)
        column_W = torch.arange(-self.carried, self.window, device=device) - offset
        there_W = (column_W >= 0) & (column_W < finished.window)
        row_B1 = torch.tensor(sequences, device=device).unsqueeze(1) * finished.width + finished.carried
        source_M = (row_B1 + column_W.clamp(0, finished.window - 1)).reshape(-1)
        source_M1 = torch.cat([source_M, source_M.new_full((1,), finished.batch * finished.width)])
        there_M1 = torch.nn.functional.pad(there_W.repeat(self.batch), (0, 1), value=False)
        self._stamps_M1 = finished._stamps_M1[source_M1].masked_fill(~there_M1, NO_TOKEN)
        for state, before in zip(self.layers, finished.layers, strict=True):
            if before.last_forward == finished.forwards - 1 and before.inputs_M1H is not None:
                assert before.cache_MH is not None
                where = source_M1.to(before.cache_MH.device)
                state.cache_MH, state.inputs_M1H = before.cache_MH[where[:-1]], before.inputs_M1H[where]
                state.weights = before.weights
            before.cache_MH = before.inputs_M1H = None

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
        flags = int(self.prefix_constant), int(self.only_live)
        return (id(self), self.moves, self.batch, self.window, self.prefix, self.future, *flags)

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
        if self._finished is not None:
            self._take_over(*self._finished, lead, ids_BS.device)
        if self._stamps_M1 is None:
            self._stamps_M1 = torch.full((self.batch * self.window + 1,), NO_TOKEN, device=ids_BS.device)
        places, classes = self._geometry(lead, ids_BS.device)
        stamp_T = self._stamps_M1[places.entry_T]
        classes = self._classify(classes, ids_BS, stamp_T, lead, mask_id, valid_BS, live_BN, changed_BN)
        forward = ForwardPlan(self, ids_BS, places, classes, stamp_T, capacity, follows=self._finished is not None)
        self._finished = None
        if isinstance(forward.rows, PaddedRows) and forward.rows.capacity < forward.rows.total:
            missing = forward.rows.count - forward.rows.capacity
            if self._missing is None:
                self._missing = torch.zeros_like(missing)
            torch.maximum(self._missing, missing, out=self._missing)
        return forward

    def _geometry(self, lead: int, device: torch.device) -> tuple[RowPlaces, RowClasses]:
        """Where the rows of forwards with so many lead rows belong, and what follows from it about their classes."""
        key = lead, self.forwards == 0
        if key not in self._places:
            batch, width, block = self.batch, self.width, self.window - self.prefix - self.future
            row_S = torch.arange(lead + self.window, device=device) - lead
            group_T = torch.arange(batch, device=device).repeat_interleave(row_S.shape[0])
            row_T = row_S.repeat(batch)  # of the window; below zero: lead
            state_T = row_T >= (-self.carried if self.forwards == 0 else 0)
            lead_T, before_T, behind_T = row_T < 0, row_T < self.prefix, row_T >= self.prefix + block
            block_T = ~before_T & ~behind_T
            vote_T = torch.where(block_T, group_T * block + row_T - self.prefix, batch * block)
            entry_T = torch.where(state_T, group_T * width + row_T + self.carried, batch * width)
            no_T = torch.zeros_like(state_T)
            classes = RowClasses(
                valid_T=~no_T,
                state_T=state_T,
                live_T=no_T,
                edited_T=no_T,
                cached_T=no_T,
                block_T=block_T,
                constant_T=state_T & (before_T if self.prefix_constant else lead_T),
                awake_T=behind_T if self.config.future_rows == "fresh" else no_T,
                cold_T=no_T,
                full_T=no_T,
            )
            self._places[key] = RowPlaces(batch, width, block, group_T, entry_T, vote_T), classes
        return self._places[key]

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
