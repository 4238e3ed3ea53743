"""LLaDA2.2's joint decoding: the model may also write DELETE and SPLIT, which move the tokens behind them.

Both are ordinary ids of the vocabulary. Written into a row, DELETE drops the row, and SPLIT puts a mask in front of the
token that the row held before. The block keeps its length: what is pushed out at its end is lost, what is missing there
is masks. Masks that edits brought in do not count as *original* ones.

The released loop escapes from cycles at a random position; here the choice is deterministic (see `JointRule`).

Shape suffixes: B sequences, N rows of the block, R live rows, V vocabulary, I earlier iterations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.decoding.rules import MAX_ITERATIONS, EditingRule, choose_rows, scatter_rows

ESCAPES = 5
"""Changed rows at most that get another token where a block would come back to a state it had before."""


def apply_edits(
    written_BN: Tensor,
    before_BN: Tensor,
    original_BN: Tensor,
    movable_BN: Tensor,
    *,
    mask_id: int,
    delete_id: int,
    split_id: int,
) -> tuple[Tensor, Tensor]:
    """Consume the DELETE and SPLIT ids that were just written.

    Args:
        written_BN: int64, the block with these ids in it.
        before_BN: int64, the block before they were written.
        original_BN: bool, rows that were masks when the block began.
        movable_BN: bool, rows whose DELETE or SPLIT counts; elsewhere these ids are plain tokens (a prompt's).
        mask_id, delete_id, split_id: the special ids.

    Returns:
        The block's tokens and its original rows, ``[B,N]`` each. A row that SPLIT moved stays what it was, the mask in
        front of it and the masks at the end are not original.
    """
    num_rows = written_BN.shape[1]
    delete_BN, split_BN = movable_BN & (written_BN == delete_id), movable_BN & (written_BN == split_id)
    takes_BN = 1 + split_BN.long() - delete_BN.long()  # slots that each row takes: 0, 1 or 2
    ends_BN = takes_BN.cumsum(dim=1)
    slot_BN = torch.arange(num_rows, device=written_BN.device).expand_as(written_BN).contiguous()
    source_BN = torch.searchsorted(ends_BN, slot_BN, right=True)
    beyond_BN = source_BN == num_rows
    source_BN = source_BN.clamp_max(num_rows - 1)
    split_BN = split_BN.gather(1, source_BN)
    # A split row's second slot ends where the row ends.
    inserted_BN = split_BN & (slot_BN + 1 < ends_BN.gather(1, source_BN))
    tokens_BN = torch.where(split_BN, before_BN.gather(1, source_BN), written_BN.gather(1, source_BN))
    fresh_BN = inserted_BN | beyond_BN
    return tokens_BN.masked_fill(fresh_BN, mask_id), original_BN.gather(1, source_BN) & ~fresh_BN


class JointRule(EditingRule):
    """LLaDA2.2: mask to token, token to token, and edits that move tokens.

    Per iteration:

    * Masks: all above the threshold, but at least the schedule's share of the masks that the block began with and as
      many as edits brought in; all masks once the schedule is through.
    * Tokens: as in LLaDA2.1. Either may write DELETE or SPLIT.
    * The *final round* of a sequence, in its `max_post_steps`-th iteration in a row without an original mask (with
      ``max_post_steps=0``: in the one that fills the last of these), fills all masks and writes no DELETE and no SPLIT.
    * A block that would come back to a state it had before gets other tokens in up to `ESCAPES` of the rows that just
      changed, the least confident first: the best token but one (greedy), or another draw without the first.
    * Then DELETE and SPLIT are consumed.

    A sequence is done after an iteration that found no mask and left the block as it was, or after its final round. The
    mask id is never drawn (the released loop does not forbid it), so the final round leaves no mask.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # Masks fill the block behind the prompt when it begins.
        self.original_BN, self.initial_B1 = self.answer_BN, self.left_B1
        self.seen: list[Tensor] = []

    def commit(self, ids_BN: Tensor, live_BN: Tensor, logits_RV: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        """The block's tokens now, and the probability of each drawn one: ``[B,N]`` each."""
        s = self.settings
        assert s.delete_id is not None and s.split_id is not None
        logits_RV = without(logits_RV, s.mask_id)
        tokens_BN, confidence_BN = self.draw_rows(ids_BN, logits_RV, rows_R)
        tokens_R = tokens_BN.flatten()[rows_R]

        masked_BN = live_BN & (ids_BN == s.mask_id)
        original_BN = masked_BN & self.original_BN
        self.post_B1 = torch.where(original_BN.any(dim=1, keepdim=True), 0, self.post_B1 + 1)
        chosen_BN = self._masks_to_fill(masked_BN, original_BN, confidence_BN)
        edited_BN = self.edited(ids_BN, tokens_BN, confidence_BN, live_BN)
        final_B1 = self._is_final(original_BN, chosen_BN)
        chosen_BN = torch.where(final_B1, masked_BN, chosen_BN)
        if s.max_post_steps <= self.step + 1 or self.step + 1 == MAX_ITERATIONS:  # no final round can come before
            plain_R, _ = self.draw(without(logits_RV, s.delete_id, s.split_id))
            is_edit_BN = (tokens_BN == s.delete_id) | (tokens_BN == s.split_id)
            tokens_BN = torch.where(final_B1 & is_edit_BN, scatter_rows(tokens_BN, rows_R, plain_R), tokens_BN)
        written_BN = torch.where(chosen_BN | edited_BN, tokens_BN, ids_BN)
        if self.seen:
            other_RV = logits_RV.scatter(1, tokens_R.unsqueeze(1), float("-inf"))
            other_BN = scatter_rows(tokens_BN, rows_R, self.draw(other_RV)[0])
            written_BN = self._escape(ids_BN, written_BN, other_BN, confidence_BN, final_B1)
        self.seen.append(written_BN)

        moved_BN = live_BN & ((written_BN == s.delete_id) | (written_BN == s.split_id))
        new_BN, self.original_BN = apply_edits(
            written_BN, ids_BN, self.original_BN, live_BN,
            mask_id=s.mask_id, delete_id=s.delete_id, split_id=s.split_id,
        )  # fmt: skip
        stable_B1 = ((new_BN == ids_BN) & ~masked_BN).all(dim=1, keepdim=True)
        now_full_B1 = ~(live_BN & (new_BN == s.mask_id)).any(dim=1, keepdim=True)
        # Edits may push the last original mask out of the block: then no final round comes with max_post_steps=0.
        done_B1 = stable_B1 | final_B1 | (now_full_B1 & (self.post_B1 >= s.max_post_steps))
        self.step += 1
        self.left_B1, self.moved_B1 = self.left_B1.masked_fill(done_B1, 0), moved_BN.any(dim=1, keepdim=True)
        return new_BN, confidence_BN

    def _masks_to_fill(self, masked_BN: Tensor, original_BN: Tensor, confidence_BN: Tensor) -> Tensor:
        """``[B,N]`` bool: the masks that this iteration fills, before the final round's."""
        steps = len(self.settings.schedule)
        if self.step >= steps:
            return masked_BN
        share_B1 = self.initial_B1 // steps + (self.step < self.initial_B1 % steps)
        need_B1 = share_B1 + (masked_BN & ~original_BN).sum(dim=1, keepdim=True)
        return choose_rows(confidence_BN, masked_BN, need_B1, self.settings.threshold)

    def _is_final(self, original_BN: Tensor, chosen_BN: Tensor) -> Tensor:
        """``[B,1]`` bool: sequences in their final round."""
        if self.step + 1 == MAX_ITERATIONS:
            return torch.ones_like(self.post_B1, dtype=torch.bool)
        if self.settings.max_post_steps > 0:
            return self.post_B1 >= self.settings.max_post_steps
        left_BN = original_BN & ~chosen_BN
        return original_BN.any(dim=1, keepdim=True) & ~left_BN.any(dim=1, keepdim=True)

    def _escape(
        self, ids_BN: Tensor, written_BN: Tensor, other_BN: Tensor, confidence_BN: Tensor, final_B1: Tensor
    ) -> Tensor:
        """The block, with other tokens in changed rows as long as it is one that was seen before."""
        changed_BN = written_BN != ids_BN
        order_BN = confidence_BN.masked_fill(~changed_BN, float("inf")).argsort(dim=1, stable=True)
        rank_BN = order_BN.argsort(dim=1)
        seen_IBN = torch.stack(self.seen)
        for attempt in range(min(ESCAPES, ids_BN.shape[1])):
            seen_B1 = (seen_IBN == written_BN).all(dim=-1, keepdim=True).any(dim=0)
            again_BN = seen_B1 & ~final_B1 & changed_BN & (rank_BN == attempt)
            written_BN = torch.where(again_BN, other_BN, written_BN)
        return written_BN


def without(logits_RV: Tensor, *ids: int) -> Tensor:
    """A copy of the logits in which these ids cannot be drawn."""
    logits_RV = logits_RV.clone()
    for token_id in ids:
        logits_RV[:, token_id] = float("-inf")
    return logits_RV
