"""One MoE layer under a row plan: route the fresh rows, restore the dense shard.

Shape suffixes: T rows of the forward, R fresh rows, E experts, K top-k, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.checks import FLOAT_DTYPES, MOST, instance, tensor, whole
from epoch_moe.freshlane.restore import restore
from epoch_moe.functional.moe import share_memory
from epoch_moe.plan.keyed import FreshRows, RowKeys, RowStore
from epoch_moe.plan.support import route_fresh, uses_support
from epoch_moe.routing import Routing, router_scores
from epoch_moe.worklist import count_pairs


def fresh_rows(
    store: RowStore,
    keys: RowKeys,
    ids_T: Tensor,
    live_T: Tensor,
    *,
    mask_id: int | None = None,
    changed_T: Tensor | None = None,
) -> FreshRows:
    """Which rows a forward computes, decided once for all layers, with the arguments of `RowStore.fresh_rows`."""
    instance("store", store, RowStore, "a RowStore")
    return store.fresh_rows(keys, ids_T, live_T, mask_id=mask_id, changed_T=changed_T)


def layer_rows(store: RowStore, layer: int, fresh: FreshRows, x_TH: Tensor) -> FreshRows:
    """What one layer computes, where `EpochConfig.drift` lets each layer decide by its own input.

    Args:
        store: where the inputs of cached outputs are.
        layer: place among the MoE layers.
        fresh: of this forward, as `fresh_rows` returned it.
        x_TH: the layer's input: all rows of the forward, in the store's dtype.

    Returns:
        What `route_rows` and `restore_rows` of this layer take, one host sync later. Without drift ``fresh`` itself.
    """
    instance("store", store, RowStore, "a RowStore")
    instance("fresh", fresh, FreshRows, "FreshRows")
    return store.layer_rows(whole("layer", layer, most=store.num_layers - 1), fresh, x_TH)


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
    tensor("logits_RE", logits_RE, FLOAT_DTYPES, (rows.num_fresh, spec.num_experts), store.device)
    state = store.support_state(layer, fresh)
    scores = router_scores(logits_RE.float(), bias_E, spec)
    routing = route_fresh(scores, spec, rows, state, config, cold=False, dtype=store.cache_LMH.dtype)
    if uses_support(spec, config):
        state.count(store.counters, layer)
        store.keep_support(layer, fresh, state)
    store.counters.add_layer(layer, rows.num_fresh, count_pairs(routing.ids_TK, spec.num_experts))
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
    cache_MH = store.cache_LMH[layer]
    hidden = cache_MH.shape[1]
    tensor("y_RH", y_RH, cache_MH.dtype, (fresh.num_fresh, hidden), cache_MH.device)
    if torch.is_grad_enabled() and y_RH.requires_grad:
        raise RuntimeError("y_RH requires gradients, which reused rows do not have: run under torch.no_grad()")
    if out is not None:
        tensor("out", out, cache_MH.dtype, (fresh.rows.total, hidden), cache_MH.device)
        if share_memory(out, y_RH) or share_memory(out, store.cache_LMH):
            raise ValueError("out shares memory with y_RH or the store's cache: expected a buffer of its own")
    restored_TH = restore(y_RH, fresh.rows, cache_MH, out)
    store.mark_restored(layer, fresh)
    return restored_TH


def _check(store: RowStore, layer: int, fresh: FreshRows) -> None:
    instance("store", store, RowStore, "a RowStore")
    instance("fresh", fresh, FreshRows, "FreshRows")
    store.check_open(fresh, whole("layer", layer, "a place among the MoE layers", least=-MOST))
