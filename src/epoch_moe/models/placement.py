"""Where weights go: one device, or layers spread over several by accelerate's device map."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import check_device_map

from epoch_moe.checks import wrong


def find_device(device: str | torch.device | None) -> torch.device:
    """A device that holds weights; None means the CPU.

    Raises:
        ValueError: another, or one that this machine does not have.
    """
    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: expected 'cpu', 'cuda', 'cuda:0' or another torch device") from error
    if found.type == "cpu":
        return torch.device("cpu")  # what tensors on "cpu:0" say
    if found.type == "meta":
        raise ValueError("device='meta' holds no weights: expected a device such as 'cpu' or 'cuda'")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ValueError(
                f"device={str(device)!r}: torch {torch.__version__} sees {count} CUDA devices here; use device='cpu', "
                "or install a CUDA build of torch on a machine with a GPU"
            )
    return found


def find_device_map(device_map: str | Mapping[str, Any], model: Any) -> dict[str, torch.device]:
    """Module path -> device, for all of a model.

    Args:
        device_map: ``"auto"``, or such a map as a user wrote it.
        model: on the meta device.

    Raises:
        ValueError: the map lacks a part of the model, names what is no module or only a part of a layer, or weights
            would be offloaded.
    """
    model.tie_weights()
    found: Any = device_map
    if device_map == "auto":
        found = infer_auto_device_map(model, no_split_module_classes=model._no_split_modules)
        used = set(found.values())
        if "disk" in used or ("cpu" in used and len(used) > 1):
            raise ValueError(
                "device_map='auto': the weights do not fit on the GPUs, and nothing is "
                "offloaded: name devices in a dictionary (layers on 'cpu' compute there), or keep some experts in host "
                "memory with residency=ResidencyConfig(...)"
            )
    if not isinstance(found, Mapping) or not found:
        raise wrong("device_map", device_map, "'auto', or a dictionary: module path -> device")
    modules = dict(model.named_modules())
    for path in found:
        if path not in modules or re.match(r"model\.layers\.\d+\.", path):
            raise ValueError(
                f"device_map names {path!r}: expected paths of modules, with layers in one piece, such as "
                "'model.layers.0'"
            )
    places = {path: find_device(f"cuda:{place}" if type(place) is int else place) for path, place in found.items()}
    try:
        check_device_map(model, places)
    except ValueError as error:
        raise ValueError(f"device_map is not whole: {error}") from error
    return places


def device_of(places: Mapping[str, torch.device], path: str) -> torch.device:
    """The device of a module or tensor: that of the longest path in the map around it."""
    parts = path.split(".")
    around = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return next(places[outer] for outer in around if outer in places)
