"""The lane of one MoE layer in one forward: route the fresh rows, run their experts, restore the dense shard.

Three forms of one interface; `epoch_moe.block` opens the one that the forward under way asks for:

* `DenseLane`: no plan. All rows, all experts: the model's own function.
* `ListedLane`: a plan's rows as lists of known length; experts here or on several ranks.
* `epoch_moe.freshlane.device.PaddedLane`: a plan's rows on the device, by the Triton kernels, without a host sync.

Shape suffixes: B sequences, S positions, T = B x S rows of the forward, R fresh rows, N rows that arrived at this
rank's experts, E experts, K top-k, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from epoch_moe.experts.run import Backend
from epoch_moe.experts.views import ExpertViews
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.freshlane.dispatch_kinds import Dispatched
from epoch_moe.freshlane.dispatcher import FreshLaneDispatcher
from epoch_moe.freshlane.restore import Restore, pack
from epoch_moe.plan.block_plan import ForwardPlan, LayerStep
from epoch_moe.plan.packed import ListedRows
from epoch_moe.plan.slot import DenseForward, Listener
from epoch_moe.plan.support import route_fresh
from epoch_moe.precision import product_dtype
from epoch_moe.routing import RouterSpec, Routing, Scores, route, router_logits, router_scores, sequence_pools

Forward = ForwardPlan | DenseForward | None


@dataclass(frozen=True)
class Visit:
    """One MoE layer in one forward: what a lane needs of both.

    Attributes:
        index: the layer's place among the model's MoE layers.
        router: what its router computes.
        gate_EH, bias_E: the router's weight and expert bias (or None), as of this forward.
        experts: the layer's experts.
        views: their weights, as of this forward.
        dispatcher: brings rows to them.
        backend: how they are computed without a plan.
        forward: under way; None: the model's own function.
        listener: is told what rows route to; None: nobody is.
        meanwhile: what can be computed while rows or sums travel.
    """

    index: int
    router: RouterSpec
    gate_EH: Tensor
    bias_E: Tensor | None
    experts: ExpertWeights
    views: ExpertViews
    dispatcher: FreshLaneDispatcher
    backend: Backend
    forward: Forward
    listener: Listener | None
    meanwhile: Callable[[], None]

    @property
    def name(self) -> str:
        """The layer in words, for error messages."""
        return f"MoE layer {self.index}"

    def scores(self, x_TH: Tensor) -> Scores:
        """The gate's scores ``[T,E]``."""
        return router_scores(router_logits(x_TH, self.gate_EH, self.router), self.bias_E, self.router)

    def run(self, x_RH: Tensor, routing: Routing, meanwhile_back: Callable[[], None] = lambda: None) -> Tensor:
        """Routed experts of some rows, wherever the experts are, counted: ``[R,H]``."""
        x_RH = x_RH.to(product_dtype(x_RH))
        backend = self.forward.config.backend if isinstance(self.forward, ForwardPlan) else self.backend

        def experts(arrived: Dispatched) -> Tensor:
            rows = (arrived.x_NH, arrived.ids_NK, arrived.weights_NK)
            tell = None
            if self.listener is not None:
                tell = partial(self.listener.observe, self.index, *rows[1:], self.forward, arrived.own_rows)
            y_NH, counts_E = self.experts.compute(
                *rows,
                self.views,
                backend=backend,
                part=self.dispatcher.range.part,
                dtype=torch.float32 if arrived.partial else arrived.x_NH.dtype,
                tell=tell,
            )
            if self.forward is not None:
                self.forward.counters.add_layer(self.index, x_RH.shape[0], counts_E)
            return y_NH

        return self.dispatcher.forward(
            x_RH,
            routing.ids_TK,
            routing.weights_TK,
            experts,
            name=self.name,
            meanwhile=self.meanwhile,
            meanwhile_back=meanwhile_back,
        )


class Lane(Protocol):
    """A layer's work on the rows of a forward, in three steps.

    Attributes:
        router_output: router logits ``[B,S,E]`` and expert ids ``[B,S,K]`` of all rows after `route`; None under a
            plan, where those of reused rows do not exist.
    """

    @property
    def router_output(self) -> tuple[Tensor, Tensor] | None:
        """``([B,S,E] fp32, [B,S,K] int64)`` after `route` without a plan, else None; see the class."""
        ...

    def route(self, x_TH: Tensor) -> tuple[Tensor, Routing]:
        """From the layer's input: the rows that go through routed experts, packed ``[R,H]``, and their experts."""
        ...

    def run(self, x_RH: Tensor, routing: Routing) -> Tensor:
        """Their experts' outputs, in the form that `restore` takes."""
        ...

    def restore(self, y_RH: Tensor) -> Tensor:
        """The dense shard ``[T,H]`` from fresh and cached rows; keeps what will be reused."""
        ...


