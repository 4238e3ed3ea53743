"""What the ranks of an expert-parallel group compare before they exchange rows, as short texts.

Each rank computes its own; `Ranks.agree` compares them. Experts are left out: every rank has others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 1 << 20
"""Words that a checksum reads at a time: it must not need much memory beside a model that just fits."""

NOT_COMPARED = ("_name_or_path", "transformers_version", "architectures", "auto_map")
"""Settings of a model configuration that say where it came from, not what it computes."""


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A short text that differs where names, shapes, dtypes or any bit of the tensors do (all but surely).

    One wait for each device, at the end.
    """
    outline = hashlib.sha256()
    sums: dict[torch.device, Tensor] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        outline.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        if tensor.is_meta:
            continue
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        if data.numel() % 4 == 0:  # the same words on every rank, wherever they lie in its memory
            data = (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)
        total = sums.setdefault(tensor.device, torch.zeros((), dtype=torch.int64, device=tensor.device))
        for part in data.split(CHUNK):
            # Odd factors: no bit of a word is lost, and words that change places change the sum. It wraps around.
            places = torch.arange(1, 2 * part.numel(), 2, device=part.device)
            total.mul_(1_000_003).add_((part.to(torch.int64) * places).sum())
    numbers = ",".join(str(int(total)) for total in sums.values())
    return hashlib.sha256(outline.digest() + numbers.encode()).hexdigest()[:16]


def _stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What `state_dict` holds, in its order. Not through it: experts outside of memory have none."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, tensor


def describe_model(model: nn.Module, blocks: Mapping[str, Any]) -> dict[str, str]:
    """What ranks that share a model's experts must agree on, before the first forward.

    Args:
        model: patched with ``ep_group``.
        blocks: its `EpochMoEBlock` by module path.

    Returns:
        Key -> this rank's value.
    """
    first = next(iter(blocks.values()))
    gates = {
        f"{path} {place}": tensor
        for path, block in blocks.items()
        for place, tensor in enumerate(block.spec.read_gate(block))
        if tensor is not None
    }
    apart = {id(tensor) for tensor in gates.values()}
    apart |= {id(param) for block in blocks.values() for param in block.weights.layout.params()}
    others = {name: tensor for name, tensor in _stored_tensors(model) if id(tensor) not in apart}
    stacked = first.weights.ensure()
    config: Any = getattr(model, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    return {
        **{f"model configuration: {key}": str(value) for key, value in settings.items() if key not in NOT_COMPARED},
        "MoE layers": ", ".join(blocks),
        "routing": str(first.spec.router),
        "expert weights": f"{stacked.down_EHF.dtype}, {tuple(stacked.down_EHF.shape)} on every rank",
        "router weights (checksum)": checksum(gates),
        "weights outside of the experts (checksum)": checksum(others),
    }


def plan_number(plan: str) -> int:
    """A number that stands for a plan's text, the same in every process; it and its negative are int64."""
    return int.from_bytes(hashlib.sha256(plan.encode()).digest()[:7], "little")
