"""Recording traces: who is told what a model's forwards ask of their experts, and writes it down.

Shape suffixes: T rows of a forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from traces.trace import Trace, TraceForward

from epoch_moe.outputs import check_output
from epoch_moe.plan.slot import PlanSlot
from epoch_moe.residency.clock import Clock
from epoch_moe.residency.demand import Demand
from epoch_moe.residency.policies import Observer


class TraceRecorder:
    """An observer (`epoch_moe.residency.policies.Observer`) that keeps what it is told on the host.

    Args:
        num_layers, num_experts: of the model.
        bytes_per_expert: of routed weights, per layer.

    Attributes:
        trace: what was recorded so far.
    """

    def __init__(self, num_layers: int, num_experts: int, bytes_per_expert: Sequence[int]):
        self.trace = Trace(num_layers, num_experts, list(bytes_per_expert))
        self._number = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> TraceRecorder:
        # A copy of the model is another model, whose forwards are not part of this decode.
        return TraceRecorder(self.trace.num_layers, self.trace.num_experts, self.trace.bytes_per_expert)

    def observe(self, demand: Demand) -> None:
        """See `Observer.observe`."""
        if demand.forward != self._number:
            self._number = demand.forward
            self.trace.forwards.append(TraceForward())
        self.trace.forwards[-1].demands.append(demand)

    def end_forward(self, confidence_T: Tensor | None = None, live_T: Tensor | None = None) -> None:
        """See `Observer.end_forward`."""
        if self.trace.forwards:
            latest = self.trace.forwards[-1]
            latest.confidence_T = None if confidence_T is None else confidence_T.clone()
            latest.live_T = live_T


class _Both:
    """Tells a model's policy and a recorder."""

    def __init__(self, policy: Observer, recorder: TraceRecorder):
        self.policy, self.recorder = policy, recorder

    def observe(self, demand: Demand) -> None:
        self.recorder.observe(demand)
        self.policy.observe(demand)

    def end_forward(self, confidence_T: Tensor | None = None, live_T: Tensor | None = None) -> None:
        self.recorder.end_forward(confidence_T, live_T)
        self.policy.end_forward(confidence_T, live_T)


@contextmanager
def record_trace(model: Any, path: str | Path, about: dict[str, Any] | None = None) -> Iterator[TraceRecorder]:
    """Record which experts the forwards of a patched model use, whatever loop runs them.

    ::

        with record_trace(model, "decode.trace") as recorder:
            epoch_moe.generate(model, prompts)

    The file is written at the end, also when the decode raised: what was recorded until then is a trace too. Loops that
    do not call `BlockPlanContext.end_iteration` leave no confidences. Recording waits for the device once per layer.

    Args:
        model: patched by `epoch_moe.patch`; with a plan, its rows are told apart by what they are.
        path: of the file to write.
        about: free JSON that goes into it.

    Raises:
        ValueError: the model is not patched, or is being recorded already, or the path is no file's. Before the decode.
        OSError: the file cannot be written; ``recorder.trace``, and ``trace`` of the error, hold what it would. Where
            the decode raised too, that is its cause.
    """
    patched = getattr(model, "_epoch_moe", None)
    if patched is None:
        raise ValueError("recording needs patched MoE layers: call epoch_moe.patch(model) first")
    check_output(path)
    counts = {block.weights.layout.sizes()[0] for block in patched.blocks.values()}
    if len(counts) != 1:
        raise ValueError(f"the MoE layers have {sorted(counts)} experts: expected the same number in all of them")
    recorder = TraceRecorder(len(patched.blocks), counts.pop(), patched.bytes_per_expert())
    config = getattr(model, "config", None)
    recorder.trace.about = {"model_type": getattr(config, "model_type", None), **(about or {})}
    with patched.slot.holding("a recording"):  # unpatch, and another plan, wait for its end
        yield from _record(patched.slot, recorder, path)


def _record(slot: PlanSlot, recorder: TraceRecorder, path: str | Path) -> Iterator[TraceRecorder]:
    before: Any = slot.listener
    policy = None if before is None else before.observer
    if isinstance(policy, (TraceRecorder, _Both)):
        raise ValueError("this model is being recorded already: end that recording first")
    if before is None:
        slot.listener = Clock(recorder, recorder.trace.num_layers, recorder.trace.num_experts)
    else:  # experts outside of fast memory, whose policy listens
        before.observer = _Both(policy, recorder)
    failure: BaseException | None = None
    try:
        yield recorder
    except BaseException as error:
        failure = error
        raise
    finally:
        if before is None:
            slot.listener = None
        else:
            before.observer = policy
        try:
            recorder.trace.save(path)
        except OSError as error:
            error.trace = recorder.trace  # type: ignore[attr-defined]
            raise error from failure
