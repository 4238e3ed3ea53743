"""LLaDA2.0, 2.1 and 2.2 (`model_type: llada2_moe`) for transformers, without remote code.

Module tree and state-dict keys are the released ones, so official checkpoints load and `save_pretrained` writes
official checkpoints. Shape suffixes: B sequences, S positions, T = B x S rows, H hidden, E experts, K top-k,
D head dimension, N heads.

Attention is bidirectional unless a mask says otherwise; see `attention_bias`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from epoch_moe.experts.grouped import pick_backend, run_experts
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.routing import RouterSpec, combine_weights, router_logits, router_scores, select, sequence_pools


class LLaDA2MoeConfig(PretrainedConfig):  # type: ignore[misc]
    """Configuration of LLaDA2 models; keys and defaults of the released `config.json` files.

    `expert_capacity` together with `block_size` selects LLaDA2.2's block-pool router; without them the router is
    group-limited (2.0, 2.1). `mask_token_id` is the id of undecoded positions.
    """

    model_type = "llada2_moe"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 157184,
        hidden_size: int = 2048,
        intermediate_size: int = 5120,
        num_hidden_layers: int = 20,
        num_attention_heads: int = 16,
        num_key_value_heads: int = 4,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        use_qkv_bias: bool = False,
        use_bias: bool = False,
        use_qk_norm: bool = True,
        rms_norm_eps: float = 1e-6,
        norm_head: bool = False,
        embedding_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        initializer_range: float = 0.02,
        max_position_embeddings: int = 32768,
        rope_theta: float = 600000.0,
        rope_scaling: dict[str, Any] | None = None,
        partial_rotary_factor: float = 0.5,
        use_cache: bool = False,
        use_sliding_window: bool = False,
        sliding_window: int | None = 4096,
        max_window_layers: int = 28,
        num_experts: int = 256,
        num_experts_per_tok: int = 8,
        num_shared_experts: int | None = 1,
        moe_intermediate_size: int = 512,
        n_group: int = 8,
        topk_group: int = 4,
        routed_scaling_factor: float = 2.5,
        norm_topk_prob: bool = True,
        score_function: str = "sigmoid",
        router_dtype: str = "fp32",
        moe_router_enable_expert_bias: bool = True,
        first_k_dense_replace: int = 1,
        output_router_logits: bool = False,
        expert_capacity: int | None = None,
        block_size: int | None = None,
        delete_token_id: int | None = None,
        split_token_id: int | None = None,
        pad_token_id: int | None = 156892,
        eos_token_id: int | None = 156892,
        mask_token_id: int | None = 156895,
        tie_word_embeddings: bool = False,
        rope_parameters: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        # transformers 5 may hand RoPE settings over as one dictionary; the released files have separate keys.
        if rope_parameters is not None:
            rope_theta = rope_parameters.get("rope_theta", rope_theta)
            partial_rotary_factor = rope_parameters.get("partial_rotary_factor", partial_rotary_factor)
            rope_scaling = rope_scaling or rope_parameters
        kind = (rope_scaling or {}).get("rope_type", (rope_scaling or {}).get("type", "default"))
        unsupported = [
            ("rope_scaling", rope_scaling, kind == "default", "null"),
            ("score_function", score_function, score_function == "sigmoid", "'sigmoid'"),
            ("use_sliding_window", use_sliding_window, not use_sliding_window, "false"),
            ("norm_head", norm_head, not norm_head, "false"),
            ("router_dtype", router_dtype, router_dtype in ("fp32", None), "'fp32'"),
            ("norm_topk_prob", norm_topk_prob, norm_topk_prob in (True, None), "true"),
        ]
        for key, value, supported, expected in unsupported:
            if not supported:
                raise ValueError(
                    f"llada2_moe config has {key}={value!r}: this implementation has only {expected}, as every "
                    "released LLaDA2 checkpoint does"
                )
        if num_key_value_heads < 1 or num_attention_heads % num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={num_attention_heads} must be a multiple of "
                f"num_key_value_heads={num_key_value_heads}"
            )
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.use_qkv_bias = use_qkv_bias
        self.use_bias = use_bias
        self.use_qk_norm = use_qk_norm
        self.rms_norm_eps = rms_norm_eps
        self.norm_head = norm_head
        self.embedding_dropout = embedding_dropout
        self.attention_dropout = attention_dropout
        self.output_dropout = output_dropout
        self.initializer_range = initializer_range
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rope_scaling = None
        self.partial_rotary_factor = partial_rotary_factor
        self.use_cache = use_cache
        self.use_sliding_window = use_sliding_window
        self.sliding_window = sliding_window
        self.max_window_layers = max_window_layers
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.num_shared_experts = num_shared_experts
        self.moe_intermediate_size = moe_intermediate_size
        self.n_group = n_group
        self.topk_group = topk_group
        self.routed_scaling_factor = routed_scaling_factor
        self.norm_topk_prob = norm_topk_prob
        self.score_function = score_function
        self.router_dtype = router_dtype
        self.moe_router_enable_expert_bias = moe_router_enable_expert_bias
        self.first_k_dense_replace = first_k_dense_replace
        self.output_router_logits = output_router_logits
        self.expert_capacity = expert_capacity
        self.block_size = block_size
        self.delete_token_id = delete_token_id
        self.split_token_id = split_token_id
        self.mask_token_id = mask_token_id
        super().__init__(
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    def router_spec(self) -> RouterSpec:
        """The routing that this configuration describes."""
        common: dict[str, Any] = {
            "num_experts": self.num_experts,
            "top_k": self.num_experts_per_tok,
            "routed_scaling_factor": self.routed_scaling_factor,
        }
        if self.expert_capacity is not None and self.block_size is not None:
            return RouterSpec(
                kind="block_pool", expert_capacity=self.expert_capacity, block_size=self.block_size, **common
            )
        return RouterSpec(kind="sigmoid_group", n_group=self.n_group, topk_group=self.topk_group, **common)


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


def attention_bias(
    attention_mask: Tensor | None, batch: int, query_len: int, key_len: int, dtype: torch.dtype
) -> Tensor | None:
    """The additive attention mask ``[B|1, 1|N, Q, KV]`` that a caller's mask means, or None for no restriction.

    Args:
        attention_mask: None (bidirectional); ``[B,KV]`` with 1 = real and 0 = padding (bidirectional among real
            positions); 4-D bool, True = attend; 4-D float, additive (0 = attend, -inf = do not).
    """
    if attention_mask is None:
        return None
    mask = attention_mask
    if mask.dim() == 2:
        if tuple(mask.shape) != (batch, key_len):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}: a 2-D mask must be [batch, keys] = "
                f"[{batch}, {key_len}] (cached positions included)"
            )
        if not mask.is_floating_point():
            real = mask != 0
        elif bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError("a 2-D attention_mask holds 1 (real) and 0 (padding) only; pass additive masks as 4-D")
        else:
            real = mask != 0
        if bool(real.all()):
            return None
        mask = real[:, None, None, :]
    if mask.dim() != 4:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: expected None, [batch, keys] or "
            "[batch, heads or 1, queries, keys]"
        )
    expected = (query_len, key_len)
    if (mask.shape[-2] not in (1, query_len)) or mask.shape[-1] != key_len or mask.shape[0] not in (1, batch):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: expected [{batch} or 1, heads or 1, "
            f"{expected[0]}, {expected[1]}]"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"a 4-D attention_mask must be bool (True = attend) or additive float, got {mask.dtype}; "
            "use mask.bool() for a 0/1 mask"
        )
    if mask.dtype == torch.bool:
        # A row that may attend to nothing (padding) attends to everything: its output is unused, and a softmax over
        # nothing would be NaN.
        mask = mask | ~mask.any(dim=-1, keepdim=True)
        zero = torch.zeros((), dtype=dtype, device=mask.device)
        mask = torch.where(mask, zero, float("-inf"))
    return mask.to(dtype).expand(-1, -1, query_len, -1)


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
            topk_idx ``[T,K]`` int64, topk_weight ``[T,K]`` fp32, logits ``[T,E]`` fp32.
        """
        batch = hidden_states.shape[0] if hidden_states.dim() == 3 else 1
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores = router_scores(router_logits(x_TH, self.weight, self.spec), self.expert_bias, self.spec)
        pools_TE = None
        if self.spec.kind == "block_pool":
            pools_TE = sequence_pools(scores.selection_TE, self.spec, batch)
        ids_TK = select(scores.selection_TE, self.spec, pools_TE)
        return ids_TK, combine_weights(scores.combine_TE, ids_TK, self.spec, x_TH.dtype), scores.logits_TE


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
        return out, (logits_TE.view(batch, seq_len, -1), ids_TK.view(batch, seq_len, -1))


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
        heads = self.query_key_value(hidden_states).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split([self.num_heads, self.num_key_value_heads, self.num_key_value_heads], dim=1)
        if self.config.use_qk_norm:
            query, key = self.query_layernorm(query), self.key_layernorm(key)
        query, key = _rotate(query, *position_embeddings), _rotate(key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = eager_attention
        if self.config._attn_implementation != "eager":
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
        return self.dense(out.reshape(batch, seq_len, -1)), weights


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


class LLaDA2MoePreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Loading, saving and initialisation."""

    config_class = LLaDA2MoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LLaDA2MoeDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_cache_class = True
    # 4.57 leaves buffers in their own dtype and refuses names that are no modules; 5.x casts buffers unless told not to.
    _keep_in_fp32_modules_strict = ["expert_bias"] if int(transformers.__version__.split(".")[0]) >= 5 else None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Through torch.nn.init: transformers 5 guards those functions so that loaded tensors are not overwritten.
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, LLaDA2MoeGate):
            nn.init.normal_(module.weight, mean=0.0, std=std)
            nn.init.zeros_(module.expert_bias)
        elif isinstance(module, LLaDA2MoeRMSNorm):
            nn.init.ones_(module.weight)


@dataclass
class _Collected:
    hidden: tuple[Tensor, ...] = ()
    attentions: tuple[Tensor, ...] = ()
    router: tuple[Tensor, ...] = ()


class LLaDA2MoeModel(LLaDA2MoePreTrainedModel):
    """The decoder without its LM head."""

    def __init__(self, config: LLaDA2MoeConfig):
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LLaDA2MoeDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LLaDA2MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.word_embeddings = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast | tuple[Any, ...]:
        """Hidden states ``[B,S,H]`` of ``input_ids [B,S]`` or ``inputs_embeds [B,S,H]``.

        Args:
            attention_mask: see `attention_bias`.
            position_ids: absolute positions ``[B|1,S]``; default: continue after the cache.
            past_key_values: a transformers `Cache`; the rows' K/V are appended to it.
        """
        config = self.config
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if input_ids is not None:
            if input_ids.dim() != 2:
                raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}: expected [batch, positions]")
            inputs_embeds = self.word_embeddings(input_ids)
        assert inputs_embeds is not None
        use_cache = config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        batch, seq_len, _ = inputs_embeds.shape
        past_len = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        if position_ids is None:
            position_ids = torch.arange(past_len, past_len + seq_len, device=inputs_embeds.device).unsqueeze(0)
        elif position_ids.shape[-1] != seq_len:
            raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}: expected [{batch} or 1, {seq_len}]")
        if getattr(config, "output_attentions", False) and output_attentions is None:
            output_attentions = True
        if output_attentions and config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions=True needs attn_implementation='eager', the model has "
                f"{config._attn_implementation!r}"
            )
        want_router = config.output_router_logits if output_router_logits is None else output_router_logits
        mask = attention_bias(attention_mask, batch, seq_len, past_len + seq_len, inputs_embeds.dtype)
        attention = {
            "attention_mask": mask,
            "position_embeddings": rope_tables(config, position_ids, inputs_embeds.dtype),
            "past_key_values": past_key_values,
        }
        seen = _Collected()
        hidden_states = F.dropout(inputs_embeds, config.embedding_dropout, self.training)
        for layer in self.layers:
            if output_hidden_states:
                seen.hidden += (hidden_states,)
            if self.gradient_checkpointing and self.training:
                hidden_states, weights, router = self._gradient_checkpointing_func(
                    layer.__call__, hidden_states, **attention
                )
            else:
                hidden_states, weights, router = layer(hidden_states, **attention)
            if output_attentions and weights is not None:
                seen.attentions += (weights,)
            if want_router and router is not None:
                seen.router += (router,)
        hidden_states = self.norm(hidden_states)
        if output_hidden_states:
            seen.hidden += (hidden_states,)
        out = MoeModelOutputWithPast(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values,
            hidden_states=seen.hidden or None,
            attentions=seen.attentions or None,
            router_logits=seen.router or None,
        )
        return out if return_dict is not False else out.to_tuple()


class LLaDA2MoeModelLM(LLaDA2MoePreTrainedModel):
    """LLaDA2 with its LM head. Logits belong to the position they are at (no shift): it is a masked predictor."""

    # transformers 5 wants {tied key: source key} for save_pretrained, 4.57 iterates over the keys: a dict serves both.
    _tied_weights_keys = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config: LLaDA2MoeConfig):
        super().__init__(config)
        self.model = LLaDA2MoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.model.word_embeddings = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        """The LM head."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the LM head."""
        self.lm_head = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast | tuple[Any, ...]:
        """Logits ``[B,S,V]`` in fp32.

        Args:
            labels: ``[B,S]``, -100 = ignored; the loss is the cross entropy *at* each position.
            logits_to_keep: compute logits of the last n positions (0 = all) or of the given positions (1-D tensor).
            Everything else as in `LLaDA2MoeModel.forward`.
        """
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        keep = logits_to_keep if isinstance(logits_to_keep, Tensor) else keep  # type: ignore[assignment]
        logits = self.lm_head(out.last_hidden_state[:, keep]).float()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100)
        result = MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            router_logits=out.router_logits,
        )
        return result if return_dict is not False else result.to_tuple()
