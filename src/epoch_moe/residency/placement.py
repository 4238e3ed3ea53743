"""`LayerPlacement`: which of a layer's experts lie in which slot of fast memory, and what one forward changes in that.

Shape suffixes: E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from epoch_moe.residency.demand import Demand
from epoch_moe.residency.policies import Policy

NOT_HERE = -1
Decide = Callable[[int, int, float], Literal["load", "compute"]]
"""``decide(expert, rows, predicted_reuse)``: is moving a missing expert worth it, or are its rows computed there?"""


@dataclass(frozen=True)
class Steps:
    """What one forward of a layer does, in this order.

    Attributes:
        hits: experts of this forward that lie in a slot already.
        loads: ``(expert, slot, evicted)``: experts to bring into a slot, and who leaves it (-1: it is empty). May hold
            experts that this forward does not use, where the policy fills the slots at once.
        bypass: experts of this forward that are computed where they lie.
    """

    hits: list[int]
    loads: list[tuple[int, int, int]]
    bypass: list[int]


@dataclass
class PlacementCounts:
    """Running numbers of one layer.

    Attributes:
        forwards: forwards planned.
        demanded: experts asked for, summed over forwards: ``hits + misses``.
        hits, misses: of those, how many lay in a slot and how many did not.
        hit_pairs, miss_pairs: their (row, expert) pairs.
        loads: experts brought in, also where nothing asked for them.
        evictions: experts that left a slot.
        bypassed, bypassed_pairs: experts computed where they lie, and their pairs.
    """

    forwards: int = 0
    demanded: int = 0
    hits: int = 0
    misses: int = 0
    hit_pairs: int = 0
    miss_pairs: int = 0
    loads: int = 0
    evictions: int = 0
    bypassed: int = 0
    bypassed_pairs: int = 0

    def __add__(self, other: PlacementCounts) -> PlacementCounts:
        return PlacementCounts(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass
class LayerPlacement:
    """The slots of one layer.

    Attributes:
        slots: how many, 0 to E.
        num_experts: E.
        slot_of_E: int64, the slot of each expert; -1 = not here.
        counts: what happened so far.
    """

    slots: int
    num_experts: int
    slot_of_E: Tensor = field(init=False)
    counts: PlacementCounts = field(init=False, default_factory=PlacementCounts)

    def __post_init__(self) -> None:
        if not 0 <= self.slots <= self.num_experts:
            raise ValueError(f"slots={self.slots}: expected 0 to num_experts={self.num_experts}")
        self.slot_of_E = torch.full((self.num_experts,), NOT_HERE, dtype=torch.int64)
        self._expert_in: list[int] = [NOT_HERE] * self.slots

    @property
    def resident(self) -> list[int]:
        """Experts that lie in a slot, ascending."""
        return sorted(expert for expert in self._expert_in if expert != NOT_HERE)

    def plan(self, demand: Demand, policy: Policy, decide: Decide) -> Steps:
        """Decide about every expert that a forward asks for, and keep the outcome as the new placement.

        What the forward needs never leaves in it. Where more is asked for than fits, and where the policy or the cost
        rule says so, experts are bypassed. Who carries the steps out and fails calls `forget`.

        Args:
            demand: of this layer in this forward; ``policy.observe`` has seen it.
            policy: says who is worth what.
            decide: the cost rule, asked about each missed expert that the policy lets in.
        """
        needed = demand.experts
        counts_E: list[int] = demand.counts_E.tolist()
        slot_of: list[int] = self.slot_of_E.tolist()
        hits = [expert for expert in needed if slot_of[expert] != NOT_HERE]
        missed = [expert for expert in needed if slot_of[expert] == NOT_HERE]
        loads: list[tuple[int, int, int]] = []
        free = deque(slot for slot, expert in enumerate(self._expert_in) if expert == NOT_HERE)
        wanted = policy.placement(demand.layer)
        brought: set[int] = set()
        if wanted is not None:
            brought = self._hold(list(dict.fromkeys(wanted))[: self.slots], set(needed), free, loads)
        bypass = self._admit(
            [expert for expert in missed if expert not in brought],
            set(needed) | brought,
            counts_E,
            demand.layer,
            policy,
            decide,
            free,
            loads,
        )
        self._carry_out(loads)
        self._count(counts_E, hits, missed, loads, bypass)
        return Steps(hits, loads, bypass)

    def _hold(
        self, wanted: list[int], needed: set[int], free: deque[int], loads: list[tuple[int, int, int]]
    ) -> set[int]:
        """Loads that bring the wanted experts in, as far as others than wanted and needed ones can leave."""
        keep = set(wanted) | needed
        leaving = deque(slot for slot, expert in enumerate(self._expert_in) if expert not in keep | {NOT_HERE})
        brought: set[int] = set()
        for expert in wanted:
            if int(self.slot_of_E[expert]) != NOT_HERE:
                continue
            if not free and not leaving:
                break
            slot = free.popleft() if free else leaving.popleft()
            loads.append((expert, slot, self._expert_in[slot]))
            brought.add(expert)
        return brought

    def _admit(
        self,
        missed: list[int],
        keep: set[int],
        counts_E: list[int],
        layer: int,
        policy: Policy,
        decide: Decide,
        free: deque[int],
        loads: list[tuple[int, int, int]],
    ) -> list[int]:
        """Add a load for each missed expert that comes in; returns the others."""
        if not missed:
            return []
        taken = {slot for _, slot, _ in loads}
        value_E: list[float] = policy.value_E(layer).tolist()
        # The least valuable resident leaves first, of equals the higher id; the most valuable miss is asked first.
        leaving = deque(
            sorted(
                (
                    slot
                    for slot, expert in enumerate(self._expert_in)
                    if expert != NOT_HERE and expert not in keep and slot not in taken
                ),
                key=lambda slot: (value_E[self._expert_in[slot]], -self._expert_in[slot]),
            )
        )
        bypass: list[int] = []
        for expert in sorted(missed, key=lambda expert: (-value_E[expert], expert)):
            if not free and not leaving:
                bypass.append(expert)
                continue
            victim = None if free else self._expert_in[leaving[0]]
            if (
                not policy.admit(layer, expert, victim)
                or decide(expert, counts_E[expert], policy.reuse(layer, expert)) == "compute"
            ):
                bypass.append(expert)
                continue
            slot = free.popleft() if free else leaving.popleft()
            loads.append((expert, slot, self._expert_in[slot]))
        return sorted(bypass)

    def _carry_out(self, loads: list[tuple[int, int, int]]) -> None:
        for expert, slot, evicted in loads:
            if evicted != NOT_HERE:
                self.slot_of_E[evicted] = NOT_HERE
            self.slot_of_E[expert] = slot
            self._expert_in[slot] = expert

    def _count(
        self,
        counts_E: list[int],
        hits: list[int],
        missed: list[int],
        loads: list[tuple[int, int, int]],
        bypass: list[int],
    ) -> None:
        counts = self.counts
        counts.forwards += 1
        counts.demanded += len(hits) + len(missed)
        counts.hits += len(hits)
        counts.misses += len(missed)
        counts.hit_pairs += sum(counts_E[expert] for expert in hits)
        counts.miss_pairs += sum(counts_E[expert] for expert in missed)
        counts.loads += len(loads)
        counts.evictions += sum(evicted != NOT_HERE for _, _, evicted in loads)
        counts.bypassed += len(bypass)
        counts.bypassed_pairs += sum(counts_E[expert] for expert in bypass)

    def forget(self, experts: Iterable[int]) -> None:
        """Empty the slots of experts whose weights did not arrive, or are no longer right."""
        for expert in experts:
            slot = int(self.slot_of_E[expert])
            if slot != NOT_HERE:
                self._expert_in[slot] = NOT_HERE
                self.slot_of_E[expert] = NOT_HERE
