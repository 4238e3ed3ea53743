"""LLaDA-MoE: a Linear `gate`, per-expert `experts`, an optional `expert_bias` on the block, no shared expert in it."""

from __future__ import annotations

import torch
from torch import nn

from epoch_moe.experts.layouts import SHAPES, find_experts
from epoch_moe.routing import RouterSpec
from epoch_moe.spec import BlockSpec

SHAPE = (
    f"a module with {SHAPES}, `gate` (Linear hidden -> experts, no bias), `top_k` and `expert_bias` (None or "
    "[experts])"
)


def describe(block: nn.Module) -> BlockSpec | None:
    """The spec of a LLaDA-MoE block, or None where the module has another shape."""
    gate, found = getattr(block, "gate", None), find_experts(block)
    if not isinstance(gate, nn.Module) or found is None:
        return None
    layout, num_experts = found
    weight, top_k = getattr(gate, "weight", None), getattr(block, "top_k", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not isinstance(top_k, int):
        return None
    # OLMoE and others have the same attributes, but normalise, or lack the bias attribute: another function.
    if not hasattr(block, "expert_bias") or getattr(block, "norm_topk_prob", None):
        return None
    if getattr(gate, "bias", None) is not None or getattr(block, "score_func", "softmax") not in ("softmax", None):
        return None
    bias = block.expert_bias
    biased = isinstance(bias, torch.Tensor)
    if weight.shape[0] != num_experts or (biased and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"a LLaDA-MoE block has {num_experts} experts but a gate weight {tuple(weight.shape)} and an expert bias "
            f"{tuple(bias.shape) if biased else None}: expected [{num_experts}, hidden] and [{num_experts}] or None"
        )
    return BlockSpec(
        family="llada_moe",
        router=RouterSpec(kind="softmax", num_experts=num_experts, top_k=top_k),
        gate_weight="gate.weight",
        gate_bias="expert_bias" if biased else None,
        layout=layout,
    )
