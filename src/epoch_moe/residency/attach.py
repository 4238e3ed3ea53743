"""Give a model's MoE layers resident experts, and take them away again.

The layers' experts come from files that hold them already, where that is known to be so, or go to a temporary file that
is written here, layer by layer, so that memory goes down as the file grows.

Shape suffixes: E experts, F expert inner size, H hidden.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import nn

from epoch_moe.experts.views import ExpertViews
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.residency.clock import Clock
from epoch_moe.residency.config import ResidencyConfig, slots_per_layer
from epoch_moe.residency.costs import measure_costs
from epoch_moe.residency.experts import ResidentExperts
from epoch_moe.residency.loader import Loader, passing
from epoch_moe.residency.policies import make_policy
from epoch_moe.residency.sources import (
    Buffers,
    ExpertSource,
    FileSource,
    HostSource,
    Part,
    ResidencyError,
    TensorFile,
    find_parts,
)
from epoch_moe.residency.state import Residency
from epoch_moe.tensor_files import TensorHeader, read_headers

_HOST_SHARE = 0.5


ORIGIN = "_epoch_moe_origin"
"""Attribute by which `load_model` tells `patch` that a model's experts were left in their files."""


@dataclass(frozen=True)
class Origin:
    """A checkpoint whose tensors a model has, or may have.

    Attributes:
        folder: of its files.
        headers: its tensors.
        device: the model was loaded from it just now, for this device, and its experts were left out; None: it has to
            be compared.
    """

    folder: Path
    headers: Mapping[str, TensorHeader]
    device: torch.device | None = None

    @property
    def verified(self) -> bool:
        """Whether it is the model's for sure."""
        return self.device is not None


class Block(Protocol):
    """The attribute of an `EpochMoEBlock` that is replaced."""

    weights: ExpertWeights


@dataclass
class _Layer:
    """One layer that is given resident experts; ``source``: files that hold them, where that was found to be so."""

    path: str
    block: Block
    whole: ExpertWeights
    dtype: torch.dtype
    device: torch.device
    source: FileSource | None = None

    @property
    def bytes_per_expert(self) -> int:
        _, inner, hidden = self.whole.layout.sizes()
        return 3 * inner * hidden * self.dtype.itemsize


def attach(
    config: ResidencyConfig,
    blocks: Mapping[str, Block],
    origin: Origin | None,
    experts: range | None,
) -> Residency:
    """Replace the weights of all blocks by `ResidentExperts`.

    Args:
        config: the user's choices.
        blocks: module path -> block. Their experts have memory, or ``origin`` is verified.
        origin: where the experts may be found; ``config.source`` takes its place.
        experts: numbers of this rank's experts; None: all.

    Raises:
        ValueError: the budget is too small, or ``config.source`` does not hold these experts. Nothing was changed.
        OSError: a file cannot be written; experts that had left are back.
    """
    in_memory = origin is None or not origin.verified
    layers = []
    for path, block in blocks.items():
        param = block.weights.layout.params()[0]
        device = param.device if origin is None or origin.device is None else origin.device
        layers.append(_Layer(path, block, block.weights, param.dtype, device))
    sizes = {layer.whole.layout.sizes() for layer in layers}
    if len(sizes) != 1:
        raise ValueError(
            f"residency needs MoE layers with equally many experts of one size, this model has {sorted(sizes)}"
        )
    num_experts, inner, hidden = sizes.pop()
    bytes_each = [layer.bytes_per_expert for layer in layers]
    scratch = 2 * max(bytes_each)
    slots_per_layer(config.budget, num_experts, bytes_each, scratch)  # before files are read
    buffers = Buffers(inner, hidden)
    named = config.source is not None and in_memory
    if named:
        origin = read_origin(Path(str(config.source)))
    if origin is not None:
        _find(layers, origin, range(num_experts) if experts is None else experts, buffers, config, named)
    stored = {layer.source.dtype for layer in layers if layer.source and layer.source.dtype != layer.dtype}
    scratch += sum(3 * inner * hidden * dtype.itemsize for dtype in stored)
    slots_L = slots_per_layer(config.budget, num_experts, bytes_each, scratch)
    policy = make_policy(config.policy, len(layers), num_experts)
    clock = Clock(policy, len(layers), num_experts)
    host = _on_host(config, layers, sum(bytes_each) * num_experts)
    loader: Loader | None = None
    spilled, made = 0, []
    try:
        for index, (layer, slots) in enumerate(zip(layers, slots_L, strict=True)):
            source: ExpertSource | None = layer.source
            if host:
                source = _copy_to_host(layer)
            elif source is None:
                source = _spill(config, layer, buffers)
                spilled += num_experts * layer.bytes_per_expert
            if loader is None:
                buffer = passing(buffers, layer.dtype, layer.device)[0]
                loader = Loader(buffers, measure_costs(source, num_experts, buffer, layer.device), config.miss)
            name = f"{layer.path} (MoE layer {index})"
            one = ResidentExperts(
                index, name, layer.whole, source, slots, layer.dtype, layer.device, policy, clock, loader
            )
            made.append(one)
            if in_memory:
                one.take_parameters()
    except BaseException:
        for one in made:
            if one.kept is not None:
                one.give_back(one.read_all())
        raise
    for layer, one in zip(layers, made, strict=True):
        layer.block.weights = one
    return Residency(config, clock, made[0].loader, made, spilled)


