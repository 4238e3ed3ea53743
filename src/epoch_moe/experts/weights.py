"""Stacked expert storage that the model's own per-expert parameters view.

Shape suffixes: E experts, F expert inner size, H hidden.

A released checkpoint holds three linear layers per expert. Grouped matrix products want one tensor. Here the
tensors are allocated once per layer, and each expert's parameters become views of them: no second copy of the
weights, and `state_dict` keys and values stay as they were.

The alias breaks silently when somebody replaces a parameter's storage (`.to(dtype)`, `copy.deepcopy`, `pickle`,
`load_state_dict(assign=True)`), so `ExpertWeights.ensure` compares addresses before use and stacks again where
they differ.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class _StackedView(torch.autograd.Function):
    """A stacked buffer as a differentiable function of the parameters that view it, without a copy."""

    @staticmethod
    def forward(ctx: Any, stacked: Tensor, rows: int, *params: Tensor) -> Tensor:
        ctx.rows = rows
        return stacked.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        # `rows` rows of the middle dimension belong to each parameter: gate above up, or down alone.
        parts = [chunk for expert in grad.unbind(0) for chunk in expert.split(ctx.rows, dim=0)]
        return (None, None, *parts)


@dataclass(frozen=True)
class Stacked:
    """Weights of one layer's experts as the grouped path reads them.

    Attributes:
        gate_up_E2FH: ``[E, 2F, H]``; rows ``:F`` are the gate projection, ``F:`` the up projection.
        down_EHF: ``[E, H, F]``.
    """

    gate_up_E2FH: Tensor
    down_EHF: Tensor

    @property
    def bytes_per_expert(self) -> int:
        """Bytes that one active expert makes a forward read."""
        per = self.gate_up_E2FH[0].numel() + self.down_EHF[0].numel()
        return per * self.gate_up_E2FH.element_size()


class ExpertWeights:
    """One layer's experts: stacked tensors plus the per-expert modules whose parameters view them.

    Args:
        experts: modules with ``gate_proj``, ``up_proj`` ([F,H]) and ``down_proj`` ([H,F]) linear layers, all of one
            shape, dtype and device.
    """

    def __init__(self, experts: Sequence[nn.Module]):
        self.experts = experts
        self._stacked: Stacked | None = None
        self._addresses: tuple[int, ...] = ()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertWeights:
        # The copy stacks its own parameters on first use: sharing or copying the buffers would double the memory.
        return ExpertWeights(copy.deepcopy(self.experts, memo))

    def __getstate__(self) -> dict[str, Any]:
        return {"experts": self.experts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["experts"])  # type: ignore[misc]

    def _current_params(self) -> list[nn.Parameter]:
        """The parameters in storage order: gate, up and down of each expert."""
        # Through the module dictionaries: attribute access on modules is ten times slower, and this runs before every
        # block (and every forward without a plan).
        return [
            expert._modules[name]._parameters["weight"]  # type: ignore[union-attr, misc]
            for expert in self.experts
            for name in PROJECTIONS
        ]

    def _current_addresses(self) -> tuple[int, ...] | None:
        try:
            return tuple([param.data_ptr() for param in self._current_params()])
        except (KeyError, AttributeError):
            return None  # a projection was replaced (an adapter, say); `check` names it

    def is_stacked(self) -> bool:
        """True where every parameter still lies at its place in the stacked tensors."""
        return self._stacked is not None and self._current_addresses() == self._addresses

    def ensure(self) -> Stacked:
        """The stacked tensors, stacked anew where a parameter's storage was replaced since the last use.

        Peak extra memory while stacking: the gate and up projections of this layer's experts.
        """
        if not self.is_stacked():
            with self._lock:
                if not self.is_stacked():
                    self._stack()
        assert self._stacked is not None
        return self._stacked

    @property
    def stacked(self) -> Stacked:
        """The stacked tensors as `ensure` left them, unchecked: for callers that checked earlier in the same block."""
        if self._stacked is None:
            raise RuntimeError("the experts are not stacked: call ensure() first")
        return self._stacked

    def release(self) -> None:
        """Drop the stacked tensors where parameters have left them, so that old storage does not outlive `.to()`."""
        if not self.is_stacked():
            self._stacked, self._addresses = None, ()

    def differentiable(self) -> Stacked:
        """`ensure`, as a function of the parameters for autograd (no copy; gradients arrive per expert)."""
        stacked = self.ensure()
        # Asked anew: another Parameter over the same storage (frozen weights wrapped again, say) must get the gradient.
        params = self._current_params()
        gate_up_params = [p for i, p in enumerate(params) if i % 3 != 2]
        down_params = params[2::3]
        inner, hidden = stacked.down_EHF.shape[2], stacked.down_EHF.shape[1]
        return Stacked(
            _StackedView.apply(stacked.gate_up_E2FH, inner, *gate_up_params),
            _StackedView.apply(stacked.down_EHF, hidden, *down_params),
        )

    def check(self) -> None:
        """Refuse weights that cannot be stacked, quoting the first offender."""
        first: Tensor | None = None
        for index, expert in enumerate(self.experts):
            for name in PROJECTIONS:
                linear = getattr(expert, name, None)
                weight = getattr(linear, "weight", None)
                where = f"experts[{index}].{name}"
                if type(weight) is not nn.Parameter:
                    raise TypeError(f"{where}.weight is {type(weight).__name__}: expected a plain nn.Parameter")
                if getattr(linear, "bias", None) is not None:
                    raise TypeError(f"{where} has a bias: the LLaDA family's experts have none")
                if weight.device.type == "meta":
                    raise TypeError(f"{where}.weight is on the meta device: load or materialise it first")
                if not weight.is_floating_point():
                    raise TypeError(f"{where}.weight has dtype {weight.dtype}: quantised experts are not supported")
                first = weight if first is None else first
                if weight.dtype != first.dtype or weight.device != first.device:
                    raise TypeError(
                        f"{where}.weight is {weight.dtype} on {weight.device}, experts[0] is {first.dtype} on "
                        f"{first.device}: all experts of a layer must agree"
                    )

    # Tensors made in inference mode could never be trained, and the parameters become views of these.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _stack(self) -> None:
        self.check()
        self._stacked = None
        gate0 = self.experts[0].gate_proj.weight  # type: ignore[union-attr]
        num_experts, (inner, hidden) = len(self.experts), gate0.shape  # type: ignore[misc]
        new = {"dtype": gate0.dtype, "device": gate0.device}
        for index, expert in enumerate(self.experts):
            shapes = tuple(tuple(getattr(expert, name).weight.shape) for name in PROJECTIONS)
            if shapes != ((inner, hidden), (inner, hidden), (hidden, inner)):
                raise ValueError(
                    f"experts[{index}] has weight shapes {shapes}: expected gate and up [{inner}, {hidden}] and down "
                    f"[{hidden}, {inner}] as experts[0] has"
                )
        gate_up_E2FH = torch.empty(num_experts, 2 * inner, hidden, **new)  # type: ignore[arg-type]
        for index, expert in enumerate(self.experts):
            self._rebind(expert.gate_proj, gate_up_E2FH[index, :inner])  # type: ignore[arg-type]
            self._rebind(expert.up_proj, gate_up_E2FH[index, inner:])  # type: ignore[arg-type]
        down_EHF = torch.empty(num_experts, hidden, inner, **new)  # type: ignore[arg-type]
        for index, expert in enumerate(self.experts):
            self._rebind(expert.down_proj, down_EHF[index])  # type: ignore[arg-type]
        self._stacked = Stacked(gate_up_E2FH, down_EHF)
        self._addresses = tuple(p.data_ptr() for p in self._current_params())

    @staticmethod
    def _rebind(linear: nn.Module, slot: Tensor) -> None:
        weight = linear._parameters["weight"]
        assert weight is not None
        slot.copy_(weight)
        # Assigning `.data` keeps the Parameter object (optimizers, hooks, tied references) and frees its old storage.
        weight.data = slot
