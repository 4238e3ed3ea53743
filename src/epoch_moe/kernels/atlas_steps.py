"""The device code of `epoch_moe.kernels.atlas`: its three steps, and what each leaves for the next.

Shape suffixes: G supports, W voting rows per support, E experts, K top-k, C candidates per row, NG expert groups,
GS experts of a group, R rows of a chunk, O other experts.

Scratch memory between the steps, all written before it is read for every row of a support that is compiled:
``natural`` [G,W,K], ``ids`` and ``weights`` [G,W,C] (candidates in the row's order of selection), ``dense`` [G,W,E]
(candidate weights by expert, negative for the natural top-k, else 0), ``target`` [G,W]; ``key``, ``held`` and
``member`` [G,E]. Rows that do not vote have weights and target 0. Weights below zero count as zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epoch_moe.kernels.selection import HIGHEST, LOWEST, best_groups, group_keys, kept_groups, order_key


@triton.jit
def rows_kernel(
    selection,
    combine,
    vote,
    only,
    marks,
    used,
    natural,
    ids,
    weights,
    dense,
    target,
    width,
    coverage,
    E: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    NG: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    NG_P: tl.constexpr,
    GS_P: tl.constexpr,
    C_P: tl.constexpr,
    SURE: tl.constexpr,
    UNION: tl.constexpr,
):
    """One row: its natural top-k, its candidates, its target, and marks on what it uses and brings (the best SURE)."""
    row = tl.program_id(0).to(tl.int64)
    which = row // width
    if only is not None:  # noqa: SIM102 - settled when it is compiled
        if tl.load(only + which) == 0:
            return
    GS: tl.constexpr = E // NG
    group_GS = tl.arange(0, NG_P)[:, None]
    member_GS = tl.arange(0, GS_P)[None, :]
    id_GS = group_GS * GS + member_GS
    valid_GS = (group_GS < NG) & (member_GS < GS)
    slot_C = tl.arange(0, C_P)
    if tl.load(vote + row) == 0:
        if not UNION:
            tl.store(dense + row * E + id_GS, tl.zeros([NG_P, GS_P], tl.float32), mask=valid_GS)
            tl.store(weights + row * C + slot_C, tl.zeros([C_P], tl.float32), mask=slot_C < C)
            tl.store(ids + row * C + slot_C, tl.zeros([C_P], tl.int32), mask=slot_C < C)
            tl.store(target + row, 0.0)
        return

    selection_GS = tl.load(selection + row * E + id_GS, mask=valid_GS, other=0.0)
    usable_GS = valid_GS
    if NG > 1:
        key_G = group_keys(selection_GS, valid_GS, NG, GS, NG_P, GS_P)
        usable_GS = valid_GS & best_groups(key_G, TOPK_GROUP, NG_P)[:, None]
    key_GS = order_key(selection_GS, usable_GS)
    id_C = tl.zeros([C_P], tl.int32)
    for c in range(C):
        best = tl.max(tl.max(key_GS, axis=1), axis=0)
        chosen = tl.min(tl.min(tl.where(key_GS == best, id_GS, E), axis=1), axis=0)
        id_C = tl.where(slot_C == c, chosen, id_C)
        key_GS = tl.where(id_GS == chosen, LOWEST, key_GS)

    one_C = tl.full([C_P], 1, tl.uint8)
    tl.store(marks + which * E + id_C, one_C, mask=slot_C < SURE)
    tl.store(used + which * E + id_C, one_C, mask=slot_C < K)
    if not UNION:
        tl.store(natural + row * K + slot_C, id_C, mask=slot_C < K)
        chosen_GS = usable_GS & (key_GS == LOWEST)
        combine_GS = tl.maximum(tl.load(combine + row * E + id_GS, mask=chosen_GS, other=0.0), 0.0)
        tl.store(dense + row * E + id_GS, combine_GS, mask=valid_GS)
        weight_C = tl.maximum(tl.load(combine + row * E + id_C, mask=slot_C < C, other=0.0), 0.0)
        tl.debug_barrier()
        tl.store(dense + row * E + id_C, -weight_C, mask=slot_C < K)
        tl.store(target + row, coverage * tl.sum(tl.where(slot_C < K, weight_C, 0.0), axis=0))
        tl.store(ids + row * C + slot_C, id_C, mask=slot_C < C)
        tl.store(weights + row * C + slot_C, weight_C, mask=slot_C < C)


@triton.jit
def _covered(weight_RC, inside_RC, K: tl.constexpr):
    """Weight of each row's first K candidates that are inside: ``[R]``."""
    counted_RC = inside_RC & (tl.cumsum(inside_RC.to(tl.int32), axis=1) <= K)
    return tl.sum(tl.where(counted_RC, weight_RC, 0.0), axis=1)


