"""What the fields of a configuration may hold, from the type hints of its class."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

_MAY_BE_ZERO = (
    "first_k_dense_replace",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "sliding_window",
    "max_window_layers",
)
_COUNTS = ("num_hidden_layers", "num_experts")
_LENGTHS = ("max_position_embeddings", "sliding_window")
MOST, MOST_COUNTED, MOST_POSITIONS = 2**20, 4096, 2**40
"""Largest sizes, numbers of layers or experts, and positions: what is larger is a damaged file, and slow to build."""


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
        value = values[name]
        if value is None and optional:
            continue
        expected = _expected(name, kind, value)
        if expected:
            null = " or null" if optional else ""
            raise ValueError(f"{name}={repr(value)[:100]}: expected {expected}{null}")


def _expected(name: str, kind: str, value: Any) -> str:
    """What a field must hold where it does not, or ''."""
    if kind == "int":
        if name == "eos_token_id" and isinstance(value, list) and value:
            return next((wanted for one in value if (wanted := _expected(name, kind, one))), "")
        low = 0 if name in _MAY_BE_ZERO or name.endswith("_token_id") else 1
        high = MOST_COUNTED if name in _COUNTS else MOST_POSITIONS if name in _LENGTHS else MOST
        return "" if type(value) is int and low <= value <= high else f"a whole number in {low}..{high}"
    if kind == "float":
        number = type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)
        if name == "partial_rotary_factor":
            return "" if number and 0 < value <= 1 else "a number above 0 and at most 1"
        if name == "rope_theta":
            return "" if number and value > 0 else "a number above 0"
        return "" if number and value >= 0 else "a number of at least 0"
    if name == "hidden_act":
        return "" if value == "silu" else "'silu', the only one that the routed experts compute"
    if kind.startswith("Sequence"):
        fits = isinstance(value, (list, tuple)) and all(type(one) is int for one in value)
        return "" if fits else "a list of whole numbers"
    types = {"bool": bool, "str": str}
    return (
        ""
        if isinstance(value, types.get(kind, dict))
        else {"bool": "true or false", "str": "a text"}.get(kind, "an object")
    )
