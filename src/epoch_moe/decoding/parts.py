"""What the decoding loops need of a model.

Shape suffixes: T rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from epoch_moe.plan.patched import inner_model

_IN_PEFT = ("XLORA", "POLY")
"""Kinds of adapters whose weights depend on what peft's own forward passes on."""


def model_parts(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The base model and the LM head of a model that block diffusion can run."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    if not isinstance(base, nn.Module) or not isinstance(head, nn.Module):
        raise TypeError(
            f"{type(model).__name__} is not a language model with an LM head: expected a base model under "
            "`base_model_prefix` and a head from `get_output_embeddings()`, as LLaDA2MoeModelLM has"
        )
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode: call model.eval() before generate")
    attention = str(getattr(model.config, "_attn_implementation", None))
    if "flash" in attention or "flex" in attention or (attention == "eager" and not is_native(base)):
        raise ValueError(
            f"the model has attn_implementation={attention!r}, which does not take the additive 4-D masks of block "
            "diffusion: load it with attn_implementation='sdpa'"
        )
    return base, head


def runnable(model: nn.Module) -> nn.Module:
    """The model itself, also of one that peft wraps: a loop calls its parts, with the adapters in their layers.

    Raises:
        ValueError: an adapter that works in the forward of peft's wrapper, which would be left out.
    """
    for name, config in (getattr(model, "peft_config", None) or {}).items():  # type: ignore[union-attr]
        kind = getattr(config, "peft_type", None)
        outside = getattr(config, "is_prompt_learning", False) or getattr(kind, "value", kind) in _IN_PEFT
        if outside or getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"adapter {name!r} is a {type(config).__name__} that works in the forward of peft's wrapper, and the "
                "loop calls the layers inside: it would be left out. Use an adapter that lies in the layers, such as "
                f"LoRA, or take it off with delete_adapter({name!r})"
            )
    return inner_model(model)


def is_native(base: nn.Module) -> bool:
    """Whether a missing mask means bidirectional attention, as in this library's model classes."""
    return any(cls.__module__.startswith("epoch_moe.") for cls in type(base).__mro__)


def progress_bar(blocks: int, disable: bool) -> Any:
    """A bar over blocks, for terminals and notebooks."""
    from tqdm.auto import tqdm

    return tqdm(total=blocks, unit="block", desc="generate", disable=disable)


def loop_of(model: nn.Module) -> Callable[..., Any]:
    """The loop that decodes a model: `generate`, or `generate_semi_autoregressive` for a bidirectional canvas."""
    from epoch_moe.decoding.block_diffusion import generate
    from epoch_moe.decoding.semi_autoregressive import generate_semi_autoregressive

    return generate_semi_autoregressive if is_canvas_model(model.config) else generate


def is_canvas_model(config: Any) -> bool:
    """Whether a configuration is of a model with bidirectional attention over a fixed canvas (LLaDA-MoE)."""
    return getattr(config, "model_type", None) in ("llada", "lladamoe")
