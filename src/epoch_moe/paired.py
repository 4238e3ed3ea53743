"""Two decodes of the same problems, compared in pairs: what one side lost, with exact bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

LEVEL = 0.95
"""Of every bound here: one-sided, exact for any number of problems."""


def binomial_tail(count: int, draws: int, share: float) -> float:
    """The chance of at least ``count`` hits in ``draws`` independent draws that each hit with the chance ``share``."""
    if count <= 0 or share >= 1.0:
        return 1.0
    if share <= 0.0:
        return 0.0
    hit, miss, all_of = math.log(share), math.log1p(-share), math.lgamma(draws + 1)
    return math.fsum(
        math.exp(all_of - math.lgamma(k + 1) - math.lgamma(draws - k + 1) + k * hit + (draws - k) * miss)
        for k in range(count, draws + 1)
    )


def upper_share(count: int, draws: int) -> float:
    """Clopper and Pearson's upper bound on a share of which ``count`` in ``draws`` were seen; 1 without a draw.

    Of 0 seen it is ``1 - 0.05 ** (1 / draws)``, about ``3 / draws``.
    """
    if not 0 <= count <= draws:
        raise ValueError(f"count={count} of draws={draws}: expected 0 to {draws}")
    if count == draws:
        return 1.0
    low, high = count / draws, 1.0
    for _ in range(60):  # halves the interval; the share at which count or fewer have a chance of 5 %
        middle = (low + high) / 2
        low, high = (middle, high) if 1.0 - binomial_tail(count + 1, draws, middle) > 1.0 - LEVEL else (low, middle)
    return high


def fewest_draws(share: float) -> int:
    """How many draws without a hit it takes to bound a share by ``share``, in (0, 1)."""
    return math.ceil(math.log(1.0 - LEVEL) / math.log1p(-share))


def paired_result(
    dense: Sequence[str], plan: Sequence[str], right: tuple[Sequence[bool], Sequence[bool]] | None
) -> dict[str, Any]:
    """What the plan changed and what it lost against dense, problem by problem.

    Args:
        dense, plan: their texts.
        right: which of them are right, dense first; None: nobody can say.

    Returns:
        ``problems``; ``changed`` (problems with another text), ``changed_share`` and ``changed_bound`` (95 % upper
        bound on the share). With answers: ``only_dense`` and ``only_plan`` (problems that one side alone has right),
        ``loss`` (accuracy lost; below 0 it is won), ``loss_bound`` (95 % upper bound on it, by Clopper and Pearson on
        ``only_dense``: what the plan alone has right is not set against it), and ``loss_chance`` (of so many or more
        of the differing problems going to dense if neither side were better; small: the loss is no accident).
    """
    draws = len(dense)
    changed = sum(a != b for a, b in zip(dense, plan, strict=True))
    result: dict[str, Any] = {
        "problems": draws,
        "changed": changed,
        "changed_share": changed / draws,
        "changed_bound": upper_share(changed, draws),
    }
    if right is not None:
        lost = sum(a and not b for a, b in zip(*right, strict=True))
        won = sum(b and not a for a, b in zip(*right, strict=True))
        result |= {
            "only_dense": lost,
            "only_plan": won,
            "loss": (lost - won) / draws,
            "loss_bound": upper_share(lost, draws),
            "loss_chance": binomial_tail(lost, lost + won, 0.5),
        }
    return result


def paired_text(result: dict[str, Any]) -> str:
    """`paired_result` in sentences."""
    problems = f"of {result['problems']} problems"
    lines = [f"changed answers: {result['changed']} {problems}, at most {result['changed_bound']:.1%} (95 % bound)"]
    if "only_dense" in result:
        lines.insert(
            0,
            f"right only dense: {result['only_dense']}, only with the plan: {result['only_plan']} {problems}; accuracy "
            f"lost: {result['loss']:.1%}, at most {result['loss_bound']:.1%} (95 % bound)",
        )
    return "\n".join(lines)
