"""ATLAS in plain python loops, as the design page describes it. Scores are lists of floats; a support is a set."""

from __future__ import annotations

from epoch_moe.routing import RouterSpec

Row = list[float]


def _kept_groups(row: Row, spec: RouterSpec, support: set[int]) -> list[int]:
    """The surviving groups of a row that may use the experts in `support` only."""
    ranked = []
    for group in range(spec.n_group):
        members = range(group * spec.group_size, (group + 1) * spec.group_size)
        usable = sorted((row[e] for e in members if e in support), reverse=True)
        ranked.append((sum(usable[:2]) if usable else float("-inf"), group))
    return [group for _, group in sorted(ranked, key=lambda item: -item[0])[: spec.topk_group]]


def choose(row: Row, spec: RouterSpec, support: set[int] | None = None) -> list[int]:
    """A row's top-k inside a support; fewer where fewer are usable."""
    support = set(range(spec.num_experts)) if support is None else support
    usable = set(support)
    if spec.kind == "sigmoid_group" and spec.topk_group < spec.n_group:
        kept = _kept_groups(row, spec, support)
        usable = {e for e in support if e // spec.group_size in kept}
    return sorted(usable, key=lambda e: -row[e])[: spec.top_k]


def candidates(selection: Row, combine: Row, spec: RouterSpec, factor: int) -> dict[int, float]:
    """A row's candidate experts with their combine weights: its natural top-k, and the best others."""
    natural = choose(selection, spec)
    others = sorted((e for e in range(spec.num_experts) if e not in natural), key=lambda e: -selection[e])
    width = min(factor * spec.top_k, spec.num_experts)
    return {e: combine[e] for e in [*natural, *others][:width]}


def covered(cand: dict[int, float], support: set[int], top_k: int) -> float:
    return sum(sorted((w for e, w in cand.items() if e in support), reverse=True)[:top_k])


def atlas(
    selection: list[Row], combine: list[Row], votes: list[bool], spec: RouterSpec, coverage: float, factor: int
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
    total = [sum(c.get(e, 0.0) for c in cand.values()) for e in range(spec.num_experts)]

    support = {ids[0] for ids in natural.values()}
    for expert in sorted(range(spec.num_experts), key=lambda e: (-total[e], e)):
        if sum(covered(cand[i], support, spec.top_k) for i in rows) >= sum(target.values()):
            break
        support.add(expert)

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

    while True:
        short = [i for i in rows if len(choose(selection[i], spec, support)) < spec.top_k]
        if not short:
            return support
        wider = support | {e for i in short for e in natural[i]}
        if wider == support:  # the row meets groups that rank higher inside the support than they do naturally
            for i in short:
                for group in range(spec.n_group):
                    members = range(group * spec.group_size, (group + 1) * spec.group_size)
                    wider |= set(sorted(members, key=lambda e: -selection[i][e])[:2])
        support = wider