def origin_of(model: nn.Module) -> Origin | None:
    """The checkpoint whose experts `load_model` left out of a model; taken off the model, so None the second time."""
    origin: Origin | None = model.__dict__.pop(ORIGIN, None)
    return origin


def detach(state: Residency, blocks: Sequence[Block]) -> None:
    """Read all experts back into the modules' parameters.

    Raises:
        ResidencyError: they cannot be read; everything is as it was.
    """
    back: list[ResidentExperts] = []
    with state.clock.turn():
        try:
            for layer in state.layers:
                layer.give_back(layer.read_all())
                back.append(layer)
        except BaseException:
            for layer in back:
                layer.take_parameters()
            raise
        for block, layer in zip(blocks, state.layers, strict=True):
            block.weights = layer.whole


def read_origin(folder: Path) -> Origin:
    """A checkpoint's folder.

    Raises:
        FileNotFoundError, ValueError: as `epoch_moe.load_model` does.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"ResidencyConfig.source={str(folder)!r}: expected a checkpoint's folder")
    return Origin(folder, read_headers(folder))


def known_origin(model: nn.Module) -> Origin | None:
    """The checkpoint that a model says it was loaded from, if it is a folder here."""
    name = getattr(model, "name_or_path", None)
    if not isinstance(name, str) or not name or not Path(name).is_dir():
        return None
    try:
        return read_origin(Path(name))
    except (OSError, ValueError):
        return None  # moved, converted, or being written: the experts go to a file of our own


def _find(
    layers: Sequence[_Layer], origin: Origin, experts: range, buffers: Buffers, config: ResidencyConfig, named: bool
) -> None:
    """Give the layers the origin's files as source, where their experts are these bit for bit."""
    required = named or origin.verified
    try:
        names = sorted({header.file for header in origin.headers.values()})
        files = {name: TensorFile(origin.folder / name, drop_cache=config.drop_cache) for name in names}
    except (OSError, ValueError, ResidencyError):
        if required:
            raise
        return
    headers = {key: header for file in files.values() for key, header in file.headers.items()}
    advice = ". Leave ResidencyConfig.source out to have the model's experts written to a temporary file" * named
    for layer in layers:
        try:
            _, inner, hidden = layer.whole.layout.sizes()
            found = find_parts(headers, files, layer.path, experts, inner, hidden)
            if found is None:
                raise ValueError("it has no such experts")
            source = FileSource(*found, buffers)
            if not origin.verified:
                _compare(source, layer, experts)
        except ValueError as error:
            if required:
                raise ValueError(f"{origin.folder} cannot be the source of {layer.path}: {error}{advice}") from error
        else:
            layer.source = source


