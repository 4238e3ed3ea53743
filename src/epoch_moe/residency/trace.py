"""Traces: what a decode asked of its experts, recorded to a file and read back as demands.

A trace is one safetensors file; what is no tensor is JSON in its header. It holds, per forward and MoE layer, which
rows went to which experts with what weights, the rows' classes, and what the decoder thought of each row.

Shape suffixes: D forwards, L MoE layers, V (forward, layer) entries, R rows of all entries, Q rows of all row sets,
T rows of all forwards, K top-k.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epoch_moe.plan.block_plan import ForwardPlan
from epoch_moe.plan.packed import ListedRows
from epoch_moe.plan.slot import DenseForward
from epoch_moe.residency.demand import (
    Demand,
    classes_of,
    dense_classes_of,
    dense_demand,
    live_rows,
    planned_demand,
)

FORMAT = "epoch_moe.trace"
VERSION = 1
NONE = -1
_TENSORS = (
    "forwards_DX",
    "entries_VX",
    "row_Q",
    "class_Q",
    "ids_RK",
    "weights_RK",
    "confidence_T",
    "live_T",
)


@dataclass
class TraceForward:
    """One forward.

    Attributes:
        demands: of the layers that it reached, in order.
        confidence_T: fp32, what the decoder thought of each row; NaN = nothing; None = it did not say.
        live_T: bool, rows that were live in it; None where no plan told.
    """

    demands: list[Demand] = field(default_factory=list)
    confidence_T: Tensor | None = None
    live_T: Tensor | None = None


@dataclass
class Trace:
    """A recorded decode.

    Attributes:
        num_layers: L.
        num_experts: E.
        bytes_per_expert: of routed weights, per layer.
        about: what it is a trace of; free JSON.
        forwards: in order.
    """

    num_layers: int
    num_experts: int
    bytes_per_expert: list[int]
    about: dict[str, Any] = field(default_factory=dict)
    forwards: list[TraceForward] = field(default_factory=list)

    def passes(self) -> list[list[list[int]]]:
        """For each layer, the experts of each of its forwards, in order."""
        layers: list[list[list[int]]] = [[] for _ in range(self.num_layers)]
        for forward in self.forwards:
            for demand in forward.demands:
                layers[demand.layer].append(demand.experts)
        return layers

    def uses_LE(self) -> Tensor:
        """int64, how many forwards used each expert: a profile for the policy ``"static"``."""
        uses_LE = torch.zeros(self.num_layers, self.num_experts, dtype=torch.int64)
        for forward in self.forwards:
            for demand in forward.demands:
                uses_LE[demand.layer] += demand.counts_E > 0
        return uses_LE

    def save(self, path: str | Path) -> None:
        """Write the file."""
        from safetensors.torch import save_file

        save_file(_pack(self), str(path), metadata={FORMAT: json.dumps(self._header())})

    def _header(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "num_layers": self.num_layers,
            "num_experts": self.num_experts,
            "bytes_per_expert": self.bytes_per_expert,
            "about": self.about,
        }


def load_trace(path: str | Path) -> Trace:
    """Read a trace.

    Raises:
        ValueError: the file holds something else, or a trace of another version.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get(FORMAT)
            names = set(file.keys())
            if text is None or not names >= set(_TENSORS):
                raise ValueError(f"{path} is no trace of epoch_moe: record one with epoch_moe.record_trace")
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or an incomplete one: {error}") from error
    header = json.loads(text)
    if header["version"] != VERSION:
        raise ValueError(f"{path} is a trace of version {header['version']}: this library reads version {VERSION}")
    trace = Trace(header["num_layers"], header["num_experts"], header["bytes_per_expert"], header["about"])
    trace.forwards = _unpack(trace, tensors)
    return trace


