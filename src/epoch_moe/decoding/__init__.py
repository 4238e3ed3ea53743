"""Block-diffusion decoding: the loop, its K/V cache, sampling and commit rules."""

from epoch_moe.decoding.block_diffusion import generate
from epoch_moe.decoding.commit import choose_rows, transfer_schedule
from epoch_moe.decoding.kv_cache import BlockKVCache
from epoch_moe.decoding.output import BlockDiffusionOutput
from epoch_moe.decoding.sampling import sample_tokens

__all__ = [
    "BlockDiffusionOutput",
    "BlockKVCache",
    "choose_rows",
    "generate",
    "sample_tokens",
    "transfer_schedule",
]
