"""Traces: what a decode asked of its experts, written to a file and read back as demands.

A trace is one safetensors file; what is no tensor is JSON in its header. It holds, per forward and MoE layer, which
rows went to which experts with what weights, the rows' classes, and what the decoder thought of each row.

Shape suffixes: D forwards, L MoE layers, V (forward, layer) entries, R rows of all entries, Q rows of all row sets,
T rows of all forwards, K top-k.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epoch_moe.outputs import write_output
from epoch_moe.residency.demand import Demand, RowClass

FORMAT = "epoch_moe.trace"
VERSION = 1
NONE = -1
MOST_ROWS = 2**20
"""Rows of one forward: a file that speaks of more is damaged."""
_TENSORS = {
    "forwards_DX": (torch.int64, (None, 3)),
    "entries_VX": (torch.int64, (None, 9)),
    "row_Q": (torch.int32, (None,)),
    "class_Q": (torch.int8, (None,)),
    "ids_RK": (torch.int16, (None, None)),
    "weights_RK": (torch.float32, (None, None)),
    "confidence_T": (torch.float32, (None,)),
    "live_T": (torch.bool, (None,)),
}
"""Dtype and shape of each tensor; None is any size."""


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
        """Write the file in place.

        Raises:
            ValueError, OSError: as `epoch_moe.outputs.write_output`; the message names the path.
        """
        from safetensors.torch import save

        header = {"version": VERSION, "num_layers": self.num_layers, "num_experts": self.num_experts,
                  "bytes_per_expert": self.bytes_per_expert, "about": self.about}  # fmt: skip
        write_output(path, save(_pack(self), metadata={FORMAT: json.dumps(header)}))


def load_trace(path: str | Path) -> Trace:
    """Read a trace.

    Raises:
        ValueError: the file holds something else, a trace of another version, or one that is damaged.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get(FORMAT)
            if text is None or not set(file.keys()) >= set(_TENSORS):
                raise ValueError(f"{path} is no trace of epoch_moe: record one with benchmarks/residency_sim.py")
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or an incomplete one: {error}") from error
    try:
        trace = _read_header(text)
        _check_tensors(trace, tensors)
        trace.forwards = _unpack(trace, tensors)
    except (_Damaged, RecursionError) as error:
        raise ValueError(f"{path} is no valid trace: {error}") from error
    return trace


class _Damaged(Exception):
    """What is wrong with a file."""


def _expect(ok: bool, what: str) -> None:
    if not ok:
        raise _Damaged(what)


def _read_header(text: str) -> Trace:
    """A trace without its forwards."""
    try:
        header = json.loads(text)
    except ValueError as error:
        raise _Damaged(f"its header is no JSON ({error})") from error
    _expect(isinstance(header, dict), f"its header is a {type(header).__name__}: expected a JSON object")
    version = header.get("version")
    _expect(version == VERSION, f"its version is {version!r}: expected {VERSION}")
    layers, experts, sizes = (header.get(name) for name in ("num_layers", "num_experts", "bytes_per_expert"))
    for name, value in (("num_layers", layers), ("num_experts", experts)):
        _expect(type(value) is int and value >= 1, f"{name}={value!r}: expected a number of at least 1")
    right = isinstance(sizes, list) and len(sizes) == layers and all(type(s) is int and s > 0 for s in sizes)
    _expect(right, f"bytes_per_expert={str(sizes)[:100]}: expected a number above 0 for each of num_layers={layers}")
    about = header.get("about")
    _expect(isinstance(about, dict), f"about={str(about)[:100]}: expected a JSON object")
    return Trace(layers, experts, sizes, about)


def _check_tensors(trace: Trace, tensors: dict[str, Tensor]) -> None:
    """That every number of a file is one that a decode can give."""
    for name, (dtype, shape) in _TENSORS.items():
        found = tensors[name]
        sizes = found.shape
        fits = len(sizes) == len(shape) and all(want in (None, got) for want, got in zip(shape, sizes, strict=True))
        _expect(found.dtype == dtype and fits, f"{name} is {found.dtype} {list(found.shape)}: expected {dtype} {shape}")

    def within(name: str, values: Tensor, low: int, high: int) -> None:
        for worst in (values.min(), values.max()) if values.numel() else ():
            _expect(low <= int(worst) <= high, f"{name} {int(worst)}: expected {low} to {high}")

    forwards_DX, entries_VX = tensors["forwards_DX"], tensors["entries_VX"]
    within("expert", tensors["ids_RK"], -1, trace.num_experts - 1)
    within("class of a row", tensors["class_Q"], 0, len(RowClass) - 1)
    within("row", tensors["row_Q"], -1, MOST_ROWS - 1)
    _expect(tensors["row_Q"].shape == tensors["class_Q"].shape, "row_Q and class_Q are of different lengths")
    _expect(tensors["ids_RK"].shape == tensors["weights_RK"].shape, "ids_RK and weights_RK have different shapes")
    for column, name in ((1, "confidence_T"), (2, "live_T")):
        within(f"rows of {name}", forwards_DX[:, column], 0, MOST_ROWS)
        _expect(int(forwards_DX[:, column].sum()) == tensors[name].numel(), f"{name} has not the rows of its forwards")
    numbers = ("forward", "layer", "number of a forward", "first forward of a block", "forwards to a refresh",
               "rows of a sequence", "lead rows", "place of the rows", "rows of a demand")  # fmt: skip
    ends = ((0, len(forwards_DX) - 1), (0, trace.num_layers - 1), (0, 2**62), (0, 1), (NONE, 2**31), (NONE, MOST_ROWS),
            (0, MOST_ROWS), (0, len(tensors["row_Q"])), (0, MOST_ROWS))  # fmt: skip
    for column, (name, (low, high)) in enumerate(zip(numbers, ends, strict=True)):
        within(name, entries_VX[:, column], low, high)
    _expect(int(entries_VX[:, 8].sum()) == len(tensors["ids_RK"]), "the demands have not the rows of ids_RK")
    rows_D = forwards_DX[:, 1:].max(dim=1).values if len(forwards_DX) else forwards_DX[:, 0]
    for number, _, _, _, refresh, seq_len, lead, place, size in entries_VX.tolist():
        _expect(refresh != 0 and seq_len != 0, "a demand has 0 rows per sequence, or 0 forwards to its refresh")
        _expect(lead <= max(seq_len, 0), f"lead rows {lead} of a sequence of {seq_len}")
        _expect(place + size <= len(tensors["row_Q"]), f"rows {place} to {place + size} are behind the end of row_Q")
        rows = int(rows_D[number])
        if rows:
            within(f"row of a forward of {rows} rows", tensors["row_Q"][place : place + size], -1, rows - 1)
            _expect(rows % max(seq_len, 1) == 0, f"{rows} rows: expected whole sequences of {seq_len}")


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
        "weights_RK": joined(weights, torch.empty(0, 1, dtype=torch.float32)),
        "confidence_T": joined(confidences, torch.empty(0, dtype=torch.float32)),
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
