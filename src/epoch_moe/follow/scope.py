"""`following`: the scope in which a foreign loop's forwards are taken for a decode, and `generate` as such a scope.

No rule on ids tells a decode from scoring, from a reference pass with an adapter off, or from two requests that take
turns. So a patched model outside of these scopes is just the model, and nothing of one forward is kept for the next.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Thread, current_thread
from types import MethodType
from typing import Any

import torch
from torch import nn

from epoch_moe.checks import flag, module
from epoch_moe.config import EpochConfig
from epoch_moe.follow.follower import Follower
from epoch_moe.follow.report import PlanReport
from epoch_moe.follow.transitions import Hints
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.patched import Patched
from epoch_moe.plan.slot import current_task


class Following:
    """What a patched model knows of loops of others: its scopes, and the hooks on its base model that look for one.

    Args:
        patched: the model's blocks and slot. Not the object that owns this one: models must go when nobody uses them,
            without waiting for the garbage collector.
        config: the plan's configuration; None: nothing is planned.
        hints: what the user said about all loops.
    """

    def __init__(self, patched: Patched, config: EpochConfig | None, hints: Hints):
        self.patched, self.config, self.hints = patched, config, hints
        self._open: dict[tuple[Thread, object], Follower] = {}  # by the thread and the asyncio task that opened it
        self._lock = Lock()
        self._left: PlanReport | None = None

    def __reduce__(self) -> tuple[type[Following], tuple[Patched, EpochConfig | None, Hints]]:
        return Following, (self.patched, self.config, self.hints)

    def here(self) -> Follower | None:
        """The scope of this thread and task, if one is open."""
        return self._open.get((current_thread(), current_task())) if self._open else None

    @contextmanager
    def scope(self, hints: Hints) -> Iterator[Follower]:
        """Open one; the caller has seen to it that none is open here. It may be left in another thread."""
        place, follower = (current_thread(), current_task()), Follower(self.patched, self.config, hints)
        with self.patched.slot.holding("a loop that is followed"):
            self._open[place] = follower
            try:
                yield follower
            finally:
                with self._lock:
                    del self._open[place]
                    follower.close()
                    report = follower.report()
                    self._left = report if self._left is None else self._left + report

    def report(self, *, reset: bool = False) -> PlanReport:
        """What was done in all scopes; ``reset``: forget those that have been left."""
        with self._lock:
            sizes = self.patched.bytes_per_expert()
            report = PlanReport(Counters(len(sizes), sizes).read(), {}) if self._left is None else self._left
            if reset:
                self._left = None
            for follower in self._open.values():
                report = report + follower.report()
        return report

    def before(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the base model."""
        if not torch.compiler.is_compiling() and (follower := self.here()) is not None:
            follower.before(base, args, kwargs)

    def after(self, base: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the base model, called also when the forward raised."""
        if not torch.compiler.is_compiling() and (follower := self.here()) is not None:
            follower.after(output)


class FollowedGenerate:
    """A model's own ``generate``, every call of it a scope.

    Its hints are the call's ``block_length`` and mask id, and whether it has an argument that speaks of edits.

    Does not keep the model alive, and goes with it into copies and pickles.

    Args:
        model: whose.
        before: what stood in its place on the instance; None: the class's method.
    """

    def __init__(self, model: nn.Module, before: Any = None):
        self._model, self._before = weakref.ref(model), before
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(self.__wrapped__, name):
                setattr(self, name, getattr(self.__wrapped__, name))

    @property
    def __wrapped__(self) -> Any:
        """The model's own, bound."""
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this generate is gone: keep the patched model while you call it")
        return MethodType(type(model).generate, model) if self._before is None else self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it in a scope, or in the one that is open here."""
        own, model = self.__wrapped__, self._model()
        state = None if model is None else model.__dict__.get("_epoch_moe")
        if state is None or state.following.here() is not None:
            return own(*args, **kwargs)
        with state.following.scope(_hints(own, args, kwargs).or_else(state.following.hints)):
            return own(*args, **kwargs)

    def take_off(self, model: nn.Module) -> None:
        """Put back what stood on the instance before."""
        if self._before is None:
            object.__delattr__(model, "generate")
        else:
            object.__setattr__(model, "generate", self._before)

    def __reduce__(self) -> tuple[type[FollowedGenerate], tuple[Any, Any]]:
        return FollowedGenerate, (self._model(), self._before)


@contextmanager
def following(
    model: nn.Module,
    *,
    block_length: int | None = None,
    editing: bool | None = None,
    mask_token_id: int | None = None,
) -> Iterator[Follower]:
    """Take the forwards of a loop that opens no plan itself for a decode, and plan them.

    For loops that are functions or pipelines. Calls of the patched model's own ``generate`` need none: each is such a
    scope by itself, or part of the one that it is called in. Within the scope a forward under `torch.no_grad` is
    compared with the one before (docs/plans.md, "Loops of others"). What was learned ends with the scope. Forwards of
    other threads and tasks are not in it.

    Example:
        >>> import epoch_moe, torch
        >>> model, _ = epoch_moe.load_model("tiny-llada2")
        >>> report = epoch_moe.patch(model)
        >>> ids = torch.full((1, 32), model.config.mask_token_id)
        >>> with torch.no_grad(), epoch_moe.following(model, block_length=32) as follower:
        ...     for _ in range(3):  # a loop of your own, or a pipeline's
        ...         best = model(ids).logits.softmax(-1).max(-1)
        ...         row = best.values.masked_fill(ids != model.config.mask_token_id, 0.0).argmax()
        ...         ids[0, row] = best.indices[0, row]
        >>> follower.report().work.forwards
        3

    Args:
        model: patched, or a wrapper (peft, for one) around a patched model.
        block_length: positions of a block. Needed for a fixed canvas (LLaDA-MoE); elsewhere None finds it out.
        editing: whether the loop may replace tokens that are decoded. None: assumed until it shows that it does not.
            False: never, so that another token is another request.
        mask_token_id: id of undecoded positions. None: the model config's ``mask_token_id``.

        What is None is as given to `epoch_moe.patch`.

    Yields:
        The `Follower`; its ``report()`` says what was done in this scope, `epoch_moe.plan_report` in all.

    Raises:
        ValueError: the model is not patched, or its experts are split over ranks, or a hint is none.
        RuntimeError: a scope of this model is open in this thread (or task) already.
    """
    hints = Hints.checked(model, mask_token_id, block_length, editing)
    known = _following(model)
    if (ep := known.patched.ep) is not None:
        raise ValueError(
            f"the experts of {type(model).__name__} are split over {ep.ranks.world} ranks, where loops of others are "
            "not followed: use epoch_moe.generate"
        )
    if known.here() is not None:
        raise RuntimeError(
            f"this thread is inside a following() scope, or a generate(), of this {type(model).__name__} already, and "
            "two loops in one scope would be mixed: leave it first"
        )
    with known.scope(hints.or_else(known.hints)) as follower:
        yield follower


def plan_report(model: nn.Module, *, reset: bool = False) -> PlanReport:
    """What was done in all scopes of a patched model since `patch` or the last reset, whatever their threads.

    Args:
        model: patched, or a wrapper around a patched model.
        reset: forget the scopes that have been left; an open one goes on counting.

    Raises:
        ValueError: the model is not patched.

    Example:
        >>> import epoch_moe
        >>> model, _ = epoch_moe.load_model("tiny-llada2")
        >>> report = epoch_moe.patch(model)
        >>> epoch_moe.plan_report(model).work.forwards  # nobody has opened a scope
        0
    """
    return _following(model).report(reset=flag("reset", reset))


def follow_generate(model: nn.Module) -> FollowedGenerate | None:
    """Make calls of a model's own ``generate`` scopes; None where it has none, or this library's: that plans itself."""
    method = getattr(type(model), "generate", None)
    before = model.__dict__.get("generate")
    if before is None and (method is None or method.__module__.startswith("epoch_moe.")):
        return None
    followed = FollowedGenerate(model, before)
    object.__setattr__(model, "generate", followed)
    return followed


def _following(model: nn.Module) -> Following:
    states = (each.__dict__.get("_epoch_moe") for each in module("model", model).modules())
    state = next((state for state in states if state is not None), None)
    if state is None:
        raise ValueError(f"{type(model).__name__} is not patched by epoch_moe: call epoch_moe.patch(model) first")
    found: Following = state.following
    return found


def _hints(generate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hints:
    """What the arguments of a call say about the loop inside."""
    try:
        signature = inspect.signature(generate)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return Hints()  # the call itself will say what is wrong
    bound.apply_defaults()
    given = {**bound.arguments, **kwargs}
    mask_id, length = given.get("mask_token_id", given.get("mask_id")), given.get("block_length")
    told = [v if isinstance(v, int) and v > 0 and v is not True else None for v in (mask_id, length)]
    # The released loops that edit have a threshold for it. Without one a replaced token begins a request anew.
    edits = None if any("edit" in name for name in (*signature.parameters, *kwargs)) else False
    return Hints(*told, editing=edits)
