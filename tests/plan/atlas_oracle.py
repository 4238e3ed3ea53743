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
    """Weight of a row's best K candidates inside: the first ones in its order of selection."""
    return sum([w for e, w in cand.items() if e in support][:top_k])


def inside(combine: list[Row], natural: dict[int, list[int]], support: set[int]) -> float:
    """Natural weight of the rows that lies inside a support."""
    return sum(combine[i][e] for i, ids in natural.items() for e in ids if e in support)


def atlas(
    selection: list[Row],
    combine: list[Row],
    votes: list[bool],
    spec: RouterSpec,
    coverage: float,
    factor: int,
    max_support: int | None = None,
    least_saving: float = 0.0,
) -> set[int]:
    """The support of one group of rows."""
    rows = [i for i, vote in enumerate(votes) if vote]
    everything = set(range(spec.num_experts))
    if not rows:
        return everything
    combine = [[max(w, 0.0) for w in row] for row in combine]
    natural = {i: choose(selection[i], spec) for i in rows}
    used = {e for ids in natural.values() for e in ids}
    cand = {i: candidates(selection[i], combine[i], spec, 1 if coverage >= 1.0 else factor) for i in rows}
    own = {i: sum(combine[i][e] for e in natural[i]) for i in rows}
    total = {e: sum(combine[i][e] for i in rows if e in natural[i]) for e in everything}
    heaviest = sorted(total, key=lambda e: (-total[e], e))

    support = used if coverage >= 1.0 else {ids[0] for ids in natural.values()}
    ranking = iter(e for e in heaviest if e not in support)
    while inside(combine, natural, support) < coverage * sum(own.values()) * (1 - 1e-9):
        support = support | {next(ranking)}

    while True:
        missing = {i: coverage * own[i] - covered(cand[i], support, spec.top_k) for i in rows}
        missing = {i: d for i, d in missing.items() if d > 1e-6 * coverage * own[i]}
        if not missing:
            break
        gain = {e: sum(min(cand[i].get(e, 0.0), d) for i, d in missing.items()) for e in everything - support}
        support = support | {max(gain, key=lambda e: (round(gain[e], 6), -e))}

    short = [i for i in rows if len(choose(selection[i], spec, support)) < spec.top_k]
    support = support | {e for i in short for e in natural[i]}
    if max_support is not None:
        return support if len(support) <= max_support else set(heaviest[:max_support])
    if coverage < 1.0 and len(support) > (1.0 - least_saving) * len(used) and least_saving > 0.0:
        return everything
    return support
