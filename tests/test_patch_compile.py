"""`torch.compile` on patched models: one graph without a plan, eager MoE layers under one."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from helpers import GOLDEN, assert_gradients, gradients_of
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.models.llada_moe import LLaDAMoEModelLM
from epoch_moe.plan.context import BlockPlanContext

IDS = torch.arange(24).view(2, 12) % 120
CLASSES: dict[str, Any] = {"llada2": LLaDA2MoeModelLM, "llada_moe": LLaDAMoEModelLM}
FAMILIES = list(CLASSES)
pytestmark = pytest.mark.timeout(300)  # the compiler is slow on a busy machine


@cache
def plain(family: str) -> Any:
    return CLASSES[family].from_pretrained(GOLDEN / family, dtype=torch.bfloat16).eval()


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def patched_model(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = copy.deepcopy(plain(family)).to(dtype)
    epoch_moe.patch(model, None)
    return model


def block_of(model: nn.Module) -> Any:
    return model.model.layers[-1].mlp  # type: ignore[union-attr, index]


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_block_is_one_graph(family: str) -> None:
    block, x = block_of(patched_model(family)), torch.randn(2, 12, 64, dtype=torch.bfloat16)
    counter = CompileCounter()  # runs the graph as it was captured
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    assert torch.equal(first(compiled(x)), first(block(x)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_model_is_one_graph(family: str) -> None:
    model = patched_model(family)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert torch.equal(compiled(IDS).logits, model(IDS).logits) and counter.frame_count == 1
    assert torch.equal(compiled(IDS + 1).logits, model(IDS + 1).logits) and counter.frame_count == 1


def test_gradients_of_a_compiled_block_are_the_eager_ones() -> None:
    model = patched_model("llada2")
    block, exact = block_of(model), block_of(copy.deepcopy(model).double())
    x = torch.randn(2, 6, 64, dtype=torch.bfloat16)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    grads = []
    for run, owner, rows in ((block, block, x), (compiled, block, x), (exact, exact, x.double())):
        owner.zero_grad(set_to_none=True)
        first(run(rows)).to(torch.promote_types(rows.dtype, torch.float32)).square().sum().backward()
        grads.append(gradients_of(owner))
    assert len(grads[0]) > 16
    assert_gradients(grads[1], grads[0], grads[2])


@torch.no_grad()
def test_other_dtypes_compile_with_the_loop_and_breaks() -> None:
    model = patched_model("llada2", torch.float32)
    block, x = block_of(model), torch.randn(2, 12, 64)
    assert torch.equal(first(torch.compile(block, backend="eager")(x)), first(block(x)))
    assert len(torch._dynamo.utils.counters["graph_break"]) > 0


@torch.no_grad()
def test_new_weights_reach_a_compiled_model() -> None:
    model = patched_model("llada2")
    compiled = torch.compile(model, backend="eager")
    before = compiled(IDS).logits
    state = {key: value + 0.05 if "experts" in key else value for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert torch.equal(compiled(IDS).logits, model(IDS).logits) and not torch.equal(model(IDS).logits, before)
    with torch.no_grad():
        block_of(model).experts[0].up_proj.weight.add_(0.1)  # in place: the compiled graph reads the same storage
    assert torch.equal(compiled(IDS).logits, model(IDS).logits)
    model.to(torch.float32)
    assert torch.equal(compiled(IDS).logits, model(IDS).logits)


@torch.no_grad()
def test_under_a_plan_the_layers_run_eagerly() -> None:
    model = patched_model("llada2")
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    dense = compiled(IDS).logits
    config = EpochConfig(coverage=0.5, refresh_interval=None)
    outs, work, frames = [], [], []
    for run in (model, compiled):
        context, ids = BlockPlanContext(model._epoch_moe, config), IDS.clone()
        ids[:, 6:] = 125
        with context.block(batch=2, window=12):
            for step in range(6, 10):
                with context.iteration(ids, mask_id=125):
                    outs.append(run(ids).logits)
                ids[:, step] = step
                frames.append(counter.frame_count)
        work.append(context.counters.read())
    assert all(torch.equal(a, b) for a, b in zip(outs[:4], outs[4:], strict=True))
    assert work[0] == work[1] and work[0].rows < 4 * 24 * len(work[0].per_layer)  # the plan did save rows
    assert frames[4] == frames[-1]  # compiled once, on the block's first forward
    assert torch.equal(compiled(IDS).logits, dense)  # and no trace of the plan stays
