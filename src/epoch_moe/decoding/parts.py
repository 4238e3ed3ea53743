"""What the decoding loops need of a model.

Shape suffixes: V vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from epoch_moe.block import EpochMoEBlock
from epoch_moe.plan.patched import inner_model

_CANVAS_FAMILIES = ("llada", "lladamoe")
_FAMILIES = ("llada2_moe", *_CANVAS_FAMILIES)
_IN_PEFT = ("XLORA", "POLY")  # adapters whose weights depend on what peft's own forward passes on


@dataclass(frozen=True)
class ModelParts:
    """A model as the loops run it.

    Attributes:
        model: without peft's wrapper; its adapters lie in the layers.
        base: the model without its LM head.
        head: from hidden states ``[R,H]`` to logits ``[R,V]``.
        native: without an attention mask every row sees every row, as in this library's classes. The released files
            read "no mask" as causal as soon as there are cached keys.
    """

    model: nn.Module
    base: nn.Module
    head: nn.Module
    native: bool

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    @property
    def ends_with_experts(self) -> bool:
        """Whether patched experts are the last thing in the base model, but for its norm: nothing mixes rows behind."""
        layers = getattr(self.base, "layers", ())
        if self.config.model_type not in _FAMILIES or len(layers) != self.config.num_hidden_layers:
            return False
        return any(isinstance(part, EpochMoEBlock) for part in layers[-1].modules())

    @property
    def embedding_VH(self) -> Tensor:
        """The input embedding: its device is that of token ids, its dtype that of attention masks."""
        weight_VH: Tensor = self.base.get_input_embeddings().weight  # type: ignore[operator]
        return weight_VH


def model_parts(model: nn.Module) -> ModelParts:
    """The parts of a model that a loop can run.

    Raises:
        TypeError: no language model with an LM head.
        ValueError: it is in training mode, its attention takes no additive 4-D mask, or an adapter works in the forward
            of peft's wrapper, which would be left out.
    """
    _check_adapters(model)
    model = inner_model(model)
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    if not isinstance(base, nn.Module) or not isinstance(head, nn.Module):
        raise TypeError(
            f"{type(model).__name__} is not a language model with an LM head: expected a base model under "
            "`base_model_prefix` and a head from `get_output_embeddings()`, as LLaDA2MoeModelLM has"
        )
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode: call model.eval() before generate")
    native = any(cls.__module__.startswith("epoch_moe.") for cls in type(base).__mro__)
    attention = str(getattr(model.config, "_attn_implementation", None))
    if "flash" in attention or "flex" in attention or (attention == "eager" and not native):
        raise ValueError(
            f"the model has attn_implementation={attention!r}, which does not take the additive 4-D masks of block "
            "diffusion: load it with attn_implementation='sdpa'"
        )
    return ModelParts(model, base, head, native)


def _check_adapters(model: nn.Module) -> None:
    for name, config in (getattr(model, "peft_config", None) or {}).items():  # type: ignore[union-attr]
        kind = getattr(config, "peft_type", None)
        outside = getattr(config, "is_prompt_learning", False) or getattr(kind, "value", kind) in _IN_PEFT
        if outside or getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"adapter {name!r} is a {type(config).__name__} that works in the forward of peft's wrapper, and the "
                "loop calls the layers inside: it would be left out. Use an adapter that lies in the layers, such as "
                f"LoRA, or take it off with delete_adapter({name!r})"
            )


def is_canvas_model(config: Any) -> bool:
    """Whether a configuration is of a model with bidirectional attention over a fixed canvas (LLaDA-MoE)."""
    return getattr(config, "model_type", None) in _CANVAS_FAMILIES
