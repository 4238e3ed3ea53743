"""Layers that the model families share: rotary embedding, attention masks, attention, experts, decoder layer.

Shape suffixes: B sequences, S positions, T = B x S rows, H hidden, Q queries, K keys, D head dimension, R rotary
dimension, N query heads, n key and value heads; of routing: E experts, K top-k.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, eager_attention_forward

from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.kernels.launch import by_kernels
from epoch_moe.kernels.norm_rotate_reference import rotate_reference
from epoch_moe.models.config import DiffusionConfig


def rope_tables(position_ids_BS: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin ``[B,S,rotary_dim]`` for absolute positions.

    Computed from the configuration on every forward (a few microseconds) and not kept as a buffer: transformers 5
    builds models on the meta device and leaves non-persistent buffers uninitialised (unsloth#4112).
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=position_ids_BS.device).float() / rotary_dim
    inv_freq = 1.0 / (theta**exponents)
    angles = position_ids_BS.unsqueeze(-1).float() * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BNSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    """The first R dimensions of every head turned by the position's angles, the others as they were."""
    if by_kernels(x_BNSD):
        from epoch_moe.kernels.norm_rotate import norm_rotate

        return norm_rotate(x_BNSD, None, cos_BSR, sin_BSR, 0.0)
    return rotate_reference(x_BNSD, cos_BSR, sin_BSR)


class RMSNorm(LlamaRMSNorm):  # type: ignore[misc]
    """RMS norm of the last dimension: statistics in fp32, product in the model's dtype."""

    def forward(self, x: Tensor, cos_BSR: Tensor | None = None, sin_BSR: Tensor | None = None) -> Tensor:
        """The norm of ``x``; with angles, of heads ``[B,N,S,D]`` that are turned by them afterwards."""
        if by_kernels(x) and self.weight.dtype == x.dtype:
            from epoch_moe.kernels.norm_rotate import norm_rotate, rms_norm

            if x.dim() != 4:
                return rms_norm(x, self.weight, self.variance_epsilon)
            return norm_rotate(x, self.weight, cos_BSR, sin_BSR, self.variance_epsilon)
        normed: Tensor = super().forward(x)
        return normed if cos_BSR is None or sin_BSR is None else rotate(normed, cos_BSR, sin_BSR)


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
    mask, on_cpu = attention_mask, attention_mask.device.type == "cpu"  # elsewhere reading a value would stall
    expected = f"[batch, keys] = [{batch}, {key_len}] (keys include cached positions)"
    if mask.dim() == 2:
        if tuple(mask.shape) != (batch, key_len):
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}: a 2-D mask must be {expected}")
        if on_cpu and (odd := mask[(mask != 0) & (mask != 1)]).numel():
            raise ValueError(
                f"attention_mask holds {odd[0].item()}: a 2-D mask has 1 (real) and 0 (padding) only; pass additive "
                "masks as [batch, 1, queries, keys]"
            )
        if on_cpu and bool(mask.all()):
            return None
        mask = (mask != 0)[:, None, None, :]
    allowed = ((1, batch), None if num_heads is None else (1, num_heads), (1, query_len), (key_len,))
    if mask.dim() != 4 or any(sizes and size not in sizes for size, sizes in zip(mask.shape, allowed, strict=True)):
        heads = "heads" if num_heads is None else num_heads
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}: expected None, {expected} or [batch or 1, heads or 1, "
            f"queries or 1, keys] = [{batch}, {heads}, {query_len}, {key_len}]"
        )
    if mask.dtype == torch.bool:
        mask = mask | ~mask.any(dim=-1, keepdim=True)
        return torch.where(mask, mask.new_zeros((), dtype=dtype), float("-inf")).expand(-1, -1, query_len, -1)
    if not mask.is_floating_point():
        raise ValueError(
            f"attention_mask has dtype {mask.dtype}: a 4-D mask must be bool (True = attend) or additive float; use "
            "mask.bool() for a 0/1 mask"
        )
    if on_cpu and mask.numel() and float(mask.max()) > 0:
        raise ValueError(
            f"attention_mask holds {float(mask.max())}: an additive 4-D mask has values of at most 0 (0 = attend, "
            "-inf = do not); use mask.bool() for a 0/1 mask"
        )
    mask = mask.to(dtype)
    mask = mask.masked_fill((mask == float("-inf")).all(dim=-1, keepdim=True), 0.0)
    return mask.expand(-1, -1, query_len, -1)


