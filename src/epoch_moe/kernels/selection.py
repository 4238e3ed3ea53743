"""What `route` and `atlas` share: an order of scores, the experts of a row's best groups, sizes of their programs.

A row's experts lie in a tile ``[NG, GS]``: expert groups by experts of a group, both padded to powers of two. Routers
without a group limit have one group that holds all experts.

Scores are compared as int32 keys, greater is better. So ties are exact, NaN has a place (before everything, as in
``torch.topk``), and an expert that may not be chosen is told apart from one whose score is -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epoch_moe.routing import RouterSpec

LOWEST = tl.constexpr(-2147483648)
"""Key of what may not be chosen."""
HIGHEST = tl.constexpr(2147483647)


@triton.jit
def exp(x):
    """``e**x`` of fp32 within about 2 ulp, also far from 0.

    ``tl.exp`` rounds ``x * log2(e)`` before it takes the power, which costs several ulp from |x| of about 4 on: enough
    to swap near-ties that a bias makes.
    """
    whole = tl.floor(x * 1.4426950408889634 + 0.5)
    whole = tl.minimum(tl.maximum(whole, -150.0), 129.0)
    # 0.693359375 has 10 bits, so that the first product is exact; both add up to ln 2.
    rest = (x - whole * 0.693359375) + whole * 2.12194440054690583e-4
    # Two powers of two: 2**129 and 2**-150 are no normal fp32 numbers. Made of bits, so that they are exact.
    half = (whole * 0.5).to(tl.int32)
    other = whole.to(tl.int32) - half
    power = tl.exp2(rest * 1.4426950408889634) * ((half + 127) << 23).to(tl.float32, bitcast=True)
    return power * ((other + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def order_key(value, usable):
    """Keys of fp32 values: their order as int32; `LOWEST` where not usable, `HIGHEST` for NaN."""
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(value == 0.0, 0, key)
    key = tl.where(value != value, HIGHEST, key)
    return tl.where(usable, key, LOWEST)


@triton.jit
def key_value(key):
    """The fp32 value of a key; NaN for `LOWEST` and `HIGHEST`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def best_groups(key_G, COUNT: tl.constexpr, NG_P: tl.constexpr):
    """Bool ``[NG]``: the ``COUNT`` best groups, ties to the lowest.

    Where fewer are left, groups are kept whose key is `LOWEST`: those hold nothing usable, so that it changes nothing.
    """
    group_G = tl.arange(0, NG_P)
    kept_G = group_G < 0
    for _ in range(COUNT):
        best = tl.min(tl.where(key_G == tl.max(key_G, axis=0), group_G, NG_P), axis=0)
        kept_G = kept_G | (group_G == best)
        key_G = tl.where(group_G == best, LOWEST, key_G)
    return kept_G


@triton.jit
def group_keys(selection_GS, valid_GS, NG: tl.constexpr, GS: tl.constexpr, NG_P: tl.constexpr, GS_P: tl.constexpr):
    """Keys ``[NG]`` of a row's groups: the sum of the two best selection scores of each, whoever may use them."""
    key_GS = order_key(selection_GS, valid_GS)
    first_G = tl.max(key_GS, axis=1)
    score_G = key_value(first_G)
    if GS > 1:
        slot_GS = tl.arange(0, GS_P)[None, :]
        best_G = tl.min(tl.where(key_GS == first_G[:, None], slot_GS, GS_P), axis=1)
        second_G = tl.max(tl.where(slot_GS == best_G[:, None], LOWEST, key_GS), axis=1)
        score_G += key_value(second_G)
    return order_key(score_G, tl.arange(0, NG_P) < NG)


@triton.jit
def kept_groups(key_G, usable_GS, K: tl.constexpr, TOPK_GROUP: tl.constexpr, NG_P: tl.constexpr):
    """Bool ``[NG]``: the groups that a row chooses from inside a support, see `epoch_moe.routing.group_limited`."""
    kept_G = best_groups(key_G, TOPK_GROUP, NG_P)
    usable_G = tl.sum(usable_GS.to(tl.int32), axis=1)
    if tl.sum(tl.where(kept_G, usable_G, 0), axis=0) < K:
        kept_G = best_groups(tl.where(usable_G == 0, LOWEST, key_G), TOPK_GROUP, NG_P)
    return kept_G


def limiting_groups(spec: RouterSpec) -> tuple[int, int]:
    """Expert groups that limit a row's choice, and how many of them it keeps: (1, 1) without a group limit."""
    limited = spec.kind == "sigmoid_group" and spec.topk_group < spec.n_group
    return (spec.n_group, spec.topk_group) if limited else (1, 1)


def router_constexprs(num_experts: int, top_k: int, n_group: int, topk_group: int) -> dict[str, object]:
    """Sizes of a row's tile of scores, for the kernels."""
    return {
        "E": num_experts,
        "K": top_k,
        "NG": n_group,
        "TOPK_GROUP": topk_group,
        "NG_P": triton.next_power_of_2(n_group),
        "GS_P": triton.next_power_of_2(num_experts // n_group),
    }


def row_warps(num_experts: int, candidates: int = 1) -> int:
    """Warps of a row's program: one for up to 256 experts and candidates, in 8 registers per thread and array."""
    return max(1, min(8, int(triton.next_power_of_2(max(num_experts, candidates))) // 256))
