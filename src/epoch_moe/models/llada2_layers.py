"""Layers of LLaDA2: norms, rotary embedding, attention masks, attention, router and mixture-of-experts block.

Shape suffixes: B sequences, S positions, T = B x S rows, Q queries, H hidden, E experts, K top-k, D head dimension,
R rotary dimension, N heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from epoch_moe.experts.grouped import pick_backend, run_experts
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.models.llada2_config import LLaDA2MoeConfig
from epoch_moe.routing import route


class LLaDA2MoeRMSNorm(nn.Module):
    """RMS norm: statistics in fp32, product in the model's dtype."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        x_fp32 = x.float()
        scale = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x_fp32 * scale).to(x.dtype)


def rope_tables(config: LLaDA2MoeConfig, position_ids_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin ``[B,S,rotary_dim]`` for absolute positions.

    Computed from the configuration on every forward (a few microseconds) and not kept as a buffer: transformers 5
    builds models on the meta device and leaves non-persistent buffers uninitialised (unsloth#4112).
    """
    rotary_dim = int(config.head_dim * config.partial_rotary_factor)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=position_ids_BS.device).float() / rotary_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    angles = position_ids_BS.unsqueeze(-1).float() * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x_BNSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    rotary_dim = cos_BSR.shape[-1]
    cos, sin = cos_BSR.unsqueeze(1), sin_BSR.unsqueeze(1)
    turned, passed = x_BNSD[..., :rotary_dim], x_BNSD[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    rotated = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, passed), dim=-1)


def _padding_to_bool(mask_BK: Tensor, batch: int, key_len: int) -> Tensor | None:
    """``[B,KV]`` with 1 = real and 0 = padding as bool ``[B,1,1,KV]``; None where nothing is padding."""
    if tuple(mask_BK.shape) != (batch, key_len):
        raise ValueError(
            f"attention_mask has shape {tuple(mask_BK.shape)}: a 2-D mask must be [batch, keys] = "
            f"[{batch}, {key_len}] (cached positions included)"
        )
    real_BK = mask_BK != 0
    if mask_BK.device.type == "cpu":  # elsewhere reading a value would stall the device
        odd = mask_BK[real_BK & (mask_BK != 1)]
        if odd.numel():
            raise ValueError(
                f"attention_mask holds {odd[0].item()}: a 2-D mask has 1 (real) and 0 (padding) only; pass additive "
                "masks as [batch, 1, queries, keys]"
            )
        if bool(real_BK.all()):
            return None
    return real_BK[:, None, None, :]


def attention_bias(
    attention_mask: Tensor | None,
    batch: int,
    query_len: int,
    key_len: int,
    dtype: torch.dtype,
    num_heads: int | None = None,
) -> Tensor | None:
    """The additive attention mask ``[B|1, 1|N, Q, KV]`` that a caller's mask means, or None for no restriction.

    A query that may attend to nothing (padding) attends to everything: its output is unused, and a softmax over
    nothing would be NaN.

    Args:
        attention_mask: None (bidirectional); ``[B,KV]`` with 1 = real and 0 = padding (bidirectional among real
            positions); 4-D bool, True = attend; 4-D float, additive (0 = attend, -inf = do not).
        batch: B.
        query_len: Q, positions of this forward.
        key_len: KV, cached positions included.
        dtype: of the result.
        num_heads: N, to check the mask's second dimension against; None skips that check.

    Raises:
        ValueError: for another shape or dtype; on the CPU also for an additive mask with positive values, which is
            a 0/1 mask by mistake (it would weaken attention, not forbid it).
    """
    if attention_mask is None:
        return None
    mask: Tensor | None = attention_mask
    if attention_mask.dim() == 2:
        mask = _padding_to_bool(attention_mask, batch, key_len)
        if mask is None:
            return None
    assert mask is not None
    heads = (1,) if num_heads is None else (1, num_heads)
    if (
        mask.dim() != 4
        or mask.shape[0] not in (1, batch)
        or (num_heads is not None and mask.shape[1] not in heads)
        or mask.shape[2] not in (1, query_len)
        or mask.shape[3] != key_len
    ):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: expected None, [batch, keys] = "
            f"[{batch}, {key_len}] or [batch or 1, heads or 1, queries or 1, keys] = "
            f"[{batch}, {'heads' if num_heads is None else num_heads}, {query_len}, {key_len}] (keys include cached "
            "positions)"
        )
    if mask.dtype == torch.bool:
        mask = mask | ~mask.any(dim=-1, keepdim=True)
        zero = torch.zeros((), dtype=dtype, device=mask.device)
        return torch.where(mask, zero, float("-inf")).expand(-1, -1, query_len, -1)
    if not mask.is_floating_point():
        raise ValueError(
            f"attention_mask has dtype {mask.dtype}: a 4-D mask must be bool (True = attend) or additive float; use "
            "mask.bool() for a 0/1 mask"
        )
    if mask.device.type == "cpu" and mask.numel() and float(mask.max()) > 0:
        raise ValueError(
            f"attention_mask holds {float(mask.max())}: an additive 4-D mask has values of at most 0 (0 = attend, "
            "-inf = do not); use mask.bool() for a 0/1 mask"
        )
    mask = mask.to(dtype)
    mask = mask.masked_fill((mask == float("-inf")).all(dim=-1, keepdim=True), 0.0)
    return mask.expand(-1, -1, query_len, -1)


class LLaDA2MoeMLP(nn.Module):
    """SwiGLU: a dense layer's MLP, an expert, or the shared expert."""

    def __init__(self, config: LLaDA2MoeConfig, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """``down(silu(gate(x)) * up(x))``."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


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
            LLaDA2MoeMLP(config, config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        self.gate = LLaDA2MoeGate(config)
        if config.num_shared_experts:
            self.shared_experts = LLaDA2MoeMLP(config, config.moe_intermediate_size * config.num_shared_experts)
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
        stacked = self._weights.differentiable() if torch.is_grad_enabled() else self._weights.ensure()
        routed_TH = run_experts(x_TH, ids_TK, weights_TK, stacked, pick_backend("auto", stacked))
        out = routed_TH.view(batch, seq_len, hidden)
        if self.config.num_shared_experts:
            out = out + self.shared_experts(hidden_states)
        logits_BSE = logits_TE.view(batch, seq_len, self.gate.num_experts)
        return out, (logits_BSE, ids_TK.view(batch, seq_len, self.num_experts_per_tok))


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Plain attention with returned weights: ``[B,N,Q,D] -> [B,Q,N,D]``, ``[B,N,Q,KV]``."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class LLaDA2MoeAttention(nn.Module):
    """Grouped-query attention with per-head query and key norms and partial rotary embedding."""

    def __init__(self, config: LLaDA2MoeConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        self.is_causal = False
        self.query_key_value = nn.Linear(
            config.hidden_size,
            (self.num_heads + 2 * self.num_key_value_heads) * self.head_dim,
            bias=config.use_qkv_bias,
        )
        if config.use_qk_norm:
            self.query_layernorm = LLaDA2MoeRMSNorm(self.head_dim, config.rms_norm_eps)
            self.key_layernorm = LLaDA2MoeRMSNorm(self.head_dim, config.rms_norm_eps)
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
        query, key = _rotate(query, *position_embeddings), _rotate(key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = eager_attention
        # transformers' sdpa cannot reshape 0 sequences.
        if self.config._attn_implementation != "eager" and hidden_states.numel():
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.dense(out.reshape(batch, seq_len, self.num_heads * self.head_dim)), weights


class LLaDA2MoeDecoderLayer(nn.Module):
    """Pre-norm attention and MLP, dense in the first `first_k_dense_replace` layers and MoE in the others."""

    def __init__(self, config: LLaDA2MoeConfig, layer_idx: int):
        super().__init__()
        self.attention = LLaDA2MoeAttention(config, layer_idx)
        dense = layer_idx < config.first_k_dense_replace
        self.mlp = LLaDA2MoeMLP(config, config.intermediate_size) if dense else LLaDA2MoeSparseMoeBlock(config)
        self.input_layernorm = LLaDA2MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LLaDA2MoeRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **attention: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``[B,S,H] -> (hidden [B,S,H], attention weights or None, router logits [B,S,E] or None)``."""
        attended, weights = self.attention(self.input_layernorm(hidden_states), **attention)
        hidden_states = hidden_states + attended
        out = self.mlp(self.post_attention_layernorm(hidden_states))
        router = None
        if isinstance(out, tuple):
            out, router = out
        return hidden_states + out.to(hidden_states.device), weights, None if router is None else router[0]
