"""Trajectories of forwards, and foreign loops that run them on a model without opening a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from helpers import GOLDEN, additive, block_causal
from safetensors.torch import load_file
from torch import Tensor, nn

import epoch_moe
from epoch_moe.plan.inferred import PlanReport

BLOCK, MASK_ID = 8, 125


@dataclass
class Call:
    """One forward: what a loop passes to the model."""

    ids_BS: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    def run(self, model: nn.Module) -> Tensor:
        return model(self.ids_BS, attention_mask=self.mask, position_ids=self.positions).logits


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
def replay(model: nn.Module, calls: list[Call]) -> Iterator[Tensor]:
    """Logits of every forward. The loop knows nothing of plans; it writes into the same tensor, as released ones do."""
    buffer: Tensor | None = None
    for call in calls:
        if buffer is None or buffer.shape != call.ids_BS.shape:
            buffer = call.ids_BS.clone()
        buffer.copy_(call.ids_BS)
        with torch.no_grad():
            yield Call(buffer, call.mask, call.positions).run(model)


def report(model: nn.Module, reset: bool = False) -> PlanReport:
    return epoch_moe.plan_report(model, reset=reset)
