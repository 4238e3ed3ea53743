"""`generate`: block diffusion, as the released LLaDA2.x loops decode, with a K/V cache and batches.

A block of positions starts as masks. Every iteration runs the model once over the block, samples a token for every
live row, and lets a *rule* (`epoch_moe.decoding.rules`) decide what is written: the confident masks, and, where editing
is on, tokens over tokens. When the rule is done with the block, the next one starts, until an answer holds an end id or
is long enough.

With the K/V cache, an iteration's forward holds the block's rows only. The first forward of a block holds in front of
them, as *lead* rows, what became final since (the prompt's whole blocks; later the finished block): the block-causal
mask keeps lead rows blind to the new block, so their K/V are final and cost no forward of their own.

Shape suffixes: B sequences, S rows of a forward per sequence (C lead rows, then the window), N rows of the block,
W slots of the canvas, R live rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from epoch_moe.checks import flag
from epoch_moe.decoding.canvas import Canvas, PromptIds, read_request
from epoch_moe.decoding.joint import JointRule
from epoch_moe.decoding.kv_cache import BlockKVCache
from epoch_moe.decoding.not_numbers import BROKEN, not_numbers
from epoch_moe.decoding.output import AnswerLog, BlockDiffusionOutput
from epoch_moe.decoding.parts import is_canvas_model, is_native, model_parts, progress_bar, runnable
from epoch_moe.decoding.rules import BlockRule, RewriteRule, UnmaskRule
from epoch_moe.decoding.settings import BlockDiffusionSettings, check_settings
from epoch_moe.plan.context import BlockPlanContext, UntrackedContext, open_context
from epoch_moe.plan.packed import true_places

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
    """
    model = runnable(model)
    base, head = model_parts(model)
    config = model.config
    if is_canvas_model(config):
        raise ValueError(
            f"{type(model).__name__} sees its whole canvas from both sides, so blocks cannot be cached: call "
            "epoch_moe.generate_semi_autoregressive"
        )
    vocab_size = int(base.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    settings = check_settings(
        model,
        vocab_size,
        gen_length=gen_length,
        block_length=block_length,
        steps=steps,
        threshold=threshold,
        editing_threshold=editing_threshold,
        max_post_steps=max_post_steps,
        num_to_transfer=num_to_transfer,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_early_stop=eos_early_stop,
        minimal_topk=minimal_topk,
        eos_token_id=eos_token_id,
        mask_token_id=mask_token_id,
        prefill_chunk=prefill_chunk,
    )
    flag("use_cache", use_cache)
    device = base.get_input_embeddings().weight.device  # type: ignore[operator]
    prompts = read_request(
        config, settings, vocab_size, device, input_ids, attention_mask, streamer, generator, progress
    )
    canvas = Canvas(prompts, settings, device)
    loop = _BlockLoop(base, head, open_context(model, plan, record=record), canvas, settings, use_cache, generator)
    try:
        with loop.context.decode():
            if streamer is not None:
                streamer.put(prompts[0].cpu().unsqueeze(0))
            loop.run(streamer, progress)
    finally:
        # Also after an error: a consumer in another thread (TextIteratorStreamer) would wait for ever.
        if streamer is not None:
            streamer.end()
    return loop.log.output(
        settings.pad_id,
        device,
        forwards=loop.forwards,
        prefill_forwards=loop.prefill_forwards,
        counters=loop.context.counters,
    )


class _BlockLoop:
    """The state of one `generate` call."""

    def __init__(
        self,
        base: nn.Module,
        head: nn.Module,
        context: BlockPlanContext | UntrackedContext,
        canvas: Canvas,
        settings: BlockDiffusionSettings,
        use_cache: bool,
        generator: torch.Generator | None,
    ):
        self.base, self.head, self.context = base, head, context
        self.canvas, self.settings, self.generator = canvas, settings, generator
        self.dtype = base.get_input_embeddings().weight.dtype  # type: ignore[operator]
        self.native = is_native(base)
        self.cache: BlockKVCache | None = None
        if use_cache:
            self.cache = BlockKVCache(base.config.num_hidden_layers, canvas.ids_BW.shape[1])  # type: ignore[union-attr]
        self.log = AnswerLog(canvas.batch, settings.gen_length, settings.eos_ids)
        self.numbers = list(range(canvas.batch))  # which answer each row of the (shrinking) batch belongs to
        self.forwards = self.prefill_forwards = 0

    def run(self, streamer: Any, progress: bool) -> None:
        """Decode block after block until every answer is complete."""
        block = self.settings.block_length
        starts = range(self.canvas.first_block, self.canvas.ids_BW.shape[1], block)
        with progress_bar(len(starts), disable=not progress) as bar:
            for begin in starts:
                self.decode_block(begin, begin + block)
                self.close_block(begin, begin + block, streamer)
                bar.update()
                bar.set_postfix(tokens=sum(map(len, self.log.answers)), forwards=self.forwards)
                if not self.numbers:
                    break

    def decode_block(self, begin: int, end: int) -> None:
        """Iterate over the block in slots ``begin:end`` until its rule is done with every sequence."""
        first = self.prefill(begin) if self.cache is not None else 0
        batch, block = self.canvas.batch, end - begin
        window = end if self.cache is None else block
        rule = make_rule(self.settings, self.canvas, begin, end, self.generator)
        left = self.canvas.undecoded(begin, end)
        left_B1 = torch.tensor(left, device=self.canvas.ids_BW.device).unsqueeze(1)
        moved_B1: Tensor | None = None
        bias, bias_begin = None, -1
        with self.context.block(batch=batch, window=window, prefix=window - block, prefix_constant=True):
            while any(left):
                if first != bias_begin:
                    bias, bias_begin = self.attention_bias(first, end), first
                left_B1, moved_B1 = self.iterate(rule, first, left, left_B1, moved_B1, bias)
                left = left_B1.flatten().tolist()  # this loop's only host sync (a plan has its own)
                if BROKEN in left:
                    requests = [self.numbers[row] for row, rows in enumerate(left) if rows == BROKEN]
                    raise not_numbers(requests, self.base, self.head)
                if self.cache is not None and first < begin:
                    self.cache.commit(begin - first)
                    first = begin

    def iterate(
        self,
        rule: BlockRule,
        first: int,
        left: list[int],
        left_B1: Tensor,
        moved_B1: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """One forward over the slots from ``first`` to the end of the rule's block, and what the rule makes of it.

        Args:
            rule: of the block.
            first: the forward's first slot.
            left: live rows of each sequence, 0 for those that are done with this block.
            left_B1: the same on the device.
            moved_B1: bool, sequences whose tokens moved to other rows in the last iteration; None: no sequence.
            bias: the attention mask.

        Returns:
            `left_B1` and `moved_B1` after the iteration.
        """
        canvas, begin, end = self.canvas, rule.begin, rule.end
        block = end - begin
        ids_BS = canvas.ids_BW[:, first:end].clone()  # a snapshot: the plan compares the ids of consecutive forwards
        ids_BN = ids_BS[:, -block:]
        before = ids_BS.shape[1] - block
        lead = before if self.cache is not None else 0
        live_BN = rule.live(ids_BN, left_B1)
        # A row that holds another row's token now: what is cached for it says nothing, whatever its own token is.
        changed_BN = None if moved_B1 is None else moved_B1.expand_as(live_BN)
        with self.context.iteration(
            ids_BS,
            mask_id=self.settings.mask_id,
            valid_BS=self.valid(first, begin, end, left, left_B1),
            lead=lead,
            live_BN=_behind(live_BN, before - lead),
            changed_BN=None if changed_BN is None else _behind(changed_BN, before - lead),
        ):
            hidden_BSH = self.forward(ids_BS, first, bias)
        self.forwards += 1
        decision = rule.commit(ids_BN, live_BN, *self.live_logits(hidden_BSH[:, -block:], live_BN, left))
        canvas.ids_BW[:, begin:end] = decision.ids_BN
        self.context.end_iteration(nn.functional.pad(decision.confidence_BN, (before, 0), value=1.0))
        broken_B1 = ~decision.confidence_BN.isfinite().all(dim=1, keepdim=True)
        return decision.left_B1.masked_fill(broken_B1, BROKEN), decision.moved_B1

    def live_logits(self, hidden_BNH: Tensor, live_BN: Tensor, left: list[int]) -> tuple[Tensor, Tensor]:
        """Logits ``[R,V]`` fp32 of the live rows, and their numbers ``[R]`` among the B x N rows of the block."""
        live_rows = sum(left)
        rows_R = true_places(live_BN.flatten(), live_rows)
        hidden_TH = hidden_BNH.reshape(-1, hidden_BNH.shape[-1])
        if self.context.lm_head_rows == "live":
            self.context.count_lm_head(live_rows)
            return self.head(hidden_TH[rows_R.to(hidden_TH.device)]).float(), rows_R
        # All rows of the block, of the sequences that are not done with it.
        busy_BN = (live_BN.any(dim=1, keepdim=True)).expand_as(live_BN)
        busy_rows = sum(1 for rows in left if rows) * live_BN.shape[1]
        busy_T = true_places(busy_BN.flatten(), busy_rows)
        logits_TV = self.head(hidden_TH[busy_T.to(hidden_TH.device)])
        self.context.count_lm_head(busy_rows)
        return logits_TV[true_places(live_BN.flatten()[busy_T], live_rows).to(logits_TV.device)].float(), rows_R

    def close_block(self, begin: int, end: int, streamer: Any) -> None:
        """Log the block's tokens, stream them, and drop the sequences whose answer is complete."""
        kept = []
        for row, tokens in enumerate(self.canvas.ids_BW[:, begin:end].tolist()):
            number = self.numbers[row]
            added = self.log.add(number, tokens[max(0, self.canvas.prompt_ends[row] - begin) :])
            if streamer is not None and added:
                streamer.put(torch.tensor(added))
            if not self.log.finished(number):
                kept.append(row)
        if len(kept) < len(self.numbers):
            self.numbers = [self.numbers[row] for row in kept]
            if kept:
                self.canvas.select(kept)
                if self.cache is not None:
                    self.cache.select(kept)

    def prefill(self, begin: int) -> int:
        """Write K/V of the prompt's first blocks, until at most `prefill_chunk` slots before ``begin`` are left.

        Returns:
            The first slot that is not in the cache.
        """
        assert self.cache is not None
        block = self.settings.block_length
        chunk = max(self.settings.prefill_chunk // block, 1) * block
        while begin - self.cache.length > chunk:
            first = self.cache.length
            end = first + chunk
            ids_BS = self.canvas.ids_BW[:, first:end]
            with self.context.prefill(ids_BS, self.canvas.real(first, end) if self.canvas.padded else None):
                self.forward(ids_BS, first, self.attention_bias(first, end))
            self.cache.commit(chunk)
            self.prefill_forwards += 1
        return self.cache.length

    def forward(self, ids_BS: Tensor, first: int, bias: Tensor | None) -> Tensor:
        """Hidden states ``[B,S,H]`` of the ids in slots ``first:``."""
        out = self.base(
            input_ids=ids_BS,
            attention_mask=bias,
            position_ids=self.canvas.positions(first, first + ids_BS.shape[1]),
            past_key_values=self.cache,
            use_cache=self.cache is not None,
            return_dict=True,
        )
        self.context.count_attention(ids_BS.numel() * (first + ids_BS.shape[1]))
        hidden_BSH: Tensor = out.last_hidden_state
        return hidden_BSH

    def attention_bias(self, first: int, end: int) -> Tensor | None:
        """The attention mask of a forward over slots ``first:end``; see `Canvas.attention_bias`."""
        bias = self.canvas.attention_bias(first, end, self.dtype)
        if bias is None and not self.native:
            # The released files read "no mask" as causal as soon as there are cached keys.
            bias = torch.zeros((1, 1, end - first, end), dtype=self.dtype, device=self.canvas.ids_BW.device)
        return bias

    def valid(self, first: int, begin: int, end: int, left: list[int], left_B1: Tensor) -> Tensor | None:
        """``[B,S]`` bool, False for padding and for block rows of sequences that are done with it; None: all True."""
        if all(left) and not (self.canvas.padded and first < max(self.canvas.starts)):
            return None
        in_block_S = self.canvas.slots(first, end) >= begin
        return self.canvas.real(first, end) & ~(in_block_S & (left_B1 == 0))


def make_rule(
    settings: BlockDiffusionSettings, canvas: Canvas, begin: int, end: int, generator: torch.Generator | None
) -> BlockRule:
    """The rule of the block in slots ``begin:end``: LLaDA2.0's without editing, else LLaDA2.1's or LLaDA2.2's."""
    if settings.editing_threshold is None:
        return UnmaskRule(settings, canvas, begin, end, generator)
    if settings.delete_id is None:
        return RewriteRule(settings, canvas, begin, end, generator)
    return JointRule(settings, canvas, begin, end, generator)


def _behind(mask_BN: Tensor, prefix: int) -> Tensor:
    """A mask over the block as one over the window, whose first `prefix` rows lie before the block."""
    return nn.functional.pad(mask_BN, (prefix, 0), value=False) if prefix else mask_BN
