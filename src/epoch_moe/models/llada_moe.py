"""LLaDA-MoE (`model_type: lladamoe`, or `llada` in some files) for transformers, without remote code.

Module tree and state-dict keys are the released ones. Shape suffixes: B sequences, S positions, H hidden, E experts,
K top-k, N heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from epoch_moe.decoding.semi_autoregressive import Remasking, generate_semi_autoregressive
from epoch_moe.models.config import DiffusionConfig
from epoch_moe.models.decoder import DiffusionDecoder, DiffusionLM, DiffusionPreTrainedModel
from epoch_moe.models.generation import released_arguments, rest_of
from epoch_moe.models.layers import Attention, DecoderLayer, MoEBlock, RMSNorm, SwiGLU, rotate
from epoch_moe.precision import without_autocast
from epoch_moe.routing import choose, router_scores


class LLaDAMoEConfig(DiffusionConfig):
    """Configuration of LLaDA-MoE; keys of the released `config.json`, defaults of LLaDA-MoE-7B-A1B.

    `moe_layer_freq` says for every layer whether it is MoE (1) or dense (0); None means that all are MoE.
    `mask_token_id` is the id of undecoded positions.

    Raises:
        ValueError: for a key whose value this implementation does not have, or sizes that do not fit together.
    """

    model_type = "lladamoe"

    def __init__(
        self,
        vocab_size: int = 157184,
        hidden_size: int = 2048,
        dense_intermediate_size: int = 8192,
        expert_intermediate_size: int = 1024,
        shared_expert_intermediate_size: int | None = None,
        num_hidden_layers: int = 16,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 8192,
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-5,
        use_cache: bool = False,
        pad_token_id: int | None = 156892,
        bos_token_id: int | None = None,
        eos_token_id: int | None = 156892,
        mask_token_id: int | None = 156895,
        tie_word_embeddings: bool = False,
        rope_theta: float = 50000.0,
        partial_rotary_factor: float = 1.0,
        rope_scaling: dict[str, Any] | None = None,
        attention_bias: bool = False,
        attention_dropout: float = 0.0,
        clip_qkv: float | None = None,
        num_experts_per_tok: int = 8,
        num_experts: int = 64,
        output_router_logits: bool = False,
        router_aux_loss_coef: float = 0.01,
        norm_topk_prob: bool | None = None,
        qk_layernorm: bool | None = True,
        moe_layer_freq: Sequence[int] | None = None,
        moe_router_enable_expert_bias: bool | None = False,
        moe_router_score_function: str | None = "softmax",
        routed_scaling_factor: float | None = 1.0,
        router_num_group: int | None = None,
        router_topk_group: int | None = None,
        rope_parameters: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.read(locals())

    def complete(self, values: dict[str, Any]) -> None:
        """A layer is MoE or dense: by default all are MoE."""
        hidden, heads, count = (values[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        layers = [1] * count if values["moe_layer_freq"] is None else list(values["moe_layer_freq"])
        right = len(layers) == count and set(layers) <= {0, 1}
        self.only("moe_layer_freq", layers, right, f"0 or 1 for each of the {count} layers")
        values["moe_layer_freq"] = layers
        if values["num_key_value_heads"] is None:
            values["num_key_value_heads"] = heads
        if hidden % heads:
            raise ValueError(f"num_attention_heads={heads} must divide hidden_size={hidden}")

    def own_sizes(self) -> dict[str, Any]:
        """The MoE layers, `head_dim` and the inner sizes."""
        return dict(
            moe_layers=tuple(i for i, moe in enumerate(self.moe_layer_freq) if moe),
            head_dim=self.hidden_size // self.num_attention_heads,
            expert_inner=self.expert_intermediate_size,
            shared_inner=self.shared_expert_intermediate_size or 0,
            dense_inner=self.dense_intermediate_size,
        )


class LLaDAConfig(LLaDAMoEConfig):
    """LLaDA-MoE under the other name that its files use."""

    model_type = "llada"

    def __init__(self, **kwargs: Any):  # without its own, transformers 5 would generate one
        super().__init__(**kwargs)


# `AutoModel.register` compares the name of a configuration's class with that of the model's `config_class`; both
# spellings of `model_type` belong to one model class. Pickle goes by `__qualname__`, which stays.
LLaDAConfig.__name__ = LLaDAMoEConfig.__name__


class LLaDAMoESparseMoeBlock(MoEBlock):
    """Routed experts. The shared expert, where there is one, is the decoder layer's."""

    def __init__(self, config: LLaDAMoEConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = False
        self.spec = config.router_spec()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.make_experts(config)
        bias_E = torch.zeros(config.num_experts) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias_E)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[B,S,H] -> [B,S,H]``."""
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        # Called, not read: an adapter may stand in the gate's place. Autocast would give near-ties to other experts.
        with without_autocast(x_TH):
            logits_TE = self.gate(x_TH).float()
        routing = choose(router_scores(logits_TE, self.expert_bias, self.spec), self.spec, x_TH.dtype)
        return self.run_experts(hidden_states, routing.ids_TK, routing.weights_TK)


class LLaDAMoEAttention(Attention):
    """Three projections; values may be clipped (`clip_qkv`)."""

    output_name = "o_proj"

    def __init__(self, config: LLaDAMoEConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        hidden, kv_size, bias = config.hidden_size, self.num_key_value_heads * self.head_dim, config.attention_bias
        self.q_proj = nn.Linear(hidden, hidden, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.o_proj = nn.Linear(hidden, hidden, bias=bias)
        if config.qk_layernorm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def heads(self, hidden_states: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B,N,S,D]``, keys and values ``[B,n,S,D]``: normed, clipped as configured, and turned."""
        query, key, value = (
            rearrange(projection(hidden_states), "b s (n d) -> b n s d", d=self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        limit = self.config.clip_qkv
        if self.config.qk_layernorm and limit is None:
            return self.q_norm(query, cos_BSR, sin_BSR), self.k_norm(key, cos_BSR, sin_BSR), value
        if self.config.qk_layernorm:
            query, key = self.q_norm(query), self.k_norm(key)
        if limit is not None:
            query, key, value = (x.clamp(-limit, limit) for x in (query, key, value))
        return rotate(query, cos_BSR, sin_BSR), rotate(key, cos_BSR, sin_BSR), value


class LLaDAMoEDecoderLayer(DecoderLayer):
    """The MLP is dense or MoE; beside an MoE block stands the shared expert, where there is one."""

    attention_name = "self_attn"
    attention_class = LLaDAMoEAttention
    moe_class = LLaDAMoESparseMoeBlock

    def make_shared(self, config: LLaDAMoEConfig) -> None:
        """The shared expert lies here, outside of the MoE block."""
        if config.shared_expert_intermediate_size is not None:
            self.shared_expert = SwiGLU(config.hidden_size, config.shared_expert_intermediate_size, config.hidden_act)


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

    layer_class = LLaDAMoEDecoderLayer


class LLaDAMoEModelLM(LLaDAMoEPreTrainedModel, DiffusionLM):
    """LLaDA-MoE with its LM head. Logits belong to the position they are at (no shift): it is a masked predictor."""

    decoder_class = LLaDAMoEModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

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
        given = rest_of(locals(), "prompt", "mask_id")
        out = generate_semi_autoregressive(self, prompt, eos_token_id=[], mask_token_id=mask_id, **given)
        return torch.cat([prompt.to(out.sequences), out.sequences], dim=1)
