"""The table of layouts: one linear layer per expert, one tensor per projection, or fused; in a block and in files.

Shape suffixes: E experts, F expert inner size, H hidden.

A layout says which parameters there are, in storage order, what a checkpoint calls them, and which part of the stacked
tensors ``[E,2F,H]`` and ``[E,H,F]`` each of them is. `epoch_moe.experts.weights` and the loading of checkpoints do the
rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epoch_moe.experts.bypassed import check_calls, check_linear

LayoutName = Literal["per_expert", "stacked", "fused"]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
FUSED = ("w1", "w2")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Layout(Protocol):
    """One way to hold the experts of a layer.

    Attributes:
        period: the last of every ``period`` parameters belongs to the down projections, the others to gate and up.
        key: a checkpoint's names of such tensors; group 1 is the block's path.
    """

    period: int
    key: re.Pattern[str]

    @staticmethod
    def keys(block: str, experts: range) -> list[str]:
        """Names of the tensors in a checkpoint, in storage order.

        Args:
            block: path of the MoE block, such as ``model.layers.1.mlp``.
            experts: numbers of the experts that are wanted; a tensor that holds a layer's is named whatever they are.
        """
        ...

    def params(self) -> list[nn.Parameter]:
        """The parameters in storage order."""
        ...

    def bypassed(self) -> list[nn.Module]:
        """The modules whose forward is never called, as their parameters are read."""
        ...

    def owners(self) -> list[tuple[nn.Module, str]]:
        """The module that holds each parameter, and its name there, in storage order."""
        ...

    def sizes(self) -> tuple[int, int, int]:
        """(E, F, H)."""
        ...

    @staticmethod
    def gate_up_places(gate_up_E2FH: Tensor) -> Sequence[Tensor]:
        """The parts of ``[E,2F,H]`` that the gate and up parameters are, in their order."""
        ...

    @staticmethod
    def down_places(down_EHF: Tensor) -> Sequence[Tensor]:
        """The parts of ``[E,H,F]`` that the down parameters are, in their order."""
        ...

    def check(self) -> None:
        """Refuse parameters that cannot be stacked, quoting the first offender.

        Raises:
            TypeError: not plain parameters of one floating dtype on one device.
            ValueError: of shapes that do not fit together.
        """
        ...


class PerExpert:
    """A sequence of modules with ``gate_proj``, ``up_proj`` ([F,H]) and ``down_proj`` ([H,F]) linear layers."""

    period = 3
    key = re.compile(r"(.*\.mlp)\.experts\.\d+\.(?:gate|up|down)_proj\.weight")

    def __init__(self, experts: Sequence[nn.Module]):
        self.experts = experts

    @staticmethod
    def keys(block: str, experts: range) -> list[str]:
        """See `Layout.keys`."""
        return [f"{block}.experts.{number}.{name}.weight" for number in experts for name in PROJECTIONS]

    def params(self) -> list[nn.Parameter]:
        """Gate, up and down of each expert."""
        return [module._parameters[name] for module, name in self.owners()]  # type: ignore[misc]

    def bypassed(self) -> list[nn.Module]:
        """Their list, the experts, and their linear layers."""
        modules = [self.experts] if isinstance(self.experts, nn.Module) else []
        return [*modules, *self.experts, *(module for module, _ in self.owners())]

    def owners(self) -> list[tuple[nn.Module, str]]:
        """The linear layers."""
        return [(expert._modules[name], "weight") for expert in self.experts for name in PROJECTIONS]  # type: ignore[misc]

    def sizes(self) -> tuple[int, int, int]:
        """(E, F, H)."""
        inner, hidden = self.experts[0].gate_proj.weight.shape  # type: ignore[union-attr, misc]
        return len(self.experts), inner, hidden

    @staticmethod
    def gate_up_places(gate_up_E2FH: Tensor) -> Sequence[Tensor]:
        """Gate above up, expert by expert."""
        inner = gate_up_E2FH.shape[1] // 2
        return [part for expert in gate_up_E2FH.unbind(0) for part in expert.split(inner, dim=0)]

    @staticmethod
    def down_places(down_EHF: Tensor) -> Sequence[Tensor]:
        """Expert by expert."""
        return down_EHF.unbind(0)

    def _named(self) -> Iterator[tuple[str, Any]]:
        for index, expert in enumerate(self.experts):
            check_calls(f"experts[{index}]", expert)
            for name in PROJECTIONS:
                linear, where = getattr(expert, name, None), f"experts[{index}].{name}"
                check_linear(where, linear)
                yield f"{where}.weight", getattr(linear, "weight", None)

    def check(self) -> None:
        """See `Layout.check`."""
        named = list(self._named())
        check_tensors(named)
        _check_activation(self.experts[0])
        inner, hidden = named[0][1].shape if named[0][1].dim() == 2 else (-1, -1)
        _check_shapes(named, [(inner, hidden), (inner, hidden), (hidden, inner)] * len(self.experts))


class StackedExperts:
    """A module with parameters ``gate_proj``, ``up_proj`` [E,F,H] and ``down_proj`` [E,H,F] (dFactory)."""

    period = 3
    key = re.compile(r"(.*\.mlp)\.experts\.(?:gate|up|down)_proj")

    def __init__(self, experts: nn.Module):
        self.experts = experts

    @staticmethod
    def keys(block: str, experts: range) -> list[str]:
        """See `Layout.keys`."""
        return [f"{block}.experts.{name}" for name in PROJECTIONS]

    def params(self) -> list[nn.Parameter]:
        """Gate, up, down."""
        return [self.experts._parameters[name] for name in PROJECTIONS]  # type: ignore[misc]

    def bypassed(self) -> list[nn.Module]:
        """The module."""
        return [self.experts]

    def owners(self) -> list[tuple[nn.Module, str]]:
        """The module, three times."""
        return [(self.experts, name) for name in PROJECTIONS]

    def sizes(self) -> tuple[int, int, int]:
        """(E, F, H)."""
        num_experts, inner, hidden = self.experts.gate_proj.shape  # type: ignore[misc]
        return num_experts, inner, hidden

    @staticmethod
    def gate_up_places(gate_up_E2FH: Tensor) -> Sequence[Tensor]:
        """Gate above up in each expert, so both parameters have gaps between experts."""
        return gate_up_E2FH.tensor_split(2, dim=1)

    @staticmethod
    def down_places(down_EHF: Tensor) -> Sequence[Tensor]:
        """The tensor itself."""
        return (down_EHF,)

    def check(self) -> None:
        """See `Layout.check`."""
        check_calls("experts", self.experts)
        named = [(f"experts.{name}", getattr(self.experts, name, None)) for name in PROJECTIONS]
        check_tensors(named)
        _check_activation(self.experts)
        num_experts, inner, hidden = self.sizes()
        _check_shapes(named, [(num_experts, inner, hidden)] * 2 + [(num_experts, hidden, inner)])


class FusedExperts:
    """A block with parameters ``w1`` [E,2F,H], gate above up, and ``w2`` [E,H,F] (dInfer): stacked already."""

    period = 2
    key = re.compile(r"(.*\.mlp)\.(?:w1|w2)")

    def __init__(self, block: nn.Module):
        self.experts = block

    @staticmethod
    def keys(block: str, experts: range) -> list[str]:
        """See `Layout.keys`."""
        return [f"{block}.{name}" for name in FUSED]

    def params(self) -> list[nn.Parameter]:
        """Both tensors."""
        return [self.experts._parameters[name] for name in FUSED]  # type: ignore[misc]

    def bypassed(self) -> list[nn.Module]:
        """None: the block is what is patched."""
        return []

    def owners(self) -> list[tuple[nn.Module, str]]:
        """The block, twice."""
        return [(self.experts, name) for name in FUSED]

    def sizes(self) -> tuple[int, int, int]:
        """(E, F, H)."""
        num_experts, hidden, inner = self.experts.w2.shape  # type: ignore[misc]
        return num_experts, inner, hidden

    @staticmethod
    def gate_up_places(gate_up_E2FH: Tensor) -> Sequence[Tensor]:
        """The tensor itself."""
        return (gate_up_E2FH,)

    @staticmethod
    def down_places(down_EHF: Tensor) -> Sequence[Tensor]:
        """The tensor itself."""
        return (down_EHF,)

    def check(self) -> None:
        """See `Layout.check`."""
        named = [(name, getattr(self.experts, name, None)) for name in FUSED]
        check_tensors(named)
        num_experts, inner, hidden = self.sizes()
        _check_shapes(named, [(num_experts, 2 * inner, hidden), (num_experts, hidden, inner)])


LAYOUTS: dict[LayoutName, Any] = {"per_expert": PerExpert, "stacked": StackedExperts, "fused": FusedExperts}


def layout_of(keys: Iterable[str]) -> LayoutName:
    """How a checkpoint with tensors of these names holds its experts."""
    names = list(keys)
    for layout in ("stacked", "fused"):
        if any(map(LAYOUTS[layout].key.fullmatch, names)):
            return layout
    return "per_expert"


def is_expert(key: str) -> bool:
    """Whether a checkpoint's tensor of this name holds routed experts, in whatever layout."""
    return any(layout.key.fullmatch(key) for layout in LAYOUTS.values())


def stored_parts(
    layout: LayoutName, block: str, experts: range, gate_up_E2FH: Tensor, down_EHF: Tensor
) -> dict[str, Tensor]:
    """A block's tensors in a checkpoint, by name, and the part of the stacked tensors that each of them is.

    Args:
        layout: of the checkpoint.
        block: path of the MoE block, such as ``model.layers.1.mlp``.
        experts: numbers of the experts that the stacked tensors hold.
        gate_up_E2FH, down_EHF: the stacked tensors, on any device: on meta, the parts say shapes.
    """
    kind = LAYOUTS[layout]
    keys, period = kind.keys(block, experts), kind.period
    gate_up = [key for place, key in enumerate(keys) if place % period != period - 1]
    parts = dict(zip(gate_up, kind.gate_up_places(gate_up_E2FH), strict=True))
    return parts | dict(zip(keys[period - 1 :: period], kind.down_places(down_EHF), strict=True))


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


def _check_shapes(named: Sequence[tuple[str, Any]], expected: Sequence[tuple[int, ...]]) -> None:
    for (where, weight), shape in zip(named, expected, strict=True):
        if tuple(weight.shape) != shape:
            raise ValueError(f"{where} has shape {tuple(weight.shape)}: expected {shape}")
