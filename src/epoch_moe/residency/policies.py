"""Which experts stay in fast memory: what a policy is asked, and the least recently used.

A policy sees every layer's demand in every forward and says how much each expert is worth keeping. It decides where
weights lie, never what is computed. One of your own is a class with the methods of `Policy`, a line in `make_policy`,
and its name in `config.POLICIES`.

Shape suffixes: L MoE layers, E experts, T rows of a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from epoch_moe.residency.costs import run_length
from epoch_moe.residency.demand import Demand


class Observer(Protocol):
    """Who is told what the forwards of a model ask of its experts. Everything is on the host."""

    def observe(self, demand: Demand) -> None:
        """A layer's demand in this forward, before anything is decided about it."""
        ...

    def end_forward(self, confidence_T: Tensor | None = None, live_T: Tensor | None = None) -> None:
        """What is known behind a forward, by its flat rows.

        Args:
            confidence_T: fp32, probability of the token that the decoder drew for each row; NaN = none was drawn.
            live_T: bool, rows that were live in it; the confidences of others say nothing.
        """
        ...


class Policy(Observer, Protocol):
    """What a placement asks of a policy."""

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


class LRU:
    """The expert goes that was not used for the longest time. The clock counts forwards.

    Args:
        num_layers, num_experts: L and E.
    """

    def __init__(self, num_layers: int, num_experts: int):
        self.forwards = [0] * num_layers
        self.uses_LE = torch.zeros(num_layers, num_experts, dtype=torch.float64)
        self.last_LE = torch.zeros(num_layers, num_experts, dtype=torch.float64)

    def observe(self, demand: Demand) -> None:
        """See `Observer.observe`."""
        layer = demand.layer
        self.forwards[layer] += 1
        used_E = demand.counts_E > 0
        self.uses_LE[layer] += used_E
        self.last_LE[layer].masked_fill_(used_E, float(self.forwards[layer]))

    def value_E(self, layer: int) -> Tensor:
        """fp64 ``[E]``: the number of the last forward that used each expert, from 1; 0 = none."""
        return self.last_LE[layer]

    def admit(self, layer: int, expert: int, victim: int | None) -> bool:
        """Every miss comes in."""
        return True

    def reuse(self, layer: int, expert: int) -> float:
        """Forwards in a row that use the expert, if each does so with the share of forwards that has."""
        return run_length(float(self.uses_LE[layer, expert]) / max(self.forwards[layer], 1))

    def end_forward(self, confidence_T: Tensor | None = None, live_T: Tensor | None = None) -> None:
        """Ignored."""


def make_policy(name: str, num_layers: int, num_experts: int) -> Policy:
    """A policy by its name, one of `epoch_moe.residency.config.POLICIES`, for L layers of E experts."""
    from epoch_moe.residency.retention import Retention

    policies: dict[str, Callable[[int, int], Policy]] = {"retention": Retention, "lru": LRU}
    return policies[name](num_layers, num_experts)