def _compare(source: FileSource, layer: _Layer, experts: range) -> None:
    """Refuse experts of a file that are not the model's."""
    stacked = layer.whole.ensure()
    weights = stacked.gate_up_E2FH.detach(), stacked.down_EHF.detach()
    buffers = [torch.empty(t.shape[1:], dtype=t.dtype) for t in weights]
    for place, number in enumerate(experts):
        source.read(place, *buffers)
        for here, there in zip(weights, buffers, strict=True):
            # As bytes: NaN is equal to itself then, and -0 is not 0.
            if not torch.equal(here[place].cpu().contiguous().view(torch.uint8), there.view(torch.uint8)):
                raise ValueError(f"it holds another expert {number} than the model")


def _on_host(config: ResidencyConfig, layers: Sequence[_Layer], total: int) -> bool:
    """Whether experts lie in main memory rather than in a file."""
    if config.tier != "auto":
        return config.tier == "host"
    if all(layer.device.type == "cpu" for layer in layers):
        return False
    return bool(total <= _HOST_SHARE * psutil.virtual_memory().available)


def _copy_to_host(layer: _Layer) -> HostSource:
    """A layer's experts in main memory."""
    there: dict[str, Any] = {"dtype": layer.dtype, "device": "cpu", "pin_memory": layer.device.type == "cuda"}
    host_E = ExpertViews.empty(*layer.whole.layout.sizes(), **there)
    gate_up, down = host_E.gate_up_E2FH, host_E.down_EHF
    with torch.inference_mode(False), torch.no_grad():
        if layer.source is not None:
            for expert in range(host_E.num_experts):
                layer.source.read(expert, gate_up[expert], down[expert])
        else:
            stacked = layer.whole.ensure()
            gate_up.copy_(stacked.gate_up_E2FH)
            down.copy_(stacked.down_EHF)
    return HostSource(gate_up, down)


def _spill(config: ResidencyConfig, layer: _Layer, buffers: Buffers) -> FileSource:
    """A layer's experts in a temporary file: bytes of all gate and up projections, then of all down projections."""
    folder = Path(tempfile.gettempdir() if config.spill_dir is None else config.spill_dir)
    stacked = layer.whole.ensure()
    total = stacked.num_experts * layer.bytes_per_expert
    if not folder.is_dir():
        raise FileNotFoundError(f"ResidencyConfig.spill_dir={str(folder)!r}: there is no such folder")
    free = shutil.disk_usage(folder).free
    if free < total:
        raise OSError(
            f"{folder} has {free / 1e9:.2f} GB left and {layer.path} takes {total / 1e9:.2f} GB: pass "
            "ResidencyConfig(spill_dir=...) with more room"
        )
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name: it goes with who has it open
        for tensor in (stacked.gate_up_E2FH, stacked.down_EHF):
            for part in tensor.detach():  # expert by expert: no second copy in memory
                file.write(part.cpu().contiguous().view(torch.uint8).numpy())
        file.flush()
        name = f"{folder} (a temporary file with the experts of {layer.path})"
        opened = TensorFile(Path(name), drop_cache=config.drop_cache, fd=os.dup(file.fileno()))
    size_up, size_down = (t[0].numel() * t.element_size() for t in (stacked.gate_up_E2FH, stacked.down_EHF))
    behind = stacked.num_experts * size_up
    parts_E = [
        (
            Part(opened, f"gate_up of expert {expert}", expert * size_up, size_up, down=False, offset=0),
            Part(opened, f"down of expert {expert}", behind + expert * size_down, size_down, down=True, offset=0),
        )
        for expert in range(stacked.num_experts)
    ]
    return FileSource(parts_E, layer.dtype, buffers)
