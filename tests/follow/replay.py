"""Trajectories of forwards, and foreign loops that run them on a model without opening a plan."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from helpers import GOLDEN, additive, block_causal
from safetensors.torch import load_file
from torch import Tensor, nn

import epoch_moe
from epoch_moe.follow.report import PlanReport
from epoch_moe.models.llada2 import LLaDA2MoeModelLM

BLOCK, MASK_ID = 8, 125


@dataclass
class Call:
    """One forward: what a loop passes to the model."""

    ids_BS: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    def run(self, model: nn.Module) -> Tensor:
        return model(self.ids_BS, attention_mask=self.mask, position_ids=self.positions).logits


@cache
def _loaded(name: str) -> LLaDA2MoeModelLM:
    return LLaDA2MoeModelLM.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()


def plain_model(name: str = "llada2") -> LLaDA2MoeModelLM:
    return copy.deepcopy(_loaded(name))


def patched_model(name: str = "llada2") -> LLaDA2MoeModelLM:
    model = plain_model(name)
    epoch_moe.patch(model)
    return model


def golden_calls(folder: str, run: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Call]]:
    """The prompt and all forwards of one run of the released loop, with its mask: one object for each block."""
    data = load_file(GOLDEN / folder / f"generate{run}.safetensors")
    windows: dict[int, tuple[Tensor, Tensor]] = {}
    calls = []
    for row in data["trace_input_ids"]:
        ids = row[row >= 0]
        width = len(ids)
        if width not in windows:
            windows[width] = (additive(block_causal(width, BLOCK), dtype), torch.arange(width)[None])
        calls.append(Call(ids[None].clone(), *windows[width]))
    return data["prompt"], calls


@torch.no_grad()
def replay(model: nn.Module, calls: list[Call], **hints: object) -> Iterator[Tensor]:
    """Logits of every forward (of a patched model in a scope). The loop writes into one tensor, as released ones do."""
    buffer: Tensor | None = None
    scope = epoch_moe.following(model, **hints) if hasattr(model, "_epoch_moe") else nullcontext()  # type: ignore[arg-type]
    with scope:
        for call in calls:
            if buffer is None or buffer.shape != call.ids_BS.shape:
                buffer = call.ids_BS.clone()
            buffer.copy_(call.ids_BS)
            with torch.no_grad():
                yield Call(buffer, call.mask, call.positions).run(model)


def report(model: nn.Module, reset: bool = False) -> PlanReport:
    return epoch_moe.plan_report(model, reset=reset)
