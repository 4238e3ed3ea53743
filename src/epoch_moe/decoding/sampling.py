"""From logits to tokens: greedy, or temperature with top-k and top-p.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keep_top_k(logits_RV: Tensor, top_k: int | None) -> Tensor:
    """Logits with everything below the `top_k` largest set to -inf; ties with the last kept one are kept.

    Args:
        logits_RV: ``[R,V]``.
        top_k: None or 0 keeps all; more than V keeps all.
    """
    if not top_k or top_k >= logits_RV.shape[-1]:
        return logits_RV
    last_kept_R1 = logits_RV.topk(top_k, dim=-1).values[..., -1:]
    return logits_RV.masked_fill(logits_RV < last_kept_R1, float("-inf"))


def keep_top_p(logits_RV: Tensor, top_p: float | None) -> Tensor:
    """Logits of the nucleus, -inf elsewhere: a token stays while those above it hold at most `top_p` of the mass.

    Args:
        logits_RV: ``[R,V]``.
        top_p: None or 1.0 keeps all. The most probable token always stays.
    """
    if top_p is None or top_p >= 1.0:
        return logits_RV
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True)
    mass_RV = sorted_RV.softmax(dim=-1).cumsum(dim=-1)
    # The token that crosses top_p still belongs to the nucleus, so each token looks at the mass above itself.
    outside_RV = torch.zeros_like(mass_RV, dtype=torch.bool)
    outside_RV[..., 1:] = mass_RV[..., :-1] > top_p
    outside_RV = torch.zeros_like(outside_RV).scatter(-1, order_RV, outside_RV)
    return logits_RV.masked_fill(outside_RV, float("-inf"))


def sample_tokens(
    logits_RV: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """One token per row, and its probability under the distribution it was drawn from.

    Args:
        logits_RV: ``[R,V]`` fp32.
        temperature: 0 is greedy (`top_k` and `top_p` then change nothing and are ignored).
        top_k: see `keep_top_k`; applied after the temperature.
        top_p: see `keep_top_p`; applied after `top_k`.
        generator: source of randomness for temperature > 0.

    Returns:
        tokens ``[R]`` int64 and confidence ``[R]`` fp32, which is NaN where logits are not numbers (NaN or inf): for
        the caller to see.
    """
    if temperature > 0.0:
        # Below, every fp32 logit would overflow, and any two that differ are infinitely far apart already.
        logits_RV = keep_top_p(keep_top_k(logits_RV / max(temperature, 1e-30), top_k), top_p)
    probs_RV = logits_RV.softmax(dim=-1)
    if temperature > 0.0 and logits_RV.shape[0]:
        # Rows that are not numbers draw anything: multinomial would fail without a name, on a GPU for good.
        drawn_from_RV = probs_RV.masked_fill(probs_RV.sum(dim=-1, keepdim=True).isnan(), 1.0)
        tokens_R1 = torch.multinomial(drawn_from_RV, num_samples=1, generator=generator)
    else:
        tokens_R1 = probs_RV.argmax(dim=-1, keepdim=True)
    return tokens_R1.squeeze(-1), probs_RV.gather(-1, tokens_R1).squeeze(-1)
