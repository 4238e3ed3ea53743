"""`EpochMoEBlock`: a mixture-of-experts layer that computes only what a block plan asks for.

With a plan, a forward of the layer is: pick the fresh rows, route them inside the support, send their pairs down the
lane, restore the dense shard from fresh and cached outputs, add the shared expert. Without one it is the model's own
function.

Shape suffixes: B sequences, S positions, T = B x S rows, R fresh rows, H hidden, E experts, K top-k, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from epoch_moe.config import EpochConfig
from epoch_moe.experts.absent import AbsentTensor
from epoch_moe.experts.bypassed import check_linear, check_router
from epoch_moe.experts.layouts import FUSED, LayoutName
from epoch_moe.experts.run import Backend, pick_backend, run_experts, worklist_for
from epoch_moe.experts.views import ExpertViews
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.experts.worklist import count_pairs
from epoch_moe.freshlane.device import DeviceSelection, planned_lane
from epoch_moe.freshlane.expert_parallel import ExpertParallel, SharedSupport
from epoch_moe.freshlane.local import DenseShard, pick
from epoch_moe.plan.block_plan import ForwardPlan, LayerStep
from epoch_moe.plan.packed import ListedRows, PaddedRows
from epoch_moe.plan.slot import DenseForward, PlanSlot
from epoch_moe.plan.support import route_fresh
from epoch_moe.precision import product_dtype
from epoch_moe.residency.experts import ResidentExperts
from epoch_moe.routing import (
    RouterSpec,
    Routing,
    Scores,
    route,
    router_logits,
    router_scores,
    sequence_pools,
)


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """How a model family's MoE block is built: what `EpochMoEBlock` must know of the module it replaces.

    Attributes:
        family: name for reports and errors.
        router: what the layer's router computes.
        gate_weight: attribute path of the router weight ``[E,H]``.
        gate_bias: attribute path of the expert bias ``[E]``, or None.
        experts: attribute of the experts' module; unused where they are fused.
        layout: how the experts' parameters are held, see `epoch_moe.experts.layouts`.
        shared: attribute of the shared expert inside the block, or None.
        returns_router: the block returns ``(out, (router_logits, topk_ids))`` rather than ``out``.
    """

    family: str
    router: RouterSpec
    gate_weight: str
    gate_bias: str | None
    experts: str = "experts"
    layout: LayoutName = "per_expert"
    shared: str | None = None
    returns_router: bool = False

    def check_gate(self, block: nn.Module) -> None:
        """Refuse a gate whose forward says more than its weight, as that is all that is read of it.

        Raises:
            TypeError: naming what it is.
        """
        path = self.gate_weight.rpartition(".")[0]
        (check_linear if self.router.kind == "softmax" else check_router)(path, block.get_submodule(path))


class EpochMoEBlock(nn.Module):
    """A drop-in replacement for a released MoE block, around the same parameters.

    It shares the original's dictionaries of children, parameters, buffers and hooks: keys and values of `state_dict`
    stay as they were, hooks keep running, and whatever is replaced in one of the two is replaced in the other. Other
    attributes are forwarded to the original.

    Args:
        original: the block to replace; kept, untouched but for its experts' storage, for `unpatch`.
        spec: how it is built.
        slot: where the plan of a forward is found; one for all blocks of a model.
        index: this layer's place among the model's MoE layers.
        backend: how routed experts are computed; under a plan its own configuration decides.
        ep: the ranks that the experts are split over; None: all are here.
    """

    def __init__(
        self,
        original: nn.Module,
        spec: BlockSpec,
        slot: PlanSlot,
        index: int,
        backend: Backend = "auto",
        ep: ExpertParallel | None = None,
    ):
        super().__init__()
        for name in list(self.__dict__):  # what nn.Module itself keeps
            self.__dict__[name] = original.__dict__[name]
        self.spec, self.slot, self.index, self.backend = spec, slot, index, backend
        self.ep = ep
        self._original = (original,)  # in a tuple, so that it is not registered as a child
        experts = original if spec.layout == "fused" else getattr(original, spec.experts)
        # A block of our own model classes has stacked its experts already: share that storage.
        existing = original.__dict__.get("_weights")
        if not isinstance(existing, ExpertWeights) or existing.experts is not experts:
            existing = ExpertWeights(experts, spec.layout)
        self.weights: ExpertWeights | ResidentExperts = existing

    @property
    def original(self) -> nn.Module:
        """The replaced block."""
        return self._original[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(self._original[0], name)

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Any]:
        """``[B,S,H] -> [B,S,H]``, or what the original returns.

        Under a plan the second half of LLaDA2's tuple is None: router logits of reused rows do not exist. A caller
        that asks the model for router logits gets a dense forward.
        """
        batch, seq_len, hidden = hidden_states.shape
        forward = self.slot.active
        router: tuple[Tensor, Tensor] | None
        visit = _Visit(self, hidden_states, differentiable=forward is None and torch.is_grad_enabled())
        if forward is None:
            routed_TH, router = self._dense(hidden_states, None, visit)
        elif torch.compiler.is_compiling():
            # A plan and its counters are another Python state on every forward: traced, they would be compiled anew.
            routed_TH, router = torch.compiler.disable(self._under)(hidden_states, forward, visit)
        else:
            routed_TH, router = self._under(hidden_states, forward, visit)
        out = routed_TH.view(batch, seq_len, hidden)
        if self.spec.shared is not None:
            out = out + visit.shared()
        return (out, router) if self.spec.returns_router else out

    def _under(
        self, x_BSH: Tensor, forward: ForwardPlan | DenseForward, visit: _Visit
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """What a forward under way asks for: rows ``[T,H]``, and router output where they were all computed."""
        if isinstance(forward, ForwardPlan):
            # The kernels compute in the dtype of their weights, whatever autocast says.
            dtype = product_dtype(x_BSH) if forward.plan.compact is None else visit.stacked.down_EHF.dtype
            step = forward.enter(self.index, x_BSH, dtype, visit.version)
            if step is not None:
                return self._planned(x_BSH.reshape(-1, x_BSH.shape[-1]), forward, step, visit), None
        return self._dense(x_BSH, forward, visit)

    def _planned(self, x_TH: Tensor, forward: ForwardPlan, step: LayerStep, visit: _Visit) -> Tensor:
        if self.training:
            raise RuntimeError("a block plan is active and the model is in training mode: call model.eval() to decode")
        if torch.is_grad_enabled() and (x_TH.requires_grad or any(p.requires_grad for p in self.parameters())):
            raise RuntimeError(
                "a block plan is active and gradients are required: reused rows have none. Decode under "
                "torch.no_grad(), or train without a plan"
            )
        x_RH, routing = self._route(x_TH, forward, step)
        assert step.state.cache_MH is not None
        if isinstance(step.rows, PaddedRows):
            if self.slot.listener is not None:
                raise RuntimeError("recording was begun within a block of backend='triton': begin it between blocks")
            out_TH, counts_E = planned_lane(x_TH, step.rows, routing, visit.stacked, step.state.cache_MH)
            forward.counters.add_layer(self.index, step.rows.count, counts_E)
            return out_TH.to(product_dtype(x_TH))
        shard = DenseShard(step.rows, step.state.cache_MH)
        return shard.finish(self._experts(x_RH, routing, forward, visit, shard))

    def _route(self, x_TH: Tensor, forward: ForwardPlan, step: LayerStep) -> tuple[Tensor, Routing]:
        """The fresh rows, packed, and their experts inside the layer's support."""
        rows, support = step.rows, step.state.support
        x_RH, pools_RE = pick(x_TH, rows), None
        if self.spec.router.kind == "block_pool":
            # A row's pool depends on its whole routing block, so the gate sees all rows; experts see the fresh ones.
            scores = self._scores(x_TH)
            pools_TE = sequence_pools(scores.selection_TE, self.spec.router, forward.plan.batch, forward.valid_BS)
            pools_RE = pick(pools_TE, rows)
            scores = Scores(*(pick(t, rows) for t in (scores.logits_TE, scores.selection_TE, scores.combine_TE)))
        else:
            scores = self._scores(x_RH)
        routing = route_fresh(
            scores,
            self.spec.router,
            rows,
            support,
            forward.config,
            cold=step.cold,
            dtype=x_TH.dtype,
            pools_RE=pools_RE,
            shared=self._shared_support(forward),
            by=self._selection(scores, rows, forward.config, x_TH.dtype, pools_RE),
        )
        support.count(forward.counters, self.index)
        return x_RH, routing

    def _selection(
        self,
        scores: Scores,
        rows: ListedRows | PaddedRows,
        config: EpochConfig,
        dtype: torch.dtype,
        pools_RE: Tensor | None,
    ) -> DeviceSelection | None:
        """Who chooses experts: the kernels for rows in their padded form, else torch."""
        if isinstance(rows, ListedRows):
            return None
        return DeviceSelection(scores, self._gate()[1], self.spec.router, config, rows, dtype, pools_RE)

    def _dense(
        self, x_BSH: Tensor, forward: ForwardPlan | DenseForward | None, visit: _Visit | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """All rows, all experts: the model's own function, and its router output."""
        visit = _Visit(self, x_BSH) if visit is None else visit
        spec, (batch, seq_len, hidden) = self.spec.router, x_BSH.shape
        x_TH = x_BSH.reshape(-1, hidden)
        valid_BS = None if forward is None else forward.valid_of(x_BSH)
        routing, scores = route(x_TH, *self._gate(), spec, batch=batch, valid_BS=valid_BS)
        router = (
            scores.logits_TE.view(batch, seq_len, spec.num_experts),
            routing.ids_TK.view(batch, seq_len, spec.top_k),
        )
        rows_R = forward.rows_of(x_BSH) if isinstance(forward, DenseForward) else None
        if rows_R is None:
            return self._experts(x_TH, routing, forward, visit), router
        valid = Routing(routing.ids_TK[rows_R], routing.weights_TK[rows_R])
        y_RH = self._experts(x_TH[rows_R], valid, forward, visit)
        return y_RH.new_zeros(x_TH.shape).index_copy_(0, rows_R, y_RH), router

    def _gate(self) -> tuple[Tensor, Tensor | None]:
        """Router weight ``[E,H]`` and expert bias ``[E]``."""
        bias = self.spec.gate_bias
        return _resolve(self, self.spec.gate_weight), None if bias is None else _resolve(self, bias)

    def _scores(self, x_TH: Tensor) -> Scores:
        weight_EH, bias_E = self._gate()
        return router_scores(router_logits(x_TH, weight_EH, self.spec.router), bias_E, self.spec.router)

    def _shared_support(self, forward: ForwardPlan) -> SharedSupport | None:
        """The exchange with ranks that have other sequences, where one support is kept for all."""
        if self.ep is None or self.ep.layout == "replicated" or forward.config.support_scope == "sequence":
            return None
        return SharedSupport(self.ep.ranks, self.name)

    @property
    def name(self) -> str:
        """For errors."""
        return f"MoE layer {self.index}"

    def _experts(
        self,
        x_RH: Tensor,
        routing: Routing,
        forward: ForwardPlan | DenseForward | None,
        visit: _Visit,
        shard: DenseShard | None = None,
    ) -> Tensor:
        """Routed experts of some rows, counted: all here, or wherever they are.

        What needs none of them, the shared expert and cached rows, is done while rows are under way.
        """
        x_RH = x_RH.to(product_dtype(x_RH))
        if self.ep is None:
            return self._run_local(x_RH, routing.ids_TK, routing.weights_TK, forward, visit, x_RH.shape[0])
        if torch.is_grad_enabled() and x_RH.requires_grad:
            raise RuntimeError("experts on several ranks have no backward pass: run under torch.no_grad()")
        return self.ep.run(
            x_RH,
            routing.ids_TK,
            routing.weights_TK,
            lambda x_NH, ids_NK, weights_NK: self._run_local(x_NH, ids_NK, weights_NK, forward, visit, x_RH.shape[0]),
            name=self.name,
            meanwhile=visit.compute_shared,
            meanwhile_back=None if shard is None else shard.copy_cached,
        )

    def _run_local(
        self,
        x_RH: Tensor,
        ids_RK: Tensor,
        weights_RK: Tensor,
        forward: ForwardPlan | DenseForward | None,
        visit: _Visit,
        own_rows: int,
    ) -> Tensor:
        """``[R,H]``: the weighted sum of the experts of this rank that the rows chose.

        Args:
            x_RH, ids_RK, weights_RK: rows, their experts (int64, -1 = none or another rank's), and weights.
            forward: under way, or None.
            own_rows: rows of this rank that the layer computes, here and elsewhere, for the counters.
        """
        # Rows of other ranks arrive in an order of their own.
        known = self.ep is None or (self.ep.layout == "replicated" and x_RH.shape[0] == own_rows)
        if isinstance(self.weights, ResidentExperts):
            return self._run_resident(self.weights, x_RH, ids_RK, weights_RK, forward, own_rows, known)
        if self.slot.listener is not None:
            self.slot.listener.observe(self.index, ids_RK, weights_RK, forward, known)
        stacked = visit.stacked
        requested = forward.config.backend if isinstance(forward, ForwardPlan) else self.backend
        backend = pick_backend(requested, stacked, x_RH, weights_RK)
        part, dtype = (None, None) if self.ep is None else (self.ep.part, torch.float32)
        worklist = worklist_for(backend, x_RH, ids_RK, stacked, part)
        if forward is not None:
            forward.counters.add_layer(self.index, own_rows, worklist.counts_E)
        return run_experts(x_RH, ids_RK, weights_RK, stacked, backend, worklist, dtype=dtype)

    def _run_resident(
        self,
        experts: ResidentExperts,
        x_RH: Tensor,
        ids_RK: Tensor,
        weights_RK: Tensor,
        forward: ForwardPlan | DenseForward | None,
        own_rows: int,
        known: bool,
    ) -> Tensor:
        """`_run_local` where some experts are outside of fast memory."""
        run = torch.compiler.disable(experts.run) if torch.compiler.is_compiling() else experts.run
        if forward is not None:
            forward.counters.add_layer(self.index, own_rows, count_pairs(ids_RK, experts.num_experts))
        requested = forward.config.backend if isinstance(forward, ForwardPlan) else self.backend
        part = None if self.ep is None else self.ep.part
        return run(x_RH, ids_RK, weights_RK, requested, forward, known, part)

    def incomplete(self, what: str) -> RuntimeError | None:
        """The error of what needs all experts, where they are not all here as tensors."""
        if isinstance(self.weights, ResidentExperts):
            return self.weights.refused(what)
        return None if self.ep is None or self.ep.ranks.world == 1 else self.ep.refused(what)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """The original's; where not all experts are here, theirs are names without values: see `AbsentTensor`."""
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        for key in self._expert_keys(state, prefix):
            if error := self.incomplete(f"the value of {key} in a state_dict"):
                state[key] = AbsentTensor(state[key], str(error))
        return state

    def _expert_keys(self, state_dict: Any, prefix: str) -> list[str]:
        own = tuple(f"{prefix}{name}" for name in (f"{self.spec.experts}.", *FUSED))
        return [key for key in state_dict if key.startswith(own)]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.weights, ResidentExperts) and self._expert_keys(state_dict, prefix):
            raise self.weights.refused("load_state_dict with experts")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> EpochMoEBlock:
        if isinstance(self.weights, ResidentExperts):
            with self.weights.without_parameters():
                self._original[0]._apply(fn, recurse)
            self.weights.apply(fn)
            return self
        # Through the original: its class may keep some tensors in their own dtype.
        self._original[0]._apply(fn, recurse)
        self.weights.release()  # else the old storage lives on beside the new one until the next forward
        return self

    def train(self, mode: bool = True) -> EpochMoEBlock:
        """Set the mode, also on the original, whose children are shared."""
        self._original[0].training = mode
        return super().train(mode)

    def extra_repr(self) -> str:
        """Family and routing, for `print(model)`."""
        router = self.spec.router
        return f"family={self.spec.family!r}, experts={router.num_experts}, top_k={router.top_k}, index={self.index}"


