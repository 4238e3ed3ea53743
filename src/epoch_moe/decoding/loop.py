"""The loop of every decoder: block after block, forward after forward, until each answer is complete.

`DecodeLoop` runs the forwards under the two clocks of the context, asks the block's rule (`epoch_moe.decoding.rules`)
which rows are live and what becomes of them, logs and streams finished blocks, and drops sequences that are done.
A subclass says what its forwards hold: `epoch_moe.decoding.block_diffusion` (the block behind its K/V cache) and
`epoch_moe.decoding.semi_autoregressive` (the whole canvas).

Shape suffixes: B sequences, C copies of each in a forward (2 under guidance, else 1), S rows of a forward per sequence,
N rows of the block, T = B x N, A rows that the LM head is asked for, R live rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from einops import rearrange
from torch import Tensor, nn

from epoch_moe.decoding.canvas import Canvas
from epoch_moe.decoding.output import AnswerLog, BlockDiffusionOutput
from epoch_moe.decoding.parts import ModelParts, model_parts
from epoch_moe.decoding.request import ASKED, Request
from epoch_moe.decoding.rules import BlockRule
from epoch_moe.decoding.settings import Settings
from epoch_moe.plan.packed import true_places

BROKEN = -1
"""Live rows of a sequence whose logits are not numbers: it travels with what a loop reads on the host anyway."""


class DecodeLoop(ABC):
    """One decode.

    Args:
        parts: the model.
        settings: checked arguments.
        request: prompts and context, streamer, generator and progress bar.

    Attributes:
        canvas: prompts and masks; answers are written there.
        log: the finished part of each answer.
        numbers: which answer each sequence of the (shrinking) batch is.
        own_grid: of the canvas: each sequence's blocks begin at its own position 0.
        read_settings: checks the arguments of the loop's function.
        rule_class: of its blocks.
    """

    own_grid = False
    read_settings: ClassVar[Callable[..., Settings]]
    rule_class: type[BlockRule]

    def __init__(self, parts: ModelParts, settings: Settings, request: Request):
        self.parts, self.settings, self.request, self.context = parts, settings, request, request.context
        self.canvas = Canvas(request.prompts, settings, parts.embedding_VH.device, self.own_grid)
        self.log = AnswerLog(self.canvas.batch, settings.gen_length, settings.eos_ids)
        self.numbers = list(range(self.canvas.batch))
        self.forwards = self.prefill_forwards = 0

    @classmethod
    def of(cls, model: nn.Module, **arguments: Any) -> Self:
        """A decode with the arguments of the loop's function; the settings are checked before the prompts."""
        parts = model_parts(model)
        asked = {name: arguments.pop(name) for name in ASKED}
        settings = cls.read_settings(parts, **arguments)
        return cls(parts, settings, Request.read(parts, settings, **asked))

    def make_rule(self, begin: int, end: int) -> BlockRule:
        """The rule of the block at canvas positions ``begin:end``."""
        return self.rule_class(self.settings, self.canvas, begin, end, self.request.generator)

    @abstractmethod
    def open_block(self, begin: int, end: int) -> dict[str, Any]:
        """Run what comes before the block's forwards, and return the arguments of `BlockPlanContext.block`."""

    @abstractmethod
    def span(self, begin: int, end: int) -> tuple[int, int, int]:
        """Of the block's next forward: its first canvas position, the one behind its last, and its lead rows."""

    @abstractmethod
    def model_inputs(self, first: int, last: int) -> dict[str, Any]:
        """What the base model gets beside the ids of the canvas positions ``first:last``."""

    @property
    def copies(self) -> int:
        """C: each sequence is twice in a forward under guidance, the second time without its prompt."""
        return 2 if self.settings.cfg_scale > 0 else 1

    def decode(self) -> BlockDiffusionOutput:
        """Run the decode; the streamer gets its end also after an error."""
        streamer = self.request.streamer
        try:
            with self.context:
                if streamer is not None:
                    streamer.put(self.request.prompts[0].cpu().unsqueeze(0))
                self.run()
        finally:
            # A consumer in another thread (TextIteratorStreamer) would wait for ever.
            if streamer is not None:
                streamer.end()
        return self.log.output(
            self.settings.pad_id,
            self.canvas.ids_BW.device,
            forwards=self.forwards,
            prefill_forwards=self.prefill_forwards,
            counters=self.context.counters,
        )

    def run(self) -> None:
        """Decode block after block."""
        from tqdm.auto import tqdm

        block = self.settings.block_length
        starts = range(self.canvas.first_block, self.canvas.width, block)
        with tqdm(total=len(starts), unit="block", desc="generate", disable=not self.request.progress) as bar:
            for begin in starts:
                self.decode_block(begin, begin + block)
                self.close_block(begin, begin + block)
                bar.update()
                bar.set_postfix(tokens=sum(map(len, self.log.answers)), forwards=self.forwards)
                if not self.numbers:
                    break

    def decode_block(self, begin: int, end: int) -> None:
        """Iterate over the block at canvas positions ``begin:end`` until its rule is done with every sequence."""
        clock = self.open_block(begin, end)
        rule, left = self.make_rule(begin, end), self.canvas.undecoded(begin, end)
        with self.context.block(**clock, only_live=self.parts.ends_with_experts):
            while any(left):
                left = self.iterate(rule, left).tolist()  # the loop's one host sync of a forward (a plan has its own)
                if BROKEN in left:
                    raise self.not_numbers([n for n, rows in zip(self.numbers, left, strict=True) if rows == BROKEN])

    def iterate(self, rule: BlockRule, left: list[int]) -> Tensor:
        """One forward, and what the rule makes of it. Waits for nothing on the device.

        Args:
            rule: of the block.
            left: live rows of each sequence, ``rule.left_B1`` on the host.

        Returns:
            ``[B]`` int64, live rows of each sequence after the iteration; `BROKEN` where logits were not numbers.
        """
        begin, end = rule.begin, rule.end
        first, last, lead = self.span(begin, end)
        before, behind = begin - first, last - end
        ids_BS = self.canvas.ids_BW[:, first:last].clone()  # a snapshot: a plan compares it with the next forward's
        ids_BN = ids_BS[:, before : before + end - begin]
        live_BN = rule.live(ids_BN)
        # A row that holds another row's token now: what is cached for it says nothing, whatever its own token is.
        changed_BN = None if rule.moved_B1 is None else rule.moved_B1.expand_as(live_BN)
        if self.copies > 1:
            in_front_S = self.canvas.positions(first, last) < self.canvas.first_block
            ids_BS = torch.cat([ids_BS, ids_BS.masked_fill(in_front_S, self.settings.mask_id)])
        with self.context.iteration(
            ids_BS,
            mask_id=self.settings.mask_id,
            valid_BS=self.widened(self.valid(first, last, rule, left)),
            lead=lead,
            live_BN=self.widened(live_BN, before - lead, behind),
            changed_BN=self.widened(changed_BN, before - lead, behind),
        ):
            hidden_BSH = self.forward(ids_BS, first)
        self.forwards += 1
        logits_RV, rows_R = self.live_logits(hidden_BSH[:, before : before + end - begin], live_BN, left)
        new_BN, confidence_BN = rule.commit(ids_BN, live_BN, logits_RV, rows_R)
        self.canvas.ids_BW[:, begin:end] = new_BN
        self.context.end_iteration(self.widened(confidence_BN, before, behind, fill=1.0))
        return rule.left_B1.squeeze(1).masked_fill(~confidence_BN.isfinite().all(dim=1), BROKEN)

    def forward(self, ids_BS: Tensor, first: int) -> Tensor:
        """Hidden states ``[C*B,S,H]`` of the ids at canvas positions ``first:``."""
        last = first + ids_BS.shape[1]
        out = self.parts.base(input_ids=ids_BS, **self.model_inputs(first, last), return_dict=True)
        self.context.count_attention(ids_BS.numel() * last)
        hidden_BSH: Tensor = out.last_hidden_state
        return hidden_BSH

    def live_logits(self, hidden_BNH: Tensor, live_BN: Tensor, left: list[int]) -> tuple[Tensor, Tensor]:
        """Logits ``[R,V]`` fp32 of the live rows, and the rows' places ``[R]`` int64 among the T rows, ascending.

        Args:
            hidden_BNH: ``[C*B,N,H]``, of the block.
            live_BN: bool.
            left: how many are live in each sequence.
        """
        live_T = live_BN.flatten()
        rows_R = asked_A = true_places(live_T, sum(left))
        if self.context.lm_head_rows == "block":  # all rows of the block, of the sequences that are not done with it
            busy_BN = live_BN.any(dim=1, keepdim=True).expand_as(live_BN)
            asked_A = true_places(busy_BN.flatten(), sum(map(bool, left)) * live_BN.shape[1])
        hidden_CTH = rearrange(hidden_BNH, "(c b) n h -> c (b n) h", c=self.copies)
        hidden_CAH = hidden_CTH[:, asked_A.to(hidden_CTH.device)]
        logits_CRV = rearrange(self.parts.head(hidden_CAH.flatten(0, 1)), "(c a) v -> c a v", c=self.copies)
        self.context.count_lm_head(logits_CRV.shape[0] * logits_CRV.shape[1])
        if asked_A is not rows_R:
            logits_CRV = logits_CRV[:, true_places(live_T[asked_A], sum(left)).to(logits_CRV.device)]
        logits_RV, *free_RV = logits_CRV.float()
        for unprompted_RV in free_RV:  # guidance moves the logits away from those without the prompt
            logits_RV = unprompted_RV + (self.settings.cfg_scale + 1) * (logits_RV - unprompted_RV)
        return logits_RV, rows_R

    def valid(self, first: int, last: int, rule: BlockRule, left: list[int]) -> Tensor | None:
        """``[B,S]`` bool, False for padding and for block rows of sequences that are done with it; None: all True."""
        if all(left) and first >= max(self.canvas.starts):
            return None
        position_S = self.canvas.positions(first, last)
        in_block_S = (position_S >= rule.begin) & (position_S < rule.end)
        return self.canvas.real(first, last) & ~(in_block_S & (rule.left_B1 == 0))

    def widened(self, rows_BN: Tensor | None, before: int = 0, behind: int = 0, fill: float = False) -> Tensor | None:
        """Values of some rows as values ``[C*B, before + N + behind]``, with `fill` around them."""
        if rows_BN is not None and before + behind:
            rows_BN = nn.functional.pad(rows_BN, (before, behind), value=fill)
        return rows_BN if rows_BN is None or self.copies == 1 else rows_BN.repeat(self.copies, 1)

    def close_block(self, begin: int, end: int) -> None:
        """Log the block's tokens, stream them, and drop the sequences whose answer is complete."""
        kept = []
        for row, tokens in enumerate(self.canvas.ids_BW[:, begin:end].tolist()):
            number = self.numbers[row]
            added = self.log.add(number, tokens[max(0, self.canvas.prompt_ends[row] - begin) :])
            if self.request.streamer is not None and added:
                self.request.streamer.put(torch.tensor(added))
            if not self.log.finished(number):
                kept.append(row)
        if self.settings.drop_ended and len(kept) < len(self.numbers):
            self.numbers = [self.numbers[row] for row in kept]
            if kept:
                self.select(kept)

    def select(self, kept: list[int]) -> None:
        """Go on with these sequences of the batch only."""
        self.context.select([copy * self.canvas.batch + row for copy in range(self.copies) for row in kept])
        self.canvas.select(kept)

    def not_numbers(self, requests: list[int]) -> FloatingPointError:
        """The error of a decode whose logits are NaN or inf: whose, and which weight is to blame."""
        model = self.parts.model
        found = None
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
                found = name
                break
        where = (
            f"{found} holds values that are not finite: the checkpoint is damaged, or was converted to a dtype that "
            "cannot hold them"
            if found
            else f"all weights are finite, so a layer overflows in {self.parts.embedding_VH.dtype}: load the model in "
            "bfloat16 or float32"
        )
        which = f"request{'s' * (len(requests) > 1)} {', '.join(map(str, requests))}"
        return FloatingPointError(f"the logits of {which} (of the batch, from 0) are not numbers (NaN or inf): {where}")
