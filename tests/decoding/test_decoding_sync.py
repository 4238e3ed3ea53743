"""An iteration never waits for the device: on fake tensors, whatever reads a value raises."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from epoch_moe.decoding.block_diffusion import BlockLoop
from epoch_moe.decoding.loop import DecodeLoop
from epoch_moe.decoding.parts import ModelParts
from epoch_moe.decoding.request import Request
from epoch_moe.decoding.semi_autoregressive import CanvasLoop
from epoch_moe.decoding.settings import Settings
from epoch_moe.plan.context import UntrackedContext

SETTINGS = Settings(
    gen_length=20,
    block_length=8,
    schedule=(3, 3, 2),
    threshold=0.9,
    editing_threshold=None,
    max_post_steps=2,
    num_to_transfer=1,
    temperature=0.0,
    top_k=None,
    top_p=None,
    stop_in_block=True,
    use_cache=True,
    prefill_chunk=64,
    mask_id=125,
    eos_ids=(124,),
    pad_id=124,
    delete_id=None,
    split_id=None,
)
RULES = {
    "unmask": {},
    "rewrite": {"editing_threshold": 0.5},
    "joint": {"editing_threshold": 0.0, "delete_id": 126, "split_id": 127},
}


class Base(nn.Module):
    """A model of no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=1)
        self.embedding = nn.Embedding(128, 16)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, **kwargs: object) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))


def parts() -> ModelParts:
    base = Base()
    return ModelParts(base, base, nn.Linear(16, 128, bias=False), native=True)


def check_iterations(loop: DecodeLoop, begin: int, end: int) -> None:
    left, block_rule = loop.canvas.undecoded(begin, end), loop.make_rule(begin, end)
    for _ in range(3):  # as far as LLaDA2.2's final round
        left_B = loop.iterate(block_rule, left)
        left = [left[0], 0]  # also with a sequence that is done
    with pytest.raises(DataDependentOutputException):
        left_B.tolist()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_an_iteration_has_no_host_sync(rule, use_cache, sampling):
    settings = replace(SETTINGS, use_cache=use_cache, **sampling, **RULES[rule])
    with FakeTensorMode():
        prompts = [torch.zeros(length, dtype=torch.long) for length in (3, 20)]
        loop = BlockLoop(parts(), settings, Request(prompts, UntrackedContext()))
        assert loop.canvas.undecoded(16, 24) == [5, 4]
        check_iterations(loop, 16, 24)


@pytest.mark.parametrize("cfg_scale", [0.0, 1.5])
@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
@torch.no_grad()
def test_a_step_on_the_canvas_has_no_host_sync(cfg_scale, remasking):
    settings = Settings(
        gen_length=16, block_length=8, schedule=(3, 3, 2), temperature=0.5, drop_ended=False, mask_id=125,
        eos_ids=(124,), pad_id=124, cfg_scale=cfg_scale, remasking=remasking,
    )  # fmt: skip
    with FakeTensorMode():
        prompts = [torch.zeros(length, dtype=torch.long) for length in (3, 20)]
        loop = CanvasLoop(parts(), settings, Request(prompts, UntrackedContext()))
        check_iterations(loop, 20, 28)
