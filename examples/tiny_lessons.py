"""The lessons of the tiny checkpoint's curriculum. What is judged, `epoch_moe.problems`, is a part of the last one.

Lesson 0 has larger numbers and longer answers than the problems that are judged, lesson 1 smaller numbers, and in
lesson 2 stories no longer name their object at the end. These three repeat a result before the next step uses it, and
have trades, which a model of this size does not learn to do reliably. Lesson 3 chains the steps, and differs from what
is judged in that it also spells out the operands of `work out`. Lesson 4 has the judged kinds in more even shares, and
longer `work out` problems among them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from epoch_moe.problems import _MAKERS as JUDGED_MAKERS
from epoch_moe.problems import (
    GAINS,
    LOSSES,
    NAMES,
    OBJECTS,
    Problem,
    _draw_terms,
    _worked,
    is_held_out,
)
from epoch_moe.problems import _chain as _chain_of_results

_Maker = Callable[[random.Random, int], tuple[str, str]]


def _steps(start: int, terms: list[int]) -> tuple[list[str], int]:
    """Each step written out, such as `12-3=9`, and the last result."""
    steps: list[str] = []
    value = start
    for term in terms:
        steps.append(f"{value}{term:+d}={value + term}")
        value += term
    return steps, value


def _sum(rng: random.Random, lesson: int) -> tuple[str, str]:
    first, *rest = (rng.randint(1, 9 if lesson == 0 else 6) for _ in range(rng.randint(4, 6 if lesson == 0 else 5)))
    steps, total = _steps(first, rest)
    return f"sum {first} {' '.join(map(str, rest))}:", f"{' '.join(steps)} so {total}"


def _chain(rng: random.Random, lesson: int) -> tuple[str, str]:
    first = rng.randint(1, 9)
    terms = _draw_terms(rng, first, rng.randint(4, 8), 99 if lesson == 0 else 19)
    answer, value = f"{first}", first
    for term in terms:
        value += term
        answer += f"{term:+d}={value}"
    return f"work out {first}{''.join(f'{t:+d}' for t in terms)}:", answer


def _totals(rng: random.Random, lesson: int) -> tuple[str, str]:
    numbers = [rng.randint(1, 9 if lesson == 0 else 3) for _ in range(rng.randint(7, 12))]
    while sum(numbers) > 99:
        numbers.pop()
    totals = [sum(numbers[: i + 1]) for i in range(len(numbers))]
    return f"totals of {' '.join(map(str, numbers))}:", " ".join(map(str, totals))


def _story(rng: random.Random, lesson: int) -> tuple[str, str]:
    name, thing = rng.choice(tuple(NAMES)), rng.choice(OBJECTS)
    first = rng.randint(1, 9)
    terms = _draw_terms(rng, first, rng.randint(2, 4), 99 if lesson == 0 else 19)
    events = "".join(f" {NAMES[name]} {rng.choice(GAINS if t > 0 else LOSSES)} {abs(t)}." for t in terms)
    steps, value = _steps(first, terms)
    end = "" if lesson == 2 else f" {thing}"
    return f"{name} has {first} {thing}.{events} how many {thing}?", f"{' '.join(steps)} so {name} has {value}{end}."


def _trade(rng: random.Random, lesson: int) -> tuple[str, str]:
    giver, taker = rng.sample(tuple(NAMES), 2)
    held = {giver: rng.randint(3, 9), taker: rng.randint(2, 9)}
    prompt = f"{giver} has {held[giver]} and {taker} has {held[taker]} {rng.choice(OBJECTS)}."
    names, steps = (giver, taker), []
    for _ in range(rng.randint(2, 3 if lesson == 0 else 2)):
        if rng.random() < 0.5 or held[giver] == 0:
            giver, taker = taker, giver
        if held[giver] == 0:
            giver, taker = taker, giver
        count = rng.randint(1, min(9, held[giver]))
        prompt += f" {giver} gives {taker} {count}."
        steps.append(f"{giver} {held[giver]}-{count}={held[giver] - count}")
        steps.append(f"{taker} {held[taker]}+{count}={held[taker] + count}")
        held[giver] -= count
        held[taker] += count
    result = " ".join(f"{name} {held[name]}" for name in names)
    return f"{prompt} who has what?", f"{' '.join(steps)} so {result}"


def _sort(rng: random.Random, lesson: int) -> tuple[str, str]:
    digits = [rng.randint(0, 9) for _ in range(rng.randint(7, 11 if lesson == 0 else 9))]
    return f"sort {' '.join(map(str, digits))}:", " ".join(map(str, sorted(digits)))


def _reverse(rng: random.Random, lesson: int) -> tuple[str, str]:
    digits = [rng.randint(0, 9) for _ in range(rng.randint(7, 11 if lesson == 0 else 9))]
    return f"reverse {' '.join(map(str, digits))}:", " ".join(map(str, reversed(digits)))


_MAKERS: dict[str, tuple[float, _Maker]] = {
    "sum": (0.20, _sum),
    "chain": (0.20, _chain),
    "totals": (0.20, _totals),
    "story": (0.20, _story),
    "trade": (0.10, _trade),
    "sort": (0.06, _sort),
    "reverse": (0.04, _reverse),
}


def _worked_chain(rng: random.Random, lesson: int) -> tuple[str, str]:
    first = rng.randint(1, 9)
    terms = _draw_terms(rng, first, rng.randint(4, 8), top=19)
    return f"work out {first}{''.join(f'{term:+d}' for term in terms)}:", _worked(first, terms)[0]


def _final(kind: str) -> _Maker:
    return lambda rng, lesson: JUDGED_MAKERS[kind][1](rng)


_WORKED_MAKERS: dict[str, tuple[float, _Maker]] = {
    "sum": (0.06, _final("sum")),
    "chain": (0.28, _worked_chain),
    "totals": (0.36, _final("totals")),
    "story": (0.20, _final("story")),
    "sort": (0.06, _final("sort")),
    "reverse": (0.04, _final("reverse")),
}


_MIXED_MAKERS: dict[str, tuple[float, _Maker]] = {
    "sum": (0.05, _final("sum")),
    "chain": (0.50, lambda rng, lesson: _chain_of_results(rng, most=10)),
    "totals": (0.10, _final("totals")),
    "story": (0.25, _final("story")),
    "sort": (0.05, _final("sort")),
    "reverse": (0.05, _final("reverse")),
}


def lesson_problems(n: int, seed: int, lesson: int) -> list[Problem]:
    """`n` training problems of a lesson, 0 to 4."""
    makers = (_MAKERS, _MAKERS, _MAKERS, _WORKED_MAKERS, _MIXED_MAKERS)[lesson]
    rng = random.Random(seed)
    kinds, weights = tuple(makers), [weight for weight, _ in makers.values()]
    problems: list[Problem] = []
    while len(problems) < n:
        kind = rng.choices(kinds, weights)[0]
        prompt, answer = makers[kind][1](rng, lesson)
        if not is_held_out(prompt):
            problems.append(Problem(kind, prompt, answer))
    return problems