def _pack(trace: Trace) -> dict[str, Tensor]:
    """Tensors of a trace; rows that several layers of a forward share are written once."""
    forwards: list[list[int]] = []
    entries: list[list[int]] = []
    rows: list[Tensor] = []
    classes: list[Tensor] = []
    ids: list[Tensor] = []
    weights: list[Tensor] = []
    confidences: list[Tensor] = []
    live: list[Tensor] = []
    row_place = num_rows = 0
    for number, forward in enumerate(trace.forwards):
        first = forward.demands[0] if forward.demands else None
        known = 0 if forward.confidence_T is None else forward.confidence_T.numel()
        told = 0 if forward.live_T is None else forward.live_T.numel()
        forwards.append([-1 if first is None else first.forward, known, told])
        if forward.confidence_T is not None:
            confidences.append(forward.confidence_T)
        if forward.live_T is not None:
            live.append(forward.live_T)
        last: Demand | None = None
        for demand in forward.demands:
            same = last is not None and torch.equal(last.row_R, demand.row_R)
            if last is None or not same or not torch.equal(last.class_R, demand.class_R):
                row_place = num_rows
                num_rows += demand.row_R.numel()
                rows.append(demand.row_R.int())
                classes.append(demand.class_R)
            refresh = NONE if demand.to_refresh is None else demand.to_refresh
            seq_len = NONE if demand.seq_len is None else demand.seq_len
            size = demand.row_R.numel()
            entries.append(
                [number, demand.layer, demand.forward, int(demand.cold), refresh, seq_len, demand.lead, row_place, size]
            )
            ids.append(demand.ids_RK.short())
            weights.append(demand.weights_RK)
            last = demand

    def joined(parts: list[Tensor], empty: Tensor) -> Tensor:
        return torch.cat(parts).contiguous() if parts else empty

    return {
        "forwards_DX": torch.tensor(forwards, dtype=torch.int64).reshape(-1, 3),
        "entries_VX": torch.tensor(entries, dtype=torch.int64).reshape(-1, 9),
        "row_Q": joined(rows, torch.empty(0, dtype=torch.int32)),
        "class_Q": joined(classes, torch.empty(0, dtype=torch.int8)),
        "ids_RK": joined(ids, torch.empty(0, 1, dtype=torch.int16)),
        "weights_RK": joined(weights, torch.empty(0, 1)),
        "confidence_T": joined(confidences, torch.empty(0)),
        "live_T": joined(live, torch.empty(0, dtype=torch.bool)),
    }


def _unpack(trace: Trace, tensors: dict[str, Tensor]) -> list[TraceForward]:
    forwards: list[TraceForward] = []
    known_place = live_place = 0
    for _, known, told in tensors["forwards_DX"].tolist():
        confidence_T = tensors["confidence_T"][known_place : known_place + known] if known else None
        live_T = tensors["live_T"][live_place : live_place + told] if told else None
        known_place, live_place = known_place + known, live_place + told
        forwards.append(TraceForward([], confidence_T, live_T))
    place = 0
    ids_RK, weights_RK = tensors["ids_RK"].long(), tensors["weights_RK"]
    row_Q = tensors["row_Q"].long()
    for number, layer, forward, cold, refresh, seq_len, lead, rows, size in tensors["entries_VX"].tolist():
        forwards[number].demands.append(
            Demand(
                layer=layer,
                forward=forward,
                cold=bool(cold),
                ids_RK=ids_RK[place : place + size],
                weights_RK=weights_RK[place : place + size],
                row_R=row_Q[rows : rows + size],
                class_R=tensors["class_Q"][rows : rows + size],
                to_refresh=None if refresh == NONE else refresh,
                num_experts=trace.num_experts,
                seq_len=None if seq_len == NONE else seq_len,
                lead=lead,
            )
        )
        place += size
    return forwards


