"""Loading tensor by tensor: experts straight into stacked storage, all of a layer's or one rank's share.

Checkpoints of every layout load into the same classes: each expert's parameters are views of the layer's stacked
tensors, which are filled one layer at a time. No weight exists twice, and none that belongs to another rank exists at
all. Saving writes the released layout.

Shape suffixes: E experts, F expert inner size, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from epoch_moe.experts.layouts import LayoutName, is_expert, stored_parts
from epoch_moe.experts.shard import keep_experts
from epoch_moe.experts.views import ExpertViews
from epoch_moe.models.config import ModelSizes
from epoch_moe.models.placement import device_of
from epoch_moe.tensor_files import TensorHeader


def moe_block(layer: int) -> str:
    """Path of a layer's MoE block in the families' models, and in their checkpoints."""
    return f"model.layers.{layer}.mlp"


def stored_shapes(sizes: ModelSizes, layout: LayoutName) -> dict[str, tuple[int, ...]]:
    """Shapes of all expert tensors of a checkpoint in ``layout``, by name."""
    stacked = ExpertViews.empty(sizes.experts, sizes.expert_inner, sizes.hidden, device="meta")
    parts = stored_parts(layout, "", range(sizes.experts), stacked)
    one = {rest: tuple(part.shape) for rest, part in parts.items()}
    return {moe_block(layer) + rest: shape for layer in sizes.moe_layers for rest, shape in one.items()}


def fill_model(
    model: Any,
    folder: Path,
    headers: Mapping[str, TensorHeader],
    layout: LayoutName,
    places: Mapping[str, torch.device],
    experts: range | None = None,
    experts_too: bool = True,
) -> None:
    """Read the weights of a checkpoint that `check_keys` has passed.

    Args:
        model: on the meta device, of the dtype that its weights are to have; expert biases are fp32 always.
        folder: of the checkpoint.
        headers: its tensors.
        layout: how they hold the experts.
        places: where weights go, by the paths of modules around them, straight from the file.
        experts: numbers of the routed experts to load; the model has no others then. None: all.
        experts_too: False leaves them on the meta device: they stay in their files.
    """
    sizes, dtype = model.config.sizes(), model.dtype
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items() if not is_expert(key)}
    kept = range(sizes.experts) if experts is None else experts
    with ExitStack() as stack:
        names = {header.file for header in headers.values()}
        files = {name: stack.enter_context(_open(folder / name)) for name in sorted(names)}
        for path in map(moe_block, sizes.moe_layers):
            block = model.get_submodule(path)
            if experts is not None:
                keep_experts(block, "per_expert", "experts", experts)
            if not experts_too:
                continue
            stacked = ExpertViews.empty(
                len(kept), sizes.expert_inner, sizes.hidden, dtype=dtype, device=device_of(places, path)
            )
            for key, part in stored_parts(layout, path, kept, stacked).items():
                file, rows = files[headers[key].file], headers[key].shape[0]
                if part.dim() == 3 and rows != len(kept):
                    part.copy_(file.get_slice(key)[kept.start : kept.stop])
                else:
                    part.copy_(file.get_tensor(key))
            # `ExpertWeights` finds them in their places and copies nothing.
            views = stored_parts("per_expert", "", kept, stacked)
            block.experts.load_state_dict({k.removeprefix(".experts."): v for k, v in views.items()}, assign=True)
        others: dict[str, Tensor] = {}
        for key, shape in shapes.items():
            is_bias = key.endswith("expert_bias")
            # A copy also where nothing changes: what is read may be a view of the file.
            value = torch.zeros(shape, dtype=torch.float32 if is_bias else dtype, device=device_of(places, key))
            if key in headers:
                others[key] = value.copy_(files[headers[key].file].get_tensor(key))
            elif is_bias:
                others[key] = value
        model.load_state_dict(others, assign=True, strict=False)
    model.tie_weights()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, tensor in tensors if tensor.is_meta and (experts_too or not is_expert(name))]
    if left:
        raise RuntimeError(f"loading {folder}: nothing was read for {', '.join(left[:3])}; please report this")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
