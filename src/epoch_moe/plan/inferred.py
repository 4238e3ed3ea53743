"""Plans for loops of others: hooks on the base model that drive a plan by what the forwards look like.

`epoch_moe.generate` tells its plan when a block begins. A loop that knows nothing of plans (the released `generate`, a
diffusers pipeline, a loop written by hand) cannot; here the forwards of such a loop are followed by
`epoch_moe.plan.transitions.Tracker`, and a plan is opened, continued or dropped accordingly. A forward under a context
that somebody opened by hand is left alone.

Shape suffixes: B sequences, S rows of a forward, H hidden.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from epoch_moe.checks import flag, module
from epoch_moe.config import EpochConfig
from epoch_moe.plan.context import BlockPlanContext
from epoch_moe.plan.counters import Counters, Work
from epoch_moe.plan.patched import Patched
from epoch_moe.plan.slot import PlanSlot
from epoch_moe.plan.transitions import Decision, Hints, Seen, Tracker

_IGNORED = frozenset(
    ["use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "cache_position"]
)
_READ = frozenset(["input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache"])


class ForwardFailed(Exception):
    """Closes the plan of a forward that raised."""


@dataclass(frozen=True)
class PlanReport:
    """What inferred plans did on a model since `patch` or the last reset, all threads together.

    Attributes:
        work: what its forwards computed. ``work.fallbacks`` says why forwards or layers ran dense (docs/plans.md).
            Forwards with gradients are counted there and nowhere else.
        kinds: how many forwards were taken for what: ``request`` and ``block`` (cold passes of a first or next block),
            ``iteration``, ``edit``, ``remask`` and ``inputs`` (cold again within a block), ``dense``.
    """

    work: Work
    kinds: dict[str, int]

    def __str__(self) -> str:
        work, total = self.work, self.work.total
        dense_pairs = work.dense_rows * total.pairs / total.rows if total.rows else 0.0
        saved = f"{1 - work.rows / work.dense_rows:.1%}" if work.dense_rows else "none"
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items())) or "none"
        fallbacks = ", ".join(f"{count} {reason}" for reason, count in sorted(work.fallbacks.items())) or "none"
        return (
            f"epoch_moe: inferred plans over {work.forwards} forwards ({kinds}); {work.pairs:,} pairs, about "
            f"{dense_pairs:,.0f} without a plan; rows saved {saved}; fallbacks: {fallbacks}"
        )


@dataclass
class _Thread:
    """One thread's loop.

    Attributes:
        owner: the thread, to fold its counts when it is gone.
        counters, kinds: its share of the report.
        context: the plan, for the configuration that it was made with.
        tracker: follows the loop.
        running: the context of the forward under way, to be closed by the hook behind it.
        forward: what that context put into the slot.
        depth: forwards of the same module inside it.
    """

    owner: weakref.ReferenceType[threading.Thread]
    counters: Counters
    kinds: Counter[str] = field(default_factory=Counter)
    context: BlockPlanContext | None = None
    tracker: Tracker | None = None
    running: AbstractContextManager[None] | None = None
    forward: Any = None
    depth: int = 0

    def drop(self) -> None:
        """Forget the block: its supports and caches go."""
        if self.context is not None:
            self.context.end_block()
        if self.tracker is not None:
            self.tracker.drop()

    def close(self, *, failed: bool) -> None:
        """Close the forward under way, if any."""
        running, self.running, self.forward, self.depth = self.running, None, None, 0
        if running is None:
            return
        if not failed:
            running.__exit__(None, None, None)
            return
        try:
            error = ForwardFailed()
            running.__exit__(ForwardFailed, error, None)
        except ForwardFailed:
            pass
        self.drop()


class InferredPlans:
    """Drives plans of one patched model by the forwards of its base model.

    Args:
        patched: the model's blocks and slot. Not the object that owns this one: models must go when nobody uses them,
            without waiting for the garbage collector.
        config: the plan's configuration; None: nothing is inferred.
        hints: what the user said about the loops.
    """

    def __init__(self, patched: Patched, config: EpochConfig | None, hints: Hints):
        self._patched, self.config, self.hints = patched, config, hints
        self._local = threading.local()
        self._lock = threading.Lock()
        self._threads: list[_Thread] = []
        self._gone: PlanReport | None = None  # of threads that have ended

    def __getstate__(self) -> dict[str, Any]:
        return {"patched": self._patched, "config": self.config, "hints": self.hints}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def slot(self) -> PlanSlot:
        """Where the blocks look."""
        return self._patched.slot

    def configure(self, config: EpochConfig | None, hints: Hints) -> None:
        """Change configuration and hints; blocks under way are dropped by their threads at their next forward."""
        self.config, self.hints = config, hints

    def report(self, *, reset: bool = False) -> PlanReport:
        """What was done so far; ``reset`` starts the counts anew and frees the blocks under way."""
        with self._lock:
            self._fold()
            report = PlanReport(Counters(*self._layout()).read(), {}) if self._gone is None else self._gone
            for thread in self._threads:
                report = _sum(report, PlanReport(thread.counters.read(), dict(thread.kinds)))
            if reset:
                self._gone, self._threads, self._local = None, [], threading.local()
        return report

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the base model."""
        if self.config is None or torch.compiler.is_compiling():
            return
        active, known = self.slot.active, self._known_thread()
        if known is not None and known.running is not None:
            if active is known.forward:
                known.depth += 1
                return
            known.close(failed=True)  # a forward that was interrupted without its hook (KeyboardInterrupt)
        if active is not None:
            return  # somebody's own plan
        thread = self._thread()
        if torch.is_grad_enabled() or module.training:
            thread.drop()
            thread.counters.fallbacks["gradients" if torch.is_grad_enabled() else "training"] += 1
            thread.kinds["dense"] += 1
            return
        seen, shape_BS, reason = _read(module, args, kwargs)
        mask_id = self._mask_id(module)
        if not reason and mask_id is None:
            reason = "mask_token_id"
        if reason:
            thread.drop()
            decision = Decision("dense", reason)
        else:
            assert seen is not None and mask_id is not None
            tracker = self._tracker(thread, module, mask_id)
            decision = tracker.observe(seen)
        context = self._open(thread, decision, None if shape_BS is None else shape_BS.to(_device(module, shape_BS)))
        if context is not None:
            context.__enter__()
            thread.running, thread.forward = context, self.slot.active
            self.slot.bind(sys._getframe(1))

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the base model, called also when the forward raised (with None for its output)."""
        if torch.compiler.is_compiling():
            return
        thread = self._known_thread()
        if thread is None or thread.running is None:
            return
        if self.slot.active is thread.forward and thread.depth:
            thread.depth -= 1
            return
        thread.close(failed=output is None or self.slot.active is not thread.forward)

    def _open(
        self, thread: _Thread, decision: Decision, shape_BS: Tensor | None
    ) -> AbstractContextManager[None] | None:
        """The context of a forward, not entered yet; None where there is nothing to count its rows by."""
        context = thread.context
        assert context is not None
        thread.kinds[decision.kind] += 1
        if decision.kind == "dense":
            context.end_block()
            thread.counters.fallbacks[decision.reason] += 1
            return None if shape_BS is None else context.prefill(shape_BS)
        assert shape_BS is not None and decision.live_BS is not None
        if decision.cold:
            pool = self._patched.routing_block
            context.begin_block(
                batch=shape_BS.shape[0],
                window=shape_BS.shape[1],
                prefix=decision.begin,
                future=shape_BS.shape[1] - decision.end,
                # Rows that share a pool of experts with the block change with it.
                prefix_constant=decision.constant and (pool is None or decision.begin % pool == 0),
            )
        assert thread.tracker is not None
        live_BS = decision.live_BS.to(shape_BS.device)
        return context.iteration(shape_BS, mask_id=thread.tracker.mask_id, live_BN=live_BS)

    def _known_thread(self) -> _Thread | None:
        return getattr(self._local, "thread", None)

    def _thread(self) -> _Thread:
        """This thread's state, its context made for the present configuration."""
        thread = self._known_thread()
        if thread is None:
            thread = _Thread(weakref.ref(threading.current_thread()), Counters(*self._layout()))
            with self._lock:
                self._fold()
                self._threads.append(thread)
            self._local.thread = thread
        if thread.context is None or thread.context.config is not self.config:
            thread.context = BlockPlanContext(self._patched, self.config)
            thread.context.holds = False  # its blocks outlive the decode that they were made for
            thread.context.counters = thread.counters
            if thread.tracker is not None:
                thread.tracker.drop()
        return thread

    def _tracker(self, thread: _Thread, module: nn.Module, mask_id: int) -> Tracker:
        config_length = getattr(getattr(module, "config", None), "block_length", None)
        hints = self.hints
        if hints.block_length is None and isinstance(config_length, int) and config_length > 0:
            hints = Hints(hints.mask_token_id, config_length, hints.editing)
        if thread.tracker is None or thread.tracker.hints != hints or thread.tracker.mask_id != mask_id:
            thread.tracker = Tracker(mask_id, hints)
        return thread.tracker

    def _mask_id(self, module: nn.Module) -> int | None:
        if self.hints.mask_token_id is not None:
            return self.hints.mask_token_id
        value = getattr(getattr(module, "config", None), "mask_token_id", None)
        return value if isinstance(value, int) else None

    def _layout(self) -> tuple[int, list[int]]:
        sizes = self._patched.bytes_per_expert()
        return len(sizes), sizes

    def _fold(self) -> None:
        """Add up the counts of threads that have ended (the lock is held)."""
        for thread in [t for t in self._threads if (owner := t.owner()) is None or not owner.is_alive()]:
            counts = PlanReport(thread.counters.read(), dict(thread.kinds))
            self._gone = counts if self._gone is None else _sum(self._gone, counts)
            self._threads.remove(thread)


