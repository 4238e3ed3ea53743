"""Collectives over an explicit process group, with errors that say which one failed, where, and on whom it waited.

Shape suffixes: P ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epoch_moe.checks import wrong


class ExpertParallelError(RuntimeError):
    """A collective of expert parallelism failed: a rank died, stalled beyond the group's time-out, or disagrees."""


@dataclass(frozen=True)
class Pending:
    """A collective under way.

    Attributes:
        work: what torch gave for it; None where it has ended already.
        name: of the collective, for errors.
        finish: what is still to do when it has ended; its value is that of `wait`.
    """

    work: Any
    name: str
    finish: Callable[[], Any]

    def wait(self) -> Any:
        """Wait for the collective (on a GPU: make the current stream wait) and return its result.

        Raises:
            ExpertParallelError: where it failed.
        """
        if self.work is not None:
            _named(self.name, self.work.wait)
        return self.finish()


def _named(name: str, call: Callable[[], Any]) -> Any:
    """Run ``call``; what torch raises about a lost or stalled rank is raised again with the collective's name."""
    try:
        return call()
    except ExpertParallelError:
        raise
    except (RuntimeError, ValueError) as error:
        rank = dist.get_rank() if dist.is_initialized() else -1
        raise ExpertParallelError(
            f"{name} failed on rank {rank}: a rank of the group has died, has not joined within the group's time-out, "
            f"or calls with other sizes. Look at the other ranks' output first. torch says: {error}"
        ) from error


class Ranks:
    """The ranks that share a model's experts.

    Args:
        group: a ``torch.distributed`` process group or a one-dimensional ``DeviceMesh``.

    The group belongs to `torch.distributed`, and is not kept alive: ``destroy_process_group`` must be able to end its
    threads. One that still ran when the interpreter ends would end the process (`std::terminate`, exit code -6).

    Attributes:
        rank: this process's number in it.
        world: P.
    """

    def __init__(self, group: Any):
        if group is None:
            raise ValueError(
                "expert parallelism needs an explicit process group: pass torch.distributed.group.WORLD, a group from "
                "new_group(), or a DeviceMesh"
            )
        if hasattr(group, "get_group") and hasattr(group, "ndim"):
            if group.ndim != 1:
                raise ValueError(f"the DeviceMesh has {group.ndim} dimensions: expected one, such as mesh['ep']")
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise wrong("group", group, "a torch.distributed process group or a one-dimensional DeviceMesh")
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"global rank {dist.get_rank()} does not belong to the group: call this on its members")

    @property
    def group(self) -> Any:
        """The process group.

        Raises:
            ExpertParallelError: it has been destroyed.
        """
        group = self._group()
        if group is None:
            raise ExpertParallelError(
                f"the process group of rank {self.rank} of {self.world} has been destroyed: decode before "
                "torch.distributed.destroy_process_group(), or load the model anew for another group"
            )
        return group

    def all_to_all(
        self,
        rows: Tensor,
        send: Sequence[int] | None,
        receive: Sequence[int] | None,
        name: str,
        finish: Callable[[Tensor], Any] = lambda out: out,
    ) -> Pending:
        """Start an exchange of rows: ``send[p]`` of them, in rank order, go to rank p (None: equal shares)."""
        count = rows.shape[0] if receive is None else sum(receive)
        receive, send = (None if s is None else list(s) for s in (receive, send))

        def start(out: Tensor, rows: Tensor) -> Any:
            return dist.all_to_all_single(out, rows, receive, send, group=self.group, async_op=True)

        return self._start(rows, count, start, name, finish)

    def all_gather(
        self, rows: Tensor, name: str, finish: Callable[[Tensor], Any] = lambda out: out
    ) -> Pending:
        """Start collecting the ranks' equally many rows, in rank order."""
        # torch 2.13 renamed it and warns about the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

        def start(out: Tensor, rows: Tensor) -> Any:
            return gather(out, rows, group=self.group, async_op=True)

        return self._start(rows, self.world * rows.shape[0], start, name, finish)

    def _start(
        self,
        rows: Tensor,
        count: int,
        start: Callable[[Tensor, Tensor], Any],
        name: str,
        finish: Callable[[Tensor], Any],
    ) -> Pending:
        """Begin a collective ``start(out, rows)`` that turns ``rows`` into ``count`` rows."""
        out = rows.new_empty((count, *rows.shape[1:]))
        if self.world == 1:
            out.copy_(rows)
            return Pending(None, name, lambda: finish(out))
        rows = rows.contiguous()
        work = _named(name, lambda: start(out, rows))

        def done() -> Any:
            _ = rows  # what is being sent must outlive the exchange
            return finish(out)

        return Pending(work, name, done)

    def maximum(self, values: Tensor, name: str) -> Tensor:
        """The largest value over the ranks, elementwise."""
        out = values.clone()
        if self.world > 1:
            _named(name, lambda: dist.all_reduce(out, op=dist.ReduceOp.MAX, group=self.group))
        return out

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """Every rank's value (something that can be pickled), in rank order."""
        everyone: list[Any] = [value] * self.world
        if self.world > 1:
            _named(name, lambda: dist.all_gather_object(everyone, value, group=self.group))
        return everyone

    def agree(self, what: dict[str, str], name: str = "comparing the ranks' settings") -> None:
        """Refuse to go on where the ranks describe themselves differently.

        Args:
            what: key -> description of this rank's setting.
            name: of the comparison, for errors.

        Raises:
            ExpertParallelError: naming the first setting that differs, and every rank's value of it.
        """
        everyone = self.gather_objects(what, name)
        for key in sorted(set().union(*everyone)):
            values = [other.get(key, "nothing") for other in everyone]
            if len(set(values)) > 1:
                by_rank = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise ExpertParallelError(
                    f"the ranks of the expert-parallel group disagree on {key}: {by_rank}. Start all of them with the "
                    "same model, configuration and settings"
                )

    def device(self) -> torch.device:
        """Where small tensors for this group's collectives must live."""
        backend = str(dist.get_backend(self.group))
        return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
