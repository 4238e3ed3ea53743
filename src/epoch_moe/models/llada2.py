"""LLaDA2.0, 2.1 and 2.2 (`model_type: llada2_moe`) for transformers, without remote code.

Module tree and state-dict keys are the released ones, so official checkpoints load and `save_pretrained` writes
official checkpoints. Shape suffixes: B sequences, S positions, T = B x S rows, H hidden, E experts, K top-k, N heads,
D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from einops import rearrange
from torch import Tensor, nn

from epoch_moe.decoding.block_diffusion import generate
from epoch_moe.models.config import DiffusionConfig
from epoch_moe.models.decoder import DiffusionDecoder, DiffusionLM, DiffusionPreTrainedModel
from epoch_moe.models.generation import released_arguments, rest_of
from epoch_moe.models.layers import Attention, DecoderLayer, MoEBlock, RMSNorm, SwiGLU, rotate
from epoch_moe.routing import route


class LLaDA2MoeConfig(DiffusionConfig):
    """Configuration of LLaDA2 models; keys and defaults of the released `config.json` files.

    `expert_capacity` together with `block_size` selects LLaDA2.2's block-pool router; without them the router is
    group-limited (2.0, 2.1). `mask_token_id` is the id of undecoded positions.

    Raises:
        ValueError: for a key whose value this implementation does not have, or sizes that do not fit together.
    """

    model_type = "llada2_moe"

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
        norm_topk_prob: bool | None = True,
        score_function: str = "sigmoid",
        router_dtype: str | None = "fp32",
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
        self.read(locals())

    def complete(self, values: dict[str, Any]) -> None:
        """No sliding window and no norm in the head, as in every released checkpoint; both of the router's keys."""
        for key in ("use_sliding_window", "norm_head"):
            self.only(key, values[key], not values[key], "false")
        values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
        capacity, block_size = values["expert_capacity"], values["block_size"]
        if (capacity is None) != (block_size is None):
            raise ValueError(
                f"expert_capacity={capacity} and block_size={block_size}: LLaDA2.2's router needs both, the router of "
                "2.0 and 2.1 neither"
            )

    def to_dict(self) -> dict[str, Any]:
        """The configuration with the released keys; LLaDA2.2's own keys only where they are set."""
        optional = ("expert_capacity", "block_size", "delete_token_id", "split_token_id")
        return {key: value for key, value in super().to_dict().items() if value is not None or key not in optional}

    def own_sizes(self) -> dict[str, Any]:
        """The MoE layers, `head_dim` and the inner sizes."""
        return dict(
            moe_layers=tuple(range(self.first_k_dense_replace, self.num_hidden_layers)),
            head_dim=self.head_dim,
            expert_inner=self.moe_intermediate_size,
            shared_inner=self.moe_intermediate_size * (self.num_shared_experts or 0),
            dense_inner=self.intermediate_size,
        )


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
        batch = hidden_states.shape[0] if hidden_states.dim() == 3 and hidden_states.numel() else 1
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing, scores = route(x_TH, self.weight, self.expert_bias, self.spec, batch=batch)
        return routing.ids_TK, routing.weights_TK, scores.logits_TE


class LLaDA2MoeSparseMoeBlock(MoEBlock):
    """Routed experts plus the shared expert."""

    def __init__(self, config: LLaDA2MoeConfig):
        super().__init__()
        self.config = config
        self.num_experts_per_tok = config.num_experts_per_tok
        self.make_experts(config)
        self.gate = LLaDA2MoeGate(config)
        if shared_inner := config.sizes().shared_inner:
            self.shared_experts = SwiGLU(config.hidden_size, shared_inner, config.hidden_act)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """``[B,S,H] -> (out [B,S,H], (router_logits [B,S,E] fp32, topk_idx [B,S,K]))``."""
        ids_TK, weights_TK, logits_TE = self.gate(hidden_states)
        out = self.run_experts(hidden_states, ids_TK, weights_TK)
        if self.config.num_shared_experts:
            out = out + self.shared_experts(hidden_states)
        batch, seq_len, _ = hidden_states.shape
        logits_BSE, ids_BSK = (rearrange(x, "(b s) e -> b s e", b=batch, s=seq_len) for x in (logits_TE, ids_TK))
        return out, (logits_BSE, ids_BSK)


