"""Configuration of LLaDA2.0, 2.1 and 2.2 (`model_type: llada2_moe`)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from epoch_moe.models.config_fields import check_fields, own_fields
from epoch_moe.models.sizes import ModelSizes
from epoch_moe.routing import RouterSpec


class LLaDA2MoeConfig(PretrainedConfig):  # type: ignore[misc]
    """Configuration of LLaDA2 models; keys and defaults of the released `config.json` files.

    `expert_capacity` together with `block_size` selects LLaDA2.2's block-pool router; without them the router is
    group-limited (2.0, 2.1). `mask_token_id` is the id of undecoded positions.

    Raises:
        ValueError: for a key whose value this implementation does not have, or sizes that do not fit together.
    """

    model_type = "llada2_moe"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    # transformers 5 makes this a deprecated alias of `rope_parameters`. The released files hold `rope_theta`,
    # `partial_rotary_factor` and `rope_scaling: null`, and so does this class on every version.
    rope_scaling = None

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
        check_fields(LLaDA2MoeConfig, locals())
        # Remote code that config.json may point at is neither loaded nor shipped with a saved copy.
        kwargs.pop("auto_map", None)
        # Files that transformers 5 wrote for other classes hold the RoPE settings as one dictionary.
        if rope_parameters is not None:
            rope_theta = rope_parameters.get("rope_theta", rope_theta)
            partial_rotary_factor = rope_parameters.get("partial_rotary_factor", partial_rotary_factor)
            rope_scaling = rope_scaling or rope_parameters
            check_fields(LLaDA2MoeConfig, locals())
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
        if (expert_capacity is None) != (block_size is None):
            raise ValueError(
                f"expert_capacity={expert_capacity} and block_size={block_size}: LLaDA2.2's router needs both, the "
                "router of 2.0 and 2.1 neither"
            )
        if num_key_value_heads < 1 or num_attention_heads % num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={num_attention_heads} must be a multiple of "
                f"num_key_value_heads={num_key_value_heads}"
            )
        rotary = int((head_dim or hidden_size // num_attention_heads) * partial_rotary_factor)
        if rotary % 2:
            raise ValueError(f"partial_rotary_factor={partial_rotary_factor} turns {rotary} of a head's dimensions: "
                             "expected an even number")
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
        # Not every version of the base class stores it.
        self.tie_word_embeddings = tie_word_embeddings
        self.router_spec()

    def to_dict(self) -> dict[str, Any]:
        """The configuration with the released keys; LLaDA2.2's own keys only where they are set."""
        optional = ("expert_capacity", "block_size", "delete_token_id", "split_token_id")
        return {key: value for key, value in super().to_dict().items() if value is not None or key not in optional}

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` gets: every released key, also those equal to the defaults of transformers."""
        own = own_fields(LLaDA2MoeConfig)
        complete = {key: value for key, value in self.to_dict().items() if key in own}
        return super().to_diff_dict() | complete

    def sizes(self) -> ModelSizes:
        """Sizes under the names that all families share."""
        return ModelSizes(
            hidden=self.hidden_size,
            vocab=self.vocab_size,
            layers=self.num_hidden_layers,
            moe_layers=tuple(range(self.first_k_dense_replace, self.num_hidden_layers)),
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            expert_inner=self.moe_intermediate_size,
            shared_inner=self.moe_intermediate_size * (self.num_shared_experts or 0),
            dense_inner=self.intermediate_size,
        )

    def with_layers(self, moe: Sequence[bool]) -> LLaDA2MoeConfig:
        """A copy with these layers (MoE or not), dense ones first."""
        other = copy.deepcopy(self)
        other.num_hidden_layers, other.first_k_dense_replace = len(moe), len(moe) - sum(moe)
        return other

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
