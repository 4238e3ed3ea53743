"""Logits that are not numbers (NaN or inf): an error with the requests that had them, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

BROKEN = -1
"""Live rows of a sequence whose logits are not numbers: it travels with what a loop reads on the host anyway."""


def not_numbers(requests: Sequence[int], base: nn.Module, head: nn.Module) -> FloatingPointError:
    """The error of a decode whose logits are not numbers.

    Args:
        requests: places in the batch of the sequences that had them.
        base: the model without its head; searched, as this is the end of the decode.
        head: the LM head.
    """
    which = f"request {requests[0]}" if len(requests) == 1 else f"requests {', '.join(map(str, requests))}"
    prefix = getattr(base, "base_model_prefix", "model")
    named = ((f"{prefix}.{name}", t) for part in (base.named_parameters(), base.named_buffers()) for name, t in part)
    found = _first(named) or _first((f"the LM head's {name}", t) for name, t in head.named_parameters())
    if found:
        where = f"{found} holds values that are not finite: the checkpoint is damaged, or was converted to a dtype " \
            "that cannot hold them"  # fmt: skip
    else:
        where = f"all weights are finite, so a layer overflows in {_dtype(base)}: load the model in bfloat16 or float32"
    return FloatingPointError(f"the logits of {which} (of the batch, from 0) are not numbers (NaN or inf): {where}")


def _dtype(base: nn.Module) -> str:
    return str(next(base.parameters()).dtype).removeprefix("torch.")


def _first(named: object) -> str:
    """The first of the named tensors that holds a value that is not finite, or ''."""
    for name, tensor in named:  # type: ignore[attr-defined]
        known = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.device.type != "meta"
        if known and not bool(torch.isfinite(tensor).all()):
            return str(name)
    return ""
