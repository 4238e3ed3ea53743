"""Expert parallelism of one model: its dispatcher, the ranks' turns, and supports that all ranks share.

Every rank must join every collective, and ranks have different work: other numbers of sequences, blocks and iterations,
or none at all. Before each forward they therefore take a turn: each says what it would do next, the most urgent of it
happens, and a rank that has something else to do, or nothing, joins with no rows of its own. Nothing else about a
decode is decided together, except a support of the whole batch (`support_scope="batch"`).

Shape suffixes: R rows, K top-k, P ranks, W voting rows, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.freshlane.agreement import plan_number
from epoch_moe.freshlane.collectives import ExpertParallelError, Ranks
from epoch_moe.freshlane.dispatcher import FreshLaneDispatcher, Layout

RunLocal = Callable[[Tensor, Tensor, Tensor], Tensor]


class Turn(IntEnum):
    """What a rank would do next, the more urgent the higher.

    With a support for the whole batch, all ranks begin a block together: those that are done with theirs wait for the
    others' iterations.
    """

    DONE = 0
    BEGIN = 1
    PREFILL = 2
    ITERATION = 3


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
        layout: Layout = "sharded",
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
        """The group."""
        return self.dispatcher.ranks

    @property
    def layout(self) -> Layout:
        """Of rows over ranks."""
        return self.dispatcher.layout

    @property
    def experts(self) -> range:
        """Numbers of this rank's experts."""
        first = self.dispatcher.first_expert
        return range(first, first + self.dispatcher.local_experts)

    @property
    def part(self) -> tuple[int, int]:
        """The first of them, and how many experts a layer has."""
        return self.dispatcher.first_expert, self.dispatcher.num_experts

    def refused(self, what: str) -> RuntimeError:
        """The error of everything that needs all experts, or that would take the group of ranks along."""
        here = self.experts
        return RuntimeError(
            f"{what} is refused: rank {self.ranks.rank} of {self.ranks.world} holds experts {here.start} to "
            f"{here.stop - 1} of {self.dispatcher.num_experts} only, and its group of processes. Use the checkpoint "
            "that the model comes from, or a model loaded without ep_group"
        )

    def __reduce__(self) -> Any:
        raise self.refused("copying or pickling a model whose experts are split over ranks")

    def run(
        self,
        x_RH: Tensor,
        ids_RK: Tensor,
        weights_RK: Tensor,
        run_local: RunLocal,
        *,
        name: str,
        meanwhile: Callable[[], None] | None = None,
        meanwhile_back: Callable[[], None] | None = None,
    ) -> Tensor:
        """Routed experts of some rows, wherever the experts are: ``[R,H]``.

        Args:
            x_RH, ids_RK, weights_RK: as `FreshLaneDispatcher.dispatch` takes them.
            run_local: ``(x_NH, local ids, weights) -> [N,H]``, fp32, with this rank's experts.
            name: of the layer, for errors.
            meanwhile: what can be computed while rows travel to their experts (replicated: while sums come back, as
                no row travels).
            meanwhile_back: what can be done while sums come back.
        """
        pending = self.dispatcher.dispatch(x_RH, ids_RK, weights_RK, name=name)
        if meanwhile is not None and self.layout == "sharded":
            meanwhile()
        arrived = pending.wait()
        y_NH = run_local(arrived.x_NH, arrived.ids_NK, arrived.weights_NK)
        returning = self.dispatcher.combine(y_NH, arrived.handle)
        if meanwhile is not None and self.layout == "replicated":
            meanwhile()
        if meanwhile_back is not None:
            meanwhile_back()
        y_RH: Tensor = returning.wait()
        return y_RH

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


class SharedSupport:
    """The exchange behind one support for all ranks' sequences.

    Args:
        ranks: the group.
        name: of the layer, for errors.
    """

    def __init__(self, ranks: Ranks, name: str):
        self.ranks, self.name = ranks, name

    def gather(self, selection_WE: Tensor, weights_WE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All ranks' voting rows in rank order: their scores, weights, and which of the rows are there (padding)."""
        count = selection_WE.new_tensor([selection_WE.shape[0]], dtype=torch.int64)
        most = int(self.ranks.maximum(count, f"{self.name}: number of voting rows"))
        pad = (0, 0, 0, most - selection_WE.shape[0])
        here_W1 = torch.nn.functional.pad(torch.ones_like(selection_WE[:, :1]), pad)
        rows = torch.cat(
            [torch.nn.functional.pad(part, pad) for part in (selection_WE, weights_WE)] + [here_W1], dim=1
        )
        everyone = self.ranks.all_gather(rows, f"{self.name}: scores of voting rows").wait()
        num_experts = selection_WE.shape[1]
        return everyone[:, :num_experts], everyone[:, num_experts : 2 * num_experts], everyone[:, -1] > 0

    def union(self, experts_E: Tensor) -> Tensor:
        """Experts that any rank named: bool ``[E]``."""
        return self.ranks.maximum(experts_E.to(torch.int32), f"{self.name}: experts that join the support") > 0

    def total(self, values: Tensor) -> Tensor:
        """Sum over ranks, elementwise, in rank order."""
        everyone = self.ranks.all_gather(values.unsqueeze(0), f"{self.name}: coverage of the support").wait()
        out = torch.zeros_like(values)
        for part in everyone:
            out = out + part
        return out


def world_group() -> Any:
    """The group of all processes, with a clear error where torch.distributed has not been started."""
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: start the script with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    return dist.group.WORLD