class DenseLane:
    """All rows, all experts; rows that do not exist are routed, as their logits may be asked for, but not computed.

    Args:
        visit: the layer and the forward.
        shape: B and S.
    """

    def __init__(self, visit: Visit, shape: tuple[int, int]):
        self.visit, self.shape = visit, shape
        self.router_output: tuple[Tensor, Tensor] | None = None
        forward = visit.forward
        self._rows_R = forward.rows_of(shape) if isinstance(forward, DenseForward) else None

    def route(self, x_TH: Tensor) -> tuple[Tensor, Routing]:
        """See `Lane`."""
        visit, (batch, seq_len) = self.visit, self.shape
        self._total = x_TH.shape[0]
        valid_BS = None if visit.forward is None else visit.forward.valid_of(self.shape)
        routing, scores = route(x_TH, visit.gate_EH, visit.bias_E, visit.router, batch=batch, valid_BS=valid_BS)
        self.router_output = (
            scores.logits_TE.view(batch, seq_len, visit.router.num_experts),
            routing.ids_TK.view(batch, seq_len, visit.router.top_k),
        )
        if self._rows_R is None:
            return x_TH, routing
        return x_TH[self._rows_R], Routing(routing.ids_TK[self._rows_R], routing.weights_TK[self._rows_R])

    def run(self, x_RH: Tensor, routing: Routing) -> Tensor:
        """See `Lane`."""
        return self.visit.run(x_RH, routing)

    def restore(self, y_RH: Tensor) -> Tensor:
        """See `Lane`. Rows that do not exist come out as zeros."""
        if self._rows_R is None:
            return y_RH
        return y_RH.new_zeros(self._total, y_RH.shape[1]).index_copy_(0, self._rows_R, y_RH)


class ListedLane:
    """The fresh rows of a plan as lists.

    Args:
        visit: the layer and the forward.
        step: what happens to the rows.
    """

    router_output = None

    def __init__(self, visit: Visit, step: LayerStep):
        assert isinstance(step.rows, ListedRows) and step.state.cache_MH is not None
        self.visit, self.step, self.rows = visit, step, step.rows
        self._restore = Restore(step.rows, step.state.cache_MH)

    def route(self, x_TH: Tensor) -> tuple[Tensor, Routing]:
        """See `Lane`."""
        return route_packed(self.visit, self.step, x_TH)

    def run(self, x_RH: Tensor, routing: Routing) -> Tensor:
        """See `Lane`. Cached rows are copied while sums come back."""
        return self.visit.run(x_RH, routing, self._restore.copy_cached)

    def restore(self, y_RH: Tensor) -> Tensor:
        """See `Lane`."""
        return self._restore.finish(y_RH)


def keep_inputs(step: LayerStep, x_RH: Tensor) -> None:
    """Keep the inputs of the packed rows whose outputs will be cached, where the plan compares later ones with them."""
    rows, inputs_M1H = step.rows, step.state.inputs_M1H
    if inputs_M1H is None:
        return
    if isinstance(rows, ListedRows):
        inputs_M1H.index_copy_(0, rows.store_dst, x_RH.index_select(0, rows.store_src))
    else:
        kept_R = torch.where(rows.store_R >= 0, rows.store_R, rows.places.entries)
        inputs_M1H.index_copy_(0, kept_R, x_RH)


def route_packed(
    visit: Visit, step: LayerStep, x_TH: Tensor, selection: Callable[[Scores, Tensor | None], object] | None = None
) -> tuple[Tensor, Routing]:
    """The fresh rows of a plan, packed, and their experts inside the layer's support, which is kept up to date.

    Args:
        visit: the layer and the forward.
        step: what happens to the rows.
        x_TH: the layer's input.
        selection: who chooses experts, given the packed rows' scores and pools; None: torch.
    """
    forward, rows, support = visit.forward, step.rows, step.state.support
    assert isinstance(forward, ForwardPlan)
    config, x_RH, pools_RE = forward.config.of_layer(visit.index), pack(x_TH, rows), None
    keep_inputs(step, x_RH)
    if visit.router.kind == "block_pool":
        # A row's pool depends on its whole routing block, so the gate sees all rows; experts see the fresh ones.
        scores = visit.scores(x_TH)
        pools_TE = sequence_pools(scores.selection_TE, visit.router, forward.plan.batch, forward.valid_BS)
        pools_RE = pack(pools_TE, rows)
        scores = Scores(*(pack(t, rows) for t in (scores.logits_TE, scores.selection_TE, scores.combine_TE)))
    else:
        scores = visit.scores(x_RH)
    routing = route_fresh(
        scores,
        visit.router,
        rows,
        support,
        config,
        cold=step.cold,
        dtype=x_TH.dtype,
        pools_RE=pools_RE,
        shared=visit.dispatcher.shared_support(config, visit.name),
        by=None if selection is None else selection(scores, pools_RE),  # type: ignore[arg-type]
    )
    support.count(forward.counters, visit.index)
    return x_RH, routing
