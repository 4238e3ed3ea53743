"""Plans for loops that open none, in their scopes: never wrong on random loops, and what surrounds them."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from foreign_loops import MASKS, STEPS, Step, canvases, windows
from helpers import GOLDEN, additive, block_causal, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import BLOCK, MASK_ID, Call, golden_calls, patched_model, plain_model, replay, report
from torch import Tensor, nn
from transformers import DynamicCache

import epoch_moe
from epoch_moe import EpochConfig
from epoch_moe.follow.report import REASONS
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.models.llada_moe import LLaDAMoEModelLM
from epoch_moe.plan.context import BlockPlanContext

NEVER_REFRESHED = EpochConfig(coverage=0.6, coverage_floor=0.0, refresh_interval=None)
few = settings(max_examples=5)


@cache
def models(folder: str) -> tuple[nn.Module, nn.Module]:
    """The same checkpoint twice: plain, and patched."""
    if folder.startswith("llada_moe"):
        plain, model = (LLaDAMoEModelLM.from_pretrained(GOLDEN / folder).eval() for _ in range(2))
        epoch_moe.patch(model)
        return plain, model
    return plain_model(folder), patched_model(folder)


def check(folder: str, steps: list[Step], config: EpochConfig | str, every: bool, **hints: object) -> None:
    """Forwards that must be dense are: every one of them, or those with which a plan has to begin."""
    plain, model = models(folder)
    epoch_moe.patch(model, config)
    epoch_moe.plan_report(model, reset=True)
    calls = [step.call for step in steps]
    for step, logits, want in zip(steps, replay(model, calls, **hints), replay(plain, calls), strict=True):
        assert not logits.isnan().any()
        if every or step.begins:
            assert relative_error(logits, want) < 1e-5
    got = report(model)
    assert sum(got.kinds.values()) == len(steps) == got.work.forwards
    assert set(got.work.fallbacks) <= set(REASONS)


@pytest.mark.parametrize("mask", MASKS)
@few
@given(
    block_length=st.sampled_from([BLOCK, None]),
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 2),
    steps=st.lists(st.sampled_from(STEPS), min_size=3, max_size=12),
    editing=st.sampled_from([None, True, False]),
)
def test_random_windows(
    mask: str, block_length: int | None, seed: int, batch: int, steps: list[str], editing: bool | None
) -> None:
    torch.manual_seed(seed)
    made = windows(random.Random(seed), steps, mask, batch)
    check("llada2", made, "exact", True, block_length=block_length, editing=editing)
    check("llada2", made, NEVER_REFRESHED, False, block_length=block_length, editing=editing)


@pytest.mark.parametrize("folder", ["llada_moe", "llada2"])
@few
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 2), guided=st.booleans(), told=st.sampled_from([BLOCK, None]))
def test_random_canvases(folder: str, seed: int, batch: int, guided: bool, told: int | None) -> None:
    torch.manual_seed(seed)
    made = canvases(random.Random(seed), 7, batch, guided)
    check(folder, made, "exact", True, block_length=told)
    check(folder, made, NEVER_REFRESHED, False, block_length=told, editing=False)
    got = report(models(folder)[1])
    if told:
        assert got.work.fallbacks == {} and got.kinds["request"] == 2
        assert got.kinds["request"] + got.kinds.get("block", 0) == sum(step.begins for step in made)
        assert got.work.rows < got.work.dense_rows
    else:
        assert got.work.fallbacks == {"block_length": len(made)}


@pytest.mark.parametrize("config", [EpochConfig(), EpochConfig(future_rows="dormant"), NEVER_REFRESHED], ids=str)
@pytest.mark.parametrize("kind", ["window", "drifting window", "canvas"])
def test_the_same_rows_are_fresh_as_under_a_plan_driven_by_hand(kind: str, config: EpochConfig) -> None:
    folder = "llada_moe" if kind == "canvas" else "llada2"
    _, model = models(folder)
    epoch_moe.patch(model, config)
    epoch_moe.plan_report(model, reset=True)
    if kind == "canvas":
        made = canvases(random.Random(0), 9, 2, False)
    else:
        mask = "additive" if kind == "window" else "padding"
        made = windows(random.Random(9), ["decode"] * 7 + ["next"] + ["decode"] * 7, mask, 2)
    context = BlockPlanContext(model._epoch_moe, config)
    prefix = 0
    calls = [step.call for step in made]
    for step, logits in zip(made, replay(model, calls, block_length=BLOCK, editing=False), strict=True):
        ids_BS = step.call.ids_BS
        rows = ids_BS.shape[1]
        if step.begins:
            masked = (ids_BS == MASK_ID).any(0).nonzero()
            prefix = int(masked[0]) if kind == "canvas" else rows - BLOCK
            context.begin_block(
                batch=2, window=rows, prefix=prefix, prefix_constant=kind == "window", future=rows - prefix - BLOCK
            )
        with torch.no_grad(), context.iteration(ids_BS, mask_id=MASK_ID):
            want = step.call.run(model)
        assert torch.equal(logits, want)
    context.end_block()
    by_hand, got = context.counters.read(), report(model).work
    assert got == by_hand and got.rows < 0.9 * got.dense_rows


def cached_loop(model: nn.Module, copies: bool = False) -> list[Tensor]:
    """Decode two blocks behind a K/V cache that is cropped, or a copy, after every forward but the commit pass."""
    torch.manual_seed(3)
    ids = torch.cat([torch.randint(0, 120, (2, BLOCK)), torch.full((2, 2 * BLOCK), MASK_ID)], dim=1)
    cache, logits = DynamicCache(), []
    place = torch.arange(3 * BLOCK)[None]

    def run(begin: int, end: int, cache: DynamicCache) -> None:
        mask = torch.zeros(1, 1, end - begin, end)
        out = model(ids[:, begin:end], attention_mask=mask, position_ids=place[:, begin:end],
                    past_key_values=cache, use_cache=True)  # fmt: skip
        logits.append(out.logits)

    with torch.no_grad():
        run(0, BLOCK, cache)
        for begin in (BLOCK, 2 * BLOCK):
            for step in range(BLOCK // 2):
                run(begin, begin + BLOCK, copy.deepcopy(cache) if copies else cache)
                if not copies:
                    cache.crop(-BLOCK)
                ids[:, begin + 2 * step : begin + 2 * step + 2] = torch.randint(0, 120, (2, 2))
            run(begin, begin + BLOCK, cache)
    return logits


def test_a_loop_behind_a_cache() -> None:
    plain, model = models("llada2")
    want = cached_loop(plain)
    for config in (EpochConfig.exact(), NEVER_REFRESHED):
        epoch_moe.patch(model, config)
        with epoch_moe.following(model, editing=False) as follower:
            got_logits = cached_loop(model)
        for number, (logits, expected) in enumerate(zip(got_logits, want, strict=True)):
            if config == EpochConfig.exact() or number in (0, 1, 6):  # the prompt, and the first cold pass
                assert relative_error(logits, expected) < 1e-5
        got = follower.report()
        assert got.kinds == {"dense": 3, "request": 2, "iteration": 6} and got.work.fallbacks == {"commit": 3}
        assert (got.work.rows < got.work.dense_rows) == (config == NEVER_REFRESHED)


@pytest.fixture
def model() -> LLaDA2MoeModelLM:
    return patched_model()


CALL = Call(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, MASK_ID, MASK_ID, MASK_ID, MASK_ID, 3, 3, 3]]))


def window_call(*block: int) -> Call:
    ids_BS = torch.tensor([[*range(BLOCK), *block]])
    return Call(ids_BS, additive(block_causal(ids_BS.shape[1], BLOCK)), torch.arange(ids_BS.shape[1])[None])


FIRST = window_call(*[MASK_ID] * BLOCK)
SECOND = window_call(1, 2, *[MASK_ID] * (BLOCK - 2))


def generate(model: nn.Module, **more: object) -> None:
    epoch_moe.generate(
        model, torch.arange(9)[None], gen_length=BLOCK, block_length=BLOCK, steps=BLOCK, eos_token_id=124, **more
    )


def test_a_loop_that_copies_its_cache_is_told_so() -> None:
    plain, model = models("llada2")
    epoch_moe.patch(model, NEVER_REFRESHED)
    with epoch_moe.following(model) as follower:
        got_logits = cached_loop(model, copies=True)
    for logits, want in zip(got_logits, cached_loop(plain), strict=True):
        assert relative_error(logits, want) < 1e-5
    got = follower.report()
    assert got.kinds == {"dense": 9, "request": 2} and got.work.fallbacks == {"commit": 3, "cache_copy": 6}
    assert "forwards 3 to 5: dense: the loop copies its K/V cache on every forward, so" in str(got)


@contextmanager
def dense(model: nn.Module, reason: str, forwards: int) -> Iterator[None]:
    with epoch_moe.following(model) as follower:
        yield
    got = follower.report()
    assert got.kinds == {"dense": forwards} and got.work.fallbacks == {reason: forwards}
    assert [str(f) for f in got.forwards] == [f"dense: {REASONS[reason]}"] * forwards


@torch.no_grad()
def test_what_is_not_understood_is_dense_and_says_why(model: LLaDA2MoeModelLM) -> None:
    plain, ids_BS, mask = plain_model(), FIRST.ids_BS, FIRST.mask
    embeds = model.get_input_embeddings()(ids_BS)
    want = plain(ids_BS, attention_mask=mask).logits
    with dense(model, "inputs_embeds", 2):
        for _ in range(2):
            assert relative_error(model(inputs_embeds=embeds, attention_mask=mask).logits, want) < 1e-5
    with dense(model, "cache_write", 2):
        for _ in range(2):
            assert relative_error(model(ids_BS, attention_mask=mask, use_cache=True).logits, want) < 1e-5
    no_masks = Call(ids_BS.clamp(max=99), mask)
    with dense(model, "no_mask", 1):
        assert relative_error(no_masks.run(model), no_masks.run(plain)) < 1e-5
    with dense(model, "block_length", 1):
        model(ids_BS)
    model.config.mask_token_id = None
    with dense(model, "mask_token_id", 1):
        assert relative_error(model(ids_BS, attention_mask=mask).logits, want) < 1e-5
    with epoch_moe.following(model, mask_token_id=MASK_ID) as follower:
        model(ids_BS, attention_mask=mask)
    assert follower.report().kinds == {"request": 1}
    epoch_moe.patch(model, "dense")
    with dense(model, "no_plan", 1):
        model(ids_BS, attention_mask=mask)


def test_an_argument_that_is_not_known_is_dense(model: LLaDA2MoeModelLM) -> None:
    original = model.model.forward

    def forward(input_ids: Tensor, attention_mask: Tensor, replace_position: object = None, **more: object) -> object:
        return original(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)

    model.model.forward = forward
    with torch.no_grad():
        with dense(model, "arguments", 1):
            model.model(FIRST.ids_BS, FIRST.mask, replace_position=(0, 8))
        with epoch_moe.following(model) as follower:
            model.model(FIRST.ids_BS, FIRST.mask)  # positional arguments are read
    assert follower.report().kinds == {"request": 1}


def test_training_is_left_alone(model: LLaDA2MoeModelLM) -> None:
    plain = plain_model()
    for mode in (False, True):
        for each in (plain, model):
            each.train(mode)
        for call in (FIRST, SECOND):
            for each in (plain, model):
                each.zero_grad()
            call.run(plain).square().mean().backward()
            with dense(model, "gradients", 1):
                call.run(model).square().mean().backward()
            for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None), name
                if mine.grad is not None:
                    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad(), dense(model, "training", 1):
        FIRST.run(model)


def test_a_loop_that_opens_a_plan_itself_is_left_alone(model: LLaDA2MoeModelLM) -> None:
    with epoch_moe.following(model) as follower:
        for plan in ("patched", None):
            generate(model, plan=plan)
    assert follower.report().kinds == {} and follower.report().work.forwards == 0


def test_a_caller_that_wants_router_logits_gets_them(model: LLaDA2MoeModelLM) -> None:
    plain = plain_model()
    with torch.no_grad(), epoch_moe.following(model):
        for call in (FIRST, SECOND):
            out, want = (
                each(call.ids_BS, attention_mask=call.mask, output_router_logits=True) for each in (model, plain)
            )
            assert relative_error(out.logits, want.logits) < 1e-5
            for mine, theirs in zip(out.router_logits, want.router_logits, strict=True):
                torch.testing.assert_close(mine, theirs)
    assert report(model).work.fallbacks["router_logits"] == 4


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_nothing_behind(model: LLaDA2MoeModelLM, error: type[BaseException]) -> None:
    def fail(*_: object) -> None:
        raise error("inside a forward")

    epoch_moe.patch(model, NEVER_REFRESHED)
    plain = plain_model()
    with torch.no_grad(), epoch_moe.following(model):
        FIRST.run(model)
        handle = model.model.layers[2].attention.register_forward_pre_hook(fail)
        with pytest.raises(error):
            SECOND.run(model)
        handle.remove()
        assert model._epoch_moe.slot.active is None
        x = torch.randn(1, 2 * BLOCK, 64)  # a layer on its own, with rows of the broken forward's shape
        torch.testing.assert_close(model.model.layers[2].mlp(x)[0], plain.model.layers[2].mlp(x)[0])
        assert relative_error(SECOND.run(model), SECOND.run(plain)) < 1e-5  # a cold pass
        with pytest.raises(error):
            handle = model.model.layers[1].attention.register_forward_pre_hook(fail)
            SECOND.run(model)
        handle.remove()
        generate(model)
        assert relative_error(SECOND.run(model), SECOND.run(plain)) < 1e-5  # again a cold pass
    handle = model.model.layers[1].attention.register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(error), epoch_moe.following(model):
        SECOND.run(model)
    handle.remove()
    epoch_moe.unpatch(model)
    assert not model.model._forward_hooks and not model.model._forward_pre_hooks


def test_a_forward_inside_a_forward_is_part_of_it(model: LLaDA2MoeModelLM) -> None:
    plain, inside = plain_model(), []

    def again(*_: object) -> None:
        if not inside:
            inside.append(model._epoch_moe.slot.active)
            model.model(torch.arange(4)[None])
            assert model._epoch_moe.slot.active is inside[0]

    epoch_moe.patch(model, "exact")
    model.model.layers[1].register_forward_pre_hook(again)
    with torch.no_grad(), epoch_moe.following(model):
        for call in (FIRST, SECOND):
            assert relative_error(call.run(model), call.run(plain)) < 1e-5
    assert inside[0] is not None and report(model).kinds == {"request": 1, "iteration": 1}
    assert report(model).work.fallbacks["shape"] == 2  # the inner forward's layers, which the plan was not made for


def test_threads_do_not_mix_and_their_counts_are_kept(model: LLaDA2MoeModelLM) -> None:
    jobs = [golden_calls("llada2", run)[1] for run in range(3)]
    epoch_moe.patch(model, editing=False)  # hints given to patch are those of its scopes
    alone = [list(replay(model, calls)) for calls in jobs]
    alone_report = report(model, reset=True)
    together: list[list[Tensor]] = [[] for _ in jobs]

    def work(index: int) -> None:
        together[index].extend(replay(model, jobs[index]))

    for _ in range(2):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for mine, expected in zip(together, alone, strict=True):
        for logits, want in zip(mine, expected * 2, strict=True):
            torch.testing.assert_close(logits, want, rtol=0, atol=1e-6)
    del threads, thread
    got = report(model)
    assert got.work.forwards == 2 * alone_report.work.forwards and got.work.rows == 2 * alone_report.work.rows


def test_copies_and_pickles_follow_their_own_loops(model: LLaDA2MoeModelLM) -> None:
    with torch.no_grad(), epoch_moe.following(model) as follower:
        FIRST.run(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            FIRST.run(other)
            assert report(other).kinds == {}
            with epoch_moe.following(other):
                FIRST.run(other)
                SECOND.run(other)
            assert report(other).kinds == {"request": 1, "iteration": 1}
            assert follower.report().kinds == {"request": 1}
            epoch_moe.unpatch(other)
            SECOND.run(other)
        SECOND.run(model)
    assert report(model).kinds == {"request": 1, "iteration": 1}


def test_a_patched_model_goes_when_nobody_uses_it(model: LLaDA2MoeModelLM) -> None:
    with torch.no_grad(), epoch_moe.following(model):
        FIRST.run(model)
    gone = [weakref.ref(model._epoch_moe.following), weakref.ref(next(iter(model._epoch_moe.blocks.values())).weights)]
    other = copy.deepcopy(model)
    gone += [weakref.ref(other), weakref.ref(other._epoch_moe.following)]
    gc.collect()
    gc.disable()
    try:
        del other
        assert [ref() is None for ref in gone] == [False, False, True, True]
    finally:
        gc.enable()


def test_the_report_reads_well(model: LLaDA2MoeModelLM) -> None:
    assert "followed 0 forwards (none)" in str(report(model))
    with torch.no_grad(), epoch_moe.following(model):
        for call in (FIRST, SECOND, CALL):
            call.run(model)
    text = str(report(model))
    assert "3 forwards (1 dense, 1 iteration, 1 request)" in text
    assert f"1 x block_length: {REASONS['block_length']}" in text
    assert "forward 2: iteration: the block goes on" in text and "forward 3: dense: where the block begins" in text
    with torch.no_grad(), epoch_moe.following(model) as follower:
        for number in range(260):
            (FIRST, SECOND)[number % 2].run(model)
    got = follower.report()
    assert len(got.forwards) == 256 and sum(got.kinds.values()) == 260 and "forward 260: iteration" in str(got)
    assert report(model).kinds["request"] == got.kinds["request"] + 1
    assert report(model, reset=True).work.forwards == 263 and report(model).work.forwards == 0


def test_pools_that_reach_into_the_block_keep_its_prefix_from_being_constant() -> None:
    # Routing blocks of 8, decode blocks of 4: the rows before a block share a pool with it.
    plain, model = models("llada2_2_routing")
    epoch_moe.patch(model, "exact")
    mask = additive(block_causal(16, 4))
    calls = [Call(torch.tensor([[*range(12), *block]]), mask) for block in ([MASK_ID] * 4, [5, 5, MASK_ID, MASK_ID])]
    for logits, want in zip(replay(model, calls), replay(plain, calls), strict=True):
        assert relative_error(logits, want) < 1e-5
