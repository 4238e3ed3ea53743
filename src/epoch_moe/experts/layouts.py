"""The table of layouts: one linear layer per expert, one tensor per projection, or fused; in a block and in files.

Shape suffixes: E experts, F expert inner size, H hidden.

A layout says which parameters there are, in storage order, what a checkpoint calls them, and which part of the stacked
tensors ``[E,2F,H]`` and ``[E,H,F]`` each of them is. `epoch_moe.experts.weights` and the loading of checkpoints do the
rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epoch_moe.experts.bypassed import check_calls, check_linear
from epoch_moe.experts.views import ExpertViews

LayoutName = Literal["per_expert", "stacked", "fused"]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Layout:
    """One way to hold the experts of a layer: a row of the table, and the methods that follow from it.

    Args:
        experts: what holds the parameters: a sequence of modules, a module, or the block itself.

    Attributes:
        parts: names of the projections in storage order, the last one the down projection.
        name: of a part's tensor below the block, in a checkpoint and in a `state_dict`.
        each: every expert has tensors of its own, rather than a layer one per part.
        in_block: the block itself has the parameters, rather than a module of it.
        in_files, in_modules, short: the layout in words, for messages.
    """

    parts: tuple[str, ...] = PROJECTIONS
    name: str
    each = False
    in_block = False
    in_files: str
    in_modules: str
    short: str

    def __init__(self, experts: Any):
        self.experts = experts

    @classmethod
    def holder(cls, block: nn.Module, attribute: str = "experts") -> Any:
        """What holds the parameters in a block whose experts' module is this attribute; None where there is none."""
        return block if cls.in_block else getattr(block, attribute, None)

    @classmethod
    def count(cls, block: nn.Module) -> int | None:
        """The number of experts of a block that holds them so, or None."""
        holder = cls.holder(block)
        if isinstance(holder, nn.ModuleList):
            return None
        tensors = [getattr(holder, name, None) for name in cls.parts]
        if not all(isinstance(t, Tensor) and t.dim() == 3 for t in tensors):
            return None
        counts = {t.shape[0] for t in tensors if t is not None}
        return counts.pop() if len(counts) == 1 else None

    @classmethod
    def below(cls, attribute: str = "experts") -> tuple[str, ...]:
        """The names in a block that the experts' parameters are, or lie under."""
        return cls.parts if cls.in_block else (attribute,)

    @classmethod
    def key(cls) -> re.Pattern[str]:
        """A checkpoint's names of such tensors; group 1 is the block's path."""
        name = cls.name.replace(".", r"\.").format(expert=r"\d+", part=f"(?:{'|'.join(cls.parts)})")
        return re.compile(rf"(.*\.mlp)\.{name}")

    @classmethod
    def keys(cls, block: str, experts: range) -> list[str]:
        """Names of the tensors in a checkpoint, in storage order.

        Args:
            block: path of the MoE block, such as ``model.layers.1.mlp``.
            experts: numbers of the experts that are wanted; a tensor that holds a layer's is named whatever they are.
        """
        numbers = experts if cls.each else range(1)
        return [f"{block}.{cls.name.format(expert=number, part=part)}" for number in numbers for part in cls.parts]

    @classmethod
    def places(cls, gate_up_E2FH: Tensor | None = None, down_EHF: Tensor | None = None) -> list[Tensor]:
        """The parts of the stacked tensors, or of one of the two, that the parameters are, in storage order."""
        parts = [] if gate_up_E2FH is None else [*gate_up_E2FH.tensor_split(len(cls.parts) - 1, dim=1)]
        if down_EHF is not None:
            parts.append(down_EHF)
        if not cls.each:
            return parts
        return [part for expert in zip(*(part.unbind(0) for part in parts), strict=True) for part in expert]

    def owners(self) -> list[tuple[nn.Module, str]]:
        """The module that holds each parameter, and its name there, in storage order."""
        return [(self.experts, part) for part in self.parts]

    def params(self) -> list[nn.Parameter]:
        """The parameters in storage order."""
        return [module._parameters[name] for module, name in self.owners()]  # type: ignore[misc]

    def split_params(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters of the gate and up projections, and those of the down projections."""
        params, period = self.params(), len(self.parts)
        return [p for i, p in enumerate(params) if i % period != period - 1], params[period - 1 :: period]

    def bypassed(self) -> list[nn.Module]:
        """The modules whose forward is never called, as their parameters are read."""
        return [self.experts]

    def sizes(self) -> tuple[int, int, int]:
        """(E, F, H)."""
        num_experts, inner, hidden = getattr(self.experts, self.parts[0]).shape
        return num_experts, inner, hidden

    def _named(self) -> list[tuple[str, Any]]:
        """Parameters and their names in errors, where nothing is put around the modules that hold them."""
        return [(self.name.format(part=part), getattr(self.experts, part, None)) for part in self.parts]

    def check(self) -> None:
        """Refuse parameters that cannot be stacked, quoting the first offender.

        Raises:
            TypeError: not plain parameters of one floating dtype on one device.
            ValueError: of shapes that do not fit together.
        """
        named = self._named()
        check_tensors(named)
        num_experts, inner, hidden = self.sizes()
        stacked = torch.empty(num_experts, 2 * inner, hidden, device="meta")
        places = self.places(stacked, stacked.new_empty(num_experts, hidden, inner))
        for (where, weight), place in zip(named, places, strict=True):
            if weight.shape != place.shape:
                raise ValueError(f"{where} has shape {tuple(weight.shape)}: expected {tuple(place.shape)}")


class PerExpert(Layout):
    """A sequence of modules with ``gate_proj``, ``up_proj`` ([F,H]) and ``down_proj`` ([H,F]) linear layers."""

    name = "experts.{expert}.{part}.weight"
    each = True
    in_files = "mlp.experts.<i>.{gate,up,down}_proj.weight (as released)"
    in_modules = "`experts` (a ModuleList of gate_proj/up_proj/down_proj MLPs)"
    short = "one tensor each"

    @classmethod
    def count(cls, block: nn.Module) -> int | None:
        """See `Layout.count`; of a list of which a part is here (`LocalExperts`), all."""
        experts = cls.holder(block)
        if not isinstance(experts, nn.ModuleList) or not len(experts):
            return None
        known = all(hasattr(experts[0], name) for name in cls.parts)
        return getattr(experts, "total", len(experts)) if known else None

    def bypassed(self) -> list[nn.Module]:
        """Their list, the experts, and their linear layers."""
        modules = [self.experts] if isinstance(self.experts, nn.Module) else []
        return [*modules, *self.experts, *(module for module, _ in self.owners())]

    def owners(self) -> list[tuple[nn.Module, str]]:
        """The linear layers."""
        return [(expert._modules[part], "weight") for expert in self.experts for part in self.parts]

    def sizes(self) -> tuple[int, int, int]:
        """(E, F, H)."""
        inner, hidden = getattr(self.experts[0], self.parts[0]).weight.shape
        return len(self.experts), inner, hidden

    def _named(self) -> list[tuple[str, Any]]:
        named = []
        for index, expert in enumerate(self.experts):
            check_calls(f"experts[{index}]", expert)
            for part in self.parts:
                linear, where = getattr(expert, part, None), f"experts[{index}].{part}"
                check_linear(where, linear)
                named.append((f"{where}.weight", getattr(linear, "weight", None)))
        _check_activation(self.experts[0])
        return named


class StackedExperts(Layout):
    """A module with parameters ``gate_proj``, ``up_proj`` [E,F,H] and ``down_proj`` [E,H,F] (dFactory)."""

    name = "experts.{part}"
    in_files = "mlp.experts.{gate,up,down}_proj (dFactory)"
    in_modules = "`experts` (one module with gate_proj, up_proj and down_proj as [experts, ...] parameters)"
    short = "stacked by projection"

    def _named(self) -> list[tuple[str, Any]]:
        check_calls("experts", self.experts)
        _check_activation(self.experts)
        return super()._named()


class FusedExperts(Layout):
    """A block with parameters ``w1`` [E,2F,H], gate above up, and ``w2`` [E,H,F] (dInfer): stacked already."""

    parts = ("w1", "w2")
    name = "{part}"
    in_block = True
    in_files = "mlp.w1, mlp.w2 (dInfer)"
    in_modules = "`w1` [experts, 2 x inner, hidden] and `w2` [experts, hidden, inner]"
    short = "fused into w1 and w2"

    def bypassed(self) -> list[nn.Module]:
        """None: the block is what is patched."""
        return []

    def sizes(self) -> tuple[int, int, int]:
        """(E, F, H)."""
        num_experts, hidden, inner = self.experts.w2.shape
        return num_experts, inner, hidden


LAYOUTS: dict[LayoutName, type[Layout]] = {"per_expert": PerExpert, "stacked": StackedExperts, "fused": FusedExperts}
SHAPES = " or ".join(layout.in_modules for layout in LAYOUTS.values())
"""What a block with experts has, in words."""


def find_experts(block: nn.Module) -> tuple[LayoutName, int] | None:
    """The layout of a block's experts and their number, or None where it has none of a known shape."""
    counts = ((name, layout.count(block)) for name, layout in LAYOUTS.items())
    return next(((name, count) for name, count in counts if count is not None), None)


def layout_of(keys: Iterable[str]) -> LayoutName:
    """How a checkpoint with tensors of these names holds its experts."""
    names = list(keys)
    whole_layers_first = sorted(LAYOUTS.items(), key=lambda item: item[1].each)
    held = (name for name, layout in whole_layers_first if any(map(layout.key().fullmatch, names)))
    return next(held, "per_expert")


def is_expert(key: str) -> bool:
    """Whether a checkpoint's tensor of this name holds routed experts, in whatever layout."""
    return any(layout.key().fullmatch(key) for layout in LAYOUTS.values())


def stored_parts(layout: LayoutName, block: str, experts: range, stacked: ExpertViews) -> dict[str, Tensor]:
    """A block's tensors in a checkpoint, by name, and the part of the stacked tensors that each of them is.

    Args:
        layout: of the checkpoint.
        block: path of the MoE block, such as ``model.layers.1.mlp``.
        experts: numbers of the experts that the stacked tensors hold.
        stacked: fused tensors on any device: on meta, the parts say shapes.
    """
    kind = LAYOUTS[layout]
    return dict(zip(kind.keys(block, experts), kind.places(stacked.gate_up_E2FH, stacked.down_EHF), strict=True))


def _check_activation(expert: nn.Module) -> None:
    activation = getattr(expert, "act_fn", None)
    x = torch.linspace(-4.0, 4.0, 9, dtype=torch.float32, device="cpu")
    if callable(activation) and not torch.allclose(activation(x), F.silu(x), atol=1e-6):
        raise TypeError(f"the experts' act_fn is {activation!r}: the LLaDA family's experts have silu")


def check_tensors(named: Sequence[tuple[str, Any]]) -> None:
    """Refuse what are not plain parameters of one floating dtype on one device, see `Layout.check`."""
    first_name, first = named[0]
    for where, weight in named:
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
            kind = type(weight.data if isinstance(weight, nn.Parameter) else weight).__name__
            advice = ": gather it with full_tensor()" if kind == "DTensor" else ""
            raise TypeError(f"{where} is {kind}: expected a plain nn.Parameter{advice}")
        if weight.device.type == "meta":
            raise TypeError(
                f"{where} is on the meta device: load it first. Where accelerate offloads it (device_map, "
                "cpu_offload): load the model without offloading, or undo that with "
                "accelerate.hooks.remove_hook_from_submodules"
            )
        if weight.dtype not in _DTYPES:
            raise TypeError(
                f"{where} has dtype {weight.dtype}: quantised experts are not supported; load the model in bfloat16, "
                "float16 or float32"
            )
        if weight.dtype != first.dtype or weight.device != first.device:
            raise TypeError(
                f"{where} is {weight.dtype} on {weight.device}, {first_name} is {first.dtype} on {first.device}: all "
                "experts of a layer must agree"
            )
    if len({id(weight) for _, weight in named}) < len(named):
        raise TypeError("two experts share one parameter: each needs its own to become a part of the stacked tensor")
