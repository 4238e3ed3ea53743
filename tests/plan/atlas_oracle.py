"""ATLAS in plain python loops, as the design page describes it. Scores are lists of floats; a support is a set."""

from __future__ import annotations

from epoch_moe.routing import RouterSpec

Row = list[float]


def _kept_groups(row: Row, spec: RouterSpec, support: set[int]) -> list[int]:
    """The surviving groups of a row that may use the experts in `support` only."""
    members = [range(g * spec.group_size, (g + 1) * spec.group_size) for g in range(spec.n_group)]
    value = [sum(sorted((row[e] for e in own), reverse=True)[:2]) for own in members]
    ranked = sorted(range(spec.n_group), key=lambda g: -value[g])
    kept = ranked[: spec.topk_group]
    if sum(e in support for g in kept for e in members[g]) < spec.top_k:
        kept = [g for g in ranked if any(e in support for e in members[g])][: spec.topk_group]
    return kept


def choose(row: Row, spec: RouterSpec, support: set[int] | None = None) -> list[int]:
    """A row's top-k inside a support; fewer where fewer are usable."""
    support = set(range(spec.num_experts)) if support is None else support
    usable = set(support)
    if spec.kind == "sigmoid_group" and spec.topk_group < spec.n_group:
        kept = _kept_groups(row, spec, support)
        usable = {e for e in support if e // spec.group_size in kept}
    return sorted(usable, key=lambda e: -row[e])[: spec.top_k]


def candidates(selection: Row, combine: Row, spec: RouterSpec, factor: int) -> dict[int, float]:
    """A row's candidate experts with their combine weights: the best of its own groups."""
    kept = range(spec.n_group)
    if spec.kind == "sigmoid_group":
        kept = _kept_groups(selection, spec, set(range(spec.num_experts)))  # type: ignore[assignment]
    own = [e for e in range(spec.num_experts) if e // spec.group_size in kept]
    return {e: combine[e] for e in sorted(own, key=lambda e: -selection[e])[: factor * spec.top_k]}


def covered(cand: dict[int, float], support: set[int], top_k: int) -> float:
    return sum(sorted((w for e, w in cand.items() if e in support), reverse=True)[:top_k])


def atlas(
    selection: list[Row],
    combine: list[Row],
    votes: list[bool],
    spec: RouterSpec,
    coverage: float,
    factor: int,
) -> set[int]:
    """The support of one group of rows."""
    rows = [i for i, vote in enumerate(votes) if vote]
    if not rows:
        return set(range(spec.num_experts))
    natural = {i: choose(selection[i], spec) for i in rows}
    if coverage >= 1.0:
        return {e for ids in natural.values() for e in ids}
    cand = {i: candidates(selection[i], combine[i], spec, factor) for i in rows}
    target = {i: coverage * sum(combine[i][e] for e in natural[i]) for i in rows}
    total = {e: sum(c.get(e, 0.0) for c in cand.values()) for e in range(spec.num_experts)}

    support = {ids[0] for ids in natural.values()}
    ranking = iter(sorted(total, key=lambda e: (-total[e], e)))
    while sum(covered(cand[i], support, spec.top_k) for i in rows) < sum(target.values()):
        support.add(next(ranking))

    while True:
        deficit = {i: target[i] - covered(cand[i], support, spec.top_k) for i in rows}
        deficit = {i: d for i, d in deficit.items() if d > 1e-6 * target[i]}
        if not deficit:
            break
        gain = {
            e: sum(min(cand[i].get(e, 0.0), d) for i, d in deficit.items())
            for e in range(spec.num_experts)
            if e not in support
        }
        support.add(max(gain, key=lambda e: (round(gain[e], 6), -e)))

    short = [i for i in rows if len(choose(selection[i], spec, support)) < spec.top_k]
    return support | {e for i in short for e in natural[i]}
