"""The lane of one MoE layer in one forward: route the fresh rows, run their experts, restore the dense shard.

Three forms of one class; `epoch_moe.block` opens the one that the forward under way asks for:

* `DenseLane`: no plan. All rows, all experts: the model's own function.
* `ListedLane`: a plan's rows as lists of known length; experts here or on several ranks.
* `epoch_moe.freshlane.padded.PaddedLane`: a plan's rows on the device, by the Triton kernels, without a host sync.

Shape suffixes: B sequences, S positions, T = B x S rows of the forward, R fresh rows, E experts, K top-k, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.experts.run import Backend
from epoch_moe.experts.views import ExpertViews
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.freshlane.dispatch_kinds import Dispatched
from epoch_moe.freshlane.dispatcher import FreshLaneDispatcher
from epoch_moe.freshlane.restore import begin_restore, finish_restore, pack
from epoch_moe.kernels.launch import by_kernels
from epoch_moe.plan.forward import ForwardPlan, LayerStep
from epoch_moe.plan.packed import ListedRows
from epoch_moe.plan.slot import DenseForward, Listener
from epoch_moe.plan.support import Selection, route_fresh
from epoch_moe.precision import product_dtype
from epoch_moe.routing import RouterSpec, Routing, Scores, route, router_logits, router_scores, sequence_pools

Forward = ForwardPlan | DenseForward | None


@dataclass(kw_only=True)
class DenseLane:
    """All rows, all experts; rows that do not exist are routed, as their logits may be asked for, but not computed.

    Also what the forms under a plan share. `route`, `run` and `restore` are called once each, in this order.

    Attributes:
        index: the layer's place among the model's MoE layers.
        router: what its router computes.
        gate_EH, bias_E: the router's weight and expert bias (or None), as of this forward.
        experts: this rank's experts of the layer.
        views: their weights, as of this forward.
        dispatcher: brings rows to them.
        backend: how they are computed.
        forward: under way; None: the model's own function.
        step: what its plan does with the layer's rows; None: no plan.
        listener: is told what rows route to; None: nobody is.
        meanwhile: computes what does not need the routed experts, while rows or sums travel.
        router_output: router logits fp32 ``[B,S,E]`` and expert ids int64 ``[B,S,K]`` of all rows, after `route`; None
            under a plan, where those of reused rows do not exist.
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
    step: LayerStep | None
    listener: Listener | None
    meanwhile: Callable[[], None]
    router_output: tuple[Tensor, Tensor] | None = None

    @property
    def name(self) -> str:
        """The layer in words, for error messages."""
        return f"MoE layer {self.index}"

    def route(self, x_BSH: Tensor) -> tuple[Tensor, Routing]:
        """From the layer's input: the rows that go through routed experts, packed ``[R,H]``, and their experts."""
        (batch, seq_len, hidden), forward = x_BSH.shape, self.forward
        x_TH, valid_BS = x_BSH.reshape(-1, hidden), None if forward is None else forward.valid_of((batch, seq_len))
        if self.router.kind != "block_pool" and by_kernels(x_TH):
            from epoch_moe.kernels.route import route as route_rows

            logits_TE = router_logits(x_TH, self.gate_EH, self.router)
            ids_TK, weights_TK, _ = route_rows(logits_TE, self.bias_E, self.router, dtype=x_TH.dtype)
            routing = Routing(ids_TK, weights_TK)
        else:
            routing, scores = route(x_TH, self.gate_EH, self.bias_E, self.router, batch=batch, valid_BS=valid_BS)
            logits_TE = scores.logits_TE
        self.router_output = (
            logits_TE.view(batch, seq_len, self.router.num_experts),
            routing.ids_TK.view(batch, seq_len, self.router.top_k),
        )
        self._total = x_TH.shape[0]
        self._rows_R = forward.rows_of((batch, seq_len)) if isinstance(forward, DenseForward) else None
        if self._rows_R is None:
            return x_TH, routing
        return x_TH[self._rows_R], Routing(routing.ids_TK[self._rows_R], routing.weights_TK[self._rows_R])

    def run(self, x_RH: Tensor, routing: Routing) -> Tensor:
        """Their experts' outputs, counted: what `restore` takes, ``[R,H]`` but for the kernels."""
        x_RH = x_RH.to(product_dtype(x_RH))

        def experts(arrived: Dispatched) -> Tensor:
            routed = arrived.ids_NK, arrived.weights_NK
            tell = None
            if self.listener is not None:
                tell = partial(self.listener.observe, self.index, *routed, self.forward, arrived.own_rows)
            y_NH, counts_E = self.experts.compute(
                arrived.x_NH,
                *routed,
                self.views,
                backend=self.backend,
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
            meanwhile_back=self.copy_cached,
        )

    def copy_cached(self) -> None:
        """What can be done for `restore` while sums come back."""

    def restore(self, y_RH: Tensor) -> Tensor:
        """The dense shard ``[T,H]``; keeps what will be reused. Rows that do not exist come out as zeros."""
        if self._rows_R is None:
            return y_RH
        return y_RH.new_zeros(self._total, y_RH.shape[1]).index_copy_(0, self._rows_R, y_RH)


class ListedLane(DenseLane):
    """The fresh rows of a plan as lists."""

    def route(self, x_BSH: Tensor) -> tuple[Tensor, Routing]:
        """The fresh rows of the plan, packed ``[R,H]``, and their experts inside the layer's support."""
        forward, step = self.forward, self.step
        assert isinstance(forward, ForwardPlan) and step is not None
        rows, support = step.rows, step.state.support
        x_TH = x_BSH.reshape(-1, x_BSH.shape[-1])
        config, x_RH, pools_RE = forward.config.of_layer(self.index), pack(x_TH, rows), None
        keep_inputs(step, x_RH)
        if self.router.kind == "block_pool":
            # A row's pool depends on its whole routing block, so the gate sees all rows; experts see the fresh ones.
            scores = self._scores(x_TH)
            pools_TE = sequence_pools(scores.selection_TE, self.router, forward.plan.batch, forward.valid_BS)
            pools_RE = pack(pools_TE, rows)
            scores = Scores(*(pack(t, rows) for t in (scores.logits_TE, scores.selection_TE, scores.combine_TE)))
        else:
            scores = self._scores(x_RH)
        routing = route_fresh(
            scores,
            self.router,
            rows,
            support,
            config,
            cold=step.cold,
            dtype=x_TH.dtype,
            pools_RE=pools_RE,
            shared=self.dispatcher.shared_support(config, self.name),
            by=self._selection(scores, config, pools_RE, x_TH.dtype),
        )
        support.count(forward.counters, self.index)
        return x_RH, routing

    def _scores(self, x_TH: Tensor) -> Scores:
        return router_scores(router_logits(x_TH, self.gate_EH, self.router), self.bias_E, self.router)

    def _selection(
        self, scores: Scores, config: EpochConfig, pools_RE: Tensor | None, dtype: torch.dtype
    ) -> Selection | None:
        """Who chooses experts; None: torch."""
        return None

    def copy_cached(self) -> None:
        """Begin to restore: cached rows."""
        self._begun_TH = begin_restore(*self._listed())

    def restore(self, y_RH: Tensor) -> Tensor:
        """The dense shard ``[T,H]`` from fresh and cached rows; keeps what will be reused."""
        return finish_restore(y_RH, *self._listed(), self._begun_TH)

    def _listed(self) -> tuple[ListedRows, Tensor]:
        step = self.step
        assert step is not None and isinstance(step.rows, ListedRows) and step.state.cache_MH is not None
        return step.rows, step.state.cache_MH


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