def plan_report(model: nn.Module, *, reset: bool = False) -> PlanReport:
    """What inferred plans did on a patched model since `patch` or the last reset.

    Args:
        model: patched, with a configuration.
        reset: start the counts anew, and free the caches of blocks under way.

    Raises:
        ValueError: the model is not patched, or its experts are split over ranks: no plan is inferred there.
    """
    flag("reset", reset)
    patched = module("model", model).__dict__.get("_epoch_moe")
    if patched is None:
        raise ValueError(f"{type(model).__name__} is not patched by epoch_moe: call epoch_moe.patch(model) first")
    if patched.inferred is None:
        raise ValueError(
            f"the experts of {type(model).__name__} are split over ranks, so no plan is inferred for loops of others: "
            "epoch_moe.generate returns its counters with the answers"
        )
    report: PlanReport = patched.inferred.report(reset=reset)
    return report


def _sum(a: PlanReport, b: PlanReport) -> PlanReport:
    return PlanReport(a.work + b.work, dict(Counter(a.kinds) + Counter(b.kinds)))


def _read(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Seen | None, Tensor | None, str]:
    """What the tracker needs of a forward's arguments; its rows ``[B,S]``, ids where there are; or why it is dense."""
    names = [name for name in inspect.signature(module.forward).parameters]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given = {name: value for name, value in given.items() if value is not None and name not in _IGNORED}
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
            weakref.ref(cache)
            past = int(cache.get_seq_length())
        except (AttributeError, TypeError):
            return None, ids_BS, "cache"
    elif _writes_cache(module, args, kwargs, names):
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


def _writes_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> bool:
    asked = {**dict(zip(names, args, strict=False)), **kwargs}.get("use_cache")
    if asked is None:
        asked = getattr(getattr(module, "config", None), "use_cache", False)
    return bool(asked)


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
