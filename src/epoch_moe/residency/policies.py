"""Which experts stay in fast memory: the interface of a policy, and the usual ones.

A policy sees every layer's demand in every forward and says how much each expert is worth keeping.
`epoch_moe.residency.placement.LayerPlacement` does the rest. Policies decide where weights lie, never what is computed.

Shape suffixes: L MoE layers, E experts, T rows of a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from epoch_moe.residency.demand import Demand

MOST_REUSE = 100.0
"""Reuse beyond this is not told apart: moving an expert has long paid off by then."""


class Policy(Protocol):
    """What a placement asks of a policy. Everything is on the host."""

    def observe(self, demand: Demand) -> None:
        """A layer's demand in this forward, before its placement is planned."""
        ...

    def value_E(self, layer: int) -> Tensor:
        """fp64 ``[E]``: what keeping each expert is worth after the demand observed last.

        The least valuable goes first, and of equals the higher id.
        """
        ...

    def admit(self, layer: int, expert: int, victim: int | None) -> bool:
        """Whether a missed expert takes the place of ``victim`` (None: an empty slot)."""
        ...

    def reuse(self, layer: int, expert: int) -> float:
        """In how many further forwards a resident expert will probably be used before it goes."""
        ...

    def placement(self, layer: int) -> Sequence[int] | None:
        """Experts that the layer shall hold from now on, the most important first; None: moves follow misses."""
        ...

    def end_forward(self, confidence_T: Tensor | None = None, live_T: Tensor | None = None) -> None:
        """What is known behind a forward, by its flat rows.

        Args:
            confidence_T: fp32, probability of the token that the decoder drew for each row; NaN = none was drawn.
            live_T: bool, rows that were live in it; the confidences of others say nothing.
        """
        ...


class UsagePolicy:
    """What the policies below share: when and how often each expert was used.

    Args:
        num_layers: L.
        num_experts: E.
        slots: experts that each layer can hold.
    """

    def __init__(self, num_layers: int, num_experts: int, slots: int):
        self.num_layers, self.num_experts, self.slots = num_layers, num_experts, slots
        self.forwards = [0] * num_layers
        self.uses_LE = torch.zeros(num_layers, num_experts, dtype=torch.float64)
        self.last_LE = torch.zeros(num_layers, num_experts, dtype=torch.float64)

    def observe(self, demand: Demand) -> None:
        """See `Policy.observe`."""
        layer = demand.layer
        self.forwards[layer] += 1
        used_E = demand.counts_E > 0
        self.uses_LE[layer] += used_E
        self.last_LE[layer].masked_fill_(used_E, float(self.forwards[layer]))

    def value_E(self, layer: int) -> Tensor:
        """See `Policy.value_E`."""
        raise NotImplementedError

    def admit(self, layer: int, expert: int, victim: int | None) -> bool:
        """Every miss comes in."""
        return True

    def reuse(self, layer: int, expert: int) -> float:
        """Forwards in a row that use the expert, if each does so with the share of forwards that has."""
        return run_length(float(self.uses_LE[layer, expert]) / max(self.forwards[layer], 1))

    def placement(self, layer: int) -> Sequence[int] | None:
        """Moves follow misses."""
        return None

    def end_forward(self, confidence_T: Tensor | None = None, live_T: Tensor | None = None) -> None:
        """Nothing is made of it."""


def run_length(chance: float) -> float:
    """How often in a row something happens that has this chance each time, at most `MOST_REUSE`."""
    return min(chance / max(1.0 - chance, 1e-9), MOST_REUSE)


class LRU(UsagePolicy):
    """The expert goes that was not used for the longest time. The clock counts forwards."""

    def value_E(self, layer: int) -> Tensor:
        """The last forward that used each expert."""
        return self.last_LE[layer]


class LFU(UsagePolicy):
    """The expert goes that the fewest forwards have used so far."""

    def value_E(self, layer: int) -> Tensor:
        """How many forwards have used each expert."""
        return self.uses_LE[layer]


class Static(UsagePolicy):
    """A fixed choice: the experts that a profile used most; without a profile, those that were asked for first.

    Args:
        num_layers, num_experts, slots: as for every policy.
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

    def placement(self, layer: int) -> Sequence[int] | None:
        """The profile's best, once."""
        if self.profile_LE is None or layer in self._held:
            return None
        self._held.add(layer)
        best: list[int] = self.profile_LE[layer].double().argsort(descending=True, stable=True)[: self.slots].tolist()
        return best


class Interval(UsagePolicy):
    """TIDE's rule (arXiv 2605.20179): every ``interval`` forwards a layer takes in the experts with the most rows.

    It does so on a block's first forward and on every ``interval``-th after it, and on all forwards of the first block.
    In between nothing moves and misses are computed where they lie.

    Args:
        num_layers, num_experts, slots: as for every policy.
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
        """See `Policy.observe`."""
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

    def placement(self, layer: int) -> Sequence[int] | None:
        """The experts with the most rows, in forwards that refresh."""
        demand = self._demand[layer]
        if demand is None or (self._blocks[layer] > 1 and self._step[layer] % self.interval):
            return None
        order_E = demand.counts_E.argsort(descending=True, stable=True)
        wanted: list[int] = order_E[: min(self.slots, len(demand.experts))].tolist()
        return wanted


class Belady(UsagePolicy):
    """Knows the future: the expert goes whose next use is farthest, and a miss that is farther still is not let in.

    Args:
        num_layers, num_experts, slots: as for every policy.
        future: for each layer, the experts of each of its forwards, in order: what `observe` will be told.
    """

    def __init__(self, num_layers: int, num_experts: int, slots: int, future: Sequence[Sequence[Sequence[int]]]):
        super().__init__(num_layers, num_experts, slots)
        if len(future) != num_layers:
            raise ValueError(f"future speaks of {len(future)} layers: expected {num_layers}")
        self._future = future
        self._next = [next_uses(passes, num_experts) for passes in future]

    def observe(self, demand: Demand) -> None:
        """See `Policy.observe`; a demand that the future did not hold is an error."""
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


POLICIES = ("retention", "lru", "lfu", "interval", "static", "belady")


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
    from epoch_moe.residency.retention import Retention

    if name not in POLICIES:
        raise ValueError(f"policy={name!r}: expected one of {', '.join(POLICIES)}")
    if num_layers < 1 or num_experts < 1 or not 0 <= slots <= num_experts:
        raise ValueError(
            f"num_layers={num_layers}, num_experts={num_experts}, slots={slots}: expected at least one layer and one "
            "expert, and between 0 and num_experts slots"
        )
    makers: dict[str, Any] = {
        "retention": Retention,
        "lru": LRU,
        "lfu": LFU,
        "interval": Interval,
        "static": Static,
        "belady": Belady,
    }
    policy: Policy = makers[name](num_layers, num_experts, slots, **options)
    return policy