@triton.jit
def support_kernel(
    marks,
    only,
    ids,
    weights,
    dense,
    target,
    key,
    held,
    member,
    out,
    width,
    coverage,
    E: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    E_P: tl.constexpr,
    C_P: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One support: experts by total weight until the aggregate target is met, then the filling of single rows."""
    which = tl.program_id(0).to(tl.int64)
    if only is not None:  # noqa: SIM102 - settled when it is compiled
        if tl.load(only + which) == 0:
            return
    first = which * width
    key += which * E
    held += which * E
    member += which * E
    expert_E = tl.arange(0, E_P)
    exists_E = expert_E < E
    slot_C = tl.arange(0, C_P)
    chunk_R = tl.arange(0, ROWS)
    inside_E = tl.load(marks + which * E + expert_E, mask=exists_E, other=0) != 0

    held_E = tl.zeros([E_P], tl.float32)
    for start in range(0, width, ROWS):
        row_R = start + chunk_R
        here_RE = (row_R < width)[:, None] & exists_E[None, :]
        dense_RE = tl.load(dense + (first + row_R)[:, None] * E + expert_E[None, :], mask=here_RE, other=0.0)
        held_E += tl.sum(tl.maximum(-dense_RE, 0.0), axis=0)

    # By natural weight, behind what is inside already; an expert is added if those before it hold too little.
    key_E = tl.where(inside_E, HIGHEST, order_key(held_E, exists_E))
    tl.store(key + expert_E, key_E, mask=exists_E)
    tl.store(held + expert_E, held_E, mask=exists_E)
    tl.debug_barrier()
    before_E = tl.zeros([E_P], tl.float32)
    for start in range(0, E, 16):
        other_O = start + tl.arange(0, 16)
        key_O = tl.load(key + other_O, mask=other_O < E, other=LOWEST)
        held_O = tl.load(held + other_O, mask=other_O < E, other=0.0)
        ties_OE = (key_O[:, None] == key_E[None, :]) & (other_O[:, None] < expert_E[None, :])
        before_OE = (key_O[:, None] > key_E[None, :]) | ties_OE
        before_E += tl.sum(tl.where(before_OE, held_O[:, None], 0.0), axis=0)
    inside_E = inside_E | (exists_E & (before_E < coverage * tl.sum(held_E, axis=0)))
    tl.store(member + expert_E, inside_E.to(tl.uint8), mask=exists_E)
    tl.debug_barrier()

    # While a row is short: the expert that fills the most missing weight.
    adding = 1
    while adding != 0:
        gain_E = tl.zeros([E_P], tl.float32)
        for start in range(0, width, ROWS):
            row_R = start + chunk_R
            here_RC = (row_R < width)[:, None] & (slot_C < C)[None, :]
            place_RC = (first + row_R)[:, None] * C + slot_C[None, :]
            weight_RC = tl.load(weights + place_RC, mask=here_RC, other=0.0)
            inside_RC = tl.load(member + tl.load(ids + place_RC, mask=here_RC, other=0), mask=here_RC, other=0) != 0
            target_R = tl.load(target + first + row_R, mask=row_R < width, other=0.0)
            deficit_R = target_R - _covered(weight_RC, inside_RC, K)
            deficit_R = tl.where(deficit_R <= 1e-6 * target_R, 0.0, deficit_R)
            if tl.max(deficit_R, axis=0) > 0.0:
                here_RE = (row_R < width)[:, None] & exists_E[None, :]
                place_RE = (first + row_R)[:, None] * E + expert_E[None, :]
                dense_RE = tl.abs(tl.load(dense + place_RE, mask=here_RE, other=0.0))
                gain_E += tl.sum(tl.minimum(dense_RE, tl.maximum(deficit_R, 0.0)[:, None]), axis=0)
        gain_E = tl.where(inside_E, 0.0, gain_E)
        best = tl.max(gain_E, axis=0)
        chosen = tl.min(tl.where(gain_E == best, expert_E, E_P), axis=0)
        adding = (best > 0.0).to(tl.int32)
        if adding != 0:
            inside_E = inside_E | (expert_E == chosen)
            tl.debug_barrier()
            tl.store(member + expert_E, inside_E.to(tl.uint8), mask=exists_E)
            tl.debug_barrier()
    tl.store(out + which * E + expert_E, inside_E.to(tl.uint8), mask=exists_E)


@triton.jit
def feasible_kernel(
    selection,
    vote,
    only,
    natural,
    member,
    out,
    width,
    E: tl.constexpr,
    K: tl.constexpr,
    NG: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    NG_P: tl.constexpr,
    GS_P: tl.constexpr,
    K_P: tl.constexpr,
):
    """One row: adds its natural top-k to the support in which it finds fewer than K experts."""
    row = tl.program_id(0).to(tl.int64)
    which = row // width
    if only is not None:  # noqa: SIM102 - settled when it is compiled
        if tl.load(only + which) == 0:
            return
    if tl.load(vote + row) == 0:
        return
    GS: tl.constexpr = E // NG
    group_GS = tl.arange(0, NG_P)[:, None]
    member_GS = tl.arange(0, GS_P)[None, :]
    id_GS = group_GS * GS + member_GS
    valid_GS = (group_GS < NG) & (member_GS < GS)
    # `member` is what the second step left; `out` is what the rows of this one add to.
    usable_GS = tl.load(member + which * E + id_GS, mask=valid_GS, other=0) != 0
    if NG > 1:
        selection_GS = tl.load(selection + row * E + id_GS, mask=valid_GS, other=0.0)
        key_G = group_keys(selection_GS, valid_GS, NG, GS, NG_P, GS_P)
        usable_GS = usable_GS & kept_groups(key_G, usable_GS, K, TOPK_GROUP, NG_P)[:, None]
    if tl.sum(tl.sum(usable_GS.to(tl.int32), axis=1), axis=0) < K:
        slot_K = tl.arange(0, K_P)
        id_K = tl.load(natural + row * K + slot_K, mask=slot_K < K, other=0)
        tl.store(out + which * E + id_K, tl.full([K_P], 1, tl.uint8), mask=slot_K < K)
