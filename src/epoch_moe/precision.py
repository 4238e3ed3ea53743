"""What `torch.autocast` does to the MoE layers: routers stay in full precision, experts compute as linear layers do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes linear layers on the device of ``x``, or None where it is off."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a linear layer's output on rows ``x``: theirs, or autocast's, which leaves float64 alone."""
    cast = autocast_dtype(x)
    return x.dtype if cast is None or x.dtype == torch.float64 else cast


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Computes in the dtypes that tensors have, on the device of ``x``."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)
