"""What is under way on a patched model: forwards left by other threads and tasks, and patches that have to wait."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from decode import MASK_ID, moe_blocks, patched_model
from torch import Tensor, nn

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.plan.context import BlockPlanContext

IDS = torch.tensor([[1, 2, MASK_ID, MASK_ID]])
GENERATION = {"gen_length": 8, "block_length": 8, "steps": 2}


@pytest.fixture(scope="module")
def shared() -> Any:
    return patched_model()


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=100)
    assert not thread.is_alive()


def steps(model: Any, entered: str) -> Iterator[None]:
    context = BlockPlanContext(model._epoch_moe, EpochConfig())
    with context.block(batch=1, window=4):
        if entered == "iteration":
            with context.iteration(IDS, mask_id=MASK_ID):
                yield
        yield
    if entered == "prefill":
        with context.prefill(IDS):
            yield


@torch.no_grad()
@pytest.mark.parametrize("entered", ["block", "iteration", "prefill"])
@pytest.mark.parametrize("how", ["next", "close", "collected"])
def test_what_another_thread_leaves_is_free(shared: Any, entered: str, how: str) -> None:
    want = epoch_moe.generate(shared, [[3, 4]], **GENERATION).sequences
    generator = [steps(shared, entered)]
    for _ in range(2 if entered == "prefill" else 1):
        next(generator[0])
    slot = shared._epoch_moe.slot
    with pytest.raises(RuntimeError, match="thread 'MainThread'"):
        slot.check_idle("unpatch")

    def leave() -> None:
        one = generator.pop()
        if how == "next":
            next(one, None)
            one.close()
        elif how == "close":
            one.close()
        del one
        gc.collect()

    in_thread(leave)
    assert slot.active is None
    slot.check_idle("unpatch")
    assert torch.equal(epoch_moe.generate(shared, [[3, 4]], **GENERATION).sequences, want)


@torch.no_grad()
def test_a_task_does_not_see_the_forward_of_another_one(shared: Any) -> None:
    """Both run in one thread; the plain forward of the second must not be taken for the first's iteration."""
    block, x = moe_blocks(shared)[0], torch.randn(1, 4, 64)
    want = block(x)[0]
    context = BlockPlanContext(shared._epoch_moe, EpochConfig(coverage=0.3))
    seen: dict[str, Any] = {}

    async def planned() -> None:
        with context.block(batch=1, window=4), context.iteration(IDS, mask_id=MASK_ID):
            entered.set()
            await done.wait()
            seen["own"] = shared._epoch_moe.slot.active

    async def plain() -> None:
        await entered.wait()
        seen["other"] = block(x)[0]
        with pytest.raises(RuntimeError, match="already under way"):
            next(steps(shared, "iteration"))
        done.set()

    async def both() -> None:
        await asyncio.gather(planned(), plain())

    entered, done = asyncio.Event(), asyncio.Event()
    asyncio.run(both())
    assert seen["own"] is not None and torch.equal(seen["other"], want)
    assert context.counters.read().rows == 0


class Held:
    """A streamer that stops a decode between two blocks, until it is let go."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()

    def put(self, tokens: Tensor) -> None:
        self.inside.set()
        assert self.go.wait(timeout=100)

    def end(self) -> None:
        pass


def blocks_of(model: nn.Module) -> list[Any]:
    return [layer.mlp for layer in model.model.layers]  # type: ignore[union-attr]


@torch.no_grad()
@pytest.mark.parametrize("what", ["a decode", "a block", "a forward"])
def test_the_patch_does_not_change_under_what_is_under_way(what: str) -> None:
    model = patched_model()
    epoch_moe.patch(model)
    state, blocks, before = model._epoch_moe, blocks_of(model), model._epoch_moe.config
    held, outs = Held(), []
    context = BlockPlanContext(state, None)
    opened: list[Any] = []
    if what == "a decode":
        decoder = threading.Thread(
            target=lambda: outs.append(epoch_moe.generate(model, [[3, 4]], streamer=held, **GENERATION)), name="decoder"
        )
        decoder.start()
        assert held.inside.wait(timeout=100)
    elif what == "a block":
        context.begin_block(batch=1, window=4)
    else:
        opened.append(context.prefill(IDS))
        opened[0].__enter__()
    changes: list[Callable[[], Any]] = [
        lambda: epoch_moe.unpatch(model),
        lambda: epoch_moe.patch(model, "exact"),
        lambda: epoch_moe.patched(model, "exact").__enter__(),
    ]
    thread = "decoder" if what == "a decode" else "MainThread"
    for change in changes:
        with pytest.raises(RuntimeError, match=rf"under way on this model: .*{what} \(thread '{thread}'\)"):
            change()
        assert model._epoch_moe is state and state.config is before and blocks_of(model) == blocks
    epoch_moe.patch(model)  # changes nothing, so it may
    if what == "a decode":
        held.go.set()
        decoder.join(timeout=100)
        assert len(outs) == 1
    elif what == "a block":
        context.end_block()
    else:
        opened[0].__exit__(None, None, None)
    epoch_moe.unpatch(model)
    with pytest.raises(RuntimeError, match="the model was unpatched since"):
        context.begin_block(batch=1, window=4)
    epoch_moe.patch(model)


@pytest.mark.parametrize("patched_before", [False, True])
def test_the_end_of_patched_waits_for_nobody(patched_before: bool) -> None:
    model = patched_model()
    if not patched_before:
        epoch_moe.unpatch(model)
    scope = epoch_moe.patched(model, EpochConfig.exact())
    scope.__enter__()
    state, context = model._epoch_moe, BlockPlanContext(model._epoch_moe, EpochConfig())
    context.begin_block(batch=1, window=4)
    with pytest.raises(RuntimeError, match="a block"):
        scope.__exit__(None, None, None)
    assert model._epoch_moe is state and state.config == EpochConfig.exact()
    context.end_block()


def test_a_block_that_was_dropped_holds_nothing() -> None:
    model = patched_model()
    BlockPlanContext(model._epoch_moe, EpochConfig()).begin_block(batch=1, window=4)
    gc.collect()
    epoch_moe.unpatch(model)
