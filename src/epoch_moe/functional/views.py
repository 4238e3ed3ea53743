"""Expert weights as a serving stack holds them: three layouts, one description, no copy.

Grouped products want one tensor per projection. An engine has loaded its weights in its own layout already; what
follows finds the stacked view of it, or says why there is none.

Shape suffixes: E experts, F expert inner size, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epoch_moe.checks import wrong
from epoch_moe.experts.views import ExpertViews

PerExpert = Sequence[Tensor]
"""One matrix per expert: equally spaced views of one storage."""
GateUp = Tensor | PerExpert | tuple[Tensor | PerExpert, Tensor | PerExpert]
"""Fused ``[E,2F,H]`` (gate above up) or E views ``[2F,H]``; or a pair (gate, up) of ``[E,F,H]`` or of E views."""


def expert_views(gate_up: GateUp, down: Tensor | PerExpert) -> ExpertViews:
    """Describe expert weights that lie in one of the three layouts.

    Args:
        gate_up: fused ``[E,2F,H]`` (an engine's ``w13``); a tuple of two stacks (gate, up) ``[E,F,H]``; or per expert:
            a list of E views ``[2F,H]``, or a tuple of two lists of E views ``[F,H]``.
        down: ``[E,H,F]`` (``w2``), or a list of E views ``[H,F]``.

    Per-expert views must lie in one storage at equal distances, as views of a stacked tensor do. Gates and ups whose
    halves alternate in one storage are recognised as fused. Describe a layer's weights once and pass the result to
    every `moe_forward`: walking over hundreds of views costs more than a small forward.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or matrices that no strides describe; stack
            those once with ``torch.stack``.
    """
    down_EHF = _stack("down", down)
    if isinstance(gate_up, tuple) and len(gate_up) == 2 and not _is_matrix_list(gate_up):
        gate_EFH, up_EFH = _stack("gate", gate_up[0]), _stack("up", gate_up[1])
        fused_E2FH = _interleaved(gate_EFH, up_EFH)
        projections = (gate_EFH, up_EFH) if fused_E2FH is None else (fused_E2FH,)
    else:
        projections = (_stack("gate_up", gate_up),)  # type: ignore[arg-type]
    views = ExpertViews("fused" if len(projections) == 1 else "separate", projections, down_EHF)
    _check(views)
    return views


def _is_matrix_list(value: Sequence[object]) -> bool:
    return all(isinstance(part, Tensor) and part.dim() == 2 for part in value)


def _check(views: ExpertViews) -> None:
    down_EHF = views.down_EHF
    num_experts, hidden, inner = down_EHF.shape
    rows = inner if views.kind == "separate" else 2 * inner
    for weight in views.projections:
        if tuple(weight.shape) != (num_experts, rows, hidden):
            raise ValueError(
                f"{views.kind} gate and up projections have shape {tuple(weight.shape)} with down "
                f"{tuple(down_EHF.shape)} = [experts, hidden, inner]: expected [{num_experts}, {rows}, {hidden}]"
            )
        if weight.dtype != down_EHF.dtype or weight.device != down_EHF.device:
            raise ValueError(
                f"gate and up projections are {weight.dtype} on {weight.device}, down is {down_EHF.dtype} on "
                f"{down_EHF.device}: all weights of a layer must agree"
            )
    if not down_EHF.is_floating_point():
        raise ValueError(f"expert weights are {down_EHF.dtype}: quantised experts are not supported")


def _stack(name: str, weights: Tensor | PerExpert) -> Tensor:
    """A 3-D tensor over the experts, without a copy."""
    if isinstance(weights, Tensor):
        if weights.layout != torch.strided:
            raise wrong(name, weights, "a dense tensor")
        if weights.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(weights.shape)}: expected [experts, rows, columns]")
        return weights
    if not isinstance(weights, Sequence) or isinstance(weights, (str, bytes)):
        raise wrong(name, weights, "a tensor over the experts, or a list of one matrix per expert")
    if not weights:
        raise ValueError(f"{name} is an empty list: expected one matrix per expert")
    for index, weight in enumerate(weights):
        if not isinstance(weight, Tensor) or weight.layout != torch.strided:
            raise wrong(f"{name}[{index}]", weight, "a dense matrix")
    first = weights[0]
    if first.dim() != 2:
        raise ValueError(f"{name}[0] has shape {tuple(first.shape)}: expected a matrix per expert")
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        raise ValueError(
            f"{name} is a list of tensors that require gradients, which a view over all of them would lose: run under "
            "torch.no_grad(), or pass one stacked tensor"
        )
    start = first.storage_offset()
    step = weights[1].storage_offset() - start if len(weights) > 1 else first.numel()
    for index, weight in enumerate(weights):
        if weight.shape != first.shape or weight.dtype != first.dtype or weight.device != first.device:
            raise ValueError(
                f"{name}[{index}] is {weight.dtype} {tuple(weight.shape)} on {weight.device}, {name}[0] is "
                f"{first.dtype} {tuple(first.shape)} on {first.device}: all experts of a layer must agree"
            )
        if (
            weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or weight.stride() != first.stride()
            or weight.storage_offset() != start + index * step
            or (index > 0 and step <= 0)
        ):
            raise ValueError(
                f"{name}[{index}] does not lie {index} equal steps behind {name}[0] in one storage, so no view covers "
                "all experts: stack them once (torch.stack) and pass the stack, or views of it"
            )
    return first.as_strided((len(weights), *first.shape), (step, *first.stride()), start)


def _interleaved(gate_EFH: Tensor, up_EFH: Tensor) -> Tensor | None:
    """The fused tensor ``[E,2F,H]`` whose halves these are, or None."""
    num_experts, inner, hidden = gate_EFH.shape
    halves = (
        gate_EFH.shape == up_EFH.shape
        and gate_EFH.dtype == up_EFH.dtype
        and gate_EFH.stride() == up_EFH.stride()
        and gate_EFH.untyped_storage().data_ptr() == up_EFH.untyped_storage().data_ptr()
        and up_EFH.storage_offset() == gate_EFH.storage_offset() + inner * gate_EFH.stride(1)
        and (num_experts == 1 or gate_EFH.stride(0) >= 2 * inner * gate_EFH.stride(1))
    )
    if not halves or (torch.is_grad_enabled() and (gate_EFH.requires_grad or up_EFH.requires_grad)):
        return None
    return gate_EFH.as_strided((num_experts, 2 * inner, hidden), gate_EFH.stride(), gate_EFH.storage_offset())
