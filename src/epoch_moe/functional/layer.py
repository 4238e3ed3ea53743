"""One MoE layer under a row plan: route the fresh rows, restore the dense shard.

Shape suffixes: T rows of the forward, R fresh rows, E experts, K top-k, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.checks import FLOAT_DTYPES, MOST, instance, tensor, whole, wrong
from epoch_moe.freshlane.restore import restore
from epoch_moe.functional.moe import share_memory
from epoch_moe.plan.keyed import FreshRows, RowKeys, RowStore
from epoch_moe.plan.support import route_fresh, uses_support
from epoch_moe.routing import NO_EXPERT, Routing, router_scores


def fresh_rows(
    store: RowStore,
    keys: RowKeys,
    ids_T: Tensor,
    live_T: Tensor,
    *,
    mask_id: int | None = None,
    changed_T: Tensor | None = None,
) -> FreshRows:
    """Decide once per forward which rows are computed; see `RowStore.fresh_rows`. One host sync."""
    instance("store", store, RowStore, "a RowStore")
    return store.fresh_rows(keys, ids_T, live_T, mask_id=mask_id, changed_T=changed_T)


def route_rows(
    store: RowStore, layer: int, fresh: FreshRows, logits_RE: Tensor, bias_E: Tensor | None = None
) -> Routing:
    """Experts and weights of the fresh rows, inside the supports where a row is restricted.

    Compiles the supports of slots in their cold pass and of those that fell short; waits for the device then, and never
    else.

    Args:
        store: where the supports are.
        layer: place among the MoE layers.
        fresh: of this forward.
        logits_RE: router logits of the fresh rows (`router_logits` of ``fresh.pick(x_TH)``, or the engine's own gate);
            read as fp32.
        bias_E: the expert bias.

    Returns:
        int64 ids (`NO_EXPERT` for dropped pairs) and fp32 weights, the routed scaling factor included.
    """
    _check(store, layer, fresh)
    spec, config, rows = store.router, store.config.of_layer(layer), fresh.rows
    if bias_E is not None:
        tensor("bias_E", bias_E, FLOAT_DTYPES, (spec.num_experts,), store.device)
    if not isinstance(logits_RE, Tensor) or logits_RE.dim() != 2:
        tensor("logits_RE", logits_RE, FLOAT_DTYPES, (rows.num_fresh, spec.num_experts), store.device)
    if tuple(logits_RE.shape) != (rows.num_fresh, spec.num_experts):
        raise ValueError(
            f"logits_RE has shape {tuple(logits_RE.shape)}: expected [{rows.num_fresh}, {spec.num_experts}], the "
            "fresh rows alone (fresh.pick)"
        )
    tensor("logits_RE", logits_RE, FLOAT_DTYPES, logits_RE.shape, store.device)
    state = store.support_state(layer, fresh)
    scores = router_scores(logits_RE.float(), bias_E, spec)
    routing = route_fresh(scores, spec, rows, state, config, cold=False, dtype=store.cache_LMH.dtype)
    if uses_support(spec, config):
        state.count(store.counters, layer)
        store.keep_support(layer, fresh, state)
    ids_P = routing.ids_TK.reshape(-1)
    bins = torch.zeros(spec.num_experts + 1, dtype=torch.int64, device=ids_P.device)
    chosen_P = torch.where(ids_P == NO_EXPERT, spec.num_experts, ids_P)
    store.counters.add_layer(layer, rows.num_fresh, bins.scatter_add_(0, chosen_P, torch.ones_like(chosen_P))[:-1])
    return routing


def restore_rows(
    store: RowStore, layer: int, fresh: FreshRows, y_RH: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """The dense shard ``[T,H]`` from the fresh rows' routed outputs and the cached ones; writes the cache. No sync.

    Args:
        store: where the cache is.
        layer: place among the MoE layers.
        fresh: of this forward.
        y_RH: the complete routed output of the fresh rows: summed over ranks, without the shared expert.
        out: written in place and returned, of shape ``[T,H]``. Padding rows become zeros.

    Returns:
        ``out``, or a new tensor, or ``y_RH`` itself where all rows are fresh.
    """
    _check(store, layer, fresh)
    cache_MH, total = store.cache_LMH[layer], fresh.rows.total
    expected = (fresh.num_fresh, cache_MH.shape[1])
    for name, given in (("y_RH", y_RH), ("out", y_RH if out is None else out)):
        if not isinstance(given, Tensor) or given.layout != torch.strided:
            raise wrong(name, given, "a dense tensor")
    if tuple(y_RH.shape) != expected or y_RH.dtype != cache_MH.dtype or y_RH.device != cache_MH.device:
        raise ValueError(
            f"y_RH is {y_RH.dtype} {tuple(y_RH.shape)} on {y_RH.device}: expected {cache_MH.dtype} {expected} on "
            f"{cache_MH.device}"
        )
    if torch.is_grad_enabled() and y_RH.requires_grad:
        raise RuntimeError("y_RH requires gradients, which reused rows do not have: run under torch.no_grad()")
    if out is not None:
        if tuple(out.shape) != (total, expected[1]) or out.dtype != y_RH.dtype or out.device != y_RH.device:
            raise ValueError(
                f"out is {out.dtype} {tuple(out.shape)} on {out.device}: expected {y_RH.dtype} {(total, expected[1])} "
                f"on {y_RH.device}"
            )
        if share_memory(out, y_RH) or share_memory(out, store.cache_LMH):
            raise ValueError("out shares memory with y_RH or the store's cache: expected a buffer of its own")
    restored_TH = restore(y_RH, fresh.rows, cache_MH, out)
    store.mark_restored(layer)
    return restored_TH


def _check(store: RowStore, layer: int, fresh: FreshRows) -> None:
    instance("store", store, RowStore, "a RowStore")
    instance("fresh", fresh, FreshRows, "FreshRows")
    store.check_open(fresh, whole("layer", layer, "a place among the MoE layers", least=-MOST))
