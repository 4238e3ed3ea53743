"""Policies that a laboratory compares with the library's: LFU, a fixed choice, TIDE's interval, and Belady's.

Shape suffixes: L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epoch_moe.residency.costs import MOST_REUSE
from epoch_moe.residency.demand import Demand
from epoch_moe.residency.policies import LRU, Policy
from epoch_moe.residency.retention import Retention

POLICIES = ("retention", "lru", "lfu", "interval", "static", "belady")


class LFU(LRU):
    """The expert goes that the fewest forwards have used so far."""

    def value_E(self, layer: int) -> Tensor:
        """fp64 ``[E]``: how many forwards have used each expert."""
        return self.uses_LE[layer]


class Filling(LRU):
    """A policy that fills the slots by a list of its own at times, whatever was missed.

    Args:
        num_layers, num_experts: L and E.
        slots: experts that each layer can hold.
    """

    def __init__(self, num_layers: int, num_experts: int, slots: int):
        super().__init__(num_layers, num_experts)
        self.num_experts, self.slots = num_experts, slots

    def wanted(self, layer: int) -> Sequence[int] | None:
        """Experts that the layer shall hold from now on, the most important first; None: moves follow misses."""
        raise NotImplementedError


class Static(Filling):
    """A fixed choice: the experts that a profile used most; without a profile, those that were asked for first.

    Args:
        num_layers, num_experts, slots: as for `Filling`.
        profile_LE: uses of each expert in an earlier decode, on similar text.
    """

    def __init__(self, num_layers: int, num_experts: int, slots: int, profile_LE: Tensor | None = None):
        super().__init__(num_layers, num_experts, slots)
        if profile_LE is not None and profile_LE.shape != (num_layers, num_experts):
            raise ValueError(
                f"profile_LE has shape {tuple(profile_LE.shape)}: expected [{num_layers}, {num_experts}], uses of each "
                "layer's experts"
            )
        self.profile_LE = profile_LE
        self._held: set[int] = set()

    def value_E(self, layer: int) -> Tensor:
        """Uses in the profile."""
        return self.uses_LE[layer] if self.profile_LE is None else self.profile_LE[layer].double()

    def admit(self, layer: int, expert: int, victim: int | None) -> bool:
        """Nobody's place is taken."""
        return victim is None and self.profile_LE is None

    def wanted(self, layer: int) -> Sequence[int] | None:
        """The profile's best, once."""
        if self.profile_LE is None or layer in self._held:
            return None
        self._held.add(layer)
        best: list[int] = self.profile_LE[layer].double().argsort(descending=True, stable=True)[: self.slots].tolist()
        return best


class Interval(Filling):
    """TIDE's rule (arXiv 2605.20179): every ``interval`` forwards a layer takes in the experts with the most rows.

    It does so on a block's first forward and on every ``interval``-th after it, and on all forwards of the first block.
    In between nothing moves and misses are computed where they lie.

    Args:
        num_layers, num_experts, slots: as for `Filling`.
        interval: forwards between refreshes.
    """

    def __init__(self, num_layers: int, num_experts: int, slots: int, interval: int = 4):
        super().__init__(num_layers, num_experts, slots)
        if interval < 1:
            raise ValueError(f"interval={interval}: expected a number of forwards, at least 1")
        self.interval = interval
        self._blocks = [0] * num_layers
        self._step = [-1] * num_layers
        self._demand: list[Demand | None] = [None] * num_layers

    def observe(self, demand: Demand) -> None:
        """See `Observer.observe`."""
        super().observe(demand)
        layer = demand.layer
        if demand.cold or self._step[layer] < 0:
            self._blocks[layer] += 1
            self._step[layer] = -1
        self._step[layer] += 1
        self._demand[layer] = demand

    def value_E(self, layer: int) -> Tensor:
        """Rows of the last forward."""
        demand = self._demand[layer]
        return torch.zeros(self.num_experts, dtype=torch.float64) if demand is None else demand.counts_E.double()

    def admit(self, layer: int, expert: int, victim: int | None) -> bool:
        """Misses move nothing."""
        return False

    def wanted(self, layer: int) -> Sequence[int] | None:
        """The experts with the most rows, in forwards that refresh."""
        demand = self._demand[layer]
        if demand is None or (self._blocks[layer] > 1 and self._step[layer] % self.interval):
            return None
        order_E = demand.counts_E.argsort(descending=True, stable=True)
        wanted: list[int] = order_E[: min(self.slots, len(demand.experts))].tolist()
        return wanted


