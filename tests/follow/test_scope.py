"""Whose forwards are followed, and until when: scopes, threads, tasks, and a model's own `generate`."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from helpers import additive, block_causal, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import BLOCK, MASK_ID, plain_model
from torch import Tensor, nn

import epoch_moe
from epoch_moe import EpochConfig
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.models.llada_moe import LLaDAMoEModelLM
from epoch_moe.plan.context import BlockPlanContext

NEVER_REFRESHED = EpochConfig(coverage=None, refresh_interval=None)
WIDTH = 2 * BLOCK
MASK = additive(block_causal(WIDTH, BLOCK))


class Remote(LLaDA2MoeModelLM):
    """As released: the loop is a method of the model."""

    @torch.no_grad()
    def generate(self, inputs: Tensor, block_length: int = BLOCK, mask_id: int = MASK_ID) -> Tensor:
        """Decode one block behind the prompt, a token per forward."""
        ids = torch.cat([inputs, torch.full((1, block_length), mask_id)], dim=1)
        mask = additive(block_causal(ids.shape[1], block_length))
        for place in range(inputs.shape[1], ids.shape[1]):
            ids[0, place] = self(ids, attention_mask=mask).logits[0, place, :120].argmax()
        return ids


def remote() -> Remote:
    model = plain_model()
    model.__class__ = Remote
    return model


PROMPT = torch.arange(BLOCK)[None]


def window(decoded: int, first: int = 5) -> Tensor:
    return torch.tensor([[*range(BLOCK), *[first + i for i in range(decoded)], *[MASK_ID] * (BLOCK - decoded)]])


def run(model: nn.Module, ids_BS: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids_BS, attention_mask=MASK).logits


def kinds(model: nn.Module) -> dict[str, int]:
    return epoch_moe.plan_report(model, reset=True).kinds


def test_calls_of_generate_are_scopes() -> None:
    model = remote()
    own, want = model.generate, model.generate(PROMPT)
    epoch_moe.patch(model, NEVER_REFRESHED)
    assert inspect.signature(model.generate) == inspect.signature(own) and model.generate.__doc__ == own.__doc__
    assert torch.equal(model.generate(PROMPT), want)
    report = epoch_moe.plan_report(model, reset=True)
    assert report.kinds == {"request": 1, "iteration": BLOCK - 1} and report.work.rows < 0.6 * report.work.dense_rows
    with epoch_moe.following(model) as follower:
        model.generate(PROMPT)  # part of the scope that it is in
    assert follower.report().kinds == {"request": 1, "iteration": BLOCK - 1}
    with pytest.raises(TypeError, match="nothing"):
        model.generate(PROMPT, nothing=1)
    kept = model.generate
    epoch_moe.unpatch(model)
    assert "generate" not in vars(model) and torch.equal(model.generate(PROMPT), want)
    assert torch.equal(kept(PROMPT), want)
    own_class = plain_model()
    epoch_moe.patch(own_class)
    assert "generate" not in vars(own_class)


def test_generate_goes_with_copies_and_pickles_and_does_not_keep_the_model() -> None:
    model = remote()
    epoch_moe.patch(model, NEVER_REFRESHED)
    want = model.generate(PROMPT)
    kinds(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.lm_head.weight.neg_()
        assert not torch.equal(other.generate(PROMPT), want)
        assert kinds(other) == {"request": 1, "iteration": BLOCK - 1} and kinds(model) == {}
        epoch_moe.unpatch(other)
        assert "generate" not in vars(other)
    gone, generate = weakref.ref(model), model.generate
    gc.collect()
    gc.disable()
    try:
        del model, other
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="keep the patched model"):
        generate(PROMPT)


def test_what_others_put_in_place_of_generate_is_kept() -> None:
    model = remote()

    def theirs(self: nn.Module, inputs: Tensor) -> Tensor:
        return type(self).generate(self, inputs)

    before = model.generate = MethodType(theirs, model)
    epoch_moe.patch(model, NEVER_REFRESHED)
    model.generate(PROMPT)
    assert kinds(model) == {"request": 1, "iteration": BLOCK - 1}
    after = model.generate
    model.generate = partial(after)
    with pytest.raises(RuntimeError, match=r"generate was replaced by functools\.partial"):
        epoch_moe.unpatch(model)
    model.generate(PROMPT)
    assert kinds(model) == {"request": 1, "iteration": BLOCK - 1}
    model.generate = after
    epoch_moe.unpatch(model)
    assert model.generate is before


def test_scopes_are_refused_where_they_would_be_wrong() -> None:
    model = remote()
    with pytest.raises(ValueError, match="not patched by epoch_moe"), epoch_moe.following(model):
        raise AssertionError
    epoch_moe.patch(model)
    with pytest.raises(ValueError, match="block_length=0"), epoch_moe.following(model, block_length=0):
        raise AssertionError
    with epoch_moe.following(nn.Sequential(model)) as follower:  # a wrapper
        run(model, window(0))
        with pytest.raises(RuntimeError, match="already"), epoch_moe.following(model):
            raise AssertionError
        for change in (epoch_moe.unpatch, partial(epoch_moe.patch, config="exact")):
            with pytest.raises(RuntimeError, match="a loop that is followed"):
                change(model)
        run(model, window(1))
    assert follower.report().kinds == {"request": 1, "iteration": 1}


def test_what_was_learned_ends_with_the_scope() -> None:
    model = remote()
    epoch_moe.patch(model)
    with torch.no_grad():
        for _ in range(2):
            with epoch_moe.following(model) as follower:
                model(window(1))
                model(torch.cat([window(BLOCK), torch.full((1, BLOCK), MASK_ID)], dim=1))  # shows the block length
            assert follower.report().kinds == {"dense": 1, "block": 1}


def test_other_threads_and_tasks_are_not_in_it() -> None:
    model, plain = remote(), plain_model()
    epoch_moe.patch(model, NEVER_REFRESHED)
    want, others = [run(plain, window(n)) for n in range(3)], []

    async def elsewhere(number: int) -> None:
        others.append(run(model, window(number)))

    async def both() -> None:
        with epoch_moe.following(model) as follower:
            run(model, window(0))
            await asyncio.create_task(elsewhere(1))  # inherits the variable
            await asyncio.to_thread(lambda: others.append(run(model, window(2))))  # so does this
            run(model, window(1))
        assert follower.report().kinds == {"request": 1, "iteration": 1}

    asyncio.run(both())
    for got, expected in zip(others, want[1:], strict=True):
        assert relative_error(got, expected) < 1e-5
    generator = follow(model)
    next(generator)
    thread = threading.Thread(target=generator.close)  # left by another thread than the one that opened it
    thread.start()
    thread.join(60)
    run(model, window(0))
    assert kinds(model) == {"request": 1, "iteration": 1}
    with epoch_moe.following(model):
        pass
    epoch_moe.unpatch(model)


def follow(model: nn.Module) -> Any:
    with epoch_moe.following(model):
        yield


def scale(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(1.25)


def change_data(tensor: Tensor) -> None:
    tensor.data = tensor.data * 0.8


def replace(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach() * 0.9)


def steer(model: nn.Module) -> None:
    layers(model)[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.2, *args[1:]))


def layers(model: nn.Module) -> nn.ModuleList:
    layers_ = model.model.layers
    assert isinstance(layers_, nn.ModuleList)
    return layers_


def attention_weight(model: nn.Module) -> nn.Module:
    attention = getattr(layers(model)[0], "attention", None) or layers(model)[0].self_attn
    return next(m for m in attention.modules() if isinstance(m, nn.Linear))


def experts_of(model: nn.Module) -> list[nn.Module]:
    return list(layers(model)[-1].mlp.experts)


def replace_experts(model: nn.Module) -> None:
    for expert in experts_of(model):
        replace(expert.down_proj)


def assign(model: nn.Module) -> None:
    state = {k: v * 1.1 if v.is_floating_point() else v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "in place": lambda model: scale(attention_weight(model).weight),
    "one expert in place": lambda model: scale(experts_of(model)[1].down_proj.weight),
    ".data =": lambda model: change_data(attention_weight(model).weight),
    ".data in place": lambda model: attention_weight(model).weight.data.mul_(1.2),
    "an expert's .data in place": lambda model: experts_of(model)[2].up_proj.weight.data.mul_(1.2),
    "experts' .data =": lambda model: change_data(experts_of(model)[1].up_proj.weight),
    "replaced": lambda model: replace(attention_weight(model)),
    "experts replaced": replace_experts,
    "assign": assign,
    "a steering hook": steer,
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_model_begins_anew_in_a_scope(how: str) -> None:
    model, plain = plain_model(), plain_model()
    epoch_moe.patch(model, NEVER_REFRESHED)
    with epoch_moe.following(model) as follower:
        for number in range(3):
            for each in (model, plain):
                got = run(each, window(number))
                if number == 1:
                    CHANGES[how](each)
                if each is model:
                    first = got
        assert relative_error(first, got) < 1e-5
    assert follower.report().kinds == {"request": 1, "iteration": 1, "model": 1}


@pytest.mark.parametrize("how", [how for how in CHANGES if "data in place" not in how])
@pytest.mark.parametrize("config", [NEVER_REFRESHED, EpochConfig.exact()], ids=["reused", "exact"])
def test_a_model_that_changes_in_the_middle_of_a_block(config: EpochConfig, how: str) -> None:
    model, plain = plain_model(), plain_model()
    epoch_moe.patch(model, config)
    context = BlockPlanContext(model._epoch_moe, config)
    with torch.no_grad(), context.block(batch=1, window=WIDTH, prefix=BLOCK, prefix_constant=True):
        for number in range(4):
            if number == 2:
                CHANGES[how](model)
                CHANGES[how](plain)
            with context.iteration(window(number), mask_id=MASK_ID):
                got = run(model, window(number))
            # Elsewhere reuse is the plan's own approximation, also in layers before the one whose experts changed.
            if number in (0, 2 if "expert" not in how else 0) or config.refresh_interval == 1:
                assert relative_error(got, run(plain, window(number))) < 1e-5
    work = context.counters.read()
    assert set(work.fallbacks) == {"version"}
    assert work.rows == work.dense_rows if config.refresh_interval == 1 else work.rows < work.dense_rows


def test_adapters_switched_in_a_scope() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["query_key_value"], init_lora_weights=False)

    def adapted() -> Any:
        torch.manual_seed(0)
        return get_peft_model(plain_model(), config).eval()

    model, plain = adapted(), adapted()
    epoch_moe.patch(model.get_base_model(), NEVER_REFRESHED)

    def scaling(each: Any, factor: float) -> None:
        for module in each.modules():
            if hasattr(module, "set_scale") and "default" in getattr(module, "scaling", {}):
                module.set_scale("default", factor)

    def ask(number: int) -> None:
        assert relative_error(run(model, window(number)), run(plain, window(number))) < 1e-5

    with epoch_moe.following(model) as follower:
        ask(0)
        with model.disable_adapter(), plain.disable_adapter():
            ask(1)
        ask(2)
        for each in (model, plain):
            scaling(each, 3.0)
        ask(3)
        for each in (model, plain):
            each.merge_adapter()
        ask(4)
    assert follower.report().kinds == {"request": 1, "model": 4}


@pytest.mark.parametrize("family", ["llada2", "llada_moe"])
def test_requests_with_one_prompt_that_take_turns(family: str) -> None:
    plain = load(family)
    for config in ("exact", NEVER_REFRESHED):
        model = load(family)
        epoch_moe.patch(model, config)
        requests = [torch.tensor([[1, 2, 3, *[MASK_ID] * (BLOCK - 3)]]) for _ in range(2)]
        generator, worst, turns = torch.Generator().manual_seed(3), 0.0, 0
        with epoch_moe.following(model, block_length=BLOCK, editing=False) as follower, torch.no_grad():
            for place in range(3, BLOCK):
                for ids in requests:
                    got, want = model(ids).logits, plain(ids).logits
                    worst, turns = max(worst, relative_error(got, want)), turns + 1
                    ids[0, place] = torch.randint(0, 120, (1,), generator=generator)
        seen = follower.report().kinds
        # Only the step after the two were still the same looks like one decode that goes on.
        assert seen == {"request": turns - 2, "repeat": 1, "iteration": 1}
        assert worst < (1e-5 if config == "exact" else 1.0)


def load(family: str) -> nn.Module:
    if family == "llada2":
        return plain_model()
    from helpers import GOLDEN

    return LLaDAMoEModelLM.from_pretrained(GOLDEN / "llada_moe").eval()


STEPS = ("decode", "decode", "decode", "repeat", "edit", "remask", "swap", "next", "thread", *CHANGES)


@settings(max_examples=6)
@given(
    family=st.sampled_from(["llada2", "llada_moe"]),
    seed=st.integers(0, 10**6),
    steps=st.lists(st.sampled_from(STEPS), min_size=4, max_size=9),
)
def test_random_forwards(family: str, seed: int, steps: list[str]) -> None:
    """Outside of a scope bit for bit what a dense patch gives; inside one, under exact settings, to rounding."""
    choose = random.Random(seed)
    plain = load(family)
    models = {config: copy.deepcopy(plain) for config in ("default", "exact", "dense")}
    for config, model in models.items():
        epoch_moe.patch(model, config, block_length=BLOCK)
    ids = torch.tensor([[choose.randrange(120) for _ in range(BLOCK)] + [MASK_ID] * BLOCK for _ in range(2)])
    with epoch_moe.following(models["exact"]) if choose.random() < 0.7 else nullcontext():
        for step in ["decode", *steps]:
            if step in CHANGES:
                for model in (plain, *models.values()):
                    CHANGES[step](model)
            elif step == "swap":
                ids = ids.flip(0)
            elif step == "next":
                ids[:, -BLOCK:] = ids[:, -BLOCK:].clamp(max=119)
                ids = torch.cat([ids, torch.full((2, BLOCK), MASK_ID)], dim=1)
            elif step != "repeat":
                row = choose.randrange(2)
                wanted = [p for p in range(BLOCK, ids.shape[1]) if (ids[row, p] == MASK_ID) == (step == "decode")]
                if wanted:
                    ids[row, choose.choice(wanted)] = MASK_ID if step == "remask" else choose.randrange(120)
            mask = additive(block_causal(ids.shape[1], BLOCK))
            answers: dict[str, Tensor] = {}

            def ask(name: str, model: nn.Module, ids: Tensor = ids, mask: Tensor = mask, into: Any = answers) -> None:
                with torch.no_grad():
                    into[name] = model(ids, attention_mask=mask).logits

            for name, model in {"plain": plain, **models}.items():
                if step == "thread":
                    thread = threading.Thread(target=ask, args=(name, model))
                    thread.start()
                    thread.join(60)
                else:
                    ask(name, model)
            assert torch.equal(answers["default"], answers["dense"])
            assert relative_error(answers["dense"], answers["plain"]) < 1e-5
            assert relative_error(answers["exact"], answers["plain"]) < 1e-5
    assert kinds(models["default"]) == kinds(models["dense"]) == {}
