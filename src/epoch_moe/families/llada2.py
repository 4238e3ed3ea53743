"""LLaDA2.0, 2.1 and 2.2: `gate` with weight and expert bias, experts, `shared_experts` in the block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from epoch_moe.experts.layouts import SHAPES, find_experts
from epoch_moe.routing import RouterSpec
from epoch_moe.spec import BlockSpec

SHAPE = (
    f"a module with {SHAPES}, and `gate` with `weight` [experts, hidden], `expert_bias` [experts], `top_k`, "
    "`n_group` and `topk_group`"
)


def describe(block: nn.Module) -> BlockSpec | None:
    """The spec of a LLaDA2 MoE block, or None where the module has another shape."""
    gate, found = getattr(block, "gate", None), find_experts(block)
    if not isinstance(gate, nn.Module) or found is None:
        return None
    layout, num_experts = found
    weight, bias = getattr(gate, "weight", None), getattr(gate, "expert_bias", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not isinstance(bias, torch.Tensor):
        return None
    config = getattr(gate, "config", None) or getattr(block, "config", None)
    pooled = getattr(config, "expert_capacity", None) is not None and getattr(config, "block_size", None) is not None
    # LLaDA2.2 selects from a pool of experts per block of rows: its gate need not know groups.
    names = ("top_k", "routed_scaling_factor") + (() if pooled else ("n_group", "topk_group"))
    if not all(isinstance(getattr(gate, name, None), (int, float)) for name in names):
        return None
    if weight.shape[0] != num_experts or bias.shape != weight.shape[:1]:
        raise ValueError(
            f"a LLaDA2 MoE block has {num_experts} experts but a gate weight {tuple(weight.shape)} and an expert bias "
            f"{tuple(bias.shape)}: expected [{num_experts}, hidden] and [{num_experts}]"
        )
    return BlockSpec(
        family="llada2",
        router=_router(gate, num_experts, config, pooled=pooled),
        gate_weight="gate.weight",
        gate_bias="gate.expert_bias",
        layout=layout,
        shared="shared_experts" if isinstance(getattr(block, "shared_experts", None), nn.Module) else None,
        returns_router=True,
    )


def _router(gate: Any, num_experts: int, config: Any, *, pooled: bool) -> RouterSpec:
    common: dict[str, Any] = {
        "num_experts": num_experts,
        "top_k": int(gate.top_k),
        "routed_scaling_factor": float(gate.routed_scaling_factor),
    }
    if pooled:
        pool = {"expert_capacity": int(config.expert_capacity), "block_size": int(config.block_size)}
        return RouterSpec(kind="block_pool", **pool, **common)
    return RouterSpec(kind="sigmoid_group", n_group=int(gate.n_group), topk_group=int(gate.topk_group), **common)
