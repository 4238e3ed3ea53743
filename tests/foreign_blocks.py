"""MoE blocks as other projects hold their experts: written anew from their attributes, with plain forwards.

`restack` turns a model of this library into one of theirs, in place: the router and the numbers stay.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StackedMlps(nn.Module):
    """dFactory's experts: one parameter per projection."""

    def __init__(self, mlps: nn.ModuleList):
        super().__init__()
        self.num_experts = len(mlps)
        self.gate_proj = nn.Parameter(torch.stack([mlp.gate_proj.weight.detach() for mlp in mlps]))
        self.up_proj = nn.Parameter(torch.stack([mlp.up_proj.weight.detach() for mlp in mlps]))
        self.down_proj = nn.Parameter(torch.stack([mlp.down_proj.weight.detach() for mlp in mlps]))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``[T,H] -> [T,H]``, one expert after the other."""
        out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        for e in range(self.num_experts):
            row, slot = (ids == e).nonzero(as_tuple=True)
            y = F.linear(
                self.act_fn(F.linear(x[row], self.gate_proj[e])) * F.linear(x[row], self.up_proj[e]), self.down_proj[e]
            )
            out = out.index_add(0, row, y.to(out.dtype) * weights[row, slot, None])
        return out.to(x.dtype)


def _fused(block: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The same from dInfer's ``w1`` and ``w2``."""
    w1, w2 = block.w1, block.w2
    inner = w2.shape[2]  # type: ignore[index, union-attr]
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for e in range(w1.shape[0]):  # type: ignore[union-attr, index]
        row, slot = (ids == e).nonzero(as_tuple=True)
        gate_up = F.linear(x[row], w1[e])  # type: ignore[index]
        y = F.linear(F.silu(gate_up[:, :inner]) * gate_up[:, inner:], w2[e])  # type: ignore[index]
        out = out.index_add(0, row, y.to(out.dtype) * weights[row, slot, None])
    return out.to(x.dtype)


class _Foreign(nn.Module):
    """What both layouts share: where the experts go, and the routed part."""

    def __init__(self, block: nn.Module, layout: str):
        super().__init__()
        mlps: Any = block.experts
        if layout == "stacked":
            self.experts = StackedMlps(mlps)
        else:
            gate_up = [torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach() for mlp in mlps]
            self.w1 = nn.Parameter(torch.stack(gate_up))
            self.w2 = nn.Parameter(torch.stack([mlp.down_proj.weight.detach() for mlp in mlps]))

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.experts(x, ids, weights) if hasattr(self, "experts") else _fused(self, x, ids, weights)


class ForeignLLaDA2Block(_Foreign):
    """LLaDA2: sigmoid router in `gate`, shared expert inside, a tuple out."""

    def __init__(self, block: nn.Module, layout: str):
        super().__init__(block, layout)
        self.config, self.gate = block.config, block.gate
        self.shared_experts = block.shared_experts

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, seq_len, hidden = hidden_states.shape
        ids, weights, logits = self.gate(hidden_states)
        out = self.routed(hidden_states.reshape(-1, hidden), ids, weights).view(batch, seq_len, hidden)
        out = out + self.shared_experts(hidden_states)
        return out, (logits.view(batch, seq_len, -1), ids.view(batch, seq_len, -1))


class ForeignLLaDAMoEBlock(_Foreign):
    """LLaDA-MoE: a linear gate, softmax, raw probabilities (and bias, where there is one) as weights, a tensor out."""

    def __init__(self, block: nn.Module, layout: str):
        super().__init__(block, layout)
        self.num_experts, self.top_k, self.norm_topk_prob = block.num_experts, block.top_k, False
        self.gate = block.gate
        bias: Any = block.expert_bias
        self.register_buffer("expert_bias", None if bias is None else bias.clone())

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        probs = torch.softmax(self.gate(x), dim=1, dtype=torch.float32)
        if self.expert_bias is not None:
            probs = probs + self.expert_bias
        weights, ids = probs.topk(self.top_k, dim=-1)
        return self.routed(x, ids, weights.to(x.dtype)).view(hidden_states.shape)


FOREIGN = {"llada2": ForeignLLaDA2Block, "llada_moe": ForeignLLaDAMoEBlock}


def restack(model: nn.Module, family: str, layout: str) -> list[str]:
    """Replace the MoE blocks of ``model`` by foreign ones of ``layout`` with the same numbers; their paths."""
    paths = []
    for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
        if hasattr(layer.mlp, "experts"):
            layer.mlp = FOREIGN[family](layer.mlp, layout).train(model.training)
            paths.append(f"model.layers.{index}.mlp")
    return paths
