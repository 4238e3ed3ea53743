"""`LayerPlacement`: which of a layer's experts lie in which slot of fast memory, and what one forward changes in that.

Shape suffixes: E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from epoch_moe.residency.demand import Demand
from epoch_moe.residency.policies import Policy

NOT_HERE = -1
SomeCounts = TypeVar("SomeCounts", bound="Counts")
WorthLoading = Callable[[int, float], bool]
"""``worth_loading(rows, predicted_reuse)``: is a missing expert moved to a slot, or computed where it lies?"""
Move = tuple[int, int, int]
"""``(expert, slot, evicted)``: an expert to bring into a slot, and who leaves it (-1: it is empty)."""


@dataclass(frozen=True)
class Steps:
    """What one forward of a layer does, in this order.

    Attributes:
        hits: experts of this forward that lie in a slot already.
        loads: experts to bring into a slot before they are used.
        bypass: experts of this forward that are computed where they lie.
        swaps: bypassed experts that shall take the slot of a hit when both were used. Optional: who puts the weights
            there calls `LayerPlacement.swap`, and until then nothing has changed.
    """

    hits: list[int]
    loads: list[Move]
    bypass: list[int]
    swaps: list[Move] = field(default_factory=list)


@dataclass
class Counts:
    """Numbers that add up, field by field."""

    def __add__(self: SomeCounts, other: SomeCounts) -> SomeCounts:
        return type(self)(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass
class PlacementCounts(Counts):
    """Running numbers of one layer.

    Attributes:
        forwards: forwards planned.
        demanded: experts asked for, summed over forwards: ``hits + misses``.
        hits, misses: of those, how many lay in a slot and how many did not.
        hit_pairs, miss_pairs: their (row, expert) pairs.
        loads: experts brought in, also where nothing asked for them, and swaps.
        swaps: of those, how many took the place of an expert that the same forward used.
        evictions: experts that left a slot.
        bypassed, bypassed_pairs: experts computed where they lie, and their pairs; among them those of swaps.
    """

    forwards: int = 0
    demanded: int = 0
    hits: int = 0
    misses: int = 0
    hit_pairs: int = 0
    miss_pairs: int = 0
    loads: int = 0
    swaps: int = 0
    evictions: int = 0
    bypassed: int = 0
    bypassed_pairs: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of the experts asked for that lay in a slot; None where none was."""
        return self.hits / self.demanded if self.demanded else None


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
        self.slot_of_E = torch.full((self.num_experts,), NOT_HERE, dtype=torch.int64)
        self._expert_in: list[int] = [NOT_HERE] * self.slots

    @property
    def resident(self) -> list[int]:
        """Experts that lie in a slot, ascending."""
        return sorted(expert for expert in self._expert_in if expert != NOT_HERE)

    def plan(self, demand: Demand, policy: Policy, worth_loading: WorthLoading) -> Steps:
        """Decide about every expert that a forward asks for. Loads count as done: who fails at them calls `forget`.

        What the forward needs does not leave before it was used: a missed expert that is worth more is bypassed, and
        may take that one's slot afterwards (`Steps.swaps`). Experts that do not fit, or that the policy or the cost
        rule keeps out, are bypassed too.

        Args:
            demand: of this layer in this forward; ``policy.observe`` has seen it.
            policy: says who is worth what.
            worth_loading: the cost rule, asked about each missed expert that the policy lets in.
        """
        slot_of: list[int] = self.slot_of_E.tolist()
        hits = [expert for expert in demand.experts if slot_of[expert] != NOT_HERE]
        missed = [expert for expert in demand.experts if slot_of[expert] == NOT_HERE]
        loads, swaps = self.moves(missed, demand, policy, worth_loading)
        for move in loads:
            self._put(move)
        loaded = {expert for expert, _, _ in loads}
        bypass = [expert for expert in missed if expert not in loaded]
        hit_pairs, miss_pairs, bypassed_pairs = (
            sum(demand.counts_E[experts].tolist()) for experts in (hits, missed, bypass)
        )
        self.counts += PlacementCounts(
            forwards=1, demanded=len(demand.experts), hits=len(hits), misses=len(missed), hit_pairs=hit_pairs,
            miss_pairs=miss_pairs, loads=len(loads), bypassed=len(bypass), bypassed_pairs=bypassed_pairs,
            evictions=sum(evicted != NOT_HERE for _, _, evicted in loads),
        )  # fmt: skip
        return Steps(hits, loads, bypass, swaps)

    def swap(self, move: Move) -> None:
        """One of `Steps.swaps` was carried out."""
        _, slot, evicted = move
        if self._expert_in[slot] != evicted:
            raise ValueError(f"slot {slot} holds expert {self._expert_in[slot]}: expected {evicted}, as it was planned")
        self._put(move)
        self.counts += PlacementCounts(loads=1, swaps=1, evictions=1)

    def moves(
        self, missed: list[int], demand: Demand, policy: Policy, worth_loading: WorthLoading
    ) -> tuple[list[Move], list[Move]]:
        """Loads and swaps that bring missed experts in: the most valuable first, in the place of the least valuable."""
        if not missed:
            return [], []
        layer, needed = demand.layer, set(demand.experts)
        value_E: list[float] = policy.value_E(layer).tolist()
        free = deque(slot for slot, expert in enumerate(self._expert_in) if expert == NOT_HERE)
        held = [expert for expert in self._expert_in if expert != NOT_HERE]
        leaving = deque(sorted(held, key=lambda expert: (value_E[expert], -expert)))
        loads: list[Move] = []
        coming: list[int] = []
        going: list[int] = []
        for expert in sorted(missed, key=lambda expert: (-value_E[expert], expert)):
            # Who is needed now gives way only to who is worth more; no miss that follows is.
            while leaving and leaving[0] in needed and value_E[expert] <= value_E[leaving[0]]:
                leaving.popleft()
            if not free and not leaving:
                break
            victim = None if free else leaving[0]
            if not policy.admit(layer, expert, victim):
                continue
            if not worth_loading(int(demand.counts_E[expert]), policy.reuse(layer, expert)):
                continue
            if victim is None:
                loads.append((expert, free.popleft(), NOT_HERE))
            else:
                coming.append(expert)
                going.append(leaving.popleft())
        # Idle experts leave now, needed ones when they were used.
        going.sort(key=lambda expert: expert in needed)
        moves = [(new, int(self.slot_of_E[old]), old) for new, old in zip(coming, going, strict=True)]
        idle = sum(old not in needed for old in going)
        return loads + moves[:idle], moves[idle:]

    def _put(self, move: Move) -> None:
        expert, slot, evicted = move
        if evicted != NOT_HERE:
            self.slot_of_E[evicted] = NOT_HERE
        self.slot_of_E[expert] = slot
        self._expert_in[slot] = expert

    def forget(self, experts: Iterable[int]) -> None:
        """Empty the slots of experts whose weights did not arrive, or are no longer right."""
        for expert in experts:
            slot = int(self.slot_of_E[expert])
            if slot != NOT_HERE:
                self._expert_in[slot] = NOT_HERE
                self.slot_of_E[expert] = NOT_HERE
