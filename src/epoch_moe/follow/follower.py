"""`Follower`: drives the plan of one foreign loop by what its forwards look like.

`epoch_moe.generate` tells its plan when a block begins. A loop that knows nothing of plans (the released `generate`, a
diffusers pipeline, a loop written by hand) cannot; here its forwards are followed by
`epoch_moe.follow.transitions.Tracker`, and a plan is opened, continued or dropped accordingly. A forward under a
context that somebody opened by hand is left alone.

Shape suffixes: B sequences, S rows of a forward, H hidden.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter, deque
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from epoch_moe.config import EpochConfig
from epoch_moe.follow.report import FollowedForward, PlanReport
from epoch_moe.follow.transitions import Hints, Seen, Taken, Tracker
from epoch_moe.follow.watch import Watch
from epoch_moe.plan.context import BlockPlanContext
from epoch_moe.plan.patched import Patched

_IGNORED = frozenset(
    ["use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "cache_position"]
)
_READ = frozenset(["input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache"])


class ForwardFailed(Exception):
    """Closes the plan of a forward that raised."""


class Follower:
    """One scope: what `epoch_moe.following` gives.

    Args:
        patched: the model's blocks and slot. Not what owns followers: models must go when nobody uses them, without
            waiting for the garbage collector.
        config: the plan's configuration; None: nothing is planned.
        hints: what is known of the loop.
    """

    def __init__(self, patched: Patched, config: EpochConfig | None, hints: Hints):
        self._patched, self.hints = patched, hints
        # Loops of others are followed from block to block, not through their K/V-writing forwards.
        config = None if config is None else config.replace(commit="full")
        self._context = BlockPlanContext(patched, config)
        self._kinds: Counter[str] = Counter()
        self._forwards: deque[FollowedForward] = deque(maxlen=256)
        self._tracker: Tracker | None = None
        self._watch: Watch | None = None
        self._experts: list[tuple[int, int]] = []  # their versions when the watch was made
        self._running: AbstractContextManager[None] | None = None  # of the forward under way, for the hook behind it
        self._forward: Any = None  # what that put into the slot
        self._depth = 0  # forwards of the same module inside it

    def report(self) -> PlanReport:
        """What was done in this scope so far."""
        return PlanReport(self._context.counters.read(), dict(self._kinds), tuple(self._forwards))

    def close(self) -> None:
        """The scope is left: everything but the report goes."""
        if self._running is not None:
            self._end(failed=True)
        self._drop()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward of the base model."""
        slot = self._patched.slot
        active = slot.active
        if self._running is not None:
            if active is self._forward:
                self._depth += 1
                return
            self._end(failed=True)  # a forward that was interrupted without its hook (KeyboardInterrupt)
        if active is not None:
            return  # somebody's own plan
        if reason := self._untouched(module):
            self._drop()
            self._note(Taken("dense", reason))
            return
        seen, shape_BS, reason = _read(module, args, kwargs)
        tracker = self._track(module)
        if seen is None or tracker is None:
            self._drop()
            taken = Taken("dense", reason or "mask_token_id")
        else:
            taken = tracker.observe(replace(seen, changed=self._changed(module)))
        self._note(taken)
        context = self._open(taken, None if shape_BS is None else shape_BS.to(_device(module, shape_BS)))
        if context is not None:
            context.__enter__()
            self._running, self._forward = context, slot.active
            self._forward.model_seen = True
            slot.bind(sys._getframe(2))

    def after(self, output: Any) -> None:
        """After a forward of the base model, also one that raised (with None for its output)."""
        active = self._patched.slot.active
        if self._running is None:
            return
        if active is self._forward and self._depth:
            self._depth -= 1
            return
        self._end(failed=output is None or active is not self._forward)

    def _untouched(self, module: nn.Module) -> str:
        """Why a forward is left alone whatever it looks like, or ''."""
        if self._context.config is None:
            return "no_plan"
        if self._patched.ep is not None:
            return "ranks"
        return "gradients" if torch.is_grad_enabled() else "training" if module.training else ""

    def _note(self, taken: Taken) -> None:
        self._kinds[taken.kind] += 1
        self._forwards.append(FollowedForward(taken.kind, taken.reason))
        if taken.reason:
            self._context.counters.fallbacks[taken.reason] += 1

    def _changed(self, module: nn.Module) -> bool:
        """Whether the model is another one than at the last forward that was looked at."""
        layers, experts = self._patched.ensure_stacked(), self._patched.versions()
        sampled = [t for views in layers for t in (*views.projections, views.down_EHF)]
        if self._patched.slot.listener is not None:
            sampled = []  # experts outside of fast memory come and go, and cannot be written to
        if self._watch is not None and experts == self._experts and not self._watch.changed(sampled):
            return False
        self._watch, self._experts = Watch(module, sampled), experts
        return True

    def _open(self, taken: Taken, shape_BS: Tensor | None) -> AbstractContextManager[None] | None:
        """The context of a forward, not entered yet; None where there is nothing to count its rows by."""
        context = self._context
        if taken.kind == "dense":
            context.end_block()
            return None if shape_BS is None else context.prefill(shape_BS)
        assert shape_BS is not None and taken.live_BS is not None
        assert self._tracker is not None and context.config is not None
        if taken.cold:
            pool = self._patched.routing_block
            # Rows that share a pool of experts with the block change with it.
            constant = taken.constant and (pool is None or taken.begin % pool == 0)
            context.begin_block(
                batch=shape_BS.shape[0],
                window=shape_BS.shape[1],
                prefix=taken.begin,
                future=shape_BS.shape[1] - taken.end,
                prefix_constant=constant,
            )
        live_BS = taken.live_BS.to(shape_BS.device)
        return context.iteration(shape_BS, mask_id=self._tracker.mask_id, live_BN=live_BS)

    def _drop(self) -> None:
        """Forget the block: its supports and caches go."""
        self._watch = None
        self._context.end_block()
        if self._tracker is not None:
            self._tracker.drop()

    def _end(self, *, failed: bool) -> None:
        """Close the forward under way."""
        running, self._running, self._forward, self._depth = self._running, None, None, 0
        assert running is not None
        if not failed:
            running.__exit__(None, None, None)
            return
        with suppress(ForwardFailed):
            running.__exit__(ForwardFailed, ForwardFailed(), None)
        self._drop()

    def _track(self, module: nn.Module) -> Tracker | None:
        """What follows the ids; None where the mask token is not known."""
        config = getattr(module, "config", None)
        length = getattr(config, "block_length", None)
        own = Hints(getattr(config, "mask_token_id", None), length if isinstance(length, int) and length > 0 else None)
        hints = self.hints.or_else(own)
        if not isinstance(hints.mask_token_id, int):
            return None
        if self._tracker is None or self._tracker.mask_id != hints.mask_token_id:
            self._tracker = Tracker(hints.mask_token_id, hints)
        return self._tracker


