"""`BlockSpec`: how a model family's MoE block is built.

Shape suffixes: H hidden, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from epoch_moe.checks import FLOAT_DTYPES, choice, instance, tensor
from epoch_moe.experts.bypassed import check_linear, check_router
from epoch_moe.experts.layouts import LAYOUTS, LayoutName
from epoch_moe.routing import RouterSpec


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

    Example:
        >>> from epoch_moe import BlockSpec, RouterSpec
        >>> spec = BlockSpec(
        ...     family="mine",
        ...     router=RouterSpec(kind="softmax", num_experts=64, top_k=8),
        ...     gate_weight="gate.weight",  # block.gate is nn.Linear(hidden, 64, bias=False)
        ...     gate_bias=None,
        ... )
        >>> spec.experts, spec.layout  # block.experts is a ModuleList of 64 MLPs
        ('experts', 'per_expert')
    """

    family: str
    router: RouterSpec
    gate_weight: str
    gate_bias: str | None
    experts: str = "experts"
    layout: LayoutName = "per_expert"
    shared: str | None = None
    returns_router: bool = False

    def __post_init__(self) -> None:
        instance("router", self.router, RouterSpec, "a RouterSpec")
        choice("layout", self.layout, tuple(LAYOUTS))

    def holder(self, block: nn.Module) -> nn.Module:
        """The module that holds the experts' parameters."""
        return LAYOUTS[self.layout].holder(block, self.experts)  # type: ignore[no-any-return]

    def check(self, block: nn.Module, here: int | None = None) -> None:
        """Refuse a block that is built in another way.

        Args:
            block: to be replaced.
            here: how many of its experts are in this process; None: not known yet.

        Raises:
            TypeError: it lacks an attribute that is named here, or has parameters that nothing here names.
            ValueError: its sizes are others.
        """
        kind = type(block).__name__
        layout = LAYOUTS[self.layout]
        names = ["gate_weight", "gate_bias", "shared"] + ["experts"] * (not layout.in_block)
        paths = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        for name, path in paths.items():
            try:
                _attribute(block, path)
            except AttributeError:
                raise TypeError(f"BlockSpec.{name}={path!r}: {kind} has no such attribute") from None
        try:
            count, _, hidden = layout(self.holder(block)).sizes()
        except (AttributeError, IndexError, TypeError, ValueError):
            raise TypeError(
                f"BlockSpec.layout={self.layout!r}: {kind} does not hold its experts so, see epoch_moe.experts.layouts"
            ) from None
        read = {path.partition(".")[0] for path in (*paths.values(), *layout.below(self.experts))}
        unread = [name for name, param in block.named_parameters() if name.partition(".")[0] not in read]
        if unread:
            raise TypeError(f"{kind} has the parameter {unread[0]}, of which BlockSpec says nothing: it would be lost")
        total = self.router.num_experts
        tensor(self.gate_weight, _attribute(block, self.gate_weight).data, FLOAT_DTYPES, (total, hidden))
        if self.gate_bias is not None:
            tensor(self.gate_bias, _attribute(block, self.gate_bias).data, FLOAT_DTYPES, (total,))
        if here is not None and count != here:
            raise ValueError(f"{kind} holds {count} experts: expected {here} of num_experts={total} in this process")

    def read_gate(self, block: nn.Module) -> tuple[Tensor, Tensor | None]:
        """The router weight ``[E,H]`` and expert bias ``[E]`` of a block.

        Raises:
            TypeError: the gate's forward says more than these two (an adapter was put on it, say).
        """
        if not torch.compiler.is_compiling():  # a traced forward sees the modules that there were
            path = self.gate_weight.rpartition(".")[0]
            (check_linear if self.router.kind == "softmax" else check_router)(path, block.get_submodule(path))
        bias = self.gate_bias
        return _attribute(block, self.gate_weight), None if bias is None else _attribute(block, bias)


def _attribute(module: nn.Module, path: str) -> Tensor:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value  # type: ignore[no-any-return]