class LLaDA2MoeAttention(Attention):
    """One projection to queries, keys and values."""

    output_name = "dense"

    def __init__(self, config: LLaDA2MoeConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        num_all = self.num_heads + 2 * self.num_key_value_heads
        self.query_key_value = nn.Linear(config.hidden_size, num_all * self.head_dim, bias=config.use_qkv_bias)
        if config.use_qk_norm:
            self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.dense = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.use_bias)

    def heads(self, hidden_states: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B,N,S,D]``, keys and values ``[B,n,S,D]``, normed as the configuration says, and turned."""
        all_BNSD = rearrange(self.query_key_value(hidden_states), "b s (n d) -> b n s d", d=self.head_dim)
        query, key, value = all_BNSD.split([self.num_heads, *2 * [self.num_key_value_heads]], dim=1)
        if self.config.use_qk_norm:
            query_turn, key_turn = self.query_layernorm, self.key_layernorm
        else:
            query_turn = key_turn = rotate
        return query_turn(query, cos_BSR, sin_BSR), key_turn(key, cos_BSR, sin_BSR), value


class LLaDA2MoeDecoderLayer(DecoderLayer):
    """The MLP is dense in the first `first_k_dense_replace` layers and MoE in the others."""

    attention_name = "attention"
    attention_class = LLaDA2MoeAttention
    moe_class = LLaDA2MoeSparseMoeBlock


class LLaDA2MoePreTrainedModel(DiffusionPreTrainedModel):
    """Loading, saving and initialisation."""

    config_class = LLaDA2MoeConfig
    _input_embed_layer = "word_embeddings"
    _no_split_modules = ["LLaDA2MoeDecoderLayer"]
    # 4.57 leaves buffers in their own dtype and refuses names that are no modules; 5.x casts buffers unless told not.
    _keep_in_fp32_modules_strict = ["expert_bias"] if int(transformers.__version__.split(".")[0]) >= 5 else None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LLaDA2MoeGate):
            # Through torch.nn.init: transformers 5 guards those functions so that loaded tensors are not overwritten.
            nn.init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            nn.init.zeros_(module.expert_bias)


class LLaDA2MoeModel(LLaDA2MoePreTrainedModel, DiffusionDecoder):
    """The decoder without its LM head."""

    layer_class = LLaDA2MoeDecoderLayer


class LLaDA2MoeModelLM(LLaDA2MoePreTrainedModel, DiffusionLM):
    """LLaDA2 with its LM head. Logits belong to the position they are at (no shift): it is a masked predictor."""

    decoder_class = LLaDA2MoeModel
    # transformers 5 wants {tied key: source key} for save_pretrained, 4.57 iterates over the keys: a dict serves both.
    _tied_weights_keys = {"lm_head.weight": "model.word_embeddings.weight"}

    @released_arguments
    def generate(
        self,
        inputs: Tensor | None = None,
        temperature: float = 0.0,
        block_length: int = 32,
        steps: int = 32,
        gen_length: int = 2048,
        top_p: float | None = None,
        top_k: int | None = None,
        eos_early_stop: bool = False,
        minimal_topk: int = 1,
        threshold: float = 0.95,
        *,
        editing_threshold: float | None = None,
        max_post_steps: int = 16,
        eos_id: int | Sequence[int] | None = None,
        mask_id: int | None = None,
        num_to_transfer: int = 1,
    ) -> Tensor:
        """An answer, with the arguments of the released files (2.0 and 2.1) and by `epoch_moe.generate`.

        A patched model decodes under its plan. Arguments not listed here are those of `epoch_moe.generate`.

        Args:
            inputs: one prompt ``[1,P]``.
            editing_threshold: None decodes as LLaDA2.0. The files of 2.1 and 2.2 edit by default (at 0.9 and 0.0), and
                no config tells 2.0 from 2.1: name it for these models, as their cards do.
            max_post_steps, num_to_transfer: only with `editing_threshold`.
            eos_id, mask_id: None: the model's own (released files: the numbers of released checkpoints).

        Returns:
            ``[1,A]`` int64: the answer without the prompt, up to and including its first end id.

        Raises:
            TypeError, ValueError: as `epoch_moe.generate`, for an argument that is unknown or would have no effect, and
                for several prompts.
        """
        given = rest_of(locals(), "inputs", "eos_id", "mask_id")
        if editing_threshold is None and (max_post_steps, num_to_transfer) != (16, 1):
            raise ValueError(
                f"max_post_steps={max_post_steps} and num_to_transfer={num_to_transfer} belong to editing: pass "
                "editing_threshold too (LLaDA2.1's file has 0.9), or leave them out"
            )
        return generate(self, inputs, eos_token_id=eos_id, mask_token_id=mask_id, **given).sequences
