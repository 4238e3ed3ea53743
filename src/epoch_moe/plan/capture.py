"""`CapturedIterations`: a plan's iterations recorded once per kind, as CUDA graphs, and replayed.

A small iteration on a GPU costs more in launches than in work. Under ``backend="triton"`` an iteration reads no value
on the host, its buffers lie at fixed addresses, and its shapes depend on the kind of forward alone: a refresh or not,
the capacity of the packed rows, the shape of the block. So each kind can be recorded as a graph. A block's cold pass is
never recorded.

Shape suffixes: B sequences, S rows per sequence, N window rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.forward import ForwardPlan
from epoch_moe.plan.patched import Patched
from epoch_moe.plan.slot import DenseForward

Run = Callable[[Tensor], Any]


class Graph(Protocol):
    """Something that records device work once and repeats it on the same memory."""

    def record(self) -> AbstractContextManager[None]:
        """Record what is done within."""
        ...

    def first(self) -> None:
        """Do what was recorded, unless recording has done it."""
        ...

    def replay(self) -> None:
        """Do it again."""
        ...


class CudaGraph:
    """`Graph` by `torch.cuda.CUDAGraph`, which records without executing."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def record(self) -> Iterator[None]:
        """See `Graph`."""
        with torch.cuda.graph(self._graph):
            yield

    def first(self) -> None:
        """See `Graph`."""
        self._graph.replay()

    def replay(self) -> None:
        """See `Graph`."""
        self._graph.replay()


class Iterations(Protocol):
    """What a recording needs of a `BlockPlanContext`, which documents it."""

    config: EpochConfig | None
    counters: Counters
    recording: bool

    @property
    def latest(self) -> ForwardPlan | DenseForward | None:
        """The last forward of the open block."""
        ...

    @property
    def iteration(self) -> Callable[..., AbstractContextManager[None]]:
        """Surround one forward."""
        ...

    def open_plan(self) -> BlockPlan:
        """The plan of the open block."""
        ...

    def replayed(self, forward: ForwardPlan) -> None:
        """Note on the host that a recorded iteration was done again."""
        ...

    def end_block(self) -> None:
        """Discard the open block."""
        ...


def check_capture(context: Iterations, patched: Patched, *, on_gpu: bool) -> None:
    """Refuse a decode that cannot be captured, saying why.

    Args:
        context: of the decode.
        patched: its model.
        on_gpu: the recorder needs a GPU.
    """
    if context.config is None:
        raise ValueError("capture: this decode has no plan, pass plan=EpochConfig(...) to open_context")
    device = patched.device
    if on_gpu and (device.type != "cuda" or not torch.cuda.is_available()):
        raise RuntimeError(f"capture: CUDA graphs need a GPU, and the experts are on {device}: run without capture")
    if patched.ep is not None:
        raise RuntimeError("capture: the experts are on several ranks, whose exchanges have other sizes every time")
    if patched.slot.listener is not None:
        raise RuntimeError(
            "capture: experts come and go between the tiers of a residency, or are being recorded: run without capture"
        )
    if context.counters.recorder is not None:
        raise RuntimeError("capture: a record of experts (record=True) reads every forward: omit it")


@dataclass(frozen=True)
class _Recorded:
    """One kind of iteration: its graph, and the tensors that it reads and writes."""

    graph: Graph
    inputs: dict[str, Tensor]
    forward: ForwardPlan
    output: Any


class CapturedIterations:
    """Runs a model's iterations under a context, from recordings where there are any.

    Made by `BlockPlanContext.capture`. A call takes the place of ``with context.iteration(...)`` and the forward in it.
    The first iteration of a kind runs as usual, the second one is recorded, later ones are replayed.

    Args:
        context: an open context, with a plan.
        patched: its model's blocks.
        run: the forward: token ids ``[B,S]`` to a tensor, or a tuple or dict of them. It must not read values on the
            host, and what it reads (weights, masks, K/V) must lie at the same addresses in every call of one kind.
        graph: makes a recorder.
    """

    def __init__(self, context: Iterations, patched: Patched, run: Run, graph: Callable[[], Graph] = CudaGraph):
        self.context, self._patched, self.run, self._make = context, patched, run, graph
        self._recorded: dict[Hashable, _Recorded] = {}
        self._seen: set[Hashable] = set()
        self._weights_at: list[tuple[int, int]] = []
        self.replays = 0

    def __call__(
        self,
        ids_BS: Tensor,
        *,
        mask_id: int | None = None,
        valid_BS: Tensor | None = None,
        lead: int = 0,
        live_BN: Tensor | None = None,
        changed_BN: Tensor | None = None,
        capacity: int | None = None,
    ) -> Any:
        """One iteration; arguments as `BlockPlanContext.iteration`.

        Returns:
            What ``run`` returned. After a replay these are the recording's own tensors: the next iteration of the kind
            overwrites them.

        Raises:
            RuntimeError: no block is open; this plan's rows are lists; or layers left the plan while it was recorded.
        """
        plan = self.context.open_plan()
        if plan.compact is None:
            raise RuntimeError(
                "capture: this block's rows are lists on the host. They are on the device with backend='triton', "
                "experts on one device and no trace"
            )
        given = {"ids_BS": ids_BS, "valid_BS": valid_BS, "live_BN": live_BN, "changed_BN": changed_BN}
        inputs: dict[str, Any] = {name: tensor for name, tensor in given.items() if tensor is not None}
        options: dict[str, Any] = {"mask_id": mask_id, "lead": lead, "capacity": capacity}
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        self._patched.ensure_stacked()
        weights_at = self._patched.versions()
        if plan.model_changed or weights_at != self._weights_at:
            # An ordinary forward drops rows of the old model; recordings hold the addresses of its weights.
            self._seen.clear()
            self._recorded.clear()
        self._weights_at = weights_at
        key = (plan.identity, plan.is_refresh, tuple(options.values()), shapes)
        if plan.forwards == 0 or key not in self._seen:
            if plan.forwards:
                self._seen.add(key)
            with self.context.iteration(**inputs, **options):
                return self.run(ids_BS)
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = self._record(inputs, options)
        else:
            for name, tensor in inputs.items():
                recorded.inputs[name].copy_(tensor)
            recorded.graph.replay()
            self.context.replayed(recorded.forward)
            self.replays += 1
        self.context.counters.add_history(
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in self._numbers(recorded)}
        )
        return recorded.output

    def _record(self, inputs: dict[str, Any], options: dict[str, Any]) -> _Recorded:
        graph = self._make()
        fixed: dict[str, Any] = {name: tensor.clone() for name, tensor in inputs.items()}
        left = dict(self.context.counters.fallbacks)
        self.context.recording = True
        try:
            with graph.record(), self.context.iteration(**fixed, **options):
                output = self.run(fixed["ids_BS"])
        finally:
            self.context.recording = False
        if dict(self.context.counters.fallbacks) != left:
            now = dict(self.context.counters.fallbacks)
            self.context.end_block()
            raise RuntimeError(
                f"capture: layers left the plan while the iteration was recorded (fallbacks {left} before, {now} "
                "after), which a recording cannot count: run these iterations without capture"
            )
        graph.first()
        forward = self.context.latest
        assert isinstance(forward, ForwardPlan)
        return _Recorded(graph, fixed, forward, output)

    def _numbers(self, recorded: _Recorded) -> list[tuple[str, int | Tensor]]:
        """The history's entry: the recording's numbers of rows, and this forward's own number."""
        return list((recorded.forward.numbers() | {"forward": self.context.open_plan().forwards - 1}).items())
