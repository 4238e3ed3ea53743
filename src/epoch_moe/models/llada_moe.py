"""LLaDA-MoE (`model_type: lladamoe`, or `llada` in some files) for transformers, without remote code.

Module tree and state-dict keys are the released ones. Shape suffixes: B sequences, S positions, H hidden, E experts,
K top-k, N heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from epoch_moe.decoding.semi_autoregressive import Remasking, generate_semi_autoregressive
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.models.decoder import DiffusionDecoder, DiffusionLM, DiffusionPreTrainedModel
from epoch_moe.models.generation import one_prompt, released_arguments
from epoch_moe.models.layers import RMSNorm, SwiGLU, attend, rope_tables, rotate
from epoch_moe.models.llada_moe_config import LLaDAConfig, LLaDAMoEConfig
from epoch_moe.precision import without_autocast
from epoch_moe.routing import choose, router_scores

__all__ = [
    "LLaDAConfig",
    "LLaDAMoEConfig",
    "LLaDAMoEDecoderLayer",
    "LLaDAMoEModel",
    "LLaDAMoEModelLM",
    "LLaDAMoESparseMoeBlock",
]


class LLaDAMoESparseMoeBlock(nn.Module):
    """Routed experts. The shared expert, where there is one, is the decoder layer's."""

    def __init__(self, config: LLaDAMoEConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = False
        self.spec = config.router_spec()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            SwiGLU(config.hidden_size, config.expert_intermediate_size, config.hidden_act)
            for _ in range(config.num_experts)
        )
        bias_E = torch.zeros(config.num_experts) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias_E)
        self._weights = ExpertWeights(self.experts)

    def _apply(self, fn: Any, recurse: bool = True) -> LLaDAMoESparseMoeBlock:
        super()._apply(fn, recurse)
        self._weights.release()
        return self

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[B,S,H] -> [B,S,H]``."""
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        # Called, not read: an adapter may stand in the gate's place. Autocast would give near-ties to other experts.
        with without_autocast(x_TH):
            logits_TE = self.gate(x_TH).float()
        routing = choose(router_scores(logits_TE, self.expert_bias, self.spec), self.spec, x_TH.dtype)
        return self._weights.as_linear(x_TH, routing.ids_TK, routing.weights_TK).view(hidden_states.shape)


class LLaDAMoEAttention(nn.Module):
    """Attention with per-head query and key norms and rotary embedding."""

    def __init__(self, config: LLaDAMoEConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads  # transformers' sdpa reads it
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.is_causal = False
        kv_size = self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)
        if config.qk_layernorm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """``[B,S,H] -> [B,S,H]`` and, with eager attention, the weights ``[B,N,S,KV]``."""
        batch, seq_len, hidden = hidden_states.shape
        heads = (batch, seq_len, self.num_heads, self.head_dim)
        kv_heads = (batch, seq_len, self.num_key_value_heads, self.head_dim)
        query, key = self.q_proj(hidden_states).view(heads), self.k_proj(hidden_states).view(kv_heads)
        value = self.v_proj(hidden_states).view(kv_heads)
        if self.config.qk_layernorm:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.config.clip_qkv is not None:
            limit = self.config.clip_qkv
            query, key, value = (x.clamp(-limit, limit) for x in (query, key, value))
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        out, weights = attend(self, self.config, query, key, value, attention_mask, **kwargs)
        return self.o_proj(out.reshape(batch, seq_len, hidden)), weights


class LLaDAMoEDecoderLayer(nn.Module):
    """Pre-norm attention and MLP, dense or MoE; beside an MoE block the shared expert, where there is one."""

    def __init__(self, config: LLaDAMoEConfig, layer_idx: int):
        super().__init__()
        self.self_attn = LLaDAMoEAttention(config, layer_idx)
        self.mlp: nn.Module
        if config.moe_layer_freq[layer_idx]:
            self.mlp = LLaDAMoESparseMoeBlock(config)
            if config.shared_expert_intermediate_size is not None:
                size = config.shared_expert_intermediate_size
                self.shared_expert = SwiGLU(config.hidden_size, size, config.hidden_act)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.dense_intermediate_size, config.hidden_act)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **attention: Any) -> tuple[Tensor, Tensor | None, None]:
        """``[B,S,H] -> (hidden [B,S,H], attention weights or None, None)``: the block gives no router logits."""
        attended, weights = self.self_attn(self.input_layernorm(hidden_states), **attention)
        hidden_states = hidden_states + attended
        normed = self.post_attention_layernorm(hidden_states)
        out = self.mlp(normed)
        if hasattr(self, "shared_expert"):
            out = out + self.shared_expert(normed)
        return hidden_states + out.to(hidden_states.device), weights, None


class LLaDAMoEPreTrainedModel(DiffusionPreTrainedModel):
    """Loading, saving and initialisation."""

    config_class = LLaDAMoEConfig
    _no_split_modules = ["LLaDAMoEDecoderLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LLaDAMoESparseMoeBlock) and module.expert_bias is not None:
            nn.init.zeros_(module.expert_bias)


class LLaDAMoEModel(LLaDAMoEPreTrainedModel, DiffusionDecoder):
    """The decoder without its LM head."""

    embedding_name = "embed_tokens"

    def __init__(self, config: LLaDAMoEConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LLaDAMoEDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def rotary_tables(self, position_ids_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin ``[B,S,R]`` for absolute positions."""
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        rotary_dim = int(head_dim * self.config.partial_rotary_factor)
        return rope_tables(position_ids_BS, rotary_dim, self.config.rope_theta, dtype)


class LLaDAMoEModelLM(LLaDAMoEPreTrainedModel, DiffusionLM):
    """LLaDA-MoE with its LM head. Logits belong to the position they are at (no shift): it is a masked predictor."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LLaDAMoEConfig):
        super().__init__(config)
        self.model = LLaDAMoEModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @released_arguments
    def generate(
        self,
        prompt: Tensor,
        steps: int = 128,
        gen_length: int = 128,
        block_length: int = 128,
        temperature: float = 0.0,
        cfg_scale: float = 0.0,
        remasking: Remasking = "low_confidence",
        mask_id: int | None = None,
    ) -> Tensor:
        """What the `generate` of the model card returns, by `epoch_moe.generate_semi_autoregressive`.

        A patched model decodes under its plan. Arguments not listed here are those of
        `epoch_moe.generate_semi_autoregressive`.

        Args:
            prompt: one prompt ``[1,P]``.
            mask_id: None: the config's (the card has 156895, which released checkpoints have).

        Returns:
            ``[1, P + gen_length]`` int64: the whole canvas, the prompt in front, and also what follows an end id.

        Raises:
            TypeError, ValueError: as `epoch_moe.generate_semi_autoregressive`, and for several prompts.
        """
        out = generate_semi_autoregressive(
            self,
            one_prompt("prompt", prompt),
            steps=steps,
            gen_length=gen_length,
            block_length=block_length,
            temperature=temperature,
            cfg_scale=cfg_scale,
            remasking=remasking,
            eos_token_id=[],
            mask_token_id=mask_id,
        )
        return torch.cat([prompt.to(out.sequences), out.sequences], dim=1)
