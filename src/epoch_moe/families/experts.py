"""How a block holds its experts' weights; every family allows the same three layouts."""

from __future__ import annotations

from torch import Tensor, nn

from epoch_moe.experts.layouts import FUSED, PROJECTIONS, LayoutName

SHAPE = (
    "`experts` (a ModuleList of gate_proj/up_proj/down_proj MLPs, or one module with these as [experts, ...] "
    "parameters) or `w1` [experts, 2 x inner, hidden] and `w2` [experts, hidden, inner]"
)


def find_experts(block: nn.Module) -> tuple[LayoutName, int] | None:
    """The layout of a block's experts and their number, or None where it has none of a known shape."""
    experts = getattr(block, "experts", None)
    if isinstance(experts, nn.ModuleList):
        known = len(experts) > 0 and all(hasattr(experts[0], name) for name in PROJECTIONS)
        # `LocalExperts` holds a part of them.
        return ("per_expert", getattr(experts, "total", len(experts))) if known else None
    if isinstance(experts, nn.Module):
        num_experts = _count(experts, PROJECTIONS)
        return None if num_experts is None else ("stacked", num_experts)
    num_experts = _count(block, FUSED)
    return None if num_experts is None else ("fused", num_experts)


def _count(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first size that 3-D tensors of these names have in common, or None."""
    tensors = [getattr(module, name, None) for name in names]
    if not all(isinstance(t, Tensor) and t.dim() == 3 for t in tensors):
        return None
    counts = {t.shape[0] for t in tensors if t is not None}
    return counts.pop() if len(counts) == 1 else None
