"""Plans for loops that open none: never wrong on random loops, and what surrounds them."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import weakref
from functools import cache

import pytest
import torch
from decode import MASK_ID, patched_model, plain_model
from foreign_loops import MASKS, STEPS, Step, canvases, windows
from helpers import GOLDEN, additive, block_causal, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import BLOCK, Call, golden_calls, replay, report
from torch import Tensor, nn
from transformers import DynamicCache

import epoch_moe
from epoch_moe import EpochConfig
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.models.llada_moe import LLaDAMoEModelLM
from epoch_moe.plan.context import BlockPlanContext
from epoch_moe.plan.transitions import REASONS

NEVER_REFRESHED = EpochConfig(coverage=0.6, coverage_floor=0.0, refresh_interval=None)
few = settings(max_examples=8, deadline=None, derandomize=True)


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
    epoch_moe.patch(model, config, **hints)  # type: ignore[arg-type]
    epoch_moe.plan_report(model, reset=True)
    calls = [step.call for step in steps]
    for step, logits, want in zip(steps, replay(model, calls), replay(plain, calls), strict=True):
        assert not logits.isnan().any()
        if every or step.begins:
            assert relative_error(logits, want) < 1e-5
    got = report(model)
    assert sum(got.kinds.values()) == len(steps) == got.work.forwards
    assert set(got.work.fallbacks) <= set(REASONS) | {"shortfall"}


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
    epoch_moe.patch(model, config, block_length=BLOCK, editing=False)
    epoch_moe.plan_report(model, reset=True)
    if kind == "canvas":
        made = canvases(random.Random(0), 9, 2, False)
    else:
        mask = "additive" if kind == "window" else "padding"
        made = windows(random.Random(0), ["decode"] * 7 + ["next"] + ["decode"] * 7, mask, 2)
    context = BlockPlanContext(model._epoch_moe, config)
    prefix = 0
    for step, logits in zip(made, replay(model, [step.call for step in made]), strict=True):
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
    by_hand, got = context.counters.read(), report(model).work
    assert got == by_hand and got.rows < 0.9 * got.dense_rows


def cached_loop(model: nn.Module, edits: bool = False) -> list[Tensor]:
    """Decode two blocks behind a K/V cache that is cropped after every forward but the commit pass."""
    torch.manual_seed(3)
    ids = torch.cat([torch.randint(0, 120, (2, BLOCK)), torch.full((2, 2 * BLOCK), MASK_ID)], dim=1)
    cache, logits = DynamicCache(), []
    place = torch.arange(3 * BLOCK)[None]

    def run(begin: int, end: int) -> None:
        mask = torch.zeros(1, 1, end - begin, end)
        out = model(ids[:, begin:end], attention_mask=mask, position_ids=place[:, begin:end],
                    past_key_values=cache, use_cache=True)  # fmt: skip
        logits.append(out.logits)

    with torch.no_grad():
        run(0, BLOCK)
        for begin in (BLOCK, 2 * BLOCK):
            for step in range(BLOCK // 2):
                run(begin, begin + BLOCK)
                cache.crop(-BLOCK)
                ids[:, begin + 2 * step : begin + 2 * step + 2] = torch.randint(0, 120, (2, 2))
            run(begin, begin + BLOCK)
    return logits


def test_a_loop_behind_a_cache() -> None:
    plain, model = models("llada2")
    want = cached_loop(plain)
    for config in (EpochConfig.exact(), NEVER_REFRESHED):
        epoch_moe.patch(model, config, editing=False)
        epoch_moe.plan_report(model, reset=True)
        for number, (logits, expected) in enumerate(zip(cached_loop(model), want, strict=True)):
            if config == EpochConfig.exact() or number in (0, 1, 6):  # the prompt, and the first cold pass
                assert relative_error(logits, expected) < 1e-5
        got = report(model)
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


def reasons(model: nn.Module) -> dict[str, int]:
    got = report(model, reset=True)
    assert set(got.kinds) <= {"dense"}
    return got.work.fallbacks


@torch.no_grad()
def test_what_is_not_understood_is_dense_and_says_why(model: LLaDA2MoeModelLM) -> None:
    plain, ids_BS, mask = plain_model(), FIRST.ids_BS, FIRST.mask
    embeds = model.get_input_embeddings()(ids_BS)
    want = plain(ids_BS, attention_mask=mask).logits
    for _ in range(2):
        assert relative_error(model(inputs_embeds=embeds, attention_mask=mask).logits, want) < 1e-5
    assert reasons(model) == {"inputs_embeds": 2}
    for _ in range(2):
        assert relative_error(model(ids_BS, attention_mask=mask, use_cache=True).logits, want) < 1e-5
    assert reasons(model) == {"cache_write": 2}
    no_masks = Call(ids_BS.clamp(max=99), mask)
    assert relative_error(no_masks.run(model), no_masks.run(plain)) < 1e-5
    assert reasons(model) == {"no_mask": 1}
    model.config.mask_token_id = None
    assert relative_error(model(ids_BS, attention_mask=mask).logits, want) < 1e-5
    assert reasons(model) == {"mask_token_id": 1}
    epoch_moe.patch(model, mask_token_id=MASK_ID)
    model(ids_BS, attention_mask=mask)
    assert report(model, reset=True).kinds == {"request": 1}
    model(ids_BS)
    assert reasons(model) == {"block_length": 1}


def test_an_argument_that_is_not_known_is_dense(model: LLaDA2MoeModelLM) -> None:
    original = model.model.forward

    def forward(input_ids: Tensor, attention_mask: Tensor, replace_position: object = None, **more: object) -> object:
        return original(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)

    model.model.forward = forward
    with torch.no_grad():
        model.model(FIRST.ids_BS, FIRST.mask, replace_position=(0, 8))
        assert reasons(model) == {"arguments": 1}
        model.model(FIRST.ids_BS, FIRST.mask)  # positional arguments are read
    assert report(model).kinds == {"request": 1}


def test_training_is_left_alone(model: LLaDA2MoeModelLM) -> None:
    plain = plain_model()
    for mode in (False, True):
        for each in (plain, model):
            each.train(mode)
        for call in (FIRST, SECOND):
            for each in (plain, model):
                each.zero_grad()
                call.run(each).square().mean().backward()
            for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None), name
                if mine.grad is not None:
                    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        FIRST.run(model)
    assert reasons(model) == {"gradients": 4, "training": 1}


def test_a_loop_that_opens_a_plan_itself_is_left_alone(model: LLaDA2MoeModelLM) -> None:
    for plan in ("patched", None):
        generate(model, plan=plan)
    assert report(model).kinds == {}
    epoch_moe.patch(model, "dense")
    with torch.no_grad():
        FIRST.run(model)
    assert report(model).kinds == {} and report(model).work.forwards == 0


def test_a_caller_that_wants_router_logits_gets_them(model: LLaDA2MoeModelLM) -> None:
    plain = plain_model()
    with torch.no_grad():
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
    with torch.no_grad():
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
        with pytest.raises(error):
            handle = model.model.layers[1].attention.register_forward_pre_hook(fail)
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
    with torch.no_grad():
        for call in (FIRST, SECOND):
            assert relative_error(call.run(model), call.run(plain)) < 1e-5
    assert inside[0] is not None and report(model).kinds == {"request": 1, "iteration": 1}
    assert report(model).work.fallbacks["shape"] == 2  # the inner forward's layers, which the plan was not made for


def test_threads_do_not_mix_and_their_counts_are_kept(model: LLaDA2MoeModelLM) -> None:
    jobs = [golden_calls("llada2", run)[1] for run in range(3)]
    epoch_moe.patch(model, editing=False)
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
    assert not model._epoch_moe.inferred._threads  # counts of threads that ended are folded into one


def test_copies_and_pickles_follow_their_own_loops(model: LLaDA2MoeModelLM) -> None:
    with torch.no_grad():
        FIRST.run(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert report(other).kinds == {}
            FIRST.run(other)
            SECOND.run(other)
            assert report(other).kinds == {"request": 1, "iteration": 1}
            assert report(model).kinds == {"request": 1}
            epoch_moe.unpatch(other)
            SECOND.run(other)
        SECOND.run(model)
    assert report(model).kinds == {"request": 1, "iteration": 1}


def test_a_patched_model_goes_when_nobody_uses_it(model: LLaDA2MoeModelLM) -> None:
    with torch.no_grad():
        FIRST.run(model)
    experts = weakref.ref(model._epoch_moe.blocks[next(iter(model._epoch_moe.blocks))].weights)
    driver = weakref.ref(model._epoch_moe.inferred)
    other = patched_model()
    with torch.no_grad():
        FIRST.run(other)
    gone = weakref.ref(other._epoch_moe.inferred)
    gc.collect()
    gc.disable()
    try:
        del other
        assert gone() is None
    finally:
        gc.enable()
    assert experts() is not None and driver() is not None


def test_the_configuration_and_hints_can_change_between_forwards(model: LLaDA2MoeModelLM) -> None:
    plain = plain_model()
    with torch.no_grad():
        FIRST.run(model)
        with epoch_moe.patched(model, NEVER_REFRESHED, block_length=4, editing=True):
            assert relative_error(SECOND.run(model), SECOND.run(plain)) < 1e-5
            assert model._epoch_moe.inferred.hints.block_length == 4
        assert relative_error(SECOND.run(model), SECOND.run(plain)) < 1e-5
    assert report(model).kinds == {"request": 3}
    with pytest.raises(ValueError, match="block_length=0"):
        epoch_moe.patch(model, block_length=0)
    with pytest.raises(ValueError, match="not patched"):
        epoch_moe.plan_report(plain)


def test_the_report_reads_well(model: LLaDA2MoeModelLM) -> None:
    assert "over 0 forwards (none)" in str(report(model))
    with torch.no_grad():
        for call in (FIRST, SECOND, CALL):
            call.run(model)
    text = str(report(model))
    assert "3 forwards (1 dense, 1 iteration, 1 request)" in text and "1 block_length" in text


def test_pools_that_reach_into_the_block_keep_its_prefix_from_being_constant() -> None:
    # Routing blocks of 8, decode blocks of 4: the rows before a block share a pool with it.
    plain, model = models("llada2_2_routing")
    epoch_moe.patch(model, "exact")
    mask = additive(block_causal(16, 4))
    calls = [Call(torch.tensor([[*range(12), *block]]), mask) for block in ([MASK_ID] * 4, [5, 5, MASK_ID, MASK_ID])]
    for logits, want in zip(replay(model, calls), replay(plain, calls), strict=True):
        assert relative_error(logits, want) < 1e-5
