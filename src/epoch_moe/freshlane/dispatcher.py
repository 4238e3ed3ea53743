"""`FreshLaneDispatcher`: fresh rows to the ranks that own their experts, and the partial sums back.

Experts lie in contiguous ranges: of P ranks, rank p owns experts ``p * E / P`` up to ``(p + 1) * E / P``. Three
kinds (`epoch_moe.freshlane.dispatch_kinds`):

    local: one process, no exchange

    sharded: every rank has its own rows         replicated: every rank has all rows

    rank 0  x_RH --+--> rank 0's rows            x_RH  (on all ranks)
                   |                               |
                   +--> rank 1: once, though       each rank: its own experts' pairs of all rows
                        two of its experts           |
                        are wanted                 partial sums ---> summed over ranks, row by row,
    rank 1: its experts' pairs of received              `tree_sum` ----> y_RH on all ranks
            rows, summed to one row in fp32
                   |
    y_RH <---------+  summed over ranks by `tree_sum`, fp32, rounded once

Nothing is sent for a row and a rank without a pair. Empty pairs (id -1, or an id outside 0..E-1) read no expert and add
nothing. Every rank joins every exchange, with no rows too.

Shape suffixes: R rows of this rank, N rows received, K top-k, E experts, e = E / P experts of a rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from epoch_moe.checks import FLOAT_DTYPES, choice, tensor, whole, wrong
from epoch_moe.config import EpochConfig
from epoch_moe.freshlane.collectives import Pending, Ranks
from epoch_moe.freshlane.dispatch_kinds import (
    KINDS,
    Dispatched,
    DispatchHandle,
    ExpertRange,
    KindName,
    Traffic,
)
from epoch_moe.freshlane.shared_support import SharedSupport

Experts = Callable[[Dispatched], Tensor]
"""This rank's experts: one row ``[N,H]`` per received row, the sum over them, fp32 where ranks add theirs."""


