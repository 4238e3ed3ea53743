"""Expert parallelism of one model: its dispatcher, and the ranks' turns.

Every rank must join every collective, and ranks have different work: other numbers of sequences, blocks and iterations,
or none at all. Before each forward they therefore take a turn: each says what it would do next, the most urgent of it
happens, and a rank that has something else to do, or nothing, joins with no rows of its own. Nothing else about a
decode is decided together, except a support of the whole batch (`support_scope="batch"`).

Shape suffixes: R rows, K top-k, P ranks, W voting rows, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.freshlane.agreement import plan_number
from epoch_moe.freshlane.collectives import ExpertParallelError, Ranks
from epoch_moe.freshlane.dispatch_kinds import KindName
from epoch_moe.freshlane.dispatcher import FreshLaneDispatcher
from epoch_moe.plan.turns import Turn


class ExpertParallel:
    """What a model patched with ``ep_group`` shares with the other ranks.

    Args:
        num_experts: E of every MoE layer.
        group: a process group or one-dimensional DeviceMesh.
        layout: ``"sharded"``: every rank has its own sequences; ``"replicated"``: all have the same.
        capacity: see `FreshLaneDispatcher`.
        describe: gives what the ranks must agree on, key -> text; called before the first forward.

    Attributes:
        dispatcher: carries the rows of all layers, one after the other.
        idle_plan: the block plan with which this rank joins others' forwards.
        deferred: whether the end of a decode waits for the end of `epoch_moe.in_step`.
    """

    def __init__(
        self,
        num_experts: int,
        group: Any,
        *,
        layout: KindName = "sharded",
        capacity: int | None = None,
        describe: Callable[[], dict[str, str]] = dict,
    ):
        self.dispatcher = FreshLaneDispatcher(num_experts, group, layout=layout, capacity=capacity)
        self.describe = describe
        self.idle_plan: Any = None
        self.deferred = False
        self._agreed = False

    @property
    def ranks(self) -> Ranks:
        """The process group that the experts are split over."""
        assert self.dispatcher.ranks is not None
        return self.dispatcher.ranks

    @property
    def layout(self) -> KindName:
        """How rows lie over ranks: ``"sharded"`` or ``"replicated"``."""
        return self.dispatcher.layout

    def summary(self) -> str:
        """Which experts are here, for `PatchReport`."""
        here = self.dispatcher.range.numbers
        where = f"rank {self.ranks.rank} of {self.ranks.world} ({self.layout})"
        return f"experts {here.start} to {here.stop - 1} on {where}"

    def check_capacity(self) -> None:
        """Before a decoder reads a forward's logits: did every row reach its experts?"""
        self.dispatcher.check_capacity()

    def agree_once(self) -> None:
        """Before the first forward: refuse ranks whose models or settings differ.

        Raises:
            ExpertParallelError: naming what differs, see `Ranks.agree`.
        """
        if self._agreed:
            return
        settings = {"layout of rows": self.layout, "capacity": str(self.dispatcher.capacity)}
        self.ranks.agree(settings | self.describe(), "comparing models and settings before the first forward")
        self._agreed = True

    def most_urgent(
        self, turn: Turn, config: EpochConfig | None, ids_BS: Tensor | None = None
    ) -> tuple[Turn, EpochConfig | None]:
        """What the ranks do next, given this rank's wish, and under which plan.

        Args:
            turn: the wish.
            config: this rank's plan; None: dense.
            ids_BS: token ids of the forward, which replicated ranks compare: rows of another number or order would end
                a collective in the middle, and with some backends the process.

        Raises:
            ExpertParallelError: a rank is lost; or two ranks would decode under different plans; or, with replicated
                rows, the ranks wish for different things.
        """
        content, plan = 0, plan_number(str(config))
        if self.layout == "replicated" and ids_BS is not None:
            places = torch.arange(1, ids_BS.numel() + 1, device=ids_BS.device).view_as(ids_BS)
            content = int((ids_BS * places).sum()) * 4_099 + ids_BS.shape[0] * 65_537 + ids_BS.shape[1]
        own = torch.tensor([int(turn), content, plan], device=self.ranks.device())
        largest = self.ranks.maximum(torch.cat([own, -own]), "agreeing on the next forward").tolist()
        most, high, last_plan, least, low, first_plan = largest
        if last_plan != -first_plan:
            config = self._one_plan(turn, config)
        if self.layout == "replicated" and (most != -least or high != -low):
            raise ExpertParallelError(
                f"rank {self.ranks.rank} and another one would run different forwards next: with layout='replicated' "
                "all ranks decode the same sequences; give all the same prompts, settings and random seed"
            )
        return Turn(most), config

    def _one_plan(self, turn: Turn, config: EpochConfig | None) -> EpochConfig | None:
        """The plan of the ranks that have something to decode; called by all, where their plans differ."""
        everyone = self.ranks.gather_objects((turn, config), "comparing plans")
        decoding = [(rank, other) for rank, (wish, other) in enumerate(everyone) if wish != Turn.DONE]
        if any(other != decoding[0][1] for _, other in decoding):
            by_rank = "; ".join(f"rank {rank}: {other}" for rank, other in decoding)
            raise ExpertParallelError(
                f"the ranks of the expert-parallel group disagree on plan: {by_rank}. All decode under one plan at a "
                "time: give all of them the same, and end one decode (or `in_step`) before the next one has another"
            )
        return decoding[0][1] if decoding else config


def world_group() -> Any:
    """The group of all processes, with a clear error where torch.distributed has not been started."""
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: start the script with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    return dist.group.WORLD
