"""Replay a trace under any policy and budget: hits, loads and bytes, without a model.

Shape suffixes: E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from traces.policies import POLICIES, Filling, make_policy, next_uses
from traces.trace import Trace

from epoch_moe.residency.demand import Demand
from epoch_moe.residency.placement import NOT_HERE, LayerPlacement, Move, PlacementCounts, WorthLoading
from epoch_moe.residency.policies import Policy

BOUND = "belady_bound"
"""Name of the most hits that any placement could have had, in results."""
PLAIN_LRU = "plain_lru"
"""Name of a cache that takes one expert after the other, as offloading for one token at a time does."""
_SHARED = ("retention", "lru", "lfu")  # what these learn does not depend on how many slots there are


@dataclass(frozen=True)
class Replay:
    """What one policy did with one budget on a trace, over all layers.

    Attributes:
        policy: its name.
        slots: experts that each layer could hold.
        counts: sums over layers; ``counts.forwards`` are (forward, layer) visits.
        per_layer: the same for each layer.
        forwards: forwards of the trace.
        loaded_bytes: moved into slots.
        bypass_bytes: of experts that were computed where they lie and stayed there: read as well where that is a file.
    """

    policy: str
    slots: int
    counts: PlacementCounts
    per_layer: tuple[PlacementCounts, ...]
    forwards: int
    loaded_bytes: int
    bypass_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the experts asked for that lay in a slot."""
        return self.counts.hits / max(self.counts.demanded, 1)

    @property
    def pair_hit_rate(self) -> float:
        """Share of the (row, expert) pairs whose expert lay in a slot."""
        return self.counts.hit_pairs / max(self.counts.hit_pairs + self.counts.miss_pairs, 1)

    @property
    def utilisation(self) -> float:
        """Share of the slots that a forward found the right expert in: hits / (slots x visits)."""
        return self.counts.hits / max(self.slots * self.counts.forwards, 1)

    def as_dict(self) -> dict[str, Any]:
        """Numbers for JSON."""
        forwards = max(self.forwards, 1)
        return {
            "policy": self.policy,
            "slots": self.slots,
            "hit_rate": self.hit_rate,
            "pair_hit_rate": self.pair_hit_rate,
            "utilisation": self.utilisation,
            "hits": self.counts.hits,
            "misses": self.counts.misses,
            "loads": self.counts.loads,
            "bypassed": self.counts.bypassed,
            "loaded_bytes_per_forward": self.loaded_bytes / forwards,
            "missed_bytes_per_forward": (self.loaded_bytes + self.bypass_bytes) / forwards,
            "hit_rate_per_layer": [layer.hits / max(layer.demanded, 1) for layer in self.per_layer],
        }


class Placement(LayerPlacement):
    """The placement that models use, and moves of policies that fill the slots by a list."""

    def moves(
        self, missed: list[int], demand: Demand, policy: Policy, worth_loading: WorthLoading
    ) -> tuple[list[Move], list[Move]]:
        """Loads and swaps; see `LayerPlacement.moves`. Loads may hold experts that this forward does not use."""
        wanted = policy.wanted(demand.layer) if isinstance(policy, Filling) else None
        if wanted is None:
            return super().moves(missed, demand, policy, worth_loading)
        return self._fill(list(dict.fromkeys(wanted))[: self.slots], set(demand.experts), set(missed))

    def _fill(self, wanted: list[int], needed: set[int], missed: set[int]) -> tuple[list[Move], list[Move]]:
        free = deque(slot for slot, expert in enumerate(self._expert_in) if expert == NOT_HERE)
        others = [slot for slot, expert in enumerate(self._expert_in) if expert not in (NOT_HERE, *wanted)]
        idle = deque(slot for slot in others if self._expert_in[slot] not in needed)
        busy = deque(slot for slot in others if self._expert_in[slot] in needed)
        loads: list[Move] = []
        swaps: list[Move] = []
        for expert in wanted:
            if int(self.slot_of_E[expert]) != NOT_HERE:
                continue
            if free or idle:
                slot = free.popleft() if free else idle.popleft()
                loads.append((expert, slot, self._expert_in[slot]))
            elif busy and expert in missed:
                slot = busy.popleft()
                swaps.append((expert, slot, self._expert_in[slot]))
        return loads, swaps


def always_load(rows: int, reuse: float) -> bool:
    """The cost rule where a missing expert has to be read either way."""
    return True


def slots_of(budget: float, num_experts: int) -> int:
    """Experts per layer that a share of them is, rounded down, but at least one where the share is not 0."""
    if not 0.0 <= budget <= 1.0:
        raise ValueError(f"budget={budget}: expected a share of each layer's experts, 0 to 1")
    return max(int(budget * num_experts + 1e-9), int(budget > 0))