class Belady(LRU):
    """Knows the future: the expert goes whose next use is farthest, and a miss that is farther still is not let in.

    Args:
        num_layers, num_experts: L and E.
        future: for each layer, the experts of each of its forwards, in order: what `observe` will be told.
    """

    def __init__(self, num_layers: int, num_experts: int, future: Sequence[Sequence[Sequence[int]]]):
        super().__init__(num_layers, num_experts)
        if len(future) != num_layers:
            raise ValueError(f"future speaks of {len(future)} layers: expected {num_layers}")
        self._future = future
        self._next = [next_uses(passes, num_experts) for passes in future]

    def observe(self, demand: Demand) -> None:
        """See `Observer.observe`; a demand that the future did not hold is an error."""
        number = self.forwards[demand.layer]
        super().observe(demand)
        passes = self._future[demand.layer]
        if number >= len(passes) or list(passes[number]) != demand.experts:
            raise ValueError(
                f"layer {demand.layer}, forward {number}: this is not the trace that belady was made from; it "
                "knows the future of one trace only"
            )

    def value_E(self, layer: int) -> Tensor:
        """Minus the number of the next forward that uses each expert."""
        return -self._next[layer][self.forwards[layer]].double()

    def admit(self, layer: int, expert: int, victim: int | None) -> bool:
        """Who is used sooner stays; who is not used again does not come in."""
        value_E = self.value_E(layer)
        never = -float(len(self._future[layer]))
        return bool(value_E[expert] > (never if victim is None else value_E[victim]))

    def reuse(self, layer: int, expert: int) -> float:
        """Further uses, all of them."""
        return min(float(sum(expert in one for one in self._future[layer][self.forwards[layer] :])), MOST_REUSE)


def next_uses(passes: Sequence[Sequence[int]], num_experts: int) -> Tensor:
    """``[D+1,E]`` int64: the first forward from number d on that uses each expert; D where none does."""
    count = len(passes)
    table_DE = torch.full((count + 1, num_experts), count, dtype=torch.int64)
    for number in range(count - 1, -1, -1):
        table_DE[number] = table_DE[number + 1]
        table_DE[number, torch.as_tensor(passes[number], dtype=torch.int64)] = number
    return table_DE


def make_policy(name: str, num_layers: int, num_experts: int, slots: int, **options: Any) -> Policy:
    """A policy by its name.

    Args:
        name: one of `POLICIES`.
        num_layers, num_experts: L and E.
        slots: experts that each layer can hold, 0 to E.
        options: of that policy: ``interval`` of ``"interval"``, ``profile_LE`` of ``"static"``, ``future`` of
            ``"belady"``, what `epoch_moe.residency.retention.Retention` takes.

    Raises:
        ValueError: an unknown name, or a number that cannot be.
    """
    if name not in POLICIES:
        raise ValueError(f"policy={name!r}: expected one of {', '.join(POLICIES)}")
    if num_layers < 1 or num_experts < 1 or not 0 <= slots <= num_experts:
        raise ValueError(
            f"num_layers={num_layers}, num_experts={num_experts}, slots={slots}: expected at least one layer and one "
            "expert, and between 0 and num_experts slots"
        )
    filling: dict[str, type[Filling]] = {"interval": Interval, "static": Static}
    if name in filling:
        return filling[name](num_layers, num_experts, slots, **options)
    others: dict[str, Any] = {"retention": Retention, "lru": LRU, "lfu": LFU, "belady": Belady}
    policy: Policy = others[name](num_layers, num_experts, **options)
    return policy
