"""`ResidentExperts`: one layer's experts, some in slots of fast memory, the others where they lie.

A forward of a layer, when its rows are routed: the placement says which experts are in a slot (hits), which are
brought into one (loads) and which pass through (bypassed); hits are one grouped product over the slots, while a thread
reads the first missing expert; each missing one is a product of its own when it has arrived; and one combine joins all
pairs in the fixed order. An expert's segment of rows is never cut, so each product is the one that it would be with all
experts in memory, and so is every bit of the result where rows are multiples of 64 bytes (see
`epoch_moe.experts.run`).

Slots are allocated once. Which experts lie in them changes by copying weights, never by allocating.

Shape suffixes: R rows, K top-k, P pairs, H hidden, E experts, F expert inner size, n slots.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from epoch_moe.experts.absent import absent_views
from epoch_moe.experts.run import Backend, pick_backend, segments_of
from epoch_moe.experts.views import ExpertViews
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.residency.clock import Clock
from epoch_moe.residency.demand import Demand
from epoch_moe.residency.loader import PASSING, Arrivals, Job, LayerCounts, Loader, passing
from epoch_moe.residency.placement import LayerPlacement, Move, Steps
from epoch_moe.residency.policies import Policy
from epoch_moe.residency.sources import ExpertSource
from epoch_moe.routing import NO_EXPERT
from epoch_moe.worklist import Worklist, build_worklist, combine, count_pairs, expert_groups


class ResidentExperts(ExpertWeights):
    """`ExpertWeights` that are not all in fast memory.

    Args:
        index: this layer's place among the MoE layers.
        name: of the layer, for errors.
        whole: what the layer had before, for when it gets its experts back. Its modules hold parameters without memory
            meanwhile.
        source: all of the layer's experts.
        slots: n, how many experts fast memory holds.
        dtype: of the weights.
        device: of fast memory.
        policy, clock, loader: shared with the model's other layers.

    Attributes:
        fast: the weights in the slots, ``[n,2F,H]`` and ``[n,H,F]``; `placement` says whose they are.
        placement: which expert lies in which slot.
        counts: bytes and seconds so far.
        kept: the parameters that the modules had before, emptied; None where they never had any.
    """

    def __init__(
        self,
        index: int,
        name: str,
        whole: ExpertWeights,
        source: ExpertSource,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        policy: Policy,
        clock: Clock,
        loader: Loader,
    ):
        super().__init__(whole.experts, whole.layout_name)
        self.index, self.name, self.whole, self.source = index, name, whole, source
        self.policy, self.clock, self.loader = policy, clock, loader
        self.num_experts, self.inner, self.hidden = whole.layout.sizes()
        self.kept: list[nn.Parameter] | None = None
        self.placement = LayerPlacement(slots, self.num_experts)
        self.counts = LayerCounts()
        self._conversions = 0
        self._allocate(dtype, device)

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.fast = ExpertViews.empty(self.placement.slots, self.inner, self.hidden, dtype=dtype, device=device)
        error = str(self.refused("reading the stacked weights"))
        self._outline = absent_views(self.num_experts, self.inner, self.hidden, dtype, device, error)

    # ------------------------------------------------------------------------------- what a block asks of its weights

    def ensure(self) -> ExpertViews:
        """Shape, dtype and device of all experts, ``[E,2F,H]`` and ``[E,H,F]``; using their values is an error."""
        return self._outline

    outline = ensure

    def pick(self, requested: Backend) -> Backend:
        """As `ExpertWeights.pick`, of experts that lie in several places."""
        return pick_backend(requested, self.fast, pieces=True)

    @property
    def version(self) -> tuple[int, int]:
        """Another value after every change of the weights."""
        return self._conversions, 0

    def is_stacked(self) -> bool:
        """Always: nobody else holds the slots."""
        return True

    def differentiable(self) -> ExpertViews:
        """Refused."""
        raise RuntimeError(
            f"{self.name}: gradients are asked for, and the experts are not all in memory, so there is no backward "
            "pass: run under torch.no_grad(), or call epoch_moe.unpatch to train"
        )

    def refused(self, what: str) -> RuntimeError:
        """The error of everything that needs all experts as tensors."""
        return RuntimeError(
            f"{self.name}: {what} needs all experts in memory, and {self.placement.slots} of {self.num_experts} are. "
            "Call epoch_moe.unpatch(model), which reads them back, or use the checkpoint that they come from"
        )

    # ------------------------------------------------------------------------------------------------------ a forward

    def compute(
        self,
        x_NH: Tensor,
        ids_NK: Tensor,
        weights_NK: Tensor,
        views: ExpertViews,
        *,
        backend: Backend = "auto",
        part: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
        tell: Callable[[], Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What `ExpertWeights.compute` gives with all experts in memory.

        Args:
            x_NH, ids_NK, weights_NK, part, dtype: see there.
            views: shapes only, from `ensure`.
            backend: as configured; resolved for fast memory.
            tell: gives the `Demand` of these rows; None: the clock is told of rows that belong to no forward.

        Raises:
            ResidencyError: a missing expert cannot be read.
        """
        if torch.is_grad_enabled() and x_NH.requires_grad:
            self.differentiable()
        run = torch.compiler.disable(self._run) if torch.compiler.is_compiling() else self._run
        if tell is None:
            tell = partial(self.clock.observe, self.index, ids_NK, weights_NK, None)
        y_NH: Tensor = run(x_NH, ids_NK, weights_NK, backend, part, dtype or x_NH.dtype, tell)
        return y_NH, count_pairs(ids_NK, self.num_experts)

    def _run(
        self,
        x_RH: Tensor,
        ids_RK: Tensor,
        weights_RK: Tensor,
        backend: Backend,
        part: tuple[int, int] | None,
        dtype: torch.dtype,
        tell: Callable[[], Demand],
    ) -> Tensor:
        segments = segments_of(pick_backend(backend, self.fast, pieces=True))
        with self.clock.turn():
            demand = tell()
            steps = Steps([], [], [])  # rows of other ranks only: no forward of this layer
            if demand.experts:
                steps = self.placement.plan(demand, self.policy, self.loader.worth_loading)
            jobs: list[Job] = [(expert, slot) for expert, slot, _ in steps.loads]
            jobs += [(expert, None) for expert in steps.bypass]
            # Slots come first in the order of pairs, then missing experts in the order in which they are brought.
            slots, key_E = self.placement.slots, self.placement.slot_of_E.clone()
            for number, (expert, _) in enumerate(jobs):
                key_E[expert] = slots + number
            keys_RK = key_E.to(ids_RK.device)[ids_RK.clamp_min(0)].masked_fill(ids_RK == NO_EXPERT, NO_EXPERT)
            # The order of a row's sum is that of all experts, wherever they lie.
            groups = expert_groups(ids_RK, self.num_experts, part)
            worklist = replace(build_worklist(keys_RK, slots + len(jobs)), groups=groups)
            asked = torch.tensor(demand.experts, dtype=torch.int64)
            pairs_N = torch.zeros(slots + len(jobs), dtype=torch.int64)
            pairs_N[key_E[asked]] = demand.counts_E[asked]
            out_PH = self._products(x_RH[worklist.row_P], worklist, pairs_N.tolist(), jobs, steps, segments)
            return combine(out_PH, weights_RK, worklist, dtype)

    def _products(
        self,
        x_PH: Tensor,
        worklist: Worklist,
        pairs_N: list[int],
        jobs: list[Job],
        steps: Steps,
        segments: Callable[..., Tensor],
    ) -> Tensor:
        """Each pair's output ``[P,H]``: slots in one go, then missing experts (``jobs``) as they come in.

        Those that lie on the host are computed there. ``worklist`` and ``pairs_N``, the pairs of each, are over the
        slots, then the experts of ``jobs``; ``segments`` computes them, see `segments_of`.
        """
        counts, slots = self.counts, self.placement.slots
        swaps = {move[0]: move for move in steps.swaps}
        begin = sum(pairs_N[:slots])
        arrived: set[int] = set()
        out_PH = torch.empty_like(x_PH)
        try:
            with Arrivals(self.loader, self.source, self.fast, jobs, counts) as arrivals:
                start = time.perf_counter()
                if begin:
                    out_PH[:begin] = segments(x_PH[:begin], self.fast, pairs_N[:slots], worklist.ends_E[:slots])
                counts.slot_seconds += time.perf_counter() - start
                first, x, out = 0, x_PH, out_PH
                for (expert, loaded, weights), rows in zip(arrivals, pairs_N[slots:], strict=True):
                    if loaded:
                        arrived.add(expert)
                    start = time.perf_counter()
                    if weights.down_EHF.device != x.device:  # and all that follow are the host's: rows travel once
                        first, x = begin, x_PH[begin:].to("cpu")
                        out = torch.empty_like(x)
                    own = slice(begin - first, begin - first + rows)
                    ends = torch.tensor([rows], dtype=torch.int32, device=x.device)
                    out[own] = segments(x[own], weights, [rows], ends)
                    begin += rows
                    if expert in swaps:
                        self._fill_slot(swaps[expert], weights)
                    seconds = time.perf_counter() - start
                    if loaded:
                        counts.slot_seconds += seconds
                    else:
                        counts.bypass_seconds += seconds
        except BaseException:
            # Their slots hold nothing that could be used, or half of it.
            self.placement.forget(expert for expert, slot in jobs if slot is not None and expert not in arrived)
            raise
        if out is not out_PH:
            out_PH[first:begin] = out[: begin - first].to(out_PH.device)
        return out_PH

    def _fill_slot(self, move: Move, weights: ExpertViews) -> None:
        _, slot, _ = move
        self.fast.gate_up_E2FH[slot].copy_(weights.gate_up_E2FH[0])
        self.fast.down_EHF[slot].copy_(weights.down_EHF[0])
        self.placement.swap(move)

    # ------------------------------------------------------------------------------------------------ the modules' side

    def take_parameters(self) -> None:
        """Put parameters without memory in place of the modules' own, which are kept, emptied."""
        self.kept = []
        for module, name in self.layout.owners():
            param = module._parameters[name]
            assert param is not None
            self.kept.append(param)
            module._parameters[name] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        for param in self.kept:
            param.data = param.data.new_empty(0)
        self.whole.release()

    def give_back(self, stacked: ExpertViews) -> None:
        """Make the modules' parameters views of ``stacked``, which holds all experts."""
        places = self.layout.places(stacked.gate_up_E2FH, stacked.down_EHF)
        for number, ((module, name), place) in enumerate(zip(self.layout.owners(), places, strict=True)):
            meta = module._parameters[name]
            assert meta is not None
            param = nn.Parameter(place, meta.requires_grad) if self.kept is None else self.kept[number]
            param.data = place
            module._parameters[name] = param

    def read_all(self) -> ExpertViews:
        """All experts, ``[E,2F,H]`` and ``[E,H,F]`` in memory on the device.

        Raises:
            ResidencyError: one cannot be read.
        """
        where: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        stacked = ExpertViews.empty(self.num_experts, self.inner, self.hidden, **where)
        with torch.inference_mode(False), torch.no_grad():
            buffer = passing(self.loader.buffers, self.dtype, self.device)[0]
            for expert in range(self.num_experts):
                self.source.read(expert, *buffer)
                stacked.gate_up_E2FH[expert].copy_(buffer[0])
                stacked.down_EHF[expert].copy_(buffer[1])
        return stacked

    def follow(self, fn: Callable[[Tensor], Tensor], move: Callable[[], object]) -> None:
        """`nn.Module._apply` of a block: ``move()`` applies ``fn`` to its parameters, and fast memory follows.

        It is empty after that. Values are those that a whole model would have: what is read from now on goes through
        the same conversions.
        """
        owners = self.layout.owners()
        taken = [module._parameters.pop(name) for module, name in owners]  # `.to()` cannot move what has no memory
        try:
            move()
        finally:
            for (module, name), param in zip(owners, taken, strict=True):
                module._parameters[name] = param
        there = fn(self.fast.down_EHF.new_zeros(1))
        if there.device.type == "meta":
            raise self.refused("moving to the meta device and back")
        if there.dtype == self.dtype and there.device == self.device:
            return
        if there.dtype != self.dtype:
            self.source = self.source.convert(self.dtype, there.dtype)
        for use in PASSING:
            self.loader.buffers.free(use, self.dtype, self.device.type == "cuda")
        self._conversions += 1
        self.placement.forget(range(self.num_experts))
        self._allocate(there.dtype, there.device)
        passing(self.loader.buffers, self.dtype, self.device)
        for module, name in owners:
            meta = module._parameters[name]
            assert meta is not None
            module._parameters[name] = nn.Parameter(meta.to(there.dtype), meta.requires_grad)
        for param in self.kept or ():
            param.data = param.data.to(there.device, there.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> ResidentExperts:
        # Slots of its own, empty; the same files, which are only read.
        parts = self.whole, self.source, self.policy, self.clock, self.loader, self.kept, self.counts
        whole, source, policy, clock, loader, kept, counts = copy.deepcopy(parts, memo)
        new = memo[id(self)] = ResidentExperts(
            self.index, self.name, whole, source, self.placement.slots, self.dtype, self.device, policy, clock, loader
        )
        new.kept, new.counts, new._conversions = kept, counts, self._conversions
        new.placement.counts = replace(self.placement.counts)
        return new

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self.name}: a model with experts outside of its memory cannot be pickled: call epoch_moe.unpatch first"
        )