class SwiGLU(nn.Module):
    """A dense layer's MLP, an expert, or the shared expert."""

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act_fn = ACT2FN[hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """``down(silu(gate(x)) * up(x))``."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding; a family adds its projections and `heads`."""

    output_name: str
    """Name of the output projection."""

    def __init__(self, config: DiffusionConfig, layer_idx: int):
        super().__init__()
        sizes = config.sizes()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads, self.num_key_value_heads, self.head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads  # transformers' sdpa reads it
        self.is_causal = False

    def heads(self, hidden_states: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B,N,S,D]``, keys and values ``[B,n,S,D]``: normed, clipped, queries and keys turned."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """``[B,S,H] -> [B,S,H]`` and, with eager attention, the weights ``[B,N,S,KV]``."""
        query, key, value = self.heads(hidden_states, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = eager_attention_forward
        # transformers' sdpa cannot reshape 0 sequences.
        if self.config._attn_implementation != "eager" and query.numel():
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.config.attention_dropout if self.training else 0.0
        scaling = self.head_dim**-0.5
        out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        return getattr(self, self.output_name)(rearrange(out, "b s n d -> b s (n d)")), weights


class MoEBlock(nn.Module):
    """What the families' MoE blocks share: the routed experts, in stacked storage from the first forward on."""

    def make_experts(self, config: DiffusionConfig) -> None:
        """Add the routed experts; where among the block's parameters they stand is the family's choice."""
        sizes = config.sizes()
        self.experts = nn.ModuleList(
            SwiGLU(sizes.hidden, sizes.expert_inner, config.hidden_act) for _ in range(sizes.experts)
        )
        self._weights = ExpertWeights(self.experts)

    def run_experts(self, hidden_states: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum of the chosen experts: ``[B,S,H] -> [B,S,H]``."""
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self._weights.as_linear(x_TH, ids_TK, weights_TK).view(hidden_states.shape)

    def _apply(self, fn: Any, recurse: bool = True) -> MoEBlock:
        super()._apply(fn, recurse)
        self._weights.release()
        return self


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, dense or MoE as the configuration's `sizes` say."""

    attention_name: str
    attention_class: type[Attention]
    moe_class: type[MoEBlock]

    def __init__(self, config: DiffusionConfig, layer_idx: int):
        super().__init__()
        sizes = config.sizes()
        setattr(self, self.attention_name, self.attention_class(config, layer_idx))
        self.mlp: nn.Module
        if layer_idx in sizes.moe_layers:
            self.mlp = self.moe_class(config)
            self.make_shared(config)
        else:
            self.mlp = SwiGLU(sizes.hidden, sizes.dense_inner, config.hidden_act)
        self.input_layernorm = RMSNorm(sizes.hidden, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(sizes.hidden, config.rms_norm_eps)

    def make_shared(self, config: Any) -> None:
        """Add a `shared_expert` beside the MoE block, where a family has it there and not in the block."""

    def forward(self, hidden_states: Tensor, **attention: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``[B,S,H] -> (hidden [B,S,H], attention weights or None, router logits [B,S,E] or None)``."""
        attended, weights = getattr(self, self.attention_name)(self.input_layernorm(hidden_states), **attention)
        hidden_states = hidden_states + attended
        normed = self.post_attention_layernorm(hidden_states)
        out, router = self.mlp(normed), None
        if isinstance(out, tuple):  # a patched block has no router to show under a plan
            out, router = out
        if hasattr(self, "shared_expert"):
            out = out + self.shared_expert(normed)
        return hidden_states + out.to(hidden_states.device), weights, None if router is None else router[0]