def simulate(
    trace: Trace,
    policies: Sequence[str],
    slots: Sequence[int],
    *,
    profile_LE: Tensor | None = None,
    worth_loading: WorthLoading = always_load,
    options: dict[str, dict[str, Any]] | None = None,
    confidences: bool = True,
    progress: Callable[[int], Any] | None = None,
) -> list[Replay]:
    """Replay a trace.

    Args:
        trace: recorded or made up.
        policies: of `POLICIES`, `PLAIN_LRU` or `BOUND`.
        slots: experts per layer; every policy is replayed with each.
        profile_LE: of ``"static"``: uses of each expert on *other* text (`Trace.uses_LE`); None: it keeps what came
            first.
        worth_loading: the cost rule.
        options: of policies, by name.
        confidences: False hides what the decoder thought of the rows from the policies.
        progress: called with the number of forwards after each one.

    Returns:
        One replay for each policy and number of slots, policy by policy.
    """
    unknown = [name for name in policies if name not in (*POLICIES, PLAIN_LRU, BOUND)]
    if unknown:
        raise ValueError(f"policy={unknown[0]!r}: expected one of {', '.join((*POLICIES, PLAIN_LRU, BOUND))}")
    passes = trace.passes() if {"belady", PLAIN_LRU, BOUND} & set(policies) else []
    groups: list[tuple[Policy, list[tuple[str, list[Placement]]]]] = []
    placements: dict[tuple[str, int], list[Placement]] = {}
    for name in dict.fromkeys(policies):
        if name in (PLAIN_LRU, BOUND):
            continue
        extra = dict((options or {}).get(name, {}))
        if name == "static" and profile_LE is not None:
            extra["profile_LE"] = profile_LE
        if name == "belady":
            extra["future"] = passes
        shared: Policy | None = None
        for number in dict.fromkeys(slots):
            layers = [Placement(number, trace.num_experts) for _ in range(trace.num_layers)]
            placements[name, number] = layers
            if shared is not None and name in _SHARED:
                groups[-1][1].append((name, layers))
                continue
            shared = make_policy(name, trace.num_layers, trace.num_experts, number, **extra)
            groups.append((shared, [(name, layers)]))
    for forward in trace.forwards:
        for policy, group in groups:
            for demand in forward.demands:
                policy.observe(demand)
                for _, layers in group:
                    steps = layers[demand.layer].plan(demand, policy, worth_loading)
                    for move in steps.swaps:
                        layers[demand.layer].swap(move)
            policy.end_forward(forward.confidence_T if confidences else None, forward.live_T)
        if progress is not None:
            progress(1)
    results = []
    for name in policies:
        for number in slots:
            if name == BOUND:
                counts = [bound_counts(one, number, trace.num_experts) for one in passes]
            elif name == PLAIN_LRU:
                counts = [plain_lru_counts(one, number) for one in passes]
            else:
                counts = [layer.counts for layer in placements[name, number]]
            results.append(_replay(trace, name, number, counts))
    return results


def _replay(trace: Trace, name: str, slots: int, per_layer: Sequence[PlacementCounts]) -> Replay:
    total = PlacementCounts()
    for counts in per_layer:
        total = total + counts
    sizes = trace.bytes_per_expert
    return Replay(
        policy=name,
        slots=slots,
        counts=total,
        per_layer=tuple(per_layer),
        forwards=len(trace.forwards),
        loaded_bytes=sum(counts.loads * size for counts, size in zip(per_layer, sizes, strict=True)),
        bypass_bytes=sum(
            (counts.bypassed - counts.swaps) * size for counts, size in zip(per_layer, sizes, strict=True)
        ),
    )


def bound_counts(passes: Sequence[Sequence[int]], slots: int, num_experts: int) -> PlacementCounts:
    """The most hits that any placement of one layer can have: Belady's rule with bypass, between passes.

    After each pass, of what lies in slots and what the pass used, the experts stay whose next uses come first. No
    placement that brings in only what passes use has more hits. The policy ``"belady"`` has as many; this is the rule
    without the machinery. Pairs are not counted.
    """
    table_DE = next_uses(passes, num_experts)
    never = len(passes)
    counts = PlacementCounts()
    resident: set[int] = set()
    for number, needed in enumerate(passes):
        hits = sum(expert in resident for expert in needed)
        counts.forwards += 1
        counts.demanded += len(needed)
        counts.hits += hits
        counts.misses += len(needed) - hits
        nearest = table_DE[number + 1].tolist()
        pool = [expert for expert in resident.union(needed) if nearest[expert] < never]
        stay = set(sorted(pool, key=lambda expert: (nearest[expert], expert))[:slots])
        loads = len(stay - resident)
        counts.loads += loads
        counts.bypassed += len(needed) - hits - loads
        resident = stay
    return counts


def plain_lru_counts(passes: Sequence[Sequence[int]], slots: int) -> PlacementCounts:
    """One layer's LRU cache that knows no passes: experts come one after the other, by id, and every miss comes in.

    An expert that the pass still needs may go, and be a miss when its turn comes. Pairs are not counted.
    """
    counts = PlacementCounts()
    resident: dict[int, None] = {}  # the least recent first
    for needed in passes:
        counts.forwards += 1
        counts.demanded += len(needed)
        for expert in needed:
            if expert in resident:
                counts.hits += 1
                del resident[expert]
            elif slots:
                counts.loads += 1
                if len(resident) == slots:
                    del resident[next(iter(resident))]
                    counts.evictions += 1
            else:
                counts.bypassed += 1
            if slots:
                resident[expert] = None
    counts.misses = counts.demanded - counts.hits
    return counts