class _Visit:
    """What one forward of the block holds: weights that were checked for it, and the shared expert's output.

    Args:
        block: the block.
        x_BSH: its input.
        differentiable: gradients go to the experts' parameters.

    Raises:
        TypeError: the gate or an expert is no longer what `patch` found: an adapter was put on it, say.
    """

    def __init__(self, block: EpochMoEBlock, x_BSH: Tensor, *, differentiable: bool = False):
        self.block, self.x_BSH, self.differentiable = block, x_BSH, differentiable
        self._stacked: ExpertViews | None = None
        self._shared_BSH: Tensor | None = None
        if not torch.compiler.is_compiling():  # a traced forward sees the modules that there were
            block.spec.check_gate(block)

    @property
    def stacked(self) -> ExpertViews:
        """The experts' weights, checked when they are first asked for."""
        if self._stacked is None:
            weights = self.block.weights
            self._stacked = weights.differentiable() if self.differentiable else weights.ensure()
        return self._stacked

    @property
    def version(self) -> tuple[tuple[int, int], ...]:
        """Another value after every change of the router's and the experts' weights."""
        _ = self.stacked  # a change is noticed when the weights are asked for
        router = [t for t in self.block._gate() if t is not None]
        of_router = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in router]
        return (self.block.weights.version, *of_router)

    def compute_shared(self) -> None:
        """Compute the shared expert on all rows, if the block has one: done when there is time for it."""
        if self.block.spec.shared is not None:
            self._shared_BSH = getattr(self.block, self.block.spec.shared)(self.x_BSH)

    def shared(self) -> Tensor:
        """The shared expert's output ``[B,S,H]``."""
        if self._shared_BSH is None:
            self.compute_shared()
        assert self._shared_BSH is not None
        return self._shared_BSH


def _resolve(module: nn.Module, path: str) -> Tensor:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value  # type: ignore[no-any-return]
