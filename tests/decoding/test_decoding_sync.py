"""An iteration never waits for the device: on fake tensors, whatever reads a value raises."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from epoch_moe.decoding.block_diffusion import _BlockLoop, make_rule
from epoch_moe.decoding.canvas import Canvas
from epoch_moe.decoding.settings import BlockDiffusionSettings
from epoch_moe.plan.context import UntrackedContext

SETTINGS = BlockDiffusionSettings(
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
    eos_early_stop=True,
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


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_an_iteration_has_no_host_sync(rule, use_cache, sampling):
    settings = replace(SETTINGS, **sampling, **RULES[rule])
    with FakeTensorMode():
        prompts = [torch.zeros(length, dtype=torch.long) for length in (3, 20)]
        base, head = Base(), nn.Linear(16, 128, bias=False)
        canvas = Canvas(prompts, settings, torch.device("cpu"))
        loop = _BlockLoop(base, head, UntrackedContext(), canvas, settings, use_cache, None)
        begin, end, left = 16, 24, canvas.undecoded(16, 24)
        assert left == [5, 4]
        left_B1, moved_B1 = torch.tensor(left).unsqueeze(1), None
        block_rule = make_rule(settings, canvas, begin, end, None)
        for _ in range(3):  # as far as LLaDA2.2's final round
            bias = loop.attention_bias(0, end)
            left_B1, moved_B1 = loop.iterate(block_rule, 0, left, left_B1, moved_B1, bias)
            left = [left[0], 0]  # also with a sequence that is done
        with pytest.raises(DataDependentOutputException):
            left_B1.tolist()
