"""Layers of LLaDA2: attention, router and mixture-of-experts block.

Shape suffixes: B sequences, S positions, T = B x S rows, H hidden, E experts, K top-k, N heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.models.layers import RMSNorm, SwiGLU, attend, rotate
from epoch_moe.models.llada2_config import LLaDA2MoeConfig
from epoch_moe.routing import route


class LLaDA2MoeGate(nn.Module):
    """The router: group-limited (2.0, 2.1) or block-pool (2.2), in fp32."""

    def __init__(self, config: LLaDA2MoeConfig):
        super().__init__()
        self.config = config
        self.spec = config.router_spec()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_experts
        self.n_group = config.n_group
        self.topk_group = config.topk_group
        self.routed_scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def _apply(self, fn: Any, recurse: bool = True) -> LLaDA2MoeGate:
        # `.to(bfloat16)` would round the bias, and with it the choice of experts (sglang#31213).
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias.device.type != "meta" and self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias.to(device=self.expert_bias.device, dtype=torch.float32)
        return self

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route ``[B,S,H]`` (or ``[T,H]``, one sequence).

        Returns:
            topk_idx ``[T,K]`` int64, topk_weight ``[T,K]`` fp32, logits ``[T,E]`` fp32. The block-pool router forms
            its pools from position 0 of the given sequences, padding included: pass whole blocks.
        """
        batch = hidden_states.shape[0] if hidden_states.dim() == 3 else 1
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing, scores = route(x_TH, self.weight, self.expert_bias, self.spec, batch=batch)
        return routing.ids_TK, routing.weights_TK, scores.logits_TE


class LLaDA2MoeSparseMoeBlock(nn.Module):
    """Routed experts plus the shared expert."""

    def __init__(self, config: LLaDA2MoeConfig):
        super().__init__()
        self.config = config
        self.num_experts_per_tok = config.num_experts_per_tok
        self.experts = nn.ModuleList(
            SwiGLU(config.hidden_size, config.moe_intermediate_size, config.hidden_act)
            for _ in range(config.num_experts)
        )
        self.gate = LLaDA2MoeGate(config)
        if config.num_shared_experts:
            shared_size = config.moe_intermediate_size * config.num_shared_experts
            self.shared_experts = SwiGLU(config.hidden_size, shared_size, config.hidden_act)
        self._weights = ExpertWeights(self.experts)

    def _apply(self, fn: Any, recurse: bool = True) -> LLaDA2MoeSparseMoeBlock:
        super()._apply(fn, recurse)
        self._weights.release()
        return self

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """``[B,S,H] -> (out [B,S,H], (router_logits [B,S,E] fp32, topk_idx [B,S,K]))``."""
        batch, seq_len, hidden = hidden_states.shape
        ids_TK, weights_TK, logits_TE = self.gate(hidden_states)
        x_TH = hidden_states.reshape(-1, hidden)
        out = self._weights.as_linear(x_TH, ids_TK, weights_TK).view(batch, seq_len, hidden)
        if self.config.num_shared_experts:
            out = out + self.shared_experts(hidden_states)
        logits_BSE = logits_TE.view(batch, seq_len, self.gate.num_experts)
        return out, (logits_BSE, ids_TK.view(batch, seq_len, self.num_experts_per_tok))


class LLaDA2MoeAttention(nn.Module):
    """Grouped-query attention with per-head query and key norms and partial rotary embedding."""

    def __init__(self, config: LLaDA2MoeConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads  # transformers' sdpa reads it
        self.head_dim = config.head_dim
        self.is_causal = False
        self.query_key_value = nn.Linear(
            config.hidden_size,
            (self.num_heads + 2 * self.num_key_value_heads) * self.head_dim,
            bias=config.use_qkv_bias,
        )
        if config.use_qk_norm:
            self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.dense = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.use_bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """``[B,S,H] -> [B,S,H]`` and, with eager attention, the weights ``[B,N,S,KV]``."""
        batch, seq_len, _ = hidden_states.shape
        num_all = self.num_heads + 2 * self.num_key_value_heads  # sizes in full: -1 is ambiguous for 0 rows
        heads = self.query_key_value(hidden_states).view(batch, seq_len, num_all, self.head_dim).transpose(1, 2)
        query, key, value = heads.split([self.num_heads, self.num_key_value_heads, self.num_key_value_heads], dim=1)
        if self.config.use_qk_norm:
            query, key = self.query_layernorm(query), self.key_layernorm(key)
        query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        out, weights = attend(self, self.config, query, key, value, attention_mask, **kwargs)
        return self.dense(out.reshape(batch, seq_len, self.num_heads * self.head_dim)), weights


class LLaDA2MoeDecoderLayer(nn.Module):
    """Pre-norm attention and MLP, dense in the first `first_k_dense_replace` layers and MoE in the others."""

    def __init__(self, config: LLaDA2MoeConfig, layer_idx: int):
        super().__init__()
        self.attention = LLaDA2MoeAttention(config, layer_idx)
        self.mlp: nn.Module
        if layer_idx < config.first_k_dense_replace:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.hidden_act)
        else:
            self.mlp = LLaDA2MoeSparseMoeBlock(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **attention: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``[B,S,H] -> (hidden [B,S,H], attention weights or None, router logits [B,S,E] or None)``."""
        attended, weights = self.attention(self.input_layernorm(hidden_states), **attention)
        hidden_states = hidden_states + attended
        out = self.mlp(self.post_attention_layernorm(hidden_states))
        router = None
        if isinstance(out, tuple):
            out, router = out
        return hidden_states + out.to(hidden_states.device), weights, None if router is None else router[0]
