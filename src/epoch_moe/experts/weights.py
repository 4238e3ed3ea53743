"""Stacked expert weights that the model's own parameters are views of.

Shape suffixes: E experts, F expert inner size, H hidden.

A released checkpoint holds three linear layers per expert. Grouped matrix products want one tensor. Here the
tensors are allocated once per layer, and the experts' parameters become views of them: no second copy of the
weights, and `state_dict` keys and values stay as they were. Parameters that lie in such a tensor already (fused ones
always do) stay where they are.

The alias breaks silently when somebody replaces a parameter or its storage (`.to(dtype)`, `copy.deepcopy`, `pickle`,
`load_state_dict(assign=True)`, ``param.data = ...``), so `ExpertWeights.ensure`, the one way to the stacked tensors,
compares addresses on every forward and stacks again where they differ.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import Tensor, nn

from epoch_moe.experts.absent import absent_views
from epoch_moe.experts.layouts import LAYOUTS, Layout, LayoutName
from epoch_moe.experts.run import Backend, pick_backend, run_experts, worklist_for
from epoch_moe.experts.views import ExpertViews
from epoch_moe.precision import product_dtype


class _StackedView(torch.autograd.Function):
    """A stacked buffer as a differentiable function of the parameters that view it, without a copy."""

    @staticmethod
    def forward(ctx: Any, stacked: Tensor, places: Callable[[Tensor], Sequence[Tensor]], *params: Tensor) -> Tensor:
        ctx.places = places
        return stacked.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return (None, None, *ctx.places(grad))


class _Seen:
    """What a layer's modules and parameters were when they were stacked.

    Compared on every forward of every layer, for hundreds of modules: so it is done in C, and what must be empty is
    asked for that alone. Nothing less would do: assigning ``.data`` of one expert leaves no other trace.
    """

    def __init__(self, layout: Layout):
        modules, owners = layout.bypassed(), layout.owners()
        children = [m._modules for m in modules]
        hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._empty = [*hooks, *(each for each in children if not each)]
        self._children = [each for each in children if each]
        self._children_then = list(map(dict, self._children))
        self._attributes = [m.__dict__ for m in modules]  # a forward of a module's own is one more
        self._attributes_then = sum(map(len, self._attributes))
        self._owners, self._names = [module._parameters for module, _ in owners], [name for _, name in owners]
        self._params: list[nn.Parameter | None] = [*layout.params()]
        self._addresses = list(map(Tensor.data_ptr, layout.params()))

    def holds(self) -> bool:
        """Whether they are still the same, at the same addresses, and nobody wrapped or hooked them."""
        try:
            self._params = list(map(getitem, self._owners, self._names))
            addresses = list(map(Tensor.data_ptr, self._params))  # type: ignore[arg-type]
        except (KeyError, TypeError):
            return False  # a parameter is gone; `check` names the module
        return (
            addresses == self._addresses
            and not any(self._empty)
            and self._children == self._children_then
            and sum(map(len, self._attributes)) == self._attributes_then
        )

    def writes(self) -> int:
        """How often the parameters that `holds` saw last were written to, all together."""
        try:
            return sum(map(attrgetter("_version"), self._params))
        except RuntimeError:
            return 0  # made in inference mode: nothing counts


class ExpertWeights:
    """One layer's experts: stacked tensors plus the modules whose parameters view them.

    Args:
        experts: what holds the parameters: a sequence of modules with ``gate_proj``, ``up_proj`` ([F,H]) and
            ``down_proj`` ([H,F]) linear layers; a module with these as stacked parameters; or a block with ``w1``
            and ``w2``.
        layout: which of the three; see `epoch_moe.experts.layouts`.

    Attributes:
        moved_bytes: bytes that were copied when the experts were stacked last.
        peak_bytes: the most that existed twice at one time while doing so.
    """

    def __init__(self, experts: Any, layout: LayoutName = "per_expert"):
        self.experts = experts
        self.layout_name = layout
        self.layout: Layout = LAYOUTS[layout](experts)
        self.moved_bytes = self.peak_bytes = 0
        self._stacked: ExpertViews | None = None
        self._seen: _Seen | None = None
        self._stackings = 0
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertWeights:
        # The copy stacks its own parameters on first use: sharing or copying the buffers would double the memory.
        return ExpertWeights(copy.deepcopy(self.experts, memo), self.layout_name)

    def __getstate__(self) -> dict[str, Any]:
        return {"experts": self.experts, "layout": self.layout_name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["experts"], state.get("layout", "per_expert"))  # type: ignore[misc]

    def is_stacked(self) -> bool:
        """True where every parameter still lies at its place in the stacked tensors, and no module was replaced."""
        seen = self._seen
        return self._stacked is not None and seen is not None and seen.holds()

    @property
    def version(self) -> tuple[int, int]:
        """Another value after every change of the weights, in place too, but for writes through ``param.data``."""
        seen = self._seen
        return self._stackings, 0 if seen is None else seen.writes()

    def ensure(self) -> ExpertViews:
        """The stacked tensors, stacked anew where a parameter's storage was replaced since the last use.

        Peak extra memory while stacking: the gate and up projections of this layer's experts.

        A compiled forward cannot compare addresses. There, only what `release` was told of (`.to()`,
        `load_state_dict`) is noticed.
        """
        stacked = self._stacked
        if stacked is not None and torch.compiler.is_compiling():
            return stacked
        if not self.is_stacked():
            with self._lock:
                if not self.is_stacked():
                    self._stack()
        assert self._stacked is not None
        return self._stacked

    def release(self) -> None:
        """Drop the stacked tensors where parameters have left them, so that old storage does not outlive `.to()`."""
        if not self.is_stacked():
            self._stacked = self._seen = None

    def differentiable(self) -> ExpertViews:
        """`ensure`, as a function of the parameters for autograd (no copy; gradients arrive per parameter)."""
        stacked = self.ensure()
        # Asked anew: another Parameter over the same storage (frozen weights wrapped again, say) must get the gradient.
        gate_up_params, down_params = self.layout.split_params()
        return ExpertViews.fused(
            _StackedView.apply(stacked.gate_up_E2FH, self.layout.places, *gate_up_params),
            _StackedView.apply(stacked.down_EHF, partial(self.layout.places, None), *down_params),
        )

    def compute(
        self,
        x_NH: Tensor,
        ids_NK: Tensor,
        weights_NK: Tensor,
        views: ExpertViews,
        *,
        backend: Backend = "auto",
        part: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
        tell: Callable[[], Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weighted sum of each row's experts ``[N,H]``, and pairs per expert (int64 ``[E]``).

        Args:
            x_NH, ids_NK, weights_NK: rows, their experts and weights, as `run_experts` takes them.
            views: as `ensure` or `differentiable` gave them for this forward.
            backend: as configured, see `pick_backend`.
            part, dtype: see `run_experts`.
            tell: called with nothing, first.
        """
        if tell is not None:
            tell()
        picked = pick_backend(backend, views, x_NH, weights_NK)
        worklist = worklist_for(picked, x_NH, ids_NK, views, part)
        return run_experts(x_NH, ids_NK, weights_NK, views, picked, worklist, dtype=dtype), worklist.counts_E

    def as_linear(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """`compute` as linear layers do: differentiable, in autocast's dtype; ``[T,H]``."""
        views = self.differentiable() if torch.is_grad_enabled() else self.ensure()
        return self.compute(x_TH.to(product_dtype(x_TH)), ids_TK, weights_TK, views)[0]

    def follow(self, fn: Callable[[Tensor], Tensor], move: Callable[[], object]) -> None:
        """`nn.Module._apply` of a block: ``move()`` applies ``fn`` to its parameters, stacked tensors follow."""
        move()
        self.release()  # else the old storage lives on beside the new one until the next forward

    def pick(self, requested: Backend) -> Backend:
        """How they are computed; an impossible request is refused, see `pick_backend`."""
        return pick_backend(requested, self.ensure())

    def refused(self, what: str) -> RuntimeError | None:
        """The error of what needs all experts as tensors: None, they are here."""
        return None

    def outline(self) -> ExpertViews:
        """What `ensure` would give, without memory: to ask whether a backend fits."""
        param = self.layout.params()[0]
        return absent_views(*self.layout.sizes(), param.dtype, param.device, "an outline of experts has no values")

    # Tensors made in inference mode could never be trained, and the parameters become views of these.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _stack(self) -> None:
        self._stacked = self._seen = None
        self.layout.check()
        num_experts, inner, hidden = self.layout.sizes()
        gate_up, down = self.layout.split_params()
        self.moved_bytes = self.peak_bytes = 0
        gate_up_E2FH = self._gather(gate_up, (num_experts, 2 * inner, hidden), self.layout.places)
        down_EHF = self._gather(down, (num_experts, hidden, inner), partial(self.layout.places, None))
        self._seen = _Seen(self.layout)
        self._stackings += 1
        self._stacked = ExpertViews.fused(gate_up_E2FH, down_EHF)

    def _gather(
        self,
        params: Sequence[nn.Parameter],
        shape: tuple[int, int, int],
        places: Callable[[Tensor], Sequence[Tensor]],
    ) -> Tensor:
        """The tensor that ``params`` are parts of: theirs where they lie so already, or a new one they move into."""
        first = params[0]
        found = _around(first, shape)
        if found is not None and all(map(_is_same_memory, params, places(found))):
            return found
        new = torch.empty(shape, dtype=first.dtype, device=first.device)
        for param, slot in zip(params, places(new), strict=True):
            slot.copy_(param)
            # Assigning `.data` keeps the Parameter object (optimizers, hooks, ties) and frees its old storage.
            param.data = slot
        size = new.numel() * new.element_size()
        self.moved_bytes += size
        self.peak_bytes = max(self.peak_bytes, size)
        return new


def _around(first: Tensor, shape: tuple[int, int, int]) -> Tensor | None:
    """A contiguous tensor of that shape that begins where ``first`` does, if its storage reaches so far."""
    num_experts, rows, columns = shape
    end = first.storage_offset() + num_experts * rows * columns
    if first.is_inference() or end * first.element_size() > first.untyped_storage().nbytes():
        return None
    return first.detach().as_strided(shape, (rows * columns, columns, 1))


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
