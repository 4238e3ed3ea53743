"""`epoch-moe inspect`: what a checkpoint is and what `patch` would do, from its configuration and file headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from epoch_moe.experts.layouts import LAYOUTS, is_expert
from epoch_moe.families import describe_block
from epoch_moe.models.loading import read_checkpoint
from epoch_moe.tensor_files import STORED_DTYPES


def describe_checkpoint(path_or_id: str | Path) -> dict[str, Any]:
    """Family, MoE layers, routing and sizes of a checkpoint. No weights are read, and none are downloaded.

    Raises:
        FileNotFoundError, ValueError: as `epoch_moe.load_model` does for a checkpoint that it cannot load.
    """
    checkpoint = read_checkpoint(path_or_id)
    config, eos = checkpoint.model.config, checkpoint.generation_config.eos_token_id
    sizes = config.sizes()
    headers = checkpoint.headers.values()
    stored = {key: prod(h.shape) * STORED_DTYPES[h.dtype].itemsize for key, h in checkpoint.headers.items()}
    expert_bytes = sum(size for key, size in stored.items() if is_expert(key))
    spec = next((s for m in checkpoint.model.modules() if (s := describe_block(m)) is not None), None)
    result: dict[str, Any] = {
        "checkpoint": str(path_or_id),
        "model_type": config.model_type,
        "architecture": type(checkpoint.model).__name__,
        "sizes_from": "files" if checkpoint.stored else "config.json, as bf16",
        "parameters": sum(prod(header.shape) for header in headers),
        "bytes": sum(stored.values()),
        "expert_bytes": expert_bytes,
        "tensors": len(stored),
        "stored_dtypes": dict(Counter(header.dtype for header in headers)),
        "layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "vocab_size": sizes.vocab,
        "mask_token_id": config.mask_token_id,
        "eos_token_id": config.eos_token_id if eos is None else eos,
        "moe_layers": 0 if spec is None else len(sizes.moe_layers),
        "expert_layout": checkpoint.layout,
        "patch": [],
    }
    if spec is not None:
        router, as_released = spec.router, checkpoint.layout == "per_expert"
        result.update(
            family=spec.family,
            patch=[f"model.layers.{layer}.mlp -> EpochMoEBlock({spec.family})" for layer in sizes.moe_layers],
            router={
                name: value
                for name, value in vars(router).items()
                if value is not None and not (router.kind == "block_pool" and name in ("n_group", "topk_group"))
            },
            expert_inner_size=sizes.expert_inner,
            shared_expert=sizes.shared_inner > 0,
            bytes_per_expert=expert_bytes // (len(sizes.moe_layers) * router.num_experts),
            # Other layouts are read into stacked storage.
            moved_bytes=expert_bytes if as_released else 0,
            peak_extra_bytes=2 * expert_bytes // (3 * len(sizes.moe_layers)) if as_released else 0,
        )
    return result


def inspection_text(result: Mapping[str, Any]) -> str:
    """The text that `epoch-moe inspect` prints."""

    def size(number: int) -> str:
        return f"{number / 1e9:,.2f} GB" if number >= 1e9 else f"{number / 1e6:,.2f} MB"

    lines = [
        f"{result['checkpoint']}: {result['architecture']} ({result['model_type']}), "
        f"{result['parameters'] / 1e6:,.1f} M parameters, {size(result['bytes'])} in {result['tensors']} tensors "
        f"({', '.join(f'{n} {dtype}' for dtype, n in result['stored_dtypes'].items())}; from {result['sizes_from']})",
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
        f"{result['expert_inner_size']}, {'with' if result['shared_expert'] else 'without'} a shared expert, "
        f"{LAYOUTS[result['expert_layout']].short}",
        f"patch() would replace {result['moe_layers']} blocks and leave state_dict as it is; load_model has experts in "
        f"stacked storage, of other models patch() moves {size(result['moved_bytes'])} there (peak extra memory "
        f"{size(result['peak_extra_bytes'])}):",
        *(f"  {line}" for line in result["patch"][:3]),
        *([f"  ... and {result['moe_layers'] - 3} more"] if result["moe_layers"] > 3 else []),
    ]
    return "\n".join(lines)
