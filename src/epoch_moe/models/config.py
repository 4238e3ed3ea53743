"""What the configurations of the model families share: checked fields, and sizes under common names."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from epoch_moe.checks import instance, real, whole, wrong
from epoch_moe.functional.capability import router_spec
from epoch_moe.routing import RouterSpec

_MAY_BE_ZERO = (
    "first_k_dense_replace",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "sliding_window",
    "max_window_layers",
)
_COUNTS = ("num_hidden_layers", "num_experts")
_LENGTHS = ("max_position_embeddings", "sliding_window")
_ROPE = ("rope_theta", "partial_rotary_factor")
_OF_THE_BASE = ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
MOST, MOST_COUNTED, MOST_POSITIONS = 2**20, 4096, 2**40
"""Largest sizes, numbers of layers or experts, and positions: what is larger is a damaged file, and slow to build."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a model, whatever its configuration calls them.

    Attributes:
        hidden: H, size of the hidden state.
        vocab: V, rows of the embedding.
        layers: decoder layers.
        moe_layers: numbers of those with an MoE block.
        heads, kv_heads, head_dim: of the attention.
        experts, top_k: routed experts of an MoE layer, and how many a row takes.
        expert_inner: F, inner size of a routed expert.
        shared_inner: inner size of the shared expert; 0 where there is none.
        dense_inner: inner size of a dense layer's MLP.
    """

    hidden: int
    vocab: int
    layers: int
    moe_layers: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_inner: int
    shared_inner: int
    dense_inner: int


class DiffusionConfig(PretrainedConfig):  # type: ignore[misc]
    """Base of the families' configurations.

    The signature of a family's ``__init__`` names its keys, their types and defaults; ``read`` checks and stores them.
    A family adds `complete` and `own_sizes`.
    """

    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    # transformers 5 makes this a deprecated alias of `rope_parameters`. The released files hold `rope_theta`,
    # `partial_rotary_factor` and `rope_scaling: null`, and so do these classes on every version.
    rope_scaling = None

    def __init__(self, **kwargs: Any):  # without its own, transformers 5 would generate one
        super().__init__(**kwargs)

    def read(self, given: Mapping[str, Any]) -> None:
        """Check and store a family's keys: ``given`` is ``locals()`` of its ``__init__``, with ``kwargs`` for the rest.

        Raises:
            ValueError: for a key whose value this implementation does not have, or sizes that do not fit together.
        """
        values = {name: given[name] for name in own_fields(type(self))}
        check_fields(type(self), values)
        # Files that transformers 5 wrote for other classes hold the RoPE settings as one dictionary.
        rope = values.pop("rope_parameters")
        if rope is not None:
            values |= {key: rope[key] for key in _ROPE if key in rope}
            check_fields(type(self), values | {"rope_parameters": rope})
        scaling = values["rope_scaling"] or rope or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        self.only("rope_scaling", scaling, kind == "default", "null")
        values["rope_scaling"] = None
        self.complete(values)
        heads, kv_heads, factor = (
            values[key] for key in ("num_attention_heads", "num_key_value_heads", "partial_rotary_factor")
        )
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}")
        rotary = int((values.get("head_dim") or values["hidden_size"] // heads) * factor)
        if rotary % 2:
            raise ValueError(
                f"partial_rotary_factor={factor} turns {rotary} of a head's dimensions: expected an even number"
            )
        base = {name: values.pop(name) for name in _OF_THE_BASE if name in values}
        for name, value in values.items():
            setattr(self, name, value)
        # Remote code that config.json may point at (auto_map) is neither loaded nor shipped with a saved copy.
        others = {name: value for name, value in given["kwargs"].items() if name != "auto_map"}
        PretrainedConfig.__init__(self, **base, **others)
        self.tie_word_embeddings = base["tie_word_embeddings"]  # not every version of the base class stores it
        self.router_spec()

    def only(self, key: str, value: Any, supported: bool, expected: str) -> None:
        """Refuse a value of a key that released files hold, but of which this implementation has one value."""
        if not supported:
            raise ValueError(f"{self.model_type} config has {key}={value!r}: this implementation has only {expected}")

    @abstractmethod
    def complete(self, values: dict[str, Any]) -> None:
        """Replace values that stand for a default, and refuse those that do not fit together."""

    @abstractmethod
    def own_sizes(self) -> dict[str, Any]:
        """`ModelSizes` of which each family's keys are others: the MoE layers, `head_dim` and the inner sizes."""

    def sizes(self) -> ModelSizes:
        """Sizes under the names that all families share."""
        return ModelSizes(
            hidden=self.hidden_size,
            vocab=self.vocab_size,
            layers=self.num_hidden_layers,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            **self.own_sizes(),
        )

    def router_spec(self) -> RouterSpec:
        """The routing that this configuration describes."""
        return router_spec(self)

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` gets: every released key, also those equal to the defaults of transformers."""
        own = own_fields(type(self))
        return super().to_diff_dict() | {key: value for key, value in self.to_dict().items() if key in own}


def own_fields(config_class: type) -> dict[str, str]:
    """Names and type hints of the keys that a configuration class has of its own, not of its base in transformers."""
    for base in config_class.__mro__:
        parameters = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        if "vocab_size" in parameters:
            return {name: str(p.annotation) for name, p in parameters.items() if name not in ("self", "kwargs")}
    raise TypeError(f"{config_class.__name__} is no configuration of this package")


def check_fields(config_class: type, values: Mapping[str, Any]) -> None:
    """Refuse values of another type or out of range.

    Args:
        config_class: a configuration class.
        values: by field name; other names are not looked at.

    Raises:
        ValueError: naming the field, its value and what was expected.
    """
    for name, hint in own_fields(config_class).items():
        kind, _, optional = hint.partition(" | ")
        if values[name] is not None or not optional:
            _check_field(name, kind, values[name], " or null" if optional else "")


def _check_field(name: str, kind: str, value: Any, or_null: str) -> None:
    """Refuse a field's value that its type hint, or what the field means, does not allow."""
    if kind == "int":
        low = 0 if name in _MAY_BE_ZERO or name.endswith("_token_id") else 1
        high = MOST_COUNTED if name in _COUNTS else MOST_POSITIONS if name in _LENGTHS else MOST
        several = name == "eos_token_id" and isinstance(value, list) and value
        for one in value if several else [value]:
            whole(name, one, f"in {low}..{high}{or_null}", least=low, most=high)
    elif kind == "float":
        most = 1.0 if name == "partial_rotary_factor" else 1e30
        above = name in _ROPE
        real(name, value, f"a number {'above' if above else 'from'} 0, at most {most:g}", most=most, above=above)
    elif name == "hidden_act":
        if value != "silu":
            raise wrong(name, value, "'silu', the only one that the routed experts compute")
    elif kind.startswith("Sequence"):
        if not isinstance(value, (list, tuple)) or not all(type(one) is int for one in value):
            raise wrong(name, value, f"a list of whole numbers{or_null}")
    else:
        kinds = {"bool": (bool, "true or false"), "str": (str, "a text")}
        python_type, words = kinds.get(kind, (dict, "an object"))
        instance(name, value, python_type, words + or_null)
