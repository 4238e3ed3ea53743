"""From logits to tokens: greedy; temperature with top-k and top-p; Gumbel noise.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

_COLDEST = 1e-30
"""Below, every fp32 logit would overflow, and any two that differ are infinitely far apart already."""


def warp(logits_RV: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Logits as transformers' warpers leave them: over the temperature, then -inf outside of top-k, then of top-p.

    The order and the tokens that stay are the released loop's. It sorts the nucleus from above and transformers from
    below, so where tokens with equal logits lie at the edge of `top_p`, another one of them may stay.

    Args:
        logits_RV: ``[R,V]`` fp32.
        temperature: above 0.
        top_k: this many largest logits stay, and those equal to the last of them; None or 0 keeps all.
        top_p: a token stays while those above it hold less than this of the mass; None or 1.0 keeps all.
    """
    warpers = [TemperatureLogitsWarper(max(float(temperature), _COLDEST))]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    for warper in warpers:
        logits_RV = warper(None, logits_RV)
    return logits_RV


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
        top_k, top_p: see `warp`.
        generator: source of randomness for temperature > 0.

    Returns:
        tokens ``[R]`` int64 and confidence ``[R]`` fp32, which is NaN where logits are not numbers (NaN or inf): for
        the caller to see.
    """
    if temperature > 0.0:
        logits_RV = warp(logits_RV, temperature, top_k, top_p)
    probs_RV = logits_RV.softmax(dim=-1)
    if temperature > 0.0 and logits_RV.shape[0]:
        # Rows that are not numbers draw anything: multinomial would fail without a name, on a GPU for good.
        drawn_from_RV = probs_RV.masked_fill(probs_RV.sum(dim=-1, keepdim=True).isnan(), 1.0)
        tokens_R1 = torch.multinomial(drawn_from_RV, num_samples=1, generator=generator)
    else:
        tokens_R1 = probs_RV.argmax(dim=-1, keepdim=True)
    return tokens_R1.squeeze(-1), probs_RV.gather(-1, tokens_R1).squeeze(-1)


def add_gumbel_noise(logits_RV: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
    """Scores whose argmax is a sample of the logits at this temperature; the logits themselves at 0.

    As LLaDA's released loop computes it (arXiv 2409.02908 asks for fp64): ``exp(logits) / (-log(uniform)) **
    temperature``, here in logarithms, so that large logits do not overflow.
    """
    if temperature == 0.0:
        return logits_RV
    uniform_RV = torch.rand(logits_RV.shape, dtype=torch.float64, generator=generator, device=logits_RV.device)
    return logits_RV.double() - temperature * (-uniform_RV.log()).log()
