"""How a block's rows become tokens: one rule per released algorithm, one object per block.

A rule says which rows' logits the next forward is read for, and what those logits do to the block. The loop around it
(`epoch_moe.decoding.loop`) owns forwards, cache and plan. This file holds LLaDA2.0's rule, which only fills
masks, and LLaDA2.1's, which also rewrites tokens; LLaDA2.2's, which also moves them, is in `epoch_moe.decoding.joint`.

Shape suffixes: B sequences, N rows of the block, W positions of the canvas, R live rows, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from epoch_moe.decoding.canvas import Canvas
from epoch_moe.decoding.sampling import sample_tokens
from epoch_moe.decoding.settings import Settings

MAX_ITERATIONS = 1000
"""Iterations of an editing rule per block at most: edits may undo each other for ever, also in the released loops."""


def choose_rows(confidence_BN: Tensor, live_BN: Tensor, need: int, threshold: float) -> Tensor:
    """The live rows to commit: all above `threshold` if those are at least `need`, else the `need` most confident.

    Args:
        confidence_BN: ``[B,N]`` probability of each row's sampled token; values of rows that are not live are ignored.
        live_BN: ``[B,N]`` bool, rows that may be committed.
        need: the schedule's count for this iteration; a sequence with fewer live rows commits all of them.
        threshold: a confidence must be larger than this.

    Returns:
        ``[B,N]`` bool. Equal confidences go to the earlier row, so that the choice does not depend on the device.
    """
    confidence_BN = confidence_BN.masked_fill(~live_BN, float("-inf"))
    confident_BN = confidence_BN > threshold
    rank_BN = confidence_BN.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    best_BN = (rank_BN < need) & live_BN
    enough_B1 = confident_BN.sum(dim=-1, keepdim=True) >= need
    return torch.where(enough_B1, confident_BN, best_BN)


@dataclass(eq=False)
class BlockRule(ABC):
    """The state of one block while it is decoded. Nothing here waits for the device.

    Attributes:
        settings: of the decode.
        canvas: where the block lies.
        begin, end: the block's canvas positions.
        generator: source of randomness for temperature > 0.
        step: iterations so far.
        left_B1: int64, live rows of the next iteration; 0 for a sequence that is done with the block.
        moved_B1: bool, sequences whose tokens moved to other rows in the last iteration; None: no sequence.
    """

    settings: Settings
    canvas: Canvas
    begin: int
    end: int
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        self.step = 0
        self.left_B1 = self.canvas.answer(self.begin, self.end).sum(dim=1, keepdim=True)
        self.moved_B1: Tensor | None = None

    @abstractmethod
    def live(self, ids_BN: Tensor) -> Tensor:
        """``[B,N]`` bool: rows whose logits can change a decision now, ``left_B1`` of each sequence."""

    @abstractmethod
    def commit(self, ids_BN: Tensor, live_BN: Tensor, logits_RV: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        """Decide about the live rows, given the logits that a forward over ``ids_BN`` gave them.

        Args:
            ids_BN: int64, the block as the forward saw it.
            live_BN: bool, as `live` said.
            logits_RV: fp32, of the live rows.
            rows_R: int64, their numbers among the B x N rows, ascending.

        Returns:
            The block's tokens now ``[B,N]`` int64, and the probability of the token that was drawn for each live row,
            1 for the others: ``[B,N]`` fp32.
        """

    def draw(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """A token for each live row, and its probability: ``[R]`` each."""
        s = self.settings
        return sample_tokens(logits_RV, s.temperature, s.top_k, s.top_p, self.generator)

    def draw_rows(self, ids_BN: Tensor, logits_RV: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        """The block with a token drawn for each live row, and the tokens' probabilities (else 1): ``[B,N]`` each."""
        tokens_R, confidence_R = self.draw(logits_RV)
        ones_BN = torch.ones(ids_BN.shape, dtype=torch.float32, device=ids_BN.device)
        return scatter_rows(ids_BN, rows_R, tokens_R), scatter_rows(ones_BN, rows_R, confidence_R)


def scatter_rows(values_BN: Tensor, rows_R: Tensor, values_R: Tensor) -> Tensor:
    """A copy of ``values_BN`` with the values of the rows ``rows_R`` replaced."""
    return values_BN.flatten().index_copy(0, rows_R, values_R.to(rows_R.device)).view_as(values_BN)


