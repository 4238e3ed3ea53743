"""`epoch-moe inspect`: what a checkpoint is and what `patch` would do, read from its config and file headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from epoch_moe.families import describe_block
from epoch_moe.models.checkpoint import read_headers
from epoch_moe.models.loading import locate, model_class


def describe_checkpoint(path_or_id: str | Path) -> dict[str, Any]:
    """Family, MoE layers, routing and sizes of a checkpoint. No weights are read.

    Raises:
        OSError, ValueError: as `epoch_moe.load_model` does for a checkpoint that it cannot load.
    """
    folder = locate(path_or_id)
    config, lm_class = model_class(folder)
    headers = read_headers(folder)
    with torch.device("meta"):
        model = lm_class(config)
    blocks = {path: spec for path, module in model.named_modules() if (spec := describe_block(module)) is not None}
    expert_bytes = sum(h.num_bytes for name, h in headers.items() if ".experts." in name)
    total_bytes = sum(h.num_bytes for h in headers.values())
    result: dict[str, Any] = {
        "checkpoint": str(path_or_id),
        "model_type": config.model_type,
        "architecture": lm_class.__name__,
        "parameters": sum(prod(h.shape) for h in headers.values()),
        "bytes": total_bytes,
        "expert_bytes": expert_bytes,
        "tensors": len(headers),
        "stored_dtypes": dict(Counter(h.dtype for h in headers.values())),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "eos_token_id": config.eos_token_id,
        "moe_layers": len(blocks),
        "patch": [f"{path} -> EpochMoEBlock({spec.family})" for path, spec in blocks.items()],
    }
    if blocks:
        spec = next(iter(blocks.values()))
        router = spec.router
        result.update(
            family=spec.family,
            router={
                name: value
                for name, value in vars(router).items()
                if value is not None and not (router.kind == "block_pool" and name in ("n_group", "topk_group"))
            },
            expert_inner_size=config.moe_intermediate_size,
            shared_expert=spec.shared is not None,
            bytes_per_expert=expert_bytes // (len(blocks) * router.num_experts),
            moved_bytes=expert_bytes,
            peak_extra_bytes=2 * expert_bytes // (3 * len(blocks)),
        )
    return result


def inspection_text(result: Mapping[str, Any]) -> str:
    """The text that `epoch-moe inspect` prints."""

    def size(number: int) -> str:
        return f"{number / 1e9:,.2f} GB" if number >= 1e9 else f"{number / 1e6:,.2f} MB"

    lines = [
        f"{result['checkpoint']}: {result['architecture']} ({result['model_type']}), "
        f"{result['parameters'] / 1e6:,.1f} M parameters, {size(result['bytes'])} in {result['tensors']} tensors "
        f"({', '.join(f'{n} {dtype}' for dtype, n in result['stored_dtypes'].items())})",
        f"layers: {result['layers']}, of which {result['moe_layers']} MoE; hidden {result['hidden_size']}, "
        f"vocabulary {result['vocab_size']}, mask id {result['mask_token_id']}, end id {result['eos_token_id']}",
    ]
    if not result["moe_layers"]:
        return "\n".join([*lines, "no MoE layer: there is nothing to patch"])
    router = dict(result["router"])
    kind = router.pop("kind")
    lines += [
        f"family: {result['family']}; router {kind}: " + ", ".join(f"{k} {v}" for k, v in router.items()),
        f"experts: {size(result['expert_bytes'])}, {size(result['bytes_per_expert'])} each, inner size "
        f"{result['expert_inner_size']}, {'with' if result['shared_expert'] else 'without'} a shared expert",
        f"patch() would replace {result['moe_layers']} blocks, move {size(result['moved_bytes'])} into stacked storage "
        f"(peak extra memory {size(result['peak_extra_bytes'])}), and leave state_dict as it is:",
        *(f"  {line}" for line in result["patch"]),
    ]
    return "\n".join(lines)
