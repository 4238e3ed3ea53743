"""The library on plain tensors: what a serving stack calls, without modules and without transformers.

Needs torch alone. One forward of an engine, for a batch of rows that belong to any requests::

    fresh = fresh_rows(store, keys, ids_T, live_T)                # once per forward: which rows are computed
    for layer in moe_layers:                                      # inside the model, with dense activations x_TH
        fresh = layer_rows(store, layer, fresh, x_TH)             # with drift: each layer has rows of its own
        x_RH = fresh.pick(x_TH)
        logits_RE = router_logits(x_RH, gate_EH, spec)
        routing = route_rows(store, layer, fresh, logits_RE, bias_E)
        y_RH = moe_forward(x_RH, routing.ids_TK, routing.weights_TK, experts[layer])
        out_TH = restore_rows(store, layer, fresh, y_RH)
    store.complete(fresh)

docs/engines.md has the contract of every call.
"""

from epoch_moe.experts.views import ExpertViews
from epoch_moe.functional.capability import router_spec, supports
from epoch_moe.functional.layer import fresh_rows, layer_rows, restore_rows, route_rows
from epoch_moe.functional.moe import moe_forward
from epoch_moe.functional.views import expert_views
from epoch_moe.plan.atlas import compile_support
from epoch_moe.plan.keyed import NO_SLOT, NO_STATE, FreshRows, RowKeys, RowStore
from epoch_moe.plan.rules import RowMasks
from epoch_moe.routing import NO_EXPERT, RouterSpec, Routing, route, router_logits

__all__ = [
    "NO_EXPERT",
    "NO_SLOT",
    "NO_STATE",
    "ExpertViews",
    "FreshRows",
    "RouterSpec",
    "Routing",
    "RowKeys",
    "RowMasks",
    "RowStore",
    "compile_support",
    "expert_views",
    "fresh_rows",
    "layer_rows",
    "moe_forward",
    "restore_rows",
    "route",
    "route_rows",
    "router_logits",
    "router_spec",
    "supports",
]