def _read(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Seen | None, Tensor | None, str]:
    """What the tracker needs of a forward's arguments; its rows ``[B,S]``, ids where there are; or why it is dense."""
    names = list(inspect.signature(module.forward).parameters)
    passed = {**dict(zip(names, args, strict=False)), **kwargs}
    given = {name: value for name, value in passed.items() if value is not None and name not in _IGNORED}
    ids_BS, embeds_BSH = given.get("input_ids"), given.get("inputs_embeds")
    if ids_BS is None and isinstance(embeds_BSH, Tensor) and embeds_BSH.dim() == 3:
        return None, embeds_BSH[..., 0], "inputs_embeds"
    if not isinstance(ids_BS, Tensor) or ids_BS.dim() != 2 or len(args) > len(names):
        return None, None, "arguments"
    if not given.keys() <= _READ or embeds_BSH is not None:
        return None, ids_BS, "arguments"
    if ids_BS.is_floating_point() or not all(
        isinstance(given.get(name), (Tensor, type(None))) for name in ("attention_mask", "position_ids")
    ):
        return None, ids_BS, "arguments"
    cache = given.get("past_key_values", given.get("cache"))
    past = 0
    if cache is not None:
        try:
            cache, past = weakref.ref(cache), int(cache.get_seq_length())
        except (AttributeError, TypeError):
            return None, ids_BS, "cache"
    elif _writes_cache(module, passed.get("use_cache")):
        return None, ids_BS, "cache_write"
    seen = Seen(
        ids_BS.to("cpu", torch.int64, copy=True),
        mask=given.get("attention_mask"),
        positions=given.get("position_ids"),
        cache=cache,
        past=past,
        additive=_reads_additive_masks(module),
    )
    return seen, ids_BS, ""


def _writes_cache(module: nn.Module, asked: Any) -> bool:
    return bool(getattr(getattr(module, "config", None), "use_cache", False) if asked is None else asked)


def _device(module: nn.Module, ids_BS: Tensor) -> torch.device:
    """Where the layers' rows will be: accelerate takes ids on any device."""
    embedding: Any = getattr(module, "get_input_embeddings", None)
    weight = getattr(embedding(), "weight", None) if callable(embedding) else None
    return weight.device if isinstance(weight, Tensor) and weight.device.type != "meta" else ids_BS.device


def _reads_additive_masks(module: nn.Module) -> bool:
    """Whether a 4-D attention mask forbids where it is -inf (or False).

    True for this library's classes. The released LLaDA2 code passes such masks on to sdpa, but its eager attention
    reads them as 0/1; the released LLaDA-MoE code ignores them.
    """
    if any(cls.__module__.startswith("epoch_moe.") for cls in type(module).__mro__):
        return True
    config = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", None) == "sdpa" and hasattr(config, "first_k_dense_replace")
