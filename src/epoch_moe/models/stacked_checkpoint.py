"""Loading tensor by tensor: experts straight into stacked storage, all of a layer's or one rank's share.

For checkpoints of every layout: experts one by one (released), a layer's in few tensors (dFactory's stacked ones,
dInfer's fused ones), and for models whose experts are split over ranks. All are loaded into the same classes: each
expert's parameters are views of the layer's stacked tensors, which are filled one layer at a time, so
that no weight exists twice, and none that belongs to another rank exists at all. Saving writes the released layout.

Shape suffixes: E experts, F expert inner size, H hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from epoch_moe.experts.layouts import FUSED, PROJECTIONS, LayoutName
from epoch_moe.experts.shard import keep_experts
from epoch_moe.tensor_files import TensorHeader

_RELEASED = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_STACKED = re.compile(r".*\.mlp\.experts\.(gate|up|down)_proj")
_FUSED = re.compile(r".*\.mlp\.(w1|w2)")


def find_layout(keys: Iterable[str]) -> LayoutName:
    """How a checkpoint with these tensors holds its experts."""
    names = list(keys)
    if any(_STACKED.fullmatch(key) for key in names):
        return "stacked"
    return "fused" if any(_FUSED.fullmatch(key) for key in names) else "per_expert"


def is_expert(key: str) -> bool:
    """Whether a tensor of this name holds routed experts, in whatever layout."""
    return any(pattern.fullmatch(key) for pattern in (_RELEASED, _STACKED, _FUSED))


def stored_shapes(shapes: Mapping[str, tuple[int, ...]], layout: LayoutName) -> dict[str, tuple[int, ...]]:
    """What the model's tensors (``shapes`` by state-dict key) are called in a checkpoint of ``layout``."""
    if layout == "per_expert":
        return dict(shapes)
    stored = {key: shape for key, shape in shapes.items() if not _RELEASED.fullmatch(key)}
    for prefix, (num_experts, inner, hidden) in _blocks(shapes).items():
        down = (num_experts, hidden, inner)
        if layout == "stacked":
            part = (num_experts, inner, hidden)
            stored |= {f"{prefix}.experts.{n}": s for n, s in zip(PROJECTIONS, (part, part, down), strict=True)}
        else:
            stored |= {f"{prefix}.w1": (num_experts, 2 * inner, hidden), f"{prefix}.w2": down}
    return stored


def _blocks(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int, int]]:
    """(E, F, H) of each MoE block, by its module path."""
    blocks: dict[str, tuple[int, int, int]] = {}
    for key, shape in shapes.items():
        match = _RELEASED.fullmatch(key)
        if match and match[3] == "gate_proj":
            count = max(int(match[2]) + 1, blocks.get(match[1], (0,))[0])
            blocks[match[1]] = (count, shape[0], shape[1])
    return blocks


def load_stacked(
    folder: Path,
    headers: Mapping[str, TensorHeader],
    layout: LayoutName,
    build: Callable[[], Any],
    dtype: torch.dtype,
    device: torch.device,
    experts: range | None = None,
    fill: bool = True,
) -> Any:
    """The model of a checkpoint that `check_keys` has passed.

    Args:
        folder: of the checkpoint.
        headers: its tensors.
        layout: as `find_layout` said.
        build: makes the model; called with meta as default device.
        dtype: of the weights; expert biases are fp32 always.
        device: where the weights go, straight from the file.
        experts: numbers of the routed experts to load; the model has no others. None: all.
        fill: False leaves them on the meta device: they stay in their files.
    """
    with torch.device("meta"):
        model = build()
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    with ExitStack() as stack:
        names = {header.file for header in headers.values()}
        files = {name: stack.enter_context(_open(folder / name)) for name in sorted(names)}

        def read(key: str) -> Tensor:
            return files[headers[key].file].get_tensor(key)  # type: ignore[no-any-return]

        def read_part(key: str, part: range) -> Tensor:
            if len(part) == headers[key].shape[0]:
                return read(key)
            return files[headers[key].file].get_slice(key)[part.start : part.stop]  # type: ignore[no-any-return]

        for prefix, sizes in _blocks(shapes).items():
            block = model.get_submodule(prefix)
            kept = range(sizes[0]) if experts is None else experts
            if experts is not None:
                keep_experts(block, "per_expert", "experts", experts)
            if fill:
                _fill_experts(block, prefix, layout, kept, sizes[1:], read, read_part, dtype, device)
        others: dict[str, Tensor] = {}
        for key in shapes:
            if _RELEASED.fullmatch(key):
                continue
            kept = torch.float32 if key.endswith("expert_bias") else dtype
            if key in headers:
                # A copy also where nothing changes: what is read may be a view of the file.
                others[key] = torch.empty(shapes[key], dtype=kept, device=device).copy_(read(key))
            elif key.endswith("expert_bias"):
                others[key] = torch.zeros(shapes[key], dtype=kept, device=device)
        model.load_state_dict(others, assign=True, strict=False)
    model.tie_weights()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, tensor in tensors if tensor.is_meta and (fill or not is_expert(name))]
    if left:
        raise RuntimeError(f"loading {folder}: nothing was read for {', '.join(left[:3])}; please report this")
    return model


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _fill_experts(
    block: nn.Module,
    prefix: str,
    layout: LayoutName,
    kept: range,
    sizes: tuple[int, int],
    read: Callable[[str], Tensor],
    read_part: Callable[[str, range], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    inner, hidden = sizes
    gate_up_E2FH = torch.empty(len(kept), 2 * inner, hidden, dtype=dtype, device=device)
    down_EHF = torch.empty(len(kept), hidden, inner, dtype=dtype, device=device)
    views = {
        number: (gate_up_E2FH[place, :inner], gate_up_E2FH[place, inner:], down_EHF[place])
        for place, number in enumerate(kept)
    }
    if layout == "per_expert":
        for number, parts in views.items():
            for name, part in zip(PROJECTIONS, parts, strict=True):
                part.copy_(read(f"{prefix}.experts.{number}.{name}.weight"))
    else:
        _read_stacked(prefix, layout, kept, gate_up_E2FH, down_EHF, read_part)
    state = {
        f"{number}.{name}.weight": part
        for number, parts in views.items()
        for name, part in zip(PROJECTIONS, parts, strict=True)
    }
    # `ExpertWeights` finds them in their places and copies nothing.
    block.experts.load_state_dict(state, assign=True)  # type: ignore[union-attr, operator]


def _read_stacked(
    prefix: str,
    layout: LayoutName,
    kept: range,
    gate_up_E2FH: Tensor,
    down_EHF: Tensor,
    read_part: Callable[[str, range], Tensor],
) -> None:
    inner = down_EHF.shape[2]
    if layout == "fused":
        targets = dict(zip(FUSED, (gate_up_E2FH, down_EHF), strict=True))
        stored = {name: f"{prefix}.{name}" for name in FUSED}
    else:
        parts = (gate_up_E2FH[:, :inner], gate_up_E2FH[:, inner:], down_EHF)
        targets = dict(zip(PROJECTIONS, parts, strict=True))
        stored = {name: f"{prefix}.experts.{name}" for name in PROJECTIONS}
    for name, target in targets.items():
        target.copy_(read_part(stored[name], kept))
