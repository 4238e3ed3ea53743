"""Checks that the decoding loops share; each names the argument and its value."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any


def index(name: str, value: Any) -> int:
    """A whole number, or a TypeError that names the argument."""
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected a whole number")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: expected a whole number") from None


def whole(name: str, value: Any, meaning: str) -> int:
    """A whole number of at least 1."""
    number = index(name, value)
    if number < 1:
        raise ValueError(f"{name}={number}: expected at least 1 ({meaning})")
    return number


def is_list(value: Any) -> bool:
    """Whether several ids were given."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def id_or_config(config: Any, name: str, value: Any) -> Any:
    """The argument, or the config's value where it is None."""
    value = getattr(config, name, None) if value is None else value
    if value is None:
        raise ValueError(f"{name} is neither an argument nor in the model's config: pass {name}=...")
    return value


def in_vocabulary(name: str, value: Any, vocab_size: int) -> int:
    """An id that the model has an embedding for."""
    number = index(name, value)
    if not 0 <= number < vocab_size:
        raise ValueError(f"{name}={number} is outside the model's vocabulary: expected 0 to {vocab_size - 1}")
    return number
