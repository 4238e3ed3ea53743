"""A block of the released LLaDA2 remote code's contract under other names, calling its modules, and a model of it."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, F_INNER, E, K, GROUPS, KEPT = 24, 8, 12, 3, 4, 2


class Mlp(nn.Module):
    def __init__(self, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(H, inner, bias=False), nn.Linear(H, inner, bias=False)
        self.down_proj = nn.Linear(inner, H, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    def __init__(self, config: types.SimpleNamespace):
        super().__init__()
        self.config = config
        self.top_k, self.n_group, self.topk_group, self.routed_scaling_factor = K, GROUPS, KEPT, 2.5
        self.weight = nn.Parameter(torch.randn(E, H))
        self.register_buffer("expert_bias", 0.2 * torch.randn(E))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, H).float(), self.weight.float())
        scores = logits.sigmoid()
        biased = scores + self.expert_bias
        groups = biased.view(-1, GROUPS, E // GROUPS).topk(2, dim=-1).values.sum(-1)
        keep = torch.zeros_like(groups).scatter_(1, groups.topk(KEPT, sorted=False).indices, 1.0).bool()
        ids = biased.masked_fill(~keep.repeat_interleave(E // GROUPS, dim=1), float("-inf")).topk(K, dim=-1).indices
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling_factor, logits


class OddlyNamedMixture(nn.Module):
    """Loops over experts when training; without gradients for the routed part otherwise. Returns a tuple."""

    def __init__(self, shared: bool = True):
        super().__init__()
        self.config = types.SimpleNamespace(num_experts=E)
        self.experts = nn.ModuleList(Mlp(F_INNER) for _ in range(E))
        self.gate = Router(self.config)
        if shared:
            self.shared_experts = Mlp(F_INNER)

    def forward(self, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, seq_len, _ = hidden.shape
        ids, weights, logits = self.gate(hidden)
        x = hidden.reshape(-1, H)
        out = self.routed_training(x, ids, weights) if self.training else self.moe_infer(x, ids, weights)
        out = out.view(batch, seq_len, H)
        if hasattr(self, "shared_experts"):
            out = out + self.shared_experts(hidden)
        return out, (logits.view(batch, seq_len, E), ids.view(batch, seq_len, K))

    def routed_training(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        repeated, flat = x.repeat_interleave(K, dim=0), ids.view(-1)
        out = torch.zeros_like(repeated)
        for index, expert in enumerate(self.experts):
            out[flat == index] = expert(repeated[flat == index])
        return (out.view(*weights.shape, H) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    @torch.no_grad()
    def moe_infer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order = ids.view(-1).argsort()
        outs = torch.zeros(order.numel(), H, dtype=x.dtype)
        for index in range(E):
            pairs = order[ids.view(-1)[order] == index]
            if pairs.numel():
                outs[pairs] = self.experts[index](x[pairs // K])
        return (outs.view(*ids.shape, H).to(weights.dtype) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


class Stack(nn.Module):
    """Something with layers, as `patch` wants it; base model and LM head in one."""

    def __init__(self, layers: int = 2, **kwargs: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": OddlyNamedMixture(**kwargs)}) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer["mlp"](hidden)[0]  # type: ignore[index]
        return hidden