class TraceRecorder:
    """Listens to a patched model's routing (`epoch_moe.plan.slot.Tracer`) and keeps it on the host.

    Recording waits for the device once per layer and forward. Forwards of one thread at a time.

    Args:
        num_layers, num_experts: L and E.
        bytes_per_expert: of routed weights, per layer.

    Attributes:
        trace: what was recorded so far.
    """

    def __init__(self, num_layers: int, num_experts: int, bytes_per_expert: Sequence[int]):
        self.trace = Trace(num_layers, num_experts, list(bytes_per_expert))
        self._forward: ForwardPlan | DenseForward | None = None
        self._layer = num_layers
        self._shape: tuple[int, ...] = ()
        self._cold = True
        self._classes: dict[int, Tensor] = {}

    def add_layer(
        self,
        layer: int,
        forward: ForwardPlan | DenseForward | None,
        rows: ListedRows | Tensor | None,
        ids_RK: Tensor,
        weights_RK: Tensor,
    ) -> None:
        """See `epoch_moe.plan.slot.Tracer.add_layer`."""
        trace = self.trace
        # Without a context nothing tells forwards apart but the order of their layers.
        if forward is not self._forward or (forward is None and layer <= self._layer) or not trace.forwards:
            trace.forwards.append(TraceForward())
            self._forward, self._classes = forward, {}
            self._cold, self._shape = ids_RK.shape != self._shape, tuple(ids_RK.shape)
        self._layer = layer
        common = (layer, len(trace.forwards) - 1, ids_RK.detach(), weights_RK.detach(), trace.num_experts)
        if isinstance(forward, ForwardPlan) and isinstance(rows, ListedRows):
            key = id(rows)
            if key not in self._classes:
                self._classes[key] = classes_of(forward, rows).cpu()
            demand = planned_demand(forward, rows, *common, class_R=self._classes[key])
        elif isinstance(forward, ForwardPlan):
            demand = dense_demand(*common, seq_len=forward.ids_BS.shape[1], lead=forward.lead, cold=forward.cold)
        elif isinstance(forward, DenseForward):
            demand = dense_demand(
                *common,
                row_R=rows if isinstance(rows, Tensor) else None,
                class_R=dense_classes_of(forward, ids_RK.shape[0]),
                seq_len=forward.shape[-1],
                lead=forward.lead,
                cold=forward.cold,
            )
        else:
            demand = dense_demand(*common, cold=self._cold)
        trace.forwards[-1].demands.append(demand)

    def end_iteration(self, forward: ForwardPlan | DenseForward, confidence_BS: Tensor | None) -> None:
        """See `epoch_moe.plan.slot.Tracer.end_iteration`."""
        if forward is not self._forward or not self.trace.forwards:
            return
        latest = self.trace.forwards[-1]
        if confidence_BS is not None:
            latest.confidence_T = confidence_BS.detach().to("cpu", torch.float32).reshape(-1).clone()
        if isinstance(forward, ForwardPlan):
            latest.live_T = live_rows(forward)


@contextmanager
def record_trace(model: Any, path: str | Path, about: dict[str, Any] | None = None) -> Iterator[TraceRecorder]:
    """Record which experts the forwards of a patched model use, whatever loop runs them.

    The file is written at the end, also when the decode raised: what was recorded until then is a trace too. Loops that
    do not call `BlockPlanContext.end_iteration` leave no confidences.

    Args:
        model: patched by `epoch_moe.patch`; with a plan, its rows are told apart by what they are.
        path: of the file to write.
        about: free JSON that goes into it.

    Raises:
        ValueError: the model is not patched, or is being recorded already, or the file's folder does not exist.
    """
    patched = getattr(model, "_epoch_moe", None)
    if patched is None:
        raise ValueError("recording needs patched MoE layers: call epoch_moe.patch(model) first")
    if patched.slot.tracer is not None:
        raise ValueError("this model is being recorded already: end that recording first")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{path}: its folder does not exist")
    config = getattr(model, "config", None)
    recorder = TraceRecorder(len(patched.blocks), _num_experts(patched), patched.bytes_per_expert())
    recorder.trace.about = {"model_type": getattr(config, "model_type", None), **(about or {})}
    patched.slot.tracer = recorder
    try:
        yield recorder
    finally:
        patched.slot.tracer = None
        recorder.trace.save(path)


def _num_experts(patched: Any) -> int:
    counts = {block.spec.router.num_experts for block in patched.blocks.values()}
    if len(counts) != 1:
        raise ValueError(f"the MoE layers have {sorted(counts)} experts: expected the same number in all of them")
    return int(counts.pop())
