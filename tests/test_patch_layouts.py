"""`patch` on models whose experts are stacked (dFactory) or fused (dInfer), in both families."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from foreign_blocks import FOREIGN, restack
from helpers import GOLDEN, assert_gradients, gradients_of, relative_error
from torch import Tensor, nn

import epoch_moe
from epoch_moe.block import EpochMoEBlock
from epoch_moe.config import EpochConfig
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.models.llada_moe import LLaDAMoEModelLM
from epoch_moe.plan.context import BlockPlanContext

IDS = torch.arange(24).view(2, 12) % 120
CASES = [(family, layout) for family in FOREIGN for layout in ("stacked", "fused")]
CLASSES: dict[str, Any] = {"llada2": LLaDA2MoeModelLM, "llada_moe": LLaDAMoEModelLM}
FOLDERS = {"llada2": "llada2", "llada_moe": "llada_moe_shared_bias"}


@cache
def plain(family: str) -> Any:
    return CLASSES[family].from_pretrained(GOLDEN / FOLDERS[family], dtype=torch.float32).eval()


def foreign(family: str, layout: str) -> tuple[nn.Module, list[str]]:
    model = copy.deepcopy(plain(family))
    return model, restack(model, family, layout)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


def memory(model: nn.Module) -> dict[int, int]:
    tensors = [*model.parameters(), *model.buffers()]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def experts_of(model: nn.Module, path: str) -> list[nn.Parameter]:
    block = model.get_submodule(path)
    return [block.w1, block.w2] if hasattr(block, "w1") else list(block.experts.parameters())  # type: ignore[list-item]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_same_function_keys_and_values(family: str, layout: str) -> None:
    model, paths = foreign(family, layout)
    want = logits(model)
    assert relative_error(want, logits(plain(family))) < 1e-5  # the foreign blocks are the same function
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters, originals = dict(model.named_parameters()), [model.get_submodule(path) for path in paths]
    bytes_before = sum(memory(model).values())
    report = epoch_moe.patch(model)
    assert report.patched == paths and report.skipped == {} and report.family == family
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert relative_error(logits(model), want) < 1e-5
    assert sum(memory(model).values()) == bytes_before
    epoch_moe.unpatch(model)
    assert [model.get_submodule(path) for path in paths] == originals
    assert list(model.state_dict()) == list(before) and not hasattr(model, "_epoch_moe")
    assert torch.equal(logits(model), want)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_only_what_must_move_is_moved(family: str, layout: str) -> None:
    model, paths = foreign(family, layout)
    addresses = [[p.data_ptr() for p in experts_of(model, path)] for path in paths]
    expert_bytes = sum(p.numel() * 4 for path in paths for p in experts_of(model, path))
    report = epoch_moe.patch(model)
    assert report.expert_bytes == expert_bytes and report.dtype == "float32"
    assert report.moved_bytes == {"fused": 0, "stacked": expert_bytes * 2 // 3}[layout]
    assert report.peak_extra_bytes == {"fused": 0, "stacked": expert_bytes * 2 // 3 // len(paths)}[layout]
    for path, old in zip(paths, addresses, strict=True):
        new = [p.data_ptr() for p in experts_of(model, path)]
        assert new[-1] == old[-1]  # w2 or down_proj
        assert (new == old) == (layout == "fused")
    epoch_moe.unpatch(model)
    assert epoch_moe.patch(model).moved_bytes == 0  # they lie right now


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_plan_computes_what_it_computes_with_released_weights(family: str, layout: str) -> None:
    released, (model, _) = copy.deepcopy(plain(family)), foreign(family, layout)
    config = EpochConfig(coverage=0.5, refresh_interval=None, backend="loop")
    outs = []
    for m in (released, model):
        epoch_moe.patch(m, config)
        context = BlockPlanContext(m._epoch_moe, config)
        ids = IDS.clone()
        ids[:, 4:] = 125
        with torch.no_grad(), context.block(batch=2, window=12):
            for step in range(4, 8):
                with context.iteration(ids, mask_id=125):
                    outs.append(m(ids).logits)
                ids[:, step] = step
        assert context.counters.read().rows > 0
    half = len(outs) // 2
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(outs[half:], outs[:half], strict=True))


@pytest.mark.parametrize(("family", "layout"), CASES)
@pytest.mark.parametrize("treatment", ["bf16", "deepcopy", "assign"])
def test_treated_like_an_unpatched_model(family: str, layout: str, treatment: str) -> None:
    def treat(model: nn.Module) -> nn.Module:
        if treatment == "bf16":
            return model.to(torch.bfloat16)
        if treatment == "deepcopy":
            return copy.deepcopy(model)
        model.load_state_dict({k: v + 0.01 if v.dim() == 3 else v for k, v in model.state_dict().items()}, assign=True)
        return model

    unpatched, (model, paths) = treat(foreign(family, layout)[0]), foreign(family, layout)
    epoch_moe.patch(model)
    model = treat(model)
    assert relative_error(logits(model), logits(unpatched)) < (2e-2 if treatment == "bf16" else 1e-5)
    for got, want in zip(model.state_dict().items(), unpatched.state_dict().items(), strict=True):
        assert got[0] == want[0] and torch.equal(got[1], want[1])
    assert all(isinstance(model.get_submodule(path), EpochMoEBlock) for path in paths)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_training_gradients_are_the_originals(family: str, layout: str) -> None:
    unpatched, (model, _) = foreign(family, layout)[0].train(), foreign(family, layout)
    exact = foreign(family, layout)[0].train().double()
    epoch_moe.patch(model)
    model.train()
    for m in (unpatched, model, exact):
        m(IDS, labels=IDS).loss.backward()
    assert_gradients(gradients_of(model), gradients_of(unpatched), gradients_of(exact))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_shapes_that_do_not_fit_are_refused_by_name(family: str, layout: str) -> None:
    model, paths = foreign(family, layout)
    params = experts_of(model, paths[-1])
    params[-1].data = params[-1].data[:, :, 1:].contiguous()
    name = "w1" if layout == "fused" else "experts.down_proj"
    with pytest.raises(TypeError, match=rf"{paths[-1]} cannot be patched: {name} has shape"):
        epoch_moe.patch(model)
    assert not hasattr(model, "_epoch_moe")
