"""What the tests on several ranks decode: a golden model's folder, prompts, and the loop of its family."""

from __future__ import annotations

import os
from typing import Any

from epoch_moe.config import EpochConfig
from epoch_moe.decoding import is_canvas_model, loop_of
from epoch_moe.models import load_model

PROMPTS = [[5, 9, 2, 77, 31], list(range(20, 33)), [60], [8, 1, 1, 40, 3, 99, 12, 7, 7], [44, 3]]


def options_of(model: Any) -> dict[str, Any]:
    if is_canvas_model(model.config):
        return {"gen_length": 8, "block_length": 4, "steps": 8, "eos_token_id": 1}
    return {"gen_length": 16, "block_length": 8, "threshold": 0.05, "eos_token_id": 1}


def answers(model: Any, prompts: list[list[int]], config: EpochConfig | None) -> list[list[int]]:
    if not prompts:
        return []
    out = loop_of(model)(model, prompts, plan=config, **options_of(model))
    return [answer.tolist() for answer in out.answers]


def whole_model(source: str) -> Any:
    model, _ = load_model(source, dtype="float32")
    if "llada2" in source and "one_rank" in os.environ.get("EPOCH_MOE_TEST_ROUTING", ""):
        for layer in model.model.layers[1:]:
            layer.mlp.gate.expert_bias[:8] += 10.0  # all pairs go to the first half of the experts
    return model