class FreshLaneDispatcher(nn.Module):
    """Dispatch and combine of one layer's (or one model's) fresh rows over a process group.

    Args:
        num_experts: E; must be a multiple of the number of ranks.
        group: a process group or one-dimensional DeviceMesh.
        layout: ``"sharded"`` or ``"replicated"`` over the group; or ``"local"``: all experts are in this process, and
            there is no group.
        capacity: rows per pair of ranks for the sharded layout without host sync, equal on all ranks; None exchanges
            exact counts.

    Attributes:
        ranks: the group; None for the local layout.
        range: this rank's experts.
        traffic: what was sent so far.

    It has no parameters, no backward pass over ranks, and needs nothing else of this library.

    Example:
        >>> import torch
        >>> from epoch_moe import FreshLaneDispatcher
        >>> weight_eHH = torch.randn(8, 4, 4)  # this rank's experts; here all of them
        >>> def experts(arrived):  # x_NH, and of its pairs here: ids_NK (-1: none) and weights_NK (0 then)
        ...     y_NKH = torch.einsum("nh,nkgh->nkg", arrived.x_NH, weight_eHH[arrived.ids_NK])
        ...     return (y_NKH * arrived.weights_NK.unsqueeze(-1)).sum(dim=1)
        ...
        >>> dispatcher = FreshLaneDispatcher(8, layout="local")  # or (8, torch.distributed.group.WORLD) under torchrun
        >>> x_RH, ids_RK = torch.randn(3, 4), torch.tensor([[0, 5], [7, 1], [2, -1]])  # -1: no expert
        >>> y_RH = dispatcher(x_RH, ids_RK, torch.full((3, 2), 0.5), experts)
        >>> torch.allclose(y_RH[2], 0.5 * weight_eHH[2] @ x_RH[2], atol=1e-5)
        True
    """

    def __init__(
        self, num_experts: int, group: Any = None, *, layout: KindName = "sharded", capacity: int | None = None
    ):
        super().__init__()
        whole("num_experts", num_experts, "of a layer", least=1)
        choice("layout", layout, tuple(KINDS))
        if capacity is not None:
            whole("capacity", capacity, "rows per pair of ranks", least=1)
            if layout != "sharded":
                raise ValueError(f"capacity={capacity} with layout={layout!r}: only 'sharded' has one; pass None")
        if layout == "local" and group is not None:
            raise ValueError("layout='local' with a process group: pass 'sharded' or 'replicated', or leave group out")
        self.layout, self.capacity = layout, capacity
        self.ranks = None if layout == "local" else group if isinstance(group, Ranks) else Ranks(group)
        self.range = ExpertRange.of(num_experts, self.ranks)
        self.traffic = Traffic()
        self.kind = KINDS[layout](self.range, self.ranks, self.traffic, capacity)

    @property
    def num_experts(self) -> int:
        """Experts of the layer, on all ranks together: E."""
        return self.range.total

    @property
    def first_expert(self) -> int:
        """Number of this rank's first expert."""
        return self.range.first

    @property
    def local_experts(self) -> int:
        """Experts of the layer on this rank: e = E / P."""
        return self.range.count

    def forward(
        self,
        x_RH: Tensor,
        ids_RK: Tensor,
        weights_RK: Tensor,
        experts: Experts,
        *,
        name: str = "dispatch",
        meanwhile: Callable[[], None] = lambda: None,
        meanwhile_back: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """`dispatch`, this rank's experts, `combine`: each row's weighted sum of experts, wherever they are.

        Args:
            x_RH, ids_RK, weights_RK: as `dispatch` takes them.
            experts: called once, also without a row: ``[N,H]`` from the `Dispatched` that arrived.
            name: of the layer, for errors.
            meanwhile: called once, while rows travel to their experts, or sums back.
            meanwhile_back: called once, while sums come back.

        Returns:
            ``[R,H]`` in the dtype of ``x_RH``.

        Raises:
            As `dispatch` and `combine`.
        """
        if not callable(experts):
            raise wrong("experts", experts, "a function that gives one row [N,H] per row that arrived")
        pending = self.dispatch(x_RH, ids_RK, weights_RK, name=name)
        if self.kind.rows_travel:
            meanwhile()
        arrived = pending.wait()
        returning = self.combine(experts(arrived), arrived.handle)
        if not self.kind.rows_travel:
            meanwhile()
        meanwhile_back()
        y_RH: Tensor = returning.wait()
        return y_RH

    def dispatch(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, *, name: str = "dispatch") -> Pending:
        """Start sending rows to their experts.

        Args:
            x_RH: this rank's fresh rows (replicated: everybody's, the same on all ranks); R may be 0 and may differ
                between ranks.
            ids_RK: int64 global expert ids; `NO_EXPERT` or an id outside 0..E-1 is no pair.
            weights_RK: fp32 combine weights, scaling included.
            name: what this is for ("layer 3"), for errors.

        Returns:
            A `Pending` whose ``wait()`` gives `Dispatched`. Compute what does not need the experts before waiting.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit together.
            RuntimeError: gradients are required, and there is a group: nothing brings them back from other ranks.
            ExpertParallelError: a failed exchange, from ``wait()`` too.
        """
        if not torch.compiler.is_compiling():  # a traced forward is that of a block
            tensor("x_RH", x_RH, FLOAT_DTYPES, ("rows", "hidden"))
            tensor("ids_RK", ids_RK, torch.int64, (x_RH.shape[0], "top-k"), x_RH.device)
            tensor("weights_RK", weights_RK, torch.float32, ids_RK.shape, x_RH.device)
        self._check_no_gradients(x_RH, weights_RK)
        return self.kind.dispatch(x_RH, ids_RK, weights_RK, name)

    def combine(self, y_NH: Tensor, handle: DispatchHandle) -> Pending:
        """Start bringing partial sums back.

        Args:
            y_NH: one row per received row: the sum over this rank's experts. It travels in its own dtype (fp32, where
                no bit may be lost), and is summed over ranks in fp32.
            handle: of the `dispatch` that gave the rows.

        Returns:
            A `Pending` whose ``wait()`` gives ``y_RH`` in the dtype of the source rows.

        Raises:
            ValueError: not one row per row that arrived.
            RuntimeError, ExpertParallelError: as `dispatch`.
        """
        if not torch.compiler.is_compiling():
            tensor("y_NH", y_NH, FLOAT_DTYPES, (handle.arrived, "hidden"))
        self._check_no_gradients(y_NH)
        return self.kind.combine(y_NH, handle)

    def _check_no_gradients(self, *tensors: Tensor) -> None:
        if self.ranks is not None and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise RuntimeError("experts on several ranks have no backward pass: run under torch.no_grad()")

    def check_capacity(self) -> None:
        """Raise where a dispatch since the last call had more rows for a rank than `capacity` (one host sync).

        Raises:
            ExpertParallelError: on the rank whose rows did not fit; its results since then are incomplete.
        """
        self.kind.check_capacity()

    def shared_support(self, config: EpochConfig, name: str) -> SharedSupport | None:
        """The exchange with ranks that have other sequences, where one support is kept for all; else None.

        Args:
            config: of the plan.
            name: of the layer, for errors.
        """
        if self.ranks is None or self.layout == "replicated" or config.support_scope == "sequence":
            return None
        return SharedSupport(self.ranks, name)

    def refused(self, what: str) -> RuntimeError | None:
        """The error of what needs all experts, or that would take the group of ranks along; None where all are here."""
        if self.ranks is None or self.ranks.world == 1:
            return None
        here = self.range.numbers
        return RuntimeError(
            f"{what} is refused: rank {self.ranks.rank} of {self.ranks.world} holds experts {here.start} to "
            f"{here.stop - 1} of {self.range.total} only, and its group of processes. Use the checkpoint "
            "that the model comes from, or a model loaded without ep_group"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if self.ranks is not None:
            doing = "copying or pickling a model whose experts are split over ranks"
            raise self.refused(doing) or RuntimeError(f"{doing} is refused: its group of processes cannot be copied")
        return local_dispatcher, (self.range.total,)

    def extra_repr(self) -> str:
        """Experts, ranks and layout, for `print(model)`."""
        ranks = 1 if self.ranks is None else self.ranks.world
        return f"experts={self.range.total}, ranks={ranks}, layout={self.layout!r}, capacity={self.capacity}"


def local_dispatcher(num_experts: int) -> FreshLaneDispatcher:
    """The dispatcher of a layer whose experts are all in this process."""
    return FreshLaneDispatcher(num_experts, layout="local")