class UnmaskRule(BlockRule):
    """LLaDA2.0: masks become tokens, and tokens stay.

    Live are the masks. An iteration commits every row above the threshold, and at least its share of the schedule. A
    sequence is done when no mask is left, after as many iterations as the schedule has, or, with `stop_in_block`, when
    an end id was just committed and no mask is left before it.
    """

    def live(self, ids_BN: Tensor) -> Tensor:
        """Masks of the sequences that are not done."""
        return (ids_BN == self.settings.mask_id) & (self.left_B1 > 0)

    def commit(self, ids_BN: Tensor, live_BN: Tensor, logits_RV: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        """The block's tokens now, and the probability of each drawn one: ``[B,N]`` each."""
        tokens_BN, confidence_BN = self.draw_rows(ids_BN, logits_RV, rows_R)
        need = self.settings.schedule[self.step]
        chosen_BN = choose_rows(confidence_BN, live_BN, need, self.settings.threshold)
        new_BN = torch.where(chosen_BN, tokens_BN, ids_BN)
        self.left_B1 = (live_BN & (new_BN == self.settings.mask_id)).sum(dim=1, keepdim=True)
        self.step += 1
        if self.step == len(self.settings.schedule):
            self.left_B1 = torch.zeros_like(self.left_B1)
        elif self.settings.stop_in_block:
            self.left_B1 = self.left_B1.masked_fill(self._ended(new_BN, chosen_BN), 0)
        return new_BN, confidence_BN

    def _ended(self, new_BN: Tensor, chosen_BN: Tensor) -> Tensor:
        """``[B,1]`` bool: an end id was just committed, and the answer has one without masks before it."""
        ids_BW = torch.cat([self.canvas.ids_BW[:, : self.begin], new_BN], dim=1)
        answer_BW = self.canvas.answer(0, self.end)
        is_end_BW = torch.zeros_like(answer_BW)
        for eos_id in self.settings.eos_ids:
            is_end_BW |= ids_BW == eos_id
        is_end_BW &= answer_BW
        masks_before_BW = ((ids_BW == self.settings.mask_id) & answer_BW).cumsum(dim=1)
        just_B1 = (is_end_BW[:, self.begin :] & chosen_BN).any(dim=1, keepdim=True)
        return just_B1 & (is_end_BW & (masks_before_BW == 0)).any(dim=1, keepdim=True)


class EditingRule(BlockRule):
    """What the rules of LLaDA2.1 and LLaDA2.2 share: every row behind the prompt may change, so every one is live."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.answer_BN = self.canvas.answer(self.begin, self.end)
        self.post_B1 = torch.zeros_like(self.left_B1)

    def live(self, ids_BN: Tensor) -> Tensor:
        """All rows behind the prompt, of the sequences that are not done."""
        return self.answer_BN & (self.left_B1 > 0)

    def edited(self, ids_BN: Tensor, tokens_BN: Tensor, confidence_BN: Tensor, live_BN: Tensor) -> Tensor:
        """``[B,N]`` bool: tokens for which another one is now above the editing threshold (token to token)."""
        assert self.settings.editing_threshold is not None
        confident_BN = confidence_BN > self.settings.editing_threshold
        return live_BN & (ids_BN != self.settings.mask_id) & (tokens_BN != ids_BN) & confident_BN


class RewriteRule(EditingRule):
    """LLaDA2.1: masks become tokens (mask to token), and tokens may become others (token to token).

    An iteration commits every mask above the threshold, at least `num_to_transfer`; there is no schedule. A sequence is
    done after an iteration that found no mask and rewrote nothing, or after `max_post_steps` that found no mask.
    """

    def commit(self, ids_BN: Tensor, live_BN: Tensor, logits_RV: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        """The block's tokens now, and the probability of each drawn one: ``[B,N]`` each."""
        s = self.settings
        tokens_BN, confidence_BN = self.draw_rows(ids_BN, logits_RV, rows_R)
        masked_BN = live_BN & (ids_BN == s.mask_id)
        chosen_BN = choose_rows(confidence_BN, masked_BN, s.num_to_transfer, s.threshold)
        edited_BN = self.edited(ids_BN, tokens_BN, confidence_BN, live_BN)
        new_BN = torch.where(chosen_BN | edited_BN, tokens_BN, ids_BN)
        full_B1 = ~masked_BN.any(dim=1, keepdim=True)
        self.post_B1 = self.post_B1 + full_B1
        now_full_B1 = ~(live_BN & (new_BN == s.mask_id)).any(dim=1, keepdim=True)
        done_B1 = (full_B1 & ~edited_BN.any(dim=1, keepdim=True)) | (now_full_B1 & (self.post_B1 >= s.max_post_steps))
        if s.temperature == 0.0:
            # Only masks that were filled with the mask id can leave a block with masks as it was, and greedy decoding
            # would repeat that for ever.
            done_B1 = done_B1 | (new_BN == ids_BN).all(dim=1, keepdim=True)
        self.step += 1
        if self.step == MAX_ITERATIONS:
            done_B1 = torch.ones_like(done_B1)
        self.left_B1 = self.left_B1.masked_fill(done_B1, 0)
        return new_BN, confidence_BN
