"""`EpochMoEBlock`: a mixture-of-experts layer that computes only what a block plan asks for.

With a plan, a forward of the layer is: pick the fresh rows, route them inside the support, send their pairs down the
lane, restore the dense shard from fresh and cached outputs, add the shared expert. Without one it is the model's own
function.

Shape suffixes: B sequences, S positions, T = B x S rows, R fresh rows, H hidden, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from epoch_moe.checks import choice, instance
from epoch_moe.config import EpochConfig
from epoch_moe.experts.absent import AbsentTensor
from epoch_moe.experts.layouts import LAYOUTS
from epoch_moe.experts.run import BACKENDS, Backend
from epoch_moe.experts.views import ExpertViews
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.freshlane.dispatcher import FreshLaneDispatcher
from epoch_moe.freshlane.lane import DenseLane, Forward, ListedLane
from epoch_moe.freshlane.padded import PaddedLane, compact_for
from epoch_moe.plan.forward import ForwardPlan
from epoch_moe.plan.packed import Compact, PaddedRows
from epoch_moe.plan.slot import PlanSlot
from epoch_moe.precision import product_dtype
from epoch_moe.spec import BlockSpec


class EpochMoEBlock(nn.Module):
    """A drop-in replacement for a released MoE block, around the same parameters.

    It shares the original's dictionaries of children, parameters, buffers and hooks: keys and values of `state_dict`
    stay as they were, hooks keep running, and whatever is replaced in one of the two is replaced in the other. Other
    attributes are forwarded to the original.

    Args:
        original: the block to replace; kept, untouched but for its experts' storage, for `unpatch`.
        spec: how it is built.
        slot: where the plan of a forward is found; one for all blocks of a model. None: one of its own.
        index: this layer's place among the model's MoE layers.
        backend: how routed experts are computed; under a plan its own configuration decides.
        dispatcher: brings rows to the ranks that own their experts; None: all experts are here.

    Attributes:
        weights: the routed experts.

    Raises:
        TypeError, ValueError: ``original`` is not built as ``spec`` says, see `BlockSpec.check`.

    Example:
        >>> import torch
        >>> from epoch_moe import BlockSpec, EpochMoEBlock, RouterSpec
        >>> class Mixture(torch.nn.Module):  # w1: gate above up projections, w2: down projections
        ...     def __init__(self, experts=4, hidden=16, inner=8):
        ...         super().__init__()
        ...         self.gate = torch.nn.Linear(hidden, experts, bias=False)
        ...         self.w1 = torch.nn.Parameter(torch.randn(experts, 2 * inner, hidden))
        ...         self.w2 = torch.nn.Parameter(torch.randn(experts, hidden, inner))
        ...
        >>> router = RouterSpec(kind="softmax", num_experts=4, top_k=2)
        >>> spec = BlockSpec(family="mine", router=router, gate_weight="gate.weight", gate_bias=None, layout="fused")
        >>> block = EpochMoEBlock(Mixture(), spec)
        >>> block(torch.randn(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    weights: ExpertWeights
    dispatcher: FreshLaneDispatcher

    def __init__(
        self,
        original: nn.Module,
        spec: BlockSpec,
        slot: PlanSlot | None = None,
        index: int = 0,
        backend: Backend = "auto",
        dispatcher: FreshLaneDispatcher | None = None,
    ):
        instance("original", original, nn.Module, "the MoE block to replace (torch.nn.Module)")
        instance("spec", spec, BlockSpec, "a BlockSpec")
        if dispatcher is None:
            dispatcher = FreshLaneDispatcher(spec.router.num_experts, layout="local")
        choice("backend", backend, BACKENDS)
        spec.check(original, dispatcher.local_experts)
        super().__init__()
        for name in list(self.__dict__):  # what nn.Module itself keeps
            self.__dict__[name] = original.__dict__[name]
        self.spec, self.index, self.backend = spec, index, backend
        self.slot = PlanSlot() if slot is None else slot
        # Past nn.Module, which would register it as a child of the original too.
        self.__dict__["dispatcher"] = dispatcher
        self._original = (original,)  # in a tuple, so that it is not registered as a child
        experts = spec.holder(original)
        # A block of our own model classes has stacked its experts already: share that storage.
        existing = original.__dict__.get("_weights")
        if not isinstance(existing, ExpertWeights) or existing.experts is not experts:
            existing = ExpertWeights(experts, spec.layout)
        self.weights = existing

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Any]:
        """``[B,S,H] -> [B,S,H]``, or what the original returns.

        Under a plan the second half of LLaDA2's tuple is None: router logits of reused rows do not exist. A caller
        that asks the model for router logits gets a dense forward.
        """
        under_way = self.slot.active
        if under_way is not None and torch.compiler.is_compiling():
            # A plan and its counters are another Python state on every forward: traced, they would be compiled anew.
            return torch.compiler.disable(self._compute)(hidden_states, under_way)  # type: ignore[no-any-return]
        return self._compute(hidden_states, under_way)

    def _compute(self, x_BSH: Tensor, under_way: Forward) -> Tensor | tuple[Tensor, Any]:
        shared: list[Tensor] = []

        def meanwhile() -> None:  # called once, while rows travel
            if self.spec.shared is not None:
                shared.append(getattr(self, self.spec.shared)(x_BSH))

        lane = self._open_lane(x_BSH, under_way, meanwhile)
        x_RH, routing = lane.route(x_BSH)  # the fresh rows, inside the support
        y_RH = lane.run(x_RH, routing)  # their pairs, wherever the experts are
        out = lane.restore(y_RH).view_as(x_BSH)  # fresh and cached rows: the dense shard
        if shared:
            out = out + shared[0]
        return (out, lane.router_output) if self.spec.returns_router else out

    def _open_lane(self, x_BSH: Tensor, under_way: Forward, meanwhile: Callable[[], None]) -> DenseLane:
        """What the forward under way does with this layer's rows.

        Raises:
            TypeError: the gate or an expert is no longer what `patch` found.
            RuntimeError: a plan is active, and the model is in training mode or gradients are required.
        """
        gate_EH, bias_E = self.spec.read_gate(self)
        differentiable = under_way is None and torch.is_grad_enabled()
        views = self.weights.differentiable() if differentiable else self.weights.ensure()
        step, backend = None, self.backend
        if isinstance(under_way, ForwardPlan):
            # The kernels compute in the dtype of their weights, whatever autocast says.
            dtype = product_dtype(x_BSH) if under_way.plan.compact is None else views.down_EHF.dtype
            step = under_way.enter(self.index, x_BSH, dtype, (self.weights.version, *_versions(gate_EH, bias_E)))
            backend = under_way.config.backend
        if step is not None:
            self._check_no_gradients(x_BSH)
        form = DenseLane if step is None else PaddedLane if isinstance(step.rows, PaddedRows) else ListedLane
        return form(
            index=self.index,
            router=self.spec.router,
            gate_EH=gate_EH,
            bias_E=bias_E,
            experts=self.weights,
            views=views,
            dispatcher=self.dispatcher,
            backend=backend,
            forward=under_way,
            step=step,
            listener=self.slot.listener,
            meanwhile=meanwhile,
        )

    @property
    def routing_block(self) -> int | None:
        """Rows that share a pool of experts (LLaDA2.2), or None where every row routes for itself."""
        return self.spec.router.block_size

    def compact_for(self, config: EpochConfig, layers: Sequence[ExpertViews]) -> Compact | None:
        """What packs the rows of a plan on the device, or None where rows must be lists."""
        # Experts outside of fast memory are chosen by lists of rows, and so are rows that travel.
        lists = self.dispatcher.ranks is not None or self.slot.listener is not None
        return None if lists else compact_for(config, layers)

    def _check_no_gradients(self, x_BSH: Tensor) -> None:
        if self.training:
            raise RuntimeError("a block plan is active and the model is in training mode: call model.eval() to decode")
        if torch.is_grad_enabled() and (x_BSH.requires_grad or any(p.requires_grad for p in self.parameters())):
            raise RuntimeError(
                "a block plan is active and gradients are required: reused rows have none. Decode under "
                "torch.no_grad(), or train without a plan"
            )

    @property
    def original(self) -> nn.Module:
        """The block that this one replaced, as `unpatch` gives it back."""
        return self._original[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(self._original[0], name)

    def incomplete(self, what: str) -> RuntimeError | None:
        """The error of what needs all experts, where they are not all here as tensors."""
        return self.weights.refused(what) or self.dispatcher.refused(what)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """The original's; where not all experts are here, theirs are names without values: see `AbsentTensor`."""
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        for key in self._expert_keys(state, prefix):
            if error := self.incomplete(f"the value of {key} in a state_dict"):
                whole = state[key]
                state[key] = AbsentTensor(whole.shape, whole.dtype, whole.device, str(error))
        return state

    def _expert_keys(self, state_dict: Any, prefix: str) -> list[str]:
        own = {f"{prefix}{name}" for name in LAYOUTS[self.spec.layout].below(self.spec.experts)}
        return [key for key in state_dict if any(key == name or key.startswith(f"{name}.") for name in own)]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        if self._expert_keys(state_dict, prefix) and (error := self.weights.refused("load_state_dict with experts")):
            raise error
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> EpochMoEBlock:
        # Through the original: its class may keep some tensors in their own dtype.
        self.weights.follow(fn, lambda: self._original[0]._apply(fn, recurse))
        return self

    def train(self, mode: bool = True) -> EpochMoEBlock:
        """Set the mode, also on the original, whose children are shared."""
        self._original[0].training = mode
        return super().train(mode)

    def extra_repr(self) -> str:
        """Family and routing, for `print(model)`."""
        router = self.spec.router
        return f"family={self.spec.family!r}, experts={router.num_experts}, top_k={router.top_k}, index={self.index}"


def _versions(*tensors: Tensor | None) -> list[tuple[int, int]]:
    """Another value after every change of the tensors, but for writes through ``.data``."""
    return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors if t is not None]
