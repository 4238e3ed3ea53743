"""`PlanReport`: what became of a foreign loop's forwards, and why, in sentences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from epoch_moe.plan.counters import Work

KINDS: dict[str, str] = {
    "request": "a request begins, or another one takes its turn: every row computed",
    "block": "the next block begins: every row computed",
    "iteration": "the block goes on: rows that changed or are undecoded computed",
    "edit": "decoded tokens were replaced: rows that changed or may change computed",
    "remask": "decoded positions are MASK again: every row computed",
    "inputs": "the attention mask or the positions changed: every row computed",
    "repeat": "the same ids as in the forward before: every row computed",
    "model": "weights, adapters, hooks or settings of the model changed since the forward before: every row computed",
    "dense": "the model's own function",
}
"""What was made of a forward."""

REASONS: dict[str, str] = {
    "no_plan": 'the model was patched without a plan ("dense" or None): patch it with a configuration',
    "ranks": "the experts are split over ranks, where loops of others are not followed: use epoch_moe.generate",
    "gradients": "gradients are enabled, and reused rows have none: decode under torch.no_grad()",
    "training": "the model is in training mode: call model.eval()",
    "inputs_embeds": "the loop passes embeddings instead of token ids, so nothing tells which rows are decoded",
    "arguments": "the loop passes an argument of the base model that is not known here, or inputs of unexpected shapes",
    "mask_token_id": "the mask token is not known: the model's config has no mask_token_id, so give following() one",
    "block_length": "where the block begins is not known (yet): give following() the block_length",
    "no_mask": "no position is undecoded, so this is not a decoding step",
    "cache": "the K/V cache is not a transformers Cache object, so its place and length are not known",
    "cache_write": "use_cache=True without a cache: the forward writes the K/V of all its rows for good",
    "cache_copy": "the loop copies its K/V cache on every forward, so it is not known that the copy holds what the "
    "one before held: pass one cache object, and crop it after each forward",
    "commit": "a forward behind the K/V cache without undecoded positions: it writes a finished block's K/V for good",
    "lead": "a forward behind the K/V cache that brings finished rows in front of the block, whose K/V stay",
    "ragged": "the sequences of a fixed canvas are not in the same block",
    "future": "positions behind the current block were decoded",
    "shortfall": "a layer's support held too little of its rows' routing weight: these rows routed freely",
    "version": "a layer missed a forward, or weights, hooks, dtype or device changed: all its rows were computed",
    "shape": "a layer got another number of rows than the plan was made for: it ran dense",
    "revisit": "a layer ran twice in one forward: it ran dense",
    "router_logits": "the caller asked for router logits, which reused rows do not have: the layers ran dense",
}
"""Why a forward ran dense, and (from ``shortfall``) why one layer left its plan."""


@dataclass(frozen=True)
class FollowedForward:
    """One forward of the base model.

    Attributes:
        kind: a key of `KINDS`.
        reason: of a dense one, a key of `REASONS`; else ''.
    """

    kind: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {REASONS[self.reason] if self.reason else KINDS[self.kind]}"


@dataclass(frozen=True)
class PlanReport:
    """What was done in scopes that follow foreign loops.

    Attributes:
        work: what the forwards computed; ``work.fallbacks`` counts by `REASONS`. Forwards that no plan may touch
            (gradients, training, no configuration, ranks) are counted there and nowhere else.
        kinds: how many forwards were taken for what, by `KINDS`.
        forwards: the last ones (256 of a scope), oldest first.
    """

    work: Work
    kinds: dict[str, int]
    forwards: tuple[FollowedForward, ...] = ()

    def __add__(self, other: PlanReport) -> PlanReport:
        kinds = dict(Counter(self.kinds) + Counter(other.kinds))
        return PlanReport(self.work + other.work, kinds, (self.forwards + other.forwards)[-256:])

    def __str__(self) -> str:
        work, total = self.work, self.work.total
        dense_pairs = work.dense_rows * total.pairs / total.rows if total.rows else 0.0
        saved = f"{1 - work.rows / work.dense_rows:.1%}" if work.dense_rows else "none"
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items())) or "none"
        count = sum(self.kinds.values())
        lines = [
            f"epoch_moe: followed {count} forwards ({kinds}); {work.pairs:,} pairs, about {dense_pairs:,.0f} without "
            f"a plan; rows saved {saved}"
        ]
        lines += [f"  {times} x {reason}: {REASONS[reason]}" for reason, times in sorted(work.fallbacks.items())]
        first = count - len(self.forwards) + 1
        for forward, run in groupby(self.forwards):
            last = first + len(list(run)) - 1
            lines.append(f"  forward{f' {first}' if last == first else f's {first} to {last}'}: {forward}")
            first = last + 1
        return "\n".join(lines)
