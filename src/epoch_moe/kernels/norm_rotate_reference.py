"""Plain RMS norm and rotary embedding, as the released models compute them.

Shape suffixes: B sequences, N heads, S positions, D head dimension, R rotary dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The last dimension normed: statistics in fp32, the product with the weight in the model's dtype."""
    x_fp32 = x.float()
    scale = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (x_fp32 * scale).to(x.dtype)


def rotate_reference(x_BNSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    """The first R dimensions of every head turned by the position's angles, the others as they were."""
    rotary_dim = cos_BSR.shape[-1]
    cos, sin = cos_BSR.unsqueeze(1), sin_BSR.unsqueeze(1)
    turned, passed = x_BNSD[..., :rotary_dim], x_BNSD[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    rotated = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, passed), dim=-1)
