"""`supports`: whether this library can plan for a model or a setting, asked before anything is built.

Reads configurations by their keys; needs neither transformers nor a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epoch_moe.config import EpochConfig
from epoch_moe.routing import RouterSpec

MODEL_TYPES = {"llada2_moe": "sigmoid_group", "lladamoe": "softmax", "llada_moe": "softmax", "llada": "softmax"}
"""`model_type` of released configurations, and the router of such models. LLaDA-MoE's official copy says "llada"."""


def supports(config: EpochConfig | RouterSpec | Mapping[str, Any] | Any) -> tuple[bool, str]:
    """Whether row plans (`RowStore`) can serve this, and if not, why.

    Args:
        config: plan settings, a router, or a model's configuration: a dictionary (config.json) or an object with such
            attributes.

    Returns:
        ``(True, "")``, or False and the reason in words. Never raises for a configuration, however odd.
    """
    if isinstance(config, EpochConfig):
        if config.support_scope == "batch":
            return False, (
                "support_scope='batch' makes one support for a batch, and requests that come and go form none: use "
                "support_scope='sequence' (a RowStore of a single slot takes both)"
            )
        return True, ""
    try:
        spec = config if isinstance(config, RouterSpec) else router_spec(config)
    except (ValueError, TypeError) as error:
        return False, str(error)
    if spec.kind == "block_pool":
        return False, (
            "router kind 'block_pool' (LLaDA2.2) picks experts from the scores of whole routing blocks, so reused rows "
            "would need scores too: route whole blocks with `route`, without row plans"
        )
    return True, ""


def router_spec(config: Mapping[str, Any] | Any) -> RouterSpec:
    """The router that a model's configuration (dictionary or object) describes.

    Raises:
        ValueError: another kind of model, or a value that these routers do not have; the message names key and value.
    """
    def given(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    def number(name: str) -> int:
        value = given(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r}: expected a whole number, as a {model_type} model's configuration has")
        return value

    def only(name: str, *allowed: Any) -> None:
        if (value := given(name)) is not None and value not in allowed:
            raise ValueError(f"{name}={value!r}: expected {' or '.join(map(repr, allowed))}")

    model_type = given("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type={model_type!r}: expected one of {', '.join(map(repr, MODEL_TYPES))}")
    only("hidden_act", "silu")
    if given("quantization_config") is not None:
        raise ValueError("the model is quantised (quantization_config): quantised experts are not supported")
    sizes = {"num_experts": number("num_experts"), "top_k": number("num_experts_per_tok")}
    if MODEL_TYPES[model_type] == "softmax":
        only("moe_router_score_function", "softmax")
        # The released code ignores these, whatever they say.
        only("norm_topk_prob", False)
        only("router_num_group", 1)
        only("routed_scaling_factor", 1)
        return RouterSpec(kind="softmax", **sizes)
    only("score_function", "sigmoid")
    only("norm_topk_prob", True)
    only("router_dtype", "fp32")
    scaling = given("routed_scaling_factor")
    if not isinstance(scaling, (int, float)) or isinstance(scaling, bool):
        raise ValueError(f"routed_scaling_factor={scaling!r}: expected a number")
    if given("expert_capacity") is not None:
        pool = {"expert_capacity": number("expert_capacity"), "block_size": number("block_size")}
        return RouterSpec(kind="block_pool", routed_scaling_factor=float(scaling), **sizes, **pool)
    groups = {"n_group": number("n_group"), "topk_group": number("topk_group")}
    return RouterSpec(kind="sigmoid_group", routed_scaling_factor=float(scaling), **sizes, **groups)
