"""Configuration of LLaDA-MoE (`model_type: llada` or `lladamoe`)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from epoch_moe.models.config_fields import check_fields, own_fields
from epoch_moe.models.sizes import ModelSizes
from epoch_moe.routing import RouterSpec


class LLaDAMoEConfig(PretrainedConfig):  # type: ignore[misc]
    """Configuration of LLaDA-MoE; keys of the released `config.json`, defaults of LLaDA-MoE-7B-A1B.

    `moe_layer_freq` says for every layer whether it is MoE (1) or dense (0); None means that all are MoE.
    `mask_token_id` is the id of undecoded positions.

    Raises:
        ValueError: for a key whose value this implementation does not have, or sizes that do not fit together.
    """

    model_type = "lladamoe"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    rope_scaling = None  # as in LLaDA2MoeConfig: transformers 5 would make it an alias of `rope_parameters`

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
        check_fields(LLaDAMoEConfig, locals())
        # Remote code that config.json may point at is neither loaded nor shipped with a saved copy.
        kwargs.pop("auto_map", None)
        # Files that transformers 5 wrote for other classes hold the RoPE settings as one dictionary.
        if rope_parameters is not None:
            rope_theta = rope_parameters.get("rope_theta", rope_theta)
            partial_rotary_factor = rope_parameters.get("partial_rotary_factor", partial_rotary_factor)
            rope_scaling = rope_scaling or rope_parameters
            check_fields(LLaDAMoEConfig, locals())
        kind = (rope_scaling or {}).get("rope_type", (rope_scaling or {}).get("type", "default"))
        layers = [1] * num_hidden_layers if moe_layer_freq is None else list(moe_layer_freq)
        unsupported = [
            ("rope_scaling", rope_scaling, kind == "default", "null"),
            ("moe_router_score_function", moe_router_score_function, moe_router_score_function == "softmax", "softmax"),
            # The released code ignores these two, whatever they say, except that a factor of 1 changes nothing.
            ("norm_topk_prob", norm_topk_prob, not norm_topk_prob, "null"),
            ("routed_scaling_factor", routed_scaling_factor, routed_scaling_factor in (None, 1), "1"),
            ("router_num_group", router_num_group, router_num_group in (None, 1), "null"),
            ("moe_layer_freq", layers, len(layers) == num_hidden_layers and set(layers) <= {0, 1},
             f"0 or 1 for each of the {num_hidden_layers} layers"),
        ]  # fmt: skip
        for key, value, supported, expected in unsupported:
            if not supported:
                raise ValueError(f"lladamoe config has {key}={value!r}: this implementation has only {expected}")
        key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        if key_value_heads < 1 or num_attention_heads % key_value_heads or hidden_size % num_attention_heads:
            raise ValueError(
                f"num_attention_heads={num_attention_heads} must divide hidden_size={hidden_size} and be a multiple of "
                f"num_key_value_heads={num_key_value_heads}"
            )
        rotary = int(hidden_size // num_attention_heads * partial_rotary_factor)
        if rotary % 2:
            raise ValueError(f"partial_rotary_factor={partial_rotary_factor} turns {rotary} of a head's dimensions: "
                             "expected an even number")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.dense_intermediate_size = dense_intermediate_size
        self.expert_intermediate_size = expert_intermediate_size
        self.shared_expert_intermediate_size = shared_expert_intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = key_value_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self.mask_token_id = mask_token_id
        self.rope_theta = rope_theta
        self.partial_rotary_factor = partial_rotary_factor
        self.rope_scaling = None
        self.attention_bias = attention_bias
        self.attention_dropout = attention_dropout
        self.clip_qkv = clip_qkv
        self.num_experts_per_tok = num_experts_per_tok
        self.num_experts = num_experts
        self.output_router_logits = output_router_logits
        self.router_aux_loss_coef = router_aux_loss_coef
        self.norm_topk_prob = norm_topk_prob
        self.qk_layernorm = qk_layernorm
        self.moe_layer_freq = layers
        self.moe_router_enable_expert_bias = moe_router_enable_expert_bias
        self.moe_router_score_function = moe_router_score_function
        self.routed_scaling_factor = routed_scaling_factor
        self.router_num_group = router_num_group
        self.router_topk_group = router_topk_group
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
        self.tie_word_embeddings = tie_word_embeddings  # not every version of the base class stores it
        self.router_spec()

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` gets: every released key, also those equal to the defaults of transformers."""
        own = own_fields(LLaDAMoEConfig)
        return super().to_diff_dict() | {key: value for key, value in self.to_dict().items() if key in own}

    def sizes(self) -> ModelSizes:
        """Sizes under the names that all families share."""
        return ModelSizes(
            hidden=self.hidden_size,
            vocab=self.vocab_size,
            layers=self.num_hidden_layers,
            moe_layers=tuple(i for i, moe in enumerate(self.moe_layer_freq) if moe),
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            expert_inner=self.expert_intermediate_size,
            shared_inner=self.shared_expert_intermediate_size or 0,
            dense_inner=self.dense_intermediate_size,
        )

    def with_layers(self, moe: Sequence[bool]) -> LLaDAMoEConfig:
        """A copy with these layers, MoE or dense."""
        other = copy.deepcopy(self)
        other.num_hidden_layers, other.moe_layer_freq = len(moe), [int(layer) for layer in moe]
        return other

    def router_spec(self) -> RouterSpec:
        """The routing that this configuration describes."""
        return RouterSpec(kind="softmax", num_experts=self.num_experts, top_k=self.num_experts_per_tok)


class LLaDAConfig(LLaDAMoEConfig):
    """LLaDA-MoE under the other name that its files use."""

    model_type = "llada"

    def __init__(self, **kwargs: Any):  # without its own, transformers 5 would generate one
        super().__init__(**kwargs)


# `AutoModel.register` compares the name of a configuration's class with that of the model's `config_class`; both
# spellings of `model_type` belong to one model class. Pickle goes by `__qualname__`, which stays.
LLaDAConfig.__name__ = LLaDAMoEConfig.__name__
