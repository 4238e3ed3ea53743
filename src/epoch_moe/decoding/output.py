"""What `generate` returns.

Shape suffixes: B sequences, A tokens of the longest answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockDiffusionOutput:
    """Answers of `generate`, and what they cost.

    Attributes:
        sequences: ``[B,A]`` int64, the answers without their prompts, each up to and including its end id; shorter
            answers are filled with the config's `pad_token_id` (its end id where it has none).
        lengths: tokens of each answer.
        finish_reasons: per answer, ``"eos"`` or ``"length"``.
        forwards: denoising forwards of the batch.
        prefill_forwards: forwards that only wrote K/V of long prompts.
        counters: what the block plan counted, or None.
    """

    sequences: Tensor
    lengths: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    forwards: int
    prefill_forwards: int
    counters: Any

    @property
    def answers(self) -> tuple[Tensor, ...]:
        """The answers ``[length]`` without padding."""
        return tuple(row[:length] for row, length in zip(self.sequences, self.lengths, strict=True))

    @property
    def tokens_per_forward(self) -> float:
        """Tokens of all answers per denoising forward."""
        return sum(self.lengths) / self.forwards if self.forwards else 0.0


class AnswerLog:
    """Collects the answers of a batch block by block, on the host.

    Args:
        batch: sequences.
        gen_length: an answer stops after that many tokens.
        eos_ids: an answer stops with the first of these.
    """

    def __init__(self, batch: int, gen_length: int, eos_ids: tuple[int, ...]):
        self.gen_length = gen_length
        self.eos_ids = frozenset(eos_ids)
        self.answers: list[list[int]] = [[] for _ in range(batch)]
        self.reasons: list[str] = ["length"] * batch

    def add(self, sequence: int, block: list[int]) -> list[int]:
        """Append a finished block's tokens behind the prompt.

        Returns:
            The tokens that belong to the answer: those up to the first end id and up to `gen_length`; none of a
            finished one.
        """
        if self.finished(sequence):
            return []
        taken = block[: self.gen_length - len(self.answers[sequence])]
        end = next((place for place, token in enumerate(taken) if token in self.eos_ids), None)
        if end is not None:
            taken = taken[: end + 1]
            self.reasons[sequence] = "eos"
        self.answers[sequence] += taken
        return taken

    def finished(self, sequence: int) -> bool:
        """Whether the answer is complete."""
        return self.reasons[sequence] == "eos" or len(self.answers[sequence]) >= self.gen_length

    def output(self, pad_id: int, device: torch.device, **costs: Any) -> BlockDiffusionOutput:
        """The output object; `costs` are its fields about forwards and counters."""
        lengths = tuple(len(answer) for answer in self.answers)
        padded = [answer + [pad_id] * (max(lengths) - len(answer)) for answer in self.answers]
        return BlockDiffusionOutput(
            sequences=torch.tensor(padded, dtype=torch.long, device=device),
            lengths=lengths,
            finish_reasons=tuple(self.reasons),
            **costs,
        )
