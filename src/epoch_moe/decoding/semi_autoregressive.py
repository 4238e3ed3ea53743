"""`generate_semi_autoregressive`: LLaDA's own loop, for models whose attention is bidirectional (LLaDA-MoE).

The canvas is fixed: the prompt, and behind it `gen_length` masks. Every forward sees all of it. Blocks are decoded from
left to right; within a block each step commits the scheduled number of rows, the most confident ones. Nothing can be
cached between forwards, as every row sees every other. Under a block plan, prompt and decoded rows are stable, and the
rows of later blocks are future rows (`EpochConfig.future_rows`).

Shape suffixes: B sequences, C copies of each (2 under guidance, else 1), W positions of the canvas, R live rows,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from epoch_moe.decoding.loop import DecodeLoop
from epoch_moe.decoding.output import BlockDiffusionOutput
from epoch_moe.decoding.parts import ModelParts
from epoch_moe.decoding.request import PromptIds, Request
from epoch_moe.decoding.rules import UnmaskRule
from epoch_moe.decoding.sampling import add_gumbel_noise
from epoch_moe.decoding.settings import Remasking, Settings, canvas_settings

if TYPE_CHECKING:
    from epoch_moe.config import EpochConfig


@torch.no_grad()
def generate_semi_autoregressive(
    model: nn.Module,
    input_ids: PromptIds,
    *,
    attention_mask: Tensor | None = None,
    gen_length: int = 128,
    block_length: int = 32,
    steps: int = 128,
    temperature: float = 0.0,
    cfg_scale: float = 0.0,
    remasking: Remasking = "low_confidence",
    eos_early_stop: bool = False,
    eos_token_id: int | Sequence[int] | None = None,
    mask_token_id: int | None = None,
    plan: EpochConfig | Literal["patched"] | None = "patched",
    streamer: Any = None,
    progress: bool = False,
    generator: torch.Generator | None = None,
    record: bool = False,
) -> BlockDiffusionOutput:
    """Generate answers on a fixed canvas, as the loop released with LLaDA does (ML-GSAI/LLaDA, generate.py).

    Args:
        model: a LLaDA-MoE model with its LM head, in eval mode; patched or not, this library's class or the released
            one.
        gen_length: positions of the answer.
        block_length: positions of a block; must divide `gen_length`.
        steps: forwards for the whole answer; must be a multiple of the number of blocks. ``gen_length / steps`` tokens
            are committed per forward.
        temperature: 0 decodes greedily; above, Gumbel noise is added to the logits.
        cfg_scale: strength of classifier-free guidance; above 0 every forward runs a second time with a masked prompt.
        remasking: what is committed first: the rows with the most probable tokens, or rows at ``"random"``.
        eos_early_stop: stop a sequence after the block in which its answer ended. The answer is the same; the released
            loop always decodes the whole canvas.
        generator: source of randomness, on the model's device. Noise is drawn for live rows only, so the draws differ
            from the released loop's.
        input_ids, attention_mask, eos_token_id, mask_token_id, plan, streamer, progress, record: as in
            `epoch_moe.generate`.

    Returns:
        The answers and their costs. Steps that would commit nothing run no forward.

    Raises:
        ValueError, TypeError, FloatingPointError: as `epoch_moe.generate`.

    Example:
        >>> import epoch_moe
        >>> model, tokenizer = epoch_moe.load_model("tiny-llada-moe")
        >>> prompt = tokenizer("sum 3 6 5 4 2:", return_tensors="pt")["input_ids"]
        >>> out = epoch_moe.generate_semi_autoregressive(model, prompt, gen_length=32, steps=32)
        >>> tokenizer.decode(out.answers[0], skip_special_tokens=True)
        '3+6=9+5=14+4=18+2=20 so 20'
    """
    return CanvasLoop.of(**locals()).decode()


class CanvasRule(UnmaskRule):
    """LLaDA's: each iteration commits its share of the schedule, the most confident rows or random ones."""

    def draw(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """A token ``[R]`` for each row, and what it is ranked by: NaN where logits are not numbers."""
        tokens_R = add_gumbel_noise(logits_RV, self.settings.temperature, self.generator).argmax(dim=-1)
        confidence_R = logits_RV.softmax(dim=-1).gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1)
        if self.settings.remasking == "random":
            random_R = torch.rand(tokens_R.shape, dtype=torch.float32, generator=self.generator, device=tokens_R.device)
            confidence_R = random_R.where(confidence_R.isfinite(), confidence_R)
        return tokens_R, confidence_R


class CanvasLoop(DecodeLoop):
    """Forwards over the whole canvas; under guidance, each sequence a second time with masks for its prompt."""

    read_settings = staticmethod(canvas_settings)
    rule_class = CanvasRule

    def __init__(self, parts: ModelParts, settings: Settings, request: Request):
        super().__init__(parts, settings, request)
        if self.canvas.padded and not parts.native:
            lengths = sorted(map(len, request.prompts))
            raise ValueError(
                f"prompts of {lengths[0]} to {lengths[-1]} tokens: the released LLaDA-MoE file ignores the padding "
                "mask that a mixed batch needs; pass prompts of one length, or load the model with epoch_moe.load_model"
            )

    def open_block(self, begin: int, end: int) -> dict[str, Any]:
        """The window is the canvas; nothing before the block is constant."""
        width = self.canvas.width
        return {"batch": self.copies * self.canvas.batch, "window": width, "prefix": begin, "future": width - end}

    def span(self, begin: int, end: int) -> tuple[int, int, int]:
        """The whole canvas; no lead rows."""
        return 0, self.canvas.width, 0

    def model_inputs(self, first: int, last: int) -> dict[str, Any]:
        """Bidirectional attention, but to padding."""
        real_BW = self.canvas.real(first, last).repeat(self.copies, 1)
        return {
            "attention_mask": real_BW.long() if self.canvas.padded else None,
            "position_ids": self.canvas.position_ids(first, last).repeat(self.copies, 1),
        }
