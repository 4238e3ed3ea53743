"""Decoding: block diffusion with its K/V cache, the semi-autoregressive canvas, sampling and commit rules."""

from epoch_moe.decoding.block_diffusion import generate
from epoch_moe.decoding.commit import choose_rows, transfer_schedule
from epoch_moe.decoding.kv_cache import BlockKVCache
from epoch_moe.decoding.output import BlockDiffusionOutput
from epoch_moe.decoding.parts import is_canvas_model, loop_of
from epoch_moe.decoding.sampling import sample_tokens
from epoch_moe.decoding.semi_autoregressive import generate_semi_autoregressive

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
