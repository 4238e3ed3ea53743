"""`OtherRanks`: what one decode does so that ranks that share a model's experts run the same forwards; and `in_step`.

Shape suffixes: B sequences, S rows per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.forward import ForwardPlan
from epoch_moe.plan.patched import Patched, patched_of
from epoch_moe.plan.slot import DenseForward
from epoch_moe.plan.turns import Turn


class OtherRanks:
    """The other ranks, as one decode sees them. Where there are none (``patched.ep`` is None) nothing happens.

    Args:
        patched: the decode's layers.
        config: its plan.
        counters: where forwards that this rank joins without rows are counted.
    """

    def __init__(self, patched: Patched, config: EpochConfig | None, counters: Counters):
        self._patched, self._config, self._counters = patched, config, counters
        shared = config is not None and config.support_scope == "batch" and config.coverage is not None
        # Ranks with different sequences that share a support must begin their blocks together.
        self._begins_together = patched.ep is not None and patched.ep.layout == "sharded" and shared

    def before_iteration(self, plan: BlockPlan | None, ids_BS: Tensor) -> None:
        """Wait until it is this rank's turn for a forward of its block."""
        cold = plan is not None and plan.forwards == 0
        self._take_turn(Turn.BEGIN if cold and self._begins_together else Turn.ITERATION, ids_BS)

    def before_prefill(self, ids_BS: Tensor) -> None:
        """Wait until it is this rank's turn for a forward outside of blocks."""
        self._take_turn(Turn.PREFILL if self._begins_together else Turn.ITERATION, ids_BS)

    def after_forward(self) -> None:
        """Before a decoder reads a forward's logits: did every row reach its experts?"""
        if self._patched.ep is not None:
            self._patched.ep.check_capacity()

    def after_block(self, plan: BlockPlan) -> bool:
        """Keep a finished block's plan while other ranks may still be at a block whose support is everybody's."""
        if self._begins_together:
            assert self._patched.ep is not None
            self._patched.ep.idle_plan = plan
            plan.watch = None  # the model must not hold itself
        return self._begins_together

    @torch.no_grad()
    def finish(self) -> None:
        """Join the others' forwards until they have ended their decodes too; within `in_step`, that waits."""
        ep = self._patched.ep
        if ep is not None and not ep.deferred:
            self._patched.ensure_stacked()
            self._take_turn(Turn.DONE)
            ep.idle_plan = None

    def _take_turn(self, turn: Turn, ids_BS: Tensor | None = None) -> None:
        """Join what is more urgent on other ranks, until it is this rank's turn."""
        ep, config = self._patched.ep, self._config
        if ep is None:
            return
        ep.agree_once()
        while (most := ep.most_urgent(turn, config, ids_BS))[0] != turn:
            self._join(*most)
            config = most[1]

    def _join(self, turn: Turn, config: EpochConfig | None) -> None:
        """A forward of other ranks, without rows of this one; its supports are kept up to date."""
        ep, device = self._patched.ep, self._patched.device
        assert ep is not None
        forward: ForwardPlan | DenseForward
        shape = 1, 1
        if config is None or turn == Turn.PREFILL:
            nothing_BS = torch.zeros(shape, dtype=torch.bool, device=device)
            forward = DenseForward(self._counters, nothing_BS.shape, nothing_BS)
        else:
            plan: BlockPlan | None = ep.idle_plan
            if plan is None or turn == Turn.BEGIN or plan.config != config:
                plan = ep.idle_plan = BlockPlan(
                    config, self._counters.num_layers, batch=1, window=1, prefix=0, prefix_constant=False,
                    counters=self._counters,
                )  # fmt: skip
            shape = plan.batch, plan.window
            forward = plan.next_forward(
                torch.zeros(shape, dtype=torch.int64, device=device),
                mask_id=-1,
                valid_BS=torch.zeros(shape, dtype=torch.bool, device=device),
                lead=0,
                live_BN=None,
                changed_BN=None,
            )
        with self._patched.slot.activate(forward):
            self._patched.idle_forward(*shape)
        if isinstance(forward, ForwardPlan):
            forward.plan.complete(forward)


@contextmanager
def in_step(model: Any) -> Iterator[None]:
    """Keep ranks that share a model's experts in step over several decodes, whose numbers may differ between ranks.

    Within it, a rank that has ended a decode goes on with its next one; at its end it joins the others' forwards until
    all ranks are there. Without it, every rank must make the same number of `epoch_moe.generate` calls.

    Args:
        model: patched; without ``ep_group`` this does nothing.
    """
    patched = patched_of(model)
    if patched is None or patched.ep is None or patched.ep.deferred:
        yield
        return
    patched.ep.deferred = True
    try:
        yield
    finally:
        patched.ep.deferred = False
    sizes = patched.bytes_per_expert()
    OtherRanks(patched, patched.config, Counters(len(sizes), sizes)).finish()
