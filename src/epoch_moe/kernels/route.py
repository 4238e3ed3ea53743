"""Routing of rows in one pass: logits -> scores, support, group limit, top-k, weights.

Shape suffixes: R rows (capacity of the buffers; the first ``count`` are real), E experts, K top-k, G supports,
NG expert groups, GS experts of a group.

One program per row, one warp for up to 256 experts. The row's scores stay in registers; K rounds of "largest key, then
lowest id that has it" pick the experts, so that ties are settled by the id and nothing else. ``torch.topk`` promises no
order among equal scores: where rows have exact ties (identical router columns, scores that saturate) its choice can be
another, equally good one. The reference is `epoch_moe.kernels.route_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epoch_moe.checks import FLOAT_DTYPES, tensor
from epoch_moe.kernels.launch import require_triton
from epoch_moe.kernels.selection import (
    LOWEST,
    exp,
    group_keys,
    kept_groups,
    limiting_groups,
    order_key,
    router_constexprs,
    row_warps,
)
from epoch_moe.routing import RouterSpec

_ROUNDED = {torch.float32: "none", torch.float16: "fp16", torch.bfloat16: "bf16"}


@triton.jit
def _combine_scores(logit, top, denominator, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        return tl.div_rn(exp(logit - top), denominator)
    return tl.div_rn(tl.full(logit.shape, 1.0, tl.float32), 1.0 + exp(-logit))


@triton.jit
def _rounded(x, ROUND: tl.constexpr):
    """Fp32 values rounded to a 16-bit type, to nearest even."""
    if ROUND == "fp16":
        return x.to(tl.float16).to(tl.float32)
    if ROUND == "bf16":
        # By bits: Triton's interpreter truncates.
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def _route_kernel(
    logits,  # [R,E]
    bias,  # [E] or None
    support,  # u8 [G,E] or None
    group,  # i64 or i32 [R], or None
    restricted,  # u8 [R] or None
    count,  # i32 [1] or None
    ids,  # i64 [R,K]
    weights,  # fp32 [R,K]
    totals,  # fp32 [R]
    num_supports,
    scaling,
    E: tl.constexpr,
    K: tl.constexpr,
    NG: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    NG_P: tl.constexpr,
    GS_P: tl.constexpr,
    K_P: tl.constexpr,
    SOFTMAX: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot_K = tl.arange(0, K_P)
    out_K = row * K + slot_K
    if count is not None:  # noqa: SIM102 - settled when it is compiled, and there is nothing to load without it
        if row >= tl.load(count):
            tl.store(ids + out_K, tl.full([K_P], -1, tl.int64), mask=slot_K < K)
            tl.store(weights + out_K, tl.zeros([K_P], tl.float32), mask=slot_K < K)
            tl.store(totals + row, 0.0)
            return

    GS: tl.constexpr = E // NG
    group_GS = tl.arange(0, NG_P)[:, None]
    member_GS = tl.arange(0, GS_P)[None, :]
    id_GS = group_GS * GS + member_GS
    valid_GS = (group_GS < NG) & (member_GS < GS)
    logit_GS = tl.load(logits + row * E + id_GS, mask=valid_GS, other=float("-inf")).to(tl.float32)
    top = 0.0
    denominator = 1.0
    if SOFTMAX:
        top = tl.max(tl.max(logit_GS, axis=1), axis=0)
        denominator = tl.sum(tl.sum(tl.where(valid_GS, exp(logit_GS - top), 0.0), axis=1), axis=0)
    selection_GS = _combine_scores(logit_GS, top, denominator, SOFTMAX)
    if bias is not None:
        selection_GS += tl.load(bias + id_GS, mask=valid_GS, other=0.0).to(tl.float32)

    usable_GS = valid_GS
    if support is not None:
        limited = True
        if restricted is not None:
            limited = tl.load(restricted + row) != 0
        if limited:
            which = row
            if group is not None:
                which = tl.load(group + row).to(tl.int64)
            elif num_supports == 1:
                which = row * 0
            usable_GS = id_GS < 0  # a support that does not exist holds nothing
            if (which >= 0) & (which < num_supports):
                usable_GS = tl.load(support + which * E + id_GS, mask=valid_GS, other=0) != 0
    if NG > 1:
        key_G = group_keys(selection_GS, valid_GS, NG, GS, NG_P, GS_P)
        kept_G = kept_groups(key_G, usable_GS, K, TOPK_GROUP, NG_P)
        usable_GS = usable_GS & kept_G[:, None]

    key_GS = order_key(selection_GS, usable_GS & (selection_GS != float("-inf")))
    id_K = tl.full([K_P], -1, tl.int32)
    for k in range(K):
        best = tl.max(tl.max(key_GS, axis=1), axis=0)
        chosen = tl.min(tl.min(tl.where(key_GS == best, id_GS, E), axis=1), axis=0)
        id_K = tl.where(slot_K == k, tl.where(best == LOWEST, -1, chosen), id_K)
        key_GS = tl.where(id_GS == chosen, LOWEST, key_GS)

    # The chosen logits are read again (they are in the cache) rather than picked out of the tile: K reductions less.
    used_K = id_K >= 0
    logit_K = tl.load(logits + row * E + id_K, mask=used_K, other=0.0).to(tl.float32)
    weight_K = _combine_scores(logit_K, top, denominator, SOFTMAX)
    if SOFTMAX and bias is not None:
        weight_K += tl.load(bias + id_K, mask=used_K, other=0.0).to(tl.float32)
    weight_K = tl.where(used_K, weight_K, 0.0)
    total = tl.sum(weight_K, axis=0)
    if SOFTMAX:
        weight_K = _rounded(weight_K, ROUND)
    else:
        if K > 1:
            weight_K = tl.div_rn(weight_K, tl.full([K_P], 0.0, tl.float32) + (total + 1e-20))
        weight_K = weight_K * scaling
    tl.store(ids + out_K, id_K.to(tl.int64), mask=slot_K < K)
    tl.store(weights + out_K, weight_K, mask=slot_K < K)
    tl.store(totals + row, total)


@torch.library.custom_op("epoch_moe::route", mutates_args=())
def _route(
    logits_RE: Tensor,
    top_k: int,
    n_group: int,
    topk_group: int,
    softmax: bool,
    scaling: float,
    dtype: torch.dtype,
    bias_E: Tensor | None,
    support_GE: Tensor | None,
    group_R: Tensor | None,
    restricted_R: Tensor | None,
    count: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_experts = logits_RE.shape
    results = _empty_results(logits_RE, top_k)
    if num_rows == 0:
        return results

    def flags(mask: Tensor | None) -> Tensor | None:
        return None if mask is None else mask.contiguous().view(torch.uint8)

    with torch.cuda.device_of(logits_RE):
        _route_kernel[(num_rows,)](
            logits_RE.contiguous(),
            None if bias_E is None else bias_E.contiguous(),
            flags(support_GE),
            None if group_R is None else group_R.contiguous(),
            flags(restricted_R),
            count,
            *results,
            1 if support_GE is None else support_GE.shape[0],
            scaling,
            **router_constexprs(num_experts, top_k, n_group, topk_group),
            K_P=triton.next_power_of_2(top_k),
            SOFTMAX=softmax,
            ROUND=_ROUNDED[dtype] if softmax else "none",
            num_warps=row_warps(num_experts),
            num_stages=1,
        )
    return results


def _empty_results(logits_RE: Tensor, top_k: int, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits_RE.shape[0]
    weights_RK = logits_RE.new_empty(rows, top_k, dtype=torch.float32)
    return logits_RE.new_empty(rows, top_k, dtype=torch.int64), weights_RK, weights_RK.new_empty(rows)


_route.register_fake(_empty_results)


def route(
    logits_RE: Tensor,
    bias_E: Tensor | None,
    spec: RouterSpec,
    *,
    dtype: torch.dtype,
    support_GE: Tensor | None = None,
    group_R: Tensor | None = None,
    restricted_R: Tensor | None = None,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Experts and weights of rows from their router logits: `epoch_moe.routing` in one kernel.

    Args:
        logits_RE: fp32, fp16 or bf16; computed with as fp32.
        bias_E: the router's expert bias, any float dtype.
        spec: the router. For ``kind="block_pool"`` pass the pools as ``support_GE`` [R,E].
        dtype: the model's, which softmax weights are rounded to: fp32, fp16 or bf16.
        support_GE: bool, experts that may be chosen; None: all.
        group_R: int64 (int32), the support of each row; None: G is 1, or R and row r uses support r. A row whose
            support does not exist gets no expert.
        restricted_R: bool, rows that the support applies to; None: all.
        count: int32 [1] on the device; rows from there on are padding: nothing of them is read, their ids are
            ``NO_EXPERT``, their weights and totals 0. None: all rows are real.

    Returns:
        ``ids_RK`` int64, best first, then ``NO_EXPERT`` where fewer than K experts are usable (an expert whose
        selection score is -inf is not); ``weights_RK`` fp32 as `routing.combine_weights`; ``total_R`` fp32, the sum of
        the chosen experts' combine scores before normalisation, scaling and rounding.

    Raises:
        ValueError: a shape or dtype that does not fit, or a device without Triton.
    """
    require_triton(logits_RE.device)
    tensor("logits_RE", logits_RE, FLOAT_DTYPES, ("rows", spec.num_experts))
    num_rows = logits_RE.shape[0]
    if dtype not in _ROUNDED:
        raise ValueError(f"dtype={dtype}: expected one of {', '.join(map(str, _ROUNDED))}")
    if bias_E is not None:
        tensor("bias_E", bias_E, FLOAT_DTYPES, (spec.num_experts,))
    if support_GE is None:
        if group_R is not None or restricted_R is not None:
            raise ValueError("group_R or restricted_R without support_GE: pass the supports, or neither")
        if spec.kind == "block_pool":
            raise ValueError("kind='block_pool' needs its pools: pass support_GE [R,E]")
    else:
        tensor("support_GE", support_GE, torch.bool, ("supports", spec.num_experts))
        if group_R is not None:
            tensor("group_R", group_R, (torch.int64, torch.int32), (num_rows,))
        elif support_GE.shape[0] not in (1, num_rows):
            raise ValueError(
                f"support_GE has {support_GE.shape[0]} supports for {num_rows} rows: expected 1 or {num_rows}, "
                "or group_R that says which row uses which"
            )
    if restricted_R is not None:
        tensor("restricted_R", restricted_R, torch.bool, (num_rows,))
    if count is not None:
        tensor("count", count, torch.int32, (1,))
    results: tuple[Tensor, Tensor, Tensor] = _route(
        logits_RE,
        spec.top_k,
        *limiting_groups(spec),
        spec.kind == "softmax",
        float(spec.routed_scaling_factor),
        dtype,
        bias_E,
        support_GE,
        group_R,
        restricted_R,
        count,
    )
    return results
