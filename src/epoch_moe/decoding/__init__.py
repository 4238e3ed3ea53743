"""Decoding: block diffusion with its K/V cache, the semi-autoregressive canvas, sampling and commit rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from epoch_moe.decoding.block_diffusion import generate
from epoch_moe.decoding.kv_cache import BlockKVCache
from epoch_moe.decoding.output import BlockDiffusionOutput
from epoch_moe.decoding.parts import is_canvas_model
from epoch_moe.decoding.rules import choose_rows
from epoch_moe.decoding.sampling import sample_tokens
from epoch_moe.decoding.semi_autoregressive import generate_semi_autoregressive
from epoch_moe.decoding.settings import transfer_schedule

__all__ = [
    "BlockDiffusionOutput",
    "BlockKVCache",
    "choose_rows",
    "generate",
    "generate_semi_autoregressive",
    "is_canvas_model",
    "loop_of",
    "sample_tokens",
    "transfer_schedule",
]


def loop_of(model: nn.Module) -> Callable[..., Any]:
    """The function that decodes a model: `generate`, or `generate_semi_autoregressive` for a fixed canvas."""
    return generate_semi_autoregressive if is_canvas_model(model.config) else generate
