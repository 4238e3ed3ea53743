"""LSP row by row in plain python, as the design page describes it, and random decodes to try it on."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

MASK = 99


@dataclass
class Expectation:
    """What one forward must do, as (sequence, row of the forward) pairs."""

    fresh: set[tuple[int, int]] = field(default_factory=set)
    reused: set[tuple[int, int]] = field(default_factory=set)
    restricted: set[tuple[int, int]] = field(default_factory=set)
    stored: set[tuple[int, int]] = field(default_factory=set)
    joining: set[tuple[int, int]] = field(default_factory=set)
    voting: set[tuple[int, int]] = field(default_factory=set)


@dataclass
class Oracle:
    """One block. `held[b][n]` is the token that row n's cached output was computed for, or None."""

    batch: int
    window: int
    prefix: int
    constant: bool
    interval: int | None
    restrict_new: bool
    future: int = 0
    dormant: bool = False
    number: int = 0
    held: dict[tuple[int, int], int] = field(default_factory=dict)

    def forward(self, ids: list[list[int]], lead: int, valid: list[list[bool]]) -> Expectation:
        want = Expectation()
        cold = self.number == 0
        refresh = self.interval is not None and self.number % self.interval == 0
        for b in range(self.batch):
            for s in range(lead + self.window):
                if not valid[b][s]:
                    self.held.pop((b, s - lead), None)  # a row that was not there starts anew
                    continue
                n = s - lead
                if n < 0:
                    want.fresh.add((b, s))
                    continue
                token = ids[b][s]
                in_block = self.prefix <= n < self.window - self.future
                awake = n >= self.window - self.future and not self.dormant
                live = token == MASK and in_block
                held = self.held.get((b, n)) == token
                # A refresh on every forward spares nothing (exact settings).
                spared = self.constant and n < self.prefix and self.interval != 1
                full = cold or (refresh and not spared)
                if full or live or awake or not held:
                    want.fresh.add((b, s))
                    if not live and not awake:
                        want.stored.add((b, s))
                    if not cold and (live or (self.restrict_new and in_block)):
                        want.restricted.add((b, s))
                    if not cold and in_block and not live and not held and not self.restrict_new:
                        want.joining.add((b, s))
                    if live:
                        want.voting.add((b, s))
                else:
                    want.reused.add((b, s))
        for b in range(self.batch):
            for n in range(self.window - self.future, self.window):
                if not self.dormant:
                    self.held.pop((b, n), None)
        for b, s in want.stored:
            self.held[b, s - lead] = ids[b][s]
        for b, s in want.voting:
            self.held.pop((b, s - lead), None)
        self.number += 1
        return want


@dataclass
class Forward:
    """Inputs of one forward of a random decode."""

    ids: list[list[int]]
    lead: int
    valid: list[list[bool]]


def random_decode(
    rng: random.Random, batch: int, prefix: int, block: int, forwards: int, edits: bool, future: int = 0
) -> list[Forward]:
    """Commits in random order, several at a time; with `edits`, decoded rows change or become MASK again.

    The first rows of a block may hold prompt tokens; finished sequences and padding are invalid; some forwards carry
    lead rows. Rows behind the block are MASK but for a few, as where somebody fills in a canvas.
    """
    window, end = prefix + block + future, prefix + block
    rows = [[rng.randrange(20) for _ in range(window)] for _ in range(batch)]
    done_at = [rng.choice([forwards, forwards, rng.randrange(1, forwards + 1)]) for _ in range(batch)]
    pad = [rng.choice([0, 0, rng.randrange(prefix + 1)]) for _ in range(batch)]
    for b in range(batch):
        for n in range(prefix + rng.choice([0, 0, block // 3]), window):
            rows[b][n] = MASK if n < end or rng.random() < 0.9 else rng.randrange(20)
    out = []
    for number in range(forwards):
        lead = rng.choice([0, 0, 3]) if number else rng.choice([0, 4])
        valid = [[n >= pad[b] if n < prefix else number < done_at[b] for n in range(window)] for b in range(batch)]
        lead_rows = [[rng.randrange(20) for _ in range(lead)] for _ in range(batch)]
        out.append(
            Forward(
                [lead_rows[b] + list(rows[b]) for b in range(batch)],
                lead,
                [[rng.random() < 0.9 for _ in range(lead)] + valid[b] for b in range(batch)],
            )
        )
        for b in range(batch):
            for n in range(prefix, window if edits else end):
                if rows[b][n] == MASK:
                    if rng.random() < 0.3:
                        rows[b][n] = rng.randrange(20)
                elif edits and rng.random() < 0.1:
                    rows[b][n] = rng.choice([MASK, rng.randrange(20)])
            if edits and prefix and rng.random() < 0.1:  # an unmasked cache lets earlier rows change as well
                rows[b][rng.randrange(prefix)] = rng.randrange(20)
    return out
