"""LLaDA's semi-autoregressive loop for one sequence in plain steps, as its description has it. All forwards dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def decode_canvas(
    model: Any,
    prompt: list[int],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    mask_id: int,
    cfg_scale: float = 0.0,
    trace: list[list[int]] | None = None,
) -> list[int]:
    """The whole answer region, greedy, low confidence first."""
    canvas = [*prompt, *[mask_id] * gen_length]
    blocks = gen_length // block_length
    per_block = steps // blocks
    for block in range(blocks):
        end = len(prompt) + (block + 1) * block_length
        base, extra = divmod(block_length, per_block)
        for step in range(per_block):
            need = base + (step < extra)
            if not need:
                continue
            if trace is not None:
                trace.append(list(canvas))
            logits = _logits(model, canvas)
            if cfg_scale > 0:
                free = _logits(model, [mask_id] * len(prompt) + canvas[len(prompt) :])
                logits = free + (cfg_scale + 1) * (logits - free)
            probs = logits.softmax(-1)
            best = probs.argmax(-1).tolist()
            masked = [p for p in range(end) if canvas[p] == mask_id]
            masked.sort(key=lambda p: -float(probs[p, best[p]]))  # stable: equal ones keep their order
            for place in masked[:need]:
                canvas[place] = best[place]
    return canvas[len(prompt) :]


def _logits(model: Any, canvas: list[int]) -> Tensor:
    return model(torch.tensor([canvas])).logits[0].float()
