"""`Turn` and `Turns`: what contexts of ranks that share a model's experts agree on before each forward.

Shape suffixes: B sequences, S rows per sequence.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol

from torch import Tensor

from epoch_moe.config import EpochConfig


class Turn(IntEnum):
    """What a rank would do next, the more urgent the higher.

    With a support for the whole batch, all ranks begin a block together: those that are done with theirs wait for the
    others' iterations.
    """

    DONE = 0
    BEGIN = 1
    PREFILL = 2
    ITERATION = 3


class Turns(Protocol):
    """The other ranks, for one decode after the other (`epoch_moe.freshlane.expert_parallel.ExpertParallel`).

    Attributes:
        idle_plan: the block plan with which this rank joins others' forwards.
        deferred: whether the end of a decode waits for the end of `epoch_moe.in_step`.
    """

    idle_plan: Any
    deferred: bool

    @property
    def layout(self) -> str:
        """``"sharded"``: every rank has its own sequences; ``"replicated"``: all have the same."""
        ...

    def agree_once(self) -> None:
        """Before the first forward: refuse ranks whose models or settings differ."""
        ...

    def most_urgent(
        self, turn: Turn, config: EpochConfig | None, ids_BS: Tensor | None = None
    ) -> tuple[Turn, EpochConfig | None]:
        """What the ranks do next, given this rank's wish, and under which plan."""
        ...

    def check_capacity(self) -> None:
        """Before a decoder reads a forward's logits: did every row reach its experts?"""
        ...
