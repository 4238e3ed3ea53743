"""`generate_semi_autoregressive`: LLaDA's own loop, for models whose attention is bidirectional (LLaDA-MoE).

The canvas is fixed: the prompt, and behind it `gen_length` masks. Every forward sees all of it. Blocks are decoded from
left to right; within a block each step commits the scheduled number of rows, the most confident ones. Nothing can be
cached between forwards, as every row sees every other. Under a block plan, prompt and decoded rows are stable, and the
rows of later blocks are future rows (`EpochConfig.future_rows`).

Shape suffixes: B sequences (twice as many under guidance), P prompt slots, W slots of the canvas, N rows of the block,
R live rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from epoch_moe.checks import choice, flag, real, special_ids, whole
from epoch_moe.decoding.canvas import PromptIds, read_request
from epoch_moe.decoding.commit import choose_rows, transfer_schedule
from epoch_moe.decoding.not_numbers import not_numbers
from epoch_moe.decoding.output import AnswerLog, BlockDiffusionOutput
from epoch_moe.decoding.parts import is_native, model_parts, progress_bar, runnable
from epoch_moe.decoding.settings import in_context
from epoch_moe.plan.context import BlockPlanContext, UntrackedContext, open_context

if TYPE_CHECKING:
    from epoch_moe.config import EpochConfig

Remasking = Literal["low_confidence", "random"]


@dataclass(frozen=True)
class CanvasSettings:
    """Checked arguments of `generate_semi_autoregressive`; the fields have the meaning documented there.

    Attributes:
        schedule: rows that each step of a block commits.
        mask_id: id of undecoded positions.
        eos_ids: ids that end an answer.
        pad_id: fills left padding and the tails of shorter answers.
    """

    gen_length: int
    block_length: int
    schedule: tuple[int, ...]
    temperature: float
    cfg_scale: float
    remasking: Remasking
    eos_early_stop: bool
    mask_id: int
    eos_ids: tuple[int, ...]
    pad_id: int


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
        input_ids: prompts ``[B,P]`` or ``[P]``, or a list of prompts of different lengths.
        attention_mask: ``[B,P]``, 1 = real and 0 = padding; needed where `input_ids` is padded.
        gen_length: slots for the answer.
        block_length: rows of a block; must divide `gen_length`.
        steps: forwards for the whole answer; must be a multiple of the number of blocks. ``gen_length / steps`` tokens
            are committed per forward.
        temperature: 0 decodes greedily; above, Gumbel noise is added to the logits.
        cfg_scale: strength of classifier-free guidance; above 0 every forward runs a second time with a masked prompt.
        remasking: what is committed first: the rows with the most probable tokens, or rows at ``"random"``.
        eos_early_stop: stop a sequence after the block in which its answer ended. The answer is the same; the released
            loop always decodes the whole canvas.
        eos_token_id: end id or ids; none of them (``[]``) for answers of full length. Default: those of
            `model.generation_config` (generation_config.json), or else the config's.
        mask_token_id: id of undecoded positions; default: the config's.
        plan: block plan of a patched model: ``"patched"`` for the configuration given to `patch`, another
            configuration, or None for dense MoE layers.
        streamer: transformers' streamer interface, called with the prompt ``[1,P]`` and then once per block; one
            sequence only.
        progress: show a progress bar over blocks.
        generator: source of randomness, on the model's device. Noise is drawn for live rows only, so the draws differ
            from the released loop's.
        record: also keep which experts every forward used, for `epoch_moe.report.plan_figure`; costs memory.

    Returns:
        The answers and their costs. Steps that would commit nothing run no forward.

    Raises:
        ValueError: an argument, a prompt or the model's configuration is not usable; the message says what to do.
        TypeError: an argument of the wrong kind.
        FloatingPointError: logits are NaN or inf; it names the requests, and the weight that is.
    """
    model = runnable(model)
    base, head = model_parts(model)
    if getattr(model.config, "model_type", None) == "llada2_moe":
        raise ValueError(
            f"{type(model).__name__} decodes under a block-causal mask, not on a bidirectional canvas: call "
            "epoch_moe.generate"
        )
    vocab_size = int(base.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    settings = _check(
        model,
        vocab_size,
        gen_length=gen_length,
        block_length=block_length,
        steps=steps,
        temperature=temperature,
        cfg_scale=cfg_scale,
        remasking=remasking,
        eos_early_stop=eos_early_stop,
        eos_token_id=eos_token_id,
        mask_token_id=mask_token_id,
    )
    device = base.get_input_embeddings().weight.device  # type: ignore[operator]
    prompts = read_request(
        model.config, settings, vocab_size, device, input_ids, attention_mask, streamer, generator, progress
    )
    lengths = {len(prompt) for prompt in prompts}
    if len(lengths) > 1 and not is_native(base):
        raise ValueError(
            f"prompts of {min(lengths)} to {max(lengths)} tokens: the released LLaDA-MoE file ignores the padding mask "
            "that a mixed batch needs; pass prompts of one length, or load the model with epoch_moe.load_model"
        )
    loop = _CanvasLoop(base, head, open_context(model, plan, record=record), prompts, settings, device, generator)
    try:
        with loop.context.decode():
            if streamer is not None:
                streamer.put(prompts[0].cpu().unsqueeze(0))
            loop.run(streamer, progress)
    finally:
        if streamer is not None:
            streamer.end()
    return loop.log.output(
        settings.pad_id, device, forwards=loop.forwards, prefill_forwards=0, counters=loop.context.counters
    )


class _CanvasLoop:
    """The state of one call."""

    def __init__(
        self,
        base: nn.Module,
        head: nn.Module,
        context: BlockPlanContext | UntrackedContext,
        prompts: list[Tensor],
        settings: CanvasSettings,
        device: torch.device,
        generator: torch.Generator | None,
    ):
        self.base, self.head, self.context = base, head, context
        self.settings, self.generator = settings, generator
        self.prompt_len = max(map(len, prompts))
        width = self.prompt_len + settings.gen_length
        # Shorter prompts are padded on the left, so that blocks lie in the same slots for all sequences.
        pads = [self.prompt_len - len(prompt) for prompt in prompts]
        self.ids_BW = torch.full((len(prompts), width), settings.mask_id, dtype=torch.long, device=device)
        for row, (prompt, pad) in enumerate(zip(prompts, pads, strict=True)):
            self.ids_BW[row, :pad] = settings.pad_id
            self.ids_BW[row, pad : self.prompt_len] = prompt.to(device)
        self.pads_B1 = torch.tensor(pads, device=device).unsqueeze(1)
        self.padded = any(pads)
        self.broken_B1 = torch.zeros_like(self.pads_B1, dtype=torch.bool)  # logits that are no numbers, since the start
        self.log = AnswerLog(len(prompts), settings.gen_length, settings.eos_ids)
        self.numbers = list(range(len(prompts)))  # which answer each row of the (shrinking) batch belongs to
        self.forwards = 0

    def run(self, streamer: Any, progress: bool) -> None:
        """Decode block after block."""
        block, width = self.settings.block_length, self.ids_BW.shape[1]
        starts = range(self.prompt_len, width, block)
        with progress_bar(len(starts), disable=not progress) as bar:
            for begin in starts:
                self.decode_block(begin, begin + block)
                self.close_block(begin, begin + block, streamer)
                bar.update()
                bar.set_postfix(forwards=self.forwards)
                if not self.numbers:
                    break

    def decode_block(self, begin: int, end: int) -> None:
        """Commit the block's rows, step by step."""
        copies = 2 if self.settings.cfg_scale > 0 else 1
        batch, width = self.ids_BW.shape
        with self.context.block(batch=copies * batch, window=width, prefix=begin, future=width - end):
            for need in self.settings.schedule:
                if need:
                    self.step(begin, end, need)

    def step(self, begin: int, end: int, need: int) -> None:
        """One forward over the canvas, and the rows of the block ``begin:end`` that it commits."""
        settings = self.settings
        ids_BW = self.ids_BW.clone()  # a snapshot: the plan compares the ids of consecutive forwards
        slots_W = torch.arange(ids_BW.shape[1], device=ids_BW.device)
        real_BW = slots_W >= self.pads_B1
        positions_BW = (slots_W - self.pads_B1).clamp_min(0)
        if settings.cfg_scale > 0:
            ids_BW = torch.cat([ids_BW, ids_BW.masked_fill(slots_W < self.prompt_len, settings.mask_id)])
            real_BW, positions_BW = real_BW.repeat(2, 1), positions_BW.repeat(2, 1)
        valid_BW = real_BW if self.padded else None
        with self.context.iteration(ids_BW, mask_id=settings.mask_id, valid_BS=valid_BW):
            hidden_BWH = self.base(
                input_ids=ids_BW,
                attention_mask=None if valid_BW is None else valid_BW.long(),
                position_ids=positions_BW,
                return_dict=True,
            ).last_hidden_state
        self.forwards += 1
        self.context.count_attention(ids_BW.numel() * ids_BW.shape[1])
        ids_BN = self.ids_BW[:, begin:end]
        live_BN = ids_BN == settings.mask_id
        # Waits for the device: a row may be given the mask id as its token, so the schedule does not tell the number.
        rows_R = live_BN.flatten().nonzero().squeeze(1)
        logits_RV = self.logits(hidden_BWH[:, begin:end], rows_R)
        broken_BN = torch.zeros_like(live_BN).flatten().index_copy(0, rows_R, ~logits_RV.logsumexp(dim=-1).isfinite())
        self.broken_B1 = self.broken_B1 | broken_BN.view_as(live_BN).any(dim=1, keepdim=True)
        tokens_R, confidence_R = self.sample(logits_RV)
        tokens_BN = ids_BN.flatten().index_copy(0, rows_R, tokens_R).view_as(ids_BN)
        confidence_BN = torch.ones(ids_BN.shape, dtype=torch.float32, device=rows_R.device)
        confidence_BN.view(-1).index_copy_(0, rows_R, confidence_R)
        chosen_BN = choose_rows(confidence_BN, live_BN, need, threshold=math.inf)
        self.ids_BW[:, begin:end] = torch.where(chosen_BN, tokens_BN, ids_BN)
        copies = len(ids_BW) // len(ids_BN)
        around = (begin, ids_BW.shape[1] - end)
        self.context.end_iteration(nn.functional.pad(confidence_BN, around, value=1.0).repeat(copies, 1))

    def logits(self, hidden_BNH: Tensor, rows_R: Tensor) -> Tensor:
        """Logits ``[R,V]`` fp32 of the live rows, guided where the batch holds every sequence twice."""
        copies = 2 if self.settings.cfg_scale > 0 else 1
        batch_rows = hidden_BNH.shape[0] // copies * hidden_BNH.shape[1]
        hidden_TH = hidden_BNH.reshape(-1, hidden_BNH.shape[-1])
        if self.context.lm_head_rows == "live":
            halves = [self.head(hidden_TH[rows_R + copy * batch_rows]).float() for copy in range(copies)]
            self.context.count_lm_head(copies * rows_R.numel())
        else:  # all rows of the block
            logits_TV = self.head(hidden_TH)
            halves = [logits_TV[rows_R + copy * batch_rows].float() for copy in range(copies)]
            self.context.count_lm_head(hidden_TH.shape[0])
        if copies == 1:
            return halves[0]
        guided, free = halves
        return free + (self.settings.cfg_scale + 1) * (guided - free)

    def sample(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """A token ``[R]`` for each row, and what it is ranked by."""
        noisy_RV = add_gumbel_noise(logits_RV, self.settings.temperature, self.generator)
        tokens_R = noisy_RV.argmax(dim=-1)
        if self.settings.remasking == "random":
            return tokens_R, torch.rand(
                tokens_R.shape, dtype=torch.float32, generator=self.generator, device=tokens_R.device
            )
        return tokens_R, logits_RV.softmax(dim=-1).gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1)

    def close_block(self, begin: int, end: int, streamer: Any) -> None:
        """Log the block's tokens, stream them, and drop the sequences whose answer is complete."""
        finished = []
        *columns, broken_B = torch.cat([self.ids_BW[:, begin:end], self.broken_B1], dim=1).T.tolist()
        if any(broken_B):
            raise not_numbers([self.numbers[row] for row, flag in enumerate(broken_B) if flag], self.base, self.head)
        for row, tokens in enumerate(map(list, zip(*columns, strict=True))):
            number = self.numbers[row]
            added = [] if self.log.finished(number) else self.log.add(number, tokens)
            if streamer is not None and added:
                streamer.put(torch.tensor(added))
            finished.append(self.log.finished(number))
        if not self.settings.eos_early_stop or not any(finished):
            return
        kept = [row for row, done in enumerate(finished) if not done]
        self.numbers = [self.numbers[row] for row in kept]
        self.ids_BW, self.pads_B1, self.broken_B1 = self.ids_BW[kept], self.pads_B1[kept], self.broken_B1[kept]


def add_gumbel_noise(logits_RV: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
    """Scores whose argmax is a sample of the logits at this temperature; the logits themselves at 0.

    As the released loop computes it (arXiv 2409.02908 asks for fp64): ``exp(logits) / (-log(uniform)) ** temperature``,
    here in logarithms, so that large logits do not overflow.
    """
    if temperature == 0.0:
        return logits_RV
    uniform_RV = torch.rand(logits_RV.shape, dtype=torch.float64, generator=generator, device=logits_RV.device)
    return logits_RV.double() - temperature * (-uniform_RV.log()).log()


def _check(
    model: Any,
    vocab_size: int,
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    temperature: float,
    cfg_scale: float,
    remasking: str,
    eos_early_stop: bool,
    eos_token_id: int | Sequence[int] | None,
    mask_token_id: int | None,
) -> CanvasSettings:
    gen_length = in_context(model.config, "gen_length", gen_length, "slots for the answer")
    block_length = in_context(model.config, "block_length", block_length, "rows of a block")
    steps = whole("steps", steps, "forwards for the answer", least=1)
    if gen_length % block_length:
        raise ValueError(f"gen_length={gen_length}: expected a multiple of block_length={block_length}")
    blocks = gen_length // block_length
    if steps % blocks:
        raise ValueError(
            f"steps={steps}: expected a multiple of the number of blocks, gen_length / block_length = {blocks}"
        )
    eos_ids, mask_id, pad_id = special_ids(model, vocab_size, eos_token_id, mask_token_id)
    return CanvasSettings(
        gen_length=gen_length,
        block_length=block_length,
        schedule=tuple(transfer_schedule(block_length, min(steps // blocks, block_length))),
        temperature=real("temperature", temperature, "0 (greedy) or a positive finite number"),
        cfg_scale=real("cfg_scale", cfg_scale, "a finite number of at least 0"),
        remasking=choice("remasking", remasking, ("low_confidence", "random")),
        eos_early_stop=flag("eos_early_stop", eos_early_stop),
        mask_id=mask_id,
        eos_ids=eos_ids,
        pad_id=pad_id,
    )
