"""Small reasoning problems with exact answers, for training and judging tiny checkpoints.

Every answer is worked out step by step, and each step needs the result of the one before it. Numbers are not padded, so
a later token's position depends on earlier results too. A block-diffusion decoder therefore commits a few tokens per
forward on them, as it does on real text, instead of filling a block at once.

The text is lower case: words, digits, spaces and marks. Held-out problems never appear in the training split: a
checksum of the prompt decides which split owns it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

EOS_TOKEN = "<eos>"

_HELD_OUT_PER_100 = 10

NAMES = {
    "tom": "he", "sam": "he", "max": "he", "ben": "he", "leo": "he",
    "ann": "she", "eva": "she", "mia": "she", "zoe": "she", "ida": "she",
}  # fmt: skip
OBJECTS = ("apples", "books", "coins", "eggs", "pens", "cups", "stones", "cards")
GAINS = ("buys", "finds", "gets", "makes")
LOSSES = ("eats", "loses", "sells", "breaks")


@dataclass(frozen=True)
class Problem:
    """One problem: `answer` is the only text that counts as right after `prompt`; None: nobody knows it."""

    kind: str
    prompt: str
    answer: str | None


Judge = Callable[[Problem, str], bool]
"""Says whether a text is a right answer to a problem."""


def _draw_terms(rng: random.Random, start: int, count: int, top: int) -> list[int]:
    """`count` signed one-digit terms that keep every partial result of `start + ...` within 0..top."""
    terms: list[int] = []
    value = start
    for _ in range(count):
        term = rng.randint(1, 9) * rng.choice((1, -1))
        if not 0 <= value + term <= top:
            term = -term
        terms.append(term)
        value += term
    return terms


def _worked(start: int, terms: Sequence[int]) -> tuple[str, int]:
    """Every partial result in one line, such as `7+5=12-3=9`, and the last one."""
    line, value = f"{start}", start
    for term in terms:
        value += term
        line += f"{term:+d}={value}"
    return line, value


def _sum(rng: random.Random) -> tuple[str, str]:
    first, *rest = (rng.randint(1, 6) for _ in range(rng.randint(4, 5)))
    line, total = _worked(first, rest)
    return f"sum {first} {' '.join(map(str, rest))}:", f"{line} so {total}"


def _chain(rng: random.Random, most: int = 7, least: int = 6, top: int = 19) -> tuple[str, str]:
    first = rng.randint(1, 9)
    terms = _draw_terms(rng, first, rng.randint(least, most), top)
    values = [first + sum(terms[:i]) for i in range(len(terms) + 1)]
    return f"work out {first}{''.join(f'{term:+d}' for term in terms)}:", " ".join(map(str, values))


def _totals(rng: random.Random) -> tuple[str, str]:
    numbers = [rng.randint(1, 5) for _ in range(rng.randint(7, 10))]
    totals = [sum(numbers[: i + 1]) for i in range(len(numbers))]
    return f"totals of {' '.join(map(str, numbers))}:", " ".join(map(str, totals))


def _story(rng: random.Random) -> tuple[str, str]:
    name, thing = rng.choice(tuple(NAMES)), rng.choice(OBJECTS)
    first = rng.randint(1, 9)
    terms = _draw_terms(rng, first, rng.randint(3, 4), top=19)
    events = "".join(f" {NAMES[name]} {rng.choice(GAINS if t > 0 else LOSSES)} {abs(t)}." for t in terms)
    line, value = _worked(first, terms)
    return f"{name} has {first} {thing}.{events} how many {thing}?", f"{line} so {name} has {value}."


def _sort(rng: random.Random) -> tuple[str, str]:
    digits = rng.sample(range(10), rng.randint(6, 8))
    return f"sort {' '.join(map(str, digits))}:", " ".join(map(str, sorted(digits)))


def _reverse(rng: random.Random) -> tuple[str, str]:
    digits = [rng.randint(0, 9) for _ in range(rng.randint(7, 9))]
    return f"reverse {' '.join(map(str, digits))}:", " ".join(map(str, reversed(digits)))


def _repeats(rng: random.Random) -> tuple[str, str]:
    digits = [rng.randint(0, 9) for _ in range(rng.randint(7, 8))]
    return f"sort {' '.join(map(str, digits))}:", " ".join(map(str, sorted(digits)))


Maker = Callable[[random.Random], tuple[str, str]]
_MAKERS: dict[str, tuple[float, Maker]] = {
    "sum": (0.02, _sum),
    "chain": (0.86, _chain),
    "totals": (0.02, _totals),
    "story": (0.06, _story),
    "sort": (0.02, _sort),
    "reverse": (0.02, _reverse),
}
KINDS = tuple(_MAKERS)
# One step beyond what the tiny checkpoints were trained on: they solve some of them. Drawn only where they are named.
_MAKERS |= {
    "longer": (0.5, lambda rng: _chain(rng, most=8, least=8)),
    "higher": (0.3, lambda rng: _chain(rng, top=29)),
    "repeats": (0.2, _repeats),
}
HARDER = tuple(kind for kind in _MAKERS if kind not in KINDS)


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out split. A checksum, because `hash()` is salted anew in every process."""
    return zlib.crc32(prompt.encode()) % 100 < _HELD_OUT_PER_100


def generate_problems(n: int, seed: int, kinds: Sequence[str] | None = None, split: str = "held_out") -> list[Problem]:
    """`n` problems, the same for the same arguments, drawn from `kinds` in their fixed proportions.

    Args:
        n: how many problems.
        seed: seed of the generator.
        kinds: names out of `KINDS` and `HARDER`; by default those of `KINDS`.
        split: "held_out" or "train". No prompt is ever in both.
    """
    if split not in ("held_out", "train"):
        raise ValueError(f'split must be "held_out" or "train", got {split!r}')
    kinds = KINDS if kinds is None else tuple(kinds)
    unknown = [kind for kind in kinds if kind not in _MAKERS]
    if unknown or not kinds:
        raise ValueError(f"kinds must name at least one of {(*KINDS, *HARDER)}, got {kinds!r}")
    rng = random.Random(seed)
    weights = [_MAKERS[kind][0] for kind in kinds]
    problems: list[Problem] = []
    while len(problems) < n:
        kind = rng.choices(kinds, weights)[0]
        prompt, answer = _MAKERS[kind][1](rng)
        # A problem of the other split is dropped, and the next one drawn from all kinds: the split favours none.
        if is_held_out(prompt) == (split == "held_out"):
            problems.append(Problem(kind, prompt, answer))
    return problems


def check(problem: Problem, text: str) -> bool:
    """Whether generated `text`, cut at the first end-of-sequence token, is exactly the problem's answer."""
    return text.split(EOS_TOKEN, 1)[0] == problem.answer
