"""Checks of arguments, in one place: every wrong one is refused with its name, its value and what is right."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

MOST = 2**63 - 1
"""The largest whole number that a tensor can hold."""
WHOLE_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ArgumentError(ValueError, TypeError):
    """An argument of the wrong kind or out of range: both of Python's errors, so that callers may catch either."""


def wrong(name: str, value: Any, expected: str) -> ArgumentError:
    """The error for an argument: its name, its value, what was expected."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f"{value.layout} "
        return ArgumentError(
            f"{name} is {layout}{value.dtype} {tuple(value.shape)} on {value.device}: expected {expected}"
        )
    try:
        text = repr(value)
    except Exception:  # a huge integer, an object in pieces
        text = f"a {type(value).__name__}"
    return ArgumentError(f"{name}={text if len(text) <= 200 else text[:200] + '...'}: expected {expected}")


def whole(name: str, value: Any, meaning: str = "", *, least: int = 0, most: int = MOST) -> int:
    """A whole number from ``least`` to ``most``; no bool."""
    means = f" ({meaning})" if meaning else ""
    if isinstance(value, (bool, Tensor)):
        raise wrong(name, value, f"a whole number{means}")
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong(name, value, f"a whole number{means}") from None
    if number < least:
        raise wrong(name, number, f"at least {least}{means}")
    if number > most:
        raise wrong(name, number, f"at most {most}{means}")
    return number


def real(
    name: str,
    value: Any,
    expected: str,
    *,
    least: float = 0.0,
    most: float = sys.float_info.max,
    above: bool = False,
) -> float:
    """A finite number from ``least`` (``above``: beyond it) to ``most``; no bool."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise wrong(name, value, expected)
    try:
        number = float(value)
    except OverflowError:
        raise wrong(name, value, expected) from None
    if not (least < number if above else least <= number) or not number <= most:  # so that NaN is refused
        raise wrong(name, value, expected)
    return number


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that Python would take for one of them."""
    if not isinstance(value, bool):
        raise wrong(name, value, "True or False")
    return value


def choice(name: str, value: Any, options: Sequence[str | None]) -> Any:
    """One of a few words (or None)."""
    if not isinstance(value, (str, type(None))) or value not in options:
        raise wrong(name, value, " or ".join(map(repr, options)))
    return value


def instance(name: str, value: Any, kinds: type | tuple[type, ...], expected: str) -> Any:
    """An object of some class."""
    if not isinstance(value, kinds):
        raise wrong(name, value, expected)
    return value


def module(name: str, value: Any) -> nn.Module:
    """A torch module."""
    model: nn.Module = instance(name, value, nn.Module, "a loaded model (torch.nn.Module)")
    return model


def tensor(
    name: str,
    value: Any,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device | None = None,
) -> Tensor:
    """A dense tensor.

    Args:
        name, value: the argument.
        dtypes: that it may have.
        shape: sizes; a word for one that may be any.
        device: where it must be; None: anywhere but on the meta device, which holds no values.
    """
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    good = (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.dtype in allowed
        # Whole shapes first: kernels are checked on every forward.
        and (value.shape == shape or (value.dim() == len(shape) and all(map(_fits, value.shape, shape))))
        and (not value.is_meta if device is None else value.device == device)
    )
    if not good:
        place = "" if device is None else f" on {device}"
        words = {WHOLE_DTYPES: "whole numbers", FLOAT_DTYPES: "floating point"}
        kinds = words.get(allowed) or ("numbers" if len(allowed) > 3 else " or ".join(map(str, allowed)))
        what = "dense " if isinstance(value, Tensor) and value.layout != torch.strided else ""
        what = what if isinstance(value, Tensor) else "a tensor of "
        raise wrong(name, value, f"{what}{kinds} [{', '.join(map(str, shape))}]{place}")
    found: Tensor = value
    return found


def _fits(size: int, want: int | str) -> bool:
    return isinstance(want, str) or size == want


def is_list(value: Any) -> bool:
    """Whether several ids were given."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def special_ids(model: Any, vocab_size: int, eos_token_id: Any, mask_token_id: Any) -> tuple[tuple[int, ...], int, int]:
    """End ids, the mask id and the id of padding.

    Args:
        model: whose `generation_config` (its end ids) and `config` name what is not given.
        vocab_size: ids must be below.
        eos_token_id, mask_token_id: arguments of a loop.
    """
    config, generation_config = model.config, getattr(model, "generation_config", None)
    if eos_token_id is None:  # generation_config.json is where transformers and engines look first
        eos_token_id = getattr(generation_config, "eos_token_id", None)
    given = {"eos_token_id": eos_token_id, "mask_token_id": mask_token_id}
    for name, value in given.items():
        given[name] = getattr(config, name, None) if value is None else value
        if given[name] is None:
            raise ValueError(f"{name} is neither an argument nor in the model's config: pass {name}=...")
    eos, mask_id = given["eos_token_id"], in_vocabulary("mask_token_id", given["mask_token_id"], vocab_size)
    eos_ids = tuple(in_vocabulary("eos_token_id", i, vocab_size) for i in (eos if is_list(eos) else [eos]))
    if mask_id in eos_ids:
        raise ValueError(f"eos_token_id={eos} with mask_token_id={mask_id}: expected an end id other than the mask id")
    pad_id = getattr(config, "pad_token_id", None)
    if pad_id is None:
        return eos_ids, mask_id, (*eos_ids, 0)[0]
    return eos_ids, mask_id, in_vocabulary("config.pad_token_id", pad_id, vocab_size)


def in_vocabulary(name: str, value: Any, vocab_size: int) -> int:
    """An id that the model has an embedding for."""
    number = whole(name, value, "a token id", least=-MOST)
    if not 0 <= number < vocab_size:
        raise ArgumentError(f"{name}={number} is outside the model's vocabulary: expected 0 to {vocab_size - 1}")
    return number
