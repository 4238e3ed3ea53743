"""`generate`: block diffusion, as the released LLaDA2.x loops decode, with a K/V cache and batches.

A block of positions starts as masks. Every iteration runs the model once over the block, samples a token for every
live row, and lets a *rule* (`epoch_moe.decoding.rules`) decide what is written: the confident masks, and, where editing
is on, tokens over tokens. When the rule is done with the block, the next one starts, until an answer holds an end id or
is long enough.

With the K/V cache, an iteration's forward holds the block's rows only. The first forward of a block holds in front of
them, as *lead* rows, what became final since (the prompt's whole blocks; later the finished block): the block-causal
mask keeps lead rows blind to the new block, so their K/V are final and cost no forward of their own.

Shape suffixes: B sequences, S rows of a forward per sequence, K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from epoch_moe.decoding.joint import JointRule
from epoch_moe.decoding.kv_cache import BlockKVCache
from epoch_moe.decoding.loop import DecodeLoop
from epoch_moe.decoding.output import BlockDiffusionOutput
from epoch_moe.decoding.parts import ModelParts
from epoch_moe.decoding.request import PromptIds, Request
from epoch_moe.decoding.rules import BlockRule, RewriteRule, UnmaskRule
from epoch_moe.decoding.settings import Settings, block_diffusion_settings

if TYPE_CHECKING:
    from epoch_moe.config import EpochConfig


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: PromptIds,
    *,
    attention_mask: Tensor | None = None,
    gen_length: int = 256,
    block_length: int = 32,
    steps: int = 32,
    threshold: float | None = None,
    editing_threshold: float | None = None,
    max_post_steps: int = 16,
    num_to_transfer: int = 1,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_early_stop: bool = False,
    minimal_topk: int = 1,
    eos_token_id: int | Sequence[int] | None = None,
    mask_token_id: int | None = None,
    use_cache: bool = True,
    plan: EpochConfig | Literal["patched"] | None = "patched",
    streamer: Any = None,
    progress: bool = False,
    generator: torch.Generator | None = None,
    record: bool = False,
    prefill_chunk: int = 2048,
) -> BlockDiffusionOutput:
    """Generate answers by block diffusion.

    Args:
        model: a LLaDA2 model with its LM head, in eval mode; patched or not, this library's class or the released one.
        input_ids: prompts ``[B,P]`` or ``[P]``, or a list of prompts of different lengths.
        attention_mask: ``[B,P]``, 1 = real and 0 = padding; needed where `input_ids` is padded (left or right): padding
            would be read as prompt without it.
        gen_length: tokens to generate at most. Below `steps` it lowers `steps` as well (see `minimal_topk`), as in the
            released loop, and with them the tokens.
        block_length: positions of a block.
        steps: iterations per block at most; an iteration commits at least ``block_length / steps`` rows. With editing,
            see `num_to_transfer`.
        threshold: every mask whose token has a higher probability is filled. None: 0.95, and 0.5 for LLaDA2.2 with
            editing.
        editing_threshold: a committed token is replaced where another one has a higher probability than this. None:
            committed tokens stay, as LLaDA2.0 decodes. LLaDA2.1 was released with 0.9 (its card names 0.5 and 0.0 for
            quality and speed), LLaDA2.2 with 0.0. A model whose config has `delete_token_id` and `split_token_id`
            (LLaDA2.2) also deletes and inserts tokens then. Editing costs: every row of the block behind the prompt
            may change until the block is done, so a plan and the LM head treat all of them as live.
        max_post_steps: with editing, iterations that may follow when a block's last mask is filled.
        num_to_transfer: with LLaDA2.1's editing, masks that an iteration fills at least; `steps` is then ignored, as in
            the released loop. LLaDA2.2 spreads a block's masks over `steps` instead.
        temperature: 0 decodes greedily.
        top_k: sample among this many most probable tokens (temperature > 0).
        top_p: sample inside this probability mass (temperature > 0).
        eos_early_stop: stop within a block when an end id was just committed and no mask is left before it. Without
            it, the block that holds the end id is completed first; the answer is the same. With editing, blocks are
            always completed.
        minimal_topk: caps `steps` at ``gen_length // minimal_topk``.
        eos_token_id: end id or ids; none of them (``[]``) for answers of full length. Default: those of
            `model.generation_config` (generation_config.json), or else the config's.
        mask_token_id: id of undecoded positions; default: the config's.
        use_cache: False runs every forward over the whole canvas up to the block, as the released loop does: the same
            forwards with more rows.
        plan: block plan of a patched model: ``"patched"`` for the configuration given to `patch`, another
            configuration, or None for dense MoE layers.
        streamer: transformers' streamer interface, called with the prompt ``[1,P]`` and then once per block with its
            part of the answer (on the CPU); one sequence only.
        progress: show a progress bar over blocks.
        generator: source of randomness for temperature > 0, on the model's device. In a batch, the draws of a sequence
            depend on its batch mates.
        record: also keep which experts every forward used, for `epoch_moe.report.plan_figure`; costs memory.
        prefill_chunk: prompt positions per forward: longer prompts are written to the cache in chunks of whole blocks.

    Returns:
        The answers and their costs.

    Raises:
        ValueError: an argument, a prompt or the model's configuration is not usable; the message says what to do.
        TypeError: an argument of the wrong kind.
        FloatingPointError: logits are NaN or inf; it names the requests, and the weight that is.

    Example:
        >>> import epoch_moe
        >>> model, tokenizer = epoch_moe.load_model("tiny-llada2")
        >>> prompt = tokenizer("sum 3 6 5 4 2:", return_tensors="pt")["input_ids"]
        >>> out = epoch_moe.generate(model, prompt, gen_length=32)
        >>> tokenizer.decode(out.answers[0], skip_special_tokens=True)
        '3+6=9+5=14+4=18+2=20 so 20'
    """
    return BlockLoop.of(**locals()).decode()


class BlockLoop(DecodeLoop):
    """Forwards over the block and its lead rows with a K/V cache, or over everything up to the block without one."""

    own_grid = True
    read_settings = staticmethod(block_diffusion_settings)

    def __init__(self, parts: ModelParts, settings: Settings, request: Request):
        super().__init__(parts, settings, request)
        self.cache = BlockKVCache(parts.config.num_hidden_layers, self.canvas.width) if settings.use_cache else None
        self._bias: tuple[int, int, Tensor | None] = (0, 0, None)

    @property
    def rule_class(self) -> type[BlockRule]:  # type: ignore[override]
        """LLaDA2.0's without editing, else LLaDA2.1's or LLaDA2.2's."""
        if self.settings.editing_threshold is None:
            return UnmaskRule
        return RewriteRule if self.settings.delete_id is None else JointRule

    def open_block(self, begin: int, end: int) -> dict[str, Any]:
        """Write K/V of the prompt's first blocks, until at most `prefill_chunk` positions before ``begin`` are left."""
        prefix = begin
        if self.cache is not None:
            prefix, block = 0, self.settings.block_length
            chunk = max(self.settings.prefill_chunk // block, 1) * block
            while begin - self.cache.length > chunk:
                first, last = self.cache.length, self.cache.length + chunk
                ids_BS = self.canvas.ids_BW[:, first:last]
                with self.context.prefill(ids_BS, self.canvas.real(first, last) if self.canvas.padded else None):
                    self.forward(ids_BS, first)
                self.cache.commit(chunk)
                self.prefill_forwards += 1
        window = prefix + end - begin
        return {"batch": self.canvas.batch, "window": window, "prefix": prefix, "prefix_constant": True}

    def span(self, begin: int, end: int) -> tuple[int, int, int]:
        """What is not in the cache yet, up to the block's end."""
        if self.cache is None:
            return 0, end, 0
        return self.cache.length, end, begin - self.cache.length

    def iterate(self, rule: BlockRule, left: list[int]) -> Tensor:
        """As every loop's; then the forward's lead rows are in the cache for good."""
        left_B = super().iterate(rule, left)
        if self.cache is not None:
            self.cache.commit(rule.begin - self.cache.length)
        return left_B

    def model_inputs(self, first: int, last: int) -> dict[str, Any]:
        """Block-causal attention over the cache and the forward's own rows."""
        if self._bias[:2] != (first, last):  # the iterations of a block share it
            self._bias = first, last, self.attention_bias(first, last)
        return {
            "attention_mask": self._bias[2],
            "position_ids": self.canvas.position_ids(first, last),
            "past_key_values": self.cache,
            "use_cache": self.cache is not None,
        }

    def attention_bias(self, first: int, last: int) -> Tensor | None:
        """The additive mask ``[B|1,1,S,K]`` of queries ``first:last`` over keys ``0:last``; None: all are seen.

        A query sees its own block and the blocks before it, without the padding. Padding queries see padding: their
        output is never used, but a softmax over nothing would put NaN into their keys and values.
        """
        block, canvas = self.settings.block_length, self.canvas
        one_block = first // block == (last - 1) // block
        if one_block and not canvas.padded and self.parts.native:
            return None
        query_S, key_K = canvas.positions(first, last), canvas.positions(0, last)
        seen_BSK = ((key_K // block).unsqueeze(0) <= (query_S // block).unsqueeze(1)).unsqueeze(0)
        if canvas.padded:
            seen_BSK = seen_BSK & (canvas.real(0, last).unsqueeze(1) | ~canvas.real(first, last).unsqueeze(2))
        zero = torch.zeros((), dtype=self.parts.embedding_VH.dtype, device=seen_BSK.device)
        return torch.where(seen_BSK, zero, float("-inf")).unsqueeze(1)

    def select(self, kept: list[int]) -> None:
        """Go on with these sequences of the batch only, in the cache too."""
        super().select(kept)
        if self.cache is not None:
            self.cache.select(kept)
